"""LTX-Video 0.9.x, and LTX-2 and 2.3, which have sound and connectors from the text encoder."""

from difflora.formats.layouts import DENOISER
from difflora.formats.rules import Encoder, Family, Network, names, under
from difflora.formats.text_encoders import T5_ALONE, llama_like

_TOP = """
    {,audio_}patchify_proj = {,audio_}proj_in
    {,audio_}{proj_out,scale_shift_table,caption_projection.linear_1,caption_projection.linear_2}
"""
_BLOCK = """
    {,audio_}attn{1,2}.{q,k}_norm = {,audio_}attn{1,2}.norm_{q,k}
    {,audio_}attn{1,2}.to_{q,k,v,out.0}
    {,audio_}ff.net.{0.proj,2}
    {,audio_}scale_shift_table
"""
_ACROSS = """
    {audio_to_video,video_to_audio}_attn.{q,k}_norm = {audio_to_video,video_to_audio}_attn.norm_{q,k}
    {audio_to_video,video_to_audio}_attn.to_{q,k,v,out.0,gate_logits}
    {,audio_}attn{1,2}.to_gate_logits
    {,audio_}prompt_scale_shift_table
    scale_shift_table_a2v_ca_{video,audio} = {video,audio}_a2v_cross_attn_scale_shift_table
"""
_B = "transformer_blocks.{i}."
_MODULATION = "linear\n emb.timestep_embedder.linear_{1,2}"
_ATTENTION = "attn1.{q,k}_norm = attn1.norm_{q,k}\n attn1.to_{q,k,v,out.0,gate_logits}\n ff.net.{0.proj,2}"
_SHIFT = "av_cross_attn_{video,audio}_scale_shift."
_CONNECTORS = Network(
    rules=(
        *under("text_embedding_projection.", "", "{,video_,audio_}aggregate_embed = {,video_,audio_}text_proj_in"),
        *under(
            "{video,audio}_embeddings_connector.transformer_1d_blocks.{i}.", "{video,audio}_connector." + _B, _ATTENTION
        ),
        *under("{video,audio}_embeddings_connector.", "{video,audio}_connector.", "learnable_registers"),
    ),
)
_WIDE = names(f"transformer.{_B}", "attn{1,2}.to_{q,k,v,out.0}")
_CAPTION = "transformer.caption_projection.linear_1"

LTX = Family(
    name="ltx",
    denoiser="transformer",
    network=Network(
        rules=(
            *under("", "", _TOP.replace("{,audio_}", "")),
            *under(_B, _B, _BLOCK.replace("{,audio_}", "")),
            *under("adaln_single.", "time_embed.", _MODULATION),
        ),
    ),
    encoders=T5_ALONE,
    widths=dict.fromkeys(_WIDE, ((2048, 4096), (2048, 4096))) | {_CAPTION: (None, 4096)},
    marks=("ltx-video", "ltxv"),
)
LTX2 = Family(
    name="ltx2",
    denoiser="transformer",
    network=Network(
        rules=(
            *under("", "", f"{_TOP}\n keyframes_abs_pos_embedding"),
            *under(_B, _B, f"{_BLOCK}\n{_ACROSS}"),
            *under("{,audio_}{,prompt_}adaln_single.", "{,audio_}{time_embed,prompt_adaln}.", _MODULATION),
            *under("av_ca_{a2v,v2a}_gate_adaln_single.", "av_cross_attn_{video_a2v,audio_v2a}_gate.", _MODULATION),
            *under("av_ca_{video,audio}_scale_shift_adaln_single.", _SHIFT, _MODULATION),
        ),
    ),
    encoders=(
        Encoder("text_encoder", llama_like("model.language_model."), ("te", "te1", "text_encoder", "gemma3_12b")),
        # The files give the connectors no prefix of their own.
        Encoder("connectors", _CONNECTORS, ("connectors", DENOISER)),
    ),
    widths=dict.fromkeys(_WIDE, (4096, 4096)) | {_CAPTION: (None, 3840)},
    marks=("ltx-2", "ltx2"),
)
