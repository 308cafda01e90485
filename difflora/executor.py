"""What the weights and forwards of a set of components hold, and how they are switched: all of a plan or none of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from difflora import binding, linear, merge, weights
from difflora.composing import stack
from difflora.factors import home
from difflora.formats.errors import DiffLoRAError
from difflora.types import Mode, Section

if TYPE_CHECKING:
    from torch import Tensor, nn

Place = tuple[str, str]
Asked = Mapping[Place, "list[tuple[Section, float, Mode]]"]
Plan = dict[Place, merge.Applied]
# One component as it is now: path -> module, and its weights' host copies under group offloading.
View = tuple["dict[str, nn.Module]", "dict[Tensor, Tensor | None]"]


@dataclass(eq=False, slots=True)
class Executor:
    """`sites` are merged weights, `beside` patched forwards, both by (component, module path).

    `views` holds what was seen of each component since `look`: hooks, moves and wrappers may change it between calls.
    """

    models: dict[str, nn.Module]
    sites: dict[Place, merge.Site] = field(default_factory=dict)
    beside: dict[Place, merge.Applied] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)

    def look(self) -> None:
        """Forget what was seen of the modules, and follow weights that were moved, cast or replaced since."""
        self.views.clear()
        for place, site in list(self.sites.items()):
            targets = self.masters(place)
            if targets is None or merge.witness(targets[0]) != site.witness:
                self._follow(place, site, targets)

    def module(self, place: Place) -> nn.Module:
        """The module at this place; DiffLoRAError if the model has lost it."""
        here = self._view(place[0])[0]
        if place[1] not in here:
            raise DiffLoRAError(
                f"{'.'.join(place)} is no longer in the model; unload adapters before changing modules."
            )
        return here[place[1]]

    def masters(self, place: Place) -> tuple[Tensor, ...] | None:
        """The tensors to write for this weight, None if it cannot be written exactly."""
        return weights.masters(self.module(place), self._view(place[0])[1])

    def _view(self, component: str) -> View:
        if component not in self.views:
            model = self.models[component]
            self.views[component] = binding.modules(model), weights.host_copies(model)
        return self.views[component]

    def switch(self, asked: Asked) -> None:
        """Bring every weight and forward to what is asked; after an error all of them are as they were."""
        merging, beside = self._split(asked)
        before = {place: site.applied for place, site in self.sites.items()}, dict(self.beside)
        try:
            self._merge(merging)
            self._patch(beside)
        except BaseException:
            self._merge(before[0])
            self._patch(before[1])
            raise

    def _split(self, asked: Asked) -> tuple[Plan, Plan]:
        """(what goes into the weights, what goes beside them)."""
        merging: Plan = {}
        beside: Plan = {}
        for place, parts in asked.items():
            fixed = self.masters(place) is None
            inside = tuple((s, w) for s, w, mode in parts if not fixed and mode != "kernel")
            outside = tuple((s, w) for s, w, mode in parts if fixed or mode == "kernel")
            merging.update({place: inside} if inside else {})
            beside.update({place: outside} if outside else {})
        return merging, beside

    def _merge(self, wanted: Plan) -> None:
        for place in [p for p in self.sites if p not in wanted]:
            merge.write(self._writable(place), self.sites[place].base)
            del self.sites[place]
        for place, applied in wanted.items():
            site = self.sites.get(place)
            if site is not None and _equal(site.applied, applied):
                continue
            targets = self._writable(place)
            base = site.base if site is not None else merge.keep(targets[0])
            value = merge.checked(base.to(targets[0].device), applied, ".".join(place))
            # Entered before it is written: a write that is interrupted is undone from here.
            self.sites[place] = merge.Site(base, (), merge.sample(value), ())
            merge.write(targets, value)
            self.sites[place] = merge.Site(base, applied, merge.sample(value), merge.witness(targets[0]))

    def _writable(self, place: Place) -> tuple[Tensor, ...]:
        targets = self.masters(place)
        if targets is None:
            raise DiffLoRAError(f"the weight of {'.'.join(place)} cannot be written any more.")
        return targets

    def _patch(self, wanted: Plan) -> None:
        for place in [p for p in self.beside if p not in wanted]:
            linear.unpatch(self.module(place))
            del self.beside[place]
        for place, applied in wanted.items():
            module = self.module(place)
            if weights.shards(module) > 1:
                raise DiffLoRAError(
                    f"{'.'.join(place)} is sharded over {weights.shards(module)} processes, which is not supported "
                    "yet. Load adapters on a model that is whole on each process."
                )
            if not _equal(self.beside.get(place, ()), applied) or not linear.patched(module):
                parts = linear.terms(stack(applied, home(module)), module)
                linear.patch(module, parts, (binding.weight_shape(module) or (0,))[0])
                self.beside[place] = applied

    def _follow(self, place: Place, site: merge.Site, targets: tuple[Tensor, ...] | None) -> None:
        weight = targets[0] if targets is not None else self.module(place)._parameters.get("weight")
        local = weight.to_local() if weight is not None and hasattr(weight, "to_local") else weight
        if local is None or local.is_meta or weights.shards(self.module(place)) > 1:
            raise DiffLoRAError(
                f"the weight of {'.'.join(place)} was sharded or sent to disk while adapters were merged into it. "
                "Unload the adapters first, and load them again afterwards."
            )
        if not merge.same(merge.sample(local), site.sample.to(local.dtype)):
            # Somebody assigned other weights: they are the new base.
            del self.sites[place]
        elif targets is not None and local.dtype == site.base.dtype:
            site.witness = merge.witness(local)
        else:
            # Cast, or made unwritable, with the adapters inside: the base as it would be now, to start again from.
            merge.write(targets or (local,), site.base.to(local.device, local.dtype))
            del self.sites[place]


def _equal(one: merge.Applied, two: merge.Applied) -> bool:
    return len(one) == len(two) and all(a is b and v == w for (a, v), (b, w) in zip(one, two, strict=True))
