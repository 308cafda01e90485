"""Tencent's: HunyuanVideo and FramePack, HunyuanVideo 1.5, HunyuanImage 2.1, HunyuanDiT."""

from difflora.formats.flux import DOUBLE, WIDTHS
from difflora.formats.flux2 import BLOCKS, JOINT, SWAP
from difflora.formats.rules import Encoder, Family, Network, names, network, square
from difflora.formats.text_encoders import CLIP, T5, llama_like

# Tencent's own names, in some trainers with q, k and v apart; ComfyUI renames modules to what BFL calls them.
_SHARED = (
    SWAP
    + """
    {img_in.proj,final_layer.linear,txt_in.input_embedder} = {x_embedder.proj,proj_out,context_embedder.proj_in}
    txt_in. = context_embedder.time_text_embed.:
    t_embedder.{mlp.0,mlp.2,in_layer,out_layer} = timestep_embedder.linear_{1,2,1,2}
    c_embedder.{linear_1,linear_2,in_layer,out_layer} = text_embedder.linear_{1,2,1,2}
    txt_in.individual_token_refiner.blocks.{i}. = context_embedder.token_refiner.refiner_blocks.{i}.:
    self_attn{_,.}qkv = attn.{to_q,to_q} + attn.{to_k,to_k} + attn.{to_v,to_v} : D D D
    {self_attn_proj,self_attn.proj,adaLN_modulation.1} = {attn.to_out.0,attn.to_out.0,norm_out.linear}
    mlp.{fc1,fc2,0,2} = ff.net.{0.proj,2,0.proj,2}
    norm{1,2}
    double_blocks.{i}. = transformer_blocks.{i}.:
    {img,txt}_mod.{lin,linear} = {norm1,norm1,norm1_context,norm1_context}.linear
    {img,txt}_mlp.fc{1,2} = {ff,ff_context}.net.{0.proj,2}
    img_attn_qkv = attn.to_q + attn.to_k + attn.to_v : D D D
    txt_attn_qkv = attn.add_q_proj + attn.add_k_proj + attn.add_v_proj : D D D
    img_attn_{q,k,v,proj,q_norm,k_norm} = attn.{to_q,to_k,to_v,to_out.0,norm_q,norm_k}
    txt_attn_{q,k,v} = attn.add_{q,k,v}_proj
    txt_attn_{proj,q_norm,k_norm} = attn.{to_add_out,norm_added_q,norm_added_k}
"""
)
_SINGLE = """
    single_blocks.{i}. = single_transformer_blocks.{i}.:
    {linear1_q,linear1_k,linear1_v,linear1_mlp,linear2.fc} = {attn.to_q,attn.to_k,attn.to_v,proj_mlp,proj_out}
    {modulation.lin,modulation.linear,q_norm,k_norm} = {norm.linear,norm.linear,attn.norm_q,attn.norm_k}
"""
_VIDEO = """
    :
    vector_in.{in,out}_layer = time_text_embed.text_embedder.linear_{1,2}
    {time,guidance}_in.{mlp.0,mlp.2,in_layer,out_layer} = time_text_embed.{timestep,guidance}_embedder.linear_{1,2,1,2}
    image_projection.{up,down} clean_x_embedder.{proj,proj_2x,proj_4x}
"""
_VIDEO15 = """
    :
    byt5_in.{layernorm,fc1,fc2,fc3} = context_embedder_2.{norm,linear_1,linear_2,linear_3}
    time{,_r}_in.{mlp.0,mlp.2,in_layer,out_layer} = time_embed.timestep_embedder{,_r}.linear_{1,2,1,2}
    vision_in.proj.{0,1,3,4} = image_embedder.{norm_in,linear_1,linear_2,norm_out}
    cond_type_embedding = cond_type_embed
"""
_IMAGE = """
    :
    byt5_in.{layernorm,fc1,fc2,fc3} = context_embedder_2.{norm,linear_1,linear_2,linear_3}
    time{,_r}_in.{mlp.0,mlp.2,in_layer,out_layer} = time_guidance_embed.timestep_embedder{,_r}.linear_{1,2,1,2}
    guidance_in.{mlp.0,mlp.2,in_layer,out_layer} = time_guidance_embed.guidance_embedder.linear_{1,2,1,2}
"""
_DIT = """
    {x_embedder.proj,final_layer.linear,style_embedder} = {pos_embed.proj,proj_out,time_extra_emb.style_embedder}
    text_embedding_padding
    mlp_t5.{0,2} = text_embedder.linear_{1,2}
    {t_embedder.mlp,extra_embedder}.{0,2} = time_extra_emb.{timestep_embedder,extra_embedder}.linear_{1,2}
    pooler. = time_extra_emb.pooler.:
    positional_embedding {q,k,v,c}_proj
    blocks.{i}.:
    attn1.Wqkv = attn1.to_q + attn1.to_k + attn1.to_v : D D D
    attn2.kv_proj = attn2.to_k + attn2.to_v : K K
    attn2.q_proj = attn2.to_q
    attn{1,2}.{out_proj,q_norm,k_norm} = attn{1,2}.{to_out.0,norm_q,norm_k}
    {mlp.fc1,mlp.fc2,default_modulation.1,norm1} = {ff.net.0.proj,ff.net.2,norm1.linear,norm1.norm}
    norm{2,3} = norm{3,2}
    skip_{norm,linear}
"""
_BERT = """
    embeddings.{word,position,token_type}_embeddings encoder.layer.{i}.attention.self.{query,key,value}
    encoder.layer.{i}.attention.output.dense encoder.layer.{i}.{intermediate,output}.dense
"""
_TE, _TE2 = ("te", "te1", "text_encoder"), ("te2", "text_encoder_2")
_LLAMA = (Encoder("text_encoder", llama_like(""), (*_TE, "llama")), Encoder("text_encoder_2", CLIP, (*_TE2, "clip_l")))
_BYT5 = Encoder("text_encoder_2", T5, (*_TE2, "byt5_small"))
_QWEN, _QWEN_VL = (
    Encoder("text_encoder", llama_like(level), (*_TE, "qwen25_7b")) for level in ("", "model.language_model.")
)
_BERT_T5 = (
    Encoder("text_encoder", Network(names=names("", _BERT)), (*_TE, "bert")),
    Encoder("text_encoder_2", T5, _TE2),
)
_IMAGE_WIDTHS = square("transformer.", "{,single_}transformer_blocks.{i}.attn.to_{q,k,v}", 3584)
_VIDEO15_WIDTHS = square("transformer.transformer_blocks.{i}.", JOINT, 2048)
_DIT_WIDTHS = square("transformer.blocks.{i}.", "attn{1,2}.to_{q,out.0}", 1408)
_VIDEO_MARKS = ("hunyuan-video", "hunyuan_video", "framepack")
_DOUBLE = (rule for rule in BLOCKS if rule in DOUBLE)

_DEPTHS = {"transformer_blocks.": 20, "single_transformer_blocks.": 40}

HUNYUAN_VIDEO = Family(
    "hunyuan-video",
    "transformer",
    network(_SHARED + _SINGLE + _VIDEO, *BLOCKS),
    _LLAMA,
    WIDTHS,
    _VIDEO_MARKS,
    depths=_DEPTHS,
)
HUNYUAN_VIDEO15 = Family(
    name="hunyuan-video-1.5",
    denoiser="transformer",
    network=network(_SHARED + _VIDEO15, *_DOUBLE),
    encoders=(_QWEN, _BYT5),
    widths=_VIDEO15_WIDTHS,
    marks=("hunyuan-video-1.5",),
)
HUNYUAN_IMAGE = Family(
    "hunyuan-image",
    "transformer",
    network(_SHARED + _SINGLE + _IMAGE, *BLOCKS),
    (_QWEN_VL, _BYT5),
    _IMAGE_WIDTHS,
    ("hunyuan-image",),
    depths=_DEPTHS,
)
HUNYUAN_DIT = Family("hunyuan-dit", "transformer", network(SWAP + _DIT), _BERT_T5, _DIT_WIDTHS, ("hunyuandit",))
