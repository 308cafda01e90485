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


def merge(base: Tensor, a: Tensor, blocks: Iterable[Block]) -> Tensor:
    """W + sum(scale * b @ a), summed in fp32 (fp64 for such a base) and rounded once; deterministic for one device."""
    flat = base.flatten(1)
    wide = flat if flat.dtype == torch.float64 else flat.float()
    return (wide + delta(a, blocks, flat.shape[0])).to(base.dtype).view(base.shape)


def low_rank(x: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """((x a^T) * scale) b^T in the dtype of a: [..., out]; x: [..., in], a: [r, in], b: [out, r], scale: []."""
    return F.linear(F.linear(x.to(a.dtype), a) * scale, b)
