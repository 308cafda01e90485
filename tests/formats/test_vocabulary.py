"""The families' tables against the models themselves (full-size configurations, meta device) and LDM's own names."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from difflora.formats.families import FAMILIES
from difflora.formats.flux import FLUX
from difflora.formats.rules import Network, outline
from difflora.formats.sd import SD1, SD2
from difflora.formats.sdxl import SDXL
from difflora.formats.text_encoders import CLIP, T5, canonical

MAPS = Path(__file__).parent / "keys" / "maps"
SD15_UNET = {
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
}
SD21_UNET = SD15_UNET | {
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
}
SDXL_UNET = {
    "block_out_channels": (320, 640, 1280),
    "layers_per_block": 2,
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
}
FLUX_DEV = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}
CLIP_L: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
CLIP_G: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
}
T5_XXL: dict[str, Any] = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
MODELS: dict[str, tuple[Network, str, Callable[[], Any]]] = {
    "sd1": (SD1.network, "unet", lambda: UNet2DConditionModel(**SD15_UNET)),
    "sd2": (SD2.network, "unet", lambda: UNet2DConditionModel(**SD21_UNET)),
    "sdxl": (SDXL.network, "unet", lambda: UNet2DConditionModel(**SDXL_UNET)),
    "flux": (FLUX.network, "transformer", lambda: FluxTransformer2DModel(**FLUX_DEV)),
    "clip_l": (CLIP, "text_encoder", lambda: CLIPTextModel(CLIPTextConfig(**CLIP_L))),
    "clip_g": (CLIP, "text_encoder_2", lambda: CLIPTextModelWithProjection(CLIPTextConfig(**CLIP_G))),
    "t5": (T5, "text_encoder_2", lambda: T5EncoderModel(T5Config(**T5_XXL))),
}


def numbered(pattern: str) -> str:
    """A name that the pattern stands for."""
    return pattern.replace("{i}", "3").replace("{j}", "4").replace("{k}", "5")


@pytest.fixture(scope="module", params=MODELS)
def known(request: pytest.FixtureRequest) -> tuple[Network, str, dict[str, tuple[int, ...]]]:
    network, component, build = MODELS[request.param]
    with torch.device("meta"):
        model = build()
    weights = {path: module.weight for path, module in model.named_modules() if hasattr(module, "weight")}
    return network, component, {path: tuple(weight.shape) for path, weight in weights.items() if weight is not None}


def test_every_module_is_known_by_both_spellings(
    known: tuple[Network, str, Mapping[str, tuple[int, ...]]],
) -> None:
    network, component, modules = known
    for path in modules:
        expected = [(canonical(component, path),)]
        assert list(network.find(*outline(path), flat=False)) == expected, path
        assert list(network.find(*outline(path.replace(".", "_")), flat=True)) == expected, path


def test_every_canonical_name_exists(known: tuple[Network, str, Mapping[str, tuple[int, ...]]]) -> None:
    network, component, modules = known
    shapes = {outline(canonical(component, path))[0] for path in modules}
    unknown = {outline(name)[0] for name in network.names} - shapes
    assert unknown <= {
        "mid_block.resnets.#.conv_shortcut",  # every residual block may have one; these keep their width
        "encoder.block.#.layer.#.DenseReluDense.wi",  # ungated T5
        "text_projection",  # CLIPTextModelWithProjection only
        "encoder_hid_proj",  # Kolors
    }


@pytest.mark.parametrize(
    ("name", "network"),
    [("sd1", SD1.network), ("sd2", SD2.network), ("sdxl", SDXL.network), ("ssd", SDXL.network), ("vega", SDXL.network)],
)
def test_ldm_numbering_is_that_of_the_published_maps(name: str, network: Network) -> None:
    names: dict[str, str] = json.loads((MAPS / f"unet_{name}_ldm_to_diffusers.json").read_text())["map"]
    for native, path in names.items():
        assert list(network.find(*outline(native), flat=False)) == [(path,)], native
        assert list(network.find(*outline(native.replace(".", "_")), flat=True)) == [(path,)], native
    if name in ("sd1", "sd2", "sdxl"):
        unmapped = {rule.source for rule in network.rules if "{" not in rule.source} - names.keys()
        assert all(source.endswith(".skip_connection") for source in unmapped)


NETWORKS = {family.name: family.network for family in FAMILIES} | {"clip": CLIP, "t5": T5}


@pytest.mark.parametrize("name", NETWORKS)
def test_no_two_modules_flatten_to_one_spelling(name: str) -> None:
    network = NETWORKS[name]
    for pattern in (*network.names, *(rule.source for rule in network.rules)):
        # Hunyuan-DiT's own norm2 is diffusers' norm3 and the other way round: refused where a file has one of them.
        if name == "hunyuan-dit" and pattern in ("blocks.{i}.norm2", "blocks.{i}.norm3"):
            continue
        path = numbered(pattern)
        meant = list(network.find(*outline(path), flat=False))
        assert len(meant) == 1
        assert list(network.find(*outline(path.replace(".", "_")), flat=True)) == meant


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_published_widths_name_real_modules(family: Any) -> None:
    networks = {family.denoiser: family.network} | {encoder.component: encoder.network for encoder in family.encoders}
    for pattern in family.widths:
        component, path = pattern.split(".", 1)
        concrete = numbered(path)
        assert list(networks[component].find(*outline(concrete), flat=False)) == [(concrete,)], pattern
