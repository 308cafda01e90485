"""The operations in plain torch: the path of every device without a kernel, and what kernels are tested against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Kernel mode's ranks come in blocks of this many.
RANKS = 16
# The numbers of an entry, one for each low-rank term of a module: the first column of t that it reads, over 16; where
# its b lies; the output rows [start, stop) that it is for; how far its ranks lie apart; and its ranks, a multiple of
# 16.  Rank j's number for output row n is b[(place + j * stride) * 8 + n].
ENTRY = 6


class Block(NamedTuple):
    """Rows [start, stop) of the output read ranks [first, last) of a: scale * b @ a[first:last]."""

    start: int
    stop: int
    first: int
    last: int
    b: Tensor
    scale: float


def delta(a: Tensor, blocks: Iterable[Block], rows: int) -> Tensor:
    """sum(scale * b @ a) over the blocks: fp32 [rows, a.shape[1]]; a: fp32 [R, in], each b: fp32 [stop - start, r]."""
    total = torch.zeros(rows, a.shape[1], dtype=torch.float32, device=a.device)
    for block in blocks:
        total[block.start : block.stop].addmm_(block.b, a[block.first : block.last], alpha=block.scale)
    return total


def merge(base: Tensor, a: Tensor | None, blocks: Iterable[Block], more: Tensor | None = None) -> Tensor:
    """W + sum(scale * b @ a) + more, summed in fp32 (fp64 for such a base), rounded once; deterministic for one device.

    `more` has the shape of the base; without `a` there are no blocks.
    """
    wide = base if base.dtype == torch.float64 else base.float()
    if a is not None:
        wide = wide + delta(a, blocks, base.shape[0]).view(base.shape)
    return (wide if more is None else wide + more).to(base.dtype)


def low_rank(x: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """((x a^T) * scale) b^T in the dtype of a: [..., out]; x: [..., in], a: [r, in], b: [out, r], scale: []."""
    return F.linear(F.linear(x.to(a.dtype), a) * scale, b)


def runs(samples: Tensor, rows: int) -> list[tuple[slice, int]]:
    """(rows of the input, request) of each sample; samples: int32 [1 + ...], a count and each sample's request."""
    count, *requests = samples.tolist()
    if rows % count:
        raise ValueError(f"an input of {rows} rows does not divide into the batch's {count} samples.")
    each = rows // count
    return [(slice(n * each, (n + 1) * each), requests[n]) for n in range(count)]


def shrink(x: Tensor, a: Tensor, ids: Tensor, counts: Tensor, samples: Tensor) -> Tensor:
    """t: [rows, ranks of a] in the dtype of a: x . a[j] for the ranks j that a row's request has, else 0.

    x: [rows, in]; a: [ranks, in]; ids: int32 [requests, blocks], the blocks of 16 ranks that act; counts: [requests].
    """
    t = torch.zeros(x.shape[0], a.shape[0], dtype=a.dtype, device=x.device)
    for here, request in runs(samples, x.shape[0]):
        for ranks in _active(ids, counts, request):
            t[here, ranks] = F.linear(x[here], a[ranks])
    return t


def unshrink(dt: Tensor, a: Tensor, ids: Tensor, counts: Tensor, samples: Tensor) -> Tensor:
    """The gradient of `shrink` with respect to x."""
    dx = torch.zeros(dt.shape[0], a.shape[1], dtype=a.dtype, device=dt.device)
    for here, request in runs(samples, dt.shape[0]):
        for ranks in _active(ids, counts, request):
            dx[here] += dt[here, ranks] @ a[ranks]
    return dx


def _active(ids: Tensor, counts: Tensor, request: int) -> list[slice]:
    blocks = ids[request, : int(counts[request])].tolist()
    return [slice(block * RANKS, (block + 1) * RANKS) for block in blocks]


class Term(NamedTuple):
    """An entry, read: its columns of t, its output rows, its b [ranks, rows], its scale."""

    columns: slice
    rows: slice
    b: Tensor
    scale: Tensor


def terms(b: Tensor, entries: Tensor, scales: Tensor, counts: Tensor, request: int) -> list[Term]:
    """What acts on a module for one request."""
    found: list[Term] = []
    for number, entry in enumerate(entries[request, : int(counts[request])].tolist()):
        column, place, start, stop, stride, ranks = entry
        first = (place + start // 8) * 8
        lines = b[first : first + ranks * stride * 8].view(ranks, -1)[:, start % 8 :][:, : stop - start]
        columns = slice(column * RANKS, column * RANKS + ranks)
        found.append(Term(columns, slice(start, stop), lines, scales[request, number]))
    return found


def expand(y: Tensor, t: Tensor, b: Tensor, entries: Tensor, scales: Tensor, counts: Tensor, samples: Tensor) -> Tensor:
    """y + (t * scale) b^T over the entries of each row's request, summed in fp32, rounded once; y: [rows, out]."""
    total = y.to(torch.float32, copy=True)
    for here, request in runs(samples, y.shape[0]):
        for term in terms(b, entries, scales, counts, request):
            total[here, term.rows] += (t[here, term.columns] * term.scale).to(b.dtype).float() @ term.b.float()
    return total.to(y.dtype)


def spread(
    dy: Tensor, b: Tensor, entries: Tensor, scales: Tensor, counts: Tensor, samples: Tensor, *, like: Tensor
) -> Tensor:
    """The gradient of `expand` with respect to t, whose shape is that of `like`."""
    dt = torch.zeros_like(like)
    for here, request in runs(samples, dy.shape[0]):
        for term in terms(b, entries, scales, counts, request):
            dt[here, term.columns] += (dy[here, term.rows].to(b.dtype) @ term.b.T) * term.scale
    return dt
