"""Mochi 1: x is the picture, y the text."""

from difflora.formats.rules import Family, Network, names, under
from difflora.formats.text_encoders import T5_ALONE

# Halves change places where Mochi stores (shift, scale), or the value before its gate.
_BLOCK = """
    mod_{x,y} = {norm1,norm1_context}.linear
    attn.qkv_{x,y} = attn1.{to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj} : H H H
    attn.{q,k}_norm_{x,y} = attn1.{norm_q,norm_added_q,norm_k,norm_added_k}
    attn.proj_{x,y} = attn1.{to_out.0,to_add_out}
    mlp_{x,y}.w1 = {ff,ff_context}.net.0.proj : H H / 1 0
    mlp_{x,y}.w2 = {ff,ff_context}.net.2
    norm1_context.linear_1
"""
_TOP = """
    x_embedder.proj = patch_embed.proj
    t_embedder.mlp.{0,2} = time_embed.timestep_embedder.linear_{1,2}
    t5_y_embedder.to_{kv,q,out} = time_embed.pooler.to_{kv,q,out}
    t5_yproj = time_embed.caption_proj
    final_layer.mod = norm_out.linear : D D / 1 0
    final_layer.linear = proj_out
    pos_frequencies
"""

MOCHI = Family(
    name="mochi",
    denoiser="transformer",
    network=Network(rules=(*under("blocks.{i}.", "transformer_blocks.{i}.", _BLOCK), *under("", "", _TOP))),
    encoders=T5_ALONE,
    widths=dict.fromkeys(names("transformer.transformer_blocks.{i}.attn1.", "to_{q,k,v,out.0}"), (3072, 3072)),
    marks=("mochi",),
)
