"""MiniMax-H3: moving pictures with sound.  Its feed-forwards have the gate where diffusers has the value."""

from dataclasses import replace

from difflora.formats.rules import Encoder, Family, names, network, under
from difflora.formats.text_encoders import llama_like

_H3 = """
    {video,audio}_patch_proj = {,audio_}proj_in
    time_embedder.proj_{in,out} = time_embedder.linear_{1,2}
    condition_proj = context_embedder
    final_layer.{norm,adaln_proj.linear} = norm_out.{norm,linear}
    final_layer.{video,audio}_out = {,audio_}proj_out
    token_refiner.final_norm
    {blocks,token_refiner.blocks}.{i}. = {transformer_blocks,token_refiner.refiner_blocks}.{i}.:
    attn.qkv_proj = attn.to_q + attn.to_k + attn.to_v : N N N
    attn.{out_proj,q_norm,k_norm} = attn.{to_out.0,norm_q,norm_k}
    mlp.fc1 = ff.net.0.proj : N N / 1 0
    mlp.fc2 = ff.net.2
    norm{1,2}
    blocks.{i}. = transformer_blocks.{i}.:
    adaln_proj.linear
"""
_QWEN3_VL = Encoder("text_encoder", llama_like("model.language_model."), ("te", "te1", "text_encoder"))
# The one trainer that writes PEFT's adapter name leaves q, k and v head by head.
_SLOTTED = tuple(replace(rule, heads=128) for rule in under("", "", _H3) if rule.source.endswith("qkv_proj"))

MINIMAX_H3 = Family(
    name="minimax-h3",
    denoiser="transformer",
    network=network(_H3),
    encoders=(_QWEN3_VL,),
    widths=dict.fromkeys(names("transformer.transformer_blocks.{i}.attn.", "to_{q,k,v}"), (7168, 5376)),
    marks=("minimax-h3",),
    slotted=_SLOTTED,
    experts=("transformer_ref",),
)
