"""Kernel mode: a module's forward is patched in place so that it adds its adapters' low-rank terms.

The patch sits at the innermost forward, beneath every hook, so hooks may come and go around it.  No module is wrapped
or replaced: paths, `state_dict()` keys, types and isinstance checks stay.  A linear layer on a GPU reads the tables of
`ranks` through the operations of `kernels.ops`; every other module, place and dtype adds `Term`s in plain torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflora import siblings
from difflora.composing import full_scale
from difflora.deltas import LowRank, tensors
from difflora.factors import home
from difflora.formats.errors import DiffLoRAError
from difflora.kernels import facts, ops, reference
from difflora.ranks import Part, Shape, Site
from difflora.slots import innermost, is_own, swap
from difflora.targets import CONV, weight_shape
from difflora.types import Section

_STATE = "_difflora"
RANKS = reference.RANKS
Parts = tuple[Part, ...]
# The dtypes that a module computes in: its weight may be stored in another.
_COMPUTE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TABLED = _COMPUTE[:3]
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
class Terms:
    """Terms as they were made, and where and as the last call used them."""

    made: list[Term]
    placed: list[Term]

    @classmethod
    def of(cls, made: Iterable[Term]) -> Terms:
        terms = list(made)
        return cls(terms, list(terms))


@dataclass(eq=False, slots=True)
class State:
    """What the patched forward of one module reads.

    `original` is the forward beneath it, `rows` the height of the output, `rest` the device and dtype that the weight
    had when it was patched, `terms` what is added in plain torch, `site` the module's place in the tables, and
    `parts` what is entered there, from which `spare` terms are made for inputs that come from elsewhere.  `plain` says
    that the forward beneath is the linear layer's own.
    """

    original: Callable[..., Any]
    rows: int
    rest: tuple[object, ...]
    terms: Terms
    site: Site | None = None
    parts: tuple[Part, ...] = ()
    spare: Terms | None = None
    plain: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        held = (self.original, self.rows, self.rest, self.terms, self.site, self.parts, self.spare, self.plain)
        return State(*copy.deepcopy(held, memo))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A bound method unpickles by name, as the class's own forward: the adapters would be gone without a word.
        if not self.terms.made and not (self.site is not None and self.site.busy):
            return type(None), ()
        raise DiffLoRAError(
            "adapters act beside the weights of this model, and a pickle cannot hold them. Unload them first, or load "
            "them with mode='merged'."
        )


def parts(applied: Iterable[tuple[Section, float]]) -> tuple[Part, ...]:
    """The low-rank terms of a module; DiffLoRAError for a strength that is no finite number in fp32."""
    return tuple(_part_of(section, weight) for section, weight in applied)


def _part_of(section: Section, weight: float) -> Part:
    delta, scale = section.delta, full_scale(section, weight)
    if isinstance(delta, LowRank):
        key = (delta.down,) if delta.mid is None else (delta.down, delta.mid)
        return Part(delta, key, delta.rank, section.start, section.stop, scale)
    pair = delta.low_rank()
    assert pair is not None, "what has no low-rank form acts in the weights"
    return Part(delta, tensors(delta), pair[0].shape[0], section.start, section.stop, scale)


def terms(given: Iterable[Part], module: nn.Module) -> list[Term]:
    """Terms in the shapes that the module's own operation takes, in the dtype that it computes in."""
    kernel = (module.in_channels // module.groups, *module.kernel_size) if isinstance(module, CONV) else (-1,)
    weight = module._parameters.get("weight")
    dtype = weight.dtype if weight is not None and weight.dtype in _COMPUTE else torch.float32
    made: list[Term] = []
    shared: dict[Hashable, Tensor] = {}
    for part in given:
        pair = part.source.low_rank()
        assert pair is not None, "what has no low-rank form acts in the weights"
        a = shared.setdefault(part.a, pair[0].to(home(module), dtype).reshape(part.rank, *kernel))
        scale = torch.tensor(part.scale, dtype=torch.float32, device=a.device)
        made.append(Term(a, pair[1].to(a), scale, part.start, part.stop))
    return made


def bias_terms(parts: Iterable[tuple[Section, float]]) -> list[Term]:
    """The terms of what is added to the module's bias, where it has none or none that can be written."""
    return [
        Term(None, part.delta.dense(), torch.tensor(weight, dtype=torch.float32), part.start, part.stop)
        for part, weight in parts
    ]


def forward(self: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The module's own output plus its terms.  One function for every module: its state is in the module."""
    state: State = self._difflora  # type: ignore[assignment]
    site, added = state.site, state.terms
    if site is None:
        output: Tensor = state.original(input, *args, **kwargs)
    elif site.b.device == input.device and not hasattr(input, "to_local"):
        output = _tabled(self, state, site, input)
    else:
        output = state.original(input, *args, **kwargs)
        output = _added(output, _spare(self, state), self, input, state.rows)
    return _added(output, added, self, input, state.rows)


def _tabled(module: nn.Module, state: State, site: Site, input: Tensor) -> Tensor:
    """The output of a linear layer with what the tables say."""
    seen = torch.compiler.is_compiling() or torch.is_grad_enabled()
    if not (seen or site.busy or facts.capturing()):
        return state.original(input)  # type: ignore[no-any-return]
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        output: Tensor = state.original(input)
        with torch.autocast(kind, enabled=False):
            return _expanded(output, site.bank.product(input, site.samples), site)
    t = site.bank.product(input, site.samples)
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    if state.plain and weight is not None and input.dtype == weight.dtype == site.b.dtype:
        return ops.operations().linear(input, weight, bias, t, *_tables(site))  # type: ignore[no-any-return]
    return _expanded(state.original(input), t, site)


def _tables(site: Site) -> tuple[Tensor, ...]:
    return site.b, site.entries, site.scales, site.counts, site.samples


def _expanded(output: Tensor, t: Tensor, site: Site) -> Tensor:
    """The output of any forward plus the terms of every row's request."""
    if torch.is_grad_enabled() and (output.requires_grad or t.requires_grad):
        return reference.expand(output.reshape(-1, output.shape[-1]), t, *_tables(site)).view(output.shape)
    output = output.contiguous()
    ops.operations().expand_(output, t, *_tables(site))
    return output


def _spare(module: nn.Module, state: State) -> Terms:
    """What the tables say, as terms that follow the input to its device."""
    if state.spare is None:
        state.spare = Terms.of(terms(state.parts, module))
    return state.spare


def _added(output: Tensor, added: Terms, module: nn.Module, input: Tensor, rows: int) -> Tensor:
    if hasattr(input, "to_local"):
        return _sharded(module, added, input, output, rows)
    for index in range(len(added.made)):
        output = output + _part(_placed(added, index, input, output), module, input, rows)
    return output


def _sharded(module: nn.Module, added: Terms, input: Any, output: Any, rows: int) -> Tensor:
    """The same on DTensors of a one-process mesh, where the local tensor is the whole one."""
    local = input.to_local()
    for index in range(len(added.made)):
        part = _part(_placed(added, index, local, output), module, local, rows)
        output = output + type(output).from_local(part, output.device_mesh, output.placements)
    return output  # type: ignore[no-any-return]


def _placed(added: Terms, index: int, input: Tensor, output: Tensor) -> Term:
    """The term on the input's device, in the dtype of the output."""
    term = added.placed[index]
    if term.b.device == input.device and term.b.dtype == output.dtype:
        return term
    # From the terms as they were made: a chain of casts would round every time.
    term = added.made[index].to(input.device, output.dtype)
    if not torch.compiler.is_compiling():
        added.placed[index] = term
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


def site(module: nn.Module) -> Site | None:
    """The place in the tables that this patched module reads."""
    state: State = module.__dict__[_STATE]
    return state.site


def current(module: nn.Module) -> bool:
    """Whether the weight is still where, and of the dtype, for which the terms of this patched module were made."""
    return bool(module.__dict__[_STATE].rest == _rest(module))


def _rest(module: nn.Module) -> tuple[object, ...]:
    weight = module._parameters.get("weight")
    return () if weight is None else (weight.device, weight.dtype)


def device(module: nn.Module) -> torch.device | None:
    """Where the tables of kernel mode belong for this module; None if they have no form for it."""
    weight = module._parameters.get("weight")
    if not isinstance(module, nn.Linear) or weight is None or weight.is_meta or hasattr(weight, "device_mesh"):
        return None
    return weight.device if weight.dtype in _TABLED else None


def shapes(modules: Mapping[str, nn.Module], model: nn.Module) -> dict[Hashable, Shape]:
    """What room the tables need for these linear layers."""
    bank = siblings.banks(modules, model)
    return {
        path: Shape(bank[path], *_sizes(module), module.weight.dtype, module.weight.device)  # type: ignore[arg-type]
        for path, module in modules.items()
    }


def _sizes(module: nn.Module) -> tuple[int, int]:
    rows, cols = weight_shape(module) or (0, 0)
    return rows, cols


def patch(module: nn.Module, made: Iterable[Term], rows: int, site: Site | None = None, given: Parts = ()) -> None:
    """Make the module add these terms to its output, and what `site` holds of it; replaces what it added before."""
    added = Terms.of(made)
    if patched(module):
        state: State = module.__dict__[_STATE]
        state.rows, state.rest, state.terms = rows, _rest(module), added
        state.site, state.parts, state.spare = site, given, None
        return
    owner, name = innermost(module)
    original = getattr(owner, name)
    plain = type(module) is nn.Linear and is_own(original, module)
    module.__dict__[_STATE] = State(original, rows, _rest(module), added, site, given, plain=plain)
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
        state.terms, state.site, state.parts, state.spare = Terms.of(()), None, (), None
