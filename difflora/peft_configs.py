"""PEFT's configs of LoHa, LoKr and OFT: its layers make factors of the sizes that the config says, or do not fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

from difflora.formats.errors import DiffLoRAError, some
from difflora.products import Hadamard, Kronecker
from difflora.rotations import InputRotation


def plain_number(value: float) -> float | int:
    """`value` as JSON keeps it: without a fraction where it has none."""
    return int(value) if value == int(value) else value


def common(values: Mapping[str, Any], component: str) -> tuple[Any, dict[str, Any]]:
    """The commonest value, and the patterns of the modules that have another."""
    usual = Counter(values.values()).most_common(1)[0][0]
    return usual, {_pattern(path, component): value for path, value in values.items() if value != usual}


def _short(path: str, component: str) -> str:
    """The path below the level of a CLIP that transformers 5 dropped: it ends the module's name in every version."""
    return path.removeprefix("text_model.") if component.startswith("text_encoder") else path


def _pattern(path: str, component: str) -> str:
    """A regular expression for this module alone; PEFT matches it at the end of the name, at a dot."""
    anchor = "" if component.startswith("text_encoder") else "^"
    return anchor + re.escape(_short(path, component))


def targets(paths: Mapping[str, Any], component: str) -> list[str] | str:
    """Module names, or one expression: PEFT takes a name without a layer number for the end of others too."""
    short = [_short(path, component) for path in paths]
    if all(any(piece.isdecimal() for piece in path.split(".")) for path in short):
        return short
    return "|".join(
        ("" if path == name else r"(?:.*\.)?") + re.escape(name) for path, name in zip(paths, short, strict=True)
    )


def _scales(
    ranks: Mapping[str, int], deltas: Mapping[str, Hadamard] | Mapping[str, Kronecker], component: str
) -> dict[str, Any]:
    rank, patterns = common(ranks, component)
    alphas = {path: plain_number(delta.scale * ranks[path]) for path, delta in deltas.items()}
    alpha, alpha_patterns = common(alphas, component)
    return {"r": rank, "alpha": alpha, "rank_pattern": patterns, "alpha_pattern": alpha_patterns}


def loha(deltas: Mapping[str, Hadamard], component: str) -> dict[str, Any]:
    """The fields of PEFT's LoHaConfig for these modules; DiffLoRAError if no one config is theirs."""
    ranks = {path: delta.rank for path, delta in deltas.items()}
    cores = {len(d.shape) > 2 and d.t1 is not None for d in deltas.values() if len(d.shape) > 2}
    if len(cores) > 1 or any(d.w1_b.shape[0] != d.w2_b.shape[0] for d in deltas.values()):
        raise DiffLoRAError(
            f"PEFT's LoHa has one rank in both factors and cores in all convolutions, not: {some(deltas)}."
        )
    return {"peft_type": "LOHA", "use_effective_conv2d": True in cores, **_scales(ranks, deltas, component)}


def lokr(deltas: Mapping[str, Kronecker], component: str) -> dict[str, Any]:
    """The fields of PEFT's LoKrConfig for these modules; DiffLoRAError if no one config is theirs."""
    sizes = {path: delta._sizes() for path, delta in deltas.items()}
    ranks = {p: d.rank or max(*sizes[p][0], *sizes[p][1][:2]) for p, d in deltas.items()}
    both = any(delta.w1 is None for delta in deltas.values())
    for factor in (-1, *sorted({one[0] for one, _ in sizes.values()})):
        if all(_peft_would_make(delta, sizes[path], ranks[path], factor, both) for path, delta in deltas.items()):
            core = any(delta.t2 is not None for delta in deltas.values())
            fields = {"decompose_factor": factor, "decompose_both": both, "use_effective_conv2d": core}
            return {"peft_type": "LOKR", **fields, **_scales(ranks, deltas, component)}
    raise DiffLoRAError(
        f"no one PEFT config makes the LoKr factors of {some(f'{component}.{path}' for path in deltas)}. Expected the "
        "same decomposition factor everywhere; save with layout='diffusers'."
    )


def _peft_would_make(
    delta: Kronecker, sizes: tuple[Sequence[int], Sequence[int]], rank: int, factor: int, both: bool
) -> bool:
    """Whether PEFT's LoKr layer of this config has factors of these sizes, and the same of them whole."""
    (ol, im), (ok, width, *_) = sizes
    whole_one = not (both and rank < max(ol, im) / 2)
    whole_two = rank >= max(ok, width) / 2
    split = _factors(ol * ok, factor) == (ol, ok) and _factors(im * width, factor) == (im, width)
    return split and whole_one == (delta.w1 is not None) and whole_two == (delta.w2 is not None)


def _factors(size: int, factor: int) -> tuple[int, int]:
    """How PEFT cuts a size in two: by `factor` if it divides, else by the largest divisor up to it and the root."""
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = isqrt(size) if factor < 0 else min(isqrt(size), factor)
    small = next(n for n in range(most, 0, -1) if size % n == 0)
    return small, size // small


def oft(deltas: Mapping[str, InputRotation], component: str) -> dict[str, Any]:
    """The fields of PEFT's OFTConfig for these modules; DiffLoRAError if no one config is theirs."""
    blocks, shared = {d.block for d in deltas.values()}, {d.r.shape[0] == 1 for d in deltas.values()}
    if len(blocks) > 1 or len(shared) > 1 or any(d.magnitude is not None for d in deltas.values()):
        raise DiffLoRAError(
            f"PEFT's OFT has blocks of one size, shared in all modules or none, and no magnitudes; not: {some(deltas)}."
            " Save with layout='diffusers'."
        )
    # 0.18 is where PEFT's series became what it is.
    fields = {"use_cayley_neumann": True, "num_cayley_neumann_terms": 5, "bias": "none", "peft_version": "0.18.0"}
    return {
        "peft_type": "OFT",
        "coft": False,
        "r": 0,
        "oft_block_size": blocks.pop(),
        "block_share": shared.pop(),
        **fields,
    }
