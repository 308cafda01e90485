"""ACE-Step 1.5: music."""

from difflora.formats.rules import Encoder, Family, Network, names, under
from difflora.formats.text_encoders import llama_like

_LAYER = """
    {self,cross}_attn.{q,k,v,o}_proj = {self,cross}_attn.to_{q,k,v,out.0}
    {self,cross}_attn.{q,k}_norm = {self,cross}_attn.norm_{q,k}
    mlp.{gate,up,down}_proj
    {self_attn,cross_attn,mlp}_norm
    scale_shift_table
"""
_NAMES = """
    scale_shift_table proj_in_conv {time_embed,time_embed_r}.{linear_1,linear_2,time_proj}
    condition_embedder norm_out proj_out_conv
"""

ACE_STEP = Family(
    name="ace_step",
    denoiser="transformer",
    network=Network(rules=under("layers.{i}.", "layers.{i}.", _LAYER), names=names("", _NAMES)),
    encoders=(Encoder("text_encoder", llama_like(""), ("te", "te1", "text_encoder", "qwen3_06b")),),
    marks=("ace-step", "acestep"),
)
