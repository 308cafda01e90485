"""FLUX.1.  Canonical names are diffusers' modules; BFL checkpoints fuse some of them."""

from difflora.formats.rules import Encoder, Family, Network, Rule
from difflora.formats.text_encoders import CLIP, T5, clip_widths

_D, _S = "transformer_blocks.{i}.", "single_transformer_blocks.{i}."
_STREAMS = (
    ("img", "to_{}", "to_out.0", "ff", "norm1", ""),
    ("txt", "add_{}_proj", "to_add_out", "ff_context", "norm1_context", "added_"),
)
_EMBEDDERS = {"time_in": "timestep_embedder", "vector_in": "text_embedder", "guidance_in": "guidance_embedder"}

_RULES = (
    *(
        rule
        for stream, qkv, proj, ff, mod, norm in _STREAMS
        for rule in (
            Rule(
                f"double_blocks.{{i}}.{stream}_attn.qkv", tuple(f"{_D}attn.{qkv.format(c)}" for c in "qkv"), ("D",) * 3
            ),
            Rule(f"double_blocks.{{i}}.{stream}_attn.proj", (f"{_D}attn.{proj}",)),
            Rule(f"double_blocks.{{i}}.{stream}_attn.norm.query_norm", (f"{_D}attn.norm_{norm}q",)),
            Rule(f"double_blocks.{{i}}.{stream}_attn.norm.key_norm", (f"{_D}attn.norm_{norm}k",)),
            Rule(f"double_blocks.{{i}}.{stream}_mlp.0", (f"{_D}{ff}.net.0.proj",)),
            Rule(f"double_blocks.{{i}}.{stream}_mlp.2", (f"{_D}{ff}.net.2",)),
            Rule(f"double_blocks.{{i}}.{stream}_mod.lin", (f"{_D}{mod}.linear",)),
        )
    ),
    Rule(
        "single_blocks.{i}.linear1",
        (*(f"{_S}attn.to_{c}" for c in "qkv"), f"{_S}proj_mlp"),
        ("D", "D", "D", "M"),
    ),
    Rule("single_blocks.{i}.linear2", (f"{_S}proj_out",)),
    Rule("single_blocks.{i}.modulation.lin", (f"{_S}norm.linear",)),
    Rule("single_blocks.{i}.norm.query_norm", (f"{_S}attn.norm_q",)),
    Rule("single_blocks.{i}.norm.key_norm", (f"{_S}attn.norm_k",)),
    Rule("img_in", ("x_embedder",)),
    Rule("txt_in", ("context_embedder",)),
    *(
        Rule(f"{native}.{layer}_layer", (f"time_text_embed.{name}.linear_{n}",))
        for native, name in _EMBEDDERS.items()
        for layer, n in (("in", 1), ("out", 2))
    ),
    Rule("final_layer.linear", ("proj_out",)),
    # BFL stores (shift, scale), diffusers (scale, shift).
    Rule("final_layer.adaLN_modulation.1", ("norm_out.linear",), ("D", "D"), perm=(1, 0)),
)

FLUX = Family(
    name="flux",
    denoiser="transformer",
    network=Network(rules=_RULES, names=tuple(section for rule in _RULES for section in rule.sections)),
    encoders=(
        Encoder("text_encoder", CLIP, ("te1", "text_encoder", "clip_l")),
        Encoder("text_encoder_2", T5, ("te", "te1", "te2", "te3", "text_encoder_2", "t5xxl")),
    ),
    widths={
        **{f"transformer.{block}attn.to_{c}": (3072, 3072) for block in (_D, _S) for c in "qkv"},
        **{f"transformer.{_D}attn.add_{c}_proj": (3072, 3072) for c in "qkv"},
        **{f"transformer.{_D}{ff}.net.0.proj": (12288, 3072) for ff in ("ff", "ff_context")},
        f"transformer.{_S}proj_mlp": (12288, 3072),
        **clip_widths("text_encoder", 768),
        "text_encoder_2.encoder.block.{i}.layer.0.SelfAttention.q": (4096, 4096),
    },
    marks=("flux-1", "flux.1", "flux1"),
)
