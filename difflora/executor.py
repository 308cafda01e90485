"""What the weights and forwards of a set of components hold, and how they are switched: all of a plan or none of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

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


@dataclass(frozen=True, eq=False, slots=True)
class View:
    """One component as it is now: path -> module, its weights' host copies under group offloading, and its ties."""

    modules: dict[str, nn.Module]
    copies: dict[Tensor, Tensor | None]
    tied: dict[str, tuple[str, ...]]


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
            if not self._here(place):
                del self.sites[place]
                continue
            targets = self.masters(place)
            if targets is None or merge.witness(targets[0]) != site.witness:
                self._follow(place, site, targets)

    def module(self, place: Place) -> nn.Module:
        """The module at this place; DiffLoRAError if the model has lost it."""
        if not self._here(place):
            raise DiffLoRAError(
                f"{'.'.join(place)} is no longer in the model; unload the adapters that change it, and load them again."
            )
        return self._view(place[0]).modules[place[1]]

    def masters(self, place: Place) -> tuple[Tensor, ...] | None:
        """The tensors to write for this weight, None if it cannot be written exactly."""
        return weights.masters(self.module(place), self._view(place[0]).copies)

    def _here(self, place: Place) -> bool:
        return place[1] in self._view(place[0]).modules

    def _view(self, component: str) -> View:
        if component not in self.views:
            model = self.models[component]
            here = binding.modules(model)
            self.views[component] = View(here, weights.host_copies(model), weights.tied(here))
        return self.views[component]

    @torch.inference_mode(False)
    def switch(self, asked: Asked) -> None:
        """Bring every weight and forward to what is asked; after an error all of them are as they were."""
        self._refuse_fused({**asked, **self.sites, **self.beside})
        merging, beside = self._split(asked)
        before = {place: site.applied for place, site in self.sites.items()}, dict(self.beside)
        try:
            self._merge(merging)
            self._patch(beside)
        except BaseException:
            self._merge(before[0])
            self._patch(before[1])
            raise

    def _refuse_fused(self, places: Iterable[Place]) -> None:
        """DiffLoRAError if the model computes with a copy of one of these weights, made while it was changed."""
        for place in places:
            over = binding.fused_over(place[1], self._view(place[0]).modules)
            if over is not None:
                raise DiffLoRAError(
                    f"{'.'.join(place)} was fused into {over} while adapters that change it are loaded. Call "
                    "unfuse_qkv_projections(), unload them, then fuse, and load them again."
                )

    def _split(self, asked: Asked) -> tuple[Plan, Plan]:
        """(what goes into the weights, what goes beside them)."""
        merging: Plan = {}
        beside: Plan = {}
        for place, parts in asked.items():
            fixed = self.masters(place) is None
            inside = tuple((s, w) for s, w, mode in parts if not fixed and mode != "kernel")
            outside = tuple((s, w) for s, w, mode in parts if fixed or mode == "kernel")
            merging.update({place: inside} if inside else {})
            for path in self._view(place[0]).tied[place[1]] if outside else ():
                # A weight is shared by the modules that are tied; a forward is not.
                beside[place[0], path] = beside.get((place[0], path), ()) + outside
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
            if self._here(place):
                linear.unpatch(self.module(place))
            del self.beside[place]
        for place, applied in wanted.items():
            module = self.module(place)
            if weights.shards(module) > 1:
                raise DiffLoRAError(
                    f"{'.'.join(place)} is sharded over {weights.shards(module)} processes, which is not supported "
                    "yet. Load adapters on a model that is whole on each process."
                )
            held = linear.patched(module) and linear.current(module)
            if not held or not _equal(self.beside.get(place, ()), applied):
                parts = linear.terms(stack(applied, home(module)), module)
                linear.patch(module, parts, (binding.weight_shape(module) or (0,))[0])
                self.beside[place] = applied

    def _follow(self, place: Place, site: merge.Site, targets: tuple[Tensor, ...] | None) -> None:
        """Recognise what became of a merged weight, and keep its base true."""
        now = targets[0] if targets is not None else self._unwritable(place)
        path = merge.casts(site.sample, merge.sample(now))
        if path == () and targets is not None:
            site.witness = merge.witness(now)
            return
        if path is not None:
            # Cast, or made unwritable, with the adapters inside: the base as it would be now, to start again from.
            merge.write(targets or (now,), merge.cast(site.base.to(now.device), path))
        elif targets is None:
            raise self._lost(place)
        # Otherwise somebody assigned other weights: they are the new base.
        del self.sites[place]

    def _unwritable(self, place: Place) -> Tensor:
        """What holds the weight that can no longer be written exactly: fp8, or the local part of a whole DTensor."""
        module = self.module(place)
        weight = module._parameters.get("weight")
        local = weight.to_local() if weight is not None and hasattr(weight, "to_local") else weight
        lost = weights.on_disk(module, self._view(place[0]).copies) or weights.shards(module) > 1
        if local is None or lost or type(local.data) is not torch.Tensor:
            raise self._lost(place)
        return local

    def _lost(self, place: Place) -> DiffLoRAError:
        return DiffLoRAError(
            f"the weight of {'.'.join(place)} was sharded, quantised or sent to disk while adapters were merged into "
            "it, so its base cannot be restored. Undo that, or load the model again; unload adapters first, or load "
            "them with mode='kernel'."
        )


def _equal(one: merge.Applied, two: merge.Applied) -> bool:
    return len(one) == len(two) and all(a is b and v == w for (a, v), (b, w) in zip(one, two, strict=True))
