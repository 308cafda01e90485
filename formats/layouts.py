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
    *("transformer", "transformer_2", "unet", "prior", "connectors", "text_conditioner"),
    *("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4"),
)
_FLAT = {
    "lora_unet_": (DENOISER, "kohya"),
    "lora_transformer_": (DENOISER, "kohya"),
    "lycoris_": (DENOISER, "lycoris"),
    **{f"lora_te{n}_": (f"te{n}", "kohya") for n in ("", 1, 2, 3, 4)},
}
_WRAPPERS = ("base_model.model.", "peft_model.base_model.model.")
_PREFIXES = (
    Prefix("", DENOISER, "bare"),
    Prefix("diffusion_model.", DENOISER, "comfy"),
    Prefix("model.diffusion_model.", DENOISER, "comfy"),
    *(Prefix(f"text_encoders.{n}.transformer.", n, "comfy") for n in ("clip_l", "clip_g", "clip_h", "t5xxl")),
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
    """What the end of a key means.

    `module` is the last name of the module path where that is part of the ending; `partner` is the ending of the other
    factor, empty for a tensor that has none.
    """

    kind: str
    role: str
    module: str = ""
    partner: str = ""


# diffusers' first files hang the factors on the attention processor: `attn1.processor.to_q_lora.down.weight`.
_PROCESSOR = {
    "to_out": "to_out.0",
    **{name: name for name in ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj")},
}
_PAIRS = (
    ("lora", "lora_down.weight", "lora_up.weight", ""),
    ("lora", "lora_A.weight", "lora_B.weight", ""),
    ("lora", "lora_A", "lora_B", ""),
    ("lora", "lora.down.weight", "lora.up.weight", ""),
    ("lora", "lora_linear_layer.down.weight", "lora_linear_layer.up.weight", ""),
    *(("lora", f"{n}_lora.down.weight", f"{n}_lora.up.weight", module) for n, module in _PROCESSOR.items()),
    ("lora_embedding", "lora_embedding_A", "lora_embedding_B", ""),
)
LEAVES = {
    **{down: Leaf(kind, "down", module, up) for kind, down, up, module in _PAIRS},
    **{up: Leaf(kind, "up", module, down) for kind, down, up, module in _PAIRS},
    "lora_mid.weight": Leaf("lora", "mid"),
    "alpha": Leaf("", "alpha"),
    "lora_alpha": Leaf("", "alpha"),
}

# PEFT writes the adapter's name after these when somebody saves a model's whole state dict.
SLOTTED = frozenset(("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "oft_R"))

# Segments of a dotted path that wrappers add to it: torch.compile, and PEFT around a layer.
WRAPPED = frozenset(("_orig_mod", "base_layer"))

IGNORED = {"lora_rank": "the ranks that the file writes down (they are read from the tensors)"}
IGNORED_HEADS = {"_aux.": "the training tool's own tensors"}
