"""Krea 2: fewer keys and values than queries in its blocks, as many in its text fusion."""

from difflora.formats.rules import Encoder, Family, names, network
from difflora.formats.text_encoders import llama_like

_TOP = """
    {first,tmlp.0,tmlp.2,tproj.1} = {img_in,time_embed.linear_1,time_embed.linear_2,time_mod_proj}
    txtmlp.{0,1,3} = txt_in.{norm,linear_1,linear_2}
    txtfusion.projector = text_fusion.projector
    last.{linear,norm,modulation.lin} = final_layer.{linear,norm,scale_shift_table}
    blocks.{i}.mod.lin = transformer_blocks.{i}.scale_shift_table
"""
_BLOCKS = "{blocks,transformer_blocks}.{i}. = transformer_blocks.{i}.:"
_FUSION = "{txtfusion,text_fusion}.{layerwise,refiner}_blocks.{i}. = text_fusion.{layerwise,refiner}_blocks.{i}.:"
_BLOCK = """
    attn.{wq,wk,wv,wo,gate} = attn.to_{q,k,v,out.0,gate}
    attn.to_qkv = attn.to_q + attn.to_k + attn.to_v : D K K
    attn.qknorm.{q,k}norm = attn.norm_{q,k}
    {prenorm,postnorm} = norm{1,2}
    mlp.{gate,up,down} = ff.{gate,up,down}
"""

_QWEN3_VL = Encoder("text_encoder", llama_like("language_model."), ("te", "te1", "text_encoder", "qwen3vl_4b"))
_WIDTHS = {
    "transformer.transformer_blocks.{i}.attn.to_q": (6144, 6144),
    **dict.fromkeys(names("transformer.transformer_blocks.{i}.", "attn.to_{k,v}"), (1536, 6144)),
}
_NETWORK = network(f"{_TOP}\n{_BLOCKS}\n{_BLOCK}\n{_FUSION}\n{_BLOCK}")

KREA2 = Family("krea2", "transformer", _NETWORK, (_QWEN3_VL,), _WIDTHS, ("krea2", "krea-2"))
