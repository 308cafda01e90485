"""One adapter in every spelling: the same modules, roles and rows, in any order of the keys, for any part of a file."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difflora.formats.errors import DiffLoRAError
from difflora.formats.match import explain
from difflora.formats.rules import Explanation

Size = tuple[int, int]
Found = set[tuple[str, str, str, tuple[tuple[int, int], ...]]]


@dataclass(frozen=True)
class Adapter:
    """A tiny adapter by native and by canonical names: {name: (rows, cols)}, and the CLIP of its text encoders."""

    native: Mapping[str, Size]
    canonical: Mapping[str, Size]
    component: str
    kohya_encoders: Mapping[str, str]  # component -> prefix
    comfy_encoders: Mapping[str, str]


CLIP_MODULES = {
    "text_model.encoder.layers.1.self_attn.out_proj": (8, 8),
    "text_model.encoder.layers.0.mlp.fc1": (32, 8),
}
SD_NATIVE = {
    "input_blocks.4.1.transformer_blocks.0.attn2.to_k": (8, 12),
    "input_blocks.1.0.in_layers.2": (8, 8),
    "input_blocks.3.0.op": (8, 8),
    "middle_block.1.proj_in": (8, 8),
    "output_blocks.5.2.conv": (8, 8),
    "time_embed.2": (16, 16),
    "out.2": (4, 8),
}
SD_CANONICAL = {
    "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k": (8, 12),
    "down_blocks.0.resnets.0.conv1": (8, 8),
    "down_blocks.0.downsamplers.0.conv": (8, 8),
    "mid_block.attentions.0.proj_in": (8, 8),
    "up_blocks.1.upsamplers.0.conv": (8, 8),
    "time_embedding.linear_2": (16, 16),
    "conv_out": (4, 8),
}
ADAPTERS = {
    "sd": Adapter(
        SD_NATIVE,
        SD_CANONICAL,
        "unet",
        {"text_encoder": "lora_te_"},
        {"text_encoder": "text_encoders.clip_l.transformer."},
    ),
    "sdxl": Adapter(
        {**SD_NATIVE, "output_blocks.0.1.proj_out": (8, 8), "label_emb.0.2": (8, 8)},
        {**SD_CANONICAL, "up_blocks.0.attentions.0.proj_out": (8, 8), "add_embedding.linear_2": (8, 8)},
        "unet",
        {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"},
        {
            "text_encoder": "text_encoders.clip_l.transformer.",
            "text_encoder_2": "text_encoders.clip_g.transformer.",
        },
    ),
    "flux": Adapter(
        {
            "double_blocks.0.img_attn.qkv": (24, 8),
            "double_blocks.11.txt_mlp.2": (8, 32),
            "single_blocks.2.linear1": (56, 8),
            "guidance_in.out_layer": (8, 8),
            "final_layer.linear": (4, 8),
            "final_layer.adaLN_modulation.1": (16, 8),
        },
        {
            **{f"transformer_blocks.0.attn.to_{c}": (8, 8) for c in "qkv"},
            "transformer_blocks.11.ff_context.net.2": (8, 32),
            **{f"single_transformer_blocks.2.attn.to_{c}": (8, 8) for c in "qkv"},
            "single_transformer_blocks.2.proj_mlp": (32, 8),
            "time_text_embed.guidance_embedder.linear_2": (8, 8),
            "proj_out": (4, 8),
            "norm_out.linear": (16, 8),
        },
        "transformer",
        {"text_encoder": "lora_te1_"},
        {"text_encoder": "text_encoders.clip_l.transformer."},
    ),
}

# Blocks of this width are several families'.
CHOSEN = {"flux": "flux"}


@dataclass(frozen=True)
class Spelling:
    """How a layout writes keys: the denoiser's prefix, whose encoders, the separator, the two factors, and alpha."""

    denoiser: str
    encoders: str  # "kohya", "comfy", "component" or none
    separator: str
    down: str
    up: str
    alpha: bool = False


DOWN_UP, A_B = ("lora_down.weight", "lora_up.weight"), ("lora_A.weight", "lora_B.weight")
SPELLINGS = {
    "kohya": Spelling("lora_unet_", "kohya", "_", *DOWN_UP, alpha=True),
    "kohya, two underscores": Spelling("lora_unet__", "kohya", "_", *DOWN_UP),
    "kohya, one underscore too many": Spelling("lora_unet_", "kohya", "_", "_.lora_down.weight", "_.lora_up.weight"),
    "OneTrainer": Spelling("lora_transformer_", "kohya", "_", *DOWN_UP, alpha=True),
    "LyCORIS": Spelling("lycoris_", "", "_", *DOWN_UP, alpha=True),
    "LyCORIS, compiled": Spelling("lycoris__orig_mod_", "", "_", *DOWN_UP, alpha=True),
    "ComfyUI": Spelling("diffusion_model.", "comfy", ".", *DOWN_UP, alpha=True),
    "ComfyUI, A and B": Spelling("diffusion_model.", "comfy", ".", *A_B),
    "ComfyUI, whole model": Spelling("model.diffusion_model.", "comfy", ".", *A_B),
    "diffusers": Spelling("{component}.", "component", ".", *A_B),
    "diffusers, alpha": Spelling("{component}.", "component", ".", *A_B, alpha=True),
    "diffusers, old": Spelling("{component}.", "component", ".", "lora.down.weight", "lora.up.weight"),
    "diffusers, down and up": Spelling("{component}.", "component", ".", *DOWN_UP, alpha=True),
    "diffusers, linear layer": Spelling(
        "{component}.", "component", ".", "lora_linear_layer.down.weight", "lora_linear_layer.up.weight"
    ),
    "diffusers, compiled": Spelling("{component}._orig_mod.", "component", ".", *A_B),
    "diffusers, slot": Spelling("{component}.", "component", ".", "lora_A.default.weight", "lora_B.default.weight"),
    "diffusers, without weight": Spelling("{component}.", "component", ".", "lora_A", "lora_B"),
    "PEFT": Spelling("base_model.model.", "", ".", *A_B),
    "PEFT, wrapped twice": Spelling(
        "base_model.model.", "", ".", "base_layer.lora_A.weight", "base_layer.lora_B.weight"
    ),
    "PEFT, component inside": Spelling("base_model.model.{component}.", "component", ".", *A_B),
    "PEFT, component outside": Spelling("{component}.base_model.model.", "component", ".", *A_B),
    "bare": Spelling("", "", ".", *A_B),
    "bare, slot": Spelling("", "", ".", "lora_A.my_style.weight", "lora_B.my_style.weight"),
}


def write(adapter: Adapter, names: str, spelling: Spelling) -> dict[str, tuple[int, ...]]:
    """The keys and shapes of an adapter's file, ranks differing from module to module."""
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, (module, (rows, cols)) in enumerate(sorted(written(adapter, names, spelling).items()), 1):
        gap = "" if spelling.down.startswith("_.") else "."
        shapes[f"{module}{gap}{spelling.down}"] = (rank, cols)
        shapes[f"{module}{gap}{spelling.up}"] = (rows, rank)
        if spelling.alpha:
            shapes[f"{module}.alpha"] = ()
    return shapes


def written(adapter: Adapter, names: str, spelling: Spelling) -> dict[str, Size]:
    modules = adapter.native if names == "native" else adapter.canonical
    found = {spell(spelling.denoiser, adapter.component, path, spelling): size for path, size in modules.items()}
    prefixes = {
        "kohya": adapter.kohya_encoders,
        "comfy": adapter.comfy_encoders,
        "component": dict.fromkeys(adapter.kohya_encoders, spelling.denoiser),
    }.get(spelling.encoders, {})
    for component, prefix in prefixes.items():
        found |= {spell(prefix, component, path, spelling): size for path, size in CLIP_MODULES.items()}
    return found


def spell(prefix: str, component: str, path: str, spelling: Spelling) -> str:
    return prefix.format(component=component) + path.replace(".", spelling.separator)


def places(found: Explanation) -> Found:
    return {(entry.component, entry.path, entry.kind, entry.rows) for entry in found.entries}


def expected(adapter: Adapter, names: str, spelling: Spelling) -> Found:
    """By hand: fused modules of the native names are cut at multiples of the width."""
    rows: dict[str, tuple[tuple[int, int], ...]] = {}
    if names == "native" and adapter.component == "transformer":
        for n, c in enumerate("qkv"):
            rows[f"transformer_blocks.0.attn.to_{c}"] = ((8 * n, 8 * n + 8),)
            rows[f"single_transformer_blocks.2.attn.to_{c}"] = ((8 * n, 8 * n + 8),)
        rows["single_transformer_blocks.2.proj_mlp"] = ((24, 56),)
        rows["norm_out.linear"] = ((8, 16), (0, 8))
    found = {(adapter.component, path, "lora", rows.get(path, ())) for path in adapter.canonical}
    if spelling.encoders:
        found |= {(c, path, "lora", ()) for c in adapter.kohya_encoders for path in CLIP_MODULES}
    return found


@pytest.mark.parametrize("names", ["native", "canonical"])
@pytest.mark.parametrize("family", ADAPTERS)
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_means_the_same(family: str, name: str, names: str) -> None:
    adapter, spelling = ADAPTERS[family], SPELLINGS[name]
    shapes = write(adapter, names, spelling)
    found = explain(shapes, family=CHOSEN.get(family))
    assert places(found) == expected(adapter, names, spelling)
    assert {key for entry in found.entries for key in entry.keys.values()} == shapes.keys()
    roles = {"down", "up", "alpha"} if spelling.alpha else {"down", "up"}
    assert all(entry.keys.keys() == roles for entry in found.entries)
    assert all(shapes[entry.keys["down"]][0] == shapes[entry.keys["up"]][1] for entry in found.entries)


LAYOUTS = {
    "kohya": "kohya",
    "LyCORIS": "lycoris",
    "ComfyUI": "comfy",
    "diffusers": "diffusers",
    "PEFT": "peft",
    "bare": "bare",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_named(name: str) -> None:
    assert explain(write(ADAPTERS["flux"], "canonical", SPELLINGS[name]), family="flux").layout == LAYOUTS[name]


def test_slot_name_is_noted() -> None:
    found = explain(write(ADAPTERS["flux"], "canonical", SPELLINGS["bare, slot"]))
    assert found.notes == ("slot name 'my_style' removed",)


def pair(module: str, rows: int = 8, cols: int = 8, ends: tuple[str, str] = DOWN_UP) -> dict[str, tuple[int, ...]]:
    return {f"{module}.{ends[0]}": (2, cols), f"{module}.{ends[1]}": (rows, 2)}


@pytest.mark.parametrize(
    ("module", "component", "path"),
    [
        ("lora_te_text_model_encoder_layers_3_mlp_fc2", "text_encoder", "text_model.encoder.layers.3.mlp.fc2"),
        ("lora_te_encoder_layers_3_mlp_fc2", "text_encoder", "text_model.encoder.layers.3.mlp.fc2"),
        ("lora_te1_encoder_layers_0_self_attn_q_proj", "text_encoder", "text_model.encoder.layers.0.self_attn.q_proj"),
        ("lora_te2_text_projection", "text_encoder_2", "text_projection"),
        (
            "text_encoder.encoder.layers.0.self_attn.q_proj",
            "text_encoder",
            "text_model.encoder.layers.0.self_attn.q_proj",
        ),
        ("text_encoder_2.text_model.encoder.layers.0.mlp.fc1", "text_encoder_2", "text_model.encoder.layers.0.mlp.fc1"),
        *(
            (
                f"{prefix}encoder_block_4_layer_1_DenseReluDense_wi_0",
                "text_encoder_2",
                "encoder.block.4.layer.1.DenseReluDense.wi_0",
            )
            for prefix in ("lora_te_", "lora_te1_", "lora_te2_", "lora_te3_")
        ),
        *(
            (
                f"{prefix}encoder.block.0.layer.0.SelfAttention.q",
                "text_encoder_2",
                "encoder.block.0.layer.0.SelfAttention.q",
            )
            for prefix in ("text_encoder_2.", "text_encoders.t5xxl.transformer.")
        ),
    ],
)
def test_text_encoders_are_told_by_their_paths(module: str, component: str, path: str) -> None:
    assert places(explain(pair(module), family="sd1|sdxl|flux")) == {(component, path, "lora", ())}


def test_the_same_text_encoder_in_two_places_needs_the_family() -> None:
    shapes = pair("text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q")
    with pytest.raises(DiffLoRAError, match=r"fits flux and ltx, which place it differently.* Pass family='flux'"):
        explain(shapes, family="flux|ltx")
    model = {"text_encoder": {"encoder.block.0.layer.0.SelfAttention.q": (8, 8)}}
    assert [entry.component for entry in explain(shapes, model=model).entries] == ["text_encoder"]


def test_attention_processors_of_the_first_diffusers_files() -> None:
    block = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
    modules = {c: f"{block}.to_{c}" for c in "qkv"} | {"out": f"{block}.to_out.0"}
    for root in ("", "unet."):
        shapes: dict[str, tuple[int, ...]] = {}
        for c in modules:
            shapes |= pair(f"{root}{block}.processor", ends=(f"to_{c}_lora.down.weight", f"to_{c}_lora.up.weight"))
        assert places(explain(shapes)) == {("unet", path, "lora", ()) for path in modules.values()}
    shapes = pair(
        "text_encoder.text_model.encoder.layers.0.self_attn", ends=("to_out_lora.down.weight", "to_out_lora.up.weight")
    )
    assert places(explain(shapes)) == {("text_encoder", "text_model.encoder.layers.0.self_attn.out_proj", "lora", ())}


@pytest.mark.parametrize("slot", ["", ".default"])
def test_embedding_factors(slot: str) -> None:
    module = "text_encoder.text_model.embeddings.token_embedding"
    shapes: dict[str, tuple[int, ...]] = {
        f"{module}.lora_embedding_A{slot}": (4, 100),
        f"{module}.lora_embedding_B{slot}": (8, 4),
    }
    (entry,) = explain(shapes).entries
    assert (entry.component, entry.path, entry.kind) == (*module.split(".", 1), "lora_embedding")
    assert entry.keys == {"down": f"{module}.lora_embedding_A{slot}", "up": f"{module}.lora_embedding_B{slot}"}


def test_one_module_may_mix_the_spellings_of_its_factors() -> None:
    module = "transformer.transformer_blocks.0.attn.to_q"
    shapes: dict[str, tuple[int, ...]] = {f"{module}.lora_A.weight": (2, 8), f"{module}.lora.up.weight": (8, 2)}
    assert places(explain(shapes)) == {("transformer", "transformer_blocks.0.attn.to_q", "lora", ())}


@pytest.mark.parametrize("name", ["alpha", "lora_alpha"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_alpha_is_one_number(name: str, shape: tuple[int, ...]) -> None:
    module = "lora_unet_double_blocks_0_img_attn_proj"
    (entry,) = explain({**pair(module), f"{module}.{name}": shape}).entries
    assert entry.keys["alpha"] == f"{module}.{name}"


def test_training_tools_own_tensors_are_left_aside_with_a_note() -> None:
    module = "lora_unet_double_blocks_0_img_attn_proj"
    found = explain({**pair(module), f"{module}.lora_rank": (), "_aux.slider": (3,)})
    assert len(found.entries) == 1
    assert len(found.notes) == 2
    assert all(note.startswith("left aside") for note in found.notes)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("family", ADAPTERS)
def test_any_order_and_any_part(family: str, data: st.DataObject) -> None:
    adapter = ADAPTERS[family]
    spelling = SPELLINGS[data.draw(st.sampled_from(["kohya", "ComfyUI", "diffusers", "bare"]))]
    names = data.draw(st.sampled_from(["native", "canonical"]))
    shapes = write(adapter, names, spelling)
    whole = explain(shapes, family=CHOSEN.get(family))
    shuffled = data.draw(st.permutations(list(shapes)))
    assert explain({key: shapes[key] for key in shuffled}, family=CHOSEN.get(family)) == whole

    modules = sorted({tuple(entry.keys.values()) for entry in whole.entries})
    kept = data.draw(st.lists(st.sampled_from(modules), min_size=1, unique=True))
    part = explain({key: shapes[key] for keys in kept for key in keys}, family=whole.family)
    assert set(map(str, part.entries)) == {str(entry) for entry in whole.entries if tuple(entry.keys.values()) in kept}
