"""Which way is fastest for a layer's shape: measured by tests/benchmarks/layers.py, kept in plan.json.

`cublas` is two products of cuBLAS beside the layer's own; `gemm` is one kernel for the layer and its terms.  A shape
that was not measured takes cuBLAS.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from difflora.kernels.facts import Run


@dataclass(frozen=True, slots=True)
class Step:
    """The way for one layer, and the tile sizes of its kernel."""

    kernel: str
    config: tuple[int, ...] = ()


CUBLAS = Step("cublas")


def step(weight: Tensor, rows: int, runs: Sequence[Run]) -> Step:
    """The way that was fastest for this layer at so many rows, by the next larger number of ranks that was measured."""
    ranks = max((run.b.shape[0] for run in runs), default=0)
    return _step(weight.device, weight.dtype, rows, weight.shape[1], weight.shape[0], ranks) if ranks else CUBLAS


@functools.cache
def _step(device: torch.device, dtype: torch.dtype, rows: int, depth: int, cols: int, ranks: int) -> Step:
    if dtype not in (torch.bfloat16, torch.float16):
        return CUBLAS
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    fitting = {r: way for (a, *shape, r), way in _measured().items() if [a, *shape] == [arch, rows, depth, cols]}
    return fitting[min(r for r in fitting if r >= ranks)] if any(r >= ranks for r in fitting) else CUBLAS


@functools.cache
def _measured() -> dict[tuple[str, int, int, int, int], Step]:
    rows = json.loads(Path(__file__).with_name("plan.json").read_text())["steps"]
    return {
        (row["arch"], row["rows"], row["depth"], row["cols"], row["ranks"]): Step(row["kernel"], tuple(row["config"]))
        for row in rows
    }


def wide(rows: int, cols: int, runs: Sequence[Run]) -> bool:
    """Whether `lowrank.expand` is measured to be faster than cuBLAS (H200): few ranks on a wide output."""
    return rows > 1024 and cols >= 9216 and len(runs) == 1 and runs[0].b.shape[0] <= 64
