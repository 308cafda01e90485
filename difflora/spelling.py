"""The tensors of a delta under the names that files give them: LyCORIS' words for every kind, PEFT's for LoRA."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from difflora.deltas import Dense, LowRank
from difflora.functions import IA3, DoRA, GLoRA, Replacement
from difflora.products import Hadamard, Kronecker
from difflora.rotations import InputRotation, OutputRotation

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.kinds import Delta

# The last names of modules whose weights are tables, for which PEFT has words of its own.
_TABLES = frozenset(
    ("token_embedding", "position_embedding", "embed_tokens", "shared", "relative_attention_bias", "word_embeddings")
)
_ENDINGS: dict[type, dict[str, str]] = {
    LowRank: {"down": "lora_down.weight", "up": "lora_up.weight", "mid": "lora_mid.weight"},
    Hadamard: {name: f"hada_{name}" for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
    Kronecker: {name: f"lokr_{name}" for name in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
    IA3: {"weight": "weight", "on_input": "on_input"},
    Replacement: {"value": "set_weight"},
    OutputRotation: {"blocks": "oft_blocks", "rescale": "rescale"},
    InputRotation: {"r": "oft_R.weight", "scaled": "oft_R.scaled_oft"},
}


def is_table(path: str) -> bool:
    """Whether a module of this name is an embedding."""
    return path.rpartition(".")[2] in _TABLES


def tensor_of(value: float) -> Tensor:
    """A number as files keep it: fp32, or fp64 where fp32 does not hold it."""
    single = torch.tensor(value, dtype=torch.float32)
    return single if float(single) == value else torch.tensor(value, dtype=torch.float64)


def alpha_of(delta: Any) -> float:
    """The alpha with which alpha / rank is the delta's scale."""
    own = getattr(delta, "rslora", False) or getattr(delta, "r", None) is not None
    if delta.alpha is None or (own and delta.rank):
        return float(delta.rank) if delta.alpha is None else float(delta.scale * delta.rank)
    return float(delta.alpha)


def lycoris(delta: Delta, *, bias: bool = False, norms: bool = False) -> dict[str, Tensor]:
    """Ending -> tensor as LyCORIS, kohya and ComfyUI have them, with an alpha wherever one scales.

    `bias` says that the delta is of a module's bias; `norms` that the vectors of norms have LyCORIS' own endings.
    """
    if isinstance(delta, Dense):
        change = delta.diff if delta.scale == 1 else delta.diff.float() * delta.scale
        weight = "w_norm" if norms and change.ndim == 1 else "diff"
        return {("b_norm" if norms else "diff_b") if bias else weight: change}
    if isinstance(delta, DoRA):
        return {**lycoris(delta.inner), "dora_scale": _along(delta.magnitude, delta.by_input, len(delta.shape))}
    if isinstance(delta, GLoRA):
        four = dict(zip(("a1.weight", "a2.weight", "b1.weight", "b2.weight"), delta._pairs, strict=True))
        return four | ({} if delta.bm is None else {"bm.weight": delta.bm}) | _alpha(delta)
    endings = _ENDINGS[type(delta)]
    held = {f.name: getattr(delta, f.name) for f in fields(delta) if f.name in endings}
    if isinstance(delta, Kronecker) and not delta.rank and delta.scale != 1:
        held["w1"] = held["w1"].float() * delta.scale  # alpha means nothing where both factors are whole
    if isinstance(delta, LowRank) and delta.down.ndim > delta.up.ndim:
        held["up"] = delta.up.reshape(*delta.up.shape, *(1,) * (delta.down.ndim - 2))
    named = {endings[name]: tensor for name, tensor in held.items() if tensor is not None}
    if isinstance(delta, InputRotation) and delta.magnitude is not None:
        named["dora_scale"] = _along(delta.magnitude, delta.by_input, 2)
    return named | _alpha(delta)


def _alpha(delta: Any) -> dict[str, Tensor]:
    if isinstance(delta, OutputRotation):
        bound = delta.alpha if delta.alpha is not None else 0.0
        return {"alpha": bound if isinstance(bound, torch.Tensor) else tensor_of(bound)}
    if not isinstance(delta, LowRank | Hadamard | Kronecker | GLoRA):
        return {}
    plain = not getattr(delta, "rslora", False) and getattr(delta, "r", None) is None
    return {"alpha": delta.alpha if plain and isinstance(delta.alpha, torch.Tensor) else tensor_of(alpha_of(delta))}


def _along(magnitude: Tensor, by_input: bool, axes: int) -> Tensor:
    """The magnitudes along the axis of the weight that they are of: [out, 1, ...] or [1, in, ...]."""
    kept = 1 if by_input else 0
    if magnitude.ndim > 1 and magnitude.shape[kept] == magnitude.numel():
        return magnitude
    return magnitude.reshape([-1 if axis == kept else 1 for axis in range(axes)])


def peft(delta: Delta, path: str) -> dict[str, Tensor]:
    """Ending -> tensor of a LoRA or DoRA as PEFT and diffusers have them; alpha and rank are in the config."""
    pair: Any = delta.inner if isinstance(delta, DoRA) else delta
    assert isinstance(pair, LowRank) and pair.mid is None
    if is_table(path):
        named = {"lora_embedding_A": pair.up.transpose(0, 1), "lora_embedding_B": pair.down.transpose(0, 1)}
    else:
        kernel = (1,) * (pair.down.ndim - 2)
        named = {"lora_A.weight": pair.down, "lora_B.weight": pair.up.reshape(*pair.up.shape[:2], *kernel)}
    if isinstance(delta, DoRA):
        flat = delta.magnitude.flatten()
        # Without the last word diffusers leaves it out in text encoders.
        named["lora_magnitude_vector.weight"] = flat.reshape(1, -1, 1, 1) if pair.down.ndim > 2 else flat
    return named
