"""The untrained pipeline: real FLUX classes, built small."""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from difflora.demo.geometry import SIDE
from difflora.demo.words import CLIP_LENGTH, clip_tokenizer, t5_tokenizer

LATENT_CHANNELS = 4
TEXT_WIDTH = 64


@dataclass(frozen=True)
class Size:
    """How wide and deep the transformer and the autoencoder are; one head is 32 channels wide."""

    heads: int = 4
    double_blocks: int = 2
    single_blocks: int = 4
    vae_channels: tuple[int, ...] = (24, 48, 64)


FULL = Size()
TINY = Size(heads=2, double_blocks=1, single_blocks=1, vae_channels=(8, 8, 16))


def build(size: Size = FULL, seed: int = 0, shift: float = 1.0) -> Any:
    """A pipeline with random weights in float32, every module in eval mode; the same seed gives the same weights."""
    torch.manual_seed(seed)
    clip_words, t5_words = clip_tokenizer(), t5_tokenizer()
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)  # type: ignore[no-untyped-call]
    pipe: Any = FluxPipeline(  # type: ignore[no-untyped-call]
        scheduler=scheduler,
        vae=_autoencoder(size),
        text_encoder=_clip(len(clip_words)),
        tokenizer=clip_words,
        text_encoder_2=_t5(len(t5_words)),
        tokenizer_2=t5_words,
        transformer=_transformer(size),
    )
    for part in (pipe.vae, pipe.text_encoder, pipe.text_encoder_2, pipe.transformer):
        part.eval()
    return pipe


def _autoencoder(size: Size) -> AutoencoderKL:
    count = len(size.vae_channels)
    return AutoencoderKL(  # type: ignore[no-untyped-call]
        block_out_channels=size.vae_channels,
        down_block_types=("DownEncoderBlock2D",) * count,
        up_block_types=("UpDecoderBlock2D",) * count,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=SIDE,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def _clip(words: int) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=words,
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=CLIP_LENGTH,
            projection_dim=TEXT_WIDTH,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )


def _t5(words: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=words,
            d_model=TEXT_WIDTH,
            d_kv=16,
            d_ff=2 * TEXT_WIDTH,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def _transformer(size: Size) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(  # type: ignore[no-untyped-call]
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=size.double_blocks,
        num_single_layers=size.single_blocks,
        attention_head_dim=32,
        num_attention_heads=size.heads,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
