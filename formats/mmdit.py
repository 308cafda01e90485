"""Transformers of two streams: Stable Diffusion 3 and 3.5, Qwen-Image and its 2.1 of one stream, AuraFlow."""

from difflora.formats.flux2 import JOINT, SWAP
from difflora.formats.rules import Encoder, Family, network, square
from difflora.formats.text_encoders import CLIP, T5, T5_ALONE, clip_widths, llama_like

_SD3 = """
    {x_embedder.proj,context_embedder,final_layer.linear} = {pos_embed.proj,context_embedder,proj_out}
    {t,y}_embedder.mlp.{0,2} = time_text_embed.{timestep,text}_embedder.linear_{1,2}
    joint_blocks.{i}. = transformer_blocks.{i}.:
    {x,context}_block.mlp.fc{1,2} = {ff,ff_context}.net.{0.proj,2}
    x_block.adaLN_modulation.1 = norm1.linear
    context_block.adaLN_modulation.1 = norm1_context.linear : D D / 1 0 or whole
    x_block.{attn,attn2}.qkv = {attn,attn2}.to_q + {attn,attn2}.to_k + {attn,attn2}.to_v : D D D
    x_block.{attn,attn2}.{proj,ln_q,ln_k} = {attn,attn2}.{to_out.0,norm_q,norm_k}
    context_block.attn.qkv = attn.add_q_proj + attn.add_k_proj + attn.add_v_proj : D D D
    context_block.attn.{proj,ln_q,ln_k} = attn.{to_add_out,norm_added_q,norm_added_k}
"""
_QWEN = """
    img_in txt_in txt_norm norm_out.linear proj_out
    time_text_embed.timestep_embedder.linear_{1,2} time_text_embed.addition_t_embedding
    transformer_blocks.{i}.:
    attn.to_{q,k,v,out.0,add_out} attn.add_{q,k,v}_proj attn.norm_{q,k,added_q,added_k}
    {img,txt}_mod.1 {img,txt}_mlp.net.{0.proj,2}
"""
_QWEN21 = """
    img_in modulation.1 txt_in.{text_norm,in_layer,out_layer} norm_out.linear proj_out
    time_text_embed.timestep_embedder.linear_{1,2}
    transformer_blocks.{i}.:
    attn.to_{q,k,v,out.0} attn.norm_{q,k} img_mlp.{proj,out,gate_layer}
    img_mlp.gate_up = img_mlp.gate_layer + img_mlp.proj : N N
"""
_AURA = """
    {t_embedder.mlp.0,t_embedder.mlp.2,init_x_linear} = {time_step_proj.linear_1,time_step_proj.linear_2,pos_embed.proj}
    {cond_seq_linear,final_linear,positional_encoding} = {context_embedder,proj_out,pos_embed.pos_embed}
    modF.1 = norm_out.linear : D D / 1 0
    register_tokens
    double_layers.{i}. = joint_transformer_blocks.{i}.:
    attn.{w1,w2}{q,k,v,o} = attn.{add_q_proj,add_k_proj,add_v_proj,to_add_out,to_q,to_k,to_v,to_out.0}
    {mlpX,mlpC}.{c_fc1,c_fc2,c_proj} = {ff,ff_context}.{linear_1,linear_2,out_projection}
    mod{X,C}.1 = norm1{,_context}.linear
    single_layers.{i}. = single_transformer_blocks.{i}.:
    attn.w1{q,k,v,o} = attn.to_{q,k,v,out.0}
    {mlp.c_fc1,mlp.c_fc2,mlp.c_proj,modCX.1} = {ff.linear_1,ff.linear_2,ff.out_projection,norm1.linear}
"""
_B = "transformer.transformer_blocks.{i}."
_ENCODERS = (
    Encoder("text_encoder", CLIP, ("te1", "text_encoder", "clip_l")),
    Encoder("text_encoder_2", CLIP, ("te2", "text_encoder_2", "clip_g")),
    Encoder("text_encoder_3", T5, ("te3", "text_encoder_3", "t5xxl")),
)
_SD3_WIDTHS = square(_B, JOINT, (1536, 2432)) | clip_widths("text_encoder", 768) | clip_widths("text_encoder_2", 1280)
_QWEN_VL = (Encoder("text_encoder", llama_like("model.language_model."), ("te", "te1", "text_encoder", "qwen25_7b")),)
_SELF = "attn.to_{q,k,v}"
_AURA_WIDTHS = square("transformer.{joint,single}_transformer_blocks.{i}.", _SELF, 3072)

SD3 = Family("sd3", "transformer", network(SWAP + _SD3), _ENCODERS, _SD3_WIDTHS, ("stable-diffusion-3", "sd3"))
QWEN_IMAGE = Family(
    "qwen-image", "transformer", network(_QWEN), _QWEN_VL, square(_B, JOINT, 3072), ("qwen-image", "qwen_image")
)
QWEN_IMAGE21 = Family(
    "qwen-image-2.1", "transformer", network(_QWEN21), _QWEN_VL, square(_B, _SELF, 4096), ("qwen-image-2.1",)
)
AURAFLOW = Family("auraflow", "transformer", network(_AURA), T5_ALONE, _AURA_WIDTHS, ("auraflow",))
