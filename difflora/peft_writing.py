"""Adapters in PEFT's words: which changes it can hold, and the config that gives their ranks, alphas and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from difflora.deltas import Dense, LowRank, number
from difflora.formats.errors import DiffLoRAError, some
from difflora.functions import DoRA
from difflora.peft_configs import common, loha, lokr, oft, plain_number, targets
from difflora.products import Hadamard, Kronecker
from difflora.rotations import InputRotation
from difflora.spelling import alpha_of, is_table, lycoris, peft

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.kinds import Delta

Deltas = Mapping[str, "Delta"]
_BIAS = ".bias"
_CONFIGS: Mapping[type, Callable[[Any, str], dict[str, Any]]] = {Hadamard: loha, Kronecker: lokr, InputRotation: oft}


def loras(deltas: Deltas) -> Deltas:
    """The changes of a component that one LoRA config of PEFT can hold: pairs, all or none with magnitudes and biases.

    Biases are there under their own paths.
    """
    pairs = {path: delta for path, delta in deltas.items() if _is_pair(delta, path)}
    bare = {path: delta for path, delta in pairs.items() if not isinstance(delta, DoRA)}
    chosen = bare or pairs
    biases = {path: d for path, d in deltas.items() if isinstance(d, Dense) and path.endswith(_BIAS)}
    beside = {path: d for path, d in biases.items() if _is_beside(d, chosen.get(path.removesuffix(_BIAS)))}
    return {**chosen, **beside} if len(beside) == len(chosen) else chosen


def _is_pair(delta: Delta, path: str) -> bool:
    pair: Any = delta.inner if isinstance(delta, DoRA) else delta
    if not isinstance(pair, LowRank) or pair.mid is not None or (pair.alpha is not None and number(pair.alpha) <= 0):
        return False
    return not isinstance(delta, DoRA) or delta.by_input == is_table(path)


def _is_beside(bias: Dense, pair: Delta | None) -> bool:
    """Whether a bias is scaled as its pair is."""
    return pair is not None and (bias.rank > 0 or bias.scale == 1) and bias.scale == pair.scale


def lora_tensors(deltas: Deltas) -> dict[str, Tensor]:
    """Name -> tensor of what `loras` gives."""
    found: dict[str, Tensor] = {}
    for path, delta in deltas.items():
        if isinstance(delta, Dense):
            found[f"{path.removesuffix(_BIAS)}.lora_B.bias"] = delta.diff
        else:
            found |= {f"{path}.{ending}": tensor for ending, tensor in peft(delta, path).items()}
    return found


def lora_config(deltas: Deltas, component: str) -> dict[str, Any]:
    """The fields of PEFT's LoraConfig that say how `loras` act."""
    pairs = {path: delta for path, delta in deltas.items() if not isinstance(delta, Dense)}
    inner: dict[str, Any] = {path: d.inner if isinstance(d, DoRA) else d for path, d in pairs.items()}
    root = all(d.rslora and d.alpha is not None for d in inner.values())
    alphas = {path: number(d.alpha) if root else alpha_of(d) for path, d in inner.items()}
    ranks, patterns = common({path: d.rank for path, d in inner.items()}, component)
    alpha, alpha_patterns = common({path: plain_number(a) for path, a in alphas.items()}, component)
    return {
        "r": ranks,
        "lora_alpha": alpha,
        "rank_pattern": patterns,
        "alpha_pattern": alpha_patterns,
        "target_modules": targets(pairs, component),
        "use_rslora": root,
        "use_dora": any(isinstance(d, DoRA) for d in pairs.values()),
        "lora_bias": len(deltas) > len(pairs),
    }


def whole(deltas: Deltas, component: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, config) of a whole component as PEFT saves it; DiffLoRAError, by kind, for what PEFT cannot hold."""
    held = loras(deltas)
    if held:
        _refuse_rest({p: d for p, d in deltas.items() if p not in held}, component, "LoRA")
        return lora_tensors(held), {"peft_type": "LORA", "bias": "none", **lora_config(held, component)}
    for kind, config in _CONFIGS.items():
        own = {path: delta for path, delta in deltas.items() if isinstance(delta, kind)}
        if own:
            _refuse_rest({p: d for p, d in deltas.items() if p not in own}, component, kind.__name__)
            fields = config(own, component)
            bare = {p: replace(d, r=None) if isinstance(d, Kronecker) else d for p, d in own.items()}
            tensors = {f"{p}.{end}": t for p, d in bare.items() for end, t in lycoris(d).items() if end != "alpha"}
            return _unscaled(tensors, own), {"target_modules": targets(own, component), **fields}
    _refuse_rest(deltas, component, "any adapter")
    raise AssertionError("a component without changes")


def _refuse_rest(rest: Deltas, component: str, main: str) -> None:
    if rest:
        kinds = some(sorted({delta.kind for delta in rest.values()}))
        raise DiffLoRAError(
            f"a PEFT folder cannot hold {kinds} beside {main}: {some(f'{component}.{path}' for path in rest)}. One "
            "has one kind (LoRA, DoRA of all modules or none, LoHa, LoKr, OFT); save with layout='diffusers'."
        )


def _unscaled(tensors: dict[str, Tensor], deltas: Deltas) -> dict[str, Tensor]:
    """OneTrainer's rotations at PEFT's scale: it stores the numbers times 2 sqrt(b - 1)."""
    for path, delta in deltas.items():
        flag = tensors.pop(f"{path}.oft_R.scaled_oft", None)
        if isinstance(delta, InputRotation) and flag is not None and bool(flag.item()):
            tensors[f"{path}.oft_R.weight"] = delta.r.float() / (2 * (delta.block - 1) ** 0.5)
    return tensors
