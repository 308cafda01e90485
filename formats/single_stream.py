"""Transformers of one stream of `layers`: Lumina 2 and NewBie, Z-Image, Ideogram 4, ERNIE-Image."""

from difflora.formats.rules import Encoder, Family, names, network, square
from difflora.formats.text_encoders import llama_like

_LUMINA2 = """
    x_embedder
    cap_embedder.{0,1} = time_caption_embed.caption_embedder.{0,1}
    t_embedder.mlp.{0,2} = time_caption_embed.timestep_embedder.linear_{1,2}
    final_layer.{adaLN_modulation.1,linear} = norm_out.linear_{1,2}
    {context_refiner,noise_refiner,layers}.{i}.:
    attention.qkv = attn.to_q + attn.to_k + attn.to_v : D K K
    attention.{out,q_norm,k_norm} = attn.{to_out.0,norm_q,norm_k}
    feed_forward.w{1,2,3} = feed_forward.linear_{1,2,3}
    attention_norm2 = norm2
    ffn_norm{1,2}
    {noise_refiner,layers}.{i}.:
    {attention_norm1,adaLN_modulation.1} = norm1.{norm,linear}
    context_refiner.{i}.:
    attention_norm1 = norm1
"""
_Z_IMAGE = """
    x_embedder = all_x_embedder.2-1
    final_layer.{linear,adaLN_modulation.1} = all_final_layer.2-1.{linear,adaLN_modulation.1}
    {x,cap,siglip}_pad_token {cap,siglip}_embedder.{0,1} t_embedder.mlp.{0,2}
    {context_refiner,noise_refiner,siglip_refiner,layers}.{i}.:
    attention.qkv = attention.to_q + attention.to_k + attention.to_v : D D D
    attention.{out,q_norm,k_norm} = attention.{to_out.0,norm_q,norm_k}
    feed_forward.w{1,2,3} {attention,ffn}_norm{1,2}
    {noise_refiner,layers}.{i}.:
    adaLN_modulation.0
"""
_IDEOGRAM4 = """
    input_proj llm_cond_{norm,proj} t_embedding.mlp_{in,out} adaln_proj embed_image_indicator
    final_layer.{linear,adaln_modulation}
    layers.{i}.:
    attention.qkv = attention.to_q + attention.to_k + attention.to_v : D D D
    attention.o = attention.to_out.0
    attention.norm_{q,k} feed_forward.w{1,2,3} {attention,ffn}_norm{1,2} adaln_modulation
"""
_ERNIE = """
    x_embedder.proj text_proj time_embedding.linear_{1,2} adaLN_modulation.1 final_norm.linear final_linear
    layers.{i}.:
    self_attention.to_{q,k,v,out.0} self_attention.norm_{q,k} mlp.{gate_proj,up_proj,linear_fc2} adaLN_{sa,mlp}_ln
"""
_TE = ("te", "te1", "text_encoder")
_QKVO = ".{i}.attention.to_{q,k,v,out.0}"
_STACKS = "transformer.{layers,noise_refiner,context_refiner}"
_GEMMA, _QWEN3 = (Encoder("text_encoder", llama_like(""), (*_TE, name)) for name in ("gemma2_2b", "qwen3_4b"))
_SEEING = Encoder("text_encoder", llama_like("language_model."), _TE)
# Lumina 2 and NewBie.
_LUMINA2_WIDTHS = square("", _STACKS + ".{i}.attn.to_{q,out.0}", (2304, 2560)) | dict.fromkeys(
    names("", _STACKS + ".{i}.attn.to_{k,v}"), ((768, 512), (2304, 2560))
)

LUMINA2 = Family("lumina2", "transformer", network(_LUMINA2), (_GEMMA,), _LUMINA2_WIDTHS, ("lumina", "newbie"))
Z_IMAGE = Family(
    "z-image", "transformer", network(_Z_IMAGE), (_QWEN3,), square("", _STACKS + _QKVO, 3840), ("z-image", "z_image")
)
IDEOGRAM4 = Family(
    "ideogram4",
    "transformer",
    network(_IDEOGRAM4),
    (_SEEING,),
    square("transformer.layers", _QKVO, 4608),
    ("ideogram",),
)
ERNIE_IMAGE = Family("ernie-image", "transformer", network(_ERNIE), (_SEEING,), {}, ("ernie",))
