"""What diffusers 0.42.1 is known to refuse, mostly by an exception of its own converters."""

from __future__ import annotations

import torch
from peers.files import KOHYA, File
from peers.outcomes import row
from peers.silent import BFL, BFL2, HUNYUAN, KREA, WAN, onetrainer
from peers.writers import SOME, Names, Write, both, each, flat, kohya, lokr, native

_D, _S = "transformer_blocks.", "single_transformer_blocks."

# ---- Stable Diffusion -----------------------------------------------------------------------------------------------

_CONV = "down_blocks.0.resnets.0.conv1"


def _loha(model: str) -> Write:
    def write(file: File) -> None:
        for path in (*SOME[model], _CONV):
            file.loha(flat("lora_unet_", path), path)

    return write


def _tucker(file: File) -> None:
    file.tucker(flat("lora_unet_", _CONV), _CONV)


def _norm(model: str) -> Write:
    path = "mid_block.attentions.0.norm"
    stem = flat("lora_unet_", path)
    return both(
        each(model, "lora_unet_", KOHYA, 1.5),
        lambda file: file.diff(f"{stem}.w_norm", f"{path}.weight"),
        lambda file: file.diff(f"{stem}.b_norm", f"{path}.bias"),
    )


def _words(file: File) -> None:
    each("SDXL", "lora_unet_", KOHYA, 1.5)(file)
    file.word("bundle_emb.word.clip_l", "text_encoder")
    file.word("bundle_emb.word.clip_g", "text_encoder_2")


UNETS = (
    *row(
        "SD, SDXL: kinds of LyCORIS",
        *((model, "kohya, LoHa", _loha(model)) for model in ("SD", "SDXL")),
        *((model, "kohya, LoKr", lokr(model, "lora_unet_")) for model in ("SD", "SDXL")),
        *((model, "kohya, Tucker", _tucker) for model in ("SD", "SDXL")),
        *((model, "kohya, norms", _norm(model)) for model in ("SD", "SDXL")),
    ),
    *row("SDXL: words in the file", ("SDXL", "kohya, bundle_emb", _words)),
)

# ---- FLUX.1, Chroma -------------------------------------------------------------------------------------------------

_CONTROL = {
    "img_in": ("x_embedder",),
    "double_blocks.0.img_attn.qkv": tuple(f"{_D}0.attn.to_{c}" for c in "qkv"),
    "single_blocks.0.linear2": (f"{_S}0.proj_out",),
}
_KONTEXT = BFL | {
    "double_blocks.0.img_mod.lin": (f"{_D}0.norm1.linear",),
    "double_blocks.0.txt_mod.lin": (f"{_D}0.norm1_context.linear",),
    "final_layer.linear": ("proj_out",),
}


def _t5(file: File) -> None:
    onetrainer(file)
    path = "encoder.block.1.layer.0.SelfAttention.q"
    file.lora(flat("lora_te2_", path), f"text_encoder_2.{path}", leaves=KOHYA, alpha=1.5)
    path = "text_model.encoder.layers.1.mlp.fc1"
    file.lora(flat("lora_te1_", path), f"text_encoder.{path}", leaves=KOHYA, alpha=1.5)


def _integer_alpha(file: File) -> None:
    for path in SOME["FLUX.1"]:
        file.lora(f"transformer.{path}", path, alpha=torch.tensor(2))


def _control(file: File) -> None:
    """Biases beside factors, new norm scales, and an input layer of twice the columns."""
    for name, paths in list(_CONTROL.items())[1:]:
        file.lora(name, *paths)
    file.bias("double_blocks.0.img_mlp.0.lora_B.bias", f"{_D}0.ff.net.0.proj")
    file.lora("double_blocks.0.img_mlp.0", f"{_D}0.ff.net.0.proj")
    file.value("double_blocks.0.img_attn.norm.query_norm.scale", f"{_D}0.attn.norm_q")
    out, width = file.shape("x_embedder")
    down, up = file.random(3, 2 * width), file.random(out, 3)
    file.tensors |= {"img_in.lora_A.weight": down, "img_in.lora_B.weight": up}
    file.changes["transformer.x_embedder.weight"] = up.double() @ down.double()


_GUIDANCE = {
    "distilled_guidance_layer.layers.0.in_layer": ("distilled_guidance_layer.layers.0.linear_1",),
    "distilled_guidance_layer.layers.1.out_layer": ("distilled_guidance_layer.layers.1.linear_2",),
}
FLUX = (
    *row("FLUX.1: OneTrainer's flattened names with T5", ("FLUX.1", "OneTrainer", _t5)),
    *row("FLUX.1: base_model.model. and diffusers' names", ("FLUX.1", "PEFT", each("FLUX.1", "base_model.model."))),
    *row("FLUX.1: an alpha that is an integer", ("FLUX.1", "diffusers", _integer_alpha)),
    *row(
        "FLUX.1: some blocks alone",
        ("FLUX.1", "BFL control", _control),
        ("FLUX.1", "fal Kontext", native(_KONTEXT, "base_model.model.")),
    ),
    *row("Chroma: the distilled guidance", ("Chroma", "kohya", kohya(BFL | _GUIDANCE))),
)

# ---- FLUX.2, Qwen-Image, Z-Image, Krea 2, Lumina 2 ------------------------------------------------------------------


def _flux2_loha(file: File) -> None:
    for name, paths in BFL2.items():
        file.loha(f"diffusion_model.{name}", *paths)


_Z_FUSED = {
    "layers.0.attention.qkv": tuple(f"layers.0.attention.to_{c}" for c in "qkv"),
    "layers.1.attention.out": ("layers.1.attention.to_out.0",),
    "noise_refiner.0.attention.qkv": tuple(f"noise_refiner.0.attention.to_{c}" for c in "qkv"),
}


def _lumina_layer(stack: str, n: int) -> dict[str, tuple[str, ...]]:
    at, modulation = f"{stack}.{n}.", stack != "context_refiner"
    return {
        f"{at}attention.qkv": tuple(f"{at}attn.to_{c}" for c in "qkv"),
        f"{at}attention.out": (f"{at}attn.to_out.0",),
        **{f"{at}feed_forward.w{n}": (f"{at}feed_forward.linear_{n}",) for n in (1, 2, 3)},
        **({f"{at}adaLN_modulation.1": (f"{at}norm1.linear",)} if modulation else {}),
    }


_LUMINA = _lumina_layer("layers", 0) | _lumina_layer("layers", 1)
_LUMINA_PART = {name: paths for name, paths in _LUMINA.items() if "layers.1.attention" not in name}
IMAGE = (
    *row(
        "Qwen-Image: LoKr",
        ("Qwen-Image", "kohya", lokr("Qwen-Image", "lora_unet_")),
        ("Qwen-Image", "comfy", lokr("Qwen-Image", "diffusion_model.")),
    ),
    *row(
        "FLUX.2: an alpha beside lora_A; LoHa",
        ("FLUX.2", "comfy, alpha", native(BFL2, "diffusion_model.", alpha=1.5)),
        ("FLUX.2", "comfy, LoHa", _flux2_loha),
    ),
    *row("Z-Image: fused qkv", ("Z-Image", "comfy", native(_Z_FUSED, "diffusion_model."))),
    *row(
        "Krea 2: an alpha; diffusers' names behind diffusion_model.",
        ("Krea 2", "comfy, alpha", native(KREA, "diffusion_model.", alpha=1.5)),
        ("Krea 2", "comfy, diffusers' names", each("Krea 2", "diffusion_model.")),
    ),
    *row(
        "Lumina 2: a layer that is not whole, an alpha",
        ("Lumina 2", "comfy, parts", native(_LUMINA_PART, "diffusion_model.")),
        ("Lumina 2", "comfy, alpha", native(_LUMINA, "diffusion_model.", alpha=1.5)),
        published="Lumina 2 (2304)",
    ),
)

# ---- video ----------------------------------------------------------------------------------------------------------

_WAN_BLOCK = {
    **{f"self_attn.{old}": f"attn1.to_{new}" for old, new in zip("qkvo", ("q", "k", "v", "out.0"), strict=True)},
    **{f"cross_attn.{old}": f"attn2.to_{new}" for old, new in zip("qkvo", ("q", "k", "v", "out.0"), strict=True)},
    **{"ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2"},
}
WAN_BLOCKS: Names = {f"blocks.{n}.{old}": (f"blocks.{n}.{new}",) for n in (0, 1) for old, new in _WAN_BLOCK.items()}
_SECOND = {name: paths for name, paths in WAN_BLOCKS.items() if name.startswith("blocks.1.")}
_WAN_TEXT = {"text_embedding.0": ("condition_embedder.text_embedder.linear_1",)}


def _one_alpha_missing(file: File) -> None:
    kohya(WAN_BLOCKS)(file)
    stem = "lora_unet_blocks_1_self_attn_k"
    del file.tensors[f"{stem}.alpha"]
    name = "transformer.blocks.1.attn1.to_k.weight"
    file.changes[name] = file.changes[name] * 2


def _wan_lokr(file: File) -> None:
    for name, paths in WAN.items():
        file.lokr(flat("lora_unet_", name), *paths)


def _wan_loha(file: File) -> None:
    for name, paths in WAN.items():
        file.loha(f"diffusion_model.{name}", *paths)


_ANIMA: Names = {
    "blocks.0.self_attn.q_proj": (f"{_D}0.attn1.to_q",),
    "blocks.1.mlp.layer2": (f"{_D}1.ff.net.2",),
}
VIDEO = (
    *row(
        "Wan: musubi and Wan-Fun",
        ("Wan", "kohya, blocks missing", kohya(_SECOND)),
        ("Wan", "kohya, an alpha missing", _one_alpha_missing),
        ("Wan", "kohya, lora_unet__", native(WAN_BLOCKS, "lora_unet__", KOHYA, alpha=1.5)),
        ("Wan", "kohya, LoKr", _wan_lokr),
    ),
    *row(
        "Wan: the alpha of the text embedding; LoHa",
        ("Wan", "comfy, text_embedding.0.alpha", native(WAN | _WAN_TEXT, "diffusion_model.", KOHYA, alpha=1.5)),
        ("Wan", "comfy, LoHa", _wan_loha),
    ),
    *row("HunyuanVideo: lora_down", ("HunyuanVideo", "comfy", native(HUNYUAN, "diffusion_model.", KOHYA, alpha=1.5))),
    *row(
        "LTX-Video, Anima: an alpha that is left over",
        ("LTX-Video", "comfy", each("LTX-Video", "diffusion_model.", alpha=1.5)),
        ("Anima", "comfy", native(_ANIMA, "diffusion_model.", alpha=1.5)),
    ),
)

# ---- any model ------------------------------------------------------------------------------------------------------


def _oft(file: File) -> None:
    for path in SOME["FLUX.1"]:
        file.oft(path, path)


def _model_loha(file: File) -> None:
    for path in SOME["FLUX.1"]:
        file.loha(path, path)


def _nothing(file: File) -> None:
    file.tensors["transformer_blocks.0.attn.to_q.weights"] = file.random(16, 16)


def _factors(file: File) -> None:
    """w1 of another size in each module, and w2 whole in one of them."""
    for n, path in enumerate(SOME["FLUX.1"]):
        file.lokr(f"transformer.{path}", path, factor=(2, 4, 8)[n], rank=None if n == 1 else 3, alpha=None)


def _plain_lokr(file: File) -> None:
    file.lokr("transformer.transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_q", alpha=None)


def _plain_loha(file: File) -> None:
    file.loha("transformer.transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_q")


ANY = (
    *row(
        "any model: through the model's own loader",
        ("FLUX.1", "lora_down", each("FLUX.1", "", KOHYA)),
        ("FLUX.1", "LoHa", _model_loha),
        ("FLUX.1", "OFT", _oft),
        how="load_lora_adapter",
    ),
    *row(
        "any model: through the model's own loader",
        ("FLUX.1", "no adapter's key at all", _nothing),
        how="load_lora_adapter",
        refused="not the name of an adapter's tensor",
    ),
    *row("any model: LoKr of several factors", ("FLUX.1", "diffusers", _factors)),
    *row(
        "any model: a hot swap to another kind",
        ("FLUX.1", "LoKr after LoRA", _plain_lokr),
        ("FLUX.1", "LoHa after LoRA", _plain_loha),
        how="hotswap",
    ),
)
REFUSED = (*UNETS, *FLUX, *IMAGE, *VIDEO, *ANY)
