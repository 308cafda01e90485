"""What the command line shows: results on stdout, progress and remarks on stderr, tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table

from difflora.formats.errors import some

if TYPE_CHECKING:
    from difflora.tools import Inspection
    from difflora.types import LoadReport

# What moves a cursor, sets a title or turns text around: files hold any text, and a terminal would obey it.
_ACTING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

out = Console(markup=False, highlight=False)
log = Console(stderr=True, markup=False, highlight=False)


@contextmanager
def bar(total: int, unit: str) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; calling what it yields advances it by one."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=log, transient=True, disable=log.quiet or not log.is_terminal) as progress:
        task = progress.add_task(unit, total=total)
        yield lambda: progress.advance(task)


def visible(text: str) -> str:
    """The text with control characters, line breaks and tabs aside, written as in Python: `\\x1b`."""
    return _ACTING.sub(lambda found: repr(found.group())[1:-1], text)


def reports(loaded: Sequence[LoadReport]) -> Table:
    table = Table("adapter", "layout", "family", "kinds", "rank", "matched", "unmatched")
    for one in loaded:
        kinds = ", ".join(f"{count} {kind}" for kind, count in one.kinds.items())
        ranks = ", ".join(map(str, one.ranks))
        matched = f"{len(one.matched)}", f"{len(one.unmatched)}"
        table.add_row(visible(one.name), one.layout, one.family or "?", kinds, ranks, *matched)
    return table


def show(found: Inspection) -> None:
    table = Table("property", Column(overflow="fold"), show_header=False)
    for name, value in _properties(found):
        table.add_row(name, value)
    norms = Table(Column("block", overflow="fold"), "norm of the change at strength 1")
    for block, norm in found.norms.items():
        norms.add_row(visible(block), f"{norm:.4g}")
    out.print(table, norms)


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
            ", ".join(found.triggers.words) + (f" ({found.triggers.source})" * bool(found.triggers.words))
            or "none in the file",
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
    return [(visible(name), visible(value)) for name, value in rows if value]
