"""Tiny models of diffusers' own classes, and pipelines of nothing but such models and diffusers' loader for them."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import diffusers
import tiny
import torch
from diffusers import DiffusionPipeline, loaders
from torch import nn
from transformers import T5Config, T5EncoderModel

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
_JOINT = {**_HEADS, "in_channels": 4, "num_layers": 2, "joint_attention_dim": 12}
_FLUX = {**_JOINT, "num_single_layers": 2, "patch_size": 1, "axes_dims_rope": (2, 2, 4)}
_COSMOS = {**_HEADS, "attention_head_dim": 12, "in_channels": 4,
           "out_channels": 4, "num_layers": 2, "mlp_ratio": 2.0, "text_embed_dim": 12,
           "adaln_lora_dim": 4, "max_size": (4, 8, 8), "extra_pos_embed_type": None}  # fmt: skip
# name -> diffusers' class and loader, and a configuration of two blocks of each sort
DENOISERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "FLUX.1": ("FluxTransformer2DModel", "FluxLoraLoaderMixin", {**_FLUX, "pooled_projection_dim": 8,
               "guidance_embeds": True}),
    "Chroma": ("ChromaTransformer2DModel", "FluxLoraLoaderMixin", {**_FLUX, "approximator_num_channels": 8,
               "approximator_hidden_dim": 20, "approximator_layers": 2}),
    "FLUX.2": ("Flux2Transformer2DModel", "Flux2LoraLoaderMixin", {**_FLUX, "timestep_guidance_channels": 8,
               "axes_dims_rope": (2, 2, 2, 2)}),
    "SD3": ("SD3Transformer2DModel", "SD3LoraLoaderMixin", {**_JOINT, "sample_size": 4, "caption_projection_dim": 16,
            "pooled_projection_dim": 8, "out_channels": 4, "pos_embed_max_size": 4}),
    "Qwen-Image": ("QwenImageTransformer2DModel", "QwenImageLoraLoaderMixin", {**_JOINT, "out_channels": 4,
                   "axes_dims_rope": (2, 2, 4)}),
    "Sana": ("SanaTransformer2DModel", "SanaLoraLoaderMixin", {**_HEADS, "in_channels": 4, "out_channels": 4,
             "num_layers": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16,
             "caption_channels": 12, "sample_size": 4}),
    "CogVideoX": ("CogVideoXTransformer3DModel", "CogVideoXLoraLoaderMixin", {**_HEADS, "in_channels": 4,
                  "out_channels": 4, "time_embed_dim": 6, "text_embed_dim": 12, "num_layers": 2, "sample_width": 4,
                  "sample_height": 4, "sample_frames": 5, "max_text_seq_length": 4}),
    "Z-Image": ("ZImageTransformer2DModel", "ZImageLoraLoaderMixin", {"in_channels": 4, "dim": 16, "n_layers": 2,
                "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 12, "axes_dims": [2, 2, 4],
                "axes_lens": [8, 8, 8]}),
    "Wan": ("WanTransformer3DModel", "WanLoraLoaderMixin", {**_HEADS, "attention_head_dim": 12, "in_channels": 4,
            "out_channels": 4, "text_dim": 10, "freq_dim": 8, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 16}),
    "LTX-Video": ("LTXVideoTransformer3DModel", "LTXVideoLoraLoaderMixin", {**_HEADS, "in_channels": 4,
                  "out_channels": 4, "cross_attention_dim": 16, "num_layers": 2, "caption_channels": 12}),
    "Lumina 2": ("Lumina2Transformer2DModel", "Lumina2LoraLoaderMixin", {"sample_size": 4, "in_channels": 4,
                 "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 3,
                 "num_kv_heads": 1, "multiple_of": 4, "axes_dim_rope": (4, 2, 2), "axes_lens": (8, 8, 8),
                 "cap_feat_dim": 12}),
    # The widths that diffusers' converter has in its code; on the meta device.
    "Lumina 2 (2304)": ("Lumina2Transformer2DModel", "Lumina2LoraLoaderMixin", {"num_layers": 2}),
    "Krea 2": ("Krea2Transformer2DModel", "Krea2LoraLoaderMixin", {**_HEADS, "in_channels": 4, "num_layers": 2,
               "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "timestep_embed_dim": 8,
               "text_hidden_dim": 16, "num_text_layers": 2, "text_num_attention_heads": 2,
               "text_num_key_value_heads": 2, "text_intermediate_size": 20, "num_layerwise_text_blocks": 1,
               "num_refiner_text_blocks": 1, "axes_dims_rope": (2, 2, 4)}),
    "Anima": ("CosmosTransformer3DModel", "AnimaLoraLoaderMixin", _COSMOS),
    "Cosmos": ("CosmosTransformer3DModel", "CosmosLoraLoaderMixin", _COSMOS),
    "HiDream": ("HiDreamImageTransformer2DModel", "HiDreamImageLoraLoaderMixin", {**_HEADS, "patch_size": 2,
                "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2, "text_emb_dim": 8,
                "caption_channels": [12, 12], "num_routed_experts": 2, "num_activated_experts": 1,
                "axes_dims_rope": (4, 4), "max_resolution": (4, 4), "llama_layers": [0, 1]}),
    "Mochi": ("MochiTransformer3DModel", "Mochi1LoraLoaderMixin", {**_HEADS, "num_layers": 2, "in_channels": 4,
              "pooled_projection_dim": 6, "text_embed_dim": 16, "time_embed_dim": 8, "max_sequence_length": 4}),
    "HunyuanVideo": ("HunyuanVideoTransformer3DModel", "HunyuanVideoLoraLoaderMixin", {**_HEADS, "in_channels": 4,
                     "out_channels": 4, "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 2,
                     "text_embed_dim": 12, "pooled_projection_dim": 8, "rope_axes_dim": (2, 2, 4)}),
}  # fmt: skip
_UNETS = {"SD": "StableDiffusionLoraLoaderMixin", "SDXL": "StableDiffusionXLLoraLoaderMixin"}
_PARTS = ("transformer", "unet", "text_encoder", "text_encoder_2", "text_conditioner", "tokenizer", "tokenizer_2")


class Parts(DiffusionPipeline):
    """A pipeline that can only hold its components."""

    def __init__(
        self, transformer: Any, unet: Any, text_encoder: Any, text_encoder_2: Any, text_conditioner: Any,
        tokenizer: Any, tokenizer_2: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        held = (transformer, unet, text_encoder, text_encoder_2, text_conditioner, tokenizer, tokenizer_2)
        self.register_modules(**dict(zip(_PARTS, held, strict=True)))


def pipeline(name: str) -> Any:
    """A new pipeline of this model, with the loader that diffusers' own pipelines of it have."""
    loader = _UNETS.get(name) or DENOISERS[name][1]
    kind = type("Pipeline", (Parts, getattr(loaders, loader)), {"__init__": Parts.__init__})
    parts = copy.deepcopy(_parts(name))
    return kind(**{**dict.fromkeys(_PARTS), **parts})


@cache
def _parts(name: str) -> dict[str, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name in _UNETS:
            whole = (tiny.sd_pipeline if name == "SD" else tiny.sdxl_pipeline)()
            return {part: getattr(whole, part) for part in _PARTS if getattr(whole, part, None) is not None}
        kind, _, config = DENOISERS[name]
        if name.endswith(")"):
            with torch.device("meta"):
                return {"transformer": getattr(diffusers, kind)(**config)}
        parts: dict[str, Any] = {"transformer": _random(getattr(diffusers, kind)(**config))}
        if name == "FLUX.1":
            parts |= {"text_encoder": tiny.clip(), "tokenizer": tiny.clip_tokenizer()}
            parts |= {"text_encoder_2": _t5(), "tokenizer_2": tiny.t5_tokenizer()}
        return parts


def _random(model: nn.Module) -> nn.Module:
    """The model with no parameter that is all zeros or ones, so that none hides a change of another."""
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    return model.eval()


def _t5() -> nn.Module:
    config = T5Config(vocab_size=len(tiny.LETTERS) + 4, d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2,
                      feed_forward_proj="gated-gelu")  # fmt: skip
    return T5EncoderModel(config).eval()
