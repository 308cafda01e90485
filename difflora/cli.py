"""The `difflora` command.  Results go to stdout, everything else to stderr; heavy imports wait inside the commands."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from difflora import __version__, cli_tools, screen
from difflora.drawing import (
    LAST_SEED,
    Request,
    arguments_of,
    asked_loras,
    check_asked,
    draw,
    free_files,
    generator,
    load_asked,
)
from difflora.formats.errors import DiffLoRAError
from difflora.opening import Offload, Precision, model_id, opened, recorded_call

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False, rich_markup_mode="markdown")
app.add_typer(cli_tools.app)
# Mixes that `demo` draws, beside each adapter alone.
MIXES: tuple[dict[str, float], ...] = ({"heart": 1.0, "stripes": 1.0}, {"heart": 1.0, "outline": 0.9})


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
    screen.log.quiet = quiet


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
    max_sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the prompt that the pipeline reads, where it has a limit.")
    ] = None,
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
    request = Request(prompt, first, negative, steps, guidance, true_cfg, width, height, max_sequence_length)
    call = recorded_call(model)
    check_asked(asked, folders)
    pipe = opened(model, dtype, device, offload, screen.log.quiet)
    arguments = {**call, **arguments_of(pipe, request)}
    applied = load_asked(pipe, asked, request, folders, strict=not no_strict)
    screen.log.print(f"seed {first}")
    draw(pipe, request, arguments, files, {**model_id(model), "loras": applied})


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
        screen.show(found)


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

    pipe = opened(None, Precision.FLOAT32, "cpu", Offload.NONE)
    screen.out.print(screen.reports([pipe.load_lora(card.path, weight=0.0, name=name) for name, card in CARDS.items()]))
    prompts = list(dict.fromkeys(card.prompt for card in CARDS.values()))
    sets: list[tuple[str, dict[str, float], dict[str, int]]] = [("base", {}, {})]
    sets += [(name, {name: 1.0}, {"num_inference_steps": card.steps}) for name, card in CARDS.items()]
    sets += [(" + ".join(mix), mix, {}) for mix in MIXES]
    columns = []
    with screen.bar(len(sets), "pictures") as advance:
        for _, weights, own in sets:
            generators = [generator(seed) for _ in prompts]
            made = pipe(prompt=prompts, loras=weights, generator=generators, **{**recorded_call(None), **own})
            columns.append(made.images)
            advance()
    save_png(grid(list(zip(*columns, strict=True)), prompts, [label for label, _, _ in sets], zoom=2), file)
    screen.out.print(str(file), soft_wrap=True)


# What Python's arguments are called on the command line.
_OPTIONS = {
    "family=": "--family ",
    "weight_name=": "--weight-name ",
    "strict=False": "--no-strict",
    "force=True (--force)": "--force",
}


def _as_options(text: str) -> str:
    for argument, option in _OPTIONS.items():
        text = text.replace(argument, option)
    return text


def main() -> None:
    """The console entry: 0 done, 1 failure with its reason on stderr, 2 usage, 130 interrupted."""
    try:
        app()
    except DiffLoRAError as error:
        typer.echo(screen.visible(f"difflora: {_as_options(str(error))}"), err=True)
        sys.exit(1)
