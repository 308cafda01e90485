"""What diffusers applies right, with the same models and converters: the other tables mean something then."""

from __future__ import annotations

from peers.files import DOTTED, KOHYA
from peers.outcomes import row
from peers.refused import WAN_BLOCKS
from peers.silent import BFL, BFL2, COSMOS, HUNYUAN, KREA, WAN, sgm
from peers.writers import SOME, denoiser, each, kohya, lokr, native

COMMON = (
    *row("diffusers' names", *((model, "lora_A", each(model, denoiser(model))) for model in SOME)),
    *row("diffusers' old names", *((m, ".lora.down", each(m, denoiser(m), DOTTED)) for m in ("SD", "SDXL", "Wan"))),
    *row(
        "kohya, one alpha",
        *((model, "diffusers' names", each(model, "lora_unet_", KOHYA, 1.5)) for model in ("SD", "SDXL")),
        ("SDXL", "original names", sgm),
        ("FLUX.1", "BFL names", kohya(BFL)),
        ("FLUX.2", "BFL names", kohya(BFL2)),
        ("Wan", "original names, every block", kohya(WAN_BLOCKS)),
        ("Qwen-Image", "diffusers' names", each("Qwen-Image", "lora_unet_", KOHYA, 1.5)),
        ("Z-Image", "diffusers' names", each("Z-Image", "lora_unet_", KOHYA, 1.5)),
    ),
    *row(
        "comfy",
        ("FLUX.1", "lora_down", native(BFL, "diffusion_model.", KOHYA, 1.5)),
        ("FLUX.2", "lora_A", native(BFL2, "diffusion_model.")),
        ("Wan", "lora_A", native(WAN, "diffusion_model.")),
        ("Wan", "lora_down", native(WAN, "diffusion_model.", KOHYA, 1.5)),
        ("Krea 2", "lora_A", native(KREA, "diffusion_model.")),
        ("Anima", "lora_A", native(COSMOS, "diffusion_model.")),
        ("HunyuanVideo", "lora_A", native(HUNYUAN, "diffusion_model.")),
        *((m, "lora_A", each(m, "diffusion_model.")) for m in ("Qwen-Image", "Z-Image", "LTX-Video", "HiDream")),
        ("Z-Image", "LoKr", lokr("Z-Image", "diffusion_model.")),
    ),
)
