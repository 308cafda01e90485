"""What is loaded, as `pipe.loras` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from difflora import factors
from difflora.runtime import Engine, Loaded
from difflora.types import Strength

_HEAD = ("name", "weight", "layout", "family", "components", "modules", "rank", "MB", "device", "mode")


@dataclass(frozen=True, slots=True)
class LoraState:
    """One loaded adapter: what it is, and how it acts now (`weight` is None while it is inactive).

    `mode` is "merged", "kernel", "merged+kernel", "fused" (whatever the active set is), or "-" while it does not act.
    """

    name: str
    weight: Any
    layout: str
    family: str | None
    components: tuple[str, ...]
    modules: int
    ranks: tuple[int, ...]
    bytes: int
    device: str
    mode: str
    source: str


class LoraTable(tuple[LoraState, ...]):
    """The loaded adapters in loading order; prints as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "no adapters loaded"
        rows = [_HEAD, *map(_row, self)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def table(engine: Engine) -> LoraTable:
    """The adapters of an engine, with their weights in the active set."""
    with engine.lock:
        active = {name: _shown(given) for name, given in engine.active.items}
        fused = {one.name: one.held for held in engine.fused.values() for one in held}
        loaded = engine.loaded.items()
        return LoraTable(_state(name, held, active.get(name), _mode(engine, name, fused)) for name, held in loaded)


def _mode(engine: Engine, name: str, fused: Mapping[str, Loaded]) -> str:
    return "fused" if fused.get(name) is engine.loaded[name] else engine.acting(name)


def _row(state: LoraState) -> tuple[str, ...]:
    weight = "-" if state.weight is None else str(state.weight)
    rank = "..".join(str(r) for r in sorted({state.ranks[0], state.ranks[-1]})) if state.ranks else "-"
    # A name may be any string; a table row is one line.
    name = state.name if state.name.isprintable() and state.name.strip() else repr(state.name)
    return (
        name, weight, state.layout, state.family or "-", ",".join(state.components), str(state.modules), rank,
        f"{state.bytes / 1e6:.2f}", state.device, state.mode,
    )  # fmt: skip


def _shown(given: Strength) -> Any:
    if not given.components and not given.patterns:
        return given.default
    return {**dict(given.components), **{f"{c}.{p}" if c else p: w for c, p, w in given.patterns}}


def _state(name: str, held: Loaded, weight: Any, mode: str) -> LoraState:
    report = held.report
    tensors = factors.tensors(held.bound)
    return LoraState(
        name,
        weight,
        report.layout,
        report.family,
        tuple(component for component, sites in held.bound.sections.items() if sites),
        len(report.matched),
        report.ranks,
        sum(t.numel() * t.element_size() for t in tensors),
        # A lone number such as alpha stays in host memory.
        ",".join(sorted({str(t.device) for t in tensors if t.numel() > 1})),
        mode,
        report.source,
    )
