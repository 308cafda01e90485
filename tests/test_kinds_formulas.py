"""The kinds and forms that no library computes, or computes wrongly, against the formula written out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from difflora.formats.errors import DiffLoRAError
from difflora.kinds import build

if TYPE_CHECKING:
    from difflora.kinds import Delta

FP8 = torch.float8_e4m3fn


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) * 7 + len(shape)))


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_differences_are_added_as_they_are() -> None:
    for shape in [(5,), (4, 3), (4, 3, 2, 2), (1, 6, 8)]:
        delta = build("diff", {"diff": random(*shape).half(), "alpha": torch.tensor(3.0)})
        assert (delta.kind, delta.rank, delta.scale, delta.shape) == ("diff", 0, 1.0, shape)
        close(delta.dense(), random(*shape).half().float())
    assert build("diff", {"diff": random(4)}, alpha=3.0, rank=2).scale == 1.0


def test_a_set_parameter_replaces_the_model_s() -> None:
    delta, base = build("set", {"value": random(4, 3), "alpha": torch.tensor(3.0)}), torch.ones(4, 3).half()
    close(delta.dense(base) + base.float(), random(4, 3))
    assert (delta.kind, delta.needs_base, delta.scale, delta.shape) == ("set", True, 1.0, (4, 3))


def test_dylora_has_a_flat_up_beside_the_down_of_a_convolution() -> None:
    """LyCORIS' own forward pass scales DyLoRA by alpha / (block + 1); files mean alpha / r."""
    down, up = random(4, 5, 3, 2), random(6, 4)
    delta = build("lora", {"down": down, "up": up, "alpha": torch.tensor(2.0)})
    assert (delta.kind, delta.shape) == ("locon", (6, 5, 3, 2))
    close(delta.dense(), torch.einsum("or,ri...->oi...", up, down) / 2)


@pytest.mark.parametrize(("rows", "columns"), [(9, 6), (6, 9), (6, 6)])
def test_glora_of_either_convention(rows: int, columns: int) -> None:
    """The first files have b2 b1 + W a2 a1; the pairs are told by the axes that are the rank, in square ones too."""
    base, r = random(rows, columns), 2
    a1, a2, b1, b2 = random(columns, r), random(r, columns), random(rows, r), random(r, columns)
    want = (base @ a1 @ a2 + b1 @ b2) * 1.5
    alpha = torch.tensor(3.0)
    new = build("glora", {"a1": a1, "a2": a2, "b1": b1, "b2": b2, "alpha": alpha})
    old = build("glora", {"a1": a2, "a2": a1, "b1": b2, "b2": b1, "alpha": alpha})
    for delta in (new, old):
        assert (delta.rank, delta.scale, delta.shape) == (2, 1.5, (rows, columns))
        close(delta.dense(base), want)


def test_glora_with_a_core_and_without_alpha() -> None:
    base, one = random(6, 5, 3, 2), (1, 1)
    a1, a2, b1, b2 = random(5, 2, *one), random(2, 5, *one), random(6, 2, *one), random(2, 5, *one)
    bm = random(2, 2, 3, 2)
    delta = build("glora", {"a1": a1, "a2": a2, "b1": b1, "b2": b2, "bm": bm})
    mixed = torch.einsum("oc...,cr,ri->oi...", base, a1[..., 0, 0], a2[..., 0, 0])
    added = torch.einsum("mn...,om,ni->oi...", bm, b1[..., 0, 0], b2[..., 0, 0])
    assert delta.shape == (6, 5, 3, 2)
    close(delta.dense(base), mixed + added)


def skew(numbers: Tensor, size: int) -> Tensor:
    matrix = torch.zeros(size, size)
    places = [(i, j) for i in range(size) for j in range(i + 1, size)]
    for value, (row, column) in zip(numbers, places, strict=True):
        matrix[row, column], matrix[column, row] = value, -value
    return matrix


def test_a_scaled_rotation_of_inputs_has_its_numbers_divided() -> None:
    """OneTrainer's scaled OFT: 2 sqrt(b - 1) before the Cayley transform."""
    r, base = random(2, 6) * 0.3, random(5, 8)
    turns = []
    for numbers in r:
        q = skew(numbers / (2 * math.sqrt(3)), 4)
        turns.append(torch.eye(4) + 2 * q + 2 * q @ q + 2 * q @ q @ q + q @ q @ q @ q)
    want = base @ torch.block_diag(*turns).T - base
    close(build("oft_v2", {"r": r, "scaled": torch.tensor(True)}).dense(base), want)
    assert (build("oft_v2", {"r": r}).dense(base) - want).abs().max() > 0.1


@pytest.mark.parametrize("role", ["magnitude", "dora_scale"])
def test_a_rotation_of_inputs_with_magnitudes(role: str) -> None:
    r, base, size = random(4, 1) * 0.01, random(5, 8), random(5).abs()
    turned = base + build("oft_v2", {"r": r}).dense(base)
    delta = build("oft_v2", {"r": r, role: size if role == "magnitude" else size[:, None]})
    assert (delta.kind, delta.shape) == ("dora+oft_v2", (5, 8))
    close(delta.dense(base) + base, size[:, None] * turned / turned.norm(dim=1, keepdim=True))


@pytest.mark.parametrize(("shape", "axis"), [((6,), 0), ((6, 1), 0), ((1, 6), 1)])
def test_the_axis_of_magnitudes_is_read_from_their_shape_in_square_weights_too(shape: tuple, axis: int) -> None:
    base, size = random(6, 6), random(*shape).abs()
    held = {"down": random(2, 6), "up": random(6, 2)}
    whole = base + build("lora", held).dense()
    norm = whole.norm(dim=1 - axis, keepdim=True)
    delta = build("lora", {**held, "dora_scale": size})
    close(delta.dense(base) + base, size.reshape(norm.shape) * whole / norm)
    assert delta.kind == "dora+lora"


def test_magnitudes_of_one_row_or_of_one_column() -> None:
    row = build("lora", {"down": random(2, 5), "up": random(1, 2), "dora_scale": torch.full((1, 1), 3.0)})
    assert float((row.dense(random(1, 5)) + random(1, 5)).norm()) == pytest.approx(3.0, rel=1e-5)
    column = build("lora", {"down": random(2, 1), "up": random(5, 2), "dora_scale": torch.full((1, 1), 3.0)})
    assert float((column.dense(random(5, 1)) + random(5, 1)).norm()) == pytest.approx(3.0, rel=1e-5)


def test_a_row_of_zeros_stays_finite_under_dora() -> None:
    delta = build("lora", {"down": torch.zeros(1, 4), "up": torch.zeros(3, 1), "magnitude": torch.ones(3)})
    assert bool((delta.dense(torch.zeros(3, 4)) == 0).all())


def test_lora_of_an_embedding_is_transposed() -> None:
    down, up = random(2, 9), random(5, 2)
    delta = build("lora_embedding", {"down": down, "up": up, "alpha": torch.tensor([3])})
    assert (delta.shape, delta.rank, delta.scale) == ((9, 5), 2, 1.5)
    close(delta.dense(), (up @ down).T * 1.5)


@pytest.mark.parametrize("alpha", [torch.tensor(3), torch.tensor([3.0]).bfloat16(), torch.tensor(3.0).half(), 3.0, 3])
def test_an_alpha_of_any_type_and_shape(alpha: Tensor | float) -> None:
    down, up = random(2, 4), random(5, 2)
    held = {"down": down, "up": up}
    delta = build("lora", {**held, "alpha": alpha}) if isinstance(alpha, Tensor) else build("lora", held, alpha=alpha)
    assert delta.scale == 1.5
    assert build("lora", held).scale == 1.0 and build("lora", {**held, "alpha": torch.tensor(0.0)}).scale == 0.0


HALVES = {f"w{n}_{side}": random(*((6, 3) if side == "a" else (3, 8))) for n in "12" for side in "ab"}
FLOATS: dict[str, tuple[str, dict[str, Tensor]]] = {
    "lora": ("lora", {"down": random(3, 8), "up": random(6, 3)}),
    "locon": ("lora", {"down": random(3, 8, 1, 1), "up": random(6, 3, 1, 1), "mid": random(3, 3, 2, 2)}),
    "loha": ("loha", HALVES),
    "lokr": ("lokr", {"w1": random(2, 4), "w2_a": random(3, 2), "w2_b": random(2, 2)}),
    "glora": ("glora", {"a1": random(8, 2), "a2": random(2, 8), "b1": random(6, 2), "b2": random(2, 8)}),
    "ia3": ("ia3", {"weight": random(8), "on_input": torch.tensor(1)}),
    "diff": ("diff", {"diff": random(6, 8)}),
    "set": ("set", {"value": random(6, 8)}),
    "oft": ("oft", {"blocks": random(3, 2, 2), "rescale": random(6, 1)}),
    "boft": ("oft", {"blocks": random(2, 1, 6, 6)[:1]}),
    "oft_v2": ("oft_v2", {"r": random(2, 6) * 0.1}),
    "dora": ("lora", {"down": random(3, 8), "up": random(6, 3), "magnitude": random(6)}),
}


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FLOATS)
def test_numbers_of_any_precision_are_computed_with_in_fp32(name: str, dtype: torch.dtype) -> None:
    kind, held = FLOATS[name]
    shape = (6, 8, 2, 2) if name == "locon" else (6, 8)
    stored = {role: t.to(dtype) if t.is_floating_point() else t for role, t in held.items()}
    exact = {role: t.float() if t.is_floating_point() else t for role, t in stored.items()}
    base = random(*shape).to(torch.bfloat16)
    close(build(kind, stored).dense(base), build(kind, exact).dense(base.float()))


def agree(delta: Delta, rank: int) -> None:
    pair = delta.low_rank()
    assert pair is not None
    a, b = pair
    assert a.dtype == b.dtype == torch.float32 and a.shape[0] == b.shape[1] == rank
    close(b @ a * delta.scale, delta.dense().flatten(1))


def test_exact_low_rank_forms() -> None:
    agree(build("loha", HALVES, alpha=2.0), 9)
    factored = {"w2_a": random(3, 2), "w2_b": random(2, 5 * 4)}
    agree(build("lokr", {"w1": random(4, 3), **factored}, alpha=3.0), 6)
    agree(build("lokr", {"w1_a": random(4, 2), "w1_b": random(2, 3), **factored}, alpha=3.0), 6)
    wide = {f"w{n}_{side}": random(*((40, 17) if side == "a" else (17, 40))) for n in "12" for side in "ab"}
    assert build("loha", wide).low_rank() is None
    assert build("lokr", {"w1": random(4, 3), "w2": random(3, 5)}).low_rank() is None
    assert build("lokr", {"w1": random(4, 130), **factored}).low_rank() is None
    for name in ("glora", "ia3", "diff", "set", "oft", "boft", "oft_v2", "dora"):
        assert build(*FLOATS[name]).low_rank() is None


def test_a_kernel_that_the_second_factor_keeps() -> None:
    """LyCORIS' functions (not its modules) leave the kernel in w_b."""
    w1, w2_a, w2_b = random(2, 3), random(4, 2), random(2, 5, 3, 2)
    delta = build("lokr", {"w1": w1, "w2_a": w2_a, "w2_b": w2_b})
    assert delta.shape == (8, 15, 3, 2)
    flat = build("lokr", {"w1": w1, "w2_a": w2_a, "w2_b": w2_b.flatten(1)})
    close(delta.dense(), flat.dense().reshape(delta.shape))
    agree(delta, 6)


def test_an_alpha_of_a_config_is_no_bound_on_a_rotation() -> None:
    held = {"blocks": random(3, 2, 2)}
    close(build("oft", held, alpha=1e-3, rank=4).dense(random(6, 5)), build("oft", held).dense(random(6, 5)))


@pytest.mark.parametrize("name", ["glora", "ia3", "set", "oft", "boft", "oft_v2", "dora"])
def test_a_function_of_the_base_says_so_without_one(name: str) -> None:
    delta = build(*FLOATS[name])
    assert delta.needs_base
    with pytest.raises(DiffLoRAError, match="base"):
        delta.dense()
