"""The algebra of adapter kinds: what each kind of delta does to a weight.

`dense()` defines a kind; everything else in the library is tested against it.  Kinds form a closed union of frozen
dataclasses, `Delta`; nothing here knows a file layout or a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


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
        return self.alpha_value / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def alpha_value(self) -> float:
        """`alpha` as a float; 1-element tensors of any dtype are read here, when first needed."""
        return float(self.alpha.item()) if isinstance(self.alpha, torch.Tensor) else float(self.alpha or 0.0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the file that this delta holds."""
        held = (self.down, self.up, self.mid, self.alpha)
        return tuple(t for t in held if isinstance(t, torch.Tensor))

    def rows(self, blocks: Sequence[tuple[int, int]]) -> LowRank:
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


Delta = LowRank
