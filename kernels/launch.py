"""How the kernels of `lowrank` are launched, with tile sizes by shape."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from difflora.kernels import facts, lowrank
from difflora.kernels.reference import RANKS


def _precision(dtype: torch.dtype) -> str:
    """How products are formed: of fp32 numbers in three passes of tf32, exact to fp32; others are exact anyway."""
    return "tf32x3" if dtype == torch.float32 and torch.version.hip is None else "ieee"


def _power(number: int, least: int, most: int) -> int:
    return max(least, min(most, int(triton.next_power_of_2(number))))


def shrink(x: Tensor, a: Tensor, ids: Tensor, counts: Tensor, samples: Tensor, config: tuple[int, ...] = ()) -> Tensor:
    """`reference.shrink`, but that a request's absent ranks may be anything.  `config` overrides the tile sizes."""
    bank = facts.bank(ids)
    t = torch.empty(x.shape[0], a.shape[0], dtype=a.dtype, device=x.device)
    ranks = (ids.shape[1] if bank is None else bank.most) * RANKS
    if not ranks or not x.shape[0]:
        return t
    if x.stride(-1) != 1:
        x = x.contiguous()
    count, cols = x.shape
    high, wide, deep, stages, warps = config or _shrink_config(count, ranks, x.element_size())
    grid = (facts.tiles(samples, count, high), triton.cdiv(ranks, wide))
    with facts.on(x.device):
        lowrank.shrink[grid](
            x, a, t, ids, counts, samples, count, cols, x.stride(0), ids.shape[1], a.shape[0],
            BM=high, BR=wide, BK=deep, STAGES=stages, PRECISION=_precision(x.dtype), num_warps=warps,
        )  # fmt: skip
    return t


def _shrink_config(rows: int, ranks: int, size: int) -> tuple[int, ...]:
    high = 64 if rows > 2048 else 16
    return high, _power(ranks, 16, 64), 128 if size == 2 else 32, 4 if size == 2 else 3, 4


def expand(
    y: Tensor, t: Tensor, b: Tensor, entries: Tensor, scales: Tensor, counts: Tensor, samples: Tensor,
    config: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """`reference.expand` in place."""
    site = facts.site(entries)
    if not y.shape[0] or (site is not None and not site.most):
        return
    rows, cols = y.shape
    high, wide, deep, tiles, warps, stages = config or _expand_config(rows, y.element_size())
    grid = (triton.cdiv(cols, wide * tiles), facts.tiles(samples, rows, high))
    with facts.on(y.device):
        lowrank.expand[grid](
            y, t, b, entries, scales, counts, samples, rows, cols, y.stride(0), entries.shape[1], t.stride(0),
            BM=high, BN=wide, BR=deep, TILES=tiles, STAGES=stages, SINGLE=entries.shape[0] == 1,
            SHORT=site is not None and 0 < site.alone <= deep, PRECISION=_precision(b.dtype), num_warps=warps,
            num_stages=stages,
        )  # fmt: skip


def _expand_config(rows: int, size: int) -> tuple[int, ...]:
    return 64 if rows > 256 else 16, 64, 64 if size == 2 else 16, 1, 4, 1
