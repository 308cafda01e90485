"""The text encoders that families share.  Canonical CLIP names are the long ones (`text_model.encoder.layers.0...`)."""

from difflora.formats.rules import Encoder, Network, Rule, names, outline

_LAYER = "encoder.layers.{i}."
_PROJECTIONS = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out.0": "out_proj"}
_CLIP_NAMES = (
    "embeddings.token_embedding",
    "embeddings.position_embedding",
    *(f"{_LAYER}self_attn.{name}" for name in _PROJECTIONS.values()),
    *(f"{_LAYER}{name}" for name in ("mlp.fc1", "mlp.fc2", "layer_norm1", "layer_norm2")),
    "final_layer_norm",
)

CLIP = Network(
    names=(*(f"text_model.{name}" for name in _CLIP_NAMES), "text_projection"),
    rules=(
        # transformers 5 names a CLIPTextModel's modules without `text_model.`.
        *(Rule(name, (f"text_model.{name}",)) for name in _CLIP_NAMES),
        # The first diffusers files name the projections after the UNet's.
        *(
            Rule(f"{root}{_LAYER}self_attn.{old}", (f"text_model.{_LAYER}self_attn.{new}",))
            for root in ("text_model.", "")
            for old, new in _PROJECTIONS.items()
        ),
    ),
)

T5 = Network(
    names=(
        *names("", "shared encoder.embed_tokens encoder.final_layer_norm encoder.block.{i}.layer.{0,1}.layer_norm"),
        *names("encoder.block.{i}.layer.", "0.SelfAttention.{q,k,v,o,relative_attention_bias}"),
        *names("encoder.block.{i}.layer.", "1.DenseReluDense.{wi,wi_0,wi_1,wo}"),
    ),
)
T5_ALONE = (Encoder("text_encoder", T5, ("te", "te1", "text_encoder", "t5xxl", "umt5xxl")),)

_LLAMA_NAMES = (
    *("embed_tokens", "norm"),
    *names("layers.{i}.", "{input,post_attention,pre_feedforward,post_feedforward}_layernorm"),
    *names("layers.{i}.", "self_attn.{q,k,v,o}_proj self_attn.{q,k}_norm mlp.{gate,up,down}_proj"),
)


def llama_like(level: str) -> Network:
    """A Llama, Mistral, Qwen or Gemma whose layers lie at `level`, whichever level a file names them at.

    transformers: "" in LlamaModel, Qwen3Model, Gemma2Model; "model." in their CausalLM; "model.language_model." where
    they see pictures too (Qwen2.5-VL, Qwen3-VL, Gemma3, Mistral3).
    """
    levels = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
    rules = (Rule(f"{root}{name}", (f"{level}{name}",)) for root in levels if root != level for name in _LLAMA_NAMES)
    return Network(rules=(*rules, Rule("lm_head", ("lm_head",))))


def clip_widths(component: str, width: int) -> dict[str, tuple[int | None, int | None]]:
    """The attention sizes of a CLIP of this width."""
    path = f"{component}.text_model.{_LAYER}self_attn."
    return {path + name: (width, width) for name in _PROJECTIONS.values()}


def canonical(component: str, path: str) -> str:
    """The long name of a text encoder's module, whichever the installed transformers uses; other paths as they are."""
    if component.startswith("text_encoder"):
        for network in (CLIP, T5):
            for sections in network.find(*outline(path), flat=False):
                return sections[0]
    return path
