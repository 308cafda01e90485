"""What is wrong with an adapter file, and what its reader should know: every key, every number, every claim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difflora.containers import Entry, Stored, contents, digest, legacy_digest, ordered
from difflora.deltas import LowRank, hidden
from difflora.formats.errors import DiffLoRAError, some
from difflora.functions import DoRA
from difflora.inspecting import inspect_adapter
from difflora.loading import load
from difflora.sources import locate

if TYPE_CHECKING:
    from difflora.inspecting import Inspection
    from difflora.types import Adapter

_EMPTY = "e3b0c442"  # what sd-scripts' legacy hash is of files that end before its bytes


@dataclass(frozen=True, slots=True)
class Verification:
    """What a check of a file found.

    `problems` make it another adapter than its maker meant, or none; `remarks` are facts worth knowing.  `tensors` and
    `modules` are how many are explained.
    """

    source: str
    layout: str | None
    family: str | None
    tensors: int
    modules: int
    problems: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON can hold it."""
        return {**asdict(self), "ok": self.ok}


def verify(source: str | Path, *, family: str | None = None, weight_name: str | None = None) -> Verification:
    """The check of a file, or of the weight file that a folder, a name or a Hub repository means.

    A file that cannot be read is a problem, not an error; DiffLoRAError only where there is none.
    """
    from difflora.sources import Hub

    file = locate(source, hub=Hub(weight_name)).file
    try:
        metadata, stored = contents(file)
        adapter = load(source, family=family, weight_name=weight_name)
    except DiffLoRAError as error:
        return Verification(str(file), None, None, 0, 0, (str(error),), ())
    found = inspect_adapter(adapter)
    problems = [*adapter.uneven, *_values(adapter, found), *_broken_claims(metadata, stored)]
    remarks = [*found.notes, *_scales(adapter, found), *_other_claims(metadata, stored)]
    count = sum(map(len, adapter.components.values()))
    return Verification(
        str(file), adapter.layout, adapter.family, len(stored), count, tuple(problems), tuple(dict.fromkeys(remarks))
    )


def _values(adapter: Adapter, found: Inspection) -> Iterator[str]:
    if found.bad:
        yield f"NaN or infinite values in {len(found.bad)} tensors: {some(found.bad)}"
    based = any(delta.needs_base for deltas in adapter.components.values() for delta in deltas.values())
    if found.norms and not based and not any(found.norms.values()):
        yield "the change of every module is zero: the adapter does nothing"


def _scales(adapter: Adapter, found: Inspection) -> Iterator[str]:
    """Alphas that switch modules off, turn their sign, or make them very strong."""
    odd: dict[str, list[str]] = {}
    for component, deltas in adapter.components.items():
        for path, delta in deltas.items():
            inner: Any = delta.inner if isinstance(delta, DoRA) else delta
            if hidden(inner.alpha) or not isinstance(inner, LowRank):
                continue
            what = "0: they change nothing" if inner.scale == 0 else "negative" if inner.scale < 0 else "above 64"
            if inner.scale <= 0 or inner.scale > 64:
                odd.setdefault(what, []).append(f"{component}.{path}")
    for what, names in odd.items():
        yield f"the scale alpha / rank of {len(names)} modules is {what} ({some(names)})"


def _broken_claims(metadata: Mapping[str, str], stored: Mapping[str, Stored]) -> Iterator[str]:
    """The trainer's hash of the tensors, if these are others, in whatever order they are stored."""
    claim = metadata.get("sshs_model_hash", "").strip().lower()
    if claim and claim not in {digest(entries) for entries in _orders(stored).values()}:
        yield "sshs_model_hash is not that of these tensors: they were changed, cast or renamed after training"


def _other_claims(metadata: Mapping[str, str], stored: Mapping[str, Stored]) -> Iterator[str]:
    """Claims that programs make in several ways, and which of them this file's is."""
    claim = metadata.get("modelspec.hash_sha256", "").strip().lower().removeprefix("0x")
    if claim:
        agreeing = [name for name, entries in _orders(stored).items() if digest(entries) == claim]
        how = f"that of the tensors {agreeing[0]}" if agreeing else "that of these tensors in no order that is known"
        yield f"modelspec.hash_sha256 is {how}"
    claim = metadata.get("sshs_legacy_hash", "").strip().lower()
    trained = {key: text for key, text in metadata.items() if key.startswith("ss_")}
    if claim and claim not in (_EMPTY, legacy_digest(_orders(stored)["as the library orders them"], trained)):
        yield "sshs_legacy_hash is not that of these tensors and ss_ metadata"


def _orders(stored: Mapping[str, Stored]) -> dict[str, dict[str, Entry]]:
    """The orders in which programs hash tensors: the file's own, the library's, that of the names."""
    entries = {key: Entry(one.dtype, one.shape, one.stop - one.start, one.chunks) for key, one in stored.items()}
    return {
        "as they are stored": entries,
        "as the library orders them": ordered(entries),
        "in the order of their names": dict(sorted(entries.items())),
    }
