"""Stable Cascade's prior (stage C)."""

from difflora.formats.rules import Encoder, Family, Network, names, under
from difflora.formats.text_encoders import CLIP, clip_widths

# The original attention keeps q, k and v in one parameter; one trainer names its parts as if they were layers.
_BLOCK = """
    attention.attn.in_proj = attention.to_{q,k,v} : D D D
    attention.attn.{to_q,to_k,to_v,out_proj} = attention.{to_q,to_k,to_v,to_out.0}
    depthwise
    channelwise.{0,4,2.gamma,2.beta}
    {mapper,mapper_sca,mapper_crp,kv_mapper.1}
"""

CASCADE = Family(
    name="cascade",
    denoiser="prior",
    network=Network(
        rules=under("{down,up}_blocks.{i}.{j}.", "{down,up}_blocks.{i}.{j}.", _BLOCK),
        names=(
            *names("", "clip_{txt_pooled,txt,img}_mapper embedding.1 clf.1"),
            *names("", "down_downscalers.{i}.1.blocks.{j} up_upscalers.{i}.1.blocks.{j}"),
        ),
    ),
    encoders=(Encoder("text_encoder", CLIP, ("te", "text_encoder", "clip_g")),),
    widths=clip_widths("text_encoder", 1280),
    marks=("stable-cascade", "stable_cascade"),
)
