"""Stable Diffusion 1.x and 2.x.  Canonical names are those of diffusers' UNet2DConditionModel."""

from collections.abc import Iterator, Set

from difflora.formats.rules import Encoder, Family, Network, Rule
from difflora.formats.text_encoders import CLIP, clip_widths

_ATTENTIONS = tuple(f"attn{n}.{name}" for n in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0"))
_TRANSFORMER = (
    "norm",
    "proj_in",
    "proj_out",
    *(f"transformer_blocks.{{k}}.{name}" for name in (*_ATTENTIONS, "ff.net.0.proj", "ff.net.2")),
    *(f"transformer_blocks.{{k}}.norm{n}" for n in (1, 2, 3)),
)
_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_TOP = {
    "input_blocks.0.0": "conv_in",
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
_LEVELS = ("down_blocks.{i}", "mid_block", "up_blocks.{i}")

UNET_NAMES = (
    *_TOP.values(),
    "down_blocks.{i}.downsamplers.{j}.conv",
    "up_blocks.{i}.upsamplers.{j}.conv",
    *(f"{level}.attentions.{{j}}.{name}" for level in _LEVELS for name in _TRANSFORMER),
    *(f"{level}.resnets.{{j}}.{name}" for level in _LEVELS for name in _RESNET.values()),
)


def ldm_rules(levels: int, down: Set[int], up: Set[int]) -> tuple[Rule, ...]:
    """The numbering of the original code base, for a UNet with attention at these levels of its way down and up."""
    return (
        *(Rule(source, (name,)) for source, name in _TOP.items()),
        *_resnets("middle_block.0", "mid_block.resnets.0"),
        *_transformer("middle_block.1", "mid_block.attentions.0"),
        *_resnets("middle_block.2", "mid_block.resnets.1"),
        *(rule for i in range(levels) for rule in _down(i, i in down, i + 1 == levels)),
        *(rule for i in range(levels) for rule in _up(i, i in up, i + 1 == levels)),
    )


def _down(i: int, attention: bool, last: bool) -> Iterator[Rule]:
    for j in range(2):
        yield from _resnets(f"input_blocks.{3 * i + j + 1}.0", f"down_blocks.{i}.resnets.{j}")
        if attention:
            yield from _transformer(f"input_blocks.{3 * i + j + 1}.1", f"down_blocks.{i}.attentions.{j}")
    if not last:
        yield Rule(f"input_blocks.{3 * i + 3}.0.op", (f"down_blocks.{i}.downsamplers.0.conv",))


def _up(i: int, attention: bool, last: bool) -> Iterator[Rule]:
    for j in range(3):
        yield from _resnets(f"output_blocks.{3 * i + j}.0", f"up_blocks.{i}.resnets.{j}")
        if attention:
            yield from _transformer(f"output_blocks.{3 * i + j}.1", f"up_blocks.{i}.attentions.{j}")
    if not last:
        yield Rule(f"output_blocks.{3 * i + 2}.{1 + attention}.conv", (f"up_blocks.{i}.upsamplers.0.conv",))


def _resnets(source: str, target: str) -> Iterator[Rule]:
    return (Rule(f"{source}.{old}", (f"{target}.{new}",)) for old, new in _RESNET.items())


def _transformer(source: str, target: str) -> Iterator[Rule]:
    return (Rule(f"{source}.{name}", (f"{target}.{name}",)) for name in _TRANSFORMER)


def unet_widths(context: int, blocks: dict[str, int]) -> dict[str, tuple[int | None, int | None]]:
    """The published cross-attention width, and the widths of some blocks."""
    return {
        f"unet.{level}.attentions.{{j}}.transformer_blocks.{{k}}.attn2.{name}": (None, context)
        for level in _LEVELS
        for name in ("to_k", "to_v")
    } | {
        f"unet.{block}.attentions.{{j}}.transformer_blocks.{{k}}.attn1.{name}": (width, width)
        for block, width in blocks.items()
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    }


_UNET = Network(names=UNET_NAMES, rules=ldm_rules(levels=4, down={0, 1, 2}, up={1, 2, 3}))
_BLOCKS = {"down_blocks.0": 320, "up_blocks.1": 1280, "up_blocks.2": 640, "up_blocks.3": 320}

SD1 = Family(
    name="sd1",
    denoiser="unet",
    network=_UNET,
    encoders=(Encoder("text_encoder", CLIP, ("te", "text_encoder", "clip_l")),),
    widths=unet_widths(768, _BLOCKS) | clip_widths("text_encoder", 768),
    marks=("stable-diffusion-v1", "sd_v1", "sd_1"),
)
SD2 = Family(
    name="sd2",
    denoiser="unet",
    network=_UNET,
    encoders=(Encoder("text_encoder", CLIP, ("te", "text_encoder", "clip_h")),),
    widths=unet_widths(1024, _BLOCKS) | clip_widths("text_encoder", 1024),
    marks=("stable-diffusion-v2", "sd_v2", "sd_2"),
)
