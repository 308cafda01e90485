"""The words that every part of the library speaks: plain frozen dataclasses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from difflora.formats.errors import DiffLoRAError

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.kernels.reference import Block
    from difflora.kinds import Delta
    from difflora.writing import Layout

__all__ = [
    "Adapter",
    "BoundAdapter",
    "DiffLoRAError",
    "Joint",
    "LoadReport",
    "Mix",
    "Mode",
    "Section",
    "Stack",
    "Strength",
    "Vectors",
]

Mode = Literal["auto", "merged", "kernel"]


@dataclass(frozen=True, eq=False, slots=True)
class Vectors:
    """A word of a text encoder that the file brings along (textual inversion): vectors [n, width], n tokens."""

    token: str
    component: str
    tensor: Tensor


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Adapter:
    """One LoRA file, normalised: component -> canonical (diffusers) path -> delta.

    A path is a module, whose weight is meant, or one of its other parameters (`to_q.bias`, `scale_shift_table`).

    `layout` is how the file spells it ("kohya", "diffusers", "peft", ...), `family` the model it is for ("flux",
    "flux|chroma" while several remain, None if unknown).  `metadata` is the file's own.  `name` is what it is called
    unless the user names it, `aliases` are other names it answers to.  `vectors` are words that it brings along,
    `widens` the (component, path) whose input it may widen.  `uneven` says what in it fits no model of its family.
    """

    source: str
    name: str
    layout: str
    family: str | None
    components: Mapping[str, Mapping[str, Delta]]
    metadata: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    path: str | None = None
    vectors: tuple[Vectors, ...] = ()
    widens: frozenset[tuple[str, str]] = frozenset()
    uneven: tuple[str, ...] = ()

    def __repr__(self) -> str:
        deltas = [delta for modules in self.components.values() for delta in modules.values()]
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(delta.kind for delta in deltas).items())
        ranks = sorted({delta.rank for delta in deltas if delta.rank})
        rank = f", rank {ranks[0]}" if len(ranks) == 1 else f", ranks {ranks[0]}..{ranks[-1]}" if ranks else ""
        return f"<Adapter {self.name!r}: {self.layout} layout, family {self.family or 'unknown'}, {kinds}{rank}>"

    def save(
        self,
        path: str | Path,
        layout: Layout = "diffusers",
        *,
        metadata: Mapping[str, str] | None = None,
        force: bool = False,
    ) -> Path:
        """Write the adapter in a layout ("diffusers", "kohya", "peft", "comfy"); the file or folder that now holds it.

        It is there whole or not at all.  `metadata` is added to the adapter's own.  Raises DiffLoRAError for what is
        there already unless `force`, and for what the layout cannot hold.
        """
        from difflora.writing import save

        return save(self, path, layout, metadata=metadata, force=force)


@dataclass(frozen=True, eq=False, slots=True)
class Joint:
    """Where the rows of a whole fused module are in a model: ((component, path), start, stop, blocks of the whole)."""

    rows: int
    parts: tuple[tuple[tuple[str, str], int, int, tuple[tuple[int, int], ...]], ...]


@dataclass(frozen=True, eq=False, slots=True)
class Section:
    """A delta and the rows [start, stop) of one real parameter that it changes.

    `path` is its canonical name, `name` what the module calls the parameter.  `joint` is there where the delta is a
    function of more rows than its own, `wide` (columns) where it widens the input of the module.
    """

    path: str
    delta: Delta
    start: int
    stop: int
    name: str = "weight"
    joint: Joint | None = None
    wide: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class BoundAdapter:
    """An adapter matched to one model: component -> real path -> the sections that act on the parameter there."""

    adapter: Adapter
    sections: Mapping[str, Mapping[str, tuple[Section, ...]]]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did, or would do.

    `matched` and `unmatched` are `component.path` names of the file, `untouched` the modules of the model in the
    components that the file names, but which it does not change.  `kinds` counts deltas by kind, `ranks` lists the
    ranks met.  `partial` is true when part of the file has no module here.
    """

    name: str
    source: str
    layout: str
    family: str | None
    matched: tuple[str, ...]
    unmatched: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()
    kinds: Mapping[str, int] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def partial(self) -> bool:
        """Whether some modules of the file were not applied."""
        return bool(self.unmatched)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        ranks = (
            str(self.ranks[0]) if len(self.ranks) == 1 else f"{self.ranks[0]}..{self.ranks[-1]}" if self.ranks else "-"
        )
        lines = [
            f"{self.name}: {self.layout} layout, family {self.family or 'unknown'}, {kinds}, rank {ranks}",
            f"  matched {len(self.matched)}, unmatched {len(self.unmatched)}, untouched {len(self.untouched)}",
        ]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


@dataclass(frozen=True, slots=True)
class Strength:
    """How strongly one adapter acts: per component, and per block pattern within components.

    Weight of a module = weight of its component (`default` if not listed) x the weight of the longest pattern that
    matches it (1 if none does).  `patterns` are (component or "" for any, pattern, weight).
    """

    default: float = 1.0
    components: tuple[tuple[str, float], ...] = ()
    patterns: tuple[tuple[str, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Mix:
    """What one request asks for: adapters by name, each with its strength.  Hashable; the empty mix is the base."""

    items: tuple[tuple[str, Strength], ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Stack:
    """Everything that acts on one module: a: [R, in * kernel] (each distinct A once), and the parts that read it."""

    a: Tensor
    parts: tuple[Block, ...]
