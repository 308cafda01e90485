"""The kernels and what is captured and compiled, on a real GPU.

Run with `pytest -m gpu --record tests/gpu.json`, beside tests/test_gpu.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_tables as tables
import tiny
import torch
from torch import Tensor, nn

import difflora
from difflora import linear, ranks
from difflora.deltas import LowRank
from difflora.ranks import Part

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KERNELS = Path(__file__).parent / "kernels" / "interpreted.py"


def run(*before: str, only: str = "") -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(KERNELS)]
    command += ["-k", only] if only else []
    return subprocess.run(
        command, env=os.environ | {"DIFFLORA_DEVICE": "cuda"}, capture_output=True, text=True, timeout=120
    )


def test_every_kernel_against_fp32() -> None:
    done = run()
    assert done.returncode == 0, done.stdout[-3000:]


def test_memcheck_finds_nothing() -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not here")
    done = run(tool, "--tool", "memcheck", "--error-exitcode", "9", only="mixed and float16")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout


def part(rank: int, rows: int, cols: int, scale: float, dtype: torch.dtype) -> Part:
    down, up = torch.randn(rank, cols, device="cuda") / cols**0.5, torch.randn(rows, rank, device="cuda")
    source = LowRank(down=down.to(dtype), up=up.to(dtype))
    return Part(source, (source.down,), rank, 0, rows, scale)


@torch.no_grad()
def test_a_captured_graph_follows_the_adapters() -> None:
    torch.manual_seed(0)
    module = nn.Linear(256, 512, device="cuda", dtype=torch.bfloat16)
    room = ranks.arena(linear.shapes({"m": module}, nn.Sequential(module)), 8, 3, 4)
    linear.patch(module, (), 512, room.sites["m"])
    x = torch.randn(4, 96, 256, device="cuda", dtype=torch.bfloat16)
    module(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(x)
    for n in range(12):
        sets = [[part(4 + 9 * n, 512, 256, 0.5, torch.bfloat16)], [], [part(16, 512, 256, -1.0, torch.bfloat16)]]
        requests = [[0], [2], [0, 1, 2, 1], [1]][n % 4]
        room.fill({"m": sets})
        room.spread(requests)
        out.fill_(float("nan"))
        graph.replay()
        for row in range(4):
            request = requests[row * len(requests) // 4]
            wide = module.weight.float()
            for one in sets[request]:
                wide = wide + one.scale * one.source.up.float() @ one.source.down.float()  # type: ignore[attr-defined]
            wanted = x[row].float() @ wide.T + module.bias.float()
            assert float((out[row].float() - wanted).norm() / wanted.norm()) < 6e-3, (n, row)


@torch.no_grad()
def test_a_hundred_swaps_of_ranks_and_strengths_compile_nothing_again() -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    pipe = difflora.attach(tiny.flux_pipeline().to("cuda"), max_rank=128)
    model = pipe.transformer
    sizes = [4, 8, 16, 17, 31, 64, 100, 128]
    for n, rank in enumerate(sizes):
        pipe.load_lora(tables.adapter(model, rank, n), name=f"r{rank}", weight=0.0, mode="kernel")
    given = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in tables.inputs(model).items()}
    eager: dict[int, Tensor] = {}
    sets: list[dict[str, float]] = [{f"r{sizes[n % 8]}": 0.1 * (n % 7) - 0.2} for n in range(100)]
    for n, weights in enumerate(sets):
        pipe.set_loras(weights)
        eager[n] = model(**given)[0]
    model.compile_repeated_blocks(fullgraph=True)
    pipe.set_loras({})
    model(**given)
    graphs = counters["unique_graphs"]
    for n, weights in enumerate(sets):
        pipe.set_loras(weights)
        torch.testing.assert_close(model(**given)[0], eager[n], atol=2e-3, rtol=2e-3)
    assert counters["unique_graphs"] == graphs


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernel_mode_is_merged_mode(dtype: torch.dtype) -> None:
    found: dict[Any, Tensor] = {}
    for mode in ("kernel", "merged", "exact"):
        pipe = difflora.attach(tiny.flux_pipeline().to("cuda", torch.float32 if mode == "exact" else dtype))
        model = pipe.transformer
        for n, rank in enumerate((3, 17, 64)):
            tensors = {k: v * 0.3 for k, v in tables.adapter(model, rank, n).items()}
            pipe.load_lora(tensors, 0.5 + n, name=f"r{rank}", mode="merged" if mode == "exact" else mode)
        kind = torch.float32 if mode == "exact" else dtype
        given = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in tables.inputs(model).items()}
        given = {
            k: v.to(kind) if isinstance(v, Tensor) and v.is_floating_point() and "ids" not in k else v
            for k, v in given.items()
        }
        found[mode] = model(**given)[0].float()
    errors = {
        mode: float((found[mode] - found["exact"]).norm() / found["exact"].norm()) for mode in ("kernel", "merged")
    }
    assert errors["kernel"] <= 2 * errors["merged"] + 1e-5, errors


@torch.no_grad()
def test_a_thousand_switches_leave_the_weights_as_they_were() -> None:
    pipe = difflora.attach(tiny.flux_pipeline().to("cuda", torch.bfloat16))
    model = pipe.transformer
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for n in range(20):
        tensors = {k: v.bfloat16() for k, v in tables.adapter(model, 1 + 7 * n, n).items()}
        pipe.load_lora(tensors, 0.0, name=f"a{n}", mode="merged")
    made = torch.Generator().manual_seed(0)
    seen: dict[tuple[int, int], Tensor] = {}
    name = "transformer_blocks.0.attn.to_q.weight"
    for _ in range(1000):
        one, two = (int(n) for n in torch.randint(20, (2,), generator=made))
        pipe.set_loras({f"a{one}": 0.5, f"a{two}": -0.25} if one != two else {f"a{one}": 1.0})
        now = model.state_dict()[name]
        assert torch.equal(seen.setdefault((one, two), now.clone()), now), "the same set, the same bits"
    pipe.unload_loras()
    after = model.state_dict()
    assert all(torch.equal(after[name].view(torch.int16), before[name].view(torch.int16)) for name in before)


def test_what_overflows_is_rolled_back() -> None:
    pipe = difflora.attach(tiny.flux_pipeline().to("cuda", torch.float16))
    model = pipe.transformer
    tensors = {k: v.half() for k, v in tables.adapter(model, 4, 0).items()}
    pipe.load_lora(tensors, 0.5, name="style", mode="merged")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(difflora.DiffLoRAError, match="not finite"):
        pipe.set_loras({"style": 1e7})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    pipe.unload_loras()
