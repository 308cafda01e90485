"""What tells families apart, in its order: the model, names, row counts, published widths, metadata, the user."""

from collections.abc import Mapping
from typing import Any

import pytest

from difflora.formats import match
from difflora.formats.errors import DiffLoRAError
from difflora.formats.match import explain
from difflora.formats.rules import Family, Network, Rule

Model = Mapping[str, Mapping[str, tuple[int, ...]]]
BFL = "flux|flux2|chroma|hunyuan-video|hunyuan-video-1.5|hunyuan-image"
BLOCK = "down_blocks.1.attentions.0.transformer_blocks.0"


def pair(module: str, rows: int = 8, cols: int = 8) -> dict[str, tuple[int, ...]]:
    return {f"{module}.lora_down.weight": (2, cols), f"{module}.lora_up.weight": (rows, 2)}


def kohya(*paths: str, rows: int = 8, cols: int = 8) -> dict[str, tuple[int, ...]]:
    return {k: v for path in paths for k, v in pair(f"lora_unet_{path.replace('.', '_')}", rows, cols).items()}


def family(shapes: Mapping[str, tuple[int, ...]], **kwargs: Any) -> str | None:
    return explain(shapes, **kwargs).family


ATTN1, ATTN2 = kohya(f"{BLOCK}.attn1.to_q"), f"{BLOCK}.attn2.to_k"


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        pytest.param(ATTN1, "sd1|sd2|sdxl", id="shared names, unknown width"),
        pytest.param(kohya(ATTN2, cols=96), "sd1|sd2|sdxl", id="shared names, tiny context"),
        pytest.param(kohya(ATTN2, cols=768), "sd1", id="context of SD 1.x"),
        pytest.param(kohya(ATTN2, cols=1024), "sd2", id="context of SD 2.x"),
        pytest.param(kohya(ATTN2, cols=2048), "sdxl", id="context of SDXL"),
        pytest.param(
            kohya("up_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", rows=1280, cols=1280),
            "sd1|sd2",
            id="block width of SD 1.x and 2.x",
        ),
        pytest.param(
            kohya("up_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", rows=640, cols=640),
            "sdxl",
            id="block width of SDXL",
        ),
        pytest.param(kohya("add_embedding.linear_1"), "sdxl", id="a name of SDXL"),
        pytest.param(kohya("output_blocks.0.1.proj_in"), "sdxl", id="a number of SDXL"),
        pytest.param(kohya("input_blocks.1.1.proj_in"), "sd1|sd2", id="a number of SD"),
        pytest.param(ATTN1 | pair("lora_te2_text_model_encoder_layers_0_mlp_fc1"), "sdxl", id="an encoder of SDXL"),
        pytest.param(pair("lora_te1_text_model_encoder_layers_0_mlp_fc1"), "sdxl|flux|hidream|sd3", id="CLIP-L alone"),
        pytest.param(
            pair("lora_te_text_model_encoder_layers_0_self_attn_q_proj", 1024, 1024), "sd2", id="width of an encoder"
        ),
        pytest.param(kohya("double_blocks.0.img_attn.proj"), BFL, id="a name of BFL"),
        pytest.param(kohya("double_blocks.0.processor.proj_lora1"), "flux", id="a name of FLUX.1"),
    ],
)
def test_names_then_widths(shapes: Mapping[str, tuple[int, ...]], expected: str) -> None:
    assert family(shapes) == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"ss_base_model_version": "sd_v1"}, "sd1"),
        ({"modelspec.architecture": "stable-diffusion-v2-768-v/lora"}, "sd2"),
        ({"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"}, "sdxl"),
        ({"modelspec.architecture": "flux-1-dev/lora"}, "sd1|sd2|sdxl"),
        ({}, "sd1|sd2|sdxl"),
    ],
)
def test_metadata_settle_what_nothing_else_does(metadata: dict[str, str], expected: str) -> None:
    assert family(ATTN1, metadata=metadata) == expected


def test_metadata_come_last() -> None:
    assert family(kohya(ATTN2, cols=2048), metadata={"ss_base_model_version": "sd_v1"}) == "sdxl"
    assert family(kohya("add_embedding.linear_1"), metadata={"ss_base_model_version": "sd_v1"}) == "sdxl"


def test_the_users_choice() -> None:
    assert family(ATTN1, family="sdxl") == "sdxl"
    assert family(ATTN1, family="sd1|sd2") == "sd1|sd2"
    with pytest.raises(DiffLoRAError, match=r"family='sd9' is not known. Expected one of sd1, sd2, sdxl, flux"):
        family(ATTN1, family="sd9")
    with pytest.raises(DiffLoRAError, match=r"x: no known family has any of its modules: lora_unet_down_blocks_1"):
        family(ATTN1, family="flux", source="x")


def test_the_models_widths_and_names() -> None:
    unet = {f"{BLOCK}.attn1.to_q": (8, 8)}
    assert family(ATTN1, model={"unet": unet}) == "sd1|sd2|sdxl"
    assert family(ATTN1, model={"unet": unet | {ATTN2: (8, 1024)}}) == "sd2"
    assert family(ATTN1, model={"unet": unet | {"add_embedding.linear_1": (8, 8)}}) == "sdxl"
    said = {"ss_base_model_version": "sd_v1"}
    assert family(ATTN1, model={"unet": unet | {ATTN2: (8, 1024)}}, metadata=said) == "sd2"


@pytest.mark.parametrize("root", ["", "text_model."])
def test_a_models_encoder_may_carry_either_spelling(root: str) -> None:
    shapes = pair("text_encoder.encoder.layers.0.mlp.fc1") | pair("transformer.proj_out")
    model = {"transformer": {"proj_out": (8, 8)}, "text_encoder": {f"{root}encoder.layers.0.mlp.fc1": (8, 8)}}
    found = explain(shapes, model=model)
    assert found.family == "flux|sd3"
    assert [entry.path for entry in found.entries] == ["text_model.encoder.layers.0.mlp.fc1", "proj_out"]


MODEL: Model = {
    "transformer": {"layers.0.self_attn.q_proj": (8, 8), "a_b.c": (8, 8), "a.b_c": (8, 8), "entry_in": (8, 8)},
    "text_encoder": {"model.layers.0.mlp.up_proj": (8, 8)},
    "vae": {"entry_in": (8, 8)},
}


@pytest.mark.parametrize(
    ("module", "component", "path"),
    [
        ("lora_unet_layers_0_self_attn_q_proj", "transformer", "layers.0.self_attn.q_proj"),
        ("lycoris_layers_0_self_attn_q_proj", "transformer", "layers.0.self_attn.q_proj"),
        ("base_model.model.layers.0.self_attn.q_proj", "transformer", "layers.0.self_attn.q_proj"),
        ("layers.0.self_attn.q_proj", "transformer", "layers.0.self_attn.q_proj"),
        ("transformer.entry_in", "transformer", "entry_in"),
        ("diffusion_model.a_b.c", "transformer", "a_b.c"),
        ("diffusion_model.a.b_c", "transformer", "a.b_c"),
        ("lora_te_model_layers_0_mlp_up_proj", "text_encoder", "model.layers.0.mlp.up_proj"),
        ("base_model.model.model.layers.0.mlp.up_proj", "text_encoder", "model.layers.0.mlp.up_proj"),
        ("vae.entry_in", "vae", "entry_in"),
    ],
)
def test_the_models_own_names_are_a_vocabulary(module: str, component: str, path: str) -> None:
    found = explain(pair(module), model=MODEL)
    # Some families have a Llama, whatever their denoiser is.
    assert found.family is None or component == "text_encoder"
    assert [(entry.component, entry.path, entry.rows) for entry in found.entries] == [(component, path, ())]


@pytest.mark.parametrize("root", ["", "text_model."])
@pytest.mark.parametrize("spelled", ["", "text_model_"])
def test_either_spelling_of_an_encoder_beside_an_unknown_denoiser(root: str, spelled: str) -> None:
    shapes = pair(f"lora_te1_{spelled}encoder_layers_0_mlp_fc1") | pair("lora_unet_proj_in")
    model = {"transformer": {"proj_in": (8, 8)}, "text_encoder": {f"{root}encoder.layers.0.mlp.fc1": (8, 8)}}
    found = explain(shapes, model=model)
    assert found.family is None
    assert [entry.path for entry in found.entries] == ["text_model.encoder.layers.0.mlp.fc1", "proj_in"]


def test_a_flattened_spelling_of_two_modules_is_ambiguous() -> None:
    with pytest.raises(DiffLoRAError, match=r"x: lora_unet_a_b_c.* may mean transformer.a.b_c, transformer.a_b.c of"):
        explain(pair("lora_unet_a_b_c"), source="x", model=MODEL)


def test_a_name_that_two_components_hold_is_ambiguous() -> None:
    with pytest.raises(
        DiffLoRAError, match=r"may mean transformer.entry_in, vae.entry_in of the model. Name the component"
    ):
        explain(pair("diffusion_model.entry_in"), model=MODEL)


def test_a_name_that_is_unknown_everywhere() -> None:
    shapes = pair("lora_unet_layers_0_self_attn_q_proj") | pair("lora_unet_layers_0_self_attn_zzz")
    with pytest.raises(DiffLoRAError, match=r"the model lacks 1: lora_unet_layers_0_self_attn_zzz\.lora_down\.weight"):
        explain(shapes, model=MODEL)


def test_the_model_outweighs_a_family_that_would_rename() -> None:
    shapes = pair("diffusion_model.double_blocks.0.img_attn.qkv", 24)
    own = explain(shapes, model={"transformer": {"double_blocks.0.img_attn.qkv": (24, 8)}})
    assert (own.family, [entry.path for entry in own.entries]) == (None, ["double_blocks.0.img_attn.qkv"])
    renamed = {f"transformer_blocks.0.attn.to_{c}": (8, 8) for c in "qkv"}
    assert explain(shapes, model={"transformer": renamed}).family == BFL
    # Only FLUX.2's files have a name for the fused projection of diffusers.
    fused = {"transformer_blocks.0.attn.to_qkv": (24, 8)}
    assert explain(shapes, model={"transformer": fused}).family == "flux2"


def test_outright_names_of_an_unknown_architecture_are_kept() -> None:
    shapes = pair("transformer.layers.3.attention.to_q") | pair("text_encoder.encoder.layers.0.mlp.fc1")
    for model in (None, {"transformer": {"layers.0.attention.to_q": (8, 8)}}):
        found = explain(shapes, model=model)
        assert found.family is None
        assert [(entry.component, entry.path) for entry in found.entries] == [
            ("text_encoder", "text_model.encoder.layers.0.mlp.fc1"),
            ("transformer", "layers.3.attention.to_q"),
        ]
        assert "kept as written" in found.notes[0]


def test_native_names_beside_an_unknown_one_are_not_kept_as_written() -> None:
    shapes = pair("transformer.double_blocks.0.img_attn.proj") | pair("transformer.double_blocks.0.img_attn.gate")
    with pytest.raises(DiffLoRAError, match=r"flux comes closest and lacks 1 of its 2 modules, .*img_attn\.gate"):
        explain(shapes)


def test_families_that_disagree_ask_for_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    families = [
        Family(name, "transformer", Network((Rule("in.{i}", (f"{name}.{{i}}",)),), ("same.{i}",)))
        for name in ("x", "y")
    ]
    monkeypatch.setattr(match, "FAMILIES", families)
    assert family(pair("lora_unet_same_0")) == "x|y"
    with pytest.raises(DiffLoRAError) as caught:
        explain(pair("lora_unet_in_0") | pair("lora_unet_same_0"), source="file")
    text = str(caught.value)
    assert "file fits x and y" in text
    assert "is transformer.x.0 or transformer.y.0" in text
    assert "family='x' or family='y'" in text
    assert [entry.path for entry in explain(pair("lora_unet_in_0"), family="y").entries] == ["y.0"]
    assert explain(pair("lora_unet_in_0"), model={"transformer": {"y.0": (8, 8)}}).family == "y"


def test_a_family_whose_row_counts_do_not_add_up_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    thirds = Rule("qkv", ("q", "k", "v"), ("D", "D", "D"))
    grouped = Rule("qkv", ("q", "k", "v"), ("D", "K", "K"))
    families = [Family(name, "transformer", Network((rule,), ())) for name, rule in (("x", thirds), ("y", grouped))]
    monkeypatch.setattr(match, "FAMILIES", families)
    assert family(pair("lora_unet_qkv", rows=12, cols=8)) == "y"
    assert family(pair("lora_unet_qkv", rows=24, cols=8)) == "x|y"


def test_a_published_width_may_be_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(names=("blocks.{i}.to_q",))
    small = Family("small", "transformer", network, widths={"transformer.blocks.{i}.to_q": (8, (4, 8))})
    large = Family("large", "transformer", network, widths={"transformer.blocks.{i}.to_q": ((16, 32), None)})
    monkeypatch.setattr(match, "FAMILIES", (small, large))
    assert [family(pair("blocks.0.to_q", 8, cols)) for cols in (4, 8)] == ["small", "small"]
    assert [family(pair("blocks.0.to_q", rows, 4)) for rows in (16, 32)] == ["large", "large"]
    assert family(pair("blocks.0.to_q", 8, 16)) == "small|large"
