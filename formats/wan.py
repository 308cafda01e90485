"""Wan 2.1 and 2.2 (text, image, VACE, Animate), and what shares its modules: SkyReels V2, ChronoEdit, Helios."""

from difflora.formats.rules import Encoder, Family, Network, names, under
from difflora.formats.text_encoders import T5

_BLOCK = """
    self_attn.q = attn1.to_q
    self_attn.k = attn1.to_k
    self_attn.v = attn1.to_v
    self_attn.o = attn1.to_out.0
    self_attn.norm_q = attn1.norm_q
    self_attn.norm_k = attn1.norm_k
    cross_attn.q = attn2.to_q
    cross_attn.k = attn2.to_k
    cross_attn.v = attn2.to_v
    cross_attn.o = attn2.to_out.0
    cross_attn.norm_q = attn2.norm_q
    cross_attn.norm_k = attn2.norm_k
    ffn.0 = ffn.net.0.proj
    ffn.2 = ffn.net.2
    norm3 = norm2
    modulation = scale_shift_table
"""  # The norm that has weights, before the cross-attention, is norm3 to Wan and norm2 to diffusers.
_IMAGE = """
    cross_attn.k_img = attn2.add_k_proj
    cross_attn.v_img = attn2.add_v_proj
    cross_attn.norm_k_img = attn2.norm_added_k
"""
_TOP = """
    head.head = proj_out
    head.modulation = scale_shift_table
    text_embedding.0 = condition_embedder.text_embedder.linear_1
    text_embedding.2 = condition_embedder.text_embedder.linear_2
    time_embedding.0 = condition_embedder.time_embedder.linear_1
    time_embedding.2 = condition_embedder.time_embedder.linear_2
    time_projection.1 = condition_embedder.time_proj
    img_emb.emb_pos = condition_embedder.image_embedder.pos_embed
    img_emb.proj.0 = condition_embedder.image_embedder.norm1
    img_emb.proj.1 = condition_embedder.image_embedder.ff.net.0.proj
    img_emb.proj.3 = condition_embedder.image_embedder.ff.net.2
    img_emb.proj.4 = condition_embedder.image_embedder.norm2
    fps_projection.0 = fps_projection.net.0.proj
    fps_projection.2 = fps_projection.net.2
    face_encoder.conv1_local.conv = face_encoder.conv1_local
    face_encoder.conv2.conv = face_encoder.conv2
    face_encoder.conv3.conv = face_encoder.conv3
"""
_FACE = """
    linear1_q = to_q
    linear1_kv = to_k + to_v : K K
    linear2 = to_out
    q_norm = norm_q
    k_norm = norm_k
"""
_NAMES = """
    patch_embedding vace_patch_embedding pose_patch_embedding fps_embedding patch_short patch_mid patch_long
    norm_out.scale_shift_table face_encoder.padding_tokens face_encoder.out_proj
    motion_encoder.motion_synthesis_weight motion_encoder.motion_network.{i} motion_encoder.conv_in
    motion_encoder.res_blocks.{i}.conv1 motion_encoder.res_blocks.{i}.conv2 motion_encoder.res_blocks.{i}.conv_skip
    motion_encoder.conv_out
"""
_NETWORK = Network(
    rules=(
        *under("blocks.{i}.", "blocks.{i}.", _BLOCK + _IMAGE),
        *under("vace_blocks.{i}.", "vace_blocks.{i}.", f"{_BLOCK}\n before_proj = proj_in\n after_proj = proj_out"),
        *under("face_adapter.fuser_blocks.{i}.", "face_adapter.{i}.", _FACE),
        *under("", "", _TOP),
    ),
    names=names("", _NAMES),
)

WAN = Family(
    name="wan",
    denoiser="transformer",
    network=_NETWORK,
    encoders=(
        Encoder("text_encoder", T5, ("te", "te1", "text_encoder", "umt5xxl")),
        # The low-noise expert of Wan 2.2, where a file names it.
        Encoder("transformer_2", _NETWORK, ("transformer_2",)),
    ),
    marks=("wan",),
)
