"""Merged mode: W + sum(s B A) written into the weights, always from the pristine base, which comes back bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from difflora.composing import stack
from difflora.formats.errors import DiffLoRAError
from difflora.kernels import reference

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.types import Section

Applied = tuple[tuple["Section", float], ...]
# A sample of a weight's elements tells a moved weight from a replaced one without reading all of it.
_SAMPLE = 4096
# What a model may have been cast to on the way.
_CASTS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float64)


@dataclass(eq=False, slots=True)
class Site:
    """One weight that is merged now: its pristine copy, what is in it, and how to recognise it after a move."""

    base: Tensor
    applied: Applied
    sample: Tensor
    witness: tuple[object, ...]


def merged(base: Tensor, applied: Applied) -> Tensor:
    """W + sum(s B A), rounded once to the dtype of `base`; deterministic for one device."""
    joined = stack(applied, base.device)
    return reference.merge(base, joined.a, joined.parts)


def checked(base: Tensor, applied: Applied, name: str) -> Tensor:
    """`merged`, or DiffLoRAError if a value of it is not finite where the base is."""
    value = merged(base, applied)
    if not bool(torch.isfinite(value).all()) and bool((torch.isfinite(base) & ~torch.isfinite(value)).any()):
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
    return weight.detach().flatten()[:: -(-weight.numel() // _SAMPLE)].to("cpu", copy=True)


def casts(before: Tensor, now: Tensor) -> tuple[torch.dtype, ...] | None:
    """The dtypes through which `before` becomes `now` bit for bit, () if it is `now`; None if no such path is known.

    A model may be cast there and back, or twice (bf16, then fp8 for storage), before anybody looks at it again.
    """
    paths = [(), (now.dtype,), *((through, now.dtype) for through in _CASTS)]
    return next((path for path in paths if _same(cast(before, path), now)), None)


def cast(tensor: Tensor, path: Sequence[torch.dtype]) -> Tensor:
    """The tensor, cast to one dtype after the other."""
    for dtype in path:
        tensor = tensor.to(dtype)
    return tensor


def _same(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN included."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


def witness(weight: Tensor) -> tuple[object, ...]:
    """Changes whenever a weight was moved, cast, replaced or written by someone else.

    Addresses alone are not enough: a cast there and back may land where it came from.  The weak reference frees the
    memory and keeps its name from being used again.
    """
    writes = None if weight.is_inference() else weight._version
    held = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
    return (id(weight), held, weight.data_ptr(), weight.dtype, weight.device, writes)
