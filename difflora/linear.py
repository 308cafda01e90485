"""Kernel mode in plain torch: a module's forward is patched in place so that it adds its adapters' low-rank terms.

The patch sits at the innermost forward, beneath every hook, so hooks may come and go around it.  No module is wrapped
or replaced: paths, `state_dict()` keys, types and isinstance checks stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflora.types import Stack

_STATE = "_difflora"


@dataclass(eq=False, slots=True)
class Term:
    """Rows [start, stop) of the output get ((x a^T) * scale) b^T; a and b follow the input's device and dtype."""

    a: Tensor
    b: Tensor
    scale: Tensor
    start: int
    stop: int


@dataclass(eq=False, slots=True)
class State:
    """What the patched forward of one module reads: the forward beneath it, the terms, and the height of the output."""

    original: Callable[..., Any]
    terms: list[Term]
    rows: int


def terms(joined: Stack, module: nn.Module) -> list[Term]:
    """The terms of a Stack in the shapes that the module's own operation takes."""
    kernel = (module.in_channels // module.groups, *module.kernel_size) if isinstance(module, nn.Conv2d) else (-1,)
    return [
        Term(
            joined.a[part.first : part.last].reshape(part.last - part.first, *kernel),
            part.b,
            torch.tensor(part.scale, dtype=torch.float32, device=part.b.device),
            part.start,
            part.stop,
        )
        for part in joined.parts
    ]


def forward(self: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The module's own output plus its terms.  One function for every module: its state is in the module."""
    state: State = self._difflora  # type: ignore[assignment]
    output: Tensor = state.original(input, *args, **kwargs)
    if hasattr(input, "to_local"):
        return _sharded(self, state, input, output)
    for term in state.terms:
        output = output + _rows(_placed(state, term, input, output), term, self, input, state.rows)
    return output


def _sharded(module: nn.Module, state: State, input: Any, output: Any) -> Tensor:
    """The same on DTensors of a one-process mesh, where the local tensor is the whole one."""
    local = input.to_local()
    total = output
    for term in state.terms:
        part = _rows(_placed(state, term, local, output.to_local()), term, module, local, state.rows)
        total = total + type(output).from_local(part, output.device_mesh, output.placements)
    return total  # type: ignore[no-any-return]


def _placed(state: State, term: Term, input: Tensor, output: Tensor) -> Term:
    """The term on the input's device, in the dtype of the output."""
    if term.a.device == input.device and term.a.dtype == output.dtype:
        return term
    moved = Term(
        term.a.to(input.device, output.dtype),
        term.b.to(input.device, output.dtype),
        term.scale.to(input.device),
        term.start,
        term.stop,
    )
    if not torch.compiler.is_compiling():
        state.terms[state.terms.index(term)] = moved
    return moved


def _rows(term: Term, old: Term, module: nn.Module, input: Tensor, rows: int) -> Tensor:
    """What the term adds to the output, zero outside its rows."""
    dim = 1 if isinstance(module, nn.Conv2d) else -1
    part = _low_rank(term, module, input)
    if (old.start, old.stop) == (0, rows):
        return part
    around = (old.start, rows - old.stop)
    if dim == -1:
        return F.pad(part, around)
    return F.pad(part, (0, 0, 0, 0, *around))


def _low_rank(term: Term, module: nn.Module, input: Tensor) -> Tensor:
    if isinstance(module, nn.Embedding):
        return F.embedding(input, term.b) * term.scale @ term.a
    if isinstance(module, nn.Conv2d):
        if module.groups > 1:
            weight = (term.b @ term.a.flatten(1)).view(-1, *term.a.shape[1:])
            return module._conv_forward(input, weight, None) * term.scale
        inner = module._conv_forward(input.to(term.a.dtype), term.a, None) * term.scale
        return F.conv2d(inner, term.b[:, :, None, None])
    return F.linear(F.linear(input.to(term.a.dtype), term.a) * term.scale, term.b)


def _slots(module: nn.Module) -> Iterator[tuple[object, str]]:
    """Everywhere the innermost forward may be kept, hooks' own places first."""
    registry = module.__dict__.get("_diffusers_hook")
    for reference in getattr(registry, "_fn_refs", [])[:1]:
        yield reference, "original_forward" if reference.original_forward is not None else "forward"
    if "_old_forward" in module.__dict__:
        yield module, "_old_forward"
    yield module, "forward"


def slot(module: nn.Module) -> tuple[object, str]:
    """(owner, attribute) of the innermost forward.  Hooks keep partials; the innermost is the first that is none."""
    places = list(_slots(module))
    for owner, name in places:
        if not isinstance(getattr(owner, name), functools.partial):
            return owner, name
    return places[-1]


def patched(module: nn.Module) -> bool:
    """Whether `patch` is in force on this module."""
    return _STATE in module.__dict__


def patch(module: nn.Module, parts: list[Term], rows: int) -> None:
    """Make the module add `parts` to its output; replaces the terms if it is patched already."""
    if patched(module):
        module.__dict__[_STATE].terms = parts
        return
    owner, name = slot(module)
    module.__dict__[_STATE] = State(getattr(owner, name), parts, rows)
    setattr(owner, name, MethodType(forward, module))


def unpatch(module: nn.Module) -> None:
    """Put back the forward that was there, wherever hooks have moved the patch since."""
    if not patched(module):
        return
    original = module.__dict__.pop(_STATE).original
    own = getattr(original, "__func__", None) is type(module).forward and original.__self__ is module
    for owner, name in _slots(module):
        if getattr(getattr(owner, name), "__func__", None) is forward:
            if own and owner is module and name == "forward":
                delattr(module, "forward")
            else:
                setattr(owner, name, original)
