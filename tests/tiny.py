"""Tiny pipelines of real diffusers and transformers classes with random weights, built offline."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789,.<>:-"


def clip_tokenizer() -> CLIPTokenizer:
    pieces = [letter + end for end in ("", "</w>") for letter in LETTERS] + ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=77)


def t5_tokenizer() -> T5Tokenizer:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *LETTERS]
    return T5Tokenizer(vocab=[(piece, -float(i)) for i, piece in enumerate(pieces)], extra_ids=0, model_max_length=32)


def clip(projection: bool = False, width: int = 16) -> Any:
    config = CLIPTextConfig(
        vocab_size=len(LETTERS) * 2 + 2, hidden_size=width, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=77, projection_dim=width,
        bos_token_id=len(LETTERS) * 2, eos_token_id=len(LETTERS) * 2 + 1, pad_token_id=len(LETTERS) * 2 + 1,
    )  # fmt: skip
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config).eval()


def vae(latents: int = 4, blocks: int = 2) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8,) * blocks, in_channels=3, out_channels=3, latent_channels=latents, norm_num_groups=2,
        layers_per_block=1, down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks, use_quant_conv=latents == 4, use_post_quant_conv=latents == 4,
        shift_factor=0.0,
    ).eval()  # fmt: skip


def flux_transformer(**changes: Any) -> FluxTransformer2DModel:
    config: dict[str, Any] = {
        "patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 24, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8),
        "guidance_embeds": False,
    }  # fmt: skip
    return FluxTransformer2DModel(**{**config, **changes}).eval()


def flux_pipeline(seed: int = 0) -> FluxPipeline:
    torch.manual_seed(seed)
    t5 = T5EncoderModel(
        T5Config(vocab_size=len(LETTERS) + 4, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                 feed_forward_proj="gated-gelu"),
    ).eval()  # fmt: skip
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae(), text_encoder=clip(), tokenizer=clip_tokenizer(),
        text_encoder_2=t5, tokenizer_2=t5_tokenizer(), transformer=flux_transformer(),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def ddim() -> DDIMScheduler:
    """With what the pipelines otherwise warn about."""
    return DDIMScheduler(steps_offset=1, clip_sample=False)


def sd_pipeline(seed: int = 0) -> StableDiffusionPipeline:
    torch.manual_seed(seed)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip
    pipe = StableDiffusionPipeline(
        vae=vae(), text_encoder=clip(), tokenizer=clip_tokenizer(), unet=unet, scheduler=ddim(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sdxl_pipeline(seed: int = 0) -> StableDiffusionXLPipeline:
    torch.manual_seed(seed)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16, 32), layers_per_block=2, norm_num_groups=4, cross_attention_dim=32,
        attention_head_dim=(2, 4, 8), transformer_layers_per_block=(1, 1, 2), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=6 * 8 + 16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    ).eval()  # fmt: skip
    pipe = StableDiffusionXLPipeline(
        vae=vae(), text_encoder=clip(), text_encoder_2=clip(projection=True), tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(), unet=unet, scheduler=ddim(), add_watermarker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


BUILDERS = {"flux": flux_pipeline, "sd": sd_pipeline, "sdxl": sdxl_pipeline}


def run(pipe: Any, prompt: Any = "a cat", **options: Any) -> torch.Tensor:
    """The latents of two steps from a fixed seed: float32, no VAE rounding in between."""
    defaults = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "latent"}
    if isinstance(pipe, FluxPipeline):
        defaults["max_sequence_length"] = 8
    generator = torch.Generator().manual_seed(0)
    return pipe(prompt, generator=generator, **{**defaults, **options}).images


def weights(pipe: Any) -> dict[str, torch.Tensor]:
    """Copies of every parameter and buffer of every component."""
    return {
        f"{name}.{key}": value.detach().clone()
        for name, part in pipe.components.items()
        if isinstance(part, torch.nn.Module)
        for key, value in [*part.named_parameters(), *part.named_buffers()]
    }


def lora_dict(
    model: torch.nn.Module, names: list[str], rank: int = 3, prefix: str = "transformer.", seed: int = 1,
    alpha: float | None = None, size: float = 0.1,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """A diffusers-layout state dict with random factors for these linear modules."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for name in names:
        out, width = model.get_submodule(name).weight.shape[:2]
        found[f"{prefix}{name}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * size
        found[f"{prefix}{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * size
        if alpha is not None:
            found[f"{prefix}{name}.alpha"] = torch.tensor(alpha)
    return found
