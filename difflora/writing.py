"""Adapters written to files, in the layouts that other programs read.

What a layout cannot hold is refused by name before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from difflora import deltas as algebra
from difflora.claims import CONFIG, alphas_noted, alphas_restored, kept, rehashed
from difflora.containers import entry as stored
from difflora.containers import ordered, write
from difflora.deltas import Cut, Dense
from difflora.drafts import check_free, placed
from difflora.formats.errors import DiffLoRAError, some
from difflora.formats.evidence import FAMILY
from difflora.formats.match import explain
from difflora.functions import Replacement
from difflora.joining import solid
from difflora.native_writing import BIAS, named, native, vector_key
from difflora.peft_writing import lora_config, lora_tensors, loras, whole
from difflora.types import Adapter

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.kinds import Delta

Layout = Literal["diffusers", "kohya", "peft", "comfy"]


@dataclass(frozen=True, eq=False, slots=True)
class Content:
    """What one file holds: tensors, metadata, and the PEFT config beside it."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    config: Mapping[str, Any] | None = None


def save(
    adapter: Adapter,
    path: str | Path,
    layout: Layout = "diffusers",
    *,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
) -> Path:
    """The file (`peft`: the folder) that now holds the adapter; it is there whole or not at all.

    `metadata` is added to the adapter's own.  Raises DiffLoRAError for what is there already unless `force`, for meta
    tensors, and for kinds, components and names that the layout cannot hold.
    """
    target = Path(path)
    files = planned(adapter, target, layout, metadata, force)
    with placed(target, force) as draft:
        if layout != "peft":
            _write(draft, files[""])
            return target
        for name, file in files.items():
            (draft / name).mkdir(parents=True, exist_ok=True)
            _write(draft / name / "adapter_model.safetensors", file)
            text = json.dumps(file.config, indent=2, sort_keys=True)
            (draft / name / "adapter_config.json").write_text(f"{text}\n", encoding="utf-8")
    return target


def planned(
    adapter: Adapter, path: Path, layout: Layout, metadata: Mapping[str, str] | None = None, force: bool = False
) -> dict[str, Content]:
    """What `save` would write there, by folder, with its errors; nothing is written."""
    if (layout == "peft") == (path.suffix == ".safetensors"):
        expected = "the name of a folder" if layout == "peft" else "a name that ends in .safetensors"
        raise DiffLoRAError(f"{path} has the suffix {path.suffix!r}; the {layout} layout takes {expected}.")
    check_free(path, force)
    return contents(adapter, layout, metadata)


def _write(path: Path, file: Content) -> None:
    write(path, ordered({key: stored(tensor) for key, tensor in file.tensors.items()}), file.metadata)


def state_dict(adapter: Adapter, layout: Layout = "diffusers") -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) as `save` writes them; the errors are those of `save`.

    DiffLoRAError too for `peft` with several components, which are as many files.
    """
    files = contents(adapter, layout)
    if len(files) > 1:
        raise DiffLoRAError(f"{adapter.source} makes {len(files)} PEFT folders ({some(files)}); use save.")
    (file,) = files.values()
    return dict(file.tensors), dict(file.metadata)


def contents(adapter: Adapter, layout: Layout, metadata: Mapping[str, str] | None = None) -> dict[str, Content]:
    """Folder -> file of the adapter in a layout: one file in "", PEFT's several components each in its own folder."""
    _check(adapter, layout)
    header = kept(adapter.metadata, metadata)
    if layout == "peft":
        return _peft(adapter, alphas_noted(header, (delta for _, _, delta in _each(adapter))))
    tensors, config = _diffusers(adapter) if layout == "diffusers" else (native(adapter, layout), {})
    tensors |= {vector_key(adapter, vectors): vectors.tensor for vectors in adapter.vectors}
    if config:
        header = alphas_noted(header, (delta for _, _, delta in _each(adapter)))
        header[CONFIG] = json.dumps(config, indent=2, sort_keys=True)
    else:
        tensors, header = alphas_restored(tensors, header)
    _check_names(adapter, tensors, layout)
    header |= _family_noted(adapter, tensors, header)
    return {"": Content(tensors, rehashed(tensors, header))}


def _family_noted(adapter: Adapter, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> dict[str, str]:
    """The family as a field of the header, where a reader without a model could not tell it otherwise."""
    if adapter.family is None:
        return {}
    try:
        read = explain({key: tuple(tensor.shape) for key, tensor in tensors.items()}, metadata=header)
    except DiffLoRAError:
        return {FAMILY: adapter.family}
    return {} if read.family == adapter.family else {FAMILY: adapter.family}


def _each(adapter: Adapter) -> Iterator[tuple[str, str, Delta]]:
    for component, modules in adapter.components.items():
        for path, delta in modules.items():
            yield component, path, delta


def _check(adapter: Adapter, layout: Layout) -> None:
    source = adapter.source
    if layout not in get_args(Layout):
        raise DiffLoRAError(f"layout={layout!r} is not known; expected one of {', '.join(get_args(Layout))}.")
    if adapter.uneven:
        raise DiffLoRAError(f"{source}: {adapter.uneven[0]}. The file is damaged.")
    if not any(adapter.components.values()) and not adapter.vectors:
        raise DiffLoRAError(f"{source} changes nothing; there is nothing to save.")
    for component, path, delta in _each(adapter):
        if any(tensor.is_meta for tensor in algebra.tensors(delta)):
            raise DiffLoRAError(f"{source}: {component}.{path} has no values (meta tensors); load the real file.")
        if isinstance(delta, Replacement) and path.endswith(BIAS):
            raise DiffLoRAError(f"{source}: no layout has a word for the replaced bias {component}.{path}.")


def _check_names(adapter: Adapter, tensors: Mapping[str, Tensor], layout: str) -> None:
    """DiffLoRAError if the keys would not be read as the modules that they were written for."""
    if adapter.family is None:
        return
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    read = explain(shapes, source=f"{adapter.source} as {layout}", family=adapter.family)
    wanted = {(component, path) for component, path, _ in _each(adapter)}
    places = {(entry.component, entry.path): tuple(entry.keys.values()) for entry in read.entries}
    # A fused module has zeros for the parts that the adapter does not change.
    beside = {keys for place, keys in places.items() if place in wanted}
    wrong = {*(wanted - places.keys()), *(place for place in places.keys() - wanted if places[place] not in beside)}
    if wrong or read.uneven:
        unnamed = some(".".join(place) for place in sorted(wrong))
        raise DiffLoRAError(
            f"{adapter.source}: the {layout} layout has no name of its own for {unnamed}{'; '.join(read.uneven)}. "
            "Save with layout='diffusers'."
        )


def _apart(adapter: Adapter, component: str, layout: str) -> dict[str, Delta]:
    """The deltas of a component as modules of their own, each with the tensors of its rows."""
    found: dict[str, Delta] = {}
    for path, delta in adapter.components[component].items():
        if isinstance(delta, Cut) and delta.needs_base:
            raise DiffLoRAError(
                f"{adapter.source}: {component}.{path} is rows of a {delta.kind} that is a function of a whole fused "
                f"module, and the {layout} layout has only its parts. Save with layout='kohya' or 'comfy'."
            )
        found[path] = Dense(delta.dense()) if isinstance(delta, Cut) else solid(delta)
    return found


def _peft(adapter: Adapter, metadata: Mapping[str, str]) -> dict[str, Content]:
    if adapter.vectors:
        raise DiffLoRAError(f"{adapter.source}: a PEFT folder cannot hold the words that the file brings along.")
    found: dict[str, Content] = {}
    for component in (name for name, modules in adapter.components.items() if modules):
        tensors, config = whole(_apart(adapter, component, "peft"), component)
        tensors = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
        found[component] = Content(tensors, rehashed(tensors, metadata), config)
    return {"": next(iter(found.values()))} if len(found) == 1 else found


def _diffusers(adapter: Adapter) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, config fields by component): pairs without alphas, which are in the config; other kinds as LyCORIS."""
    tensors: dict[str, Tensor] = {}
    config: dict[str, Any] = {}
    for component in adapter.components:
        deltas = _apart(adapter, component, "diffusers")
        pairs = loras(deltas)
        tensors |= {f"{component}.{name}": tensor for name, tensor in lora_tensors(pairs).items()}
        for path, delta in deltas.items():
            tensors |= {} if path in pairs else named(path, delta, f"{component}.")
        if pairs:
            config |= {f"{component}.{name}": value for name, value in lora_config(pairs, component).items()}
    return tensors, config
