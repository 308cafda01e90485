"""The commands that make adapter files: convert, merge, resize, extract, bake."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from difflora import cli_files, screen
from difflora.cli_common import DryRun, Family, Force, Json, Layout, To, recipe, store, tell
from difflora.drawing import split_weight

if TYPE_CHECKING:
    from difflora.types import Adapter

app = typer.Typer()
app.add_typer(cli_files.app)


class Mixing(StrEnum):
    """How adapters become one."""

    SUM = "sum"
    SVD = "svd"
    TIES = "ties"
    DARE = "dare"


class Truncation(StrEnum):
    """How many singular values of a module stay."""

    SV_RATIO = "sv_ratio"
    SV_FRO = "sv_fro"
    SV_CUMULATIVE = "sv_cumulative"


Output = Annotated[Path, typer.Option("--output", "-o", help="What to write.")]
Specs = Annotated[list[str], typer.Argument(help="NAME_OR_PATH[:STRENGTH] ...")]
Rank = Annotated[int | None, typer.Option(min=1)]
ConvRank = Annotated[int | None, typer.Option(min=1, help="Rank of convolutions, if another.")]
Source = Annotated[str, typer.Argument(help="A file, a folder, a Hub id or a bundled adapter.")]
Target = Annotated[Path, typer.Argument(help="What to write.")]


@app.command()
def convert(
    source: Source,
    target: Target,
    to: To,
    family: Family = None,
    component: Annotated[str | None, typer.Option(help="The component that the denoiser's part is for.")] = None,
    weight_name: Annotated[str | None, typer.Option(help="Which file of a folder or a Hub repository.")] = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write an adapter in another layout; what the layout cannot hold is refused."""
    from difflora.loading import load

    store(
        load(source, family=family, component=component, weight_name=weight_name), target, to, force, dry_run, as_json
    )


@app.command()
def merge(
    adapters: Specs,
    output: Output,
    method: Annotated[Mixing, typer.Option(help="sum is exact; the others end in --rank.")] = Mixing.SUM,
    rank: Rank = None,
    density: Annotated[float, typer.Option(help="ties, dare: the share of numbers that stay.")] = 0.5,
    seed: Annotated[int, typer.Option(help="dare: which numbers stay.")] = 0,
    to: To = Layout.DIFFUSERS,
    family: Family = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Make one adapter of several: at strength 1 it does what they do together at these strengths."""
    from difflora import mixing

    weighted = _loaded(adapters, family)
    count = len({(c, path) for one, _ in weighted for c, deltas in one.components.items() for path in deltas})
    with screen.bar(count, "modules") as advance:
        total, told = mixing.merge(
            weighted, method.value, rank=rank, density=density, seed=seed, advance=advance
        )  # fmt: skip
    made = {"method": method.value, "rank": rank, "density": density, "seed": seed}
    store(total, output, to, force, dry_run, as_json, recipe(weighted, made), told)


@app.command()
def resize(
    source: Source,
    target: Target,
    rank: Annotated[int, typer.Option(min=1, help="The most that is left.")],
    conv_rank: ConvRank = None,
    method: Annotated[Truncation | None, typer.Option(help="Fewer where --param allows it.")] = None,
    param: Annotated[float | None, typer.Option(help="sv_ratio: S > S0 / param; others: a share of S.")] = None,
    to: Annotated[Layout | None, typer.Option("--to", help="Layout to write; the file's own, or diffusers.")] = None,
    family: Family = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write an adapter with smaller ranks: the nearest one, module by module."""
    from difflora import resizing
    from difflora.loading import load

    adapter = load(source, family=family)
    with screen.bar(sum(map(len, adapter.components.values())), "modules") as advance:
        small, told = resizing.resize(
            adapter, rank, conv_rank=conv_rank, method=method.value if method else None, param=param, advance=advance
        )
    # The layout that it has, where the target can be one: PEFT's is a folder.
    own = Layout(adapter.layout) if adapter.layout in {*Layout} else Layout.DIFFUSERS
    if own is Layout.PEFT and target.suffix == ".safetensors":
        own = Layout.DIFFUSERS
    store(small, target, to or own, force, dry_run, as_json, None, told)


@app.command()
def extract(
    base: Annotated[Path, typer.Option(help="The checkpoint before training: a file or a component's folder.")],
    tuned: Annotated[Path, typer.Option(help="The checkpoint after it.")],
    output: Output,
    rank: Annotated[int, typer.Option(min=1)],
    conv_rank: ConvRank = None,
    min_diff: Annotated[float, typer.Option(min=0.0, help="Leave out what differs by no more than this.")] = 0.0,
    component: Annotated[str, typer.Option(help="Which component the checkpoints are.")] = "transformer",
    to: To = Layout.DIFFUSERS,
    family: Family = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Make an adapter of the difference between two checkpoints."""
    from difflora import extracting

    with screen.bar(_tensors(base), "tensors") as advance:
        found, told = extracting.extract(
            base,
            tuned,
            rank,
            component=component,
            family=family,
            conv_rank=conv_rank,
            min_diff=min_diff,
            advance=advance,
        )
    store(found, output, to, force, dry_run, as_json, None, told)


@app.command()
def bake(
    checkpoint: Annotated[Path, typer.Argument(help="A .safetensors file, or a component's or pipeline's folder.")],
    adapters: Specs,
    output: Output,
    family: Family = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint with adapters in its weights."""
    from difflora import baking

    weighted = _loaded(adapters, family)
    with screen.bar(_tensors(checkpoint), "tensors") as advance:
        made = baking.bake(checkpoint, weighted, output, force=force, dry_run=dry_run, advance=advance)
    said = {"output": str(made.path), "parameters": made.parameters, "tensors": made.tensors, "written": not dry_run}
    tell(said, as_json, f"{made.path}: {made.parameters} parameters changed in {made.tensors} tensors", dry_run)


def _loaded(specs: Sequence[str], family: str | None) -> list[tuple[Adapter, float]]:
    from difflora.loading import load

    return [(load(source, family=family), strength) for source, strength in map(split_weight, specs)]


def _tensors(checkpoint: Path) -> int:
    """How many tensors a checkpoint has, for the bar; 0 for what is none, which is refused later."""
    from difflora.hashes import read_header

    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.rglob("*.safetensors"))
    return sum(len(read_header(file)[1]) for file in files if file.suffix in (".safetensors", ".sft"))
