"""Merged mode: W + sum(s B A) written into the weights, always from the pristine base, which comes back bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from difflora.composing import stack
from difflora.formats.errors import DiffLoRAError

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.types import Section, Stack

Applied = tuple[tuple["Section", float], ...]
# A sample of a weight's elements tells a moved weight from a replaced one without reading all of it.
_SAMPLE = 4096


@dataclass(eq=False, slots=True)
class Site:
    """One weight that is merged now: its pristine copy, what is in it, and how to recognise it after a move."""

    base: Tensor
    applied: Applied
    sample: Tensor
    witness: tuple[object, ...]


def delta(joined: Stack, rows: int) -> Tensor:
    """sum(s B A) in fp32: [rows, in * kernel]."""
    total = torch.zeros(rows, joined.a.shape[1], dtype=torch.float32, device=joined.a.device)
    for part in joined.parts:
        total[part.start : part.stop].addmm_(part.b, joined.a[part.first : part.last], alpha=part.scale)
    return total


def merged(base: Tensor, applied: Applied) -> Tensor:
    """W + sum(s B A), rounded once to the dtype of `base`; deterministic for one device."""
    joined = stack(applied, base.device)
    return (base.flatten(1).float() + delta(joined, base.shape[0])).to(base.dtype).view(base.shape)


def checked(base: Tensor, applied: Applied, name: str) -> Tensor:
    """`merged`, or DiffLoRAError if a value of it is not finite where the base is."""
    value = merged(base, applied)
    if not bool(torch.isfinite(value).all()) and bool(torch.isfinite(base).all()):
        raise DiffLoRAError(
            f"merging {name} gives values that are not finite in {base.dtype}; the weights are as they were. "
            "Lower the weight, or use mode='kernel'."
        )
    return value


def write(targets: Sequence[Tensor], value: Tensor) -> None:
    """Copy `value` into every tensor in place: addresses, hooks and compiled code stay valid."""
    with torch.inference_mode(targets[0].is_inference()), torch.no_grad():
        for target in targets:
            target.copy_(value)


def keep(weight: Tensor) -> Tensor:
    """A pristine copy of a weight: on its device while memory is plentiful, else in host memory."""
    if weight.is_cuda:
        free, total = torch.cuda.mem_get_info(weight.device)
        if free - weight.numel() * weight.element_size() < total // 4:
            return weight.detach().to("cpu", copy=True)
    return weight.detach().clone()


def sample(weight: Tensor) -> Tensor:
    """Up to 4096 evenly spaced elements of a weight, in host memory."""
    flat = weight.detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE].to("cpu", copy=True)


def same(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits, NaN included."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


def witness(weight: Tensor) -> tuple[object, ...]:
    """Changes whenever a weight was moved, cast, replaced or written by someone else."""
    return (id(weight), weight.data_ptr(), weight.dtype, weight.device, weight._version)
