"""The parts of a fused module as one delta again: what `rows` of a delta cuts, put together.

Parts that were cut from one delta give it back bit for bit.  Parts that were trained apart become the rows of one of a
higher rank, block by block, at the same scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from difflora.deltas import Cut, LowRank, chosen
from difflora.formats.errors import DiffLoRAError, some
from difflora.formats.rules import Rule
from difflora.functions import DoRA
from difflora.products import Hadamard
from difflora.weaving import Parts, Spans, alike, count, diagonal, may_lack, row_fields, summed, woven, woven_back

if TYPE_CHECKING:
    from difflora.kinds import Delta

# (path, columns) -> the number of rows, None if it is not known
Rows = Callable[[str, int], int | None]
_PAIRS = {LowRank: (("up", "down"),), Hadamard: (("w1_a", "w1_b"), ("w2_a", "w2_b"))}


def solid(delta: Delta) -> Delta:
    """The delta with the tensors of the rows that it means, and no others."""
    if isinstance(delta, LowRank) and delta.blocks:
        return replace(delta, up=chosen(delta.up, delta.blocks), blocks=())
    return replace(delta, inner=solid(delta.inner)) if isinstance(delta, DoRA) else delta


def joined(rule: Rule, parts: Parts, names: Sequence[str], rows: Rows, columns: int = 0) -> Delta:
    """The delta of the rule's source, whose sections `parts` are (None: a section that nothing changes).

    `rows` may know how many rows a missing section has; `columns` are the module's where no part says.  Raises
    DiffLoRAError, naming the modules, where a missing part's rows are not known, where rows do not add up, and where
    the kinds cannot be joined.
    """
    present = [solid(part) for part in parts if part is not None]
    if not rule.rows:
        return present[0]
    if len(present) == len(parts) and not any(row_fields(part) for part in present) and alike(present):
        return present[0]
    spans = _spans(rule, parts, names, rows, columns)
    if spans == ((),):
        return present[0]
    found = _rejoined([None if part is None else solid(part) for part in parts], spans)
    if found is None:
        raise DiffLoRAError(
            f"{some(names)} are one module there, and their changes ({some(sorted({p.kind for p in present}))}) cannot "
            "be one. Expected all the parts of one such change, or additive kinds; save with layout='diffusers'."
        )
    return found


def _spans(rule: Rule, parts: Parts, names: Sequence[str], rows: Rows, columns: int) -> Spans:
    """The rows of the source that each section has."""
    columns = next((p.shape[1] for p in parts if p is not None and len(p.shape) > 1), columns)
    known = [part.shape[0] for part in parts if part is not None]
    if len(known) < len(parts):
        known = _completed(rule, parts, names, rows, columns)
    spans = rule.spans(sum(known), columns)
    if spans is None or (spans != ((),) and [count(span) for span in spans] != known):
        raise DiffLoRAError(
            f"{some(names)} have {' + '.join(map(str, known))} rows, and the module that they are one of has "
            f"{' + '.join(map(str, rule.rows))}{f' with D = {columns}' if columns else ''}. The adapter does not fit."
        )
    return spans


def _completed(rule: Rule, parts: Parts, names: Sequence[str], rows: Rows, columns: int) -> list[int]:
    """The row count of every section, missing ones too; DiffLoRAError, naming these, if one is not known."""
    sizes = {row: part.shape[0] for row, part in zip(rule.rows, parts, strict=True) if part is not None}
    sizes = {"D": columns, **sizes} if columns else sizes
    known = [
        part.shape[0] if part is not None else sizes.get(row, row if isinstance(row, int) else rows(name, columns))
        for part, row, name in zip(parts, rule.rows, names, strict=True)
    ]
    lacking = [name for name, count in zip(names, known, strict=True) if count is None]
    if lacking:
        raise DiffLoRAError(
            f"{some(name for name, part in zip(names, parts, strict=True) if part is not None)} are one module with "
            f"{some(lacking)} there, which the adapter does not change and whose number of rows is not known. "
            "Save with layout='diffusers'."
        )
    return [count for count in known if count is not None]


def _rejoined(parts: Parts, spans: Spans) -> Delta | None:
    """One delta of all the rows; None where there is no exact one."""
    present = [part for part in parts if part is not None]
    complete = len(present) == len(parts)
    wholes = {id(part.whole): part.whole for part in present if isinstance(part, Cut)}
    if complete and len(wholes) == 1 and all(isinstance(part, Cut) for part in present):
        whole: Delta = wholes.popitem()[1]
        return whole if whole.shape[0] == sum(map(count, spans)) else None
    if alike(present) and (complete or may_lack(present[0], parts, spans)):
        return woven_back(parts, spans)
    if all(isinstance(part, DoRA) and not part.by_input for part in parts):
        inner = _rejoined([part.inner for part in present], spans)
        vectors = [part.magnitude.flatten() for part in present]
        return None if inner is None else DoRA(inner, woven(vectors, spans))
    if any(part.needs_base for part in present):
        return None
    for kind, pairs in _PAIRS.items():
        if all(isinstance(part, kind) and getattr(part, "mid", getattr(part, "t1", None)) is None for part in present):
            return diagonal(parts, spans, pairs)
    return summed(parts, spans)
