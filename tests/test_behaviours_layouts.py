"""What other loaders got wrong about key names (rows 1-14) and about fused and reordered matrices (rows 29-35).

Every test builds the smallest file that shows the behaviour and compares with W + strength * change.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from behaving import attached, check, expected, pair, product, rand, restored, tiny_model, tree, unchanged
from torch import Tensor, nn

import difflora
from difflora import DiffLoRAError

# ---- files and key names --------------------------------------------------------------------------------------------


def test_row_1_a_file_of_few_blocks_changes_just_these() -> None:
    """No block has to be there: one linear1 of FLUX.2 is one module, and no other key is looked for."""
    stem = "diffusion_model.single_blocks.1.linear1"
    state = pair(stem, 72, 8)
    name = "single_transformer_blocks.1.attn.to_qkv_mlp_proj"
    report = check(tiny_model("flux2"), state, {name: product(state, stem)})
    assert report.matched == (f"transformer.{name}",)


def test_row_1_only_the_out_projections_of_two_single_blocks() -> None:
    """FLUX.1: the last projections of two single blocks; the blocks before them are not in the file."""
    state, changes = {}, {}
    for block in (1, 2):
        stem = f"lora_unet_single_blocks_{block}_linear2"
        state |= pair(stem, 8, 40, seed=block)
        changes[f"single_transformer_blocks.{block}.proj_out"] = product(state, stem)
    assert check(tiny_model("flux"), state, changes).family == "flux"


def test_row_1_a_fused_target_with_one_trained_part() -> None:
    """The rows of the parts that the file lacks stay those of the base."""
    model = tiny_model("flux")
    model.fuse_qkv_projections()
    stem = "transformer.transformer_blocks.0.attn.to_v"
    state = pair(stem, 8, 8)
    change = torch.cat([torch.zeros(16, 8), product(state, stem)])
    report = check(model, state, {"transformer_blocks.0.attn.to_qkv": change})
    assert report.matched == ("transformer.transformer_blocks.0.attn.to_v",)


@pytest.mark.parametrize("stray", ["", "_"])
def test_row_3_flattened_names_are_those_of_the_models_modules(stray: str) -> None:
    """A name whose dots became underscores is looked up among the model's; a stray underscore at its end is nothing."""
    stem = "lora_transformer_single_transformer_blocks_0_attn_to_k"
    state = {k.replace(stem, stem + stray): v for k, v in pair(stem, 8, 8, alpha=1.0).items()}
    changes = {"single_transformer_blocks.0.attn.to_k": 0.5 * product(state, stem + stray)}
    check(tiny_model("flux"), state, changes)


def test_row_3_a_flattened_name_with_two_meanings_is_refused() -> None:
    """`a_b.c` and `a.b_c` are both `a_b_c`: nobody can tell, unless the model has just one of them."""
    state = pair("lora_transformer_a_b_c", 6, 8)
    change = product(state, "lora_transformer_a_b_c")
    check(tree(a_b__c=nn.Linear(8, 6)), state, {"a_b.c": change})
    check(tree(a__b_c=nn.Linear(8, 6)), state, {"a.b_c": change})
    unchanged(
        attached(tree(a_b__c=nn.Linear(8, 6), a__b_c=nn.Linear(8, 6))),
        state,
        r"may mean transformer\.a\.b_c, transformer\.a_b\.c",
    )


@pytest.mark.parametrize("stream", ["img", "txt"])
def test_row_4_a_fused_qkv_of_kohya_changes_the_picture(stream: str) -> None:
    """The fused attention acts as W + B A on q, k and v, and so does the whole model."""
    stem = f"lora_unet_double_blocks_0_{stream}_attn_qkv"
    state = pair(stem, 24, 8, rank=4)
    names = [f"to_{c}" for c in "qkv"] if stream == "img" else [f"add_{c}_proj" for c in "qkv"]
    changes = {
        f"transformer_blocks.0.attn.{n}": rows for n, rows in zip(names, product(state, stem).chunk(3), strict=True)
    }
    check(tiny_model("flux"), state, changes)
    model = tiny_model("flux")
    wanted, before, pipe = expected(model, changes, 1.0), flux_forward(model), attached(model)
    for mode in ("merged", "kernel"):
        with restored(pipe):
            pipe.load_lora(state, mode=mode)
            torch.testing.assert_close(flux_forward(model), flux_forward(wanted), rtol=1e-5, atol=1e-5)
            assert (flux_forward(model) - before).abs().max() > 1e-3
            pipe.unload_loras()


@torch.no_grad()
def flux_forward(model: nn.Module) -> Tensor:
    """What a tiny FLUX.1 transformer makes of four picture and three text tokens."""
    ids = torch.arange(12.0).reshape(4, 3)
    return model(
        hidden_states=rand(1, 4, 4, seed=1, size=1.0), encoder_hidden_states=rand(1, 3, 8, seed=2, size=1.0),
        pooled_projections=rand(1, 8, seed=3, size=1.0), timestep=torch.tensor([0.5]), img_ids=ids,
        txt_ids=torch.zeros(3, 3), return_dict=False,
    )[0]  # fmt: skip


def z_image(fused: bool) -> nn.Module:
    """A tiny Z-Image; `fused`: one layer's attention, as a serving engine packs it."""
    return tree(layers__1__attention__to_qkv=nn.Linear(8, 24, bias=False)) if fused else tiny_model("z-image")


@pytest.mark.parametrize("stem", ["diffusion_model.layers.1.attention.to_{}", "lora_unet_layers_1_attention_to_{}"])
def test_row_5_split_parts_on_a_fused_z_image(stem: str) -> None:
    """to_q alone on a fused qkv: the rows of k and v stay; all three: each on its own rows."""
    one, all_parts, changes = pair(stem.format("q"), 8, 8), {}, []
    rows = torch.cat([product(one, stem.format("q")), torch.zeros(16, 8)])
    check(z_image(True), one, {"layers.1.attention.to_qkv": rows})
    for n, part in enumerate("qkv"):
        all_parts |= pair(stem.format(part), 8, 8, rank=n + 1, alpha=2.0, seed=n + 1)
        changes.append(product(all_parts, stem.format(part)) * 2.0 / (n + 1))
    check(z_image(True), all_parts, {"layers.1.attention.to_qkv": torch.cat(changes)})
    check(z_image(False), all_parts, {f"layers.1.attention.to_{p}": c for p, c in zip("qkv", changes, strict=True)})


@pytest.mark.parametrize("leaf", ["out", "to_out.0"])
def test_row_5_the_output_projection_has_two_names_and_a_part_is_reported(leaf: str) -> None:
    """`out` is `to_out.0`; what the model has no module for is an error, or named in the report when asked."""
    stem = f"diffusion_model.layers.1.attention.{leaf}"
    state = pair(stem, 8, 8)
    changes = {"layers.1.attention.to_out.0": product(state, stem)}
    check(z_image(False), state, changes)
    more = {**state, **pair("diffusion_model.layers.25.attention.to_q", 8, 8)}
    unchanged(attached(z_image(False)), more, "1 of its 2 modules do not exist here.*strict=False")
    report = check(z_image(False), more, changes, strict=False)
    assert report.partial and report.unmatched == ("transformer.layers.25.attention.to_q",)


def test_row_6_fused_and_split_names_of_one_layer_are_refused() -> None:
    """A file with both qkv and to_q for one layer says two things about the same rows: it is not half applied."""
    stem = "diffusion_model.layers.0.attention."
    state = {**pair(stem + "qkv", 24, 8), **pair(stem + "to_q", 8, 8)}
    unchanged(attached(z_image(False)), state, r"both change transformer\.layers\.0\.attention\.to_q")
    apart = {**pair(stem + "qkv", 24, 8), **pair(stem.replace("0", "1") + "to_q", 8, 8, seed=2)}
    parts = product(apart, stem + "qkv").chunk(3)
    changes = {f"layers.0.attention.to_{p}": c for p, c in zip("qkv", parts, strict=True)}
    changes["layers.1.attention.to_q"] = product(apart, stem.replace("0", "1") + "to_q")
    check(z_image(False), apart, changes)


SPELLINGS = ("{}.lora_{}.weight", "transformer.{}.lora_{}.weight", "diffusion_model.{}.lora_{}.weight",
             "base_model.model.{}.lora_{}.weight", "{}.lora_{}.default.weight", "transformer.{}.lora_{}.mine.weight",
             "base_model.model.transformer.{}.lora_{}.weight", "transformer.base_model.model.{}.lora_{}.weight",
             "{}.lora_{}")  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", ["qwen-image", "flux", "minimax-h3"])
def test_row_7_one_adapter_in_many_spellings(family: str, spelling: str) -> None:
    """With or without a prefix, and with PEFT's name of the adapter in the key: the same change."""
    name, down, up = "transformer_blocks.0.attn.to_q", rand(2, 8), rand(16 if family == "minimax-h3" else 8, 2, seed=1)
    state = {spelling.format(name, "A"): down, spelling.format(name, "B"): up}
    report = check(tiny_model(family), state, {name: up @ down})
    assert ("slot name" in str(report)) == any(slot in spelling for slot in ("default", "mine"))


ARCHITECTURES = {
    "flux": "transformer_blocks.0.attn.to_q", "flux2": "transformer_blocks.0.attn.to_q",
    "sd3": "transformer_blocks.1.attn.to_q", "qwen-image": "transformer_blocks.0.img_mlp.net.2",
    "hunyuan-video": "single_transformer_blocks.0.proj_mlp", "ltx": "transformer_blocks.0.attn1.to_q",
    "wan": "blocks.1.attn2.to_out.0", "z-image": "layers.1.feed_forward.w2",
    "minimax-h3": "transformer_blocks.0.ff.net.2",
    "lumina2": "layers.0.attn.to_k", "sd": "mid_block.attentions.0.transformer_blocks.0.attn1.to_q",
    "sdxl": "mid_block.attentions.0.transformer_blocks.1.attn2.to_k",
}  # fmt: skip
PREFIXES = ("", "{}.", "diffusion_model.", "model.diffusion_model.", "base_model.model.", "base_model.model.{}.",
            "{}.base_model.model.", "lora_unet_", "lora_unet__", "lora_transformer_", "lycoris_")  # fmt: skip


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    """One model per architecture; every check leaves it as it was."""
    return {name: tiny_model(name) for name in ARCHITECTURES}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_row_8_every_prefix_works_for_every_architecture(
    family: str, prefix: str, models: dict[str, nn.Module]
) -> None:
    """One table of prefixes: what is accepted for one architecture is accepted for all."""
    component, name = "unet" if family in ("sd", "sdxl") else "transformer", ARCHITECTURES[family]
    text = prefix.format(component)
    stem = text + (name.replace(".", "_") if text.startswith(("lora_", "lycoris_")) else name)
    out, width = models[family].get_submodule(name).weight.shape
    state = pair(stem, out, width, alpha=1.0)
    check(models[family], state, {name: product(state, stem) / 2}, component=component, strengths=(0.5,))


@pytest.mark.parametrize("prefix", ["base_model.model.", "unet.", "lycoris_", "lora_unet_"])
def test_row_8_a_lokr_of_sdxl_under_the_same_prefixes(prefix: str, models: dict[str, nn.Module]) -> None:
    """The kind of the factors has nothing to do with what their names begin with."""
    name = ARCHITECTURES["sdxl"]
    out, width = models["sdxl"].get_submodule(name).weight.shape
    stem = prefix + (name.replace(".", "_") if prefix.endswith("_") else name)
    w1, w2 = rand(2, 4), rand(out // 2, width // 4, seed=1)
    state = {f"{stem}.lokr_w1": w1, f"{stem}.lokr_w2": w2, f"{stem}.alpha": torch.tensor(4.0)}
    check(models["sdxl"], state, {name: torch.kron(w1, w2)}, component="unet", kernel=False)


def sdxl(projection: bool) -> Any:
    pipe = tiny.sdxl_pipeline()
    return attached(unet=pipe.unet, text_encoder=pipe.text_encoder, text_encoder_2=tiny.clip(projection))


def test_row_10_a_module_that_the_text_encoder_lacks() -> None:
    """text_projection applies where it exists; where it does not, that one is refused, or left out and reported."""
    known = "lora_unet_mid_block_attentions_0_transformer_blocks_1_attn2_to_k"
    state = {**pair(known, 32, 32), **pair("lora_te2_text_projection", 16, 16)}
    unchanged(sdxl(False), state, "text_encoder_2.text_projection.*strict=False")
    pipe = sdxl(False)
    unet = pipe.unet.get_submodule(ARCHITECTURES["sdxl"]).weight
    before = unet.detach().clone()
    with restored(pipe):
        report = pipe.load_lora(state, strict=False)
        assert report.matched == (f"unet.{ARCHITECTURES['sdxl']}",)
        assert report.unmatched == ("text_encoder_2.text_projection",)
        torch.testing.assert_close(unet, before + product(state, known), rtol=0, atol=1e-6)
        pipe.unload_loras()
    pipe = sdxl(True)
    weight = pipe.text_encoder_2.text_projection.weight
    before = weight.detach().clone()
    with restored(pipe):
        assert not pipe.load_lora(state).partial
        torch.testing.assert_close(weight, before + product(state, "lora_te2_text_projection"), rtol=0, atol=1e-6)
        pipe.unload_loras()


def xlabs(stem: str, out: int, width: int, seed: int) -> dict[str, Tensor]:
    return {f"{stem}.down.weight": rand(2, width, seed=seed), f"{stem}.up.weight": rand(out, 2, seed=seed + 9)}


@pytest.mark.parametrize("prefix", ["", "diffusion_model."])
def test_row_11_processor_names(prefix: str) -> None:
    """lora1 is the picture's stream, lora2 the text's, single blocks have one; the user's name is in the list."""
    double, single = f"{prefix}double_blocks.0.processor.", f"{prefix}single_blocks.0.processor."
    state = {**xlabs(double + "proj_lora1", 8, 8, 1), **xlabs(double + "proj_lora2", 8, 8, 2),
             **xlabs(single + "proj_lora", 8, 40, 3)}  # fmt: skip

    def change(stem: str) -> Tensor:
        return state[f"{stem}.up.weight"] @ state[f"{stem}.down.weight"]

    changes = {"transformer_blocks.0.attn.to_out.0": change(double + "proj_lora1"),
               "transformer_blocks.0.attn.to_add_out": change(double + "proj_lora2"),
               "single_transformer_blocks.0.proj_out": change(single + "proj_lora")}  # fmt: skip
    assert len(check(tiny_model("flux"), state, changes).matched) == 3
    for stem, names in {double + "qkv_lora1": "transformer_blocks.0.attn.to_{}", single + "qkv_lora":
                        "single_transformer_blocks.0.attn.to_{}", double + "qkv_lora2":
                        "transformer_blocks.0.attn.add_{}_proj"}.items():  # fmt: skip
        state |= xlabs(stem, 24, 8, 4)
        changes |= {names.format(c): rows for c, rows in zip("qkv", change(stem).chunk(3), strict=True)}
    check(tiny_model("flux"), state, changes)
    pipe = attached(tiny_model("flux"))
    pipe.load_lora_weights(state, adapter_name="from the shop")
    assert pipe.get_list_adapters() == {"transformer": ["from the shop"]}


def test_row_13_two_denoisers() -> None:
    """Each of Wan's experts takes its own file at its own strength, and unloading covers both."""
    first, second = tiny_model("wan"), tiny_model("wan")
    pipe, stem = attached(first, transformer_2=second), "diffusion_model.blocks.0.self_attn.q"
    high, low = pair(stem, 12, 12, seed=1), pair(stem, 12, 12, seed=2)
    one, two = (m.blocks[0].attn1.to_q.weight for m in (first, second))
    before = one.detach().clone(), two.detach().clone()
    with restored(pipe):
        pipe.load_lora(high, name="high")
        pipe.load_lora(low, name="low", component="transformer_2")
        held = one.detach().clone()
        for strength in (1.0, -0.25):
            pipe.set_loras({"high": 1.0, "low": strength})
            assert torch.equal(one, held)
            torch.testing.assert_close(two, before[1] + strength * product(low, stem), rtol=0, atol=1e-6)
        torch.testing.assert_close(one, before[0] + product(high, stem), rtol=0, atol=1e-6)
        pipe.unload_loras()
        pipe.load_lora({"transformer": high, "transformer_2": low}, name="both")
        pipe.set_loras({"both": {"transformer": 0.5, "transformer_2": 2.0}})
        torch.testing.assert_close(one, before[0] + 0.5 * product(high, stem), rtol=0, atol=1e-6)
        torch.testing.assert_close(two, before[1] + 2.0 * product(low, stem), rtol=0, atol=1e-6)
        pipe.unload_loras()


# family -> native stem, its rows and columns, and the modules that it means
NATIVE: dict[str, dict[str, tuple[int, int, tuple[str, ...]]]] = {
    "sd3": {
        "lora_unet_joint_blocks_0_x_block_attn_qkv": (24, 8, tuple(f"transformer_blocks.0.attn.to_{c}" for c in "qkv")),
        "lora_unet_joint_blocks_1_context_block_attn_qkv": (
            24, 8, tuple(f"transformer_blocks.1.attn.add_{c}_proj" for c in "qkv")),
        "lora_unet_joint_blocks_0_context_block_mlp_fc1": (32, 8, ("transformer_blocks.0.ff_context.net.0.proj",)),
    },
    "ltx": {
        "diffusion_model.patchify_proj": (8, 4, ("proj_in",)),
        "diffusion_model.transformer_blocks.0.attn2.to_v": (8, 8, ("transformer_blocks.0.attn2.to_v",)),
        "diffusion_model.adaln_single.linear": (48, 8, ("time_embed.linear",)),
    },
    "framepack": {
        "lora_unet_double_blocks_0_img_attn_qkv": (24, 8, tuple(f"transformer_blocks.0.attn.to_{c}" for c in "qkv")),
        "lora_unet_single_blocks_0_modulation_linear": (24, 8, ("single_transformer_blocks.0.norm.linear",)),
        "lora_unet_single_transformer_blocks_0_proj_mlp": (32, 8, ("single_transformer_blocks.0.proj_mlp",)),
    },
}  # fmt: skip


@pytest.mark.parametrize("family", NATIVE)
def test_row_14_native_names_on_a_diffusers_model(family: str) -> None:
    """A file in the names of the original code acts on diffusers' modules."""
    state, changes = {}, {}
    for n, (stem, (out, width, names)) in enumerate(NATIVE[family].items()):
        state |= pair(stem, out, width, alpha=1.0, seed=n + 1)
        changes |= dict(zip(names, (product(state, stem) / 2).chunk(len(names)), strict=True))
    check(tiny_model(family), state, changes)


def test_row_14_an_unknown_architecture_is_named() -> None:
    """A file of no known family is refused, and the error says which family comes closest and what it lacks."""
    state = {**pair("lora_unet_joint_blocks_0_x_block_attn_qkv", 24, 8),
             **pair("lora_unet_joint_blocks_0_x_block_frobnicator", 8, 8)}  # fmt: skip
    unchanged(attached(tiny_model("sd3")), state, "sd3 comes closest and lacks 1 of its 2 modules.*frobnicator")
    unchanged(attached(tiny_model("ltx")), pair("diffusion_model.no.such.thing", 8, 8), "no known family has any")


# ---- fused, split and reordered matrices ----------------------------------------------------------------------------


def swapped(rows: Tensor) -> Tensor:
    return torch.cat([*reversed(rows.chunk(2))])


@pytest.mark.parametrize("family", ["flux", "flux2", "sd3", "hunyuan-video"])
@pytest.mark.parametrize("flat", [True, False])
def test_row_29_the_halves_of_the_last_modulation(family: str, flat: bool) -> None:
    """(shift, scale) becomes (scale, shift): the rows of the up factor move, the down factor stays whole."""
    stem = "lora_unet_final_layer_adaLN_modulation_1" if flat else "diffusion_model.final_layer.adaLN_modulation.1"
    state = pair(stem, 16, 8, rank=4)
    change = swapped(product(state, stem))
    down, up = state.values()
    torch.testing.assert_close(swapped(up) @ down, change)
    check(tiny_model(family), state, {"norm_out.linear": change})


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_row_29_whole_differences_and_magnitudes_are_swapped_too(family: str) -> None:
    """Rows are rows, of a difference, a bias or a magnitude as of a factor; diffusers' own name has none to swap."""
    stem, model = "diffusion_model.final_layer.adaLN_modulation.1", tiny_model(family)
    diff, bias = rand(16, 8), rand(16, seed=1)
    state = {f"{stem}.diff": diff, f"{stem}.diff_b": bias}
    check(model, state, {"norm_out.linear": swapped(diff), "norm_out.linear.bias": swapped(bias)}, kernel=False)
    held, magnitude, factors = model.norm_out.linear.weight.detach(), rand(16, 1, seed=2) + 2, pair(stem, 16, 8)
    adapted = held + swapped(product(factors, stem))
    change = swapped(magnitude) * adapted / adapted.norm(dim=1, keepdim=True) - held
    check(model, {**factors, f"{stem}.dora_scale": magnitude}, {"norm_out.linear": change}, kernel=False)
    own = pair("transformer.norm_out.linear", 16, 8)
    check(model, own, {"norm_out.linear": product(own, "transformer.norm_out.linear")})


def test_row_30_gate_and_value_of_a_fused_feed_forward() -> None:
    """One code base stores (gate, value), the other (value, gate): both files make the same feed-forward."""
    native, own = "diffusion_model.blocks.0.mlp.fc1", "transformer.transformer_blocks.0.ff.net.0.proj"
    state, name = pair(native, 24, 8, rank=4), "transformer_blocks.0.ff.net.0.proj"
    down, up = state.values()
    turned = {f"{own}.lora_A.weight": down, f"{own}.lora_B.weight": swapped(up)}
    change = swapped(product(state, native))
    for source in (state, turned):
        check(tiny_model("minimax-h3"), source, {name: change})
    model, outputs = tiny_model("minimax-h3"), []
    pipe, x = attached(model), rand(5, 8, seed=3, size=1.0)
    for source in (state, turned):
        pipe.load_lora(source)
        outputs.append(model.transformer_blocks[0].ff(x).detach())
        pipe.unload_loras()
    assert torch.equal(*outputs)
    value, gate = (model.transformer_blocks[0].ff.net[0].proj.weight + change).chunk(2)
    wanted = nn.functional.linear(
        nn.functional.silu(x @ gate.T) * (x @ value.T), model.transformer_blocks[0].ff.net[2].weight
    )
    torch.testing.assert_close(outputs[0], wanted, rtol=1e-5, atol=1e-5)


def test_row_31_rows_head_by_head_land_where_they_belong() -> None:
    """One trainer stores q, k and v of each head in turn; rows tagged by number show where each lands."""
    model = tiny_model("minimax-h3", attention_head_dim=128, num_attention_heads=2, rope_freq_dim=16)
    native = "transformer.blocks.0.attn.qkv_proj"
    tags = torch.arange(768.0).reshape(768, 1) / 100
    blocks = tags.reshape(2, 3, 128, 1)  # head, part, row
    down = torch.ones(1, 8)
    for slot, parts in ((".default", blocks.transpose(0, 1).reshape(3, 256, 1)), ("", tags.reshape(3, 256, 1))):
        state = {f"{native}.lora_A{slot}.weight": down, f"{native}.lora_B{slot}.weight": tags}
        changes = {f"transformer_blocks.0.attn.to_{c}": part @ down for c, part in zip("qkv", parts, strict=True)}
        check(model, state, changes)


def test_row_31_grouped_query_rows_and_orders_that_nobody_knows() -> None:
    """Two kv heads for four q heads: q takes what the rest leaves; rows in no known order are refused."""
    stem = "diffusion_model.layers.0.attention.qkv"
    tags, down = torch.arange(16.0).reshape(16, 1), torch.ones(1, 8)
    state = {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": tags}
    parts = zip("qkv", tags.split([8, 4, 4]), strict=True)
    check(tiny_model("lumina2"), state, {f"layers.0.attn.to_{c}": rows @ down for c, rows in parts}, atol=1e-5)
    odd = {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": torch.ones(15, 1)}
    unchanged(attached(tiny_model("lumina2")), odd, "15 rows")
    slotted = "transformer.blocks.0.attn.qkv_proj"
    odd = {f"{slotted}.lora_A.default.weight": down, f"{slotted}.lora_B.default.weight": torch.ones(48, 1)}
    unchanged(attached(tiny_model("minimax-h3")), odd, "48 rows")


@pytest.mark.parametrize("rank", [4, 8, 6, 12])
@pytest.mark.parametrize("parts", [3, 4])
def test_row_32_the_down_factor_of_a_fused_pair_stays_whole(rank: int, parts: int) -> None:
    """Whatever divides the rank, only the rows of up are cut; the parts share one down."""
    stem = "lora_unet_double_blocks_0_img_attn_qkv" if parts == 3 else "lora_unet_single_blocks_0_linear1"
    block = "transformer_blocks.0." if parts == 3 else "single_transformer_blocks.0."
    sizes = [8, 8, 8] if parts == 3 else [8, 8, 8, 32]
    names = [f"{block}attn.to_{c}" for c in "qkv"] + [f"{block}proj_mlp"] * (parts - 3)
    state = pair(stem, sum(sizes), 8, rank=rank, alpha=2.0)
    rows = (product(state, stem) * 2.0 / rank).split(sizes)
    assert check(tiny_model("flux"), state, dict(zip(names, rows, strict=True))).ranks == (rank,)
    deltas = difflora.load(state, family="flux").components["transformer"]
    assert {id(deltas[name].down) for name in names} == {id(state[f"{stem}.lora_down.weight"])}


@pytest.mark.parametrize(
    "prefix", ["transformer.transformer_blocks.0.attn.", "lora_transformer_transformer_blocks_0_attn_"]
)
def test_row_33_parts_of_other_ranks_and_alphas_on_a_fused_target(prefix: str) -> None:
    """q of rank 2 and alpha 2, v of rank 3 and alpha 6, no k: each at its own scale, and zero rows."""
    state = {**pair(f"{prefix}to_q", 8, 8, rank=2, alpha=2.0), **pair(f"{prefix}to_v", 8, 8, rank=3, alpha=6.0, seed=2)}
    q, v = product(state, f"{prefix}to_q"), product(state, f"{prefix}to_v")
    fused = tiny_model("flux")
    fused.fuse_qkv_projections()
    rows = torch.cat([q, torch.zeros(8, 8), 2.0 * v])
    report = check(fused, state, {"transformer_blocks.0.attn.to_qkv": rows})
    assert report.ranks == (2, 3)
    check(tiny_model("flux"), state, {"transformer_blocks.0.attn.to_q": q, "transformer_blocks.0.attn.to_v": 2.0 * v})


def test_row_35_an_output_projection_under_another_name_binds_or_raises() -> None:
    """`to_out.0` is not taken for `to_out` in silence: a family's table renames it, any other model refuses it."""
    state = pair("transformer.block.to_out.0", 8, 8)
    unchanged(attached(tree(block__to_out=nn.Linear(8, 8), block__to_q=nn.Linear(8, 8))), state, r"block\.to_out\.0")
    both = {**state, **pair("transformer.block.to_q", 8, 8)}
    model = tree(block__to_out=nn.Linear(8, 8), block__to_q=nn.Linear(8, 8))
    unchanged(attached(model), both, r"block\.to_out\.0")
    renamed = pair("diffusion_model.double_blocks.0.img_attn.proj", 8, 8)
    changes = {"transformer_blocks.0.attn.to_out.0": product(renamed, "diffusion_model.double_blocks.0.img_attn.proj")}
    check(tiny_model("flux"), renamed, changes)
    with pytest.raises(DiffLoRAError, match="to_out"):
        difflora.bind(difflora.load(state), model)
