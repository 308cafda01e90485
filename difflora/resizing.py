"""Adapters of a smaller rank: truncated singular value decompositions of the changes, never of whole matrices in full.

For factors B A the decomposition is that of the small core R_b R_a^T of their QR decompositions, which has the same
singular values as the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from difflora.deltas import LowRank
from difflora.formats.errors import DiffLoRAError, some

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.kinds import Delta
    from difflora.types import Adapter

Method = Literal["sv_ratio", "sv_fro", "sv_cumulative"]
# How far one singular value of fp32 arithmetic is a value at all, and not its rounding.
_NOISE = 1e-6


@dataclass(frozen=True, slots=True)
class Resized:
    """What a resize did to one module: rank before and after, and the share of the Frobenius norm that is left."""

    rank: int
    new_rank: int
    retained: float


def factored(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(U [out, k], S [k], Vh [k, in]) of b @ a, k = min(r, out, in); a: [r, in], b: [out, r], fp32."""
    if a.shape[0] >= min(b.shape[0], a.shape[1]):
        u, s, vh = torch.linalg.svd(b @ a, full_matrices=False)
        return u, s, vh
    qb, rb = torch.linalg.qr(b)
    qa, ra = torch.linalg.qr(a.T)
    u, s, vh = torch.linalg.svd(rb @ ra.T, full_matrices=False)
    return qb @ u, s, vh @ qa.T


def kept(values: Tensor, method: Method | None, param: float, most: int) -> int:
    """How many singular values (falling) stay: at least 1, at most `most`, and by the method (sd-scripts, resize_lora).

    sv_ratio: those above S[0] / param; sv_cumulative: as many as sum to `param` of all; sv_fro: as many as have `param`
    of the Frobenius norm.
    """
    squares = values.double().square().cumsum(0)
    sums = values.double().cumsum(0)
    if method == "sv_ratio":
        count = int((values > values[0] / param).sum())
    elif method == "sv_cumulative":
        count = int((sums < param * sums[-1]).sum()) + 1
    elif method == "sv_fro":
        count = int((squares.sqrt() < param * squares[-1].sqrt()).sum()) + 1
    else:
        count = most
    real = max(1, int((values > values[0] * _NOISE).sum()))
    return max(1, min(count, most, real))


def truncated(a: Tensor, b: Tensor, choose: Callable[[Tensor], int]) -> tuple[Tensor, Tensor, float]:
    """(down [k, in], up [out, k], share of the norm retained): the best rank k of b @ a, balanced between the two."""
    u, s, vh = factored(a, b)
    count = choose(s)
    root = s[:count].sqrt()
    total = float(s.double().square().sum())
    retained = math.sqrt(float(s[:count].double().square().sum()) / total) if total else 1.0
    return root[:, None] * vh[:count], u[:, :count] * root, retained


def resize(
    adapter: Adapter,
    rank: int,
    *,
    conv_rank: int | None = None,
    method: Method | None = None,
    param: float | None = None,
    advance: Callable[[], None] | None = None,
) -> tuple[Adapter, dict[str, Resized]]:
    """The adapter with ranks of at most `rank` (`conv_rank` for convolutions), and what that did, by component.path.

    The scale alpha / r of every module stays, and so does its dtype; parts of a fused module stay parts of one pair.
    LoRA, LoCon (cores contracted), DyLoRA and LoHa are resized; other kinds have no rank to reduce and are refused.
    Raises DiffLoRAError for a rank, a method or a parameter that makes no sense.
    """
    ranks = (rank, rank if conv_rank is None else conv_rank)
    _check(ranks, method, param)
    _refuse_others(adapter)
    wholes: dict[tuple[int, ...], tuple[LowRank, Resized]] = {}
    told: dict[str, Resized] = {}
    components: dict[str, dict[str, Delta]] = {}
    for component, deltas in adapter.components.items():
        for path, delta in deltas.items():
            shared = (id(delta.down), id(delta.up), id(delta.mid)) if isinstance(delta, LowRank) else (id(delta),)
            if shared not in wholes:
                wholes[shared] = _resized(delta, ranks, method, param or 0.0)
            whole, told[f"{component}.{path}"] = wholes[shared]
            blocks = delta.blocks if isinstance(delta, LowRank) else ()
            components.setdefault(component, {})[path] = replace(whole, blocks=blocks)
            if advance:
                advance()
    return replace(adapter, components=components, name=f"{adapter.name}-rank{rank}", path=None), told


def _check(ranks: tuple[int, int], method: str | None, param: float | None) -> None:
    limits: Mapping[str | None, tuple[float, float]] = {
        "sv_ratio": (1.0, math.inf),
        "sv_fro": (0.0, 1.0),
        "sv_cumulative": (0.0, 1.0),
    }
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in ranks):
        raise DiffLoRAError(f"the ranks are {ranks}; expected whole numbers of at least 1.")
    if method is None:
        if param is not None:
            raise DiffLoRAError(f"param={param!r} goes with a method; expected one of {some(filter(None, limits))}.")
        return
    if method not in limits:
        raise DiffLoRAError(f"method={method!r} is not known; expected one of {some(limits)}.")
    low, high = limits[method]
    if param is None or not low < param <= high:
        raise DiffLoRAError(f"{method} takes a param above {low:g}, at most {high:g}; it got {param!r}.")


def _refuse_others(adapter: Adapter) -> None:
    others = [
        f"{component}.{path} ({delta.kind})"
        for component, deltas in adapter.components.items()
        for path, delta in deltas.items()
        if delta.needs_base or delta.low_rank() is None
    ]
    if others:
        raise DiffLoRAError(
            f"{adapter.source}: {some(others)} has no rank that can be reduced. Expected LoRA, LoCon, DyLoRA or LoHa."
        )


def _resized(delta: Delta, ranks: tuple[int, int], method: Method | None, param: float) -> tuple[LowRank, Resized]:
    whole = replace(delta, blocks=()) if isinstance(delta, LowRank) else delta
    pair = whole.low_rank()
    assert pair is not None
    shape, dtype = whole.shape, _dtype(delta)
    most = min(ranks[len(shape) > 2 and any(size > 1 for size in shape[2:])], pair[0].shape[0])
    down, up, retained = truncated(*pair, lambda values: kept(values, method, param, most))
    count = down.shape[0]
    alpha = None if delta.alpha is None else whole.scale * count
    ends = (1,) * (len(shape) - 2)
    new = LowRank(down.reshape(count, *shape[1:]).to(dtype), up.reshape(*up.shape, *ends).to(dtype), alpha=alpha)
    return new, Resized(delta.rank, count, retained)


def _dtype(delta: Delta) -> torch.dtype:
    """The dtype of the factors; fp16 for fp8, which no decomposition keeps."""
    stored = delta.down.dtype if isinstance(delta, LowRank) else torch.float32
    return torch.float16 if stored.itemsize == 1 else stored
