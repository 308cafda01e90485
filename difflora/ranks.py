"""The tables that kernel mode reads: which ranks of which adapters act on a module, for each request, at what scale.

Everything lies in tensors whose addresses never change while an `Arena` lives, so that compiled code and captured
graphs follow every change of adapters, ranks and strengths.  Ranks come in blocks of 16; a smaller rank is filled up
with zeros.  Changing strengths rewrites the tables of the whole model in one copy each, and no factor.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from difflora.formats.errors import DiffLoRAError
from difflora.kernels import facts
from difflora.kernels.ops import operations
from difflora.kernels.reference import ENTRY, RANKS

if TYPE_CHECKING:
    from torch import Tensor

# The terms of one module, of each request of a batch.
Sets = Sequence[Sequence["Part"]]


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Rows [start, stop) of a module's output get scale * b a x, where `source.low_rank()` is (a [r, in], b [rows, r]).

    `key` is the tensors that a is made of: terms with the same ones share it.
    """

    source: Source
    key: tuple[Tensor, ...]
    rank: int
    start: int
    stop: int
    scale: float

    @property
    def a(self) -> Hashable:
        """Equal for equal a's.  The tensors are in it, so that nobody else gets their ids while this is kept."""
        return tuple((id(tensor), tensor) for tensor in self.key)

    @property
    def b(self) -> Hashable:
        """Equal for equal b's of one module."""
        return id(self.source), self.source, self.start

    @property
    def blocks(self) -> int:
        """How many blocks of 16 ranks it takes."""
        return -(-self.rank // RANKS)


class Source(Protocol):
    """What has a low-rank form: a delta."""

    def low_rank(self) -> tuple[Tensor, Tensor] | None:
        """(a, b), before any scale."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A module of `rows` outputs and `cols` inputs; modules of one `bank` are called with the same input, mostly."""

    bank: Hashable
    rows: int
    cols: int
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False, slots=True)
class Bank:
    """The a's of modules that read one input: a [16 * blocks, in], ids [requests, blocks], counts [requests].

    The first `height` blocks of a are in use.

    `seen` is an input, `version` how often it had been written to, `t` its product with a, which the modules share, and
    `left` how many of the `members` have still to take it.
    """

    a: Tensor
    ids: Tensor
    counts: Tensor
    members: int = 1
    held: tuple[Hashable, ...] = ()
    height: int = 0
    seen: Tensor | None = None
    version: int = 0
    t: Tensor | None = None
    left: int = 0

    def product(self, x: Tensor, samples: Tensor) -> Tensor:
        """x a^T: [rows, ranks]; made once for siblings that are called with one and the same input, one after another.

        Keyed by the input's identity: compilers see through this while they trace, so no cache is left in their graphs.
        """
        traced = torch.compiler.is_compiling()
        # Nobody can tell whether an inference tensor was written to in between.
        if self.members == 1 or (not traced and x.is_inference()):
            return self._shrunk(x, samples)
        version = 0 if traced else x._version
        t = self.t
        if t is None or self.seen is not x or self.version != version:
            t = self._shrunk(x, samples)
            self.seen, self.version, self.t, self.left = x, version, t, self.members
        self.left -= 1
        if self.left == 0:
            self.seen = self.t = None
        return t

    def _shrunk(self, x: Tensor, samples: Tensor) -> Tensor:
        t: Tensor = operations().shrink(x, self.a, self.ids, self.counts, samples)
        return t


@dataclass(eq=False, slots=True)
class Site:
    """The b's of one module, packed, and its entries: `kernels.reference` says what the numbers are."""

    bank: Bank
    rows: int
    b: Tensor
    entries: Tensor
    scales: Tensor
    counts: Tensor
    samples: Tensor
    held: tuple[Hashable, ...] = ()
    busy: bool = False


@dataclass(eq=False, slots=True)
class _Tables:
    """One table of every bank or site on the device, and its host copy."""

    here: Tensor
    there: Tensor
    # `here` as numpy sees it: one number is written in a tenth of the time.
    numbers: Any

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> _Tables:
        host = torch.zeros(*shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
        return cls(host, torch.zeros(*shape, dtype=dtype, device=device), host.numpy())


@dataclass(eq=False, slots=True, weakref_slot=True)
class Arena:
    """Room for `blocks` blocks of ranks on each of a model's modules, for `requests` different sets in a batch."""

    blocks: int
    requests: int
    shapes: dict[Hashable, Shape]
    samples: Tensor
    banks: dict[Hashable, Bank] = field(default_factory=dict)
    sites: dict[Hashable, Site] = field(default_factory=dict)
    tables: dict[str, _Tables] = field(default_factory=dict)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    # Where the scales of each entry's ranks begin in its table of vectors: (module, request, entry) -> index.
    steps: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def spread(self, requests: Sequence[int]) -> None:
        """The rows of every input are runs of equal length, one for each of these requests, in order."""
        if not 0 < len(requests) < self.samples.numel():
            raise DiffLoRAError(
                f"a batch of {len(requests)} rows with different adapters was given; room was reserved for "
                f"{self.samples.numel() - 1}. Use smaller batches."
            )
        self.samples[: 1 + len(requests)].copy_(torch.tensor([len(requests), *requests], dtype=torch.int32))
        facts.tell_rows(self.samples, requests)
        self.forget()

    def addresses(self) -> list[int]:
        """Where the tables are that `facts` was told of."""
        told = [self.samples, *(bank.ids for bank in self.banks.values())]
        told += [site.entries for site in self.sites.values()]
        return [table.data_ptr() for table in told]

    def holds(self, shapes: Mapping[Hashable, Shape], blocks: int) -> bool:
        """Whether there is room for so many blocks of ranks on these modules, as they are now."""
        return blocks <= self.blocks and all(self.shapes.get(name) == shape for name, shape in shapes.items())

    def forget(self) -> None:
        """Let go of the inputs that siblings share; their products are of other adapters."""
        for bank in self.banks.values():
            bank.seen = bank.t = None

    def fill(self, wanted: Mapping[Hashable, Sets]) -> None:
        """Make these terms act, and no others.  DiffLoRAError, before any change, if they do not fit."""
        members: dict[Hashable, dict[Hashable, Part]] = {}
        grouped: dict[Hashable, dict[Hashable, Sets]] = {}
        for name, sets in wanted.items():
            bank = self.shapes[name].bank
            grouped.setdefault(bank, {})[name] = sets
            members.setdefault(bank, {}).update({part.a: part for one in sets for part in one})
        self._check(wanted, members)
        for table in self.tables.values():
            table.here.zero_()
        for bank, parts in members.items():
            first = _hold_a(self.banks[bank], parts)
            for request in range(self.requests):
                self._enter(bank, grouped[bank], first, request)
        for table in self.tables.values():
            table.there.copy_(table.here)
        self._tell()
        self.forget()

    def _tell(self) -> None:
        """Tell the kernels' host side what the tables hold."""
        here = {name: table.numbers.tolist() for name, table in self.tables.items() if name != "vectors"}
        for number, bank in enumerate(self.banks.values()):
            facts.tell_bank(bank.ids, facts.Bank(max(here["bank_counts"][number]), bank.height * RANKS))
        for number, site in enumerate(self.sites.values()):
            counts = here["counts"][number][: self.requests]
            site.busy = max(counts) > 0
            alone = max(entries[0][5] for entries in here["entries"][number]) if max(counts) == 1 else 0
            runs = tuple(self._runs(site, number, request, here) for request in range(len(counts))) if site.busy else ()
            facts.tell_site(site.entries, facts.Site(max(counts), alone, runs))

    def _runs(self, site: Site, number: int, request: int, here: Mapping[str, Any]) -> tuple[facts.Run, ...]:
        """The entries of one request, those beside each other in every table as one."""
        count = here["counts"][number][request]
        entries, scales = (here[name][number][request][:count] for name in ("entries", "scales"))
        grouped: list[list[int]] = []
        for n, (column, place, start, stop, stride, _) in enumerate(entries):
            if grouped:
                before = entries[grouped[-1][-1]]
                last = before[5]
                follows = before[0] + last // RANKS == column and before[1] + last * before[4] == place
                if follows and before[2:5] == [start, stop, stride]:
                    grouped[-1].append(n)
                    continue
            grouped.append([n])
        return tuple(
            self._run(site, number, request, [entries[n] for n in run], [scales[n] for n in run], run[0])
            for run in grouped
        )

    def _run(
        self, site: Site, number: int, request: int, entries: list[list[int]], scales: list[float], first: int
    ) -> facts.Run:
        column, place, start, stop, stride, _ = entries[0]
        ranks = sum(entry[5] for entry in entries)
        at = (place + start // 8) * 8
        b = site.b[at : at + ranks * stride * 8].view(ranks, -1)[:, start % 8 :][:, : stop - start]
        columns, rows = slice(column * RANKS, column * RANKS + ranks), slice(start, stop)
        if len(set(scales)) == 1:
            return facts.Run(columns, rows, b, scales[0], None)
        begin = self.steps[number, request, first]
        return facts.Run(columns, rows, b, 1.0, self.tables["vectors"].there[number, request, begin : begin + ranks])

    def _check(self, wanted: Mapping[Hashable, Sets], members: Mapping[Hashable, Mapping[Hashable, Part]]) -> None:
        if any(len(sets) > self.requests for sets in wanted.values()):
            raise DiffLoRAError(f"a batch has more different sets of adapters than the {self.requests} reserved.")
        sizes = [sum(part.blocks for part in _bs(sets).values()) for sets in wanted.values()]
        # A bank has the room of all its modules.
        sizes += [
            -(-sum(part.blocks for part in parts.values()) * self.blocks // self._width(bank))
            for bank, parts in members.items()
        ]
        blocks = max(sizes, default=0)
        if blocks > self.blocks:
            raise DiffLoRAError(
                f"the adapters in force have {blocks * RANKS} ranks on one module (each adapter's rounded up to a "
                f"multiple of {RANKS}); room was reserved for {self.blocks * RANKS}. Attach with "
                f"max_rank={blocks * RANKS}."
            )

    def _width(self, bank: Hashable) -> int:
        """How many blocks of ranks a bank holds."""
        return self.banks[bank].a.shape[0] // RANKS

    def _enter(
        self, bank: Hashable, wanted: Mapping[Hashable, Sets], first: Mapping[Hashable, int], request: int
    ) -> None:
        """The entries of one request in the host tables: which of a's ranks act, and what each module makes of them."""
        sets = {name: [p for p in s[request] if p.scale] for name, s in wanted.items() if request < len(s)}
        acting = {part.a: part for parts in sets.values() for part in parts}
        used = [first[key] + n for key, part in acting.items() for n in range(part.blocks)]
        number = self.numbers["bank", bank]
        here = {name: table.numbers for name, table in self.tables.items()}
        here["ids"][number, request, : len(used)] = used
        here["bank_counts"][number, request] = len(used)
        for name, parts in sets.items():
            places = _hold_b(self.sites[name], _bs(wanted[name]))
            number = self.numbers[name]
            step = 0
            for n, part in enumerate(parts):
                at, stride = places[part.b]
                entry = (first[part.a], at - part.start // 8, part.start, part.stop, stride, part.blocks * RANKS)
                here["entries"][number, request, n] = entry
                here["scales"][number, request, n] = part.scale
                self.steps[number, request, n] = step
                here["vectors"][number, request, step : step + part.blocks * RANKS] = part.scale
                step += part.blocks * RANKS
            here["counts"][number, request] = len(parts)


def _bs(sets: Sets) -> dict[Hashable, Part]:
    return {part.b: part for parts in sets for part in parts}


def _factors(part: Part) -> tuple[Tensor, Tensor]:
    pair = part.source.low_rank()
    assert pair is not None, "what is entered has a low-rank form"
    return pair


def _hold_a(bank: Bank, parts: Mapping[Hashable, Part]) -> dict[Hashable, int]:
    """The first block of each a in the bank, written there unless it is there already."""
    first: dict[Hashable, int] = {}
    height = 0
    for key, part in parts.items():
        first[key] = height
        height += part.blocks
    if bank.held != tuple(parts):
        bank.held = ()
        bank.a[: height * RANKS].zero_()
        for key, part in parts.items():
            bank.a[first[key] * RANKS :][: part.rank].copy_(_factors(part)[0])
        bank.held, bank.height = tuple(parts), height
    return first


def _hold_b(site: Site, parts: Mapping[Hashable, Part]) -> dict[Hashable, tuple[int, int]]:
    """Where each b begins in the site and how far its ranks lie apart, in units of 8 numbers; written if it is new.

    A rank's numbers begin where the row that they are for is a multiple of 8, so that kernels read 16 bytes at once.
    """
    places: dict[Hashable, tuple[int, int]] = {}
    height = 0
    for key, part in parts.items():
        stride = -(-part.stop // 8) - part.start // 8
        places[key] = height, stride
        height += part.blocks * RANKS * stride
    if site.held != tuple(parts):
        site.held = ()
        site.b[: height * 8].zero_()
        for key, part in parts.items():
            (at, stride), lead = places[key], part.start % 8
            lines = site.b[at * 8 :][: part.blocks * RANKS * stride * 8].view(-1, stride * 8)
            lines[: part.rank, lead : lead + part.stop - part.start].copy_(_factors(part)[1].T)
        site.held = tuple(parts)
    return places


def arena(shapes: Mapping[Hashable, Shape], blocks: int, requests: int, samples: int) -> Arena:
    """Room on these modules, which are on one device, all zero, in which nothing acts; see `Arena`."""
    (device,) = {shape.device for shape in shapes.values()}
    members: dict[Hashable, list[Hashable]] = {}
    for name, shape in shapes.items():
        members.setdefault(shape.bank, []).append(name)
    widest = max(len(names) for names in members.values()) * blocks
    rows = torch.zeros(1 + samples, dtype=torch.int32, device=device)
    rows[0] = 1
    made = Arena(blocks, requests, dict(shapes), rows)
    # Compilers copy, at each call, what does not begin at a multiple of 16 bytes.
    apart, parts = -(-requests // 4) * 4, -(-blocks // 4) * 4
    made.tables = {
        "ids": _Tables.of((len(members), requests, widest), torch.int32, device),
        "bank_counts": _Tables.of((len(members), apart), torch.int32, device),
        "entries": _Tables.of((len(shapes), requests, parts, ENTRY), torch.int32, device),
        "scales": _Tables.of((len(shapes), requests, parts), torch.float32, device),
        "counts": _Tables.of((len(shapes), apart), torch.int32, device),
        "vectors": _Tables.of((len(shapes), requests, blocks * RANKS), torch.float32, device),
    }
    there = {name: table.there for name, table in made.tables.items()}
    for name in ("bank_counts", "counts"):
        there[name] = there[name][:, :requests]
    for number, (bank, names) in enumerate(members.items()):
        first = shapes[names[0]]
        a = torch.zeros(len(names) * blocks * RANKS, first.cols, dtype=first.dtype, device=device)
        made.banks[bank] = Bank(a, there["ids"][number], there["bank_counts"][number], len(names))
        made.numbers["bank", bank] = number
    for number, (name, shape) in enumerate(shapes.items()):
        b = torch.zeros(blocks * RANKS * -(-shape.rows // 8) * 8, dtype=shape.dtype, device=device)
        entries, scales, counts = (there[table][number] for table in ("entries", "scales", "counts"))
        made.sites[name] = Site(made.banks[shape.bank], shape.rows, b, entries, scales, counts, rows)
        made.numbers[name] = number
    made.fill({})
    facts.tell_rows(rows, [0])
    weakref.finalize(made, facts.forget, made.addresses())
    return made
