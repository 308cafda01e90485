"""What the commands for files have in common: options, what they write, what they say of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from difflora import screen

if TYPE_CHECKING:
    from difflora.resizing import Resized
    from difflora.types import Adapter


class Layout(StrEnum):
    """The layouts that adapters are written in."""

    DIFFUSERS = "diffusers"
    KOHYA = "kohya"
    PEFT = "peft"
    COMFY = "comfy"


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and report; write nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files.")]
Family = Annotated[str | None, typer.Option(help="Settle for which model family an ambiguous file is.")]
To = Annotated[Layout, typer.Option("--to", help="Layout to write; peft is a folder.")]


def recipe(weighted: Sequence[tuple[Adapter, float]], made: Mapping[str, object]) -> dict[str, str]:
    """Metadata that say what a mix was made of."""
    from difflora.hashes import hashes

    parts = [
        {"name": one.name, "strength": strength, "sha256": hashes(one.path).sha256 if one.path else None}
        for one, strength in weighted
    ]
    recipe = json.dumps({"adapters": parts, **made})
    return {"difflora.recipe": recipe, "modelspec.merged_from": ", ".join(one.name for one, _ in weighted)}


def store(
    adapter: Adapter, target: Path, to: Layout, force: bool, dry_run: bool, as_json: bool,
    metadata: Mapping[str, str] | None = None, told: Mapping[str, Resized] | None = None,
) -> None:  # fmt: skip
    """Write the adapter, or only check that it could be, and say what it is."""
    from difflora import writing

    if dry_run:
        writing.planned(adapter, target, to.value, metadata, force)
    else:
        writing.save(adapter, target, to.value, metadata=metadata, force=force)
    deltas = [delta for modules in adapter.components.values() for delta in modules.values()]
    kinds, ranks = Counter(delta.kind for delta in deltas), sorted({delta.rank for delta in deltas if delta.rank})
    said: dict[str, Any] = {
        "output": str(target), "layout": to.value, "family": adapter.family, "kinds": dict(kinds), "ranks": ranks,
        "components": {name: len(modules) for name, modules in adapter.components.items()},
        "notes": list(adapter.notes), "written": not dry_run,
    }  # fmt: skip
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}..{ranks[-1]}" if ranks else "no rank"
    lines = [f"{target}: {to.value} layout, family {adapter.family or 'unknown'}, {listed}, {rank}"]
    if told:
        said["retained"] = {name: one.retained for name, one in told.items()}
        shares = said["retained"].values()
        lines.append(f"retained norm: {min(shares):.4f} to {max(shares):.4f}, mean {sum(shares) / len(shares):.4f}")
    tell(said, as_json, "\n".join([*lines, *(f"note: {note}" for note in adapter.notes)]), dry_run)


def tell(said: Mapping[str, Any], as_json: bool, plain: str, dry_run: bool) -> None:
    """Print what was done, on stdout."""
    if as_json:
        typer.echo(json.dumps(said, indent=2, allow_nan=False))
    else:
        screen.out.print(screen.visible(plain) + ("\nnothing was written (--dry-run)" * dry_run), soft_wrap=True)
