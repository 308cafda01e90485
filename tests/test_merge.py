"""The arithmetic of merged mode: one rounding, from a base that is kept apart; and what becomes of a merged weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from difflora import merge
from difflora.deltas import LowRank
from difflora.types import DiffLoRAError, Section

HALF = (torch.bfloat16, torch.float16)


def section(rows: int, columns: int, rank: int = 3, seed: int = 1, size: float = 0.1) -> Section:
    generator = torch.Generator().manual_seed(seed)
    down, up = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator) * size
    return Section("x", LowRank(down, up, alpha=2.0), 0, rows)


def weight(dtype: torch.dtype = torch.float32, rows: int = 41, columns: int = 341) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("rank", [1, 3, 17])
@pytest.mark.parametrize(("rows", "columns"), [(41, 341), (1, 7), (64, 64)])
def test_one_rounding(rows: int, columns: int, rank: int, dtype: torch.dtype) -> None:
    base = weight(dtype, rows, columns)
    part = section(rows, columns, rank)
    delta = (part.delta.up @ part.delta.down) * (0.7 * 2 / rank)
    value = merge.merged(base, ((part, 0.7),))
    assert value.dtype == dtype
    exact = base.double() + (part.delta.up.double() @ part.delta.down.double()) * (0.7 * 2 / rank)
    if dtype == torch.float32:
        torch.testing.assert_close(value.double(), exact, atol=1e-6, rtol=1e-6)
        return
    # Equal to (W.float() + D).to(dtype) but where the sum lies within fp32's error of a tie between two neighbours.
    rounded = (base.float() + delta).to(dtype)
    assert (value != rounded).float().mean() < 2e-3
    spacing = torch.finfo(dtype).eps * exact.abs().clamp_min(torch.finfo(dtype).smallest_normal)
    assert ((value.double() - exact).abs() <= spacing * 0.5001 + 1e-6).all()


def test_exactly_the_rounded_sum() -> None:
    base, part = weight(torch.bfloat16), section(41, 341, rank=1)
    delta = torch.zeros(41, 341).addmm_(part.delta.up, part.delta.down, alpha=0.7 * 2)
    assert torch.equal(merge.merged(base, ((part, 0.7),)), (base.float() + delta).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", HALF)
def test_several_adapters_are_rounded_once(dtype: torch.dtype) -> None:
    """Each delta is less than half a step of the dtype, so rounding after each would lose all of them."""
    base = torch.ones(8, 8, dtype=dtype)
    step = torch.finfo(dtype).eps
    tiny = Section("x", LowRank(torch.full((1, 8), 1.0), torch.full((8, 1), step * 0.3)), 0, 8)
    assert torch.equal(merge.merged(base, ((tiny, 1.0),)), base)
    assert torch.equal(merge.merged(base, ((tiny, 1.0),) * 3), base + step)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_opposite_strengths_cancel(dtype: torch.dtype) -> None:
    base, part = weight(dtype), section(41, 341)
    assert torch.equal(merge.merged(base, ((part, 0.7), (part, -0.7))), base)


def test_a_sum_that_overflows_is_refused() -> None:
    base = torch.full((4, 4), 6e4, dtype=torch.float16)
    part = Section("x", LowRank(torch.ones(1, 4), torch.full((4, 1), 1e4)), 0, 4)
    with pytest.raises(DiffLoRAError, match=r"here\.to_q gives values that are not finite in torch.float16"):
        merge.checked(base, ((part, 1.0),), "here.to_q")
    assert torch.isfinite(merge.checked(base, ((part, 0.1),), "here.to_q")).all()


def test_a_base_that_holds_infinities_is_refused_only_where_it_did_not() -> None:
    base = torch.zeros(4, 4, dtype=torch.float16)
    base[0, 0] = float("inf")
    small, huge = (Section("x", LowRank(torch.ones(1, 4), torch.full((4, 1), size)), 0, 4) for size in (1.0, 1e6))
    assert torch.isinf(merge.checked(base, ((small, 1.0),), "x")).sum() == 1
    with pytest.raises(DiffLoRAError, match="not finite"):
        merge.checked(base, ((huge, 1.0),), "x")


def test_the_kept_base_has_storage_of_its_own() -> None:
    for held in (weight(), nn.Parameter(weight()), weight().t()):
        kept = merge.keep(held)
        assert torch.equal(kept, held)
        assert kept.untyped_storage().data_ptr() != held.untyped_storage().data_ptr()
        assert not kept.requires_grad


def test_a_write_keeps_the_address_and_reaches_every_copy() -> None:
    one, two = nn.Parameter(weight()), weight(torch.float32)
    address = one.data_ptr()
    merge.write((one, two), torch.zeros(41, 341))
    assert one.data_ptr() == address
    assert not one.any()
    assert not two.any()


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        held = nn.Linear(4, 4).weight
    merge.write((held,), torch.zeros(4, 4))
    assert not held.any()
    assert merge.witness(held) == merge.witness(held)


def test_a_witness_is_not_taken_in_by_memory_that_is_used_again() -> None:
    held, seen = nn.Parameter(weight()), []
    for _ in range(20):
        seen.append(merge.witness(held))
        assert merge.witness(held) == seen[-1]
        held.data = held.data.to(torch.bfloat16)
        held.data = held.data.to(torch.float32)
    assert all(one != two for i, one in enumerate(seen) for two in seen[:i])


def test_a_witness_keeps_no_memory() -> None:
    held = nn.Parameter(weight())
    storage = merge.StorageWeakRef(held.untyped_storage())
    seen = merge.witness(held)
    held.data = held.data.clone()
    assert storage.expired()
    assert seen != merge.witness(held)


@pytest.mark.parametrize("numel", [1, 4096, 4097, 8191, 8192, 100_000])
def test_a_sample_spans_the_whole_weight(numel: int) -> None:
    taken = merge.sample(torch.arange(numel, dtype=torch.float64))
    assert len(taken) <= 4096
    assert float(taken[-1]) >= numel - 1 - numel / 2048


FP8 = torch.float8_e4m3fn
PATHS: list[tuple[torch.dtype, ...]] = [
    (), (torch.bfloat16,), (torch.float16,), (FP8,), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
    (torch.bfloat16, FP8), (torch.float64,), (torch.bfloat16, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_casts_are_recognised(path: tuple[torch.dtype, ...]) -> None:
    before = merge.sample(weight())
    before[0] = float("nan")
    now = merge.cast(before, path)
    found = merge.casts(before, now)
    assert found is not None
    assert merge.casts(before, merge.cast(before, found)) == found
    assert (found == ()) == (path == ())
    other = now.clone()
    other.view(torch.uint8)[-1] ^= 1
    assert merge.casts(before, other) is None
    assert merge.casts(before, now[1:]) is None


@pytest.mark.parametrize("kernel", [(), (3,), (3, 3), (2, 3, 2)], ids=str)
def test_a_tucker_core_of_any_number_of_dimensions(kernel: tuple[int, ...]) -> None:
    ones = (1,) * len(kernel)
    down, up, mid = torch.randn(2, 5, *ones), torch.randn(7, 2, *ones), torch.randn(2, 2, *kernel)
    want = torch.stack([up.flatten(1) @ mid[(..., *at)] @ down.flatten(1) for at in np.ndindex(*kernel)], -1)
    torch.testing.assert_close(LowRank(down, up, mid).dense(), want.reshape(7, 5, *kernel))
