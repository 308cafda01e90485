"""Merged mode: W + sum(s B A) written into the weights, always from the pristine base, which comes back bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from difflora.composing import full_scale, stack
from difflora.deltas import LowRank
from difflora.formats.errors import DiffLoRAError
from difflora.kernels import ops, reference
from difflora.widening import Widened

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.kernels import merging
    from difflora.kinds import Delta
    from difflora.types import Joint, Section

Applied = tuple[tuple["Section", float], ...]
# A sample of a weight's elements tells a moved weight from a replaced one without reading all of it.
_SAMPLE = 4096
_KERNEL = (torch.bfloat16, torch.float16, torch.float32)
# What a model may have been cast to on the way.
_CASTS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float64)


@dataclass(eq=False, slots=True)
class Site:
    """One weight that is merged now: its pristine copy, what is in it, and how to recognise it after a move.

    `checksum` is what the kernel found of the copy when it was made.
    """

    base: Tensor
    applied: Applied
    sample: Tensor
    witness: tuple[object, ...]
    widened: Widened | None = None
    checksum: int | None = None


def merged(base: Tensor, applied: Applied, joint: Callable[[Joint], Tensor] | None = None) -> Tensor:
    """W + sum(s D), rounded once to the dtype of `base`; deterministic for one device.

    Each D is that of the pristine base, so the order of the adapters changes nothing.  `joint` gives the base of a
    whole fused module to the deltas that are functions of it.
    """
    low = [(section, weight) for section, weight in applied if _plain(section.delta, base)]
    others = [(section, weight) for section, weight in applied if not _plain(section.delta, base)]
    more = torch.zeros(base.shape, dtype=torch.float32, device=base.device) if others else None
    for section, weight in others:
        assert more is not None
        here = more[section.start : section.stop]
        if _narrow(section.delta, base):
            here = here[:, : section.delta.shape[1]]
        here += weight * _dense(base, section, joint).reshape(here.shape)
    joined = stack(low, base.device) if low else None
    return reference.merge(base, joined.a if joined else None, joined.parts if joined else (), more)


def _dense(base: Tensor, section: Section, joint: Callable[[Joint], Tensor] | None) -> Tensor:
    if not section.delta.needs_base:
        return section.delta.dense().to(base.device)
    if section.joint is not None and joint is not None:
        return section.delta.dense(joint(section.joint)).to(base.device)
    own = base[section.start : section.stop].float()
    return section.delta.dense(own[:, : section.delta.shape[1]] if _narrow(section.delta, base) else own)


def _plain(delta: Delta, base: Tensor) -> bool:
    return isinstance(delta, LowRank) and not _narrow(delta, base)


def _narrow(delta: Delta, base: Tensor) -> bool:
    """Whether the delta is for fewer columns than the base has, which another adapter has widened."""
    return base.ndim > 1 and len(delta.shape) > 1 and 0 < delta.shape[1] < base.shape[1]


def checked(base: Tensor, applied: Applied, name: str, joint: Callable[[Joint], Tensor] | None = None) -> Tensor:
    """`merged`, or DiffLoRAError if a value of it is not finite where the base is."""
    value = merged(base, applied, joint)
    if not bool(torch.isfinite(value).all()) and bool((torch.isfinite(base) & ~torch.isfinite(value)).any()):
        raise not_finite(name, base.dtype)
    return value


def not_finite(name: str, dtype: torch.dtype) -> DiffLoRAError:
    return DiffLoRAError(
        f"merging {name} gives values that are not finite in {dtype}; the weights are as they were. "
        "Lower the weight, or use mode='kernel'."
    )


def job(weight: Tensor, base: Tensor, applied: Applied) -> merging.Job | None:
    """The same as one job of the kernel; None for what it has no form for: other kinds, devices and dtypes."""
    from difflora.kernels import merging

    flat = (base.shape[0], base.numel() // base.shape[0]) if base.ndim > 1 and base.numel() else (0, 0)
    there = weight.is_contiguous() and base.is_contiguous() and base.device == weight.device
    if not there or weight.dtype not in _KERNEL or not ops.kernels_for(weight.device):
        return None
    parts: list[merging.Part] = []
    for section, strength in applied:
        delta = section.delta
        if not isinstance(delta, LowRank) or delta.mid is not None or delta.down.flatten(1).shape[1] != flat[1]:
            return None
        scale = full_scale(section, strength)
        a, row = delta.down.flatten(1).contiguous().to(weight.device), section.start
        for start, stop in delta.blocks or ((0, int(delta.up.shape[0])),):
            b = delta.up[start:stop].flatten(1).to(weight.device)
            parts.append(merging.Part(a, b if b.stride(1) == 1 else b.contiguous(), row, row + stop - start, scale))
            row += stop - start
    return merging.Job(weight, base, tuple(parts))


def samples(weights: Sequence[Tensor]) -> list[Tensor]:
    """`sample` of several weights on one device, in one copy for each dtype."""
    found: dict[int, Tensor] = {}
    for dtype in {weight.dtype for weight in weights}:
        mine = [n for n, weight in enumerate(weights) if weight.dtype == dtype]
        taken = [_elements(weights[n]) for n in mine]
        found.update(zip(mine, torch.split(torch.cat(taken).cpu(), [len(part) for part in taken]), strict=True))
    return [found[n].clone() for n in range(len(weights))]


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
    return _elements(weight).to("cpu", copy=True)


def _elements(weight: Tensor) -> Tensor:
    return weight.detach().flatten()[:: -(-weight.numel() // _SAMPLE)]


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
