"""What is recognised and not read, with the reason.  A new capability takes a row out."""

from dataclasses import dataclass

from difflora.formats.rules import Table


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
