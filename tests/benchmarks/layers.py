"""One layer at a time on a GPU: each kernel at several tile sizes beside cuBLAS, the PEFT form and addmm.

    python tests/benchmarks/layers.py [OUT.json]

Times are medians of graph replays over three input sets, in microseconds; each result is checked against fp32 first.
docs/performance.md says what was made of it; the record beside this file has a GEMM kernel too, which is gone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from difflora import ranks
from difflora.deltas import LowRank
from difflora.kernels import launch

SHAPES = [
    (4608, 3072, 3072),
    (4608, 3072, 12288),
    (4608, 15360, 3072),
    (4096, 3072, 3072),
    (4096, 3072, 12288),
    (4096, 12288, 3072),
    (512, 3072, 3072),
    (512, 3072, 12288),
    (512, 12288, 3072),
    (1, 3072, 18432),
]
WIDE = [(4608, 3072, 9216), (4608, 3072, 21504), (4096, 3072, 9216)]
SHRINK = [(64, 64, 128, 4, 4), (64, 128, 64, 4, 4)]  # fmt: skip
EXPAND = [
    *((64, 64, 64, 1, 4, 1), (64, 64, 64, 4, 4, 2), (64, 64, 64, 8, 4, 3), (128, 64, 64, 1, 4, 1)),
    *((128, 64, 64, 4, 4, 2), (128, 64, 64, 8, 4, 3), (32, 64, 64, 1, 4, 1), (64, 32, 64, 1, 2, 1)),
    *((64, 128, 64, 2, 4, 2), (32, 128, 64, 1, 4, 1), (64, 128, 64, 1, 4, 1), (64, 64, 128, 1, 4, 1)),
    *((16, 256, 64, 1, 4, 1), (16, 64, 64, 1, 2, 1), (128, 128, 64, 1, 8, 1), (128, 128, 64, 2, 8, 2)),
]


def timed(run: Callable[[int], Any], sets: int = 3, repeats: int = 5) -> float:
    """Median microseconds of one call, by replaying a graph of 3 x `sets` calls."""
    for n in range(sets):
        run(n)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    calls = 3 * sets
    with torch.cuda.graph(graph):
        for n in range(calls):
            run(n % sets)
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times[2:])[repeats // 2]


def layer(rows: int, depth: int, cols: int, rank: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    device = torch.device("cuda")
    blocks = -(-rank // 16)
    room = ranks.arena({"m": ranks.Shape("m", cols, depth, dtype, device)}, blocks, 1, 1)
    a = (torch.randn(rank, depth, device=device) / depth**0.5).to(dtype)
    b = torch.randn(cols, rank, device=device).to(dtype)
    factors = LowRank(down=a, up=b)
    room.fill({"m": [[ranks.Part(factors, (a,), rank, 0, cols, 0.5)]]})
    bank, site = room.banks["m"], room.sites["m"]
    weights = [(torch.randn(cols, depth, device=device) / depth**0.5).to(dtype) for _ in range(3)]
    xs = [torch.randn(rows, depth, device=device).to(dtype) for _ in range(3)]
    tables = (site.b, site.entries, site.scales, site.counts, room.samples)
    ts = [launch.shrink(x, bank.a, bank.ids, bank.counts, room.samples) for x in xs]
    plain = [F.linear(x, a) for x in xs]
    truth = xs[0].float() @ weights[0].float().T + 0.5 * (xs[0].float() @ a.float().T) @ b.float().T
    usual = F.linear(xs[0], weights[0]) + F.linear(F.linear(xs[0], a), b) * 0.5
    bound = 2 * float((usual.float() - truth).norm() / truth.norm())
    found: dict[str, Any] = {"rows": rows, "depth": depth, "cols": cols, "rank": rank, "bound": bound}
    found["base"] = timed(lambda n: F.linear(xs[n], weights[n]))
    found["peft"] = timed(lambda n: F.linear(xs[n], weights[n]) + F.linear(F.linear(xs[n], a), b) * 0.5)
    found["shrink_cublas"] = timed(lambda n: F.linear(xs[n], a))
    found["cublas_addmm"] = timed(lambda n: F.linear(xs[n], weights[n]).addmm_(plain[n], b.T, alpha=0.5))
    ys = [F.linear(x, w) for x, w in zip(xs, weights, strict=True)]
    for config in SHRINK:
        if config[1] > 2 * max(rank, 32) or (rows < 128 and config[0] > 16):
            continue
        _try(
            found,
            f"shrink {config}",
            lambda n, c=config: launch.shrink(xs[n], bank.a, bank.ids, bank.counts, room.samples, c),
        )
    for config in EXPAND:
        if rows < 128 and config[0] > 16:
            continue
        y = F.linear(xs[0], weights[0])
        launch.expand(y, ts[0], *tables, config)
        error = float((y.float() - truth).norm() / truth.norm())
        assert error <= bound, (config, error, bound)
        _try(found, f"expand {config}", lambda n, c=config: launch.expand(ys[n], ts[n], *tables, c))
        _try(
            found,
            f"cublas_expand {config}",
            lambda n, c=config: launch.expand(F.linear(xs[n], weights[n]), ts[n], *tables, c),
        )
    return found


def _try(found: dict[str, Any], name: str, run: Callable[[int], Any]) -> None:
    try:
        found[name] = timed(run)
    except Exception as error:
        found[name] = str(error)[:80]


def best(found: dict[str, Any], kind: str) -> str:
    times = {name: value for name, value in found.items() if name.startswith(kind + " ") and isinstance(value, float)}
    name = min(times, key=times.__getitem__, default="")
    return f"{times[name]:6.1f} {name.removeprefix(kind)}" if name else "-"


def main(out: str | None) -> None:
    rows = []
    cases = [(shape, rank) for shape in SHAPES for rank in (64, 112)] + [(shape, 64) for shape in WIDE]
    cases += [((4608, 3072, 3072), 256), ((4096, 3072, 3072), 192)]
    for shape, rank in cases:
        found = layer(*shape, rank)
        rows.append(found)
        texts = [f"{kind} {best(found, kind)}" for kind in ("shrink", "expand", "cublas_expand")]
        plain = " ".join(f"{k} {found[k]:.1f}" for k in ("base", "peft", "shrink_cublas", "cublas_addmm"))
        print(f"{shape} r={rank}: {plain} | " + " | ".join(texts), flush=True)
    record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "layers": rows}
    if out:
        Path(out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
