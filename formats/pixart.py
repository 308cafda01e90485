"""PixArt alpha and sigma, and Sana: the same blocks, of which Sana's feed-forward is convolutions."""

from difflora.formats.rules import Encoder, Family, Network, names, under
from difflora.formats.text_encoders import T5_ALONE, llama_like

_B = "transformer_blocks.{i}."
_BLOCK = """
    attn.qkv = attn1.to_{q,k,v} : D D D
    cross_attn.q_linear = attn2.to_q
    cross_attn.kv_linear = attn2.to_{k,v} : K K
    {attn,cross_attn}.proj = attn{1,2}.to_out.0
    scale_shift_table
"""
_PIXART = """
    x_embedder.proj = pos_embed.proj
    {t,csize,ar}_embedder.mlp.{0,2} = adaln_single.emb.{timestep,resolution,aspect_ratio}_embedder.linear_{1,2}
    t_block.1 = adaln_single.linear
"""
_SANA = """
    x_embedder.proj = patch_embed.proj
    t_embedder.mlp.{0,2} = time_embed.emb.timestep_embedder.linear_{1,2}
    t_block.1 = time_embed.linear
    attention_y_norm = caption_norm
    time_embed.{timestep,guidance}_embedder.linear_{1,2}
"""
_ENDS = """
    y_embedder.y_proj.fc{1,2} = caption_projection.linear_{1,2}
    final_layer.{linear,scale_shift_table} = {proj_out,scale_shift_table}
"""
_CONVOLUTIONS = "mlp.{inverted,depth,point}_conv.conv = ff.conv_{inverted,depth,point}"
_NORMS = "{attn,cross_attn}.{q,k}_norm = attn{1,2}.norm_{q,k}"
_WIDE = names(f"transformer.{_B}", "attn{1,2}.to_{q,k,v,out.0}")
_CAPTION = "transformer.caption_projection.linear_1"

PIXART = Family(
    name="pixart",
    denoiser="transformer",
    network=Network(
        rules=(
            *under("blocks.{i}.", _B, f"{_BLOCK}\n mlp.fc{{1,2}} = ff.net.{{0.proj,2}}"),
            *under("", "", _PIXART + _ENDS),
        )
    ),
    encoders=T5_ALONE,
    widths=dict.fromkeys(_WIDE, (1152, 1152)) | {_CAPTION: (1152, 4096)},
    marks=("pixart",),
)
SANA = Family(
    name="sana",
    denoiser="transformer",
    network=Network(
        rules=(
            *under("blocks.{i}.", _B, f"{_BLOCK}\n{_NORMS}\n{_CONVOLUTIONS}"),
            *under("", "", _SANA + _ENDS),
        )
    ),
    encoders=(Encoder("text_encoder", llama_like(""), ("te", "te1", "text_encoder", "gemma2_2b")),),
    widths=dict.fromkeys(_WIDE, ((1152, 2240), (1152, 2240))) | {_CAPTION: ((1152, 2240), 2304)},
    marks=("sana",),
)
