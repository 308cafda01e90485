"""A reference for the tests: read the three layouts by hand and add `alpha / rank * up @ down` to the weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

Deltas = dict[tuple[str, str], torch.Tensor]  # (component, module) -> the change of its weight


def deltas(path: Path, transformer: Any) -> Deltas:
    """The changes that an adapter stands for; `transformer` gives kohya's flattened names their dots back."""
    if path.is_dir():
        settings = json.loads((path / "adapter_config.json").read_text())
        tensors, _ = _read(path / "adapter_model.safetensors")
        prefix = {"base_model.model.": "transformer"}
        return _pairs(tensors, prefix, {"transformer": settings["lora_alpha"] / settings["r"]})
    tensors, notes = _read(path)
    if "lora_adapter_metadata" not in notes:
        return _kohya(tensors, transformer)
    settings = json.loads(notes["lora_adapter_metadata"])
    parts = [part for part in ("transformer", "text_encoder") if f"{part}.r" in settings]
    scales = {part: settings[f"{part}.lora_alpha"] / settings[f"{part}.r"] for part in parts}
    return _pairs(tensors, {f"{part}.": part for part in parts}, scales)


def merge(pipe: Any, path: Path) -> int:
    """Add an adapter to the pipeline's weights; the number of weights changed."""
    found = deltas(path, pipe.transformer)
    with torch.no_grad():
        for (part, module), delta in found.items():
            getattr(pipe, part).get_submodule(module).weight.add_(delta)
    return len(found)


def _read(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(file, framework="pt") as opened:
        names = list(opened.keys())
        return {name: opened.get_tensor(name).float() for name in names}, opened.metadata() or {}


def _pairs(tensors: dict[str, torch.Tensor], prefixes: dict[str, str], scales: dict[str, float]) -> Deltas:
    found: Deltas = {}
    for key, down in tensors.items():
        if key.endswith(".lora_A.weight"):
            prefix = next(prefix for prefix in prefixes if key.startswith(prefix))
            up = tensors[key.replace(".lora_A.", ".lora_B.")]
            part, module = prefixes[prefix], key.removeprefix(prefix).removesuffix(".lora_A.weight")
            found[part, module] = scales[part] * up @ down
    return found


def _kohya(tensors: dict[str, torch.Tensor], transformer: Any) -> Deltas:
    dotted = {"lora_unet_" + name.replace(".", "_"): name for name, _ in transformer.named_modules()}
    found: Deltas = {}
    for key, down in tensors.items():
        name, _, rest = key.partition(".")
        if rest == "lora_down.weight":
            scale = tensors[f"{name}.alpha"].item() / len(down)
            found["transformer", dotted[name]] = scale * tensors[f"{name}.lora_up.weight"] @ down
    return found
