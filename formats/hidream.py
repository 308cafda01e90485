"""HiDream-I1, E1: four text encoders, experts as plain layers, the same names everywhere."""

from difflora.formats.rules import Encoder, Family, Network, names
from difflora.formats.text_encoders import CLIP, T5, clip_widths, llama_like

HIDREAM = Family(
    name="hidream",
    denoiser="transformer",
    network=Network(
        names=(
            *names("{double,single}_stream_blocks.{i}.block.", "adaLN_modulation.1 attn1.{q,k}_rms_norm ff_i.gate"),
            *names("{double,single}_stream_blocks.{i}.block.", "attn1.to_{q,k,v,out} ff_i.shared_experts.w{1,2,3}"),
            *names("{double,single}_stream_blocks.{i}.block.", "ff_i.experts.{j}.w{1,2,3}"),
            *names("double_stream_blocks.{i}.block.", "attn1.to_{q,k,v,out}_t attn1.{q,k}_rms_norm_t ff_t.w{1,2,3}"),
            *names("", "t_embedder.timestep_embedder.linear_{1,2} p_embedder.pooled_embedder.linear_{1,2}"),
            *names("", "x_embedder.proj final_layer.{linear,adaLN_modulation.1} caption_projection.{i}.linear"),
        ),
    ),
    encoders=(
        Encoder("text_encoder", CLIP, ("te1", "text_encoder", "clip_l")),
        Encoder("text_encoder_2", CLIP, ("te2", "text_encoder_2", "clip_g")),
        Encoder("text_encoder_3", T5, ("te3", "text_encoder_3", "t5xxl")),
        Encoder("text_encoder_4", llama_like("model."), ("te4", "text_encoder_4", "llama")),
    ),
    widths=clip_widths("text_encoder", 768) | clip_widths("text_encoder_2", 1280),
    marks=("hidream",),
)
