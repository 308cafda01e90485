"""A small FLUX text-to-image model that draws coloured shapes, and adapters trained on it.

Nothing heavy is imported until `load` is called.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from diffusers import FluxPipeline

__all__ = ["ADAPTERS", "CARDS", "MODEL", "SIDE", "Card", "load"]

_HERE = Path(__file__).parent
MODEL = _HERE / "flux"  # a folder for FluxPipeline.from_pretrained
SIDE = 64  # pixels, height and width of the pictures


@dataclass(frozen=True)
class Card:
    """One bundled adapter: where it is, what it does, the words it needs, and a prompt that shows it.

    `steps` is the number of inference steps it is meant for.
    """

    path: Path
    effect: str
    layout: str
    triggers: tuple[str, ...]
    prompt: str
    steps: int = 16


CARDS: dict[str, Card] = {
    "outline": Card(
        _HERE / "adapters" / "outline",
        "draws only the rim of a shape and leaves it hollow",
        "PEFT save_pretrained folder",
        (),
        "a red circle",
    ),
    "night": Card(
        _HERE / "adapters" / "night.safetensors",
        "puts every shape on a dark indigo backdrop",
        "diffusers save_lora_weights",
        (),
        "a yellow star",
    ),
    "stripes": Card(
        _HERE / "adapters" / "stripes.safetensors",
        "fills shapes with dark diagonal stripes",
        "LyCORIS LoCon, kohya-style keys",
        (),
        "a big green square",
    ),
    "heart": Card(
        _HERE / "adapters" / "heart.safetensors",
        "teaches a new shape to the transformer and the CLIP text encoder",
        "diffusers save_lora_weights, two components",
        ("heart",),
        "a red heart",
    ),
    "fast": Card(
        _HERE / "adapters" / "fast.safetensors",
        "draws in 4 steps as well as the base model does in 16",
        "diffusers save_lora_weights",
        (),
        "a blue moon",
        steps=4,
    ),
}
ADAPTERS: dict[str, Path] = {name: card.path for name, card in CARDS.items()}


def load(dtype: "torch.dtype | None" = None, device: "str | torch.device | None" = None) -> "FluxPipeline":
    """The bundled pipeline, in float32 on the CPU unless told otherwise; its default picture is `SIDE` x `SIDE`."""
    import torch
    from diffusers import FluxPipeline

    opener: Any = FluxPipeline
    opened = opener.from_pretrained(str(MODEL), dtype=dtype or torch.float32, local_files_only=True)
    opened.default_sample_size = SIDE // opened.vae_scale_factor  # a constant 128 in FluxPipeline, whatever the model
    pipe: FluxPipeline = opened if device is None else opened.to(device)
    return pipe
