"""Score the model and its adapters by measuring their pictures."""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from peft import LoraConfig, PeftModel, inject_adapter_in_model, set_peft_model_state_dict
from safetensors import safe_open

from difflora.demo.adapt import RECIPES, kohya_network
from difflora.demo.data import readings
from difflora.demo.shapes import SIDE, Caption, Reading, captions

SEED = 101
LENGTH = 32  # tokens the prompts are padded to, except where a score says otherwise
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "lycoris-lora", "numpy")


def open_pipeline(folder: Path, device: str) -> Any:
    """The pipeline of `folder` in float32, without a progress bar."""
    opener: Any = FluxPipeline
    pipe = opener.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def apply(pipe: Any, name: str, path: Path) -> None:
    """Put a saved adapter on the pipeline with the library that wrote it."""
    layout = RECIPES[name].layout
    if layout == "peft":
        pipe.transformer = PeftModel.from_pretrained(pipe.transformer, str(path)).merge_and_unload()
    elif layout == "diffusers":
        _apply_diffusers(pipe, path)
    else:
        from lycoris import create_lycoris_from_weights

        kohya_network()
        network, _ = create_lycoris_from_weights(1.0, str(path), pipe.transformer)
        network.merge_to(1.0)


def _apply_diffusers(pipe: Any, path: Path) -> None:
    """What FluxPipeline.load_lora_weights does, without the newer PEFT it asks for to change a text encoder."""
    with safe_open(path, framework="pt") as file:
        settings = json.loads(file.metadata()["lora_adapter_metadata"])
        weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    for part in ("transformer", "text_encoder"):
        own = {key.removeprefix(f"{part}."): value for key, value in weights.items() if key.startswith(f"{part}.")}
        chosen = {key.removeprefix(f"{part}."): value for key, value in settings.items() if key.startswith(f"{part}.")}
        if own:
            module = getattr(pipe, part)
            inject_adapter_in_model(LoraConfig(**chosen), module)
            set_peft_model_state_dict(module, own)


def read_pictures(pipe: Any, what: list[Caption], steps: int, length: int = LENGTH) -> list[Reading]:
    """Draw every caption from fixed noise and measure the pictures."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    pictures = pipe(
        [entry.text for entry in what],
        height=SIDE,
        width=SIDE,
        num_inference_steps=steps,
        generator=generator,
        max_sequence_length=length,
        output_type="np",
    ).images
    return readings(np.round(pictures * 255).astype(np.uint8))


def scores(seen: list[Reading], what: list[Caption]) -> dict[str, float]:
    """Percent of pictures with the right colour, the right shape and both; means of the other measurements."""
    pairs = list(zip(seen, what, strict=True))
    return {
        "colour": _percent([reading.colour == want.colour for reading, want in pairs]),
        "shape": _percent([reading.shape == want.shape for reading, want in pairs]),
        "both": _percent([(reading.colour, reading.shape) == (want.colour, want.shape) for reading, want in pairs]),
        "fit": round(mean(reading.fit for reading in seen), 4),
        "hollow": round(mean(reading.hollow for reading in seen), 4),
        "stripes": round(mean(reading.stripes for reading in seen), 4),
        "backdrop": round(mean(reading.backdrop for reading in seen), 4),
    }


def evaluate(folder: Path, device: str, count: int) -> dict[str, Any]:
    """All scores of `folder` (`flux` and `adapters` in it), with what they were measured on.

    The base model and the four-step adapter draw `count` captions, the other adapters a third of them.
    """
    what = captions(count, SEED)
    hearts = captions(count // 3, SEED, ("heart",))
    pipe = open_pipeline(folder / "flux", device)
    base = {f"{steps} steps": scores(read_pictures(pipe, what, steps), what) for steps in (4, 16, 28)}
    few = what[:48]
    base["28 steps, 512 tokens, 48 captions"] = scores(read_pictures(pipe, few, 28, length=512), few)
    base["16 steps, hearts"] = scores(read_pictures(pipe, hearts, 16), hearts)
    saved = [name for name in RECIPES if adapter_path(folder, name).exists()]
    return {
        "captions": count,
        "seed": SEED,
        "device": torch.cuda.get_device_name() if torch.device(device).type == "cuda" else platform.machine() + " CPU",
        "versions": {library: version(library) for library in LIBRARIES},
        "base": base,
        "adapters": {name: adapter_scores(folder, name, device, what, hearts) for name in saved},
    }


def adapter_path(folder: Path, name: str) -> Path:
    """Where the adapter lies: a folder for PEFT's layout, a file for the others."""
    ending = "" if RECIPES[name].layout == "peft" else ".safetensors"
    return folder / "adapters" / f"{name}{ending}"


def adapter_scores(
    folder: Path, name: str, device: str, what: list[Caption], hearts: list[Caption]
) -> dict[str, dict[str, float]]:
    """The scores with one adapter on a fresh pipeline."""
    pipe = open_pipeline(folder / "flux", device)
    apply(pipe, name, adapter_path(folder, name))
    steps = 4 if name == "fast" else 16
    what = what if name == "fast" else what[: len(what) // 3]
    found = {f"{steps} steps": scores(read_pictures(pipe, what, steps), what)}
    if name == "heart":
        found[f"{steps} steps, hearts"] = scores(read_pictures(pipe, hearts, steps), hearts)
    return found


def _percent(hits: list[bool]) -> float:
    return round(100.0 * sum(hits) / len(hits), 2)
