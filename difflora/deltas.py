"""The additive kinds of adapter: what each adds to a weight.

`dense()` defines a kind; everything else in the library is tested against it.  Nothing here knows a file layout or a
model.  Kinds that are functions of the base weight are in `functions` and `rotations`, the union of all in `kinds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T", bound=Any)
Blocks = Sequence[tuple[int, int]]


def mapped(delta: T, change: Callable[[Tensor], Tensor]) -> T:
    """The same delta with `change` applied to every tensor that it holds, those of a delta inside it too."""
    held = {field.name: getattr(delta, field.name) for field in fields(delta)}
    changed: dict[str, Any] = {n: change(value) for n, value in held.items() if isinstance(value, torch.Tensor)}
    changed |= {n: mapped(value, change) for n, value in held.items() if is_dataclass(value)}
    return replace(delta, **changed)


def tensors(delta: Any) -> tuple[Tensor, ...]:
    """Every tensor that a delta holds, those of a delta inside it too."""
    held = [getattr(delta, field.name) for field in fields(delta)]
    inner = [tensor for value in held if is_dataclass(value) for tensor in tensors(value)]
    return (*(value for value in held if isinstance(value, torch.Tensor)), *inner)


def number(alpha: Tensor | float | None) -> float:
    """`alpha` as a float; 1-element tensors of any dtype are read here, when first needed."""
    return float(alpha.item()) if isinstance(alpha, torch.Tensor) else float(alpha or 0.0)


def hidden(value: Tensor | float | None) -> bool:
    """Whether this is a tensor without values (on the meta device)."""
    return isinstance(value, torch.Tensor) and value.is_meta


def chosen(tensor: Tensor, blocks: Blocks, axis: int = 0) -> Tensor:
    """Those blocks [start, stop) of an axis, in that order; a view where there is one."""
    parts = [tensor.narrow(axis, start, stop - start) for start, stop in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


@dataclass(frozen=True, eq=False, slots=True)
class LowRank:
    """LoRA, LoCon, LoCon with a Tucker core, DyLoRA, and LoRA of an embedding table.

    down: [r, in] or [r, in, kh, kw]; up: [out, r] or [out, r, 1, 1]; mid: [r, r, kh, kw] with down [r, in, 1, 1].
    `alpha` is as the file has it (a one-element tensor, a number, or None for "no alpha": scale 1).  `blocks` are the
    row blocks [start, stop) of `up` that this delta is, in that order (all of them if empty): the parts of a fused
    module share their tensors.  Nothing is multiplied, cut or copied before `dense` or `low_rank`.
    """

    down: Tensor
    up: Tensor
    mid: Tensor | None = None
    alpha: Tensor | float | None = None
    rslora: bool = False
    blocks: tuple[tuple[int, int], ...] = ()

    needs_base = False
    joined = False

    @property
    def kind(self) -> str:
        """The name that reports print: `lora`, `locon` for convolutions, `tucker` with a core."""
        return "tucker" if self.mid is not None else "locon" if self.down.ndim > 2 else "lora"

    @property
    def rank(self) -> int:
        """The number of rows of `down`."""
        return int(self.down.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight this delta is for: [out, in] or [out, in, kh, kw]."""
        kernel = self.down.shape[2:] if self.mid is None else self.mid.shape[2:]
        rows = sum(stop - start for start, stop in self.blocks) if self.blocks else int(self.up.shape[0])
        return (rows, int(self.down.shape[1]), *(int(k) for k in kernel))

    @property
    def scale(self) -> float:
        """alpha / r (Hu et al. 2021), alpha / sqrt(r) for rslora (Kalajdzievski 2023); 1 without an alpha."""
        if self.alpha is None:
            return 1.0
        return number(self.alpha) / (math.sqrt(self.rank) if self.rslora else self.rank)

    def rows(self, blocks: Blocks) -> LowRank:
        """The delta of those row blocks [start, stop) alone, in that order; every tensor is shared."""
        assert not self.blocks, "a delta is cut once, from the file's own rows"
        return replace(self, blocks=tuple(blocks))

    def low_rank(self) -> tuple[Tensor, Tensor]:
        """(a: [r, in * kh * kw], b: [out, r]) in fp32 with `scale * b @ a` = `dense()` flattened; exact for every form.

        A Tucker core is contracted into a: a[m, j, ...] = sum_n mid[m, n, ...] down[n, j] (LyCORIS, locon.py).
        """
        up = torch.cat([self.up[start:stop] for start, stop in self.blocks]) if self.blocks else self.up
        down, up = self.down.float(), up.float().flatten(1)
        if self.mid is not None:
            down = torch.einsum("mn...,nj->mj...", self.mid.float(), down.flatten(1))
        return down.flatten(1), up

    def dense(self, base: Tensor | None = None) -> Tensor:
        """The change of the weight at strength 1: alpha / r * up @ down, fp32 [out, in(, kh, kw)]; needs no base."""
        a, b = self.low_rank()
        return (b @ a * self.scale).reshape(self.shape)


@dataclass(frozen=True, eq=False, slots=True)
class Dense:
    """A difference of a whole parameter (weight, bias, norm, table), added as it is.

    Only a bias that was trained beside factors is scaled: by the alpha / r of these (`rank` is not 0 then).
    """

    diff: Tensor
    alpha: Tensor | float | None = None
    rank: int = 0
    rslora: bool = False

    needs_base = False
    joined = False

    @property
    def kind(self) -> str:
        """`diff`, or `lora_bias` beside factors."""
        return "lora_bias" if self.rank else "diff"

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the parameter."""
        return tuple(int(n) for n in self.diff.shape)

    @property
    def scale(self) -> float:
        """1, but alpha / r beside factors."""
        if self.alpha is None or not self.rank:
            return 1.0
        return number(self.alpha) / (math.sqrt(self.rank) if self.rslora else self.rank)

    def rows(self, blocks: Blocks) -> Dense:
        """The difference of those rows alone."""
        return replace(self, diff=chosen(self.diff, blocks))

    def low_rank(self) -> None:
        """None: it has no factors."""
        return None

    def dense(self, base: Tensor | None = None) -> Tensor:
        """The change at strength 1, fp32; needs no base."""
        return self.diff.float() * self.scale


@dataclass(frozen=True, eq=False, slots=True)
class Cut:
    """Row blocks [start, stop) of a delta that cannot be cut itself, as parts of a fused module.

    `dense` evaluates the whole.  For a function of the base weight it takes the base of all the rows (`joined`).
    """

    whole: Any
    blocks: tuple[tuple[int, int], ...]

    @property
    def kind(self) -> str:
        """That of the whole."""
        return str(self.whole.kind)

    @property
    def rank(self) -> int:
        """That of the whole."""
        return int(self.whole.rank)

    @property
    def scale(self) -> float:
        """That of the whole."""
        return float(self.whole.scale)

    @property
    def alpha(self) -> Any:
        """That of the whole."""
        return self.whole.alpha

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole's, with the rows of the blocks."""
        return (sum(stop - start for start, stop in self.blocks), *self.whole.shape[1:])

    @property
    def needs_base(self) -> bool:
        """Whether the whole is a function of the base weight."""
        return bool(self.whole.needs_base)

    @property
    def joined(self) -> bool:
        """Whether `dense` takes the base of all the whole's rows."""
        return self.needs_base

    def low_rank(self) -> tuple[Tensor, Tensor] | None:
        """The rows of the whole's, None if it has none."""
        pair = self.whole.low_rank()
        return None if pair is None else (pair[0], chosen(pair[1], self.blocks))

    def dense(self, base: Tensor | None = None) -> Tensor:
        """The change of these rows at strength 1, fp32; `base` is that of all the whole's rows."""
        return chosen(self.whole.dense(base), self.blocks)

    def rows(self, blocks: Blocks) -> Cut:
        """Not possible: a delta is cut once, from the file's own rows."""
        raise AssertionError("a delta is cut once")
