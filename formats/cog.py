"""CogVideoX 1.0 and 1.5, and CogView4.  Their adapters have diffusers' names."""

from difflora.formats.rules import Encoder, Family, Network, names
from difflora.formats.text_encoders import T5_ALONE, llama_like

_NAMES = """
    patch_embed.{proj,text_proj} norm_out.linear proj_out transformer_blocks.{i}.norm1.linear
    transformer_blocks.{i}.attn1.to_{q,k,v,out.0} transformer_blocks.{i}.ff.net.{0.proj,2}
"""
_VIDEO = """
    {time,ofs}_embedding.linear_{1,2} norm_final norm_out.norm
    transformer_blocks.{i}.norm{1,2}.{linear,norm} transformer_blocks.{i}.attn1.norm_{q,k}
"""
_VIEW = "time_condition_embed.{timestep,condition}_embedder.linear_{1,2}"
_WIDE = names("transformer.transformer_blocks.{i}.", "attn1.to_{q,k,v,out.0}")
_FEED = "transformer.transformer_blocks.{i}.ff.net.0.proj"

COGVIDEOX = Family(
    name="cogvideox",
    denoiser="transformer",
    network=Network(names=names("", _NAMES + _VIDEO)),
    encoders=T5_ALONE,
    widths=dict.fromkeys(_WIDE, ((1920, 3072), (1920, 3072))) | {_FEED: ((7680, 12288), (1920, 3072))},
    marks=("cogvideo",),
)
COGVIEW4 = Family(
    name="cogview4",
    denoiser="transformer",
    network=Network(names=names("", _NAMES + _VIEW)),
    encoders=(Encoder("text_encoder", llama_like(""), ("te", "te1", "text_encoder")),),
    widths=dict.fromkeys(_WIDE, (4096, 4096)),
    marks=("cogview4",),
)
