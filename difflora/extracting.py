"""The difference of two checkpoints as an adapter: truncated singular value decompositions, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from difflora.checkpoints import Checkpoint, read_as
from difflora.composing import number
from difflora.deltas import Dense, LowRank
from difflora.formats.errors import DiffLoRAError, some
from difflora.formats.match import explain
from difflora.resizing import Resized, kept
from difflora.types import Adapter

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.kinds import Delta


def extract(
    base: str | Path,
    tuned: str | Path,
    rank: int,
    *,
    component: str = "transformer",
    family: str | None = None,
    conv_rank: int | None = None,
    min_diff: float = 0.0,
    advance: Callable[[], None] | None = None,
) -> tuple[Adapter, dict[str, Resized]]:
    """The adapter of rank `rank` (`conv_rank` for kernels) nearest to tuned - base, and what each module retains of it.

    Both are .safetensors files or diffusers folders of one model; `family` reads them by that family's own names.
    Matrices and kernels become factors at scale 1, vectors (biases, norms) differences as they are.  What differs by no
    more than `min_diff` anywhere is left out.  Raises DiffLoRAError for checkpoints of different models, and if nothing
    differs.
    """
    ranks = (rank, rank if conv_rank is None else conv_rank)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in ranks):
        raise DiffLoRAError(f"the ranks are {ranks}; expected whole numbers of at least 1.")
    if number(min_diff, "min_diff") < 0:
        raise DiffLoRAError(f"min_diff={min_diff!r}; expected a number of at least 0.")
    one, two = (read_as(Path(root), component, family) for root in (base, tuned))
    _check(one, two)
    deltas: dict[str, Delta] = {}
    told: dict[str, Resized] = {}
    for place, piece in one.pieces.items():
        change = two.pieces[place].read().float() - piece.read().float()
        if float(change.abs().max() if change.numel() else 0.0) > min_diff:
            deltas[place[1]], told[".".join(place)] = _nearest(change, ranks)
        if advance:
            advance()
    if not deltas:
        raise DiffLoRAError(f"{base} and {tuned} differ by no more than {min_diff:g}; there is nothing to extract.")
    source = f"{tuned} - {base}"
    known = family or _family(component, deltas)
    return Adapter(source, f"{Path(tuned).stem}-rank{rank}", "diffusers", known, {component: deltas}), told


def _family(component: str, deltas: Mapping[str, Delta]) -> str | None:
    """The families that have these modules; None if none has, or they would place them differently."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, delta in deltas.items():
        if isinstance(delta, LowRank):
            shapes[f"{component}.{path}.lora_A.weight"] = tuple(delta.down.shape)
            shapes[f"{component}.{path}.lora_B.weight"] = tuple(delta.up.shape)
    try:
        return explain(shapes).family if shapes else None
    except DiffLoRAError:
        return None


def _check(one: Checkpoint, two: Checkpoint) -> None:
    apart = sorted(one.pieces.keys() ^ two.pieces.keys())
    if apart:
        raise DiffLoRAError(
            f"{one.root} and {two.root} are different models: only one has {some('.'.join(place) for place in apart)}."
        )
    for place, piece in one.pieces.items():
        if piece.shape != two.pieces[place].shape:
            raise DiffLoRAError(
                f"{'.'.join(place)} is {list(piece.shape)} in {one.root} and {list(two.pieces[place].shape)} in "
                f"{two.root}; they are different models."
            )


def _nearest(change: Tensor, ranks: tuple[int, int]) -> tuple[Delta, Resized]:
    if change.ndim < 2:
        return Dense(change), Resized(0, 0, 1.0)
    kernel = change.shape[2:]
    most = ranks[any(size > 1 for size in kernel)]
    flat = change.flatten(1)
    if most >= min(flat.shape):
        return Dense(change), Resized(min(flat.shape), min(flat.shape), 1.0)
    u, s, vh = torch.linalg.svd(flat, full_matrices=False)
    count = kept(s, None, 0.0, most)
    root = s[:count].sqrt()
    down, up = root[:, None] * vh[:count], u[:, :count] * root
    share = math.sqrt(float(s[:count].double().square().sum() / s.double().square().sum()))
    delta = LowRank(down.reshape(count, *change.shape[1:]), up.reshape(*up.shape, *(1,) * len(kernel)))
    return delta, Resized(min(flat.shape), count, share)
