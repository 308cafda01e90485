"""All kinds of adapter: the closed union, and the delta that tensors of a kind make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from difflora.deltas import Cut, Dense, LowRank
from difflora.functions import IA3, DoRA, GLoRA, Replacement
from difflora.products import Hadamard, Kronecker
from difflora.rotations import InputRotation, OutputRotation

if TYPE_CHECKING:
    from torch import Tensor

    Delta = (
        LowRank | Hadamard | Kronecker | Dense | Cut | GLoRA | IA3 | Replacement | DoRA | OutputRotation | InputRotation
    )

# The kinds whose roles are the fields of a class.
_CLASSES: Mapping[str, Any] = {
    "lora": LowRank,
    "lora_embedding": LowRank,
    "loha": Hadamard,
    "lokr": Kronecker,
    "glora": GLoRA,
    "ia3": IA3,
    "set": Replacement,
    "oft": OutputRotation,
}
_UNSCALED = frozenset(("diff", "ia3", "set", "oft_v2"))


def build(
    kind: str,
    held: Mapping[str, Tensor],
    *,
    alpha: float | None = None,
    rslora: bool = False,
    rank: int | None = None,
) -> Delta:
    """The delta that tensors of this kind, by role, make; nothing is copied or multiplied.

    `alpha` and `rslora` are those of a PEFT config, where the file has no alpha of its own; `rank` is the config's, by
    which PEFT scales a LoKr whatever its factors are.
    """
    roles = {role: tensor for role, tensor in held.items() if role not in ("magnitude", "dora_scale", "alpha")}
    # A rotation's alpha is a bound, which only the file itself has.
    own = held.get("alpha", None if kind == "oft" else alpha)
    scale: dict[str, Any] = {} if kind in _UNSCALED else {"alpha": own}
    if kind in ("lora", "lora_embedding"):
        scale["rslora"] = rslora
    if kind == "lokr" and "alpha" not in held:
        scale["r"] = rank
    if kind in ("diff", "lora_bias"):
        ranks = int(held["down"].shape[0]) if kind == "lora_bias" and "down" in held else 0
        return Dense(held["diff"], rank=ranks, rslora=rslora, **scale)
    if kind == "oft_v2":
        vector, by_input = _magnitude(held)
        return InputRotation(**roles, magnitude=vector, by_input=by_input)
    if kind == "lora_embedding":
        # PEFT's table delta is (B A)^T for a weight [tokens, width]: the factors swap places.
        roles = {"down": held["up"].transpose(0, 1), "up": held["down"].transpose(0, 1)}
    inner = _CLASSES[kind](**roles, **scale)
    vector, by_input = _magnitude(held, inner.shape[0], transposed=kind == "lora_embedding")
    return inner if vector is None else DoRA(inner, vector, by_input)


def _magnitude(
    held: Mapping[str, Tensor], rows: int | None = None, transposed: bool = False
) -> tuple[Tensor | None, bool]:
    """The magnitudes, and whether they are those of the columns of a weight with that many rows (None: not known).

    [1, in, ...] is, [out, 1, ...] and [n] are not.  PEFT decomposes an embedding's table `transposed`: its vector has
    one number a dimension, whose norm is over all tokens (tuners/lora/dora.py, DoraEmbeddingLayer).
    """
    if "magnitude" in held:
        return held["magnitude"], transposed
    vector = held.get("dora_scale")
    if vector is None or vector.ndim < 2 or vector.shape[0] != 1:
        return vector, False
    return vector, vector.numel() > 1 or rows not in (1, None)
