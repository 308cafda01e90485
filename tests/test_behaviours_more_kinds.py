"""Kinds that are functions of the base, words, widened inputs and values that are no numbers (rows 48-51)."""

from __future__ import annotations

import pytest
import torch
from behaving import attached, check, held, linear, pair, positive, product, rand, restored, unchanged
from torch import Tensor, nn

import difflora

LIN = "transformer.blocks.0.lin"
Files = dict[str, Tensor]

# ---- functions of the base ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_input", [0, 1])
def test_row_48_ia3_scales_rows_or_columns(on_input: int) -> None:
    """Told by `on_input`, applied as what it is: W' - W is the weight times the numbers, at any strength."""
    model, numbers = linear(), rand(6 if on_input else 8)
    state = {f"{LIN}.weight": numbers, f"{LIN}.on_input": torch.tensor(on_input)}
    change = held(model) * (numbers if on_input else numbers[:, None])
    report = check(model, state, {"blocks.0.lin": change}, kernel=False)
    assert report.kinds == {"ia3": 1} and "ia3" in str(report)
    unchanged(attached(model), {f"{LIN}.weight": numbers}, "not the name of an adapter's tensor")


def cayley(blocks: Tensor, bound: float = 0.0) -> Tensor:
    """One big rotation from blocks [n, b, b]: (I + Q)(I - Q)^-1 of Q = B - B^T, its norm bounded."""
    skew = torch.block_diag(*(blocks - blocks.transpose(1, 2)))
    if bound and skew.norm() > bound:
        skew = skew * bound / skew.norm()
    eye = torch.eye(len(skew))
    return (eye + skew) @ torch.linalg.inv(eye - skew)


@pytest.mark.parametrize("alpha", [0.0, 0.01, 9.0])
@pytest.mark.parametrize("rescaled", [False, True])
def test_row_48_oft_rotates_rows_and_alpha_is_a_bound(alpha: float, rescaled: bool) -> None:
    """R^T W in blocks of rows; alpha times the rows is the largest norm that the skew matrix may have."""
    model, blocks, factor = linear(), rand(2, 4, 4), positive(8, 1)
    state = {f"{LIN}.oft_blocks": blocks, f"{LIN}.alpha": torch.tensor(alpha)}
    state |= {f"{LIN}.rescale": factor} if rescaled else {}
    rotated = cayley(blocks, alpha * 8).T @ held(model)
    change = (factor * rotated if rescaled else rotated) - held(model)
    assert check(model, state, {"blocks.0.lin": change}, kernel=False, atol=5e-6).kinds == {"oft": 1}


def test_row_48_boft_rotates_in_stages() -> None:
    """Blocks of four dimensions are a butterfly: between stages rows change places, 2^stage half blocks apart."""
    model, blocks = linear(), rand(2, 2, 4, 4)
    rotated = held(model)
    for stage in range(2):
        order = torch.arange(8).reshape(-1, 2, 2 * 2**stage).transpose(1, 2).flatten()
        places = torch.eye(8)[order]
        rotated = places.T @ cayley(blocks[stage]) @ places @ rotated
    state = {f"{LIN}.oft_blocks": blocks, f"{LIN}.alpha": torch.tensor(0.0)}
    report = check(model, state, {"blocks.0.lin": rotated - held(model)}, kernel=False, atol=5e-6)
    assert report.kinds == {"boft": 1}


@pytest.mark.parametrize("shared", [False, True])
def test_row_48_oft_of_peft_rotates_columns(shared: bool) -> None:
    """W R^T, R = I + 2Q + 2Q^2 + 2Q^3 + Q^4 of the skew matrix with these numbers above its diagonal."""
    model, numbers = linear(), rand(1 if shared else 2, 3)
    rotations = []
    for row in numbers.expand(2, 3):
        q = torch.zeros(3, 3)
        q[0, 1], q[0, 2], q[1, 2] = row
        q = q - q.T
        rotations.append(torch.eye(3) + 2 * (q + q @ q + q @ q @ q) + q @ q @ q @ q)
    change = held(model) @ torch.block_diag(*rotations).T - held(model)
    check(model, {f"{LIN}.oft_R.weight": numbers}, {"blocks.0.lin": change}, kernel=False, atol=5e-6)


@pytest.mark.parametrize("old", [False, True])
def test_row_48_glora_is_a_function_of_the_base(old: bool) -> None:
    """alpha / r (W a1 a2 + b1 b2); the first files have each pair the other way round."""
    model = linear()
    a1, a2, b1, b2 = rand(6, 2), rand(2, 6, seed=1), rand(8, 2, seed=2), rand(2, 6, seed=3)
    change = (held(model) @ a1 @ a2 + b1 @ b2) / 2
    names = zip(("a2", "a1", "b2", "b1") if old else ("a1", "a2", "b1", "b2"), (a1, a2, b1, b2), strict=True)
    state = {**{f"{LIN}.{name}.weight": value for name, value in names}, f"{LIN}.alpha": torch.tensor(1.0)}
    assert check(model, state, {"blocks.0.lin": change}, kernel=False).kinds == {"glora": 1}


def test_row_48_kinds_that_are_refused_are_named() -> None:
    """What cannot be applied is refused in one line that names the type, and nothing is half applied."""
    for leaf, words in {"ia3_l": "PEFT IA3", "vera_lambda_b": "VeRA", "oft_diag": "old OFT", "boft_R": "BOFT"}.items():
        unchanged(attached(linear()), {**pair(LIN, 8, 6), f"{LIN}.{leaf}": rand(8)}, words)


def test_row_48_a_replaced_weight_and_several_kinds_in_one_file() -> None:
    """set_weight is W + s (value - W); every module has its own kind."""
    model = linear(blocks__1__lin=nn.Linear(6, 8), norm=nn.LayerNorm(8))
    second = LIN.replace("0", "1")
    state = {f"{LIN}.set_weight": rand(8, 6), **pair(second, 8, 6, alpha=1.0), "transformer.norm.diff": rand(8)}
    changes = {"blocks.0.lin": rand(8, 6) - held(model), "blocks.1.lin": product(state, second) / 2, "norm": rand(8)}
    for paths, kernel in ((("blocks.0.lin", "norm"), False), (("blocks.1.lin", "norm"), True)):
        part = {k: v for k, v in state.items() if k.startswith(tuple(f"transformer.{p}" for p in paths))}
        check(model, part, {p: changes[p] for p in paths}, kernel=kernel)
    pipe, before = attached(model), {path: held(model, path) for path in changes}
    with restored(pipe):
        assert pipe.load_lora(state, 0.5).kinds == {"set": 1, "lora": 1, "diff": 1}
        for path, change in changes.items():
            torch.testing.assert_close(held(model, path), before[path] + 0.5 * change)
        pipe.unload_loras()


# ---- values that are no numbers -------------------------------------------------------------------------------------


def bad(kind: str) -> tuple[Files, str]:
    """A file of this kind, and the key of a tensor in it."""
    files: dict[str, tuple[Files, str]] = {
        "lora": (pair(LIN, 8, 6), "lora_B.weight"),
        "alpha": (pair(LIN, 8, 6, alpha=1.0), "alpha"),
        "dora": ({**pair(LIN, 8, 6), f"{LIN}.dora_scale": positive(8, 1)}, "dora_scale"),
        "lokr": ({f"{LIN}.lokr_w1": rand(2, 2), f"{LIN}.lokr_w2": rand(4, 3)}, "lokr_w2"),
        "diff": ({f"{LIN}.diff": rand(8, 6)}, "diff"),
        "bias": ({f"{LIN}.diff_b": rand(8)}, "diff_b"),
        "set": ({f"{LIN}.set_weight": rand(8, 6)}, "set_weight"),
        "ia3": ({f"{LIN}.weight": rand(8), f"{LIN}.on_input": torch.tensor(0)}, "weight"),
        "oft": ({f"{LIN}.oft_blocks": rand(2, 4, 4)}, "oft_blocks"),
    }
    return files[kind]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["lora", "alpha", "dora", "lokr", "diff", "bias", "set", "ia3", "oft"])
def test_row_51_a_value_that_is_no_number_is_refused(kind: str, value: float) -> None:
    """One NaN or infinity anywhere: the error names the module, and model and list are as they were."""
    state, leaf = bad(kind)
    tensor = state[f"{LIN}.{leaf}"].clone()
    tensor.view(-1)[-1] = value
    for mode in ("merged", "kernel"):
        model = linear()
        pipe = attached(model)
        with restored(pipe):
            unchanged(pipe, {**state, f"{LIN}.{leaf}": tensor}, r"blocks\.0\.lin.*NaN or infinite", mode=mode)


def test_row_51_a_product_that_overflows_only_in_the_weight() -> None:
    """Finite fp16 factors whose product is not: refused before anything is written, other layers included."""
    model = linear(blocks__1__lin=nn.Linear(6, 8)).half()
    state = {k: v.half() for k, v in pair(LIN, 8, 6).items()}
    large = {k: torch.full_like(v, 300.0).half() for k, v in pair(LIN.replace("0", "1"), 8, 6).items()}
    for weight, source in ((1.0, {**state, **large}), (1e6, state)):
        unchanged(attached(model), source, "not finite in torch.float16", weight=weight)
    pipe, before = attached(model), held(model).float()
    with restored(pipe):
        pipe.load_lora(state, name="it")
        with pytest.raises(difflora.DiffLoRAError, match="not finite"):
            pipe.set_loras({"it": 1e6})
        wanted = (before + product(state, LIN)).half()
        torch.testing.assert_close(held(model), wanted, rtol=1e-3, atol=1e-3)
        pipe.unload_loras()


def test_row_51_other_storage_types_are_read_as_numbers() -> None:
    """fp8, fp16 and bf16 factors are cast before they are multiplied."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16):
        state = {k: v.to(dtype) for k, v in pair(LIN, 8, 6).items()}
        check(linear(), state, {"blocks.0.lin": product(state, LIN)})
