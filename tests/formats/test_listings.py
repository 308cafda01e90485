"""Real files, reduced to {key: shape}: each is explained to the last key, or refused by name with the reason."""

import json
from pathlib import Path

import pytest

from difflora.formats.errors import DiffLoRAError
from difflora.formats.match import explain
from difflora.formats.rules import Entry

KEYS = Path(__file__).parent / "keys"

EXPLAINED = {
    "flux_lora_kohya_format": ("kohya", "flux", 494),
    "flux_kohya_sdscripts_doc": ("kohya", "flux", 494),
    "flux_lora_diffusers_format": ("diffusers", "flux", 494),
    "flux_diffusers_aitoolkit_sdscripts_doc": ("diffusers", "flux", 494),
    "flux_lora_diffusers_base_model_format": ("peft", "flux", 381),
    "flux_lora_aitoolkit_format": ("comfy", "flux", 418),
    "generated/sdxl_kohya_sgm": ("kohya", "sdxl", 722),
    "generated/sdxl_kohya_diffusers_names_te": ("kohya", "sdxl", 986),
    # A UNet whose cross-attention is 96 wide: none of the published families, and the same modules in each.
    "generated/lycoris_sd_locon": ("kohya", "sd1|sd2|sdxl", 81),
    "generated/lycoris_sd_locon_tucker": ("kohya", "sd1|sd2|sdxl", 81),
    "generated/lycoris_sd_dylora": ("kohya", "sd1|sd2|sdxl", 81),
    # Two projections of Qwen-Image, which FLUX.1 has too, by the same names and widths: portable.
    "qwen_image_lora_diffusers_format": ("bare", "flux", 3),
}
REFUSED = {
    "anima_lora_kohya_format": "no known family has any of its modules",
    "anima_lora_peft_format": "no known family has any of its modules",
    "anima_lora_lokr_format": "LoKr",
    "krea2_lora_kohya_format": "no known family has any of its modules",
    "flux_control_lora_format": "replaced weights",
    "flux_dora_onetrainer_format": "DoRA",
    "flux_lokr_bfl_format": "LoKr",
    "flux_lora_xlabs_format": "XLabs",
    "flux_lycoris_lokr_wrapper": "LoKr",
    "generated/lycoris_sd_boft": "OFT/BOFT",
    "generated/lycoris_sd_diag_oft": "OFT/BOFT",
    "generated/lycoris_sd_diag_oft_rescaled": "OFT/BOFT",
    "generated/lycoris_sd_dora_out": "DoRA",
    "generated/lycoris_sd_full": "full-weight difference",
    "generated/lycoris_sd_glora": "GLoRA",
    "generated/lycoris_sd_ia3": "IA3",
    "generated/lycoris_sd_loha": "LoHa",
    "generated/lycoris_sd_lokr": "LoKr",
    "generated/lycoris_sd_lokr_full": "LoKr",
    "generated/lycoris_sd_lokr_tucker": "LoKr",
    "generated/lycoris_sd_norm_locon": "norm difference",
}


def listing(name: str) -> dict[str, tuple[int, ...]]:
    keys = json.loads((KEYS / f"{name}.json").read_text())["keys"]
    return {key: tuple(shape) for key, shape in keys.items()}


def modules(name: str) -> dict[tuple[str, str], Entry]:
    return {(entry.component, entry.path): entry for entry in explain(listing(name)).entries}


def test_every_listing_has_an_expectation() -> None:
    files = {str(path.relative_to(KEYS).with_suffix("")) for path in KEYS.rglob("*.json") if path.parent.name != "maps"}
    assert files == EXPLAINED.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", EXPLAINED)
def test_every_key_is_used(name: str) -> None:
    shapes = listing(name)
    found = explain(shapes)
    assert (found.layout, found.family, len(found.entries)) == EXPLAINED[name]
    assert {key for entry in found.entries for key in entry.keys.values()} == shapes.keys()
    assert len({(entry.component, entry.path) for entry in found.entries}) == len(found.entries)
    assert not found.notes


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    shapes = listing(name)
    with pytest.raises(DiffLoRAError) as caught:
        explain(shapes, source=f"{name}.safetensors")
    text = str(caught.value)
    assert text.startswith(f"{name}.safetensors")
    assert REFUSED[name] in text
    assert 1 <= sum(text.count(key + end) for key in shapes for end in (",", " ", ".", ")")) <= 4


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
