"""Kernel mode and merged mode on single modules: both against weights changed by hand in fp64."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from difflora import linear, merge
from difflora.composing import stack
from difflora.deltas import LowRank
from difflora.types import DiffLoRAError, Section

CPU = torch.device("cpu")
Cut = tuple[int, int]

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(24, 40), (2, 5, 24)),
    "linear, 341 columns": (lambda: nn.Linear(341, 41), (9, 341)),
    "linear, one row": (lambda: nn.Linear(17, 3, bias=False), (1, 17)),
    "linear, one output": (lambda: nn.Linear(24, 1), (2, 3, 24)),
    "conv 1x1": (lambda: nn.Conv2d(6, 10, 1), (2, 6, 5, 7)),
    "conv 3x3, stride": (lambda: nn.Conv2d(6, 10, 3, stride=2, padding=1), (2, 6, 9, 7)),
    "conv 3x5, dilated": (lambda: nn.Conv2d(6, 10, (3, 5), dilation=2, padding="same"), (1, 6, 9, 11)),
    "conv, reflected": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (1, 4, 6, 6)),
    "conv, groups": (lambda: nn.Conv2d(8, 12, 3, padding=1, groups=4), (2, 8, 5, 5)),
    "conv, depthwise": (lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6), (1, 6, 5, 5)),
    "conv 1d": (lambda: nn.Conv1d(6, 10, 3, padding=1), (2, 6, 9)),
    "conv 3d": (lambda: nn.Conv3d(4, 6, 3, padding=1), (1, 4, 3, 4, 5)),
}


def given(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def low_rank(weight: Tensor, rank: int, rows: int | None = None, seed: int = 1, tucker: bool = False) -> LowRank:
    out = rows or weight.shape[0]
    ones = (1,) * (weight.ndim - 2)
    if tucker:
        return LowRank(
            given((rank, weight.shape[1], *ones), seed), given((out, rank, *ones), seed + 1),
            mid=given((rank, rank, *weight.shape[2:]), seed + 2), alpha=2.0,
        )  # fmt: skip
    return LowRank(given((rank, *weight.shape[1:]), seed) * 0.3, given((out, rank, *ones), seed + 1), alpha=2.0)


def changed(weight: Tensor, applied: merge.Applied) -> Tensor:
    """W + sum s alpha / r B A, in fp64, with the sum written out over ranks."""
    total = weight.double().clone()
    for section, strength in applied:
        delta = section.delta
        down, up = delta.down.double(), delta.up.double().flatten(1)
        if delta.blocks:
            up = torch.cat([up[start:stop] for start, stop in delta.blocks])
        if delta.mid is not None:
            down = torch.einsum("mnkl,nj->mjkl", delta.mid.double(), down.flatten(1))
        for k in range(len(down)):
            step = up[:, k].view(-1, *(1,) * (weight.ndim - 1)) * down[k]
            total[section.start : section.stop] += strength * 2.0 / len(down) * step
    return total


def operated(module: nn.Module, weight: Tensor, input: Tensor) -> Tensor:
    """The module's operation with another weight, in the dtype of the input."""
    fresh = copy.deepcopy(module).to(weight.dtype)
    fresh.weight = nn.Parameter(weight)
    return fresh(input if input.dtype == torch.long else input.to(weight.dtype)).detach()


def patched(module: nn.Module, applied: merge.Applied) -> nn.Module:
    linear.patch(module, linear.terms(linear.parts(applied), module), module.weight.shape[0])
    return module


def check(module: nn.Module, input: Tensor, applied: merge.Applied) -> None:
    before = module(input).detach()
    want = operated(module, changed(module.weight.data, applied), input)
    merged = operated(module, merge.merged(module.weight.data, applied), input)
    patched(module, applied)
    assert (want - before).abs().max() > 1e-2
    torch.testing.assert_close(module(input).double(), want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(merged.double(), want, atol=2e-5, rtol=2e-5)
    linear.unpatch(module)
    assert torch.equal(module(input), before)
    assert "forward" not in module.__dict__
    assert "_difflora" not in module.__dict__


@pytest.mark.parametrize("rank", [1, 3, 17])
@pytest.mark.parametrize("name", MODULES)
def test_every_operation(name: str, rank: int) -> None:
    torch.manual_seed(0)
    module, shape = MODULES[name][0](), MODULES[name][1]
    section = Section("x", low_rank(module.weight, rank), 0, module.weight.shape[0])
    check(module, given(shape, 5), ((section, 0.7),))


def test_a_tucker_core() -> None:
    module = nn.Conv2d(6, 10, 3, padding=1)
    section = Section("x", low_rank(module.weight, 3, tucker=True), 0, 10)
    check(module, given((2, 6, 5, 5), 5), ((section, 0.2),))


@pytest.mark.parametrize("rank", [1, 17])
def test_an_embedding(rank: int) -> None:
    module = nn.Embedding(23, 12)
    section = Section("x", low_rank(module.weight, rank), 0, 23)
    check(module, torch.tensor([[0, 3, 22], [3, 3, 1]]), ((section, 0.7),))


@pytest.mark.parametrize("name", ["linear", "linear, 341 columns", "conv 3x3, stride", "conv, groups", "conv 1d"])
@pytest.mark.parametrize("cuts", [[(0, 3)], [(2, 6)], [(0, 2), (2, 6)], [(4, 6), (1, 3)]])
def test_row_ranges(name: str, cuts: list[Cut]) -> None:
    """Parts of a fused matrix: each with its own rank and strength, some missing."""
    torch.manual_seed(0)
    module, shape = MODULES[name][0](), MODULES[name][1]
    sections = tuple(
        (Section("x", low_rank(module.weight, rank, stop - start, seed=rank), start, stop), 0.5 * rank - 0.8)
        for rank, (start, stop) in enumerate(cuts, start=1)
    )
    check(module, given(shape, 5), sections)


def test_parts_that_share_a_matrix_keep_their_strengths() -> None:
    module = nn.Linear(24, 40)
    whole = low_rank(module.weight, 4)
    applied = tuple(
        (Section("x", whole.rows([cut]), *cut), weight) for cut, weight in (((0, 16), 0.7), ((16, 40), -0.4))
    )
    assert len(stack(applied, CPU).a) == 4
    check(module, given((3, 24), 5), applied)


def test_adapters_add_up_and_cancel() -> None:
    module = nn.Linear(24, 40)
    one = Section("x", low_rank(module.weight, 3), 0, 40)
    two = Section("x", low_rank(module.weight, 5, seed=7), 0, 40)
    check(module, given((3, 24), 5), ((one, 0.7), (two, -0.3)))
    before = module(given((3, 24), 5))
    patched(module, ((one, 0.7), (one, -0.7)))
    torch.testing.assert_close(module(given((3, 24), 5)), before, atol=1e-5, rtol=0)


# ---- precision ------------------------------------------------------------------------------------------------------


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().pow(2).mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["linear", "linear, 341 columns", "conv 3x3, stride", "conv, groups", "conv 1d"])
def test_the_error_is_at_most_twice_that_of_plain_torch(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, shape = MODULES[name][0]().to(dtype), MODULES[name][1]
    input = given(shape, 5).to(dtype)
    applied = ((Section("x", low_rank(module.weight.float(), 17), 0, module.weight.shape[0]), 0.7),)
    exact = operated(module, changed(module.weight.data, applied), input)
    plain = operated(module, (changed(module.weight.data.float(), applied)).to(dtype), input)
    module = patched(module, applied)
    assert module(input).dtype == dtype
    assert rms(module(input) - exact) <= 2 * rms(plain - exact)


def test_casting_there_and_back_loses_nothing_of_the_adapter() -> None:
    torch.manual_seed(0)
    module = nn.Linear(24, 40)
    input = given((3, 24), 5)
    patched(module, ((Section("x", low_rank(module.weight, 3), 0, 40), 0.7),))
    want = module(input)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(input).dtype == torch.bfloat16
        torch.testing.assert_close(module(input).float(), want, atol=5e-2, rtol=5e-2)
    assert torch.equal(module(input), want)


def test_weights_stored_in_fp8_do_not_round_the_adapter() -> None:
    module = nn.Linear(24, 40).to(torch.float8_e4m3fn)
    made = linear.terms(linear.parts([(Section("x", low_rank(torch.empty(40, 24), 3), 0, 40), 0.7)]), module)
    assert {made[0].a.dtype, made[0].b.dtype, made[0].scale.dtype} == {torch.float32}


def test_the_strength_is_kept_in_fp32_beside_low_precision_weights() -> None:
    module = nn.Linear(24, 40).bfloat16()
    made = linear.terms(linear.parts([(Section("x", low_rank(torch.empty(40, 24), 3), 0, 40), 0.7)]), module)
    assert made[0].scale.dtype == torch.float32
    assert float(made[0].scale) == pytest.approx(0.7 * 2 / 3, rel=1e-7)


# ---- copies and gradients -------------------------------------------------------------------------------------------


def test_a_deep_copy_computes_with_its_own_weights_and_adapters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    section = Section("x", low_rank(model[0].weight, 3), 0, 8)
    patched(model[0], ((section, 0.7),))
    twin = copy.deepcopy(model)
    input = given((3, 8), 5)
    want = model(input)
    assert torch.equal(twin(input), want)
    with torch.no_grad():
        model[0].weight.zero_()
        model[1].weight.zero_()
    assert torch.equal(twin(input), want)
    linear.unpatch(model[0])
    assert torch.equal(twin(input), want)
    linear.unpatch(twin[0])
    assert (twin(input) - want).abs().max() > 1e-2


def test_a_pickle_that_would_lose_adapters_is_refused() -> None:
    module = patched(nn.Linear(8, 8), ((Section("x", low_rank(torch.empty(8, 8), 3), 0, 8), 0.7),))
    with pytest.raises(DiffLoRAError, match="pickle cannot hold them"):
        torch.save(module, io.BytesIO())
    linear.unpatch(module)
    torch.save(module, io.BytesIO())


def test_gradients_pass_through_to_the_input_and_the_weights() -> None:
    module = nn.Linear(8, 8)
    applied = ((Section("x", low_rank(module.weight, 3), 0, 8), 0.7),)
    by_hand = copy.deepcopy(module)
    by_hand.weight.data = changed(module.weight.data, applied).float()
    patched(module, applied)
    grads = []
    for each in (module, by_hand):
        input = given((3, 8), 5).requires_grad_()
        each(input).pow(2).sum().backward()
        grads.append((input.grad, each.weight.grad))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_terms_are_no_parameters_or_buffers() -> None:
    module = nn.Linear(8, 8)
    names = [list(module.state_dict()), list(module.named_buffers())]
    patched(module, ((Section("x", low_rank(module.weight, 3), 0, 8), 0.7),))
    assert [list(module.state_dict()), list(module.named_buffers())] == names
    assert type(module) is nn.Linear
