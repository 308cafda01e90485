"""Real files' key listings bind, whole, on full-size models built on the meta device from their published configs."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import published
import pytest
import tiny
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

import difflora
from difflora import DiffLoRAError
from difflora.deltas import tensors
from difflora.loading import Raw, normalise
from difflora.targets import shapes

KEYS = Path(__file__).parent / "formats" / "keys"


@functools.cache
def flux() -> Any:
    """FLUX.1-dev (transformer/config.json of the published repository; the class defaults but for guidance)."""
    with torch.device("meta"):
        return SimpleNamespace(components={"transformer": FluxTransformer2DModel(guidance_embeds=True)})


@functools.cache
def flux_and_encoders() -> Any:
    """FLUX.1-dev with CLIP-L and the encoder of T5-XXL (text_encoder_2/config.json)."""
    with torch.device("meta"):
        large = CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
        t5 = T5Config(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu")
        encoders = {"text_encoder": CLIPTextModel(large), "text_encoder_2": T5EncoderModel(t5)}
    return SimpleNamespace(components={**flux().components, **encoders})


@functools.cache
def sdxl() -> Any:
    """SDXL base 1.0 (unet/config.json and both text encoders' config.json)."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            sample_size=128, block_out_channels=(320, 640, 1280), layers_per_block=2, cross_attention_dim=2048,
            attention_head_dim=(5, 10, 20), transformer_layers_per_block=(1, 2, 10), use_linear_projection=True,
            addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
        large = CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
        giant = CLIPTextConfig(
            hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, projection_dim=1280
        )
        encoders = {"text_encoder": CLIPTextModel(large), "text_encoder_2": CLIPTextModelWithProjection(giant)}
    return SimpleNamespace(components={"unet": unet, **encoders})


@functools.cache
def lycoris_unet() -> Any:
    """The UNet that the LyCORIS listings' notes describe: 2 levels of 64 and 128 channels, context width 96."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            sample_size=16, block_out_channels=(64, 128), layers_per_block=1, cross_attention_dim=96,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )  # fmt: skip
    return SimpleNamespace(components={"unet": unet})


def published_model(name: str) -> Callable[[], Any]:
    """A family's transformer from the configuration that tests/formats/models names."""

    @functools.cache
    def build() -> Any:
        entry = json.loads((KEYS.parent / "models" / f"{name}.json").read_text())["models"][0]
        with torch.device("meta"):
            return SimpleNamespace(
                components={entry["component"]: published.model_class(entry["class"]).from_config(entry["config"])}
            )

    return build


# listing -> (model, modules of the model that it changes)
BOUND = {
    "flux_lora_kohya_format": (flux, 494),
    "flux_lora_diffusers_format": (flux, 494),
    "flux_lora_diffusers_base_model_format": (flux, 381),
    "flux_lora_aitoolkit_format": (flux, 418),
    "flux_diffusers_aitoolkit_sdscripts_doc": (flux, 494),
    "flux_kohya_sdscripts_doc": (flux, 494),
    "generated/sdxl_kohya_sgm": (sdxl, 722),
    "generated/sdxl_kohya_diffusers_names_te": (sdxl, 986),
    "generated/lycoris_sd_locon": (lycoris_unet, 81),
    "generated/lycoris_sd_locon_tucker": (lycoris_unet, 81),
    "generated/lycoris_sd_dylora": (lycoris_unet, 81),
    **{
        f"generated/lycoris_sd_{name}": (lycoris_unet, count)
        for name, count in {
            **dict.fromkeys(("boft", "diag_oft", "diag_oft_rescaled", "dora_out", "glora", "ia3", "loha"), 81),
            **dict.fromkeys(("lokr", "lokr_full", "lokr_tucker"), 81),
            "full": 138,
            "norm_locon": 145,
        }.items()
    },
    "flux_control_lora_format": (flux, 1160),
    "flux_dora_onetrainer_format": (flux_and_encoders, 506),
    "flux_lora_xlabs_format": (flux, 24),
    "flux_lycoris_lokr_wrapper": (flux, 30),
    "krea2_lora_kohya_format": (published_model("krea2"), 40),
    "qwen_image_lora_diffusers_format": (published_model("qwen_image"), 3),
}


def listing(name: str) -> dict[str, list[int]]:
    return json.loads((KEYS / f"{name}.json").read_text())["keys"]


def adapter(name: str) -> difflora.Adapter:
    tensors = {key: torch.empty(shape, device="meta") for key, shape in listing(name).items()}
    return normalise(Raw(name, name, tensors))


@pytest.mark.parametrize("name", BOUND)
def test_every_key_is_explained_and_bound(name: str) -> None:
    model, modules = BOUND[name]
    loaded = adapter(name)
    report = difflora.bind(loaded, model())
    held = {
        id(t if t._base is None else t._base)
        for deltas in loaded.components.values()
        for delta in deltas.values()
        for t in tensors(delta)
    }
    assert len(held) == len(listing(name)), "a key of the file is in no delta"
    assert report.unmatched == ()
    assert len(report.matched) == modules


# Samples that were made up: Anima's cross-attention reads 1024 columns, its low-rank modulation has 256 rows.
INVENTED = {
    "anima_lora_kohya_format": "norm2.linear_1: [2048, 2048] in the file, [256, 2048] in the model",
    "anima_lora_peft_format": "attn2.to_k: [2048, 2048] in the file, [2048, 1024] in the model",
    "anima_lora_lokr_format": "attn2.to_k: 2048 magnitudes for [16384, 16384] in the file, [2048, 1024] in the model",
}


def test_every_listing_is_bound_or_has_invented_shapes() -> None:
    files = {str(path.relative_to(KEYS).with_suffix("")) for path in KEYS.rglob("*.json") if path.parent.name != "maps"}
    assert files == BOUND.keys() | INVENTED.keys() | {"flux_lokr_bfl_format"}


@pytest.mark.parametrize("name", INVENTED)
def test_invented_sizes_of_anima_are_refused_with_both_shapes(name: str) -> None:
    loaded = adapter(name)
    with pytest.raises(DiffLoRAError) as caught:
        difflora.bind(loaded, published_model("anima")())
    assert INVENTED[name] in str(caught.value)


def test_invented_shapes_are_explained_and_refused_with_both_shapes() -> None:
    tensors = {key: torch.empty(shape, device="meta") for key, shape in listing("flux_lokr_bfl_format").items()}
    loaded = normalise(Raw("flux_lokr_bfl_format", "x", tensors), model=shapes(flux().components))
    assert loaded.uneven and {delta.kind for delta in loaded.components["transformer"].values()} == {"lokr"}
    with pytest.raises(DiffLoRAError) as caught:
        difflora.bind(loaded, flux())
    text = str(caught.value)
    assert "single_transformer_blocks.0.attn.to_k: [1024, 16384] in the file, [3072, 3072] in the model" in text
    assert "makes 1024 rows, which are not D + D + D with D = 27648" in text


def test_a_fused_file_shares_its_tensors_between_the_parts() -> None:
    deltas = adapter("flux_lora_kohya_format").components["transformer"]
    q, k = (deltas[f"transformer_blocks.0.attn.to_{c}"] for c in "qk")
    assert q.down is k.down and q.up is k.up
    assert (q.blocks, k.blocks) == (((0, 3072),), ((3072, 6144),))
    assert q.shape == (3072, 3072) and q.rank == 16


def test_a_file_for_another_model_says_which_model_it_is_for() -> None:
    with pytest.raises(DiffLoRAError, match=r"none of its 722 modules.*transformer \(FluxTransformer2DModel\)"):
        difflora.bind(adapter("generated/sdxl_kohya_sgm"), flux())


def test_untouched_modules_are_those_the_file_does_not_name() -> None:
    report = difflora.bind(adapter("flux_lora_aitoolkit_format"), flux())
    linears = {
        f"transformer.{n}" for n, m in flux().components["transformer"].named_modules() if isinstance(m, nn.Linear)
    }
    assert set(report.untouched) == linears - set(report.matched)
    assert "transformer.proj_out" in report.untouched


@pytest.mark.parametrize("names", [("to_q", "to_k", "to_v"), ("to_q",), ("to_v", "to_q")], ids="-".join)
def test_split_files_bind_to_rows_of_a_fused_projection(names: tuple[str, ...]) -> None:
    """After fuse_qkv_projections the model computes with `to_qkv` alone; absent parts keep the base's rows."""
    pipe = tiny.flux_pipeline()
    stems = [f"transformer_blocks.0.attn.{name}" for name in names]
    tensors = tiny.lora_dict(pipe.transformer, stems, rank=2)
    base = tiny.run(pipe)
    difflora.attach(pipe)
    pipe.load_lora(tensors, name="x")
    split = tiny.run(pipe)
    pipe.unload_loras()
    pipe.transformer.fuse_qkv_projections()
    before = pipe.transformer.transformer_blocks[0].attn.to_qkv.weight.detach().clone()
    pipe.load_lora(tensors, name="x")
    after = pipe.transformer.transformer_blocks[0].attn.to_qkv.weight
    changed = [not torch.equal(one, two) for one, two in zip(before.chunk(3), after.chunk(3), strict=True)]
    assert changed == [f"to_{c}" in names for c in "qkv"]
    torch.testing.assert_close(tiny.run(pipe), split, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(split, base, atol=1e-4)


def test_pipelines_and_bare_models_both_bind() -> None:
    pipe = tiny.flux_pipeline()
    loaded = difflora.load(tiny.lora_dict(pipe.transformer, ["proj_out"]))
    assert (
        difflora.bind(loaded, pipe).matched
        == difflora.bind(loaded, pipe.transformer).matched
        == ("transformer.proj_out",)
    )
    with pytest.raises(DiffLoRAError, match="neither a diffusers pipeline nor a torch module"):
        difflora.bind(loaded, "pipe")


def test_flattened_names_that_two_modules_share_are_refused() -> None:
    class Unlucky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_b = nn.ModuleDict({"c": nn.Linear(4, 4)})
            self.a = nn.ModuleDict({"b_c": nn.Linear(4, 4)})

    tensors = {"lora_unet_a_b_c.lora_down.weight": torch.ones(2, 4), "lora_unet_a_b_c.lora_up.weight": torch.ones(4, 2)}
    raw = Raw("x", "x", tensors)
    both, one = Unlucky(), Unlucky()
    del one.a
    with pytest.raises(DiffLoRAError, match=r"a_b\.c.*a\.b_c|a\.b_c.*a_b\.c"):
        normalise(raw, model=shapes({"transformer": both}))
    assert list(normalise(raw, model=shapes({"transformer": one})).components["transformer"]) == ["a_b.c"]


def test_wide_listings_bind_in_a_process_without_a_model() -> None:
    """Loading needs no diffusers: names and shapes are enough."""
    code = (
        "import json, sys, torch\n"
        "from difflora.loading import Raw, normalise\n"
        f"keys = json.load(open({str(KEYS / 'flux_lora_kohya_format.json')!r}))['keys']\n"
        "tensors = {k: torch.empty(s, device='meta') for k, s in keys.items()}\n"
        "print(len(normalise(Raw('x', 'x', tensors)).components['transformer']), 'diffusers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["494", "False"]


def test_a_rotation_of_a_convolutions_inputs_is_refused() -> None:
    pipe = tiny.sd_pipeline()
    loaded = difflora.load({"unet.conv_out.oft_R.weight": torch.zeros(2, 6)})
    with pytest.raises(DiffLoRAError, match=r"unet\.conv_out: oft_v2 of a convolution .* trainers mean differently"):
        difflora.bind(loaded, pipe)


def test_magnitudes_that_only_divide_the_columns_are_refused() -> None:
    pipe, stem = tiny.flux_pipeline(), "transformer.transformer_blocks.0.attn.to_q"
    factors = {f"{stem}.hada_w{n}_a": torch.ones(32, 2) for n in "12"}
    factors |= {f"{stem}.hada_w{n}_b": torch.ones(2, 32) for n in "12"}
    loaded = difflora.load(factors | {f"{stem}.dora_scale": torch.ones(1, 16)})
    with pytest.raises(DiffLoRAError, match=r"to_q: 16 magnitudes for \[32, 32\] in the file, \[32, 32\] in the model"):
        difflora.bind(loaded, pipe)
    fitting = difflora.load(factors | {f"{stem}.dora_scale": torch.ones(1, 32)})
    assert difflora.bind(fitting, pipe).kinds == {"dora+loha": 1}
