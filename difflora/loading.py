"""From a source to an `Adapter`: the only reader of weight files.

Tensors come memory-mapped and stay as the file has them: raw alpha, own dtype, nothing multiplied or copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from difflora import peft_config
from difflora.deltas import LowRank, hidden, number, tensors
from difflora.formats.errors import DiffLoRAError, some
from difflora.formats.match import explain
from difflora.formats.rules import Entry
from difflora.kinds import build
from difflora.products import Kronecker
from difflora.sources import Hub, Place, component_folders, locate
from difflora.types import Adapter, Vectors

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.kinds import Delta
    from difflora.peft_config import Scaling

Source = str | Path | Mapping[str, "Tensor"]
Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
_unnamed = itertools.count()
# The kinds that a PEFT config scales.
_SCALED = frozenset(("lora", "lora_embedding", "lora_bias", "loha", "lokr"))
# PEFT's words for the kinds.
_TYPES = {"LORA": ("lora", "lora_embedding"), "LOHA": ("loha",), "LOKR": ("lokr",), "OFT": ("oft_v2",)}


@dataclass(frozen=True, eq=False, slots=True)
class Raw:
    """The tensors of a source as they are stored, and the PEFT configs beside them, by component ("": any)."""

    source: str
    name: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    configs: Mapping[str, str] = field(default_factory=dict)
    path: str | None = None


def load(
    source: Source,
    *,
    family: str | None = None,
    component: str | None = None,
    folders: Sequence[str | Path] = (),
    weight_name: str | None = None,
    subfolder: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    allow_pickle: bool = False,
) -> Adapter:
    """The adapter that `source` holds, without any model.

    `source`: a .safetensors file, a folder (PEFT, or one weight file), `user/repo`, `user/repo:file@revision`, a
    bundled name, a name in `folders`, or a state dict, which is not changed.  `family` settles an ambiguous file,
    `component` sends the denoiser's part to another component (`transformer_2`).  The rest are huggingface_hub's.
    Raises DiffLoRAError for anything that cannot be honoured.
    """
    hub = Hub(weight_name, subfolder, revision, token, cache_dir, local_files_only)
    return normalise(read(source, folders, hub, allow_pickle), family=family, component=component)


def read(source: Source, folders: Sequence[str | Path] = (), hub: Hub | None = None, allow_pickle: bool = False) -> Raw:
    """The tensors of `source`, memory-mapped where they come from a file, with its metadata and PEFT config."""
    if isinstance(source, Mapping):
        _check_state_dict(source)
        return Raw("the state dict", f"lora_{next(_unnamed)}", dict(source))
    parts = component_folders(source)
    if parts:
        return _folders(str(source), parts)
    place = locate(source, folders, hub, allow_pickle)
    configs = {"": _text(place.config)} if place.config else {}
    if place.file.suffix.lower() in (".safetensors", ".sft"):
        tensors, metadata = _safetensors(place.file)
    else:
        tensors, metadata = _pickled(place), {}
    return Raw(str(place.file), place.name, tensors, metadata, configs, str(place.file))


def _folders(source: str, parts: Mapping[str, Place]) -> Raw:
    """PEFT folders of several components as one adapter: each key names its component."""
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for component, place in parts.items():
        own, said = _safetensors(place.file)
        tensors |= {f"{component}.{key}": tensor for key, tensor in own.items()}
        metadata |= said
    configs = {component: _text(place.config) for component, place in parts.items() if place.config}
    return Raw(source, next(iter(parts.values())).name, tensors, metadata, configs)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise DiffLoRAError(f"{file} cannot be read ({error}).") from error


def _check_state_dict(source: Mapping[str, Tensor]) -> None:
    wrong = [f"{k!r}: {type(v).__name__}" for k, v in source.items() if not (isinstance(k, str) and _dense(v))]
    if wrong:
        raise DiffLoRAError(f"the state dict holds {some(wrong)}; expected names and plain dense tensors only.")
    if not source:
        raise DiffLoRAError("the state dict is empty; expected the tensors of an adapter.")


def _dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized


def _safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
            return tensors, dict(opened.metadata() or {})
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:300]
        raise DiffLoRAError(
            f"{file} cannot be read as safetensors ({reason}). "
            "It is damaged, incomplete or another kind of file; expected a whole .safetensors file."
        ) from error


def _pickled(place: Place) -> dict[str, Tensor]:
    try:
        value = torch.load(place.file, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever the file makes it raise
        raise DiffLoRAError(
            f"{place.file} cannot be read as tensors alone ({type(error).__name__}); expected a plain state dict."
        ) from error
    value = value.get("state_dict", value) if isinstance(value, dict) else value
    if not isinstance(value, dict) or not all(isinstance(k, str) and _dense(v) for k, v in value.items()):
        raise DiffLoRAError(f"{place.file} holds {type(value).__name__}; expected a plain state dict of tensors.")
    return value


def normalise(
    raw: Raw, *, model: Shapes | None = None, family: str | None = None, component: str | None = None
) -> Adapter:
    """The adapter in canonical layout.  `model` (component -> module path -> weight shape) is evidence."""
    if component and component.startswith("text_encoder"):
        raw = replace(raw, tensors={_of(component, key): tensor for key, tensor in raw.tensors.items()})
    shapes = {key: tuple(tensor.shape) for key, tensor in raw.tensors.items()}
    evidence = _renamed(model, component) if model and component else model
    found = explain(shapes, source=raw.source, metadata=raw.metadata, model=evidence, family=family)
    scales = (
        {where: peft_config.from_folder(text, raw.source) for where, text in raw.configs.items()}
        if raw.configs
        else peft_config.from_metadata(raw.metadata, raw.source)
    )
    _refuse_contradiction(scales, found.entries, raw.source)
    components: dict[str, dict[str, Delta]] = {}
    whole: dict[tuple[str, ...], Delta] = {}
    for entry in found.entries:
        keys = tuple(entry.keys.values())
        if keys not in whole:
            whole[keys] = _delta(entry, raw, scales)
        delta = whole[keys].rows(entry.rows) if entry.rows else whole[keys]
        components.setdefault(entry.component, {})[entry.path] = delta
    widens, notes = frozenset(found.widens), (*found.notes, *_remarks(found.entries, whole))
    if component is None and (expert := _expert(raw.name, components, model or {})):
        component, notes = expert, (*notes, f"for {expert}, as its name says low noise")
    if component and component not in components:
        components = _sent_to(components, component, raw.source)
        widens = frozenset((component, path) for _, path in widens)
    aliases = tuple(a for a in (raw.metadata.get("ss_output_name"),) if a and a != raw.name)
    vectors = tuple(Vectors(token, where, raw.tensors[key]) for token, where, key in found.vectors)
    return Adapter(
        raw.source, raw.name, found.layout, found.family, components, dict(raw.metadata), aliases, notes,
        raw.path, vectors, widens, found.uneven,
    )  # fmt: skip


def _of(component: str, key: str) -> str:
    """The key with its component, which PEFT does not write."""
    return f"{component}.{key}" if key.startswith(("base_model.model.", "peft_model.base_model.model.")) else key


def _remarks(entries: Sequence[Entry], whole: Mapping[tuple[str, ...], Delta]) -> Iterator[str]:
    """What a reader of the file should know about its scales, though they are read as they are."""
    idle = [keys[0] for keys, delta in whole.items() if isinstance(delta, Kronecker) and delta.idle_alpha]
    if idle:
        yield f"the alpha of {len(idle)} LoKr modules with whole factors means nothing: scale 1 ({some(idle)})"
    parts: dict[tuple[str, ...], list[tuple[tuple[int, int], ...]]] = {}
    for entry in entries:
        if entry.kind == "lora" and entry.rows:
            parts.setdefault(tuple(entry.keys.values()), []).append(entry.rows)
    others = {
        round(delta.scale, 6)
        for keys, delta in whole.items()
        if isinstance(delta, LowRank) and keys not in parts and not hidden(delta.alpha)
    }
    weak = [keys[0] for keys, rows in parts.items() if _alpha_of_one(whole[keys], rows, others)]
    if weak:
        yield (
            f"{len(weak)} fused modules have the factors of their parts side by side and the alpha of one part "
            f"({some(weak)}): applied as written, though they may be meant to act as many times as strongly"
        )


def _alpha_of_one(delta: Delta, parts: Sequence[tuple[tuple[int, int], ...]], others: set[float]) -> bool:
    """Whether `up` is block-diagonal and alpha was not raised with the rank, as one trainer saves split projections.

    `others` are the scales of the file's modules that are not fused; raised, the scale would be one of them.
    """
    if not isinstance(delta, LowRank) or delta.alpha is None or any(t.is_meta for t in tensors(delta)):
        return False
    count = len(parts)
    if count < 2 or delta.rank % count:
        return False
    if round(delta.scale * count, 6) not in others if others else number(delta.alpha) * count > delta.rank:
        return False
    step = delta.rank // count
    return all(
        not bool(delta.up[start:stop].flatten(1)[:, [r for r in range(delta.rank) if r // step != n]].any())
        for n, blocks in enumerate(sorted(parts))
        for start, stop in blocks
    )


def _delta(entry: Entry, raw: Raw, scales: Mapping[str, Scaling]) -> Delta:
    """The delta of an entry, over all the rows that the file has for it."""
    held = {role: raw.tensors[key] for role, key in entry.keys.items()}
    for role, tensor in held.items():
        if tensor.is_complex():
            raise DiffLoRAError(
                f"{raw.source}: {entry.keys[role]} is stored as {tensor.dtype}; expected floating-point numbers."
            )
    delta = build(entry.kind, held)
    scaling = scales.get(entry.component) or scales.get("")
    if scaling is None or "alpha" in held or entry.kind not in _SCALED:
        return delta
    first = next(iter(entry.keys.values()))
    stem = next((first.rsplit(mark, 1)[0] for mark in (".lora_", ".hada_", ".lokr_") if mark in first), first)
    alpha = scaling.alpha_of((entry.path.removesuffix(".bias"), stem), delta.rank, raw.source)
    return delta if alpha is None else build(entry.kind, held, alpha=alpha, rslora=scaling.rslora, rank=scaling.rank)


def _refuse_contradiction(scales: Mapping[str, Scaling], entries: Sequence[Entry], source: str) -> None:
    """DiffLoRAError for a config that speaks of tensors which the file does not hold."""
    biased = {(entry.component, entry.path) for entry in entries if entry.kind == "lora_bias"}
    for entry in entries:
        scaling = scales.get(entry.component) or scales.get("")
        if scaling is None or entry.kind == "lora_bias":
            continue
        plain = entry.kind in ("lora", "lora_embedding")
        if scaling.type and entry.kind not in _TYPES[scaling.type]:
            what = f"peft_type {scaling.type}, and the file has {entry.kind}"
        elif plain and scaling.dora and not {"magnitude", "dora_scale"} & entry.keys.keys():
            what = "use_dora (DoRA), and there is no lora_magnitude_vector"
        elif plain and scaling.bias and (entry.component, f"{entry.path}.bias") not in biased:
            what = "lora_bias, and there is no lora_B.bias"
        else:
            continue
        raise DiffLoRAError(
            f"{source}: the config sets {what} for {entry.path}. The config belongs to another file, or the file is "
            "incomplete."
        )


def _denoisers(components: Mapping[str, object]) -> list[str]:
    return [name for name in components if not name.startswith("text_encoder")]


def _expert(name: str, components: Mapping[str, object], model: Shapes) -> str | None:
    """The second expert (Wan 2.2), where the model has one and the file's name says that it is for it.

    Both experts have the same modules, and files do not say which is meant but by their names.
    """
    denoisers = _denoisers(components)
    words = "".join(letter if letter.isalnum() else " " for letter in name.lower()).split()
    low = not {"low", "lownoise"}.isdisjoint(words)
    second = f"{denoisers[0]}_2" if len(denoisers) == 1 else ""
    return second if low and "high" not in words and second in model else None


def _renamed(model: Shapes, component: str) -> Shapes:
    """The model as the file sees it: `component` stands where the file's own denoiser would be."""
    if component not in model:
        raise DiffLoRAError(f"component={component!r} is not in the pipeline; it has {some(model)}.")
    own = component.rsplit("_", 1)[0] if component.rsplit("_", 1)[-1].isdigit() else component
    others = {name: shapes for name, shapes in model.items() if name not in (own, component)}
    return {**others, own: model[component]}


def _sent_to(components: dict[str, dict[str, Delta]], target: str, source: str) -> dict[str, dict[str, Delta]]:
    denoisers = _denoisers(components)
    if len(denoisers) != 1:
        raise DiffLoRAError(
            f"{source}: component={target!r} needs a file with one denoiser part; this one has "
            f"{some(denoisers) or 'none'}."
        )
    return {target if name == denoisers[0] else name: deltas for name, deltas in components.items()}
