"""The `difflora` command.  Results go to stdout, everything else to stderr; heavy imports wait inside the commands."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from difflora import __version__
from difflora.formats.errors import DiffLoRAError, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from PIL.Image import Image

    from difflora.metadata import Applied, Job
    from difflora.prompt import Tag
    from difflora.tools import Inspection
    from difflora.types import LoadReport

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False, rich_markup_mode="markdown")
_out = Console(markup=False, highlight=False)
_log = Console(stderr=True, markup=False, highlight=False)

BUNDLED = "difflora-demo"  # what pictures call the bundled model
BUNDLED_STEPS = 16
LAST_SEED = 2**32 - 1


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


@dataclass(frozen=True, slots=True)
class Asked:
    """One adapter to load: where from, its file, its name, and the weight that --lora gives it."""

    source: str
    file: Path
    name: str
    weight: float


@dataclass(frozen=True, slots=True)
class Request:
    """What the pictures shall be; None leaves a value to the pipeline."""

    prompt: str
    seed: int
    negative_prompt: str | None = None
    steps: int | None = None
    guidance: float | None = None
    true_cfg: float | None = None
    width: int | None = None
    height: int | None = None


# ---- commands ---------------------------------------------------------------------------------------------------------


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"difflora {__version__}")
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the libraries do.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only errors on stderr.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Load, mix and inspect LoRA adapters for diffusers pipelines.

    Without `--model` a small model that ships with the package is used.
    """
    level = logging.DEBUG if verbose else logging.ERROR if quiet else logging.WARNING
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s: %(message)s", force=True)
    logging.getLogger("difflora").setLevel(level)
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "info" if verbose else "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "info" if verbose else "error")
    _log.quiet = quiet


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="May hold tags: `a cat <lora:NAME:0.8>`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG to write; with --count `NAME-1.png`, ...")],
    model: Annotated[str | None, typer.Option(help="Folder, Hub id, or .safetensors checkpoint.")] = None,
    negative: Annotated[str | None, typer.Option(help="Negative prompt.")] = None,
    steps: Annotated[int | None, typer.Option(min=1)] = None,
    guidance: Annotated[float | None, typer.Option(help="The pipeline's guidance_scale.")] = None,
    true_cfg: Annotated[float | None, typer.Option(help="The pipeline's true_cfg_scale, where it has one.")] = None,
    seed: Annotated[int, typer.Option(min=-1, max=LAST_SEED, help="-1 draws one.")] = -1,
    width: Annotated[int | None, typer.Option(min=8)] = None,
    height: Annotated[int | None, typer.Option(min=8)] = None,
    count: Annotated[int, typer.Option(min=1, help="Pictures, with seed, seed + 1, ...")] = 1,
    lora: Annotated[list[str] | None, typer.Option(help="NAME_OR_PATH[:WEIGHT]; may be repeated.")] = None,
    lora_dir: Annotated[list[Path] | None, typer.Option(help="Folder of adapters; may be repeated.")] = None,
    dtype: Annotated[Precision, typer.Option()] = Precision.AUTO,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0, mps")] = "auto",
    offload: Annotated[Offload, typer.Option()] = Offload.NONE,
    no_strict: Annotated[bool, typer.Option("--no-strict", help="Apply adapters of which only a part fits.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files.")] = False,
) -> None:
    """Make pictures from a prompt; each PNG says how it was made."""
    files = free_files(output, count, force)
    asked = asked_loras(prompt, negative, lora or (), lora_dir or ())
    first = random.SystemRandom().randint(0, LAST_SEED) if seed < 0 else seed
    _log.print(f"seed {first}")
    request = Request(prompt, first, negative, steps, guidance, true_cfg, width, height)
    pipe = _pipeline(model, dtype, device, offload)
    reports = {adapter.name: _loaded(pipe, adapter, lora_dir or (), not no_strict) for adapter in asked}
    with _stepping(pipe, len(files)) as step:
        for index, file in enumerate(files):
            from difflora.metadata import save_png

            own = _with_seed(request, (first + index) % (LAST_SEED + 1))
            image, settings = _picture(pipe, own, BUNDLED_STEPS if model is None else None, step)
            save_png(image, file, _job(pipe, own, image, settings, model, _applied(pipe, own, asked, reports)))
            _out.print(str(file), soft_wrap=True)
