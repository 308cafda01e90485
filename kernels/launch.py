"""How the kernels of `lowrank` are launched: tile sizes by shape, and whether the terms go into the GEMM."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

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
    lowrank.expand[grid](
        y, t, b, entries, scales, counts, samples, rows, cols, y.stride(0), entries.shape[1], t.stride(0),
        BM=high, BN=wide, BR=deep, TILES=tiles, STAGES=stages, SINGLE=entries.shape[0] == 1,
        SHORT=site is not None and 0 < site.alone <= deep, PRECISION=_precision(b.dtype), num_warps=warps,
        num_stages=stages,
    )  # fmt: skip


def _expand_config(rows: int, size: int) -> tuple[int, ...]:
    return 64 if rows > 256 else 16, 64, 64 if size == 2 else 16, 1, 4, 1


def gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, t: Tensor, b: Tensor, entries: Tensor, scales: Tensor,
    counts: Tensor, samples: Tensor, config: tuple[int, ...],
) -> Tensor | None:  # fmt: skip
    """x W^T + bias and the terms in one kernel, rounded once: [..., out]; None where the copy engine cannot read it."""
    rows, (cols, depth) = x.numel() // x.shape[-1], weight.shape
    if not _fits(x, weight, cols, depth):
        return None
    high, wide, deep, ranks, group, stages, warps, flat = config
    flat_x = x.reshape(-1, depth)
    y = torch.empty(rows, cols, dtype=x.dtype, device=x.device)
    count = facts.tiles(samples, rows, high)
    programs = min(_processors(x.device), count * triton.cdiv(cols, wide))
    lowrank.gemm[(programs,)](
        TensorDescriptor(flat_x, [rows, depth], [flat_x.stride(0), 1], [high, deep]),
        TensorDescriptor(weight, [cols, depth], [weight.stride(0), 1], [wide, deep]),
        TensorDescriptor(y, [rows, cols], [cols, 1], [high, wide]),
        y, y if bias is None else bias, t, b, entries, scales, counts, samples, rows, cols, depth, entries.shape[1],
        t.stride(0), count,
        BM=high, BN=wide, BK=deep, BR=ranks, GROUP=group, STAGES=stages, BIAS=bias is not None, PROGRAMS=programs,
        FLAT=bool(flat), PRECISION=_precision(x.dtype), num_warps=warps,
    )  # fmt: skip
    return y.view(*x.shape[:-1], cols)


def _fits(x: Tensor, weight: Tensor, cols: int, depth: int) -> bool:
    """Whether the copy engine can read both: rows of whole 16-byte pieces."""
    return (
        x.dtype == weight.dtype
        and x.stride(-1) == 1 == weight.stride(1)
        and not any(size * x.element_size() % 16 for size in (cols, depth, weight.stride(0)))
        and not any(tensor.data_ptr() % 16 for tensor in (x, weight))
    )


@functools.cache
def _processors(device: torch.device) -> int:
    # The interpreter runs one program after the other.
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2
