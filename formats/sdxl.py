"""SDXL and what shares its UNet (SSD-1B, Vega, Pony, Illustrious, Kolors): three levels, two CLIP text encoders."""

from difflora.formats.rules import Encoder, Family, Network, Rule
from difflora.formats.sd import UNET_NAMES, ldm_rules, unet_widths
from difflora.formats.text_encoders import CLIP, clip_widths

_ADDED = {"label_emb.0.0": "add_embedding.linear_1", "label_emb.0.2": "add_embedding.linear_2"}

SDXL = Family(
    name="sdxl",
    denoiser="unet",
    network=Network(
        names=(*UNET_NAMES, *_ADDED.values(), "encoder_hid_proj"),  # The last is of Kolors.
        rules=(
            *ldm_rules(levels=3, down={1, 2}, up={0, 1}),
            *(Rule(source, (name,)) for source, name in _ADDED.items()),
        ),
    ),
    encoders=(
        Encoder("text_encoder", CLIP, ("te1", "text_encoder", "clip_l")),
        Encoder("text_encoder_2", CLIP, ("te2", "text_encoder_2", "clip_g")),
    ),
    widths=unet_widths(2048, {"up_blocks.0": 1280, "up_blocks.1": 640})
    | clip_widths("text_encoder", 768)
    | clip_widths("text_encoder_2", 1280),
    marks=("stable-diffusion-xl", "sdxl"),
)
