"""The kinds that rotate the base weight: Diag-OFT, BOFT (output rows, LyCORIS), OFT v2 (input columns, PEFT)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from difflora.deltas import Blocks, Cut, chosen, hidden, number
from difflora.formats.errors import DiffLoRAError
from difflora.functions import required

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class OutputRotation:
    """Diag-OFT: rows of the weight, b at a time, rotated by R = (I + Q)(I - Q)^-1, Q = B - B^T; BOFT: m such stages.

    blocks: [n, b, b], or [m, n, b, b] (butterfly) with n * b rows; rescale: [out, 1...], one more factor a row.
    `alpha` is no scale but a bound: ||Q|| is at most alpha * rows where alpha > 0 (LyCORIS, diag_oft.py and boft.py).
    """

    blocks: Tensor
    rescale: Tensor | None = None
    alpha: Tensor | float | None = None

    rank = 0
    scale = 1.0
    needs_base = True
    joined = False

    @property
    def kind(self) -> str:
        """`oft`, or `boft` with several stages."""
        return "boft" if self.blocks.ndim == 4 else "oft"

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, 0]: the number of columns is the model's."""
        return (int(self.blocks.shape[-3] * self.blocks.shape[-1]), 0)

    def rows(self, blocks: Blocks) -> Cut | OutputRotation:
        """The change of those rows alone: those rotations where they end where the rows do and no bound joins them."""
        size = int(self.blocks.shape[-1])
        bound = hidden(self.alpha) or number(self.alpha) > 0
        if self.kind == "boft" or bound or any(edge % size for block in blocks for edge in block):
            return Cut(self, tuple(blocks))
        rotations = chosen(self.blocks, [(start // size, stop // size) for start, stop in blocks])
        return replace(self, blocks=rotations, rescale=None if self.rescale is None else chosen(self.rescale, blocks))

    def low_rank(self) -> None:
        """None: the change is a function of the base."""
        return None

    def dense(self, base: Tensor | None = None) -> Tensor:
        """W' - W at strength 1, fp32."""
        weight = required(base, self.kind)
        rotated, rotation = weight.flatten(1), self._rotation().to(weight.device)
        if self.kind == "oft":
            parts = rotated.view(rotation.shape[0], rotation.shape[1], -1)
            rotated = torch.einsum("knm,kn...->km...", rotation, parts).reshape(rotated.shape)
        else:
            for stage, blocks in enumerate(rotation):
                rotated = _stage(rotated, blocks, 2**stage)
        if self.rescale is not None:
            rotated = rotated * self.rescale.float().reshape(-1, 1)
        return rotated.reshape(weight.shape) - weight

    def _rotation(self) -> Tensor:
        q = self.blocks.float() - self.blocks.float().transpose(-1, -2)
        bound = number(self.alpha) * self.shape[0]
        length = q.norm() + 1e-8
        if bound > 0 and float(length) > bound:
            q = q * (bound / length)
        eye = torch.eye(q.shape[-1], device=q.device)
        inverse: Tensor = torch.linalg.inv(eye - q)
        return (eye + q) @ inverse


def _stage(rows: Tensor, blocks: Tensor, reach: int) -> Tensor:
    """One butterfly stage: pairs of half blocks `reach` half blocks apart are rotated together; rows [out, columns]."""
    half = blocks.shape[-1] // 2 * reach
    mixed = rows.view(-1, 2, half, rows.shape[1]).transpose(1, 2).reshape(blocks.shape[0], -1, rows.shape[1])
    turned = torch.einsum("bij,bjc->bic", blocks, mixed)
    return turned.reshape(-1, half, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True, eq=False, slots=True)
class InputRotation:
    """OFT v2: W' = W R^T, R rotating the input columns b at a time (PEFT, tuners/oft/layer.py).

    r: [n, b (b - 1) / 2], the upper triangles of skew matrices Q; R is the first terms of a Neumann series for the
    Cayley transform: I + 2Q + 2Q^2 + 2Q^3 + Q^4.  One block (n = 1) is shared by all columns.  With `scaled`
    (OneTrainer) the numbers are stored times 2 sqrt(b - 1).  `magnitude` decomposes the result as DoRA does, a number
    a row (`by_input`: a column).  Linear layers alone: trainers disagree about convolutions.
    """

    r: Tensor
    scaled: Tensor | None = None
    magnitude: Tensor | None = None
    by_input: bool = False

    alpha = None
    rank = 0
    scale = 1.0
    needs_base = True
    joined = False

    @property
    def kind(self) -> str:
        """`oft_v2`, after `dora+` with a magnitude."""
        return "oft_v2" if self.magnitude is None else "dora+oft_v2"

    @property
    def block(self) -> int:
        """b, from the number of numbers in a triangle."""
        numbers = int(self.r.shape[1])
        return round((1 + math.sqrt(1 + 8 * numbers)) / 2)

    @property
    def shape(self) -> tuple[int, ...]:
        """[0, in], or [0, 0] for a shared block: the other sizes are the model's."""
        count = int(self.r.shape[0])
        lengths = 0 if self.magnitude is None else self.magnitude.numel()
        columns = count * self.block if count > 1 else lengths if self.by_input else 0
        return (0 if self.by_input else lengths, columns)

    def rows(self, blocks: Blocks) -> Cut | InputRotation:
        """The change of those rows alone: the rotation of the inputs is that of every row."""
        if self.magnitude is None:
            return self
        if self.by_input:
            return Cut(self, tuple(blocks))
        return replace(self, magnitude=chosen(self.magnitude.flatten(), blocks))

    def low_rank(self) -> None:
        """None: the change is a function of the base."""
        return None

    def dense(self, base: Tensor | None = None) -> Tensor:
        """W' - W at strength 1, fp32."""
        weight = required(base, self.kind)
        if weight.ndim != 2 or weight.shape[1] % self.block:
            raise DiffLoRAError(f"an OFT of blocks of {self.block} columns does not fit a weight {list(weight.shape)}.")
        rotation = self._rotation().to(weight.device)
        parts = weight.view(weight.shape[0], -1, self.block)
        rotated = torch.einsum("ork,rck->orc", parts, rotation.expand(parts.shape[1], -1, -1)).reshape(weight.shape)
        if self.magnitude is not None:
            axis = 0 if self.by_input else 1
            norm = rotated.norm(dim=axis, keepdim=True) + torch.finfo(torch.float32).eps
            rotated = rotated * self.magnitude.float().to(norm.device).reshape(norm.shape) / norm
        return rotated - weight

    def _rotation(self) -> Tensor:
        vectors, size = self.r.float(), self.block
        if self.scaled is not None and bool(self.scaled.item()):
            vectors = vectors / (2 * (size - 1) ** 0.5)
        skew = torch.zeros(vectors.shape[0], size, size, device=vectors.device)
        upper, right = torch.triu_indices(size, size, 1)
        skew[:, upper, right] = vectors
        skew = skew - skew.transpose(1, 2)
        square = skew @ skew
        cube = square @ skew
        return torch.eye(size, device=skew.device) + 2 * (skew + square + cube) + cube @ skew
