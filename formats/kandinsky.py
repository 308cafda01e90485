"""Kandinsky 5, images and video: the same names everywhere."""

from difflora.formats.rules import Encoder, Family, Network, names
from difflora.formats.text_encoders import CLIP, clip_widths, llama_like

_ATTENTION = "self_attention.{to_query,to_key,to_value,out_layer,query_norm,key_norm}"
_TOP = """
    {time,text,pooled_text,visual}_embeddings.in_layer {text,pooled_text}_embeddings.norm time_embeddings.out_layer
    text_transformer_blocks.{i}.text_modulation.out_layer visual_transformer_blocks.{i}.visual_modulation.out_layer
    out_layer.{modulation.out_layer,out_layer}
"""

KANDINSKY5 = Family(
    name="kandinsky5",
    denoiser="transformer",
    network=Network(
        names=(
            *names("{text,visual}_transformer_blocks.{i}.", _ATTENTION + " feed_forward.{in,out}_layer"),
            *names("visual_transformer_blocks.{i}.", _ATTENTION.replace("self_", "cross_")),
            *names("", _TOP),
        ),
    ),
    encoders=(
        Encoder("text_encoder", llama_like("model.language_model."), ("te", "te1", "text_encoder", "qwen25_7b")),
        Encoder("text_encoder_2", CLIP, ("te2", "text_encoder_2", "clip_l")),
    ),
    widths=clip_widths("text_encoder_2", 768),
    marks=("kandinsky5", "kandinsky-5"),
)
