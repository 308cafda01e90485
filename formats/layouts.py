"""How files spell a module's place, its tensors and their containers.  Nothing here knows a model family."""

from dataclasses import dataclass

from difflora.formats.rules import Table

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


@dataclass(frozen=True, slots=True)
class Refusal:
    """A kind of file that is recognised and not read, why, and how it is recognised: ends, starts, module patterns."""

    kind: str
    reason: str
    tails: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


_NOT_YET = "this version applies plain LoRA, LoCon and DyLoRA only"

REFUSALS = (
    Refusal(
        "LoHa",
        f"a Hadamard product of two low-rank pairs; {_NOT_YET}",
        tails=(*(f"hada_w{n}_{c}" for n in (1, 2) for c in "ab"), "hada_t1", "hada_t2"),
    ),
    Refusal(
        "LoKr",
        f"a Kronecker product; {_NOT_YET}",
        tails=tuple(f"lokr_{w}{n}{c}" for w, c in (("w", ""), ("w", "_a"), ("w", "_b"), ("t", "")) for n in (1, 2)),
    ),
    Refusal(
        "OFT/BOFT",
        f"a rotation of the base weight; {_NOT_YET}",
        tails=("oft_blocks", "oft_diag", "rescale", "oft_R.weight", "oft_R.scaled_oft", "oft_R", "boft_R", "boft_s"),
    ),
    Refusal(
        "DoRA",
        f"a magnitude that renormalises base weight and delta, so the factors alone are wrong; {_NOT_YET}",
        tails=("dora_scale", "lora_magnitude_vector.weight", "lora_magnitude_vector", "magnitude"),
    ),
    Refusal(
        "GLoRA",
        f"a function of the base weight; {_NOT_YET}",
        tails=("a1.weight", "a2.weight", "b1.weight", "b2.weight", "bm.weight"),
    ),
    Refusal("IA3", f"a rescaling of the base weight; {_NOT_YET}", tails=("on_input",)),
    Refusal("VeRA", f"factors that the file does not hold; {_NOT_YET}", tails=("vera_lambda_b", "vera_lambda_d")),
    Refusal(
        "full-weight difference",
        f"differences of whole weights or biases; {_NOT_YET}",
        tails=("diff", "diff_b", "diff_m", "bias_indices", "bias_values", "bias_size"),
    ),
    Refusal("norm difference", f"differences of normalisation layers; {_NOT_YET}", tails=("w_norm", "b_norm")),
    Refusal(
        "replaced weights",
        f"values that replace the model's own instead of adding to them; {_NOT_YET}",
        tails=("set_weight", "reshape_weight", "query_norm.scale", "key_norm.scale"),
    ),
    Refusal("LoRA bias", f"biases beside the factors; {_NOT_YET}", tails=("lora_B.bias", "lora_up.bias")),
    Refusal(
        "bundled embedding",
        "textual-inversion vectors inside a LoRA file; save them as a file of their own",
        tails=("emb_params",),
        heads=("bundle_emb.",),
    ),
    Refusal("ControlNet LoRA", "a ControlNet, not an adapter of the base model", tails=("lora_controlnet",)),
    Refusal(
        "HCP-Diffusion",
        "a layout of its own; convert it with LyCORIS' tools/batch_hcp_convert.py",
        tails=(*(f"___.layer.{w}" for w in ("lora_down.weight", "lora_up.weight", "W_down", "W_up")), "___.alpha"),
    ),
    Refusal(
        "cloneofsimo",
        "factors numbered by the position of modules in a model class that no longer exists",
        heads=("unet:", "text_encoder:"),
    ),
    Refusal(
        "nunchaku",
        "factors packed for one kernel; use the file that it was made from",
        tails=tuple(
            f"mlp_{c}fc{n}.lora_{role}{w}"
            for c in ("", "context_")
            for n in (1, 2)
            for role in ("down", "up")
            for w in ("", ".weight")
        ),
    ),
    Refusal(
        "XLabs",
        "XLabs' FLUX processor layout, which this version does not read",
        tails=tuple(
            f"{name}_lora{n}.{role}.weight" for name in ("qkv", "proj") for n in ("", 1, 2) for role in ("down", "up")
        ),
    ),
    Refusal(
        "OneTrainer BFL",
        "fused projections split by number, which this version does not read",
        paths=(*(f"double_blocks.{{i}}.{s}_attn.qkv.{{j}}" for s in ("img", "txt")), "single_blocks.{i}.linear1.{j}"),
    ),
)
REFUSED_TAILS = {tail: refusal for refusal in REFUSALS for tail in refusal.tails}
REFUSED_HEADS = {head: refusal for refusal in REFUSALS for head in refusal.heads}
REFUSED_PATHS = Table(
    (spelling, refusal) for refusal in REFUSALS for path in refusal.paths for spelling in (path, path.replace(".", "_"))
)
