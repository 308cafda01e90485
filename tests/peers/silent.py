"""What diffusers 0.42.1 is known to load without a word and apply wrongly or not at all."""

from __future__ import annotations

from peers.files import BARE, DOTTED, KOHYA, PEFT, SLOT, File
from peers.outcomes import row
from peers.writers import SOME, Write, both, denoiser, each, flat, kohya, lokr, native

# ---- any model ------------------------------------------------------------------------------------------------------


def _dora(model: str, kohya: bool) -> Write:
    def write(file: File) -> None:
        for path in SOME[model]:
            stem = flat("lora_unet_", path) if kohya else denoiser(model) + path
            file.dora(stem, path, alpha=1.5 if kohya else None, leaves=KOHYA if kohya else PEFT)

    return write


def _partial_alpha(model: str, kohya: bool) -> Write:
    """All but the first module have an alpha."""

    def write(file: File) -> None:
        for n, path in enumerate(SOME[model]):
            stem = flat("lora_unet_", path) if kohya else denoiser(model) + path
            file.lora(stem, path, alpha=1.5 if n else None, leaves=KOHYA if kohya else PEFT)

    return write


def _mixed(model: str) -> Write:
    def write(file: File) -> None:
        for n, path in enumerate(SOME[model]):
            file.lora(denoiser(model) + path, path, leaves=DOTTED if n else PEFT)

    return write


def _partial_alpha_wan(file: File) -> None:
    stem = "diffusion_model.blocks.0.self_attn."
    file.lora(f"{stem}q", "blocks.0.attn1.to_q", leaves=KOHYA)
    file.lora(f"{stem}k", "blocks.0.attn1.to_k", leaves=KOHYA, alpha=1.5)


_SLOTS = ("FLUX.1", "SD", "SDXL", "SD3", "Wan", "LTX-Video", "CogVideoX", "HiDream", "Qwen-Image", "Z-Image")
_UNETS, _OTHERS = ("SD", "SDXL"), ("FLUX.1", "SD3", "Wan")
ANY = (
    *row(
        "any model: PEFT's adapter name in the keys",
        *((model, "diffusers", each(model, denoiser(model), SLOT)) for model in _SLOTS),
    ),
    *row(
        "any model: dora_scale",
        *((model, "kohya", _dora(model, kohya=True)) for model in _UNETS),
        *((model, "diffusers", _dora(model, kohya=False)) for model in _OTHERS),
    ),
    *row(
        "any model: modules without an alpha beside modules with one",
        *((model, "kohya", _partial_alpha(model, kohya=True)) for model in _UNETS),
        ("FLUX.1", "diffusers", _partial_alpha("FLUX.1", kohya=False)),
        ("Wan", "comfy", _partial_alpha_wan),
    ),
    *row(
        "any model: lora_A and .lora.down in one file",
        *((model, "diffusers", _mixed(model)) for model in (*_OTHERS, *_UNETS, "Qwen-Image")),
    ),
)

# ---- Stable Diffusion -----------------------------------------------------------------------------------------------


def _alphas(model: str) -> Write:
    """Attentions of rank 3: most with alpha 3, one with 1.5, one with 6."""
    block = "mid_block.attentions.0.transformer_blocks.0."
    names = [f"{block}attn{n}.to_{c}" for n in (1, 2) for c in ("q", "k", "v", "out.0")]

    def write(file: File) -> None:
        for path, alpha in zip(names, (3.0, 1.5, 6.0, 3.0, 3.0, 3.0, 3.0, 3.0), strict=True):
            file.lora(flat("lora_unet_", path), path, leaves=KOHYA, alpha=alpha)

    return write


_SGM = {
    "input_blocks_4_1_proj_in": "down_blocks.1.attentions.0.proj_in",
    "input_blocks_4_1_transformer_blocks_0_attn1_to_q": "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
    "middle_block_1_transformer_blocks_1_ff_net_2": "mid_block.attentions.0.transformer_blocks.1.ff.net.2",
    "output_blocks_0_1_transformer_blocks_0_attn2_to_k": "up_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k",
    "output_blocks_5_2_conv": "up_blocks.1.upsamplers.0.conv",
    "input_blocks_2_0_in_layers_2": "down_blocks.0.resnets.1.conv1",
}


def sgm(file: File) -> None:
    for name, path in _SGM.items():
        file.lora(f"lora_unet_{name}", path, leaves=KOHYA, alpha=1.5)


UNETS = (
    *row("SD, SDXL: alphas that differ", *((model, "kohya", _alphas(model)) for model in _UNETS)),
    *row(
        "SDXL: the original names, converted without the model's configuration",
        ("SDXL", "kohya", sgm),
        how="lora_state_dict without unet_config",
    ),
)

# ---- FLUX.1, Chroma -------------------------------------------------------------------------------------------------

_D, _S = "transformer_blocks.", "single_transformer_blocks."
BFL = {
    "double_blocks.0.img_attn.qkv": tuple(f"{_D}0.attn.to_{c}" for c in "qkv"),
    "double_blocks.1.txt_attn.qkv": tuple(f"{_D}1.attn.add_{c}_proj" for c in "qkv"),
    "double_blocks.1.img_attn.proj": (f"{_D}1.attn.to_out.0",),
    "double_blocks.0.img_mlp.0": (f"{_D}0.ff.net.0.proj",),
    "double_blocks.1.txt_mlp.2": (f"{_D}1.ff_context.net.2",),
    "single_blocks.1.linear2": (f"{_S}1.proj_out",),
}
LINEAR1 = {"single_blocks.0.linear1": (*(f"{_S}0.attn.to_{c}" for c in "qkv"), f"{_S}0.proj_mlp")}
_IN = {
    "img_in": ("x_embedder",), "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
}  # fmt: skip
_FINAL = {"final_layer.linear": ("proj_out",), "final_layer.adaLN_modulation.1!": ("norm_out.linear",)}
_ONE = {"double_blocks.0.img_attn.qkv": BFL["double_blocks.0.img_attn.qkv"]}
_KOHYA_ONE = kohya(_ONE)
_T5 = "text_encoder_2.encoder.block.1.layer.0.SelfAttention.q"
ONETRAINER = (
    "transformer_blocks.0.attn.to_q", "transformer_blocks.0.ff.net.0.proj", "transformer_blocks.0.ff_context.net.2",
    "transformer_blocks.1.norm1.linear", "single_transformer_blocks.0.proj_mlp",
    "single_transformer_blocks.0.proj_out", "single_transformer_blocks.0.norm.linear",
)  # fmt: skip


def onetrainer(file: File) -> None:
    for path in ONETRAINER:
        file.lora(flat("lora_transformer_", path), path, leaves=KOHYA, alpha=1.5)


def _bfl_lokr(file: File) -> None:
    for name, paths in (BFL | LINEAR1).items():
        file.lokr(f"diffusion_model.{name}", *paths, factor=4 if len(paths) < 4 else 2)


def _loha(file: File) -> None:
    for name, paths in BFL.items():
        file.loha(flat("lora_unet_", name), *paths)


_DISCARDED: dict[str, Write] = {
    "T5 (lora_te3_)": lambda file: file.lora(
        "lora_te3_encoder_block_1_layer_0_SelfAttention_q", _T5, leaves=KOHYA, alpha=1.5
    ),
    ".diff of a layer": lambda file: file.diff(
        "lora_unet_double_blocks_1_img_mlp_0.diff", f"{_D}1.ff.net.0.proj.weight"
    ),
    ".diff_b": lambda file: file.diff("lora_unet_double_blocks_0_img_mlp_0.diff_b", f"{_D}0.ff.net.0.proj.bias"),
    ".diff of a norm": lambda file: file.diff(
        "diffusion_model.double_blocks.0.img_attn.norm.query_norm.diff", f"{_D}0.attn.norm_q.weight"
    ),
    "bundle_emb": lambda file: file.word("bundle_emb.word.clip_l", "text_encoder"),
}
FLUX1 = (
    *row(
        "FLUX.1: BFL names with lora_A, BFL LoKr",
        ("FLUX.1", "comfy", native(BFL | LINEAR1, "diffusion_model.")),
        ("FLUX.1", "comfy, LoKr", _bfl_lokr),
    ),
    *row(
        "FLUX.1: embedders and the last layer",
        ("FLUX.1", "kohya, embedders", both(_KOHYA_ONE, kohya(_IN))),
        ("FLUX.1", "kohya, last layer", both(_KOHYA_ONE, kohya(_FINAL))),
    ),
    *row(
        "FLUX.1: what is no LoRA of the transformer",
        *(("FLUX.1", f"kohya, {what}", both(_KOHYA_ONE, write)) for what, write in _DISCARDED.items()),
    ),
    *row("FLUX.1: LoHa", ("FLUX.1", "kohya", _loha)),
    *row("FLUX.1: OneTrainer's flattened names", ("FLUX.1", "OneTrainer", onetrainer)),
    *row(
        "FLUX.1: lora_down with an alpha behind `transformer.`",
        ("FLUX.1", "diffusers", each("FLUX.1", "transformer.", KOHYA, 1.5)),
    ),
    *row("Chroma: BFL names with lora_A", ("Chroma", "comfy", native(BFL | LINEAR1, "diffusion_model."))),
)

# ---- FLUX.2 ---------------------------------------------------------------------------------------------------------

BFL2 = {
    "double_blocks.0.img_attn.qkv": BFL["double_blocks.0.img_attn.qkv"],
    "double_blocks.1.txt_mlp.0": (f"{_D}1.ff_context.linear_in",),
    "single_blocks.1.linear1": (f"{_S}1.attn.to_qkv_mlp_proj",),
}
_ADALN = {"final_layer.adaLN_modulation.1!": ("norm_out.linear",)}
_MODULATION = {
    "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
    "single_stream_modulation.lin": ("single_stream_modulation.linear",),
    "guidance_in.in_layer": ("time_guidance_embed.guidance_embedder.linear_1",),
}
FLUX2 = (
    *row("FLUX.2: the last modulation", ("FLUX.2", "comfy", native(BFL2 | _ADALN, "diffusion_model."))),
    *row(
        "FLUX.2: modulations and the guidance",
        ("FLUX.2", "kohya", kohya(BFL2 | _MODULATION)),
        ("FLUX.2", "kohya, last modulation", kohya(BFL2 | _ADALN)),
    ),
    *row("FLUX.2: PEFT's adapter name in bare keys", ("FLUX.2", "bare", each("FLUX.2", "", SLOT))),
)

# ---- SD3, Qwen-Image and others -------------------------------------------------------------------------------------

_SD3 = {
    "joint_blocks.0.x_block.attn.qkv": tuple(f"{_D}0.attn.to_{c}" for c in "qkv"),
    "joint_blocks.0.context_block.attn.qkv": tuple(f"{_D}0.attn.add_{c}_proj" for c in "qkv"),
    "joint_blocks.1.x_block.mlp.fc1": (f"{_D}1.ff.net.0.proj",),
    "joint_blocks.1.x_block.adaLN_modulation.1": (f"{_D}1.norm1.linear",),
    "joint_blocks.0.context_block.adaLN_modulation.1": (f"{_D}0.norm1_context.linear",),
    "joint_blocks.1.context_block.adaLN_modulation.1!": (f"{_D}1.norm1_context.linear",),
    "final_layer.adaLN_modulation.1!": ("norm_out.linear",),
}
JOINT = (
    *row(
        "SD3: flattened names",
        ("SD3", "kohya", kohya(_SD3)),
        ("SD3", "OneTrainer", each("SD3", "lora_transformer_", KOHYA, 1.5)),
        ("SD3", "LyCORIS", each("SD3", "lycoris_", KOHYA, 1.5)),
        ("SD3", "LyCORIS, no alpha", each("SD3", "lycoris_", KOHYA)),
    ),
    *row(
        "Qwen-Image: an alpha behind `transformer.`",
        ("Qwen-Image", "diffusers", each("Qwen-Image", "transformer.", alpha=1.5)),
    ),
    *row(
        "Qwen-Image, SD3, Sana, CogVideoX: base_model.model.",
        *((m, "PEFT", each(m, "base_model.model.")) for m in ("Qwen-Image", "SD3", "Sana", "CogVideoX")),
    ),
)

# ---- Z-Image --------------------------------------------------------------------------------------------------------

Z_IMAGE = (
    *row(
        "Z-Image: lora_down with an alpha behind `transformer.`",
        ("Z-Image", "OneTrainer", each("Z-Image", "transformer.", KOHYA, 1.5)),
    ),
    *row("Z-Image: lora_unet__", ("Z-Image", "kohya", each("Z-Image", "lora_unet__", KOHYA, 1.5))),
    *row(
        "Z-Image: base_model.model. with PEFT's adapter name",
        ("Z-Image", "PEFT", each("Z-Image", "base_model.model.", SLOT)),
    ),
    *row("Z-Image: LoKr", ("Z-Image", "kohya", lokr("Z-Image", "lora_unet_"))),
)

# ---- video and the rest ---------------------------------------------------------------------------------------------

WAN = {
    "blocks.0.self_attn.q": ("blocks.0.attn1.to_q",), "blocks.0.self_attn.o": ("blocks.0.attn1.to_out.0",),
    "blocks.1.cross_attn.k": ("blocks.1.attn2.to_k",), "blocks.1.ffn.0": ("blocks.1.ffn.net.0.proj",),
}  # fmt: skip
_WAN_PAIR = native(WAN, "diffusion_model.")
_WAN_DROPPED: dict[str, Write] = {
    "norm3.diff, norm_q.diff": both(
        lambda file: file.diff("diffusion_model.blocks.0.norm3.diff", "blocks.0.norm2.weight"),
        lambda file: file.diff("diffusion_model.blocks.0.norm3.diff_b", "blocks.0.norm2.bias"),
        lambda file: file.diff("diffusion_model.blocks.1.self_attn.norm_q.diff", "blocks.1.attn1.norm_q.weight"),
    ),
    "patch_embedding.diff": lambda file: file.diff("diffusion_model.patch_embedding.diff", "patch_embedding.weight"),
    "diff_m": lambda file: file.diff("diffusion_model.blocks.0.diff_m", "blocks.0.scale_shift_table"),
}  # fmt: skip
_LUMINA = {
    "layers.0.attention.qkv": tuple(f"layers.0.attn.to_{c}" for c in "qkv"),
    "context_refiner.0.attention.qkv": tuple(f"context_refiner.0.attn.to_{c}" for c in "qkv"),
    "layers.1.attention.out": ("layers.1.attn.to_out.0",),
    "layers.1.feed_forward.w2": ("layers.1.feed_forward.linear_2",),
    "layers.0.adaLN_modulation.1": ("layers.0.norm1.linear",),
}
KREA = {
    "blocks.0.attn.wq": ("transformer_blocks.0.attn.to_q",), "blocks.1.attn.wk": ("transformer_blocks.1.attn.to_k",),
    "blocks.1.mlp.down": ("transformer_blocks.1.ff.down",),
    "txtfusion.refiner_blocks.0.attn.wo": ("text_fusion.refiner_blocks.0.attn.to_out.0",),
    "tmlp.0": ("time_embed.linear_1",),
}  # fmt: skip
COSMOS = {
    "blocks.0.self_attn.q_proj": ("transformer_blocks.0.attn1.to_q",),
    "blocks.1.cross_attn.k_proj": ("transformer_blocks.1.attn2.to_k",),
    "blocks.1.self_attn.output_proj": ("transformer_blocks.1.attn1.to_out.0",),
    "blocks.0.mlp.layer1": ("transformer_blocks.0.ff.net.0.proj",),
    "blocks.0.adaln_modulation_mlp.2": ("transformer_blocks.0.norm3.linear_2",),
}
_MOCHI = {
    "blocks.0.attn.qkv_x": tuple(f"{_D}0.attn1.to_{c}" for c in "qkv"),
    "blocks.0.attn.qkv_y": tuple(f"{_D}0.attn1.add_{c}_proj" for c in "qkv"),
    "blocks.1.attn.proj_x": (f"{_D}1.attn1.to_out.0",),
}
HUNYUAN = {
    "double_blocks.0.img_attn_qkv": tuple(f"{_D}0.attn.to_{c}" for c in "qkv"),
    "double_blocks.1.img_mlp.fc1": (f"{_D}1.ff.net.0.proj",),
}
_REFINER = {
    "txt_in.individual_token_refiner.blocks.1.self_attn_qkv": tuple(
        f"context_embedder.token_refiner.refiner_blocks.1.attn.to_{c}" for c in "qkv"
    )
}
_SINGLE = {
    "single_blocks.0.linear1": (*(f"{_S}0.attn.to_{c}" for c in "qkv"), f"{_S}0.proj_mlp"),
    "single_blocks.1.linear2": (f"{_S}1.proj_out",),
    "single_blocks.1.modulation.linear": (f"{_S}1.norm.linear",),
}
VIDEO = (
    *row(
        "Wan: bare names",
        ("Wan", "native", native(WAN, "")),
        ("Wan", "native, with PEFT's adapter name", native(WAN, "", SLOT)),
        ("Wan", "diffusers' names", each("Wan", "")),
    ),
    *row(
        "Wan: differences",
        *(("Wan", f"comfy, {what}", both(_WAN_PAIR, write)) for what, write in _WAN_DROPPED.items()),
    ),
    *row(
        "LTX-Video, Lumina 2, Krea 2, Anima: kohya",
        ("LTX-Video", "kohya", each("LTX-Video", "lora_unet_", KOHYA, 1.5)),
        ("Lumina 2", "kohya", kohya(_LUMINA)),
        ("Krea 2", "kohya", kohya(KREA)),
        ("Anima", "kohya", kohya(COSMOS)),
    ),
    *row(
        "HiDream: lycoris_",
        ("HiDream", "LyCORIS", each("HiDream", "lycoris_", KOHYA, 1.5)),
        ("HiDream", "LyCORIS, no alpha", each("HiDream", "lycoris_", KOHYA)),
    ),
    *row("Mochi: lora_A without .weight", ("Mochi", "native", native(_MOCHI, "", BARE))),
    *row("Cosmos: net.blocks", ("Cosmos", "native", native(COSMOS, "net."))),
    *row(
        "HunyuanVideo: the token refiner's qkv",
        ("HunyuanVideo", "comfy", native(HUNYUAN | _REFINER, "diffusion_model.")),
    ),
    *row("HunyuanVideo: single blocks alone", ("HunyuanVideo", "comfy", native(_SINGLE, "diffusion_model."))),
)
SILENT = (*ANY, *UNETS, *FLUX1, *FLUX2, *JOINT, *Z_IMAGE, *VIDEO)
