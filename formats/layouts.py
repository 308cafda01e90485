"""How files spell a module's place, its tensors and their containers.  Nothing here knows a model family."""

from dataclasses import dataclass

DENOISER = "denoiser"


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a key begins with: the place that it means (a component, a text encoder, or the denoiser), and the layout.

    A flat prefix is followed by a module path whose dots became underscores.
    """

    text: str
    place: str
    layout: str
    flat: bool = False


COMPONENTS = (
    *("transformer", "transformer_2", "transformer_ref", "unet", "prior", "connectors", "text_conditioner"),
    *("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4"),
)
_FLAT = {
    "lora_unet_": (DENOISER, "kohya"),
    "lora_transformer_": (DENOISER, "kohya"),
    "lora_prior_unet_": (DENOISER, "kohya"),
    "lora_prior_te_": ("te", "kohya"),
    "lycoris_": (DENOISER, "lycoris"),
    **{f"lora_te{n}_": (f"te{n}", "kohya") for n in ("", 1, 2, 3, 4)},
}
_WRAPPERS = ("base_model.model.", "peft_model.base_model.model.")
# What ComfyUI calls text encoders.
ENCODERS = (
    *("clip_l", "clip_g", "clip_h", "t5xxl", "umt5xxl", "byt5_small", "llama", "bert", "qwen25_7b", "qwen3_06b"),
    *("qwen3_4b", "qwen3_8b", "gemma2_2b", "gemma3_12b", "mistral3_24b"),
)
_PREFIXES = (
    Prefix("", DENOISER, "bare"),
    Prefix("net.", DENOISER, "bare"),
    Prefix("diffusion_model.", DENOISER, "comfy"),
    Prefix("model.diffusion_model.", DENOISER, "comfy"),
    Prefix("conditional_transformer.", DENOISER, "comfy"),
    *(Prefix(f"text_encoders.{n}.transformer.", n, "comfy") for n in ENCODERS),
    *(Prefix(wrapper, DENOISER, "peft") for wrapper in _WRAPPERS),
    # A doubled underscore is one trainer's habit, `_orig_mod` torch.compile's.
    *(
        Prefix(text + more, place, layout, flat=True)
        for text, (place, layout) in _FLAT.items()
        for more in ("", "_", "_orig_mod_")
    ),
)


def prefixes(components: tuple[str, ...] = ()) -> tuple[Prefix, ...]:
    """Every prefix, longest first; `components` are further component names that a key may begin with."""
    explicit = (
        prefix
        for name in dict.fromkeys((*COMPONENTS, *components))
        for prefix in (
            Prefix(f"{name}.", name, "diffusers"),
            *(Prefix(f"{name}.{wrapper}", name, "peft") for wrapper in _WRAPPERS),
            *(Prefix(f"{wrapper}{name}.", name, "peft") for wrapper in _WRAPPERS),
        )
    )
    return tuple(sorted((*_PREFIXES, *explicit), key=lambda prefix: -len(prefix.text)))


@dataclass(frozen=True, slots=True)
class Leaf:
    """What the end of a key means: a tensor of this kind (empty: of whichever kind the module has) in this role.

    `module` is the last name of the module path where that is part of the ending.  `bias` says that the tensor acts on
    the module's bias and not on its weight.
    """

    kind: str
    role: str
    module: str = ""
    bias: bool = False


# diffusers' first files hang the factors on the attention processor: `attn1.processor.to_q_lora.down.weight`.
_PROCESSOR = {
    "to_out": "to_out.0",
    **{name: name for name in ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj")},
}
# The endings of pairs; `partner` finds the other one.
_PAIRS = (
    ("lora", "lora_down.weight", "lora_up.weight", ""),
    ("lora", "lora_A.weight", "lora_B.weight", ""),
    ("lora", "lora_A", "lora_B", ""),
    ("lora", "lora.down.weight", "lora.up.weight", ""),
    ("lora", "lora_linear_layer.down.weight", "lora_linear_layer.up.weight", ""),
    ("lora", "down.weight", "up.weight", ""),
    *(("lora", f"{n}_lora.down.weight", f"{n}_lora.up.weight", module) for n, module in _PROCESSOR.items()),
    ("lora_embedding", "lora_embedding_A", "lora_embedding_B", ""),
)
PARTNERS = {one: two for _, down, up, _ in _PAIRS for one, two in ((down, up), (up, down))}
LEAVES = {
    **{down: Leaf(kind, "down", module) for kind, down, _, module in _PAIRS},
    **{up: Leaf(kind, "up", module) for kind, _, up, module in _PAIRS},
    "lora_mid.weight": Leaf("lora", "mid"),
    "lora_B.bias": Leaf("lora_bias", "diff", bias=True),
    "lora_up.bias": Leaf("lora_bias", "diff", bias=True),
    "alpha": Leaf("", "alpha"),
    "lora_alpha": Leaf("", "alpha"),
    "dora_scale": Leaf("", "dora_scale"),
    "lora_magnitude_vector.weight": Leaf("", "magnitude"),
    "lora_magnitude_vector": Leaf("", "magnitude"),
    "magnitude": Leaf("", "magnitude"),
    **{f"hada_{role}": Leaf("loha", role) for role in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
    **{f"lokr_{role}": Leaf("lokr", role) for role in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
    **{f"{role}.weight": Leaf("glora", role) for role in ("a1", "a2", "b1", "b2", "bm")},
    "on_input": Leaf("ia3", "on_input"),
    "weight": Leaf("ia3", "weight"),
    "diff": Leaf("diff", "diff"),
    "diff_b": Leaf("diff", "diff", bias=True),
    "diff_m": Leaf("diff", "diff", module="modulation"),
    "w_norm": Leaf("diff", "diff"),
    "b_norm": Leaf("diff", "diff", bias=True),
    "set_weight": Leaf("set", "value"),
    "query_norm.scale": Leaf("set", "value", module="query_norm"),
    "key_norm.scale": Leaf("set", "value", module="key_norm"),
    "oft_blocks": Leaf("oft", "blocks"),
    "rescale": Leaf("oft", "rescale"),
    "oft_R.weight": Leaf("oft_v2", "r"),
    "oft_R": Leaf("oft_v2", "r"),
    "oft_R.scaled_oft": Leaf("oft_v2", "scaled"),
}
# An ending that is too common to mean anything without the one that goes with it.
ONLY_BESIDE = {"weight": "on_input"}

# PEFT writes the adapter's name after these when somebody saves a model's whole state dict.
SLOTTED = frozenset(("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "oft_R"))

# Segments of a dotted path that wrappers add to it: torch.compile, and PEFT around a layer.
WRAPPED = frozenset(("_orig_mod", "base_layer"))

IGNORED = {
    "lora_rank": "the ranks that the file writes down (they are read from the tensors)",
    "reshape_weight": "the shape that a widened weight takes (it is read from the factors)",
}
IGNORED_HEADS = {"_aux.": "the training tool's own tensors"}
EMPTY = "empty placeholders"

# Textual-inversion vectors in the file: `bundle_emb.NAME.ENDING`, and the place of the encoder that they are for.
EMBEDDING = "bundle_emb."
EMBEDDINGS = {
    "string_to_param.*": "te",
    "emb_params": "te",
    "clip_l": "clip_l",
    "clip_g": "clip_g",
    "t5": "t5xxl",
    "llama": "llama",
}
