"""Adapter x model: canonical paths become real parameters and row ranges, with every shape checked.

Nothing here reads or writes a weight; it works on meta-device models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from difflora.deltas import Cut
from difflora.formats.errors import DiffLoRAError, some
from difflora.functions import DoRA
from difflora.targets import Target, components, fused_sites, modules, targets, unwrapped
from difflora.types import Adapter, BoundAdapter, Joint, LoadReport, Section

if TYPE_CHECKING:
    from torch import nn

    from difflora.kinds import Delta

# transformers 5 dropped this level from CLIPTextModel's module tree; files keep it.
_OPTIONAL_LEVEL = "text_model."


def bind(adapter: Adapter, target: Any) -> LoadReport:
    """What applying `adapter` to a pipeline or model would do; changes nothing.

    Unmatched modules are listed, not refused.  Raises DiffLoRAError if nothing matches or a shape does not fit.
    """
    return match(adapter, components(target, adapter), strict=False)[1]


@dataclass(eq=False, slots=True)
class _Matched:
    """What of an adapter was found in a model, and what does not fit there."""

    sections: dict[str, dict[str, list[Section]]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    ranks: set[int] = field(default_factory=set)


def match(adapter: Adapter, models: Mapping[str, nn.Module], strict: bool = True) -> tuple[BoundAdapter, LoadReport]:
    """The adapter bound to these components, and the report.

    Raises DiffLoRAError when no module matches, when a shape does not fit, or, if `strict`, when part of the file has
    no module here.
    """
    found = _Matched()
    untouched: list[str] = []
    for component, deltas in adapter.components.items():
        here = targets(models[component]) if component in models else {}
        first = _first_names(here)
        bound = found.sections.setdefault(component, {})
        for path, delta in deltas.items():
            _match_one(found, bound, here, first, (component, path), delta, adapter)
        changed = {id(here[real].module) for real in bound}
        own = modules(models[component]) if component in models else {}
        untouched += [f"{component}.{real}" for real, module in own.items() if id(module) not in changed]
    _refuse(adapter, models, found, strict)
    sections = _joined(
        {c: {real: tuple(p) for real, p in sites.items()} for c, sites in found.sections.items()}, adapter
    )
    _refuse_overlap(adapter, sections)
    report = LoadReport(
        adapter.name, adapter.source, adapter.layout, adapter.family, tuple(found.names), tuple(found.missing),
        tuple(untouched), dict(found.kinds), tuple(sorted(found.ranks)), adapter.notes,
    )  # fmt: skip
    return BoundAdapter(adapter, sections), report


def _match_one(
    found: _Matched, bound: dict[str, list[Section]], here: Mapping[str, Target], first: Mapping[str, str],
    place: tuple[str, str], delta: Delta, adapter: Adapter,
) -> None:  # fmt: skip
    name, path = ".".join(place), place[1]
    site = next(_resolve(path, here), None)
    if site is None:
        found.missing.append(name)
        return
    real, start, stop = site
    target = here[real]
    want = (stop - start, *target.shape[1:]) if target.shape else ()
    wider = place in adapter.widens and len(delta.shape) == len(want) > 1 and delta.shape[1] > want[1]
    wide = delta.shape[1] if wider else 0
    found.misfits += _misfit(name, delta, (want[0], wide, *want[2:]) if wide else want)
    bound.setdefault(first[real], []).append(Section(path, delta, start, stop, target.name, wide=wide))
    found.names.append(name)
    found.kinds[delta.kind] += 1
    if delta.rank:
        found.ranks.add(delta.rank)


def _first_names(here: Mapping[str, Target]) -> dict[str, str]:
    """Path -> the first path of the same parameter: tied modules are one site."""
    owner: dict[tuple[int, str], str] = {}
    return {
        path: owner.setdefault((id(target.module if target.held is None else target.held), target.name), path)
        for path, target in here.items()
    }


def _resolve(path: str, here: Mapping[str, Target]) -> Iterator[tuple[str, int, int]]:
    """(real path, first row, last row + 1) of what the path means here; nothing if the model has no such parameter."""
    for spelled in (path, path.removeprefix(_OPTIONAL_LEVEL), _OPTIONAL_LEVEL + path):
        yield from fused_sites(spelled, here)
        if spelled in here:
            shape = here[spelled].shape
            yield spelled, 0, shape[0] if shape else 0


def _misfit(name: str, delta: Delta, want: tuple[int, ...]) -> list[str]:
    """One line if the delta's shape is not the parameter's."""
    if delta.kind.endswith("oft_v2") and len(want) > 2:
        return [f"{name}: {delta.kind} of a convolution {list(want)}, which trainers mean differently"]
    whole = delta.whole if isinstance(delta, Cut) else delta
    if isinstance(whole, DoRA) and not (
        whole.sound and (not whole.by_input or want[1:2] == (whole.magnitude.numel(),))
    ):
        shapes = f"{whole.magnitude.numel()} magnitudes for {list(whole.shape)} in the file, {list(want)} in the model"
        return [f"{name}: {shapes}"]
    return [] if fits(delta.shape, want) else [f"{name}: {list(delta.shape)} in the file, {list(want)} in the model"]


def fits(have: tuple[int, ...], want: tuple[int, ...]) -> bool:
    """Whether a delta of this shape is one of a parameter of that shape.

    A 1x1 kernel and a linear layer are the same shape; some kinds keep a kernel flattened; 0 is a size left open.
    """
    have, want = _core(have), _core(want)
    if len(have) == 2 < len(want):
        want = (want[0], prod(want[1:]))
    return len(have) == len(want) and all(size in (0, other) for size, other in zip(have, want, strict=True))


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(out, in, 1, 1) -> (out, in)."""
    return shape[:2] if all(size == 1 for size in shape[2:]) else shape


def _joined(
    sections: Mapping[str, Mapping[str, tuple[Section, ...]]], adapter: Adapter
) -> dict[str, dict[str, tuple[Section, ...]]]:
    """The same sections, those that need the rows of a whole fused module knowing where these are.

    Raises DiffLoRAError where the model has not all of its rows.
    """
    wholes: dict[int, list[tuple[tuple[str, str], int, int, tuple[tuple[int, int], ...]]]] = {}
    for component, sites in sections.items():
        for real, parts in sites.items():
            for part in parts:
                if isinstance(part.delta, Cut) and part.delta.joined:
                    where = ((component, real), part.start, part.stop, tuple(part.delta.blocks))
                    wholes.setdefault(id(part.delta.whole), []).append(where)

    def known(part: Section) -> Section:
        if not isinstance(part.delta, Cut) or not part.delta.joined:
            return part
        rows = part.delta.whole.shape[0]
        held = wholes[id(part.delta.whole)]
        if sum(stop - start for *_, blocks in held for start, stop in blocks) != rows:
            raise DiffLoRAError(
                f"{adapter.source}: the {part.delta.kind} of {part.path} needs all {rows} rows of a fused module, and "
                "this model has only some of them. Nothing was changed."
            )
        return replace(part, joint=Joint(rows, tuple(held)))

    return {
        component: {real: tuple(map(known, parts)) for real, parts in sites.items()}
        for component, sites in sections.items()
    }


def _refuse(adapter: Adapter, models: Mapping[str, nn.Module], found: _Matched, strict: bool) -> None:
    what = f"{adapter.source} ({adapter.layout} layout, family {adapter.family or 'unknown'})"
    have = ", ".join(f"{name} ({type(unwrapped(model)).__name__})" for name, model in models.items())
    matched, missing = len(found.names), len(found.missing)
    if not matched:
        raise DiffLoRAError(
            f"{what}: none of its {missing} modules exists here, e.g. {some(found.missing)}. "
            f"The model has {have}; this adapter was made for another one."
        )
    if found.misfits or adapter.uneven:
        uneven = f" In the file itself {adapter.uneven[0]}." if adapter.uneven else ""
        raise DiffLoRAError(
            f"{what}: {len(found.misfits)} of {matched} modules have another shape here: "
            f"{'; '.join(found.misfits[:4])}. This adapter was made for another size of the model.{uneven}"
        )
    if missing and strict:
        raise DiffLoRAError(
            f"{what}: {missing} of its {matched + missing} modules do not exist here: "
            f"{some(found.missing)}. The model has {have}. Pass strict=False to apply the {matched} that do."
        )


def _refuse_overlap(adapter: Adapter, sections: Mapping[str, Mapping[str, tuple[Section, ...]]]) -> None:
    """Two names of one file that reach the same rows (tied modules) would be added twice."""
    for component, sites in sections.items():
        for real, parts in sites.items():
            ordered = sorted(parts, key=lambda part: part.start)
            for one, two in pairwise(ordered):
                if two.start < one.stop:
                    raise DiffLoRAError(
                        f"{adapter.source}: {one.path} and {two.path} are the same weight ({component}.{real}) here; "
                        "expected one of them."
                    )
