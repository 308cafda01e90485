"""NVIDIA's Cosmos 1.0 and Cosmos-Predict 2, and Anima, which is the latter behind an adapter for its text encoder."""

from difflora.formats.layouts import DENOISER
from difflora.formats.rules import Encoder, Family, Network, Width, names, network, square, under
from difflora.formats.text_encoders import T5_ALONE, llama_like

_COSMOS = """
    t_embedder.1.linear_{1,2} = time_embed.t_embedder.linear_{1,2}
    {affline_norm,x_embedder.proj.1,final_layer.linear} = {time_embed.norm,patch_embed.proj,proj_out}
    final_layer.adaLN_modulation.{1,2} = norm_out.linear_{1,2}
    extra_pos_embedder.pos_emb_{t,h,w} = learnable_pos_embed.pos_emb_{t,h,w}
    blocks.block{i}. = transformer_blocks.{i}.:
    blocks.{0,1}.block.attn.to_{q.0,k.0,v.0,out.0,q.1,k.1} = attn{1,2}.{to_q,to_k,to_v,to_out.0,norm_q,norm_k}
    blocks.{0,1,2}.adaLN_modulation.{1,2} = norm{1,2,3}.linear_{1,2}
    blocks.2.block.layer{1,2} = ff.net.{0.proj,2}
"""
_COSMOS2 = """
    t_embedder.1.linear_{1,2} = time_embed.t_embedder.linear_{1,2}
    {t_embedding_norm,x_embedder.proj.1,final_layer.linear} = {time_embed.norm,patch_embed.proj,proj_out}
    final_layer.adaln_modulation.{1,2} = norm_out.linear_{1,2}
    crossattn_proj.0 img_context_proj.0
    blocks.{i}. = transformer_blocks.{i}.:
    {self,cross}_attn.{q,k,v,output}_proj = attn{1,2}.to_{q,k,v,out.0}
    {self,cross}_attn.{q,k}_norm = attn{1,2}.norm_{q,k}
    cross_attn.{q_img,k_img,v_img,q_img_norm,k_img_norm} = attn2.{q_img,k_img,v_img,q_img_norm,k_img_norm}
    adaln_modulation_{self_attn,cross_attn,mlp}.{1,2} = norm{1,2,3}.linear_{1,2}
    mlp.layer{1,2} = ff.net.{0.proj,2}
"""
_CONDITIONER = """
    embed norm out_proj blocks.{i}.norm_{self_attn,cross_attn,mlp} blocks.{i}.mlp.{0,2}
    blocks.{i}.{self,cross}_attn.{q,k,v,o}_proj blocks.{i}.{self,cross}_attn.{q,k}_norm
"""


def _widths(*hidden: int) -> dict[str, tuple[Width, Width]]:
    block = "transformer.transformer_blocks.{i}."
    text = dict.fromkeys(names(block, "attn2.to_{k,v}"), (hidden, 1024))
    return square(block, "attn1.to_{q,k,v,out.0} attn2.to_{q,out.0}", hidden) | text


_ANIMA = (
    Encoder("text_encoder", llama_like(""), ("te", "te1", "text_encoder", "qwen3_06b")),
    Encoder("text_conditioner", network(_CONDITIONER), ("text_conditioner",)),
    # The files take the adapter for a part of the denoiser, some of whose modules are called like the adapter's.
    Encoder("text_conditioner", Network(under("llm_adapter.", "", _CONDITIONER), own=False), (DENOISER,)),
)

COSMOS = Family("cosmos", "transformer", network(_COSMOS), T5_ALONE, _widths(4096, 5120), ("cosmos-1",))
COSMOS2 = Family("cosmos2", "transformer", network(_COSMOS2), T5_ALONE, _widths(2048, 5120), ("cosmos",))
ANIMA = Family("anima", "transformer", network(_COSMOS2), _ANIMA, _widths(2048), ("anima",))
