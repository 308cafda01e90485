"""Kernel mode by cuBLAS alone, which is as fast as a kernel where all rows of a batch have the same adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from difflora.kernels.facts import Run


def wide(rows: int, cols: int, runs: Sequence[Run]) -> bool:
    """Whether `lowrank.expand` is measured to be faster (H200): one product of few ranks on a wide output."""
    return rows > 1024 and cols >= 9216 and len(runs) == 1 and runs[0].b.shape[0] <= 64


def product(y: Tensor, t: Tensor, run: Run) -> None:
    """y[:, rows] += alpha * (t[:, columns] * scales) @ b, in place; y: [rows, out], t: [rows, ranks]."""
    part = t if run.columns.stop - run.columns.start == t.shape[1] else t[:, run.columns]
    if run.scales is not None:
        part = torch.mul(part, run.scales, out=torch.empty_like(part))
    whole = y if run.b.shape[1] == y.shape[1] else y[:, run.rows]
    whole.addmm_(part, run.b, alpha=run.alpha)
