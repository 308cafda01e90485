"""Every kind of adapter where other loaders dropped, refused or misread it (rows 36-47), by plain arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from behaving import attached, check, held, linear, pair, positive, product, rand, restored, tiny_model, tree, unchanged
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn

import difflora

LIN = "transformer.blocks.0.lin"
Files = dict[str, Tensor]


def decomposed(base: Tensor, change: Tensor, magnitude: Tensor, axis: int = 0) -> Tensor:
    """m (W + D) / ||W + D|| - W, one norm a row, or (axis 1) a column."""
    adapted = base + change
    others = [n for n in range(base.ndim) if n != axis]
    norm = adapted.square().sum(dim=others, keepdim=True).sqrt()
    return magnitude.reshape([-1 if n == axis else 1 for n in range(base.ndim)]) * adapted / norm - base


# ---- DoRA -----------------------------------------------------------------------------------------------------------

MAGNITUDES = {"vector": ("lora_magnitude_vector", (6,)), "vector of rows": ("lora_magnitude_vector.weight", (6, 1)),
              "peft slot": ("lora_magnitude_vector.default.weight", (6,)), "scale": ("dora_scale", (6,)),
              "scale of rows": ("dora_scale", (6, 1)), "bare": ("magnitude", (6,))}  # fmt: skip


@pytest.mark.parametrize("spelling", MAGNITUDES)
@pytest.mark.parametrize("width", [6, 8])
def test_row_36_magnitude_is_a_column(spelling: str, width: int) -> None:
    """One number a row of the weight, whatever its shape in the file: [n] is never spread over a square weight."""
    leaf, shape = MAGNITUDES[spelling]
    slot = ".default" if "slot" in spelling else ""
    factors = {k.replace(".weight", f"{slot}.weight"): v for k, v in pair(LIN, 6, width).items()}
    magnitude, model = positive(*shape), linear(6, width)
    change = decomposed(held(model), product(pair(LIN, 6, width), LIN), magnitude)
    report = check(model, {**factors, f"{LIN}.{leaf}": magnitude}, {"blocks.0.lin": change}, kernel=False)
    assert report.kinds == {"dora+lora": 1}


@pytest.mark.parametrize("width", [6, 8])
def test_row_36_the_same_as_the_forward_pass_of_peft(width: int, tmp_path: Path) -> None:
    """PEFT's own DoRA, saved by PEFT, on a square layer and another; at strength 1 both compute the same."""
    model, x = linear(6, width), rand(5, width, seed=4, size=1.0)
    made = get_peft_model(linear(6, width), LoraConfig(r=2, lora_alpha=3, use_dora=True, target_modules=["lin"])).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "lora_" in name:
                value.copy_(positive(*value.shape, seed=len(name)))
    made.save_pretrained(tmp_path)
    pipe, layer = attached(model), model.get_submodule("blocks.0.lin")
    wanted = made.get_submodule("base_model.model.blocks.0.lin")(x)
    with restored(pipe):
        assert pipe.load_lora(tmp_path).kinds == {"dora+lora": 1}
        torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)
        pipe.unload_loras()


def test_row_38_alpha_inside_the_decomposition_and_strength_outside() -> None:
    """alpha / r scales the factors under the norm; the strength s is W + s (W' - W), and 0 and 1 are its ends."""
    model, factors, magnitude = linear(), pair(LIN, 8, 6, rank=4, alpha=1.0), positive(8, 1)
    full = decomposed(held(model), 0.25 * product(factors, LIN), magnitude)
    state = {**factors, f"{LIN}.dora_scale": magnitude}
    check(model, state, {"blocks.0.lin": full}, kernel=False, strengths=(1.0, 0.5, -0.5, 2.0))
    pipe = attached(model)
    with restored(pipe):
        before = held(model)
        pipe.load_lora(state, 0.0, name="it")
        assert torch.equal(held(model), before)
        pipe.set_loras({"it": 1.0})
        torch.testing.assert_close(held(model).norm(dim=1, keepdim=True), magnitude, rtol=1e-5, atol=0)
        pipe.unload_loras()


def test_row_38_two_adapters_each_from_the_pristine_base() -> None:
    """Differences are those of the base weight: the order of the adapters changes nothing."""
    model, other = linear(), pair(LIN, 8, 6, seed=5)
    dora = {**pair(LIN, 8, 6), f"{LIN}.dora_scale": positive(8, 1)}
    wanted = held(model) + 0.5 * decomposed(held(model), product(dora, LIN), positive(8, 1)) + 2 * product(other, LIN)
    pipe = attached(model)
    for names in (("dora", "other"), ("other", "dora")):
        with restored(pipe):
            for name in names:
                pipe.load_lora({"dora": dora, "other": other}[name], {"dora": 0.5, "other": 2.0}[name], name=name)
            torch.testing.assert_close(held(model), wanted, rtol=0, atol=2e-6)
            pipe.unload_loras()


@pytest.mark.parametrize("leaf", ["lora_magnitude_vector", "lora_magnitude_vector.weight"])
def test_row_39_magnitudes_of_peft_are_never_left_aside(leaf: str, tmp_path: Path) -> None:
    """A pair with a magnitude is no plain pair; and a config that speaks of magnitudes needs them in the file."""
    stem = "diffusion_model.single_blocks.0.linear1"
    factors, magnitude, model = pair(stem, 72, 8), positive(72), tiny_model("flux2")
    name = "single_transformer_blocks.0.attn.to_qkv_mlp_proj"
    change = decomposed(held(model, name), product(factors, stem), magnitude)
    assert (change - product(factors, stem)).abs().max() > 0.1
    check(model, {**factors, f"{stem}.{leaf}": magnitude}, {name: change}, kernel=False)
    save_file(factors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "use_dora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    unchanged(attached(model), tmp_path, "use_dora.*no lora_magnitude_vector")
    unchanged(attached(model), {f"{stem}.{leaf}": magnitude}, "belongs to no factors")


@pytest.mark.parametrize("native", [True, False])
def test_row_39_a_fused_file_with_magnitudes_of_columns_on_a_split_model(native: bool) -> None:
    """The norm of a column goes over the rows of q, k and v together; with some of them missing it is not guessed."""
    model = tiny_model("flux")
    stem = "diffusion_model.double_blocks.0.img_attn.qkv" if native else "lora_unet_double_blocks_0_img_attn_qkv"
    names = [f"transformer_blocks.0.attn.to_{c}" for c in "qkv"]
    factors, magnitude = pair(stem, 24, 8, alpha=1.0), positive(1, 8)
    joined = torch.cat([held(model, name) for name in names])
    change = decomposed(joined, product(factors, stem) / 2, magnitude, axis=1)
    state, changes = {**factors, f"{stem}.dora_scale": magnitude}, dict(zip(names, change.chunk(3), strict=True))
    apart = decomposed(held(model, names[0]), product(factors, stem)[:8] / 2, magnitude, axis=1)
    assert (apart - changes[names[0]]).abs().max() > 0.05
    check(model, state, changes, kernel=False)
    pipe, first = attached(model), pair("transformer." + names[0], 8, 8, seed=9)
    with restored(pipe):
        pipe.load_lora(first, 3.0, name="first")  # the norm is that of the base, not of what is in it
        pipe.load_lora(state, 0.5, name="it")
        wanted = joined[:8] + 0.5 * changes[names[0]] + 3.0 * product(first, "transformer." + names[0])
        torch.testing.assert_close(held(model, names[0]), wanted, rtol=0, atol=5e-6)
        pipe.unload_loras()
    part = tree(**{name.replace(".", "__"): nn.Linear(8, 8) for name in names[:2]})
    unchanged(attached(part), state, "needs all 24 rows", strict=False, family="flux")


@pytest.mark.parametrize("shape", [(1, 6), (8, 1), (8,)])
def test_row_39_magnitudes_of_rows_and_of_columns_are_told_by_their_shape(shape: tuple[int, ...]) -> None:
    """[1, in] is a number a column; [out, 1] and [out] are a number a row."""
    model, factors, magnitude = linear(), pair(LIN, 8, 6), positive(*shape)
    change = decomposed(held(model), product(factors, LIN), magnitude, axis=1 if shape[0] == 1 else 0)
    check(model, {**factors, f"{LIN}.dora_scale": magnitude}, {"blocks.0.lin": change}, kernel=False)


# ---- LoKr and LoHa --------------------------------------------------------------------------------------------------


def kronecker(one: Tensor, two: Tensor) -> Tensor:
    """Blocks one[i, j] * two, by hand."""
    return torch.cat([torch.cat([number * two for number in row], dim=1) for row in one])


LOKR = ("whole", "w1", "w2", "both")


@pytest.mark.parametrize("factored", LOKR)
def test_row_40_lokr_is_a_kronecker_product(factored: str) -> None:
    """kron(w1, w2), each of them whole or a product of two; alpha / rank where one is a product."""
    one, two = rand(2, 2), rand(4, 4, seed=1)
    state: Files = {f"{LIN}.alpha": torch.tensor(1.0)}
    if factored in ("w1", "both"):
        state |= {f"{LIN}.lokr_w1_a": rand(2, 2, seed=2), f"{LIN}.lokr_w1_b": rand(2, 2, seed=3)}
        one = state[f"{LIN}.lokr_w1_a"] @ state[f"{LIN}.lokr_w1_b"]
    else:
        state[f"{LIN}.lokr_w1"] = one
    if factored in ("w2", "both"):
        state |= {f"{LIN}.lokr_w2_a": rand(4, 2, seed=4), f"{LIN}.lokr_w2_b": rand(2, 4, seed=5)}
        two = state[f"{LIN}.lokr_w2_a"] @ state[f"{LIN}.lokr_w2_b"]
    else:
        state[f"{LIN}.lokr_w2"] = two
    change = kronecker(one, two) * (1.0 if factored == "whole" else 0.5)
    report = check(linear(8, 8), state, {"blocks.0.lin": change}, kernel=factored in ("w2", "both"))
    assert report.kinds == {"lokr": 1}


@pytest.mark.parametrize("stem", ["diffusion_model.layers.0.attention.to_q", "lycoris_layers_0_attention_to_q"])
def test_row_40_a_lokr_of_z_image(stem: str) -> None:
    """Not square and not in order: w1 may be the larger factor."""
    one, two = rand(4, 2), rand(2, 4, seed=1)
    state = {f"{stem}.lokr_w1": one, f"{stem}.lokr_w2": two, f"{stem}.alpha": torch.tensor(1e10)}
    check(tiny_model("z-image"), state, {"layers.0.attention.to_q": kronecker(one, two)}, kernel=False)


@pytest.mark.parametrize("rows", [(4, 6), (2, 12), (6, 4), (8, 3)])
@pytest.mark.parametrize("factored", [False, True])
def test_row_40_a_lokr_of_a_fused_qkv_on_a_split_model(rows: tuple[int, int], factored: bool) -> None:
    """Where the parts end inside a block of w2, each has just its own rows of the whole product."""
    stem, one = "lora_unet_double_blocks_0_img_attn_qkv", rand(rows[0], 2)
    state = {f"{stem}.lokr_w1": one, f"{stem}.alpha": torch.tensor(1.0)}
    two, scale = rand(rows[1], 4, seed=1), 1.0
    if factored:
        state |= {f"{stem}.lokr_w2_a": rand(rows[1], 2, seed=2), f"{stem}.lokr_w2_b": rand(2, 4, seed=3)}
        two, scale = state[f"{stem}.lokr_w2_a"] @ state[f"{stem}.lokr_w2_b"], 0.5
    else:
        state[f"{stem}.lokr_w2"] = two
    parts = (kronecker(one, two) * scale).chunk(3)
    changes = {f"transformer_blocks.0.attn.to_{c}": part for c, part in zip("qkv", parts, strict=True)}
    check(tiny_model("flux"), state, changes, kernel=factored)


def whole_lokr(alpha: float = 4.0) -> Files:
    return {f"{LIN}.lokr_w1": rand(2, 2), f"{LIN}.lokr_w2": rand(4, 3, seed=1), f"{LIN}.alpha": torch.tensor(alpha)}


def test_row_41_alpha_of_two_whole_factors_is_no_scale(tmp_path: Path) -> None:
    """Nothing to divide by: the scale is 1, unless a PEFT config says alpha and r, which PEFT always applies."""
    change = kronecker(rand(2, 2), rand(4, 3, seed=1))
    for alpha in (4.0, 9999999999.0):
        check(linear(), whole_lokr(alpha), {"blocks.0.lin": change}, kernel=False)
    tensors = {k.replace("transformer.", "base_model.model."): v for k, v in whole_lokr().items() if "alpha" not in k}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LOKR", "r": 8, "alpha": 4}))
    check(linear(), tmp_path, {"blocks.0.lin": 0.5 * change}, kernel=False)


def test_row_41_an_alpha_that_means_nothing_is_noted() -> None:
    """One line of the report says that the alpha was not used."""
    assert "alpha" in str(difflora.bind(difflora.load(whole_lokr()), linear()).notes)


def test_row_42_loha_is_a_product_element_by_element() -> None:
    """(w1_a w1_b) * (w2_a w2_b) * alpha / r on a linear layer, whole or in a fused module."""
    state = {f"{LIN}.hada_w{n}_{c}": rand(*((8, 2) if c == "a" else (2, 6)), seed=i)
             for i, (n, c) in enumerate(("1a", "1b", "2a", "2b"))}  # fmt: skip
    halves = [state[f"{LIN}.hada_w{n}_a"] @ state[f"{LIN}.hada_w{n}_b"] for n in "12"]
    change = halves[0] * halves[1]
    check(linear(), state, {"blocks.0.lin": change})
    check(linear(), {**state, f"{LIN}.alpha": torch.tensor(1.0)}, {"blocks.0.lin": 0.5 * change})
    stem = "lora_unet_double_blocks_0_img_attn_qkv"
    fused = {f"{stem}.hada_w{n}_{c}": rand(*((24, 2) if c == "a" else (2, 8)), seed=i)
             for i, (n, c) in enumerate(("1a", "1b", "2a", "2b"))}  # fmt: skip
    halves = [fused[f"{stem}.hada_w{n}_a"] @ fused[f"{stem}.hada_w{n}_b"] for n in "12"]
    parts = zip("qkv", (halves[0] * halves[1]).chunk(3), strict=True)
    check(tiny_model("flux"), fused, {f"transformer_blocks.0.attn.to_{c}": part for c, part in parts})


def conv(out: int = 4, channels: int = 3, kernel: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tree(blocks__0__conv=nn.Conv2d(channels, out, kernel, padding=kernel // 2))


CONV = "unet.blocks.0.conv"


@pytest.mark.parametrize("tucker", [False, True])
def test_row_42_loha_of_a_convolution(tucker: bool) -> None:
    """Flattened kernels, or cores t1 and t2 beside transposed first factors: every element by its own sum."""
    r, o, i, k, l = 2, 4, 3, 3, 3  # noqa: E741 (the letters of the formula)
    state = {f"{CONV}.alpha": torch.tensor(1.0)}
    halves = []
    for n in "12":
        if tucker:
            a, b, core = rand(r, o, seed=int(n)), rand(r, i, seed=int(n) + 2), rand(r, r, k, l, seed=int(n) + 4)
            state |= {f"{CONV}.hada_w{n}_a": a, f"{CONV}.hada_w{n}_b": b, f"{CONV}.hada_t{n}": core}
            halves.append(torch.einsum("po,pqkl,qi->oikl", a, core, b))
        else:
            a, b = rand(o, r, seed=int(n)), rand(r, i * k * l, seed=int(n) + 2)
            state |= {f"{CONV}.hada_w{n}_a": a, f"{CONV}.hada_w{n}_b": b}
            halves.append((a @ b).reshape(o, i, k, l))
    change = halves[0] * halves[1] / 2
    check(conv(), state, {"blocks.0.conv": change}, component="unet", kernel=not tucker)


# ---- whole differences, norms, convolutions -------------------------------------------------------------------------


def test_row_43_a_pair_a_bias_a_norm_and_a_modulation_of_wan() -> None:
    """Each is added at the strength; alpha scales the pair alone, and nothing is dropped."""
    block = "diffusion_model.blocks.0."
    factors = pair(block + "self_attn.q", 12, 12, rank=4, alpha=1.0)
    state = {**factors, f"{block}self_attn.q.diff_b": rand(12), f"{block}norm3.diff": rand(12, seed=1),
             f"{block}norm3.diff_b": rand(12, seed=4), f"{block}self_attn.norm_q.diff": rand(12, seed=2),
             f"{block}diff_m": rand(1, 6, 12, seed=3), f"{block}ffn.0.diff": rand(16, 12, seed=5),
             "diffusion_model.head.modulation.diff": rand(1, 2, 12, seed=6)}  # fmt: skip
    changes = {
        "blocks.0.attn1.to_q": 0.25 * product(factors, block + "self_attn.q"),
        "blocks.0.attn1.to_q.bias": rand(12), "blocks.0.norm2": rand(12, seed=1),
        "blocks.0.norm2.bias": rand(12, seed=4), "blocks.0.attn1.norm_q": rand(12, seed=2),
        "blocks.0.scale_shift_table": rand(1, 6, 12, seed=3), "blocks.0.ffn.net.0.proj": rand(16, 12, seed=5),
        "scale_shift_table": rand(1, 2, 12, seed=6),
    }  # fmt: skip
    merged_alone(tiny_model("wan"), state, changes)
    # A whole difference of a layer has no form beside its weight: without it kernel mode is the pair and the bias.
    without = {k: v for k, v in state.items() if "ffn" not in k and "norm3.diff_b" not in k}
    kept = {k: v for k, v in changes.items() if "ffn" not in k and "norm2.bias" not in k}
    assert len(check(tiny_model("wan"), without, kept).matched) == 6


def merged_alone(model: nn.Module, state: Files, changes: Files) -> None:
    """Only the mode that writes weights."""
    pipe, before = attached(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    with restored(pipe):
        pipe.load_lora(state, 0.0, name="it", mode="merged")
        for strength in (1.0, 0.5, -1.0):
            pipe.set_loras({"it": strength})
            now = dict(model.named_parameters())
            for name, value in before.items():
                path = name.removesuffix(".weight")
                wanted = value + strength * changes[path].reshape(value.shape) if path in changes else value
                torch.testing.assert_close(now[name], wanted, rtol=0, atol=2e-6 if path in changes else 0)
        pipe.unload_loras()


@pytest.mark.parametrize("alpha", [None, 1.0])
def test_row_43_alpha_never_touches_a_whole_difference(alpha: float | None) -> None:
    """Weight, bias and norm differences are added as they are, with an alpha beside them or not."""
    state = {f"{LIN}.diff": rand(8, 6), f"{LIN}.diff_b": rand(8, seed=1), "transformer.norm.w_norm": rand(8, seed=2)}
    if alpha is not None:
        state |= {f"{LIN}.alpha": torch.tensor(alpha), "transformer.norm.alpha": torch.tensor(alpha)}
    changes = {"blocks.0.lin": rand(8, 6), "blocks.0.lin.bias": rand(8, seed=1), "norm": rand(8, seed=2)}
    check(linear(norm=nn.LayerNorm(8)), state, changes, kernel=False)


def test_row_43_a_bias_trained_beside_factors_is_scaled_like_them() -> None:
    """`lora_B.bias` is part of the pair: alpha / r on both; `diff_b` beside the same pair is not scaled."""
    factors = pair(LIN, 8, 6, rank=4, alpha=1.0)
    change = 0.25 * product(factors, LIN)
    for leaf, scale in (("lora_B.bias", 0.25), ("diff_b", 1.0)):
        changes = {"blocks.0.lin": change, "blocks.0.lin.bias": scale * rand(8)}
        check(linear(), {**factors, f"{LIN}.{leaf}": rand(8)}, changes)


@pytest.mark.parametrize("module", ["linear", "conv"])
def test_row_43_a_layer_without_a_bias_gets_one_and_loses_it_again(module: str) -> None:
    """What the layer computes has the bias, its state dict never has; afterwards there is none."""
    layer = nn.Linear(6, 8, bias=False) if module == "linear" else nn.Conv2d(6, 8, 3, bias=False)
    model, shape = tree(blocks__0__lin=layer), layer.weight.shape
    down = rand(2, *shape[1:])
    state = {f"{LIN}.lora_A.weight": down, f"{LIN}.lora_B.weight": rand(8, 2, *(1,) * (len(shape) - 2), seed=1),
             f"{LIN}.diff_b": rand(8, seed=2), f"{LIN}.alpha": torch.tensor(1.0)}  # fmt: skip
    change = (state[f"{LIN}.lora_B.weight"].flatten(1) @ down.flatten(1)).reshape(shape) / 2
    check(model, state, {"blocks.0.lin": change, "blocks.0.lin.bias": rand(8, seed=2)})
    assert layer.bias is None and list(model.state_dict()) == ["blocks.0.lin.weight"]
    pipe = attached(model)
    pipe.load_lora(state)
    assert list(model.state_dict()) == ["blocks.0.lin.weight"] and layer.bias is None


@pytest.mark.parametrize("norm", ["layer", "rms", "group"])
def test_row_44_a_file_of_nothing_but_norms(norm: str) -> None:
    """Differences of norm weights are an adapter, whatever the norm is."""
    module: nn.Module = {"layer": nn.LayerNorm(8), "rms": nn.RMSNorm(8), "group": nn.GroupNorm(2, 8)}[norm]
    state = {"transformer.blocks.0.q_norm.diff": rand(8), "transformer.blocks.0.q_norm.alpha": torch.tensor(2.0)}
    report = check(tree(blocks__0__q_norm=module), state, {"blocks.0.q_norm": rand(8)})
    assert report.kinds == {"diff": 1} and report.matched == ("transformer.blocks.0.q_norm",)


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_row_44_biases_of_norms(norm: str) -> None:
    """A norm's bias is written like its weight, in either mode."""
    module: nn.Module = {"layer": nn.LayerNorm(8), "group": nn.GroupNorm(2, 8)}[norm]
    state = {"transformer.blocks.0.norm.w_norm": rand(8), "transformer.blocks.0.norm.b_norm": rand(8, seed=1)}
    changes = {"blocks.0.norm": rand(8), "blocks.0.norm.bias": rand(8, seed=1)}
    check(tree(blocks__0__norm=module), state, changes)


def test_row_44_query_and_key_norms_of_a_family() -> None:
    """The native names of the norms, and BFL's `scale`, which replaces them."""
    state = {f"diffusion_model.layers.0.attention.{c}_norm.diff": rand(8, seed=n) for n, c in enumerate("qk")}
    changes = {f"layers.0.attention.norm_{c}": rand(8, seed=n) for n, c in enumerate("qk")}
    check(tiny_model("z-image"), state, changes)
    model = tiny_model("flux")
    value = rand(8) + 2.0
    before = held(model, "transformer_blocks.0.attn.norm_q")
    state = {"double_blocks.0.img_attn.norm.query_norm.scale": value}
    check(model, state, {"transformer_blocks.0.attn.norm_q": value - before}, strengths=(1.0, 0.5, 0.25))


@pytest.mark.parametrize("mid", [False, True])
@pytest.mark.parametrize("flat_up", [False, True])
def test_row_47_convolutions_with_and_without_a_core(mid: bool, flat_up: bool) -> None:
    """delta[o, i, k, l] = sum of up[o, m] mid[m, n, k, l] down[n, i], element by element; up may be [o, r]."""
    r, o, i, k = 2, 4, 3, 3
    up = rand(o, r, seed=1)
    down = rand(r, i, 1, 1) if mid else rand(r, i, k, k)
    state = {f"{CONV}.lora_down.weight": down, f"{CONV}.lora_up.weight": up if flat_up else up[..., None, None],
             f"{CONV}.alpha": torch.tensor(1.0)}  # fmt: skip
    change = torch.einsum("om,mikl->oikl", up, down.expand(r, i, k, k))
    if mid:
        core = state[f"{CONV}.lora_mid.weight"] = rand(r, r, k, k, seed=2)
        change = torch.einsum("om,mnkl,ni->oikl", up, core, down[..., 0, 0])
    report = check(conv(), state, {"blocks.0.conv": change / 2}, component="unet")
    assert report.kinds == {"tucker" if mid else "locon": 1}


def test_row_47_linear_pairs_on_pointwise_convolutions_and_the_reverse() -> None:
    """[r, in] fits a 1x1 kernel, [r, in, 1, 1] a linear layer; neither fits a 3x3 kernel."""
    flat = pair(CONV, 4, 3)
    check(conv(kernel=1), flat, {"blocks.0.conv": product(flat, CONV)}, component="unet")
    four = {k: v[..., None, None] for k, v in pair(LIN, 8, 6).items()}
    check(linear(), four, {"blocks.0.lin": product(pair(LIN, 8, 6), LIN)})
    unchanged(attached(unet=conv()), flat, r"\[4, 3\] in the file, \[4, 3, 3, 3\] in the model")


def test_row_47_grouped_strided_and_other_convolutions() -> None:
    """The delta is that of the weight as it is stored: groups, strides and one or three dimensions do not matter."""
    for name, layer in {"groups": nn.Conv2d(6, 4, 3, groups=2, stride=2), "one": nn.Conv1d(3, 4, 3, dilation=2),
                        "three": nn.Conv3d(3, 4, (1, 3, 2), padding=1)}.items():  # fmt: skip
        down, up = rand(2, *layer.weight.shape[1:]), rand(4, 2, *(1,) * (layer.weight.ndim - 2), seed=1)
        state = {f"{CONV}.lora_A.weight": down, f"{CONV}.lora_B.weight": up}
        change = (up.flatten(1) @ down.flatten(1)).reshape(layer.weight.shape)
        check(tree(blocks__0__conv=layer), state, {"blocks.0.conv": change}, component="unet"), name
