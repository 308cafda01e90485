"""FLUX.1.  Canonical names are diffusers' modules; BFL checkpoints fuse some of them."""

from difflora.formats.rules import Encoder, Family, Network, under
from difflora.formats.text_encoders import CLIP, T5, clip_widths

_D, _S = "transformer_blocks.{i}.", "single_transformer_blocks.{i}."
_EMBEDDERS = {"time_in": "timestep_embedder", "vector_in": "text_embedder", "guidance_in": "guidance_embedder"}

# The two streams of a double block: what BFL, XLabs' processors and diffusers call them.
DOUBLE = (
    *under(
        "double_blocks.{i}.",
        _D,
        """
        img_attn.qkv = attn.to_q + attn.to_k + attn.to_v : D D D
        img_attn.proj = attn.to_out.0
        img_attn.norm.query_norm = attn.norm_q
        img_attn.norm.key_norm = attn.norm_k
        img_mlp.0 = ff.net.0.proj
        img_mlp.2 = ff.net.2
        txt_attn.qkv = attn.add_q_proj + attn.add_k_proj + attn.add_v_proj : D D D
        txt_attn.proj = attn.to_add_out
        txt_attn.norm.query_norm = attn.norm_added_q
        txt_attn.norm.key_norm = attn.norm_added_k
        txt_mlp.0 = ff_context.net.0.proj
        txt_mlp.2 = ff_context.net.2
        processor.qkv_lora1 = attn.to_q + attn.to_k + attn.to_v : D D D
        processor.proj_lora1 = attn.to_out.0
        processor.qkv_lora2 = attn.add_q_proj + attn.add_k_proj + attn.add_v_proj : D D D
        processor.proj_lora2 = attn.to_add_out
        """,
    ),
)
SINGLE = under(
    "single_blocks.{i}.",
    _S,
    """
    linear1 = attn.to_q + attn.to_k + attn.to_v + proj_mlp : D D D M
    linear2 = proj_out
    norm.query_norm = attn.norm_q
    norm.key_norm = attn.norm_k
    processor.qkv_lora = attn.to_q + attn.to_k + attn.to_v : D D D
    processor.proj_lora = proj_out
    """,
)
_MODULATION = (
    *under("double_blocks.{i}.", _D, "img_mod.lin = norm1.linear\n txt_mod.lin = norm1_context.linear"),
    *under("single_blocks.{i}.", _S, "modulation.lin = norm.linear"),
    *(
        rule
        for native, name in _EMBEDDERS.items()
        for rule in under(f"{native}.", f"time_text_embed.{name}.", "in_layer = linear_1\n out_layer = linear_2")
    ),
    # BFL stores (shift, scale), diffusers (scale, shift).
    *under("", "", "final_layer.adaLN_modulation.1 = norm_out.linear : D D / 1 0"),
)
ENDS = under("", "", "img_in = x_embedder\n txt_in = context_embedder\n final_layer.linear = proj_out")
WIDTHS: dict[str, tuple[int | None, int | None]] = {
    **{f"transformer.{block}attn.to_{c}": (3072, 3072) for block in (_D, _S) for c in "qkv"},
    **{f"transformer.{_D}attn.add_{c}_proj": (3072, 3072) for c in "qkv"},
    **{f"transformer.{_D}{ff}.net.0.proj": (12288, 3072) for ff in ("ff", "ff_context")},
    f"transformer.{_S}proj_mlp": (12288, 3072),
}
DEPTHS = {"transformer_blocks.": 19, "single_transformer_blocks.": 38}

FLUX = Family(
    name="flux",
    denoiser="transformer",
    network=Network((*DOUBLE, *SINGLE, *_MODULATION, *ENDS)),
    encoders=(
        Encoder("text_encoder", CLIP, ("te1", "text_encoder", "clip_l")),
        Encoder("text_encoder_2", T5, ("te", "te1", "te2", "te3", "text_encoder_2", "t5xxl")),
    ),
    widths={
        **WIDTHS,
        **clip_widths("text_encoder", 768),
        "text_encoder_2.encoder.block.{i}.layer.0.SelfAttention.q": (4096, 4096),
    },
    marks=("flux-1", "flux.1", "flux1"),
    widens=("x_embedder",),
    depths=DEPTHS,
)
