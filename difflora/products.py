"""The kinds whose change is a product of products: LoHa (element by element) and LoKr (Kronecker)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from difflora.deltas import Blocks, Cut, chosen, number

if TYPE_CHECKING:
    from torch import Tensor

# Beyond this rank two thin products are no cheaper than the whole, and low_rank() is None.
MOST_RANKS = 256


@dataclass(frozen=True, eq=False, slots=True)
class Hadamard:
    """LoHa: alpha / r * (w1_a w1_b) * (w2_a w2_b), element by element.

    w_a: [out, r], w_b: [r, in * kernel].  With Tucker cores t: [r, r, kh, kw] the first factors are transposed,
    w_a: [r, out], and w_b: [r, in].
    """

    w1_a: Tensor
    w1_b: Tensor
    w2_a: Tensor
    w2_b: Tensor
    t1: Tensor | None = None
    t2: Tensor | None = None
    alpha: Tensor | float | None = None

    kind = "loha"
    needs_base = False
    joined = False

    @property
    def rank(self) -> int:
        """The number of rows of `w1_b`."""
        return int(self.w1_b.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in * kernel], or [out, in, kh, kw] with Tucker cores."""
        if self.t1 is not None:
            return (int(self.w1_a.shape[1]), int(self.w1_b.shape[1]), *(int(k) for k in self.t1.shape[2:]))
        return (int(self.w1_a.shape[0]), *(int(n) for n in self.w1_b.shape[1:]))

    @property
    def scale(self) -> float:
        """alpha / r; 1 without an alpha."""
        return 1.0 if self.alpha is None else number(self.alpha) / self.rank

    def rows(self, blocks: Blocks) -> Hadamard:
        """The delta of those rows alone: exact, since a row of a product has its own row of the first factors."""
        axis = 0 if self.t1 is None else 1
        return replace(self, w1_a=chosen(self.w1_a, blocks, axis), w2_a=chosen(self.w2_a, blocks, axis))

    def low_rank(self) -> tuple[Tensor, Tensor] | None:
        """(a [r^2, in * kernel], b [out, r^2]), exact: a product of sums is a sum of products.  None beyond 256."""
        if self.t1 is not None or int(self.w1_b.shape[0]) * int(self.w2_b.shape[0]) > MOST_RANKS:
            return None
        b = torch.einsum("or,os->ors", self.w1_a.float(), self.w2_a.float()).flatten(1)
        a = torch.einsum("r...,s...->rs...", self.w1_b.float(), self.w2_b.float()).flatten(2).flatten(0, 1)
        return a, b

    def dense(self, base: Tensor | None = None) -> Tensor:
        """The change of the weight at strength 1, fp32; needs no base (LyCORIS, functional/loha.py)."""
        one = _half(self.w1_a, self.w1_b, self.t1)
        return one * _half(self.w2_a, self.w2_b, self.t2) * self.scale


def _half(a: Tensor, b: Tensor, core: Tensor | None) -> Tensor:
    if core is None:
        return (a.float() @ b.float().flatten(1)).reshape(a.shape[0], *b.shape[1:])
    return torch.einsum("ij...,jr,ip->pr...", core.float(), b.float(), a.float())


@dataclass(frozen=True, eq=False, slots=True)
class Kronecker:
    """LoKr: scale * kron(w1, w2), each factor whole or a product of two.

    w1: [ol, im] or w1_a [ol, r] w1_b [r, im]; w2: [ok, in, *kernel] or w2_a [ok, r] w2_b [r, in * kernel], with a
    Tucker core t2 [r, r, *kernel] w2_a is transposed and w2_b is [r, in].  `r` is the rank that a PEFT config gives:
    PEFT scales by alpha / r always; other trainers store an alpha that means nothing where both factors are whole.
    """

    w1: Tensor | None = None
    w1_a: Tensor | None = None
    w1_b: Tensor | None = None
    w2: Tensor | None = None
    w2_a: Tensor | None = None
    w2_b: Tensor | None = None
    t2: Tensor | None = None
    alpha: Tensor | float | None = None
    r: int | None = None

    kind = "lokr"
    needs_base = False
    joined = False

    @property
    def rank(self) -> int:
        """The rank of a factored half, 0 where both are whole."""
        factored = [b for b in (self.w2_b, self.w1_b) if b is not None]
        return int(factored[0].shape[0]) if factored else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in * kernel], or [out, in, *kernel] where the second factor has the kernel."""
        (ol, im), (ok, width, *kernel) = self._sizes()
        return (ol * ok, im * width, *kernel)

    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        one = _size(self.w1, self.w1_a, self.w1_b, None)
        return one[:2], _size(self.w2, self.w2_a, self.w2_b, self.t2)

    @property
    def idle_alpha(self) -> bool:
        """Whether the file gives an alpha that scales nothing, since both factors are whole."""
        return self.alpha is not None and not (self.r or self.rank)

    @property
    def scale(self) -> float:
        """alpha / r; 1 without an alpha, and where both factors are whole unless a config gave `r`."""
        rank = self.r or self.rank
        return 1.0 if self.alpha is None or not rank else number(self.alpha) / rank

    def rows(self, blocks: Blocks) -> Kronecker | Cut:
        """The delta of those rows alone: rows of w1 where every block is a multiple of w2's rows, else a `Cut`."""
        step = self._sizes()[1][0]
        if any(edge % step for block in blocks for edge in block):
            return Cut(self, tuple(blocks))
        steps = [(start // step, stop // step) for start, stop in blocks]
        if self.w1 is not None:
            return replace(self, w1=chosen(self.w1, steps))
        assert self.w1_a is not None
        return replace(self, w1_a=chosen(self.w1_a, steps))

    def low_rank(self) -> tuple[Tensor, Tensor] | None:
        """(a, b) of rank im * r, exact: kron(w1, w2_a w2_b) = kron(w1, w2_a) kron(I, w2_b).  None beyond 256."""
        if self.w2_a is None or self.w2_b is None or self.t2 is not None:
            return None
        one = self._one()
        if one.shape[1] * self.w2_b.shape[0] > MOST_RANKS:
            return None
        eye = torch.eye(one.shape[1], device=one.device)
        a, b = self.w2_b.float().flatten(1).contiguous(), self.w2_a.float().contiguous()
        return torch.kron(eye, a), torch.kron(one, b)

    def _one(self) -> Tensor:
        if self.w1 is not None:
            return self.w1.float().flatten(1).contiguous()
        assert self.w1_a is not None and self.w1_b is not None
        return self.w1_a.float() @ self.w1_b.float()

    def dense(self, base: Tensor | None = None) -> Tensor:
        """The change of the weight at strength 1, fp32; needs no base (LyCORIS, functional/lokr.py)."""
        return torch.kron(*self.halves()).reshape(self.shape) * self.scale

    def halves(self) -> tuple[Tensor, Tensor]:
        """(w1 [ol, im], w2 [ok, in * kernel]) in fp32, each multiplied out."""
        if self.w2 is not None:
            two = self.w2.float()
        else:
            assert self.w2_a is not None and self.w2_b is not None
            two = _half(self.w2_a, self.w2_b, self.t2)
        # A kernel flattened into the columns is the innermost there too; kron fails on strides that einsum leaves.
        return self._one(), two.flatten(1).contiguous()


def _size(whole: Tensor | None, a: Tensor | None, b: Tensor | None, core: Tensor | None) -> tuple[int, ...]:
    if whole is not None:
        return tuple(int(n) for n in whole.shape)
    assert a is not None and b is not None
    if core is not None:
        return (int(a.shape[1]), int(b.shape[1]), *(int(k) for k in core.shape[2:]))
    return (int(a.shape[0]), *(int(n) for n in b.shape[1:]))
