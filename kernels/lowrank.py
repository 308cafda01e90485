"""Kernel mode's Triton kernels, for batches with several sets of adapters and for captured graphs.

t = x A^T, and y += (t * scale) B^T in place.  Floors on an H200 (4.26 TB/s), M = 4608, K = N = 3072, r = 64,
microseconds: t 6.7 (x is read once; less from L2), y += 13.3 (y is read and written once).  docs/performance.md says
what was tried.

Ranks come in blocks of 16; `reference` says what the numbers of an entry are.  The rows of an input are those of S
samples in equal runs.  A tile belongs to one sample, whose request says what acts on it: what is absent is neither
read nor multiplied, and a sample without adapters costs one table look-up a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(samples, rows, pid, TILE: tl.constexpr):
    """(request, first row of the tile, end of the sample's rows); past the last sample the end is 0."""
    count = tl.load(samples)
    each = rows // count
    tiles = tl.cdiv(each, TILE)
    sample = pid // tiles
    first = sample * each + (pid % tiles) * TILE
    request = tl.load(samples + 1 + tl.minimum(sample, count - 1))
    return request, first, tl.where(sample < count, (sample + 1) * each, 0)


@triton.jit
def shrink(
    x, a, t, ids, counts, samples, rows, cols, x_stride, blocks, ranks,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """t[m, j] = x[m] . a[j] for the ranks j that the row's request has: [rows, ranks], the others are not written."""
    request, first, stop = _tile(samples, rows, tl.program_id(0), BM)
    active = tl.load(counts + request) * 16
    start = tl.program_id(1) * BR
    if (first < stop) & (start < active):
        slot = start + tl.arange(0, BR)
        have = slot < active
        rank = tl.load(ids + request * blocks + slot // 16, mask=have, other=0) * 16 + slot % 16
        m = first + tl.arange(0, BM)
        here = m < stop
        total = tl.zeros((BM, BR), tl.float32)
        for step in tl.range(0, tl.cdiv(cols, BK), num_stages=STAGES):
            k = step * BK + tl.arange(0, BK)
            inside = k < cols
            xs = tl.load(x + m[:, None].to(tl.int64) * x_stride + k[None, :], here[:, None] & inside[None, :], 0.0)
            lines = tl.load(a + rank[None, :] * cols + k[:, None], have[None, :] & inside[:, None], 0.0)
            total = tl.dot(xs, lines, total, input_precision=PRECISION)
        out = t + m[:, None].to(tl.int64) * ranks + rank[None, :]
        tl.store(out, total.to(t.dtype.element_ty), here[:, None] & have[None, :])


@triton.jit
def _chunk(t, b, entry, at, m, here, n, first, last, ranks, BR: tl.constexpr):
    """(t [rows, BR], b [BR, cols]) of ranks [at, at + BR) of one entry; zeros where it has none, or other rows."""
    column = tl.load(entry)
    place = tl.load(entry + 1)
    # Every b begins where its address and its first row agree modulo 8, and is zero up to the next such rows: bounds
    # that are multiples of 8 and 16 let loads be 16 bytes wide.
    start = tl.load(entry + 2) // 8 * 8
    stop = (tl.load(entry + 3) + 7) // 8 * 8
    stride = tl.load(entry + 4)
    rank = tl.load(entry + 5) // 16 * 16
    rank = tl.where((start < last) & (stop > first), rank, rank * 0)
    r = at + tl.arange(0, BR)
    ts = tl.load(
        t + m[:, None].to(tl.int64) * ranks + column * 16 + r[None, :], here[:, None] & (r < rank)[None, :], 0.0
    )
    inside = ((n >= start) & (n < stop))[None, :] & (r < rank)[:, None]
    bs = tl.load(b + place * 8 + r[:, None] * (stride * 8) + n[None, :], inside, 0.0)
    return ts, bs


@triton.jit
def _add(total, ts, bs, scale, PRECISION: tl.constexpr):
    return tl.dot((ts.to(tl.float32) * scale).to(bs.dtype), bs, total, input_precision=PRECISION)


@triton.jit
def _rest(
    total,
    t,
    b,
    entries,
    scales,
    count,
    begin,
    m,
    here,
    n,
    first,
    last,
    ranks,
    BR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """total + (t * scale) b^T over the entries of one request, but for the first `begin` ranks of the first one."""
    for number in range(count):
        entry = entries + number * 6
        start = tl.load(entry + 2)
        stop = tl.load(entry + 3)
        if (start < last) & (stop > first):
            scale = tl.load(scales + number)
            for at in range(tl.where(number == 0, begin, 0), tl.load(entry + 5), BR):
                ts, bs = _chunk(t, b, entry, at, m, here, n, first, last, ranks, BR)
                total = _add(total, ts, bs, scale, PRECISION)
    return total


@triton.jit
def expand(
    y, t, b, entries, scales, counts, samples, rows, cols, y_stride, parts, ranks,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    SINGLE: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y += (t * scale) b^T in place, summed in fp32: [rows, cols].

    SINGLE: there is but request 0.  SHORT: there is but one entry of at most BR ranks.  What need not be looked up is
    not waited for: a tile takes little longer than a journey to memory and back.
    """
    if SINGLE:
        request = 0
        first = tl.program_id(1) * BM
        stop = rows
    else:
        request, first, stop = _tile(samples, rows, tl.program_id(1), BM)
    mine, weights = entries + request * parts * 6, scales + request * parts
    count = tl.load(counts + request)
    m = first + tl.arange(0, BM)
    here = (m < stop) & (count > 0)
    scale = tl.load(weights)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        left = (tl.program_id(0) * TILES + tile) * BN
        n = left + tl.arange(0, BN)
        out = y + m[:, None].to(tl.int64) * y_stride + n[None, :]
        mask = here[:, None] & (n < cols)[None, :]
        before = tl.load(out, mask, 0.0)
        ts, bs = _chunk(t, b, mine, 0, m, here, n, left, left + BN, ranks, BR)
        total = _add(before.to(tl.float32), ts, bs, scale, PRECISION)
        if not SHORT:
            total = _rest(total, t, b, mine, weights, count, BR, m, here, n, left, left + BN, ranks, BR, PRECISION)
        tl.store(out, total.to(y.dtype.element_ty), mask)
