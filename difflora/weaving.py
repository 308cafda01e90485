"""Rows of deltas put back where they were cut from, and factors of different deltas side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from difflora.deltas import Dense, LowRank, number
from difflora.formats.rules import Span
from difflora.functions import IA3, DoRA, GLoRA, Replacement
from difflora.products import Hadamard, Kronecker
from difflora.rotations import InputRotation, OutputRotation

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.kinds import Delta

Spans = Sequence[Sequence[Span]]
# Parts of one module: deltas, None for a part that nothing changes.
Parts = Sequence[Any]
# Kinds whose tensors may be zero in rows that nothing changes.
_NEUTRAL = (LowRank, Hadamard, Kronecker, Dense, IA3, OutputRotation)


def count(span: Sequence[Span]) -> int:
    """The number of rows in blocks [start, stop)."""
    return sum(stop - start for start, stop in span)


def row_fields(delta: Any) -> Mapping[str, int]:
    """The tensors that `rows` cuts, and along which axis."""
    if isinstance(delta, Hadamard):
        return dict.fromkeys(("w1_a", "w2_a"), 0 if delta.t1 is None else 1)
    if isinstance(delta, Kronecker):
        return {"w1_a" if delta.w1 is None else "w1": 0}
    if isinstance(delta, GLoRA):
        return {"b2" if delta._pairs[0] is delta.a2 else "b1": 0}
    if isinstance(delta, IA3):
        return {} if bool(delta.on_input.item()) else {"weight": 0}
    if isinstance(delta, InputRotation):
        return {} if delta.magnitude is None or delta.by_input else {"magnitude": 0}
    fixed = {LowRank: ("up",), Dense: ("diff",), Replacement: ("value",), OutputRotation: ("blocks", "rescale")}
    return dict.fromkeys(fixed.get(type(delta), ()), 0)


def alike(parts: Sequence[Delta]) -> bool:
    """Whether the parts have in common, bit for bit, all that cutting rows leaves alone."""
    first = parts[0]
    rows = row_fields(first)
    return not isinstance(first, DoRA) and all(
        type(part) is type(first)
        and row_fields(part) == rows
        and all(_same(getattr(part, f.name), getattr(first, f.name)) for f in fields(part) if f.name not in rows)
        and all((getattr(part, name) is None) == (getattr(first, name) is None) for name in rows)
        for part in parts
    )


def _same(one: Any, two: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return bool(one == two) if not is_dataclass(one) else False
    if one is two:
        return True
    if one.numel() == two.numel() == 1:
        return number(one) == number(two)
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(one.contiguous().flatten().view(torch.uint8), two.contiguous().flatten().view(torch.uint8))


def may_lack(delta: Delta, parts: Parts, spans: Spans) -> bool:
    """Whether zeros in the rows of missing parts leave these as they are."""
    if not isinstance(delta, _NEUTRAL) or getattr(delta, "rescale", None) is not None:
        return False
    unit = max(delta.shape[0] // getattr(delta, name).shape[axis] for name, axis in row_fields(delta).items())
    return all(count(span) % unit == 0 for part, span in zip(parts, spans, strict=True) if part is None)


def woven_back(parts: Parts, spans: Spans) -> Delta:
    """The delta that parts were cut from, which are alike but for their rows."""
    first = next(part for part in parts if part is not None)
    changed: dict[str, Any] = {
        name: woven([None if part is None else _flat(getattr(part, name), first) for part in parts], spans, axis)
        for name, axis in row_fields(first).items()
        if getattr(first, name) is not None
    }
    whole: Delta = replace(first, **changed)
    return whole


def _flat(tensor: Tensor, delta: Delta) -> Tensor:
    """Vectors that files store in several shapes, as vectors."""
    return tensor.flatten() if isinstance(delta, IA3 | InputRotation) else tensor


def woven(tensors: Sequence[Tensor | None], spans: Spans, axis: int = 0) -> Tensor:
    """The rows of each part where its spans have them in the source; zeros for None."""
    pieces: list[tuple[int, Tensor]] = []
    like, unit = next((t, count(s) // t.shape[axis]) for t, s in zip(tensors, spans, strict=True) if t is not None)
    for tensor, span in zip(tensors, spans, strict=True):
        if tensor is None:
            size = [count(span) // unit if n == axis else size for n, size in enumerate(like.shape)]
            tensor = like.new_zeros(size)
        at = 0
        for start, stop in span:
            pieces.append((start, tensor.narrow(axis, at, (stop - start) // unit)))
            at += (stop - start) // unit
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda piece: piece[0])], dim=axis)


def diagonal(parts: Parts, spans: Spans, pairs: Sequence[tuple[str, str]]) -> Delta:
    """Factors of parts that were trained apart: inner sides stacked, outer sides block by block, ranks added.

    Alpha grows with the rank, so that alpha / rank stays; different scales go into the outer sides, in fp32.
    """
    present = [part for part in parts if part is not None]
    scales = {part.scale for part in present}
    first: Any = present[0]
    changed: dict[str, Any] = {}
    for n, (outer, inner) in enumerate(pairs):
        downs = [getattr(part, inner) for part in present]
        changed[inner] = torch.cat([down.reshape(-1, *downs[0].shape[1:]) for down in downs])
        fold = len(scales) > 1 and n == 0
        changed[outer] = woven(_padded(parts, outer, changed[inner].shape[0], fold), spans)
    rank = changed[pairs[0][1]].shape[0]
    own = {(None if part.alpha is None else number(part.alpha), part.rank) for part in present}
    alpha: float | None = None
    if len(scales) == 1 and first.alpha is not None:
        uniform = len(own) == 1 and not getattr(first, "rslora", False)
        alpha = number(first.alpha) * (rank // first.rank) if uniform else first.scale * rank
    if isinstance(first, LowRank):
        changed["rslora"] = False
    whole: Delta = replace(first, alpha=alpha, **changed)
    return whole


def _padded(parts: Parts, outer: str, rank: int, fold: bool) -> list[Tensor | None]:
    """The outer side of each part with zeros in the other parts' ranks."""
    found: list[Tensor | None] = []
    at = 0
    for part in parts:
        if part is None:
            found.append(None)
            continue
        own: Tensor = getattr(part, outer)
        own = own.float() * part.scale if fold else own
        wide = own.new_zeros(own.shape[0], rank, *own.shape[2:])
        wide.narrow(1, at, own.shape[1]).copy_(own)
        at += own.shape[1]
        found.append(wide)
    return found


def summed(parts: Parts, spans: Spans) -> Dense:
    """The change of all the rows as it is, of additive parts of any kinds."""
    first = next(part for part in parts if part is not None)
    whole = woven([None if part is None else part.dense().reshape(part.shape) for part in parts], spans)
    return Dense(whole.reshape(-1, *first.shape[1:]))
