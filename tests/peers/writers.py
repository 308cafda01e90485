"""Writers: what puts the modules of a layout into a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from peers.files import KOHYA, PEFT, File

_D, _S = "transformer_blocks.", "single_transformer_blocks."
_SD = "down_blocks.0.attentions.0.transformer_blocks.0."
_XL = "down_blocks.1.attentions.0.transformer_blocks.0."
_MID = "mid_block.attentions.0.transformer_blocks."
# Two or three linear modules of each model, by diffusers' names.
SOME = {
    "FLUX.1": (f"{_D}0.attn.to_q", f"{_D}1.ff.net.2", f"{_S}1.proj_mlp"),
    "Chroma": (f"{_D}0.attn.to_q", f"{_D}1.ff.net.2", "distilled_guidance_layer.layers.1.linear_1"),
    "FLUX.2": (f"{_D}0.attn.to_q", f"{_S}1.attn.to_qkv_mlp_proj"),
    "SD": (f"{_SD}attn1.to_q", f"{_MID}0.ff.net.2", f"{_MID}0.attn2.to_k"),
    "SDXL": (f"{_XL}attn1.to_q", f"{_MID}1.ff.net.2", f"{_MID}0.attn2.to_k"),
    "SD3": (f"{_D}0.attn.to_q", f"{_D}1.ff.net.0.proj"),
    "Qwen-Image": (f"{_D}0.attn.to_q", f"{_D}1.img_mlp.net.2", f"{_D}0.txt_mod.1"),
    "Wan": ("blocks.0.attn1.to_q", "blocks.1.ffn.net.2", "blocks.1.attn2.to_k"),
    "LTX-Video": (f"{_D}0.attn1.to_q", f"{_D}1.attn2.to_k"),
    "CogVideoX": (f"{_D}0.attn1.to_q", f"{_D}1.ff.net.2"),
    "Sana": (f"{_D}0.attn1.to_q", f"{_D}1.attn2.to_k"),
    "HiDream": (
        "double_stream_blocks.0.block.attn1.to_q",
        "single_stream_blocks.1.block.ff_i.experts.1.w2",
        "double_stream_blocks.1.block.ff_t.w1",
    ),
    "Z-Image": ("layers.0.attention.to_q", "layers.1.feed_forward.w2", "context_refiner.0.attention.to_k"),
    "Lumina 2": ("layers.0.attn.to_k", "noise_refiner.0.norm1.linear"),
    "Krea 2": (f"{_D}0.attn.to_q", f"{_D}1.ff.down", "text_fusion.refiner_blocks.0.attn.to_k"),
    "Anima": (f"{_D}0.attn1.to_q", f"{_D}1.ff.net.2"),
    "Cosmos": (f"{_D}0.attn2.to_k", f"{_D}1.ff.net.0.proj"),
    "Mochi": (f"{_D}0.attn1.to_q", f"{_D}0.attn1.add_k_proj"),
    "HunyuanVideo": (f"{_D}0.attn.to_q", f"{_S}1.proj_mlp"),
}
Write = Callable[[File], None]
# original name -> the modules of diffusers whose rows it has, one above the other
Names = Mapping[str, tuple[str, ...]]


def flat(prefix: str, path: str) -> str:
    return prefix + path.replace(".", "_")


def denoiser(model: str) -> str:
    return "unet." if model in ("SD", "SDXL") else "transformer."


def each(model: str, stem: str, leaves: tuple[str, str] = PEFT, alpha: float | None = None) -> Write:
    """A LoRA of each of SOME, called `stem` and the path; flattened behind an underscore."""

    def write(file: File) -> None:
        for path in SOME[model]:
            file.lora(flat(stem, path) if stem.endswith("_") else stem + path, path, leaves=leaves, alpha=alpha)

    return write


def native(names: Names, prefix: str, leaves: tuple[str, str] = PEFT, alpha: float | None = None) -> Write:
    """A LoRA of each module by its original name, which may stand for several of diffusers'.

    The file has the halves of the rows of a name with `!` at its end the other way round.
    """

    def write(file: File) -> None:
        for name, paths in names.items():
            stem = flat(prefix, name) if prefix.endswith("_") else prefix + name
            file.lora(stem.removesuffix("!"), *paths, leaves=leaves, swap=name.endswith("!"), alpha=alpha)

    return write


def kohya(names: Names) -> Write:
    """As sd-scripts writes it: flattened names, and an alpha that is not the rank."""
    return native(names, "lora_unet_", KOHYA, 1.5)


def lokr(model: str, stem: str) -> Write:
    """A LoKr of each of SOME."""

    def write(file: File) -> None:
        for path in SOME[model]:
            file.lokr(flat(stem, path) if stem.endswith("_") else stem + path, path)

    return write


def both(*writers: Write) -> Write:
    """One writer after the other."""

    def write(file: File) -> None:
        for one in writers:
            one(file)

    return write
