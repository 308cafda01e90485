"""What is recognised and not read, with the reason.  A new capability takes a row out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """A kind of file that is recognised and not read, why, and how its keys end or begin."""

    kind: str
    reason: str
    tails: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


_FACTORS = tuple(f"lora_{role}{end}" for role in ("down", "up") for end in ("", ".weight"))
_NUNCHAKU = (f"mlp_{stream}fc{n}.{factor}" for stream in ("", "context_") for n in (1, 2) for factor in _FACTORS)
REFUSALS = (
    Refusal(
        "PEFT IA3, BOFT or GLoRA",
        "PEFT's own spelling of a kind that no image trainer writes",
        ("ia3_l", "boft_R", "boft_s", *(f"glora_{part}" for part in "ABCDE")),
    ),
    Refusal("VeRA", "its factors are random numbers that are not in the file", ("vera_lambda_b", "vera_lambda_d")),
    Refusal("old OFT", "`oft_diag` of LyCORIS 1.x, whose scale is not in the file", ("oft_diag",)),
    Refusal(
        "sparse biases", "indices and values, as LyCORIS 1.x had them", ("bias_indices", "bias_values", "bias_size")
    ),
    Refusal(
        "output embedding",
        "vectors that replace what the text encoder returns; train the token's input vectors instead",
        ("clip_l_out", "clip_g_out", "t5_out", "llama_out"),
    ),
    Refusal("nameless embedding", "textual-inversion vectors without the word that they stand for", ("emb_params",)),
    Refusal("ControlNet LoRA", "a ControlNet, not an adapter of the base model", ("lora_controlnet",)),
    Refusal(
        "HCP-Diffusion",
        "a layout of its own; convert it with LyCORIS' tools/batch_hcp_convert.py",
        (*(f"___.layer.{w}" for w in ("lora_down.weight", "lora_up.weight", "W_down", "W_up")), "___.alpha"),
    ),
    Refusal(
        "cloneofsimo",
        "factors numbered by the position of modules in a model class that no longer exists",
        heads=("unet:", "text_encoder:"),
    ),
    Refusal("nunchaku", "factors packed for one kernel; use the file that it was made from", tuple(_NUNCHAKU)),
)
REFUSED_TAILS = {tail: refusal for refusal in REFUSALS for tail in refusal.tails}
REFUSED_HEADS = {head: refusal for refusal in REFUSALS for head in refusal.heads}
