"""Several adapters as one: their exact sum, or by name a truncated, pruned or elected one.

A ratio is a strength: the mix at strength 1 does what the adapters do together at these strengths (exactly for `sum`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

from difflora.composing import compose, number
from difflora.deltas import LowRank
from difflora.formats.errors import DiffLoRAError, some
from difflora.resizing import Resized, kept, truncated

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.kinds import Delta
    from difflora.types import Adapter

Method = Literal["sum", "svd", "ties", "dare"]
_METHODS = ("sum", "svd", "ties", "dare")


def merge(
    weighted: Sequence[tuple[Adapter, float]],
    method: Method = "sum",
    *,
    rank: int | None = None,
    density: float = 0.5,
    seed: int = 0,
    advance: Callable[[], None] | None = None,
) -> tuple[Adapter, dict[str, Resized]]:
    """The mix of (adapter, ratio), and by component.path what a truncation left (nothing for `sum`).

    sum: ranks are concatenated, nothing is lost.  svd: the best rank `rank` of the sum.  ties: each change keeps its
    `density` largest numbers, the signs with the larger total win, and the mean of those that agree counts (Yadav et
    al. 2023).  dare: each number stays with probability `density`, divided by it (Yu et al. 2024), from `seed` and the
    module's name alone.  The last two work on whole matrices and end in rank `rank`; without one it is the largest rank
    among the adapters.  One adapter at ratio 1 is itself.  Raises DiffLoRAError for kinds that need the base weight.
    """
    _check(weighted, method, rank, density)
    exact = compose(weighted)
    if method == "sum" or exact is weighted[0][0]:
        return exact, {}
    told: dict[str, Resized] = {}
    components: dict[str, dict[str, Delta]] = {}
    for component, deltas in exact.components.items():
        for path, total in deltas.items():
            parts = [
                (adapter.components[component][path], float(ratio))
                for adapter, ratio in weighted
                if path in adapter.components.get(component, {})
            ]
            name = f"{component}.{path}"
            most = rank or max(delta.rank for delta, _ in parts) or max(total.shape)
            components.setdefault(component, {})[path], told[name] = _mixed(
                name, total, parts, method, most, density, seed
            )
            if advance:
                advance()
    return replace(exact, components=components), told


def _check(weighted: Sequence[tuple[Adapter, float]], method: str, rank: int | None, density: float) -> None:
    if method not in _METHODS:
        raise DiffLoRAError(f"method={method!r} is not known; expected one of {some(_METHODS)}.")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise DiffLoRAError(f"rank={rank!r}; expected a whole number of at least 1.")
    if method == "sum" and rank is not None:
        raise DiffLoRAError("the exact sum has the rank that it has; rank= goes with svd, ties or dare.")
    if not 0.0 < number(density, "density") <= 1.0:
        raise DiffLoRAError(f"density={density!r}; expected a share above 0, at most 1.")


def _mixed(
    name: str, total: Delta, parts: list[tuple[Delta, float]], method: str, most: int, density: float, seed: int
) -> tuple[Delta, Resized]:
    pair = total.low_rank()
    if len(total.shape) < 2 or (method == "svd" and pair is None):
        return total, Resized(total.rank, total.rank, 1.0)
    if method == "svd":
        assert pair is not None
        a, b = pair[0], pair[1] * total.scale
    else:
        changes = [(ratio * delta.dense()).reshape(total.shape[0], -1) for delta, ratio in parts]
        a = _ties(changes, density) if method == "ties" else _dare(changes, density, _generator(name, seed))
        b = torch.eye(a.shape[0])
    down, up, retained = truncated(a, b, lambda values: kept(values, None, 0.0, min(most, values.shape[0])))
    shape, count = total.shape, down.shape[0]
    mixed = LowRank(down.reshape(count, *shape[1:]), up.reshape(*up.shape, *(1,) * (len(shape) - 2)))
    return mixed, Resized(total.rank, count, retained)


def _ties(changes: list[Tensor], density: float) -> Tensor:
    stacked = torch.stack([_trimmed(change, density) for change in changes])
    agree = (stacked.sign() == stacked.sum(0).sign()) & (stacked != 0)
    return (stacked * agree).sum(0) / agree.sum(0).clamp(min=1)


def _trimmed(change: Tensor, density: float) -> Tensor:
    """The largest numbers of a change, the others zero."""
    count = max(1, round(density * change.numel()))
    least = change.abs().flatten().kthvalue(change.numel() - count + 1).values
    return change * (change.abs() >= least)


def _dare(changes: list[Tensor], density: float, generator: torch.Generator) -> Tensor:
    total = torch.zeros_like(changes[0])
    for change in changes:
        total += change * (torch.rand(change.shape, generator=generator) < density) / density
    return total


def _generator(name: str, seed: int) -> torch.Generator:
    """One stream of random numbers a module: which others there are changes nothing."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
