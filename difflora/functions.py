"""The kinds that are functions of the base weight: GLoRA, IA3, replaced parameters, DoRA.

Their `dense(base)` is W' - W for that base, so that the runtime can add strength * (W' - W) to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from difflora.deltas import Blocks, Cut, chosen, hidden, number
from difflora.formats.errors import DiffLoRAError

if TYPE_CHECKING:
    from torch import Tensor


def required(base: Tensor | None, kind: str) -> Tensor:
    """The base in fp32; DiffLoRAError without one."""
    if base is None:
        raise DiffLoRAError(f"the change of a {kind} depends on the base weight; pass dense(base=weight).")
    return base.float()


@dataclass(frozen=True, eq=False, slots=True)
class GLoRA:
    """GLoRA: alpha / r * (W a1 a2 + b1 b2), W a1 a2 along the input channels.

    a1 [in, r], a2 [r, in], b1 [out, r], b2 [r, in], as 1x1 kernels too; b2 may have the kernel of a convolution, or the
    Tucker core bm [r, r, *kernel].  The first files have the pairs the other way round (b2 b1, a2 a1): told by the
    axes that are the rank, and of two such in a square weight by the smaller.
    """

    a1: Tensor
    a2: Tensor
    b1: Tensor
    b2: Tensor
    bm: Tensor | None = None
    alpha: Tensor | float | None = None

    kind = "glora"
    needs_base = True
    joined = False

    @property
    def _pairs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(a1, a2, b1, b2) in today's order."""
        inner, outer = self.b1.shape[1], self.b1.shape[0]
        fits = self.b2.shape[0] == inner == self.a1.shape[1] == self.a2.shape[0]
        swapped = self.b2.shape[1] == outer == self.a1.shape[0] == self.a2.shape[1]
        old = swapped and (not fits or outer < inner)
        return (self.a2, self.a1, self.b2, self.b1) if old else (self.a1, self.a2, self.b1, self.b2)

    @property
    def rank(self) -> int:
        """The inner size of the products."""
        return int(self._pairs[2].shape[1])

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in, *kernel]."""
        _, _, b1, b2 = self._pairs
        kernel = b2.shape[2:] if self.bm is None else self.bm.shape[2:]
        return (int(b1.shape[0]), int(b2.shape[1]), *(int(k) for k in kernel))

    @property
    def scale(self) -> float:
        """alpha / r; 1 without an alpha."""
        return 1.0 if self.alpha is None else number(self.alpha) / self.rank

    def rows(self, blocks: Blocks) -> GLoRA:
        """The change of those rows alone: each row of W a1 a2 comes from its own row of W."""
        old = self._pairs[0] is self.a2
        return replace(self, **({"b2": chosen(self.b2, blocks)} if old else {"b1": chosen(self.b1, blocks)}))

    def low_rank(self) -> None:
        """None: the change is a function of the base."""
        return None

    def dense(self, base: Tensor | None = None) -> Tensor:
        """W' - W at strength 1, fp32 (LyCORIS, modules/glora.py)."""
        weight = required(base, self.kind)
        a1, a2, b1, b2 = (tensor.float() for tensor in self._pairs)
        mixed = torch.einsum("oc...,ci->oi...", weight, a1.flatten(1) @ a2.flatten(1))
        if self.bm is not None:
            b2 = torch.einsum("mn...,nj->mj...", self.bm.float(), b2.flatten(1))
        added = (b1.flatten(1) @ b2.flatten(1)).reshape(weight.shape)
        return (mixed + added) * self.scale


@dataclass(frozen=True, eq=False, slots=True)
class IA3:
    """IA3: each row of the weight (`on_input`: each input column) times one number more.

    weight: as many numbers as there are rows (columns), in any shape; on_input: one number, 0 or 1.
    """

    weight: Tensor
    on_input: Tensor

    alpha = None
    kind = "ia3"
    rank = 0
    scale = 1.0
    needs_base = True
    joined = False

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, 0], or [0, in]: the other size is the model's.  [0, 0] while `on_input` has no value."""
        if self.on_input.is_meta:
            return (0, 0)
        count = self.weight.numel()
        return (0, count) if bool(self.on_input.item()) else (count, 0)

    def rows(self, blocks: Blocks) -> IA3 | Cut:
        """The change of those rows alone."""
        if hidden(self.on_input):
            return Cut(self, tuple(blocks))
        if bool(self.on_input.item()):
            return self
        return replace(self, weight=chosen(self.weight.flatten(), blocks))

    def low_rank(self) -> None:
        """None: the change is a function of the base."""
        return None

    def dense(self, base: Tensor | None = None) -> Tensor:
        """W' - W at strength 1, fp32 (LyCORIS, modules/ia3.py)."""
        weight = required(base, self.kind)
        axis = 1 if bool(self.on_input.item()) else 0
        shape = [-1 if n == axis else 1 for n in range(weight.ndim)]
        return weight * self.weight.float().reshape(shape)


@dataclass(frozen=True, eq=False, slots=True)
class Replacement:
    """A parameter's new value, in the place of the model's own."""

    value: Tensor
    alpha = None
    kind = "set"
    rank = 0
    scale = 1.0
    needs_base = True
    joined = False

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the parameter."""
        return tuple(int(n) for n in self.value.shape)

    def rows(self, blocks: Blocks) -> Replacement:
        """The values of those rows alone."""
        return replace(self, value=chosen(self.value, blocks))

    def low_rank(self) -> None:
        """None: the change is a function of the base."""
        return None

    def dense(self, base: Tensor | None = None) -> Tensor:
        """W' - W at strength 1, fp32."""
        own = required(base, self.kind)
        return self.value.float().reshape(own.shape) - own


@dataclass(frozen=True, eq=False, slots=True)
class DoRA:
    """DoRA on an additive kind: W' = m (W + D) / ||W + D||, the norm over all axes but one (Liu et al. 2024).

    `inner` is D at its own scale, `magnitude` m: one number a row of the weight, or (`by_input`) one a column.
    """

    inner: Any
    magnitude: Tensor
    by_input: bool = False

    needs_base = True
    joined = False

    @property
    def kind(self) -> str:
        """`dora+` and the kind inside."""
        return f"dora+{self.inner.kind}"

    @property
    def rank(self) -> int:
        """That of the kind inside."""
        return int(self.inner.rank)

    @property
    def alpha(self) -> Any:
        """That of the kind inside."""
        return self.inner.alpha

    @property
    def scale(self) -> float:
        """That of the kind inside."""
        return float(self.inner.scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the kind inside."""
        shape: tuple[int, ...] = self.inner.shape
        return shape

    @property
    def sound(self) -> bool:
        """Whether there are as many magnitudes as rows (columns; a kernel may be flattened into these)."""
        count, size = self.magnitude.numel(), self.shape[1 if self.by_input else 0]
        return count == size or (self.by_input and len(self.shape) == 2 and count > 0 and size % count == 0)

    def rows(self, blocks: Blocks) -> DoRA | Cut:
        """The change of those rows alone; the norm of a column takes all the rows, so that one is a joined `Cut`."""
        if self.by_input or not self.sound:
            return Cut(self, tuple(blocks))
        return replace(self, inner=self.inner.rows(blocks), magnitude=chosen(self.magnitude.flatten(), blocks))

    def low_rank(self) -> None:
        """None: the change is a function of the base."""
        return None

    def dense(self, base: Tensor | None = None) -> Tensor:
        """W' - W at strength 1, fp32 (PEFT, tuners/lora/dora.py; LyCORIS, modules/locon.py)."""
        weight = required(base, self.kind)
        if not self.sound or self.magnitude.numel() != weight.shape[1 if self.by_input else 0]:
            raise DiffLoRAError(f"{self.magnitude.numel()} magnitudes do not fit a weight {list(weight.shape)}.")
        change: Tensor = self.inner.dense()
        adapted = weight + change.reshape(weight.shape).to(weight.device)
        kept = 1 if self.by_input else 0
        flat = adapted.transpose(0, kept).flatten(1)
        norm: Tensor = flat.norm(dim=1) + torch.finfo(torch.float32).eps
        factor = self.magnitude.float().flatten().to(norm.device) / norm
        return adapted * factor.reshape([-1 if n == kept else 1 for n in range(weight.ndim)]) - weight
