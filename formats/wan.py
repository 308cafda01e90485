"""Wan 2.1 and 2.2 (text, image, VACE, Animate), and what shares its modules: SkyReels V2, ChronoEdit, Helios."""

from difflora.formats.rules import Family, Network, names, under
from difflora.formats.text_encoders import T5_ALONE

# The norm that has weights, before the cross-attention, is norm3 to Wan and norm2 to diffusers.
_BLOCK = """
    {self,cross}_attn.{q,k,v,o,norm_q,norm_k} = attn{1,2}.{to_q,to_k,to_v,to_out.0,norm_q,norm_k}
    ffn.{0,2} = ffn.net.{0.proj,2}
    norm3 = norm2
    modulation = scale_shift_table
"""
_VACE = "{before,after}_proj = proj_{in,out}"
_IMAGE = "cross_attn.{k_img,v_img,norm_k_img} = attn2.{add_k_proj,add_v_proj,norm_added_k}"
_TOP = """
    head.{head,modulation} = {proj_out,scale_shift_table}
    {text,time}_embedding.{0,2} = condition_embedder.{text,time}_embedder.linear_{1,2}
    time_projection.1 = condition_embedder.time_proj
    img_emb.{emb_pos,proj.0,proj.4} = condition_embedder.image_embedder.{pos_embed,norm1,norm2}
    img_emb.proj.{1,3} = condition_embedder.image_embedder.ff.net.{0.proj,2}
    fps_projection.{0,2} = fps_projection.net.{0.proj,2}
    face_encoder.{conv1_local,conv2,conv3}.conv = face_encoder.{conv1_local,conv2,conv3}
"""
_FACE = """
    {linear1_q,linear2,q_norm,k_norm} = {to_q,to_out,norm_q,norm_k}
    linear1_kv = to_{k,v} : K K
"""
_NAMES = """
    {,vace_,pose_}patch_embedding patch_{short,mid,long} norm_out.scale_shift_table fps_embedding
    face_encoder.{padding_tokens,out_proj} motion_encoder.{motion_synthesis_weight,conv_in,conv_out}
    motion_encoder.motion_network.{i} motion_encoder.res_blocks.{i}.{conv1,conv2,conv_skip}
"""
WAN = Family(
    name="wan",
    denoiser="transformer",
    network=Network(
        rules=(
            *under("blocks.{i}.", "blocks.{i}.", f"{_BLOCK}\n{_IMAGE}"),
            *under("vace_blocks.{i}.", "vace_blocks.{i}.", f"{_BLOCK}\n{_VACE}"),
            *under("face_adapter.fuser_blocks.{i}.", "face_adapter.{i}.", _FACE),
            *under("", "", _TOP),
        ),
        names=names("", _NAMES),
    ),
    encoders=T5_ALONE,
    marks=("wan",),
    experts=("transformer_2",),
)
