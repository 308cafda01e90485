"""The rule language: which modules a network has, how other code bases name them, and which of them are fused.

A `Rule` reads: "`source` holds these `sections`, stacked along the output dimension, with these row counts".  A rename
is a rule with one section; splitting and joining are one rule read in two directions.  `{i}`, `{j}`, `{k}` stand for
layer numbers: the depth of a model is never written down.  A flattened spelling (`.` became `_`) is derived from the
dotted one when a table is built, so a lost dot is never guessed back.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import Generic, TypeVar

T = TypeVar("T")
Span = tuple[int, int]
Width = int | tuple[int, ...] | None

# A number, or a capture that stands for one, between separators: `linear_1` has one, `attn1` has none.  Cosmos 1.0
# numbers its layers `block0`, `block1`.
_NUMBER = re.compile(r"(?:(?<![^._])|(?<=[._]block))(?:[0-9]+|\{\w+\})(?![^._])")

# Alternatives, as in `to_{q,k,v}`; one of them may be empty.
_ALTERNATIVES = re.compile(r"\{([\w.]*(?:,[\w.]*)+)\}")


def outline(name: str) -> tuple[str, tuple[str, ...]]:
    """`name` with every number replaced by `#`, and the numbers as written: `to_out.0` gives `to_out.#`, `("0",)`."""
    return _NUMBER.sub("#", name), tuple(_NUMBER.findall(name))


class Table(Generic[T]):
    """Values by name pattern.  A name is found in one step, however many patterns and layers there are."""

    def __init__(self, rows: Iterable[tuple[str, T]]) -> None:
        self._rows: dict[str, list[tuple[tuple[str, ...], T]]] = {}
        for pattern, value in rows:
            shape, numbers = outline(pattern)
            self._rows.setdefault(shape, []).append((numbers, value))

    def find(self, shape: str, numbers: tuple[str, ...]) -> Iterator[tuple[T, dict[str, str]]]:
        """The value of each pattern that fits an outlined name, with what its captures stand for."""
        for wanted, value in self._rows.get(shape, ()):
            captures = dict(zip(wanted, numbers, strict=True))
            if all(
                given == captures[want] if want[0] == "{" else given == want
                for want, given in zip(wanted, numbers, strict=True)
            ):
                yield value, captures


@dataclass(frozen=True, slots=True)
class Rule:
    """`source` (a native module pattern) = `sections` (canonical module patterns) stacked along the rows.

    `rows` names each section's row count: `D` is the module's own input width, an integer is itself, any other symbol
    is what remains of the rows, divided by how often the symbol stands there.  Empty for a rename.
    `perm` gives, for a module whose row blocks are stored in another order, the source block of each target block:
    `rows` then names the blocks, and there is one section.
    `heads` is the head size of a source whose rows are interleaved: that many rows of each section in turn.
    `whole` says that rows which do not add up are the module as it is: SD3's last block has another modulation.
    """

    source: str
    sections: tuple[str, ...]
    rows: tuple[str | int, ...] = ()
    perm: tuple[int, ...] = ()
    heads: int = 0
    whole: bool = False

    def spans(self, rows: int, cols: int) -> tuple[tuple[Span, ...], ...] | None:
        """The row blocks of each section in a delta [rows, cols]; None where the row counts do not add up.

        `cols` is 0 where it is not known, as in a bias.
        """
        if not self.rows:
            return ((),) * len(self.sections)
        if self.heads:
            return self._interleaved(rows)
        known = [cols if row == "D" and cols else row for row in self.rows]
        symbols = [row for row in known if isinstance(row, str)]
        rest = rows - sum(row for row in known if isinstance(row, int))
        share, odd = divmod(rest, len(symbols)) if symbols else (1, rest)
        if odd or share < 1 or len(set(symbols)) > 1:
            return ((),) if self.whole and cols else None
        edges = accumulate((row if isinstance(row, int) else share for row in known), initial=0)
        blocks = tuple(pairwise(edges))
        return (tuple(blocks[i] for i in self.perm),) if self.perm else tuple((block,) for block in blocks)

    def _interleaved(self, rows: int) -> tuple[tuple[Span, ...], ...] | None:
        step, count = self.heads, len(self.sections)
        if rows % (step * count):
            return None
        starts = range(0, rows, step)
        return tuple(tuple((at, at + step) for at in starts[n::count]) for n in range(count))


def under(source: str, target: str, text: str) -> tuple[Rule, ...]:
    """Rules from lines of text, with these prefixes: `native = canonical`, a rename.

    `native = one + two : D M` is a fused module with the row counts of its parts; `/ 1 0` after them is a permutation,
    and `or whole` says that other rows are left alone.  A line of names alone keeps them: `name = name`.
    Braces with commas repeat a line, the alternatives in order: `{q,k}_norm = norm_{q,k}` is two rules, and
    `{x,y}.kv = {x,y}.to_{k,v} : D D` two fused modules of two parts each.  A line that ends in a colon, as
    `{a,b}.{i}. = c.{i}.:`, adds to the prefixes of the lines after it.
    """
    rules: list[Rule] = []
    heads = [(source, target)]
    for line in (line.strip() for line in text.split("\n")):
        if line.endswith(":"):
            native, _, canonical = line[:-1].partition(" = ")
            froms, tos = _alternatives(native), _alternatives(canonical or native)
            heads = [(source + one, target + tos[n % len(tos)]) for n, one in enumerate(froms)]
        else:
            lines = [line] if " = " in line else line.split()
            rules += [rule for head in heads for one in lines for rule in _rules(*head, one)]
    return tuple(rules)


def _rules(source: str, target: str, line: str) -> Iterator[Rule]:
    text, whole, _ = line.partition(" or whole")
    text, _, perm = text.partition(" / ")
    text, _, rows = text.partition(" : ")
    native, _, canonical = text.partition(" = ")
    sizes = tuple(int(size) if size.isdecimal() else size for size in rows.split())
    sources = _alternatives(source + native.strip())
    parts = [_alternatives(target + name.strip()) for name in (canonical or native).split(" + ")]
    for n, one in enumerate(sources):
        mine = (name for part in parts for name in part[n * len(part) // len(sources) :][: len(part) // len(sources)])
        yield Rule(one, tuple(mine), sizes, tuple(map(int, perm.split())), whole=bool(whole))


def _alternatives(text: str) -> list[str]:
    """Every text that braces with commas stand for, the last brace varying first."""
    pieces = _ALTERNATIVES.split(text)
    return ["".join(words) for words in product(*(p.split(",") if n % 2 else [p] for n, p in enumerate(pieces)))]


def names(prefix: str, text: str) -> tuple[str, ...]:
    """Module patterns from blank-separated text, with this prefix: `to_{q,k}` is `to_q` and `to_k`."""
    return tuple(name for word in text.split() for name in _alternatives(prefix + word))


def square(prefix: str, text: str, width: Width) -> dict[str, tuple[Width, Width]]:
    """The widths of modules that are as tall as wide."""
    return dict.fromkeys(names(prefix, text), (width, width))


def sections(rules: Iterable[Rule]) -> tuple[str, ...]:
    """The canonical names that rules lead to, each once."""
    return tuple(dict.fromkeys(section for rule in rules for section in rule.sections))


@dataclass(frozen=True)
class Network:
    """The modules of one network: rules from other names to the canonical ones, and canonical names without a rule.

    `own` says that files may use the canonical names, too.
    """

    rules: tuple[Rule, ...] = ()
    names: tuple[str, ...] = ()
    own: bool = True

    def find(self, shape: str, numbers: tuple[str, ...], flat: bool) -> dict[tuple[str, ...], Rule]:
        """Every meaning of an outlined module name, as the canonical paths of its sections and the rule to them."""
        return {
            tuple(_fill(section, captures) for section in rule.sections): rule
            for rule, captures in (self._flat if flat else self._dotted).find(shape, numbers)
        }

    @cached_property
    def _dotted(self) -> Table[Rule]:
        return Table((rule.source, rule) for rule in self._all())

    @cached_property
    def _flat(self) -> Table[Rule]:
        return Table((rule.source.replace(".", "_"), rule) for rule in self._all())

    def _all(self) -> Iterator[Rule]:
        names = dict.fromkeys((*self.names, *sections(self.rules)) if self.own else ())
        yield from (Rule(name, (name,)) for name in names)
        for rule in self.rules:
            yield rule
            # One trainer numbers the parts of a fused module: `img_attn.qkv.0` is q.
            parts = enumerate(rule.sections) if len(rule.sections) > 1 else ()
            yield from (Rule(f"{rule.source}.{n}", (section,)) for n, section in parts)


def network(text: str, *rules: Rule) -> Network:
    """The network of these lines of text, as in `under`, and of further rules."""
    return Network((*rules, *under("", "", text)))


def _fill(pattern: str, captures: Mapping[str, str]) -> str:
    for capture, number in captures.items():
        if capture[0] == "{":
            pattern = pattern.replace(capture, number)
    return pattern


@dataclass(frozen=True)
class Encoder:
    """A text encoder of a family: the component that holds it, its modules, and the places of a file that mean it."""

    component: str
    network: Network
    places: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """One model family.

    `widths` are published sizes (rows, columns; any of a tuple; None: any) by `component.path` pattern, used for
    nothing but telling families apart.  `marks` are how metadata begin that name the family.  `slotted` are the rules
    that count instead in files with PEFT's adapter name in the keys.  `widens` are modules whose input an adapter may
    widen (control LoRAs).  `experts` are further components with the denoiser's modules.  `depths` are published
    numbers of layers by what their paths begin with: the last evidence, for files that fill them.
    """

    name: str
    denoiser: str
    network: Network
    encoders: tuple[Encoder, ...] = ()
    widths: Mapping[str, tuple[Width, Width]] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    slotted: tuple[Rule, ...] = ()
    widens: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    depths: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def in_slots(self) -> Network:
        """The denoiser's modules as files with PEFT's adapter name in the keys have them."""
        replaced = {rule.source for rule in self.slotted}
        kept = tuple(rule for rule in self.network.rules if rule.source not in replaced)
        return Network((*kept, *self.slotted), self.network.names)

    @cached_property
    def published(self) -> Table[tuple[Width, Width]]:
        """`widths`, ready to be looked up."""
        return Table(self.widths.items())


@dataclass(frozen=True, slots=True)
class Entry:
    """One canonical parameter and the tensors of the file that change it.

    `path` is a module, whose weight is meant, or a parameter (`to_q.bias`, `scale_shift_table`).  `keys` maps a role
    (`down`, `up`, `alpha`, ...) to the key in the file.  `rows` are the row blocks [start, stop) of the file's delta
    that make up this parameter's rows, in order; empty means all of them.
    """

    component: str
    path: str
    kind: str
    keys: Mapping[str, str]
    rows: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every key of a file accounted for: its layout, its family (`"a|b"` while several remain), and its entries.

    `vectors` are its textual-inversion vectors, as (word, component, key).  `widens` are the modules among the entries
    whose input the adapter may widen.  `uneven` says which fused modules have other rows than their parts together:
    their entries are not cut, and fit no model.
    """

    layout: str
    family: str | None
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()
    vectors: tuple[tuple[str, str, str], ...] = ()
    widens: tuple[tuple[str, str], ...] = ()
    uneven: tuple[str, ...] = ()
