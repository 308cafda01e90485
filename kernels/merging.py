"""Merging by one Triton kernel over a table of every weight of a switch: W' = round(base + sum(s * b a)), in place.

Floors on an H200 for the 23.7 GB of FLUX.1-dev's block weights: 11.1 ms (each is read from its base and written once,
at 4.26 TB/s); at rank 64 the products are 1.5 TFLOP, 2 ms beside it.  What grows with the rank is the factors' way
through the L2 cache, so a program keeps its rows of b while it walks along the columns.

Factors are used as they are stored; products of fp32 factors take three passes of tf32.  Everything is deterministic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_CODES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# The ranks of one product; a longer part goes on in a loop.
_DEEPEST = 64


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Rows [start, stop) get scale * b @ a.  a: [r, cols], b: [stop - start, r], contiguous rows, on the device."""

    a: Tensor
    b: Tensor
    start: int
    stop: int
    scale: float


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """One weight, written in place: [rows, ...], contiguous; `base` is its pristine copy on the same device."""

    weight: Tensor
    base: Tensor
    parts: tuple[Part, ...]


@triton.jit
def merge_kernel(
    jobs, parts, scales, owners, flags, sums,
    W: tl.constexpr, F: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    STAGES: tl.constexpr, SHORT: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of rows of one weight.

    jobs: int64 [jobs, 6], the addresses of the weight and its base, rows, columns, first part, number of parts.  parts:
    int64 [parts, 6], the addresses of a and b, rank, rows [start, stop), the distance of b's rows.  owners: int32
    [programs, 2], the job and the block of rows of each program.
    """
    program = tl.program_id(0)
    job = tl.load(owners + program * 2)
    top = tl.load(owners + program * 2 + 1) * BM
    mine = jobs + job * 6
    weight = tl.load(mine).to(tl.pointer_type(W))
    base = tl.load(mine + 1).to(tl.pointer_type(W))
    rows = tl.load(mine + 2).to(tl.int32)
    cols = tl.load(mine + 3).to(tl.int32)
    if EVEN:
        # What comes from a table tells the compiler nothing: without this, every number is a load of its own.
        weight, base, cols = tl.multiple_of(weight, 16), tl.multiple_of(base, 16), cols // 16 * 16
    first = tl.load(mine + 4)
    count = tl.load(mine + 5)
    m = top + tl.arange(0, BM)
    here = m < rows
    line = m.to(tl.int64) * cols
    part = parts + first * 6
    a = tl.load(part).to(tl.pointer_type(F))
    if EVEN:
        a = tl.multiple_of(a, 16)
    b = tl.load(part + 1).to(tl.pointer_type(F))
    rank = tl.load(part + 2)
    start = tl.load(part + 3)
    stop = tl.load(part + 4)
    pitch = tl.load(part + 5)
    scale = tl.load(scales + first)
    r = tl.arange(0, BR)
    inside = (m >= start) & (m < stop)
    kept = tl.load(b + (m - start)[:, None] * pitch + r[None, :], inside[:, None] & (r < rank)[None, :], 0.0)
    bad = tl.zeros((BM,), tl.int32)
    total = tl.zeros((BM,), tl.int32)
    for step in tl.range(0, tl.cdiv(cols, BN), num_stages=STAGES):
        n = step * BN + tl.arange(0, BN)
        mask = here[:, None] & (n < cols)[None, :]
        before = tl.load(base + line[:, None] + n[None, :], mask, 0.0)
        across = tl.load(a + r[:, None] * cols + n[None, :], (r < rank)[:, None] & (n < cols)[None, :], 0.0)
        change = tl.dot(kept, across, input_precision=PRECISION) * scale
        if not SHORT:
            for at in range(BR, rank, BR):
                more = at + r
                bs = tl.load(
                    b + (m - start)[:, None] * pitch + more[None, :], inside[:, None] & (more < rank)[None, :], 0.0
                )
                rs = tl.load(a + more[:, None] * cols + n[None, :], (more < rank)[:, None] & (n < cols)[None, :], 0.0)
                change += tl.dot(bs, rs, input_precision=PRECISION) * scale
            for number in range(1, count):
                other = part + number * 6
                oa = tl.load(other).to(tl.pointer_type(F))
                if EVEN:
                    oa = tl.multiple_of(oa, 16)
                ob = tl.load(other + 1).to(tl.pointer_type(F))
                orank = tl.load(other + 2)
                ostart = tl.load(other + 3)
                ostop = tl.load(other + 4)
                opitch = tl.load(other + 5)
                oscale = tl.load(scales + first + number)
                within = (m >= ostart) & (m < ostop)
                for at in range(0, orank, BR):
                    more = at + r
                    bs = tl.load(
                        ob + (m - ostart)[:, None] * opitch + more[None, :],
                        within[:, None] & (more < orank)[None, :], 0.0,
                    )  # fmt: skip
                    rs = tl.load(
                        oa + more[:, None] * cols + n[None, :], (more < orank)[:, None] & (n < cols)[None, :], 0.0
                    )
                    change += tl.dot(bs, rs, input_precision=PRECISION) * oscale
        after = (before.to(tl.float32) + change).to(W)
        tl.store(weight + line[:, None] + n[None, :], after, mask)
        wild = (after.to(tl.float32) - after.to(tl.float32)) != 0.0
        was = (before.to(tl.float32) - before.to(tl.float32)) != 0.0
        bad = tl.maximum(bad, tl.max((wild & ~was & mask).to(tl.int32), 1))
        mark = (m[:, None] * 73856093) ^ (n[None, :] * 19349663) | 1
        bits = before.to(BITS, bitcast=True).to(tl.int32)
        total ^= tl.xor_sum(tl.where(mask, bits * mark, 0), 1)
    tl.atomic_max(flags + job, tl.max(bad, 0))
    tl.atomic_xor(sums + job, tl.xor_sum(total, 0))


@dataclass(frozen=True, eq=False, slots=True)
class Told:
    """For each job: whether a value is not finite where the base is, and `checksum` of the base: int32 [jobs]."""

    flags: Tensor
    sums: Tensor


def merge(
    jobs: Sequence[Job], config: tuple[int, ...] = (), launched: Callable[[Callable[[], Any]], Any] = lambda run: run()
) -> Told:
    """Merge every job; the flags and sums are on the device, in the order of the jobs.

    Weights are bf16, fp16 or fp32 on one device, factors any of these; jobs have at least one part.  `config` overrides
    (rows, columns, ranks, stages, warps) of the tiles; `launched` is given each launch, to run it.
    """
    device = jobs[0].weight.device
    flags, sums = torch.zeros(2, len(jobs), dtype=torch.int32, device=device)
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, job in enumerate(jobs):
        groups.setdefault(_kind(job), []).append(number)
    for numbers in groups.values():
        own, found = _launch([jobs[number] for number in numbers], config, launched)
        places = torch.tensor(numbers, device=device)
        flags[places], sums[places] = own, found
    return Told(flags, sums)


def _kind(job: Job) -> tuple[object, ...]:
    """What one launch has in common: dtypes, whether 16 bytes can be read at once, few ranks."""
    return (job.weight.dtype, _factor(job), _even(job), _short(job))


def _factor(job: Job) -> torch.dtype:
    """The dtype that a job's factors are multiplied in: their own, fp32 where they differ."""
    (first, *others) = {part.a.dtype for part in job.parts} | {part.b.dtype for part in job.parts}
    return torch.float32 if others or first not in _CODES else first


def _even(job: Job) -> bool:
    tensors = (job.weight, job.base, *(part.a for part in job.parts))
    return job.weight[0].numel() % 16 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _short(job: Job) -> bool:
    return len(job.parts) == 1 and job.parts[0].a.shape[0] <= _DEEPEST


def _launch(
    jobs: Sequence[Job], config: tuple[int, ...], launched: Callable[[Callable[[], Any]], Any]
) -> tuple[Tensor, Tensor]:
    weight, factor = jobs[0].weight, _factor(jobs[0])
    jobs = [replace(job, parts=tuple(_in(part, factor) for part in job.parts)) for job in jobs]
    most = max(part.a.shape[0] for job in jobs for part in job.parts)
    high, wide, deep, stages, warps = config or _config(weight.element_size(), factor.itemsize, most, _short(jobs[0]))
    table, parts, scales, owners = _tables(jobs, high, weight.device)
    flags, sums = torch.zeros(2, len(jobs), dtype=torch.int32, device=weight.device)
    launch = functools.partial(
        merge_kernel[(owners.shape[0],)], table, parts, scales, owners, flags, sums,
        W=_CODES[weight.dtype], F=_CODES[factor], BITS=tl.int32 if weight.element_size() == 4 else tl.int16,
        BM=high, BN=wide, BR=deep, STAGES=stages, SHORT=_short(jobs[0]) and most <= deep, EVEN=_even(jobs[0]),
        PRECISION="tf32x3" if factor == torch.float32 and torch.version.hip is None else "ieee", num_warps=warps,
    )  # fmt: skip
    launched(launch)
    return flags, sums


def _in(part: Part, dtype: torch.dtype) -> Part:
    a, b = part.a.to(dtype), part.b.to(dtype)
    return part if a is part.a and b is part.b else replace(part, a=a, b=b)


def _config(size: int, factor: int, most: int, short: bool) -> tuple[int, ...]:
    deep = max(16, min(_DEEPEST, int(triton.next_power_of_2(most))))
    if factor == 4 or size == 4:
        return 64, 64, min(deep, 32), 2, 4
    # Beyond one product a tile, larger ones run out of registers.
    return (128, 64, deep, 2, 4) if short else (64, 64, deep, 2, 4)


def _tables(jobs: Sequence[Job], high: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows: list[list[int]] = []
    parts: list[list[int]] = []
    scales: list[float] = []
    owners: list[Any] = []
    for number, job in enumerate(jobs):
        height = job.weight.shape[0]
        cols = job.weight.numel() // height
        rows.append([job.weight.data_ptr(), job.base.data_ptr(), height, cols, len(parts), len(job.parts)])
        for part in job.parts:
            pitch = part.b.stride(0)
            parts.append([part.a.data_ptr(), part.b.data_ptr(), part.a.shape[0], part.start, part.stop, pitch])
            scales.append(part.scale)
        blocks = torch.arange(-(-height // high), dtype=torch.int32)
        owners.append(torch.stack([torch.full_like(blocks, number), blocks], 1))
    made = (
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(parts, dtype=torch.int64),
        torch.tensor(scales, dtype=torch.float32),
        torch.cat(owners),
    )
    one, two, three, four = (table.to(device) for table in made)
    return one, two, three, four


def checksum(base: Tensor) -> int:
    """What the kernel finds for an untouched base: the exclusive or of its bits times an odd hash of their place."""
    flat = base.detach().reshape(base.shape[0], -1).cpu()
    bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.int16).to(torch.int64)
    m = torch.arange(flat.shape[0])[:, None] * 73856093
    n = torch.arange(flat.shape[1])[None, :] * 19349663
    products = (bits * (_wrapped(_wrapped(m) ^ _wrapped(n)) | 1)).numpy()
    return int(_wrapped(torch.tensor(int(np.bitwise_xor.reduce(products, axis=None)))))


def _wrapped(value: Tensor) -> Tensor:
    return (value + 2**31) % 2**32 - 2**31
