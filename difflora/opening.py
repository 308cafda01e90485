"""From what the command line names as a model to an attached pipeline on its device."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difflora.formats.errors import DiffLoRAError, some

if TYPE_CHECKING:
    import torch

BUNDLED = "difflora-demo"  # what pictures call the bundled model
# Beside model_index.json: how the model is called unless asked otherwise, {"call": {argument: value}}.
_CALLED = "difflora.json"


class Precision(StrEnum):
    """Number formats of the model's weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Offload(StrEnum):
    """What of the model waits in host memory while it is not used."""

    NONE = "none"
    MODEL = "model"
    SEQUENTIAL = "sequential"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How a single-file checkpoint is known: a key prefix, and the input layer with its number of channels."""

    pipeline: str
    prefix: str
    entry: str
    channels: int


# Prefixes are of keys without "model.diffusion_model."; the first row whose prefix occurs decides.
CHECKPOINTS = (
    Checkpoint("FluxPipeline", "double_blocks.0.img_attn.qkv.", "img_in.weight", 64),
    Checkpoint("StableDiffusionXLPipeline", "conditioner.embedders.1.", "input_blocks.0.0.weight", 4),
    Checkpoint("StableDiffusionPipeline", "cond_stage_model.", "input_blocks.0.0.weight", 4),
)


def opened(model: str | None, dtype: Precision, device: str, offload: Offload, quiet: bool = False) -> Any:
    """The attached pipeline on its device; the CPU generators of its calls make equal noise on every device."""
    import difflora

    if model is not None and not Path(model).exists() and (model.count("/") != 1 or model.endswith(".safetensors")):
        raise DiffLoRAError(f"--model {model} is no file, no folder and no Hub id (user/repo).")
    import torch

    where = _device(device)
    if offload is not Offload.NONE and where.type == "cpu":
        raise DiffLoRAError(f"--offload {offload} needs an accelerator; on the CPU there is nothing to offload from.")
    chosen = ("bfloat16" if where.type == "cuda" else "float32") if dtype is Precision.AUTO else str(dtype)
    try:
        pipe = _read(model, getattr(torch, chosen), quiet)
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, DiffLoRAError):
            raise
        raise DiffLoRAError(
            f"the model {model or BUNDLED} cannot be loaded: {str(error).strip() or error!r}"
        ) from error
    pipe.set_progress_bar_config(disable=True)  # the command shows its own
    _place(pipe, where, offload)
    return difflora.attach(pipe)


def recorded_call(model: str | None) -> dict[str, Any]:
    """The arguments that the model's folder says it is called with; {} for other models.

    The bundled model, and what is baked from it, draws small pictures from short prompts.
    """
    from difflora.demo import MODEL

    file = (MODEL if model is None else Path(model)) / _CALLED
    if not file.is_file():
        return {}
    try:
        call = json.loads(file.read_text(encoding="utf-8"))["call"]
        return {str(name): value for name, value in call.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DiffLoRAError(f'{file} cannot be read ({error}); expected {{"call": {{argument: value}}}}.') from error


def _read(model: str | None, dtype: torch.dtype, quiet: bool) -> Any:
    if quiet or model is None or Path(model).exists():
        # Read when huggingface_hub is imported: bars are for downloads.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    if model is None:
        from difflora import demo

        return demo.load(dtype)
    one_file = Path(model).is_file()
    kind: Any = getattr(diffusers, checkpoint_pipeline(Path(model)) if one_file else "DiffusionPipeline")
    return (kind.from_single_file if one_file else kind.from_pretrained)(model, dtype=dtype)


def model_id(model: str | None) -> dict[str, str | None]:
    """What a picture records of the model: as it was given, and the hash of a single file."""
    from difflora.hashes import hashes

    one_file = model is not None and Path(model).is_file()
    return {"model": model or BUNDLED, "model_hash": hashes(Path(str(model))).autov2 if one_file else None}


def checkpoint_pipeline(file: Path) -> str:
    """The name of the diffusers class for a single-file checkpoint; DiffLoRAError for other models."""
    from difflora.hashes import read_header

    shapes = {key.removeprefix("model.diffusion_model."): shape for key, (_, shape) in read_header(file)[1].items()}
    for row in CHECKPOINTS:
        if any(key.startswith(row.prefix) for key in shapes):
            channels = (*shapes.get(row.entry, ()), 0, 0)[1]
            if channels == row.channels:
                return row.pipeline
            raise DiffLoRAError(
                f"{file} looks like {row.pipeline}, but its {row.entry} reads {channels} channels instead of "
                f"{row.channels}: an inpainting, control or partial checkpoint. Pass a diffusers folder instead."
            )
    raise DiffLoRAError(
        f"{file} is no checkpoint of {some(row.pipeline for row in CHECKPOINTS)}; it holds {some(shapes)}. "
        "Pass a diffusers folder or a Hub id instead."
    )


def _device(name: str) -> torch.device:
    import torch

    usable: dict[str, Callable[[], bool]] = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    usable["cpu"] = lambda: True
    if name == "auto":
        name = next(kind for kind, is_there in usable.items() if is_there())
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DiffLoRAError(f"--device {name} is no device; expected auto, cpu, cuda, cuda:N or mps.") from error
    if not usable.get(device.type, lambda: False)() or (device.index or 0) >= max(torch.cuda.device_count(), 1):
        raise DiffLoRAError(f"--device {name} is not available here; expected auto, cpu, cuda, cuda:N or mps.")
    return device


def _place(pipe: Any, device: torch.device, offload: Offload) -> None:
    if offload is Offload.MODEL:
        pipe.enable_model_cpu_offload(device=device)
    elif offload is Offload.SEQUENTIAL:
        pipe.enable_sequential_cpu_offload(device=device)
    elif offload is Offload.GROUP:
        pipe.enable_group_offload(device, offload_type="leaf_level")
    else:
        pipe.to(device)
