"""The rule language: which modules a model family has, how other code bases name them, and which of them are fused.

A `Rule` reads: "`source` holds these `sections`, stacked along the output dimension, with these row counts".  A rename
is a rule with one section; splitting and joining are one rule read in two directions.  `{i}`, `{j}`, `{k}` stand for
layer numbers: the depth of a model is never written down.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Rule:
    """`source` (a native module pattern) = `sections` (canonical module patterns) stacked along the rows.

    `rows` names each section's row count: `D` is the module's own input width, an integer is itself, any other symbol
    is what remains of the rows, divided by how often the symbol stands there.  Empty for a rename.
    `perm` gives, for a module whose row blocks are stored in another order, the source block of each target block:
    `rows` then names the blocks, and there is one section.
    """

    source: str
    sections: tuple[str, ...]
    rows: tuple[str | int, ...] = ()
    perm: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One model family: rules from native to canonical (diffusers) names, and canonical names that need no rule."""

    name: str
    denoiser: str
    rules: tuple[Rule, ...]
    names: tuple[str, ...] = ()
    dims: Mapping[str, int] = field(default_factory=dict)
    encoders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """One canonical module and the tensors of the file that change it.

    `keys` maps a role (`down`, `up`, `mid`, `alpha`) to the key in the file.  `rows` are the row blocks [start, stop) of
    the file's delta that make up this module's rows, in order; empty means all of them.
    """

    component: str
    path: str
    kind: str
    keys: Mapping[str, str]
    rows: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every key of a file accounted for: its layout, its family (`"a|b"` while several remain), and its entries."""

    layout: str
    family: str | None
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()
