"""The kernels against fp32.

`test_interpreted` runs this in a process of its own, in Triton's interpreter on a CPU, `test_gpu_kernels` on a GPU
(DIFFLORA_DEVICE=cuda).  The interpreter knows no bfloat16 products; fp16 and fp32 stand for all there.  Every output is
poisoned beforehand and lies between guard zones that must stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from difflora import ranks
from difflora.deltas import LowRank
from difflora.kernels import launch, merging, ops, reference
from difflora.ranks import Arena, Part, Shape

POISON = 1e30
DEVICE = torch.device(os.environ.get("DIFFLORA_DEVICE", "cpu"))
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]


@pytest.fixture(autouse=True)
def _here() -> Iterator[None]:
    with torch.device(DEVICE), torch.no_grad():
        yield


def part(rank: int, cols: int, start: int, stop: int, scale: float) -> Part:
    source = LowRank(down=torch.randn(rank, cols) / cols**0.5, up=torch.randn(stop - start, rank))
    return Part(source, (source.down,), rank, start, stop, scale)


def room(sets: Sequence[Sequence[Part]], rows: int, cols: int, dtype: torch.dtype) -> Arena:
    shape = Shape("bank", rows, cols, dtype, DEVICE)
    made = ranks.arena({"site": shape}, 24, len(sets), 8)
    made.fill({"site": sets})
    return made


def dense(parts: Sequence[Part], rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """The change of the weight, of factors as the kernels hold them: in `dtype`."""
    total = torch.zeros(rows, cols)
    for one in parts:
        a, b = (tensor.to(dtype).float() for tensor in one.source.low_rank() or ())
        total[one.start : one.stop] += one.scale * b @ a
    return total


def guarded(rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(a tensor inside a larger one, the larger one), all of it poisoned."""
    whole = torch.full((rows + 4, cols), 3e4 if dtype == torch.float16 else POISON, dtype=dtype)
    return whole[2:-2], whole


def intact(whole: Tensor) -> bool:
    edge = torch.cat([whole[:2], whole[-2:]])
    return bool((edge == whole[0, 0]).all()) and bool(whole[0, 0] > 1e4)


def check(found: Tensor, truth: Tensor, usual: Tensor) -> None:
    """No further from the truth than twice what plain torch is at this dtype."""
    bound = 2 * float((usual.float() - truth).norm()) + 1e-6 * float(truth.norm())
    assert float((found.float() - truth).norm()) <= bound


def plain(x: Tensor, sets: Sequence[Sequence[Part]], requests: Sequence[int], y: Tensor) -> Tensor:
    """y + ((x a^T) * scale) b^T in plain torch at the dtype of x, sample by sample."""
    total = y.clone()
    each = len(x) // len(requests)
    for n, request in enumerate(requests):
        here = slice(n * each, (n + 1) * each)
        for one in sets[request]:
            a, b = (tensor.to(x.dtype) for tensor in one.source.low_rank() or ())
            total[here, one.start : one.stop] += F.linear(F.linear(x[here], a) * one.scale, b)
    return total


CASES = {
    "rank 1": ([[(1, 0, 64, 0.7)]], [0], 37, 64, 48),
    "rank 3, 341 columns": ([[(3, 0, 341, -1.5)]], [0], 20, 341, 341),
    "rank 17, one row": ([[(17, 0, 96, 0.3)]], [0], 1, 96, 64),
    "two adapters": ([[(17, 0, 96, 0.3), (64, 0, 96, 1.2)]], [0], 40, 96, 64),
    "fused rows": ([[(5, 0, 33, 0.5), (16, 33, 90, 2.0), (3, 90, 97, 1.0)]], [0], 35, 97, 64),
    "mixed": ([[(4, 0, 96, 1.0)], [], [(17, 8, 50, 0.5), (1, 0, 96, 2.0)]], [2, 0, 1, 2], 4 * 21, 96, 64),
    "mixed, one row each": ([[(4, 0, 96, 1.0)], [(33, 0, 96, 0.1)]], [1, 0, 0], 3, 96, 64),
    "nothing": ([[]], [0], 5, 32, 32),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_all_kernels(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given, requests, count, rows, cols = CASES[name]
    sets = [[part(r, cols, start, stop, scale) for r, start, stop, scale in one] for one in given]
    made = room(sets, rows, cols, dtype)
    made.spread(requests)
    bank, site = made.banks["bank"], made.sites["site"]
    x = torch.randn(count, cols).to(dtype)
    each = count // len(requests)
    change = torch.cat(
        [
            x[n * each : (n + 1) * each].float() @ dense(sets[request], rows, cols, dtype).T
            for n, request in enumerate(requests)
        ]
    )
    t = launch.shrink(x, bank.a, bank.ids, bank.counts, made.samples, (16, 32, 32, 2, 4))
    told = reference.shrink(x, bank.a, bank.ids, bank.counts, made.samples)
    tables = (site.b, site.entries, site.scales, site.counts, made.samples)

    for config in ((16, 64, 16, 1, 4, 1), (32, 32, 64, 2, 4, 2)):
        y, whole = guarded(count, rows, dtype)
        before = torch.randn(count, rows).to(dtype)
        y.copy_(before)
        launch.expand(y, t, *tables, config)
        check(y, before.float() + change, plain(x, sets, requests, before))
        assert intact(whole)
        torch.testing.assert_close(reference.expand(before, told, *tables), y, atol=2e-2, rtol=2e-2)

    # What the host knows chooses plain products where all rows have one request.
    y, whole = guarded(count, rows, dtype)
    y.copy_(before)
    ops.DIRECT.expand_(y, ops.DIRECT.shrink(x, bank.a, bank.ids, bank.counts, made.samples), *tables)
    check(y, before.float() + change, plain(x, sets, requests, before))
    assert intact(whole)


def test_a_product_is_kept_for_siblings_and_for_no_other_input() -> None:
    torch.manual_seed(0)
    shape = Shape("bank", 32, 16, torch.float32, DEVICE)
    made = ranks.arena({"q": shape, "k": shape}, 4, 1, 1)
    made.fill({"q": [[part(3, 16, 0, 32, 1.0)]], "k": [[part(5, 16, 0, 32, 1.0)]]})
    bank, x = made.banks["bank"], torch.randn(4, 16)
    first = bank.product(x, made.samples)
    assert bank.product(x, made.samples) is first
    assert bank.t is None, "the last sibling has taken it"
    again = bank.product(x, made.samples)
    assert again is not first
    x.add_(1.0)
    assert bank.product(x, made.samples) is not again, "the input was written to"


MERGES = {
    "one part": (130, 96, [(17, 0, 130, 0.5)]),
    "one row, 341 columns": (1, 341, [(1, 0, 1, 2.0)]),
    "rows apart": (70, 64, [(3, 0, 33, -1.0), (70, 33, 70, 0.2), (16, 0, 70, 1.0)]),
    "many ranks": (40, 48, [(150, 5, 40, 0.3)]),
}


@pytest.mark.parametrize("factors", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merging(dtype: torch.dtype, factors: torch.dtype) -> None:
    """All weights of a switch in one pass: rounded once, with a checksum of each base."""
    torch.manual_seed(0)
    jobs: list[merging.Job] = []
    wanted: list[Tensor] = []
    for rows, cols, specs in MERGES.values():
        weight, _ = guarded(rows, cols, dtype)
        base, total, parts = torch.randn(rows, cols).to(dtype), torch.zeros(rows, cols, dtype=torch.float64), []
        for rank, start, stop, scale in specs:
            a, b = torch.randn(rank, cols) / 8, torch.randn(stop - start, rank)
            # The last kind of factor differs from the others: both are widened then.
            a, b = a.to(factors), b.to(factors if rank != 16 else torch.float32)
            parts.append(merging.Part(a, b, start, stop, scale))
            total[start:stop] += scale * b.double() @ a.double()
        jobs.append(merging.Job(weight, base, tuple(parts)))
        wanted.append(base.double() + total)
    told = merging.merge(jobs, (32, 32, 16, 1, 4) if DEVICE.type == "cpu" else ())
    for job, exact, name in zip(jobs, wanted, MERGES, strict=True):
        once = exact.to(dtype).double() - exact
        error = float((job.weight.double() - exact).norm())
        assert error <= 1.05 * float(once.norm()) + 2e-6 * float(exact.norm()), name
    assert told.flags.tolist() == [0] * len(jobs)
    assert told.sums.tolist() == [merging.checksum(job.base) for job in jobs]


def test_merging_again_gives_the_same_bits_and_raises_a_flag_for_what_overflows() -> None:
    torch.manual_seed(0)
    base = torch.randn(64, 64).to(torch.float16)
    base[3, 5] = float("inf")
    a, b = torch.randn(8, 64).half(), torch.randn(64, 8).half()
    config = (32, 32, 16, 1, 4) if DEVICE.type == "cpu" else ()
    for scale, flag in ((1.0, 0), (1e6, 1), (1.0, 0)):
        weights = [torch.full_like(base, 7.0) for _ in range(2)]
        jobs = [merging.Job(weight, base, (merging.Part(a, b, 0, 64, scale),)) for weight in weights]
        told = [merging.merge([job], config) for job in jobs]
        assert torch.equal(weights[0].view(torch.int16), weights[1].view(torch.int16))
        assert [int(one.flags[0]) for one in told] == [flag, flag]
    changed = base.clone()
    changed[7, 7] += 1
    assert merging.checksum(changed) != merging.checksum(base)
