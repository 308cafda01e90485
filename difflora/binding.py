"""Adapter x model: canonical paths become real modules and row ranges, with every shape checked.

Nothing here reads or writes a weight; it works on meta-device models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import nn

from difflora.formats.errors import DiffLoRAError, some
from difflora.types import Adapter, BoundAdapter, LoadReport, Section

if TYPE_CHECKING:
    from difflora.deltas import Delta

# What diffusers calls the projections that `fuse_qkv_projections` joins, and the parts in the order of their rows.
_FUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
# transformers 5 dropped this level from CLIPTextModel's module tree; files keep it.
_OPTIONAL_LEVEL = "text_model."
CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside a torch.compile wrapper, or the module itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> module for all that a delta can act on (linear, convolution, embedding), inside compile wrappers too."""
    found = dict(unwrapped(model).named_modules(remove_duplicate=False))
    return {
        path.replace("_orig_mod.", ""): unwrapped(module)
        for path, module in found.items()
        if weight_shape(unwrapped(module)) is not None
        and not path.endswith("_orig_mod")
        and not _left_behind(path, found)
    }


def _left_behind(path: str, found: Mapping[str, nn.Module]) -> bool:
    """Whether this is a fused projection that its attention computes with no longer.

    `unfuse_qkv_projections` of a UNet puts the processors back and leaves the joined layers where they are.
    """
    parent, _, leaf = path.rpartition(".")
    if leaf not in _FUSED or not all(f"{parent}.{part}" in found for part in _FUSED[leaf]):
        return False
    attention = found[parent]
    processor = type(getattr(attention, "processor", None)).__name__
    return not hasattr(attention, "unfuse_projections") and "Fused" not in processor


def fused_over(path: str, here: Mapping[str, nn.Module]) -> str | None:
    """The fused projection that the model computes with instead of this module, which is still there."""
    return next((real for real, _, _ in _fused_sites(path, here)), None) if path in here else None


def weight_shape(module: nn.Module) -> tuple[int, ...] | None:
    """The shape of the weight as the module declares it (a packed one has another), None for other modules."""
    if isinstance(module, nn.Linear):
        return (module.out_features, module.in_features)
    if isinstance(module, CONV):
        return (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
    if isinstance(module, nn.Embedding):
        return (module.num_embeddings, module.embedding_dim)
    return None


def shapes(models: Mapping[str, nn.Module]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Component -> module path -> weight shape: what the formats code takes as evidence."""
    return {name: {p: weight_shape(m) or () for p, m in modules(model).items()} for name, model in models.items()}


def components(target: Any, adapter: Adapter | None = None) -> dict[str, nn.Module]:
    """The components of a pipeline, or {component: model} for a bare model that stands for the adapter's denoiser."""
    if isinstance(target, nn.Module):
        names = list(adapter.components) if adapter else []
        denoisers = [n for n in names if not n.startswith("text_encoder")] or names
        if len(denoisers) != 1:
            raise DiffLoRAError(
                f"a bare model takes one component of a file; this one has {some(names)}. Pass a pipeline."
            )
        return {denoisers[0]: target}
    held = getattr(target, "components", None)
    if not isinstance(held, Mapping):
        raise DiffLoRAError(f"{type(target).__name__} is neither a diffusers pipeline nor a torch module.")
    return {name: part for name, part in held.items() if isinstance(part, nn.Module)}


def bind(adapter: Adapter, target: Any) -> LoadReport:
    """What applying `adapter` to a pipeline or model would do; changes nothing.

    Unmatched modules are listed, not refused.  Raises DiffLoRAError if nothing matches or a shape does not fit.
    """
    return match(adapter, components(target, adapter), strict=False)[1]


def match(adapter: Adapter, models: Mapping[str, nn.Module], strict: bool = True) -> tuple[BoundAdapter, LoadReport]:
    """The adapter bound to these components, and the report.

    Raises DiffLoRAError when no module matches, when a shape does not fit, or, if `strict`, when part of the file has
    no module here.
    """
    sections: dict[str, dict[str, tuple[Section, ...]]] = {}
    matched: list[str] = []
    unmatched: list[str] = []
    untouched: list[str] = []
    kinds: Counter[str] = Counter()
    ranks: set[int] = set()
    misfits: list[str] = []
    for component, deltas in adapter.components.items():
        here = modules(models[component]) if component in models else {}
        first = _first_names(here)
        bound: dict[str, list[Section]] = {}
        for path, delta in deltas.items():
            site = _resolve(path, delta, here)
            if site is None:
                unmatched.append(f"{component}.{path}")
                continue
            real, start, stop = site
            misfits += _misfit(f"{component}.{path}", delta, here[real], start, stop)
            bound.setdefault(first[real], []).append(Section(path, delta, start, stop))
            matched.append(f"{component}.{path}")
            kinds[delta.kind] += 1
            ranks.add(delta.rank)
        sections[component] = {real: tuple(parts) for real, parts in bound.items()}
        untouched += [f"{component}.{real}" for real in here if first[real] not in bound]
    _refuse(adapter, models, matched, unmatched, misfits, strict)
    _refuse_overlap(adapter, sections)
    report = LoadReport(
        adapter.name, adapter.source, adapter.layout, adapter.family, tuple(matched), tuple(unmatched),
        tuple(untouched), dict(kinds), tuple(sorted(ranks)), adapter.notes,
    )  # fmt: skip
    return BoundAdapter(adapter, sections), report


def _first_names(here: Mapping[str, nn.Module]) -> dict[str, str]:
    """Path -> the first path of the same weight: tied modules are one site."""
    owner: dict[int, str] = {}
    return {path: owner.setdefault(id(module._parameters.get("weight")), path) for path, module in here.items()}


def _resolve(path: str, delta: Delta, here: Mapping[str, nn.Module]) -> tuple[str, int, int] | None:
    """(real path, first row, last row + 1), or None if the model has no such module."""
    for spelled in (path, path.removeprefix(_OPTIONAL_LEVEL), _OPTIONAL_LEVEL + path):
        for real, start, stop in _fused_sites(spelled, here):
            return real, start, stop
        if spelled in here:
            return spelled, 0, (weight_shape(here[spelled]) or (0,))[0]
    return None


def _fused_sites(path: str, here: Mapping[str, nn.Module]) -> Iterator[tuple[str, int, int]]:
    """The rows of a fused projection that `path` is, while the model computes with the fused one."""
    parent, _, leaf = path.rpartition(".")
    for fused, parts in _FUSED.items():
        real = f"{parent}.{fused}"
        if leaf in parts and real in here and (path not in here or _computes_fused(here[path], here[real])):
            total = (weight_shape(here[real]) or (0,))[0]
            widths = [_width(f"{parent}.{part}", here, total // len(parts)) for part in parts]
            start = sum(widths[: parts.index(leaf)])
            if sum(widths) == total:
                yield real, start, start + widths[parts.index(leaf)]


def _computes_fused(part: nn.Module, fused: nn.Module) -> bool:
    """diffusers keeps the parts beside the fused projection and then computes with the fused one alone."""
    return part is not fused


def _width(path: str, here: Mapping[str, nn.Module], otherwise: int) -> int:
    shape = weight_shape(here[path]) if path in here else None
    return shape[0] if shape else otherwise


def _misfit(name: str, delta: Delta, module: nn.Module, start: int, stop: int) -> list[str]:
    """One line if the delta's shape is not the module's; a 1x1 kernel and a linear layer are the same shape."""
    have = weight_shape(module) or ()
    want = (stop - start, *have[1:])
    return (
        []
        if _core(delta.shape) == _core(want)
        else [f"{name}: {list(delta.shape)} in the file, {list(want)} in the model"]
    )


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(out, in, 1, 1) -> (out, in)."""
    return shape[:2] if all(size == 1 for size in shape[2:]) else shape


def _refuse(
    adapter: Adapter, models: Mapping[str, nn.Module], matched: list[str], unmatched: list[str], misfits: list[str],
    strict: bool,
) -> None:  # fmt: skip
    what = f"{adapter.source} ({adapter.layout} layout, family {adapter.family or 'unknown'})"
    have = ", ".join(f"{name} ({type(unwrapped(model)).__name__})" for name, model in models.items())
    if not matched:
        raise DiffLoRAError(
            f"{what}: none of its {len(unmatched)} modules exists here, e.g. {some(unmatched)}. "
            f"The model has {have}; this adapter was made for another one."
        )
    if misfits:
        raise DiffLoRAError(
            f"{what}: {len(misfits)} of {len(matched)} modules have another shape here: {'; '.join(misfits[:4])}. "
            "This adapter was made for another size of the model."
        )
    if unmatched and strict:
        raise DiffLoRAError(
            f"{what}: {len(unmatched)} of its {len(matched) + len(unmatched)} modules do not exist here: "
            f"{some(unmatched)}. The model has {have}. Pass strict=False to apply the {len(matched)} that do."
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
