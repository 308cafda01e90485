"""What other loaders got wrong about scales and strengths (rows 15-28), and what they say about a load (rows 52-57)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from behaving import attached, check, pair, product, rand, restored, tiny_model, tree, unchanged
from safetensors.torch import save_file
from torch import Tensor, nn

import difflora
from difflora import DiffLoRAError

LIN = "transformer.blocks.0.lin"


def linear(**more: nn.Module) -> nn.Module:
    """A model of one linear layer, and more."""
    return tree(blocks__0__lin=nn.Linear(4, 8), **more)


def saved(folder: Path, state: dict[str, Tensor], **metadata: str) -> Path:
    save_file(state, folder / "it.safetensors", metadata=metadata or None)
    return folder / "it.safetensors"


def peft_folder(folder: Path, state: dict[str, Tensor], **config: Any) -> Path:
    save_file(state, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    return folder


# ---- scale and alpha ------------------------------------------------------------------------------------------------

ALPHAS = {
    "float": torch.tensor(1.0), "bf16": torch.tensor(1.0, dtype=torch.bfloat16), "fp16": torch.tensor(1.0).half(),
    "int": torch.tensor(1), "one-element": torch.tensor([1.0]), "bf16-element": torch.ones(1, dtype=torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("alpha", ALPHAS.values(), ids=ALPHAS)
@pytest.mark.parametrize("stem", [LIN, "lora_transformer_blocks_0_lin"])
def test_row_15_scale_is_alpha_over_rank(alpha: Tensor, stem: str) -> None:
    """The rank is that of the down factor, per layer, whatever the alpha is stored as."""
    state = pair(stem, 8, 4, rank=4, alpha=alpha)
    check(linear(), state, {"blocks.0.lin": 0.25 * product(state, stem)})


def test_row_15_alpha_below_one_is_no_zero_and_none_is_one() -> None:
    """An alpha is never cut to a whole number; without one the scale is 1; each layer has its own."""
    state = {**pair(LIN, 8, 4, rank=4, alpha=0.5), **pair(LIN.replace("0", "1"), 8, 4, rank=4, seed=2)}
    model = linear(blocks__1__lin=nn.Linear(4, 8))
    changes = {"blocks.0.lin": 0.125 * product(state, LIN), "blocks.1.lin": product(state, LIN.replace("0", "1"))}
    check(model, state, changes)


METADATA: dict[str, dict[str, str]] = {
    "prefixed": {"transformer.lora_alpha": "8", "transformer.r": "2"},
    "json": {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 8, "transformer.r": 2})},
    "bare": {"lora_alpha": "8", "r": "2"},
    "network_alpha": {"network_alpha": "8.0"},
}


@pytest.mark.parametrize("metadata", METADATA.values(), ids=METADATA)
def test_row_16_alpha_in_the_header_alone(metadata: dict[str, str], tmp_path: Path) -> None:
    """The header's alpha scales what has none of its own; a tensor wins over it."""
    state = {**pair(LIN, 8, 4), **pair(LIN.replace("0", "1"), 8, 4, seed=2, alpha=2.0)}
    changes = {"blocks.0.lin": 4.0 * product(state, LIN), "blocks.1.lin": product(state, LIN.replace("0", "1"))}
    check(linear(blocks__1__lin=nn.Linear(4, 8)), saved(tmp_path, state, **metadata), changes)


def test_row_16_a_config_beside_the_file_and_the_header_of_another_component(tmp_path: Path) -> None:
    """adapter_config.json counts as the header does; a header for the text encoder says nothing about the rest."""
    state = {k.replace("transformer.", "base_model.model."): v for k, v in pair(LIN, 8, 4).items()}
    change = product(pair(LIN, 8, 4), LIN)
    check(linear(), peft_folder(tmp_path, state, r=2, lora_alpha=8), {"blocks.0.lin": 4.0 * change})
    other = saved(tmp_path, pair(LIN, 8, 4), **{"text_encoder.lora_alpha": "8", "text_encoder.r": "2"})
    check(linear(), other, {"blocks.0.lin": change})


@pytest.mark.parametrize("backwards", [False, True])
def test_row_18_mixed_ranks_without_alpha(backwards: bool) -> None:
    """No alpha anywhere is scale 1 everywhere, in whatever order the keys come."""
    other = LIN.replace("0", "1")
    state = {**pair(LIN, 8, 4, rank=2), **pair(other, 8, 4, rank=8, seed=2)}
    state = dict(reversed(state.items())) if backwards else state
    changes = {"blocks.0.lin": product(state, LIN), "blocks.1.lin": product(state, other)}
    assert check(linear(blocks__1__lin=nn.Linear(4, 8)), state, changes).ranks == (2, 8)


@pytest.mark.parametrize("family", ["minimax-h3", "qwen-image", "flux", "wan", "ltx", "sd3", "z-image", "sdxl"])
def test_row_19_no_family_has_an_alpha_of_its_own(family: str, tmp_path: Path) -> None:
    """The scale comes from the file or is 1: it is the same for every architecture."""
    names = {"wan": "blocks.0.attn1.to_q", "z-image": "layers.0.attention.to_q",
             "ltx": "transformer_blocks.0.attn1.to_q",
             "sdxl": "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"}  # fmt: skip
    name, model = names.get(family, "transformer_blocks.0.attn.to_q"), tiny_model(family)
    component = "unet" if family == "sdxl" else "transformer"
    stem = f"{component}.{name}"
    out, width = model.get_submodule(name).weight.shape
    state = pair(stem, out, width, rank=16, alpha=None)
    change = product(state, stem)
    sources = {1.0: state, 0.5: {**state, f"{stem}.alpha": torch.tensor(8.0)}, 2.0: saved(tmp_path, state, alpha="32")}
    for scale, source in sources.items():
        check(model, source, {name: scale * change}, component=component, strengths=(1.0,), atol=1e-5)


def fused_of_three(alpha: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A qkv made of three parts of rank 4: block-diagonal up [24, 12], and what each part is without a scale."""
    stem, parts = (
        "lora_unet_double_blocks_0_img_attn_qkv",
        [pair(c, 8, 8, rank=4, seed=n) for n, c in enumerate("qkv", 1)],
    )
    ups = [part[f"{c}.lora_B.weight"] for part, c in zip(parts, "qkv", strict=True)]
    downs = [part[f"{c}.lora_A.weight"] for part, c in zip(parts, "qkv", strict=True)]
    state = {f"{stem}.lora_down.weight": torch.cat(downs), f"{stem}.lora_up.weight": torch.block_diag(*ups),
             f"{stem}.alpha": torch.tensor(alpha)}  # fmt: skip
    return state, {f"transformer_blocks.0.attn.to_{c}": u @ d for c, u, d in zip("qkv", ups, downs, strict=True)}


def test_row_20_a_fused_file_is_read_as_it_is_written() -> None:
    """Rank 12 and alpha 12 is scale 1; alpha 4 is a third, which is what the file says."""
    for alpha in (12.0, 4.0):
        state, parts = fused_of_three(alpha)
        check(tiny_model("flux"), state, {name: change * alpha / 12 for name, change in parts.items()})


def test_row_20_an_alpha_that_was_not_raised_is_suspected() -> None:
    """Block-diagonal factors with the alpha of one part: the report says so, and says nothing of a raised one."""
    told = [difflora.bind(difflora.load(fused_of_three(alpha)[0]), tiny_model("flux")).notes for alpha in (4.0, 12.0)]
    assert "alpha" in str(told[0]) and not told[1]


def test_row_20_parts_keep_their_own_alpha_when_they_are_fused() -> None:
    """Three parts of rank 4 and alpha 4 on a fused module act at scale 1, and so does their sum, saved."""
    model, state, rows = tiny_model("flux"), {}, []
    model.fuse_qkv_projections()
    for n, part in enumerate("qkv", 1):
        stem = f"transformer.transformer_blocks.0.attn.to_{part}"
        state |= pair(stem, 8, 8, rank=4, alpha=4.0, seed=n)
        rows.append(product(state, stem))
    check(model, state, {"transformer_blocks.0.attn.to_qkv": torch.cat(rows)})


def test_row_21_a_top_level_module_and_nested_ones_of_the_same_name() -> None:
    """Ranks and alphas go by whole names: proj_out at the top and in a block are two modules."""
    top, nested = "transformer.proj_out", "transformer.single_transformer_blocks.0.proj_out"
    one, two = pair(top, 4, 8, rank=2, alpha=1.0), pair(nested, 8, 40, rank=4, alpha=8.0, seed=2)
    changes = {"proj_out": 0.5 * product(one, top), "single_transformer_blocks.0.proj_out": 2.0 * product(two, nested)}
    check(tiny_model("flux"), {**one, **two}, changes)
    check(tiny_model("flux"), two, {"single_transformer_blocks.0.proj_out": 2.0 * product(two, nested)})
    check(tiny_model("flux"), one, {"proj_out": 0.5 * product(one, top)})


def test_row_21_patterns_of_a_config_go_by_whole_names(tmp_path: Path) -> None:
    """`^proj_out` is the one at the top, `blocks.0.proj_out` the nested one; `my_proj_out` is neither."""
    top, nested, own = (
        f"base_model.model.{name}" for name in ("proj_out", "blocks.0.proj_out", "blocks.0.my_proj_out")
    )
    state = {**pair(top, 8, 4, rank=2), **pair(nested, 8, 4, rank=4, seed=2), **pair(own, 8, 4, rank=3, seed=3)}
    folder = peft_folder(tmp_path, state, r=3, lora_alpha=6, rank_pattern={"^proj_out": 2, "proj_out": 4},
                         alpha_pattern={"^proj_out": 1, "0.proj_out": 12})  # fmt: skip
    changes = {"proj_out": 0.5 * product(state, top), "blocks.0.proj_out": 3.0 * product(state, nested),
               "blocks.0.my_proj_out": 2.0 * product(state, own)}  # fmt: skip
    check(tree(**{path.replace(".", "__"): nn.Linear(4, 8) for path in changes}), folder, changes)


def test_row_23_rank_stabilised_scales_survive_every_strength(tmp_path: Path) -> None:
    """alpha / sqrt(r): rank 16 and alpha 16 is scale 4, and strength 0.5 makes it 2 by any of the ways to set it."""
    state = {k.replace("transformer.", "base_model.model."): v for k, v in pair(LIN, 8, 4, rank=16).items()}
    folder = peft_folder(tmp_path, state, r=16, lora_alpha=16, use_rslora=True)
    change = 4.0 * product(pair(LIN, 8, 4, rank=16), LIN)
    check(linear(), folder, {"blocks.0.lin": change}, strengths=(1.0, 0.5, 2.0, -1.0), atol=2e-5)
    model = linear()
    pipe, weight = attached(model), model.get_submodule("blocks.0.lin").weight
    before = weight.detach().clone()
    pipe.load_lora(folder, 0.5, name="it")
    torch.testing.assert_close(weight, before + 0.5 * change, rtol=0, atol=1e-5)
    pipe.set_adapters(["it"], [1.0])
    torch.testing.assert_close(weight, before + change, rtol=0, atol=1e-5)
    pipe.set_adapters(["it"], [0.25])
    torch.testing.assert_close(weight, before + 0.25 * change, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["merged", "kernel"])
def test_row_24_any_sign_and_zero(mode: str) -> None:
    """delta(-w) = -delta(w): +w and -w of one file cancel within fp32 rounding, and 0 is the base, bit for bit."""
    model, state, x = linear(), pair(LIN, 8, 4, alpha=3.0), rand(5, 4, seed=4, size=1.0)
    check(model, state, {"blocks.0.lin": 1.5 * product(state, LIN)}, strengths=(-1.0, -0.3, 0.3))
    pipe, layer = attached(model), model.get_submodule("blocks.0.lin")
    base = layer(x).detach()
    with restored(pipe):
        for name in ("a", "b"):
            pipe.load_lora(state, 0.0, name=name, mode=mode)
        assert torch.equal(layer(x), base)
        pipe.set_loras({"a": 0.7, "b": -0.7})
        torch.testing.assert_close(layer(x), base, rtol=0, atol=1e-6)
        pipe.set_loras({"a": -2.0})
        torch.testing.assert_close(layer(x), base - 3.0 * (x @ product(state, LIN).T), rtol=1e-5, atol=1e-5)
        pipe.set_loras({"a": 0})
        assert torch.equal(layer(x), base)
        pipe.unload_loras()


def two_adapters() -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
    one, two = pair(LIN, 8, 4, rank=2, alpha=1.0), pair(LIN, 8, 4, rank=3, alpha=6.0, seed=2)
    return one, two, 0.5 * product(one, LIN), 2.0 * product(two, LIN)


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1.0, 0.0), (-1.0, 0.5), (0.0, 1.0)])
@pytest.mark.parametrize("mode", ["merged", "kernel"])
def test_row_25_two_adapters_are_the_sum_of_their_changes(weights: tuple[float, float], mode: str) -> None:
    """Ranks are joined, factors never added: no cross terms, and weights (1, 0) are the first adapter."""
    one, two, first, second = two_adapters()
    wanted = weights[0] * first + weights[1] * second
    model, x = linear(), rand(5, 4, seed=4, size=1.0)
    pipe, layer = attached(model), model.get_submodule("blocks.0.lin")
    base = layer(x).detach()
    with restored(pipe):
        pipe.load_lora(one, weights[0], name="one", mode=mode)
        pipe.load_lora(two, weights[1], name="two", mode=mode)
        torch.testing.assert_close(layer(x), base + x @ wanted.T, rtol=1e-5, atol=1e-5)
        pipe.unload_loras()
    summed = difflora.compose([(difflora.load(one), weights[0]), (difflora.load(two), weights[1])])
    torch.testing.assert_close(summed.components["transformer"]["blocks.0.lin"].dense(), wanted, rtol=1e-5, atol=1e-6)


def test_row_25_the_sum_of_other_kinds_and_of_modules_that_one_lacks() -> None:
    """A pair plus a whole difference is their sum; a module of one adapter alone keeps its weight."""
    one, _, first, _ = two_adapters()
    diff, other = rand(8, 4), LIN.replace("0", "1")
    two = {f"{LIN}.diff": diff, **pair(other, 8, 4, seed=3)}
    summed = difflora.compose([(difflora.load(one), 0.5), (difflora.load(two), -2.0)]).components["transformer"]
    torch.testing.assert_close(summed["blocks.0.lin"].dense(), 0.5 * first - 2.0 * diff)
    torch.testing.assert_close(summed["blocks.1.lin"].dense(), -2.0 * product(two, other))


def kinds(stem: str) -> dict[str, dict[str, Tensor]]:
    """One file of each kind for a layer [8, 4]."""
    factors, rows = pair(stem, 8, 4, alpha=1.0), torch.rand(8, generator=torch.Generator().manual_seed(3)) + 0.5
    return {
        "lora": factors,
        "loha": {f"{stem}.hada_w{n}_{c}": rand(8, 2, seed=int(n)) if c == "a" else rand(2, 4, seed=int(n) + 5)
                 for n in "12" for c in "ab"},
        "lokr": {f"{stem}.lokr_w1": rand(2, 2), f"{stem}.lokr_w2": rand(4, 2, seed=1)},
        "diff": {f"{stem}.diff": rand(8, 4), f"{stem}.diff_b": rand(8, seed=1)},
        "lora_bias": {**factors, f"{stem}.lora_B.bias": rand(8, seed=2)},
        "dora": {**factors, f"{stem}.lora_magnitude_vector": rows},
        "glora": {f"{stem}.{n}.weight": rand(*s, seed=i) for i, (n, s) in
                  enumerate({"a1": (4, 2), "a2": (2, 4), "b1": (8, 2), "b2": (2, 4)}.items())},
        "ia3": {f"{stem}.weight": rand(8), f"{stem}.on_input": torch.tensor(False)},
        "oft": {f"{stem}.oft_blocks": rand(2, 4, 4), f"{stem}.alpha": torch.tensor(0.0)},
        "set": {f"{stem}.set_weight": rand(8, 4)},
    }  # fmt: skip


@pytest.mark.parametrize("kind", kinds(LIN))
def test_row_26_the_sum_of_one_adapter_at_one_is_that_adapter(kind: str) -> None:
    """compose([(a, 1)]) acts as a does, whatever a is; what cannot be summed without the base is refused by name."""
    state = kinds(LIN)[kind]
    adapter = difflora.load(state)
    same = difflora.compose([(adapter, 1.0)]).components["transformer"]
    base = {"blocks.0.lin": rand(8, 4, seed=7), "blocks.0.lin.bias": rand(8, seed=8)}
    assert same.keys() == adapter.components["transformer"].keys()
    for path, delta in adapter.components["transformer"].items():
        assert torch.equal(same[path].dense(base[path]), delta.dense(base[path]))
        assert delta.dense(base[path]).abs().max() > 1e-2
    if any(delta.needs_base for delta in same.values()):
        with pytest.raises(DiffLoRAError, match=f"{same['blocks.0.lin'].kind.replace('+', '.')}.*function of the base"):
            difflora.compose([(adapter, 1.0), (adapter, 1.0)])
        with pytest.raises(DiffLoRAError, match="function of the base"):
            difflora.compose([(adapter, 0.5)])
    else:
        half = difflora.compose([(adapter, 0.5), (adapter, 1.0)]).components["transformer"]
        for path, delta in adapter.components["transformer"].items():
            torch.testing.assert_close(half[path].dense(), 1.5 * delta.dense())


@pytest.mark.parametrize("family", ["sd", "sdxl", "flux"])
def test_row_28_one_strength_for_every_pipeline(family: str) -> None:
    """0, 0.5 and 1 of a text encoder's adapter are three pictures on every pipeline; an unknown argument raises."""
    pipe = difflora.attach(tiny.BUILDERS[family]())
    state = tiny.lora_dict(pipe.text_encoder, ["encoder.layers.0.mlp.fc1"], prefix="text_encoder.", size=1.0)
    pipe.load_lora(state, 0.0, name="it")
    pictures = [tiny.run(pipe, loras={"it": w}, num_inference_steps=1) for w in (0.0, 0.5, 1.0)]
    assert torch.equal(tiny.run(pipe, num_inference_steps=1), pictures[0])
    gaps = [(pictures[n] - pictures[m]).abs().max() for n, m in ((0, 1), (1, 2), (0, 2))]
    assert min(gaps) > 1e-4
    pipe.set_loras({"it": 1.0})
    kwargs = "joint_attention_kwargs" if family == "flux" else "cross_attention_kwargs"
    half = tiny.run(pipe, num_inference_steps=1, **{kwargs: {"scale": 0.5}})
    torch.testing.assert_close(half, pictures[1], rtol=0, atol=1e-5)
    with pytest.raises(TypeError, match="lora_strength"):
        tiny.run(pipe, lora_strength=0.5)


# ---- what was applied -----------------------------------------------------------------------------------------------


def nowhere(prefix: str = "transformer.") -> dict[str, Tensor]:
    return pair(f"{prefix}blocks.9.nothing", 8, 4)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("prefix", ["transformer.", "unet.", "text_encoder.", "lora_unet_", ""])
def test_row_52_no_matching_module_is_an_error(prefix: str, strict: bool) -> None:
    """A file for modules that do not exist is never loaded, strict or not; the one before it acts on."""
    pipe, state = attached(linear()), pair(LIN, 8, 4)
    pipe.load_lora(state, name="before")
    weight = pipe.transformer.get_submodule("blocks.0.lin").weight
    held, table = weight.detach().clone(), str(pipe.loras)
    with pytest.raises(DiffLoRAError):
        pipe.load_lora(nowhere(prefix), strict=strict)
    with pytest.raises(DiffLoRAError):
        pipe.load_lora_weights(nowhere(prefix))
    assert torch.equal(weight, held) and str(pipe.loras) == table


def test_row_52_a_report_of_what_matched_what_did_not_and_what_is_untouched() -> None:
    """All three are lists of names, and bind gives the same without changing anything."""
    model = linear(blocks__1__lin=nn.Linear(4, 8), head=nn.Linear(4, 4))
    state = {**pair(LIN, 8, 4), **nowhere()}
    pipe = attached(model)
    reports = [difflora.bind(difflora.load(state), model), pipe.load_lora(state, strict=False)]
    for report in reports:
        assert report.matched == (LIN,)
        assert report.unmatched == ("transformer.blocks.9.nothing",)
        assert report.untouched == ("transformer.blocks.1.lin", "transformer.head")


def test_row_53_what_is_not_listed_was_an_error() -> None:
    """No quiet return: a load either is in the list afterwards, or raised."""
    pipe = attached(linear())
    with pytest.raises(DiffLoRAError):
        pipe.load_lora_weights(nowhere(), adapter_name="it")
    assert pipe.get_list_adapters() == {} and pipe.get_active_adapters() == []
    pipe.load_lora_weights(pair(LIN, 8, 4), adapter_name="it")
    assert pipe.get_list_adapters() == {"transformer": ["it"]} and pipe.get_active_adapters() == ["it"]


@pytest.mark.filterwarnings("error")
def test_row_54_silence_about_absent_components_an_error_for_unmatched_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A file for the transformer alone says nothing of text encoders; one whole component without a module is fatal."""
    pipe = attached(linear(), text_encoder=tiny.clip())
    report = pipe.load_lora(pair(LIN, 8, 4))
    assert not caplog.records and not report.notes and not report.unmatched
    assert not any(name.startswith("text_encoder") for name in report.untouched)
    both = {**pair(LIN, 8, 4), **pair("text_encoder.text_model.encoder.layers.9.mlp.fc1", 24, 16)}
    with pytest.raises(DiffLoRAError, match="1 of its 2 modules do not exist here: text_encoder"):
        pipe.load_lora(both)


@pytest.mark.filterwarnings("error")
def test_row_55_layers_that_the_file_does_not_name_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    """A VACE model has more projections than the file: no warning; and a long list is told by four and a count."""
    name = "transformer.blocks.0.attn1.to_q"
    state = pair(name, 12, 12)
    report = check(tiny_model("wan-vace"), state, {"blocks.0.attn1.to_q": product(state, name)})
    assert not caplog.records and report.notes == () and report.unmatched == ()
    assert "transformer.proj_out" in report.untouched and "transformer.vace_blocks.0.proj_out" in report.untouched
    many = {k: v for n in range(20) for k, v in pair(f"transformer.blocks.{n + 5}.attn1.to_q", 12, 12).items()}
    with pytest.raises(DiffLoRAError) as caught:
        attached(tiny_model("wan-vace")).load_lora({**state, **many})
    assert "20 of its 21" in str(caught.value) and str(caught.value).count("attn1.to_q") <= 6


def test_row_56_no_fixed_number_of_unmatched_keys_refuses_a_file() -> None:
    """Nine of ten layers match: refused as it is, applied and reported when asked, however many are unmatched."""
    names = [f"blocks.{n}.lin" for n in range(10)]
    model = tree(**{n.replace(".", "__"): nn.Linear(4, 8) for n in names[:9]})
    state = {k: v for i, n in enumerate(names, 1) for k, v in pair(f"transformer.{n}", 8, 4, seed=i).items()}
    unchanged(attached(model), state, "1 of its 10 modules do not exist here: transformer.blocks.9.lin")
    changes = {n: product(state, f"transformer.{n}") for n in names[:9]}
    report = check(model, state, changes, strict=False)
    assert report.partial and report.unmatched == ("transformer.blocks.9.lin",) and len(report.matched) == 9
    one = tree(blocks__0__lin=nn.Linear(4, 8))
    report = check(one, state, {"blocks.0.lin": changes["blocks.0.lin"]}, strict=False)
    assert len(report.unmatched) == 9


def test_row_57_tensors_without_values_are_refused() -> None:
    """An adapter on the meta device can be read and bound, never loaded: nothing would be in it."""
    state = {k: v.to("meta") for k, v in pair(LIN, 8, 4, alpha=1.0).items()}
    assert difflora.bind(difflora.load(state), linear()).matched == (LIN,)
    unchanged(attached(linear()), state, "meta")
    half = {k: v.to("meta") if "lora_B" in k else v for k, v in pair(LIN, 8, 4).items()}
    unchanged(attached(linear()), half, "meta")
    unchanged(attached(linear()), {**pair(LIN, 8, 4), f"{LIN}.alpha": torch.tensor(1.0, device="meta")}, "meta")


def test_row_57_a_model_on_the_meta_device_takes_no_adapter_into_its_weights() -> None:
    """After a load no tensor of the adapter is on meta; weights that are not there yet cannot be merged into."""
    state = pair(LIN, 8, 4)
    model = linear().to("meta")
    assert difflora.bind(difflora.load(state), model).matched == (LIN,)
    with pytest.raises(DiffLoRAError, match="mode='merged'"):
        attached(model).load_lora(state, mode="merged")
    pipe = attached(linear())
    pipe.load_lora(state, name="it", mode="kernel")
    assert pipe.loras[0].device == "cpu"
    assert bool(torch.isfinite(pipe.transformer.get_submodule("blocks.0.lin")(rand(2, 4))).all())


@pytest.mark.parametrize(("alpha", "told"), [(4.0, False), (4.0 / 3, True)])
def test_row_20_the_scale_of_the_other_modules_says_whether_alpha_was_raised(alpha: float, told: bool) -> None:
    """Beside modules at a third, a fused one at a third was raised; one at a ninth was not."""
    state = {**fused_of_three(alpha)[0], **pair("transformer.proj_out", 4, 8, rank=6, alpha=2.0)}
    assert bool(difflora.load(state, family="flux").notes) == told
