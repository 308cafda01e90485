"""Kernel mode in plain torch: a module's forward is patched in place so that it adds its adapters' low-rank terms.

The patch sits at the innermost forward, beneath every hook, so hooks may come and go around it.  No module is wrapped
or replaced: paths, `state_dict()` keys, types and isinstance checks stay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflora.deltas import LowRank
from difflora.formats.errors import DiffLoRAError
from difflora.kernels import reference
from difflora.slots import innermost, is_own, swap
from difflora.targets import CONV, weight_shape
from difflora.types import Section, Stack

_STATE = "_difflora"
# The dtypes that a module computes in: its weight may be stored in another.
_COMPUTE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_POINTWISE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(eq=False, slots=True)
class Term:
    """Rows [start, stop) of the output get ((x a^T) * scale) b^T, or b * scale where there is no a (a bias)."""

    a: Tensor | None
    b: Tensor
    scale: Tensor
    start: int
    stop: int

    def to(self, device: torch.device, dtype: torch.dtype) -> Term:
        """The same term there, `scale` still in fp32."""
        a = None if self.a is None else self.a.to(device, dtype)
        return Term(a, self.b.to(device, dtype), self.scale.to(device), self.start, self.stop)


@dataclass(eq=False, slots=True)
class State:
    """What the patched forward of one module reads.

    `original` is the forward beneath it, `rows` the height of the output, `rest` the device and dtype that the weight
    had when `terms` were made, and `placed` the terms where and as the last call used them.
    """

    original: Callable[..., Any]
    rows: int
    rest: tuple[object, ...]
    terms: list[Term]
    placed: list[Term]

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        held = (self.original, self.rows, self.rest, self.terms, self.placed)
        return State(*copy.deepcopy(held, memo))

    def __reduce__(self) -> NoReturn:
        # A bound method unpickles by name, as the class's own forward: the adapters would be gone without a word.
        raise DiffLoRAError(
            "adapters act beside the weights of this model, and a pickle cannot hold them. Unload them first, or load "
            "them with mode='merged'."
        )


def terms(joined: Stack, module: nn.Module) -> list[Term]:
    """The terms of a Stack in the shapes that the module's own operation takes, in the dtype that it computes in."""
    kernel = (module.in_channels // module.groups, *module.kernel_size) if isinstance(module, CONV) else (-1,)
    weight = module._parameters.get("weight")
    dtype = weight.dtype if weight is not None and weight.dtype in _COMPUTE else torch.float32
    return [
        Term(
            joined.a[part.first : part.last].reshape(part.last - part.first, *kernel),
            part.b,
            torch.tensor(part.scale, dtype=torch.float32),
            part.start,
            part.stop,
        ).to(part.b.device, dtype)
        for part in joined.parts
    ]


def bias_terms(parts: Iterable[tuple[Section, float]]) -> list[Term]:
    """The terms of what is added to the module's bias, where it has none or none that can be written."""
    return [
        Term(None, part.delta.dense(), torch.tensor(weight, dtype=torch.float32), part.start, part.stop)
        for part, weight in parts
    ]


def forward(self: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The module's own output plus its terms.  One function for every module: its state is in the module."""
    state: State = self._difflora  # type: ignore[assignment]
    output: Tensor = state.original(input, *args, **kwargs)
    if hasattr(input, "to_local"):
        return _sharded(self, state, input, output)
    for index in range(len(state.terms)):
        output = output + _part(_placed(state, index, input, output), self, input, state.rows)
    return output


def _sharded(module: nn.Module, state: State, input: Any, output: Any) -> Tensor:
    """The same on DTensors of a one-process mesh, where the local tensor is the whole one."""
    local = input.to_local()
    for index in range(len(state.terms)):
        part = _part(_placed(state, index, local, output), module, local, state.rows)
        output = output + type(output).from_local(part, output.device_mesh, output.placements)
    return output  # type: ignore[no-any-return]


def _placed(state: State, index: int, input: Tensor, output: Tensor) -> Term:
    """The term on the input's device, in the dtype of the output."""
    term = state.placed[index]
    if term.b.device == input.device and term.b.dtype == output.dtype:
        return term
    # From the terms as they were made: a chain of casts would round every time.
    term = state.terms[index].to(input.device, output.dtype)
    if not torch.compiler.is_compiling():
        state.placed[index] = term
    return term


def _part(term: Term, module: nn.Module, input: Tensor, rows: int) -> Tensor:
    """What the term adds to the output, zero outside its rows."""
    around = (term.start, rows - term.stop)
    if term.a is None:
        vector = F.pad(term.b * term.scale.to(term.b.dtype), around)
        return vector[(..., *(None,) * len(module.kernel_size))] if isinstance(module, CONV) else vector
    if isinstance(module, nn.Embedding):
        return F.embedding(input, term.b) * term.scale @ term.a
    if isinstance(module, CONV):
        return _convolved(term, term.a, module, input.to(term.a.dtype), around)
    part = reference.low_rank(input, term.a, term.b, term.scale)
    return F.pad(part, around) if any(around) else part


def _convolved(term: Term, a: Tensor, module: Any, input: Tensor, around: tuple[int, int]) -> Tensor:
    if module.groups > 1:
        # Each group reads its own channels, so the product is formed before it is applied.
        weight = (F.pad(term.b, (0, 0, *around)) @ a.flatten(1)).view(-1, *a.shape[1:])
        return module._conv_forward(input, weight, None) * term.scale  # type: ignore[no-any-return]
    spatial = a.ndim - 2
    inner = module._conv_forward(input, a, None) * term.scale
    part: Tensor = _POINTWISE[spatial](inner, term.b[(..., *(None,) * spatial)])
    return F.pad(part, (*(0, 0) * spatial, *around)) if any(around) else part


def runs(section: Section, module: nn.Module) -> bool:
    """Whether kernel mode has a form for the section of this module; what has none acts in the weights alone."""
    if section.wide or weight_shape(module) is None:
        return False
    if section.name == "bias":
        return not section.delta.needs_base
    return isinstance(section.delta, LowRank) or section.delta.low_rank() is not None


def patched(module: nn.Module) -> bool:
    """Whether `patch` is in force: it is not if somebody has put the class's forward back in its place."""
    return _STATE in module.__dict__ and not is_own(getattr(*innermost(module)), module)


def current(module: nn.Module) -> bool:
    """Whether the weight is still where, and of the dtype, for which the terms of this patched module were made."""
    return bool(module.__dict__[_STATE].rest == _rest(module))


def _rest(module: nn.Module) -> tuple[object, ...]:
    weight = module._parameters.get("weight")
    return () if weight is None else (weight.device, weight.dtype)


def patch(module: nn.Module, parts: list[Term], rows: int) -> None:
    """Make the module add `parts` to its output; replaces the terms if it is patched already."""
    if patched(module):
        state: State = module.__dict__[_STATE]
        state.rows, state.rest, state.terms, state.placed = rows, _rest(module), parts, list(parts)
        return
    owner, name = innermost(module)
    module.__dict__[_STATE] = State(getattr(owner, name), rows, _rest(module), parts, list(parts))
    setattr(owner, name, MethodType(forward, module))


def unpatch(module: nn.Module) -> None:
    """Put back the forward that was there, wherever hooks have moved the patch since."""
    state: State | None = module.__dict__.get(_STATE)
    if state is None:
        return
    lost = not patched(module)
    if swap(module, forward, state.original) or lost:
        del module.__dict__[_STATE]
    else:
        # Beneath a wrapper that keeps its forward to itself: the patch stays, and adds nothing.
        state.terms, state.placed = [], []
