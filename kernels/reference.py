"""The operations in plain torch: the path of every device without a kernel, and what kernels are tested against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


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
