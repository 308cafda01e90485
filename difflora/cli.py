"""The `difflora` command.  Results go to stdout, everything else to stderr; heavy imports wait inside the commands."""

from __future__ import annotations

import inspect as signatures
import json
import logging
import math
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from difflora import __version__
from difflora.formats.errors import DiffLoRAError, some

if TYPE_CHECKING:
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
# How that model is called unless asked otherwise; its prompts are short, and FLUX pays for every padded token.
BUNDLED_CALL = {"num_inference_steps": 16, "max_sequence_length": 32}
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
    """One adapter to load: where from, its file, its name, the weight of --lora, and the source as pictures say it."""

    source: str
    file: Path
    name: str
    weight: float
    shown: str


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


# Mixes that `demo` draws, beside each adapter alone.
MIXES: tuple[dict[str, float], ...] = ({"night": 1.0, "stripes": 1.0}, {"heart": 1.0, "night": 1.0})


# ---- commands -------------------------------------------------------------------------------------------------------


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"difflora {__version__}")
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the libraries do.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only errors on stderr.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Load, mix and inspect LoRA adapters for diffusers pipelines.

    Without `--model`, a small model that ships with the package is used.
    """
    logging.getLogger("difflora").setLevel(logging.DEBUG if verbose else logging.ERROR if quiet else logging.WARNING)
    # These libraries warn while they are imported, so they must be told before.
    for library in ("DIFFUSERS", "TRANSFORMERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "info" if verbose else "error")
    if not verbose:
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"diffusers|transformers|huggingface_hub")
    _log.quiet = quiet


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="May hold tags: `a cat <lora:NAME:0.8>`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG to write; with --count NAME-1.png, ...")],
    model: Annotated[str | None, typer.Option(help="Folder, Hub id, or .safetensors checkpoint.")] = None,
    negative: Annotated[str | None, typer.Option(help="Negative prompt.")] = None,
    steps: Annotated[int | None, typer.Option(min=1)] = None,
    guidance: Annotated[float | None, typer.Option(help="The pipeline's guidance_scale.")] = None,
    true_cfg: Annotated[float | None, typer.Option(help="The pipeline's true_cfg_scale, where it has one.")] = None,
    seed: Annotated[int, typer.Option(min=-1, max=LAST_SEED, help="-1 draws one.")] = -1,
    width: Annotated[int | None, typer.Option(min=8)] = None,
    height: Annotated[int | None, typer.Option(min=8)] = None,
    count: Annotated[int, typer.Option(min=1, help="How many pictures, with seed, seed + 1, ...")] = 1,
    lora: Annotated[list[str] | None, typer.Option(help="NAME_OR_PATH[:WEIGHT]; may be repeated.")] = None,
    lora_dir: Annotated[
        list[Path] | None, typer.Option(exists=True, file_okay=False, help="Folder of adapters; may be repeated.")
    ] = None,
    dtype: Annotated[Precision, typer.Option(help="auto: bfloat16 on CUDA, else float32.")] = Precision.AUTO,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0 or mps.")] = "auto",
    offload: Annotated[Offload, typer.Option(help="What waits in host memory.")] = Offload.NONE,
    no_strict: Annotated[bool, typer.Option("--no-strict", help="Apply adapters of which only a part fits.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files.")] = False,
) -> None:
    """Make pictures from a prompt.  Each PNG says how it was made."""
    files = free_files(output, count, force)
    folders = tuple(lora_dir or ())
    asked = asked_loras(prompt, negative, lora or (), folders)
    first = random.SystemRandom().randint(0, LAST_SEED) if seed < 0 else seed
    request = Request(prompt, first, negative, steps, guidance, true_cfg, width, height)
    pipe = _pipeline(model, dtype, device, offload)
    arguments = {**(BUNDLED_CALL if model is None else {}), **_arguments(pipe, request)}
    applied = _load(pipe, asked, request, folders, strict=not no_strict)
    _log.print(f"seed {first}")
    _run(pipe, request, arguments, files, {**_model_id(model), "loras": applied})


@app.command()
def inspect(
    file: Annotated[str, typer.Argument(help="A file, a folder, a Hub id or a bundled adapter.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    family: Annotated[str | None, typer.Option(help="Settle for which model family an ambiguous file is.")] = None,
    weight_name: Annotated[str | None, typer.Option(help="Which file of a folder or a Hub repository.")] = None,
) -> None:
    """Show what an adapter file holds."""
    from difflora import tools

    found = tools.inspect(file, family=family, weight_name=weight_name)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2, allow_nan=False))
    else:
        _show(found)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG to write.")] = Path("difflora-demo.png"),
    seed: Annotated[int, typer.Option(min=0, max=LAST_SEED)] = 0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Draw a grid with the bundled model: prompts by adapters and mixes of adapters."""
    (file,) = free_files(output, 1, force)
    from difflora.demo import CARDS
    from difflora.metadata import save_png
    from difflora.tools import grid

    pipe = _pipeline(None, Precision.FLOAT32, "cpu", Offload.NONE)
    _out.print(_reports([pipe.load_lora(card.path, weight=0.0, name=name) for name, card in CARDS.items()]))
    prompts = list(dict.fromkeys(card.prompt for card in CARDS.values()))
    sets: list[tuple[str, dict[str, float], dict[str, int]]] = [("base", {}, {})]
    sets += [(name, {name: 1.0}, {"num_inference_steps": card.steps}) for name, card in CARDS.items()]
    sets += [(" + ".join(mix), mix, {}) for mix in MIXES]
    columns = []
    with _bar(len(sets), "pictures") as advance:
        for _, weights, own in sets:
            generators = [_generator(seed) for _ in prompts]
            made = pipe(prompt=prompts, loras=weights, generator=generators, **{**BUNDLED_CALL, **own})
            columns.append(made.images)
            advance()
    save_png(grid(list(zip(*columns, strict=True)), prompts, [label for label, _, _ in sets], zoom=2), file)
    _out.print(str(file), soft_wrap=True)


def main() -> None:
    """The console entry: 0 done, 1 failure with its reason on stderr, 2 usage, 130 interrupted."""
    try:
        app()
    except DiffLoRAError as error:
        typer.echo(f"difflora: {error}", err=True)
        sys.exit(1)


# ---- before the model is loaded -------------------------------------------------------------------------------------


def free_files(output: Path, count: int, force: bool) -> list[Path]:
    """The files to write, in order; DiffLoRAError if one is there already, or could not be written."""
    if output.suffix.lower() != ".png":
        raise typer.BadParameter(f"{output} must end in .png", param_hint="--output")
    if not output.parent.is_dir():
        raise DiffLoRAError(f"there is no folder {output.parent}; make it first.")
    files = [output] if count == 1 else [output.with_stem(f"{output.stem}-{n + 1}") for n in range(count)]
    taken = [file for file in files if file.exists()]
    if taken and not force:
        raise DiffLoRAError(f"{some(taken)} exists; pass --force to overwrite.")
    return files


def asked_loras(prompt: str, negative: str | None, specs: Sequence[str], folders: Sequence[Path]) -> tuple[Asked, ...]:
    """The adapters of --lora and of the prompt's tags, each found on disk (or fetched) before any model is loaded."""
    from difflora.demo import ADAPTERS
    from difflora.prompt import parse
    from difflora.sources import locate

    _, tags = parse(prompt)
    if negative and parse(negative)[1]:
        raise DiffLoRAError("--negative holds an adapter tag; tags belong in the prompt.")
    asked: dict[str, Asked] = {}
    for spec in specs:
        source, weight = split_weight(spec)
        place = locate(source, folders)
        if place.name in asked:
            raise DiffLoRAError(f"--lora names {place.name!r} twice; give it once.")
        asked[place.name] = Asked(source, place.file, place.name, weight, source)
    for tag in tags:
        found = None if tag.name in asked else _tagged(tag.name, folders)
        if found is not None:
            shown = tag.name if found == ADAPTERS.get(tag.name) else str(found)
            asked[tag.name] = Asked(str(found), locate(found).file, tag.name, 0.0, shown)
        elif not asked:
            where = some([*(str(folder / f"{tag.name}.safetensors") for folder in (Path(), *folders))])
            raise DiffLoRAError(
                f"the prompt asks for {tag.name!r}, which is no bundled adapter; tried {where}. "
                "Pass --lora PATH or --lora-dir FOLDER."
            )
    return tuple(asked.values())


def split_weight(spec: str) -> tuple[str, float]:
    """("path", 0.5) of "path:0.5"; a colon before anything but a number belongs to the source."""
    source, _, text = spec.rpartition(":")
    try:
        weight = float(text)
    except ValueError:
        return spec, 1.0
    if not source or not math.isfinite(weight):
        raise DiffLoRAError(f"--lora {spec}: expected NAME_OR_PATH[:WEIGHT] with a finite number.")
    return source, weight


def _tagged(name: str, folders: Sequence[Path]) -> Path | None:
    from difflora.demo import ADAPTERS

    files = [folder / f"{name}.safetensors" for folder in (Path(), *folders)] if Path(name).name == name else []
    return next((file for file in files if file.is_file()), ADAPTERS.get(name))


# ---- the pipeline ---------------------------------------------------------------------------------------------------


def _pipeline(model: str | None, dtype: Precision, device: str, offload: Offload) -> Any:
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
        pipe = _opened(model, getattr(torch, chosen))
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, DiffLoRAError):
            raise
        raise DiffLoRAError(
            f"the model {model or BUNDLED} cannot be loaded: {str(error).strip() or error!r}"
        ) from error
    pipe.set_progress_bar_config(disable=True)  # `_bar` shows the steps
    _place(pipe, where, offload)
    return difflora.attach(pipe)


def _opened(model: str | None, dtype: torch.dtype) -> Any:
    if _log.quiet or model is None or Path(model).exists():
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


def _model_id(model: str | None) -> dict[str, str | None]:
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


def _load(
    pipe: Any, asked: Sequence[Asked], request: Request, folders: Sequence[Path], strict: bool
) -> tuple[Applied, ...]:
    """Load the adapters; what each of them, with the prompt's tags, comes to in every component that it changes."""
    from difflora.hashes import hashes
    from difflora.metadata import Applied
    from difflora.prompt import parse
    from difflora.surface import engine_of

    found = []
    for one in asked:
        report = pipe.load_lora(one.source, weight=one.weight, name=one.name, strict=strict, folders=folders)
        _log.print(str(report))
        found.append((one, report))
    resolve, (_, tags) = engine_of(pipe).resolve, parse(request.prompt)
    applied = []
    for one, report in found:
        own = [tag for tag in tags if resolve(tag.name) == one.name]
        digests = hashes(one.file)
        applied.append(Applied(one.name, one.shown, _weights(one, own, report), (), digests.sha256, digests.lora_hash))
    return tuple(lora for lora in applied if any(weight for _, weight in lora.components))


def _weights(asked: Asked, tags: Sequence[Tag], report: LoadReport) -> tuple[tuple[str, float], ...]:
    encoder = asked.weight + sum(tag.text_encoder for tag in tags)
    denoiser = asked.weight + sum(tag.denoiser for tag in tags)
    names = dict.fromkeys(path.split(".")[0] for path in report.matched)
    return tuple((name, encoder if name.startswith("text_encoder") else denoiser) for name in names)


# ---- pictures -------------------------------------------------------------------------------------------------------


def _arguments(pipe: Any, request: Request) -> dict[str, Any]:
    """What to pass to the pipeline; DiffLoRAError for a value that it would not take, or would not use."""
    wanted = {
        "negative_prompt": request.negative_prompt,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance,
        "true_cfg_scale": request.true_cfg,
        "width": request.width,
        "height": request.height,
    }
    given, takes = {name: value for name, value in wanted.items() if value is not None}, _defaults(pipe)
    if "num_frames" in takes:
        raise DiffLoRAError(f"{type(pipe).__name__} makes videos; generate makes pictures. Use it from Python.")
    unknown = [name for name in given if name not in takes]
    if unknown:
        raise DiffLoRAError(f"{type(pipe).__name__} takes no {some(unknown)}; leave it out.")
    if request.negative_prompt and "true_cfg_scale" in takes and (request.true_cfg or 1.0) <= 1.0:
        raise DiffLoRAError(f"{type(pipe).__name__} uses a negative prompt only with --true-cfg above 1; pass it too.")
    return given


def _defaults(pipe: Any) -> dict[str, Any]:
    parameters = signatures.signature(type(pipe).__call__).parameters
    return {name: None if one.default is one.empty else one.default for name, one in parameters.items()}


def _run(
    pipe: Any,
    request: Request,
    arguments: Mapping[str, Any],
    files: Sequence[Path],
    record: Mapping[str, Any],
) -> None:
    """Make and save one picture a file; a picture depends on its own seed only."""
    from difflora.metadata import save_png

    settings = {**_defaults(pipe), **arguments}
    with _bar(len(files) * settings.get("num_inference_steps", 1), "steps") as advance:
        if "callback_on_step_end" in settings:
            arguments = {**arguments, "callback_on_step_end": lambda *step: (advance(), step[-1])[1]}
        for index, file in enumerate(files):
            own = replace(request, seed=(request.seed + index) % (LAST_SEED + 1))
            image = pipe(prompt=own.prompt, generator=_generator(own.seed), **arguments).images[0]
            save_png(image, file, replace(_job(pipe, own, image, settings), **record))
            _out.print(str(file), soft_wrap=True)


def _generator(seed: int) -> torch.Generator:
    import torch

    return torch.Generator("cpu").manual_seed(seed)


def _job(pipe: Any, request: Request, image: Image, settings: Mapping[str, Any]) -> Job:
    from importlib.metadata import version

    from difflora.metadata import Job

    libraries = ("torch", "diffusers", "transformers")
    return Job(
        prompt=request.prompt,
        model="",
        pipeline=type(pipe).__name__,
        seed=request.seed,
        steps=settings.get("num_inference_steps", 1),
        width=image.width,
        height=image.height,
        scheduler=type(pipe.scheduler).__name__,
        dtype=str(pipe.dtype).removeprefix("torch."),
        negative_prompt=request.negative_prompt,
        guidance=settings.get("guidance_scale"),
        true_cfg=settings.get("true_cfg_scale"),
        max_sequence_length=settings.get("max_sequence_length"),
        versions=(("difflora", __version__), *((name, version(name)) for name in libraries)),
    )


@contextmanager
def _bar(total: int, unit: str) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; calling what it yields advances it by one."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_log, transient=True, disable=_log.quiet) as progress:
        task = progress.add_task(unit, total=total)
        yield lambda: progress.advance(task)


# ---- tables ---------------------------------------------------------------------------------------------------------


def _reports(reports: Sequence[LoadReport]) -> Table:
    table = Table("adapter", "layout", "family", "kinds", "rank", "matched", "unmatched")
    for one in reports:
        kinds = ", ".join(f"{count} {kind}" for kind, count in one.kinds.items())
        ranks = ", ".join(map(str, one.ranks))
        matched = f"{len(one.matched)}", f"{len(one.unmatched)}"
        table.add_row(one.name, one.layout, one.family or "?", kinds, ranks, *matched)
    return table


def _show(found: Inspection) -> None:
    table = Table("property", Column(overflow="fold"), show_header=False)
    for name, value in _properties(found):
        table.add_row(name, value)
    norms = Table(Column("block", overflow="fold"), "norm of the change at strength 1")
    for block, norm in found.norms.items():
        norms.add_row(block, f"{norm:.4g}")
    _out.print(table, norms)


def _properties(found: Inspection) -> list[tuple[str, str]]:
    counts = {"components": found.components, "kinds": found.kinds, "numbers": found.dtypes}
    pairs = {"ranks": found.ranks, "alphas": found.alphas}
    digests = found.hashes
    rows = [
        ("source", found.source),
        ("layout", found.layout),
        ("family", found.family or "unknown"),
        ("size", f"{found.size:,} bytes"),
        *((name, ", ".join(f"{key}: {count:,}" for key, count in part.items())) for name, part in counts.items()),
        *((name, ", ".join(f"{value} ({count}x)" for value, count in part)) for name, part in pairs.items()),
        (
            "trigger words",
            ", ".join(found.triggers.words) + (f" ({found.triggers.source})" * bool(found.triggers.words)),
        ),
        ("common tags", ", ".join(f"{tag} {count}" for tag, count in found.triggers.common[:12])),
        *(
            [("sha256", digests.sha256), ("autov2", digests.autov2), ("lora hash", digests.lora_hash)]
            if digests
            else []
        ),
        ("NaN or infinite", f"{len(found.bad)} tensors: {some(found.bad)}" if found.bad else "none"),
        *(
            ("metadata " + key, value if len(value) <= 80 else value[:77] + "...")
            for key, value in found.metadata.items()
        ),
        *(("note", note) for note in found.notes),
    ]
    return [(name, value) for name, value in rows if value]
