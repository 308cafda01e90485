"""The pictures that the command line makes: which files, which adapters, which arguments, and what each PNG says."""

from __future__ import annotations

import inspect as signatures
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from difflora import __version__
from difflora.formats.errors import DiffLoRAError, some
from difflora.screen import bar, log, out, visible

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from difflora.metadata import Applied, Job
    from difflora.prompt import Tag
    from difflora.types import LoadReport

LAST_SEED = 2**32 - 1


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
    max_sequence_length: int | None = None


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


def check_asked(asked: Sequence[Asked], folders: Sequence[Path]) -> None:
    """DiffLoRAError for a file that cannot be read, before a large model is."""
    if asked:
        from difflora.loading import read

        for one in asked:
            read(one.source, folders)


def split_weight(spec: str) -> tuple[str, float]:
    """("path", 0.5) of "path:0.5"; a colon before anything but a number belongs to the source."""
    source, _, text = spec.rpartition(":")
    try:
        weight = float(text)
    except ValueError:
        from difflora.demo import ADAPTERS

        if source and not Path(spec).exists() and (source in ADAPTERS or Path(source).exists()):
            raise DiffLoRAError(f"{spec}: {text!r} is no number; expected NAME_OR_PATH[:WEIGHT].") from None
        return spec, 1.0
    if not source or not math.isfinite(weight):
        raise DiffLoRAError(f"{spec}: expected NAME_OR_PATH[:WEIGHT] with a finite number.")
    return source, weight


def _tagged(name: str, folders: Sequence[Path]) -> Path | None:
    from difflora.demo import ADAPTERS

    files = [folder / f"{name}.safetensors" for folder in (Path(), *folders)] if Path(name).name == name else []
    return next((file for file in files if file.is_file()), ADAPTERS.get(name))


def load_asked(
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
        log.print(visible(str(report)))
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


def arguments_of(pipe: Any, request: Request) -> dict[str, Any]:
    """What to pass to the pipeline; DiffLoRAError for a value that it would not take, or would not use."""
    wanted = {
        "negative_prompt": request.negative_prompt,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance,
        "true_cfg_scale": request.true_cfg,
        "width": request.width,
        "height": request.height,
        "max_sequence_length": request.max_sequence_length,
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


def draw(
    pipe: Any,
    request: Request,
    arguments: Mapping[str, Any],
    files: Sequence[Path],
    record: Mapping[str, Any],
) -> None:
    """Make and save one picture a file; a picture depends on its own seed only."""
    from difflora.metadata import save_png

    settings = {**_defaults(pipe), **arguments}
    with bar(len(files) * settings.get("num_inference_steps", 1), "steps") as advance:
        if "callback_on_step_end" in settings:
            arguments = {**arguments, "callback_on_step_end": lambda *step: (advance(), step[-1])[1]}
        for index, file in enumerate(files):
            own = replace(request, seed=(request.seed + index) % (LAST_SEED + 1))
            image = pipe(prompt=own.prompt, generator=generator(own.seed), **arguments).images[0]
            save_png(image, file, replace(_job(pipe, own, image, settings), **record))
            out.print(str(file), soft_wrap=True)


def generator(seed: int) -> torch.Generator:
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
