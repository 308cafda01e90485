"""Real files, reduced to {key: shape}: each is explained to the last key, or refused by name with the reason."""

import json
from collections import Counter
from pathlib import Path

import pytest

from difflora.formats.match import explain
from difflora.formats.rules import Entry

KEYS = Path(__file__).parent / "keys"

EXPLAINED = {
    "flux_lora_kohya_format": ("kohya", "flux", 494),
    "flux_kohya_sdscripts_doc": ("kohya", "flux", 494),
    "flux_lora_diffusers_format": ("diffusers", "flux", 494),
    "flux_diffusers_aitoolkit_sdscripts_doc": ("diffusers", "flux", 494),
    # Without modulation: Chroma has the same modules.
    "flux_lora_diffusers_base_model_format": ("peft", "flux|chroma", 381),
    "flux_lora_aitoolkit_format": ("comfy", "flux|chroma", 418),
    "generated/sdxl_kohya_sgm": ("kohya", "sdxl", 722),
    "generated/sdxl_kohya_diffusers_names_te": ("kohya", "sdxl", 986),
    # A UNet whose cross-attention is 96 wide: none of the published families, and the same modules in each.
    "generated/lycoris_sd_locon": ("kohya", "sd1|sd2|sdxl", 81),
    "generated/lycoris_sd_locon_tucker": ("kohya", "sd1|sd2|sdxl", 81),
    "generated/lycoris_sd_dylora": ("kohya", "sd1|sd2|sdxl", 81),
    **{
        f"generated/lycoris_sd_{name}": ("kohya", "sd1|sd2|sdxl", count)
        for name, count in {
            **dict.fromkeys(("boft", "diag_oft", "diag_oft_rescaled", "dora_out", "glora", "ia3", "loha"), 81),
            **dict.fromkeys(("lokr", "lokr_full", "lokr_tucker"), 81),
            "full": 138,
            "norm_locon": 145,
        }.items()
    },
    "flux_control_lora_format": ("bare", "flux", 1160),
    "flux_dora_onetrainer_format": ("kohya", "flux", 506),
    "flux_lora_xlabs_format": ("bare", "flux", 24),
    "flux_lycoris_lokr_wrapper": ("lycoris", "flux", 30),
    # Shapes that fit no model: FLUX.2, which keeps linear1 whole, has the fewest rows that do not add up.
    "flux_lokr_bfl_format": ("comfy", "flux2", 8),
    "anima_lora_kohya_format": ("kohya", "cosmos2|anima", 11),
    "anima_lora_lokr_format": ("comfy", "cosmos2|anima", 3),
    "anima_lora_peft_format": ("comfy", "cosmos2|anima", 6),
    "krea2_lora_kohya_format": ("kohya", "krea2", 40),
    # Two projections, which all of these have by the same names and widths.
    "qwen_image_lora_diffusers_format": ("bare", "flux|flux2|chroma|qwen-image|hunyuan-video", 3),
}


def listing(name: str) -> dict[str, tuple[int, ...]]:
    keys = json.loads((KEYS / f"{name}.json").read_text())["keys"]
    return {key: tuple(shape) for key, shape in keys.items()}


def modules(name: str) -> dict[tuple[str, str], Entry]:
    return {(entry.component, entry.path): entry for entry in explain(listing(name)).entries}


def test_every_listing_has_an_expectation() -> None:
    files = {str(path.relative_to(KEYS).with_suffix("")) for path in KEYS.rglob("*.json") if path.parent.name != "maps"}
    assert files == EXPLAINED.keys()


@pytest.mark.parametrize("name", EXPLAINED)
def test_every_key_is_used(name: str) -> None:
    shapes = listing(name)
    found = explain(shapes)
    assert (found.layout, found.family, len(found.entries)) == EXPLAINED[name]
    assert {key for entry in found.entries for key in entry.keys.values()} == shapes.keys()
    assert len({(entry.component, entry.path) for entry in found.entries}) == len(found.entries)
    assert not found.notes


def test_fused_flux_projections_become_rows_of_one_pair() -> None:
    found = modules("flux_lora_kohya_format")
    stem = "lora_unet_double_blocks_3_txt_attn_qkv"
    keys = {"down": f"{stem}.lora_down.weight", "up": f"{stem}.lora_up.weight", "alpha": f"{stem}.alpha"}
    for n, c in enumerate("qkv"):
        path = f"transformer_blocks.3.attn.add_{c}_proj"
        rows = ((3072 * n, 3072 * (n + 1)),)
        assert found["transformer", path] == Entry("transformer", path, "lora", keys, rows)
    assert found["transformer", "single_transformer_blocks.37.proj_mlp"].rows == ((9216, 21504),)
    assert found["transformer", "single_transformer_blocks.37.attn.to_v"].rows == ((6144, 9216),)
    assert found["transformer", "single_transformer_blocks.37.proj_out"].rows == ()
    assert found["transformer", "transformer_blocks.18.norm1_context.linear"].rows == ()


def test_flux_layouts_name_the_same_modules() -> None:
    assert modules("flux_lora_kohya_format").keys() == modules("flux_lora_diffusers_format").keys()
    assert modules("flux_lora_aitoolkit_format").keys() < modules("flux_lora_diffusers_format").keys()


def test_sdxl_names_place_every_module() -> None:
    sgm, diffusers = modules("generated/sdxl_kohya_sgm"), modules("generated/sdxl_kohya_diffusers_names_te")
    assert sgm.keys() == {name for name in diffusers if name[0] == "unet"}
    assert sgm["unet", "down_blocks.1.attentions.0.proj_in"].keys["alpha"] == "lora_unet_input_blocks_4_1_proj_in.alpha"
    count = [sum(component == wanted for component, _ in diffusers) for wanted in ("text_encoder", "text_encoder_2")]
    assert count == [72, 192]
    path = "text_model.encoder.layers.31.mlp.fc1"
    assert diffusers["text_encoder_2", path].keys["down"] == (
        "lora_te2_text_model_encoder_layers_31_mlp_fc1.lora_down.weight"
    )


def test_convolutions_keep_their_roles() -> None:
    tucker = modules("generated/lycoris_sd_locon_tucker")["unet", "down_blocks.0.resnets.0.conv1"]
    assert tucker.keys.keys() == {"down", "up", "mid", "alpha"}
    dylora = modules("generated/lycoris_sd_dylora")["unet", "conv_in"]
    assert dylora.keys.keys() == {"down", "up", "alpha"}


def test_a_control_lora_sets_norms_adds_biases_and_widens_the_input() -> None:
    found = explain(listing("flux_control_lora_format"))
    assert Counter(entry.kind for entry in found.entries) == {"lora": 504, "lora_bias": 504, "set": 152}
    entries = {entry.path: entry for entry in found.entries}
    norm = entries["transformer_blocks.0.attn.norm_added_k"]
    assert (norm.kind, norm.keys) == ("set", {"value": "double_blocks.0.txt_attn.norm.key_norm.scale"})
    bias = entries["single_transformer_blocks.3.proj_mlp.bias"]
    assert (bias.kind, bias.rows) == ("lora_bias", ((9216, 21504),))
    assert bias.keys == {
        "diff": "single_blocks.3.linear1.lora_B.bias",
        "down": "single_blocks.3.linear1.lora_A.weight",
    }
    assert entries["norm_out.linear.bias"].rows == ((3072, 6144), (0, 3072))
    assert found.widens == (("transformer", "x_embedder"),)


def test_kinds_of_the_generated_listings() -> None:
    for name, kind, roles in (
        ("boft", "oft", {"blocks", "alpha"}),
        ("diag_oft_rescaled", "oft", {"blocks", "alpha", "rescale"}),
        ("dora_out", "lora", {"down", "up", "alpha", "dora_scale"}),
        ("full", "diff", {"diff"}),
        ("glora", "glora", {"a1", "a2", "b1", "b2", "alpha"}),
        ("ia3", "ia3", {"weight", "on_input"}),
        ("loha", "loha", {"w1_a", "w1_b", "w2_a", "w2_b", "alpha"}),
    ):
        entry = modules(f"generated/lycoris_sd_{name}")["unet", "mid_block.attentions.0.proj_in"]
        assert (entry.kind, entry.keys.keys()) == (kind, roles)
    assert modules("generated/lycoris_sd_norm_locon")["unet", "down_blocks.0.resnets.0.norm1.bias"].kind == "diff"
