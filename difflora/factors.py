"""The engine's own copies of an adapter's factors: checked, one copy per tensor, on the device of their modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from difflora import deltas
from difflora.deltas import mapped
from difflora.formats.errors import DiffLoRAError
from difflora.types import BoundAdapter, Section, Vectors

if TYPE_CHECKING:
    from torch import Tensor, nn

_HOST = torch.device("cpu")


def home(module: nn.Module) -> torch.device:
    """Where factors for this module belong: with a weight on an accelerator, else in host memory."""
    weight = module._parameters.get("weight")
    return weight.device if weight is not None and weight.device.type not in ("meta", "cpu") else _HOST


@torch.inference_mode(False)
def own(
    bound: BoundAdapter, modules: Mapping[str, Mapping[str, nn.Module]], device: torch.device | None = None
) -> BoundAdapter:
    """The same sections on copies of the factors; on `device`, or each at its module's `home`.

    A file may be rewritten or deleted while its adapter is loaded, and a caller may change the state dict it passed, so
    the tensors given are not kept.  The copies are ordinary tensors under `torch.inference_mode` too.  Raises
    DiffLoRAError for NaN, infinite or meta tensors.
    """
    copies: dict[tuple[int, torch.device], Tensor] = {}

    def copied(tensor: Tensor, path: str, place: torch.device) -> Tensor:
        key = id(tensor), place
        if key not in copies:
            copies[key] = _checked(tensor, place, f"{bound.adapter.source}: {path}")
        return copies[key]

    def section(part: Section, component: str, real: str) -> Section:
        path = f"{component}.{part.path}"
        place = device or home(modules[component][real])
        # Single numbers (alpha, flags) are read by the host.
        return replace(part, delta=mapped(part.delta, lambda t: copied(t, path, place if t.numel() > 1 else _HOST)))

    sections = {
        component: {real: tuple(section(p, component, real) for p in parts) for real, parts in sites.items()}
        for component, sites in bound.sections.items()
    }
    return replace(bound, sections=sections)


def own_vectors(vectors: Vectors, source: str) -> Vectors:
    """The engine's own copy of textual-inversion vectors, in host memory; DiffLoRAError as for factors."""
    return replace(vectors, tensor=_checked(vectors.tensor, _HOST, f"{source}: the vectors of {vectors.token!r}"))


def _checked(tensor: Tensor, place: torch.device, what: str) -> Tensor:
    if tensor.is_meta:
        raise DiffLoRAError(f"{what} has no values (meta tensors); load the real file.")
    # Whole numbers are codes of a quantised file without their scales; half of a complex number would be lost.
    if tensor.is_complex() or (tensor.numel() > 1 and not tensor.is_floating_point()):
        raise DiffLoRAError(f"{what} is stored as {tensor.dtype}; expected floating-point numbers.")
    copy = tensor.detach().to(place, copy=True)
    # isfinite has no fp8 kernel
    if not bool(torch.isfinite(copy.float() if copy.element_size() == 1 else copy).all()):
        raise DiffLoRAError(
            f"{what} holds NaN or infinite values; the file is damaged or its training diverged. Nothing was changed."
        )
    return copy


def tensors(bound: BoundAdapter) -> tuple[Tensor, ...]:
    """Every distinct tensor that the sections hold."""
    held = (
        tensor
        for sites in bound.sections.values()
        for parts in sites.values()
        for part in parts
        for tensor in deltas.tensors(part.delta)
    )
    return tuple({id(tensor): tensor for tensor in held}.values())
