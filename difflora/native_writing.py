"""Adapters under the names of their family's own code base, whose fused modules are one again."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from difflora.deltas import Dense
from difflora.formats.errors import DiffLoRAError, some
from difflora.formats.families import FAMILIES
from difflora.formats.layouts import EMBEDDINGS, ENCODERS
from difflora.formats.naming import home, natives
from difflora.formats.rules import Family, Network, outline
from difflora.joining import Rows, joined
from difflora.spelling import lycoris
from difflora.types import Adapter, Vectors

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.kinds import Delta

BIAS = ".bias"


def families_of(adapter: Adapter, why: str) -> list[Family]:
    """The adapter's families, several where nothing decides between them; DiffLoRAError if it has none."""
    names = (adapter.family or "").split("|")
    found = [family for family in FAMILIES if family.name in names]
    if not found:
        raise DiffLoRAError(
            f"{adapter.source} is of no known family, and {why}. Save with layout='diffusers', or load it with family=."
        )
    return found


def native(adapter: Adapter, layout: str) -> dict[str, Tensor]:
    """Key -> tensor in the `kohya` (flat) or `comfy` (dotted) layout; DiffLoRAError for what it has no word for."""
    family = _family(adapter, layout)
    tensors: dict[str, Tensor] = {}
    for component, deltas in adapter.components.items():
        found = home(family, component, layout)
        if found is None and deltas:
            raise DiffLoRAError(
                f"{adapter.source}: {layout} keys have no word for {component}. Save with layout='diffusers'; files "
                f"that do not say which expert they are for are written after load(..., component={family.denoiser!r})."
            )
        rows = functools.partial(_rows, family, component, deltas)
        for name, delta, norm in _modules(found[1], deltas, rows) if found else ():
            spelled = named(name, delta, found[0] if found else "", layout == "kohya", norm)
            twice = spelled.keys() & tensors.keys()
            if twice:
                raise DiffLoRAError(f"{adapter.source}: {layout} keys call two modules alike: {some(twice)}.")
            tensors |= spelled
    return tensors


def _family(adapter: Adapter, layout: str) -> Family:
    """The family whose names to use; DiffLoRAError where the names of those that remain differ."""
    families = families_of(adapter, f"layout={layout!r} has the names of a family's own code")
    spelled = {family.name: _spelled(family, adapter, layout) for family in families}
    if len(set(spelled.values())) > 1:
        raise DiffLoRAError(
            f"{adapter.source} fits {', '.join(spelled)}, whose {layout} names differ. Load it with family=, or save "
            "with layout='diffusers'."
        )
    return families[0]


def _spelled(family: Family, adapter: Adapter, layout: str) -> tuple[object, ...]:
    """What a family calls the components and modules of an adapter."""
    homes = ((home(family, component, layout), deltas) for component, deltas in adapter.components.items())
    return tuple(
        found and (found[0], *(one.name for one in natives(found[1], (path.removesuffix(BIAS) for path in deltas))))
        for found, deltas in homes
    )


def _rows(family: Family, component: str, deltas: Mapping[str, Delta], path: str, columns: int) -> int | None:
    """The number of rows of a module that nothing changes: that of the same one in another block, or as published."""
    wanted = outline(path)
    for other, delta in deltas.items():
        if outline(other)[0] == wanted[0] and delta.shape[1:2] == (columns,) and delta.shape[0]:
            return delta.shape[0]
    for (rows, width), _ in family.published.find(*outline(f"{component}.{path}")):
        if isinstance(rows, int) and width == columns:
            return rows
    return None


def named(name: str, delta: Delta, prefix: str, flat: bool = False, norm: bool = False) -> dict[str, Tensor]:
    """Key -> tensor of a delta in LyCORIS' words; `flat` is for underscores instead of dots, and norms' own endings."""
    bias = name.endswith(BIAS) and isinstance(delta, Dense)
    stem = name.removesuffix(BIAS) if bias else name
    stem = prefix + (stem.replace(".", "_") if flat else stem)
    return {f"{stem}.{ending}": tensor for ending, tensor in lycoris(delta, bias=bias, norms=flat and norm).items()}


def _modules(network: Network, deltas: Mapping[str, Delta], rows: Rows) -> Iterator[tuple[str, Delta, bool]]:
    """(native name, delta, whether it is of a norm) of every module, and of every bias under the name + `.bias`."""
    weights: dict[str, Delta] = {}
    for one in natives(network, (path for path in deltas if not path.endswith(BIAS))):
        weights[one.name] = joined(one.rule, [deltas.get(path) for path in one.sections], one.sections, rows)
        yield one.name, weights[one.name], _is_norm(weights[one.name])
    for one in natives(network, (path.removesuffix(BIAS) for path in deltas if path.endswith(BIAS))):
        weight, paths = weights.get(one.name), [path + BIAS for path in one.sections]
        columns = weight.shape[1] if weight is not None and len(weight.shape) > 1 else 0
        yield (
            one.name + BIAS,
            joined(one.rule, [deltas.get(path) for path in paths], paths, rows, columns),
            _is_norm(weight),
        )


def _is_norm(weight: Delta | None) -> bool:
    return isinstance(weight, Dense) and weight.diff.ndim == 1


def vector_key(adapter: Adapter, vectors: Vectors) -> str:
    """The key of textual-inversion vectors, by the name of the text encoder that reads them back."""
    encoders = families_of(adapter, "the words that it brings along need one")[0].encoders
    places = {place for encoder in encoders if encoder.component == vectors.component for place in encoder.places}
    endings = sorted(EMBEDDINGS, key=lambda ending: EMBEDDINGS[ending] not in ENCODERS)
    ending = next((ending for ending in endings if EMBEDDINGS[ending] in places), None)
    if ending is None:
        raise DiffLoRAError(f"{adapter.source}: no layout has a place for words of {vectors.component}.")
    return f"bundle_emb.{vectors.token}.{ending}"
