"""Train the adapters, each attached and saved by the library that writes its layout."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxPipeline
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model

from difflora.demo.loop import Loop, Variant, optimise
from difflora.demo.shapes import BASE_SHAPES

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
FEED_FORWARD = (
    "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp", "proj_out",
)  # fmt: skip
MODULATION = ("norm1.linear", "norm1_context.linear", "norm.linear")
CLIP_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
STORED = torch.float16


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained: its size, its layout, and the drawings it learns from."""

    layout: str
    rank: int
    alpha: int
    targets: tuple[str, ...]
    style: str = "plain"
    shapes: tuple[str, ...] = BASE_SHAPES
    clip: bool = False  # whether the CLIP text encoder learns too


RECIPES: dict[str, Recipe] = {
    "fast": Recipe("diffusers", 16, 32, ATTENTION + FEED_FORWARD + MODULATION),
    "outline": Recipe("peft", 4, 8, ATTENTION + FEED_FORWARD, style="outline"),
    "night": Recipe("diffusers", 4, 6, ATTENTION + FEED_FORWARD, style="night"),
    "heart": Recipe("diffusers", 4, 8, ATTENTION + FEED_FORWARD, shapes=(*BASE_SHAPES, *["heart"] * 6), clip=True),
    "stripes": Recipe("lycoris", 6, 12, ATTENTION + FEED_FORWARD, style="stripes"),
}
# The prefix of kohya's keys for the denoiser, which LyCORIS takes as a setting of the class.
KOHYA_PREFIX = "lora_unet"


@dataclass(frozen=True)
class Attached:
    """An adapter in place: the weights to train, and how to save them to a file or folder."""

    weights: list[torch.nn.Parameter]
    save: Callable[[Path], None]


def attach(pipe: Any, recipe: Recipe) -> Attached:
    """Freeze the pipeline and put an untrained adapter on it."""
    for part in (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2, pipe.vae):
        part.requires_grad_(False)
    return ATTACH[recipe.layout](pipe, recipe)


def train_adapter(pipe: Any, recipe: Recipe, loop: Loop, variants: Sequence[Variant], path: Path) -> None:
    """Train an adapter on the variants' losses and save it at `path`."""
    attached = attach(pipe, recipe)
    optimise(path.stem, loop, attached.weights, variants)
    path.parent.mkdir(parents=True, exist_ok=True)
    attached.save(path)


def _config(recipe: Recipe, targets: tuple[str, ...]) -> LoraConfig:
    return LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, target_modules=list(targets), init_lora_weights=True)


def _trained(module: Any) -> list[torch.nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def _attach_peft(pipe: Any, recipe: Recipe) -> Attached:
    wrapped = get_peft_model(pipe.transformer, _config(recipe, recipe.targets))

    def save(path: Path) -> None:
        for weight in _trained(wrapped):
            weight.data = weight.data.to(STORED)
        wrapped.save_pretrained(str(path))
        (path / "README.md").unlink(missing_ok=True)  # PEFT's empty model card

    return Attached(_trained(wrapped), save)


def _attach_diffusers(pipe: Any, recipe: Recipe) -> Attached:
    parts = {"transformer": (pipe.transformer, recipe.targets)}
    if recipe.clip:
        parts["text_encoder"] = (pipe.text_encoder, CLIP_ATTENTION)
    for module, targets in parts.values():
        inject_adapter_in_model(_config(recipe, targets), module)

    def save(path: Path) -> None:
        arguments: dict[str, Any] = {}
        for name, (module, _) in parts.items():
            layers = get_peft_model_state_dict(module, adapter_name="default")
            arguments[f"{name}_lora_layers"] = {key: value.to(STORED).cpu() for key, value in layers.items()}
            arguments[f"{name}_lora_adapter_metadata"] = module.peft_config["default"].to_dict()
        FluxPipeline.save_lora_weights(str(path.parent), weight_name=path.name, **arguments)

    return Attached([weight for module, _ in parts.values() for weight in _trained(module)], save)


def _attach_lycoris(pipe: Any, recipe: Recipe) -> Attached:
    network_class = kohya_network()
    names = "|".join(re.escape(target) for target in recipe.targets)
    network_class.apply_preset({"target_module": [], "target_name": [rf"(.*\.)?({names})$"], "enable_conv": False})
    network = network_class(
        pipe.transformer, lora_dim=recipe.rank, alpha=recipe.alpha, network_module="locon", warn_on_unmatched=False
    )
    network.apply_to()
    network.to(pipe.transformer.device).requires_grad_(True)

    def save(path: Path) -> None:
        network.save_weights(str(path), STORED, {"ss_network_module": "lycoris.kohya"})

    return Attached(_trained(network), save)


def kohya_network() -> Any:
    """LyCORIS' network class, set to read and write kohya-style keys."""
    from lycoris import LycorisNetwork

    LycorisNetwork.apply_preset({"lora_prefix": KOHYA_PREFIX})
    return LycorisNetwork


ATTACH: dict[str, Callable[[Any, Recipe], Attached]] = {
    "peft": _attach_peft,
    "diffusers": _attach_diffusers,
    "lycoris": _attach_lycoris,
}
