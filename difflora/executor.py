"""What the weights and forwards of a set of components hold, and how they are switched: all of a plan or none of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from difflora import linear, merge, ranks, targets, weights, widening
from difflora.formats.errors import DiffLoRAError
from difflora.kernels import facts, ops
from difflora.targets import Target
from difflora.types import Joint, Mode, Section

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difflora.kernels import merging

Place = tuple[str, str]
Asked = Mapping[Place, "list[tuple[Section, float, Mode]]"]
Plan = dict[Place, merge.Applied]


@dataclass(frozen=True, eq=False, slots=True)
class View:
    """One component as it is now: what can be acted on, host copies under group offloading, and tied weights."""

    targets: dict[str, Target]
    copies: dict[Tensor, Tensor | None]
    tied: dict[str, tuple[str, ...]]


@dataclass(eq=False, slots=True)
class Executor:
    """`sites` are merged parameters by (component, path), `beside` patched forwards by (component, module path).

    `views` holds what was seen of each component since `look`: hooks, moves and wrappers may change it between calls.
    `rooms` are the tables of kernel mode, by component, `reserved` the blocks of ranks that they always have room for,
    and `patched` the modules that are patched, whether something acts there or not.
    """

    models: dict[str, nn.Module]
    sites: dict[Place, merge.Site] = field(default_factory=dict)
    beside: dict[Place, merge.Applied] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    rooms: dict[str, ranks.Arena] = field(default_factory=dict)
    reserved: int = 0
    patched: set[Place] = field(default_factory=set)

    def look(self) -> None:
        """Forget what was seen of the modules, and follow weights that were moved, cast or replaced since."""
        self.views.clear()
        for place, site in list(self.sites.items()):
            if not self._here(place):
                del self.sites[place]
                continue
            held = self.masters(place)
            if held is None or merge.witness(held[0]) != site.witness:
                self._follow(place, site, held)

    def target(self, place: Place) -> Target:
        """The parameter at this place; DiffLoRAError if the model has lost it."""
        if not self._here(place):
            raise DiffLoRAError(
                f"{'.'.join(place)} is no longer in the model; unload the adapters that change it, and load them again."
            )
        return self._view(place[0]).targets[place[1]]

    def masters(self, place: Place) -> tuple[Tensor, ...] | None:
        """The tensors to write for this parameter, None if it cannot be written exactly."""
        target = self.target(place)
        return weights.masters(target.module, self._view(place[0]).copies, target.name)

    def _here(self, place: Place) -> bool:
        return place[1] in self._view(place[0]).targets

    def _view(self, component: str) -> View:
        if component not in self.views:
            model = self.models[component]
            copies, tied = weights.host_copies(model), weights.tied(targets.modules(model))
            self.views[component] = View(targets.targets(model), copies, tied)
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
            over = targets.fused_over(place[1], self._view(place[0]).targets)
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
            fixed, owner = self.masters(place) is None, self.target(place).module
            # A widened input takes every change of the weight inside.
            apart = not any(section.wide for section, _, _ in parts)
            outside = tuple(
                (s, w) for s, w, mode in parts if fixed or (apart and mode == "kernel" and linear.runs(s, owner))
            )
            inside = tuple((s, w) for s, w, _ in parts if (s, w) not in outside)
            merging.update({place: inside} if inside else {})
            module = place[1].removesuffix(".bias")
            for path in self._view(place[0]).tied.get(module, (module,)) if outside else ():
                # A weight is shared by the modules that are tied; a forward is not.
                beside[place[0], path] = beside.get((place[0], path), ()) + outside
        return merging, beside

    def _merge(self, wanted: Plan) -> None:
        for place in [p for p in self.sites if p not in wanted]:
            self._restore(place)
        together: dict[Place, tuple[merge.Applied, merging.Job]] = {}
        for place, applied in wanted.items():
            site = self.sites.get(place)
            if site is not None and _equal(site.applied, applied):
                continue
            wide = max(section.wide for section, _ in applied)
            if wide or (site is not None and site.widened):
                self._restore(place)
                self._widen(place, applied, wide)
                continue
            held = self._writable(place)
            if len(held) == 1 and ops.kernels_for(held[0].device):
                base = site.base if site is not None else merge.keep(held[0])
                job = merge.job(held[0], base, applied)
                if job is not None:
                    together[place] = applied, job
                    continue
            self._write(place, applied, site)
        for device in dict.fromkeys(job.weight.device for _, job in together.values()):
            self._write_together({p: (a, job) for p, (a, job) in together.items() if job.weight.device == device})

    def _write_together(self, together: Mapping[Place, tuple[merge.Applied, merging.Job]]) -> None:
        """What `_write` does, for everything on one device that the kernel has a form for: in one pass over it."""
        from difflora.kernels import merging

        before = {place: self.sites.get(place) for place in together}
        for place, (_, job) in together.items():
            # Entered before they are written: a write that is interrupted is undone from here.
            self.sites[place] = merge.Site(job.base, (), torch.empty(0), ())
        jobs = [job for _, job in together.values()]
        with facts.on(jobs[0].weight.device):
            told = merging.merge(jobs)
        flags, sums = torch.stack([told.flags, told.sums]).tolist()
        for place, flag, found in zip(together, flags, sums, strict=True):
            site, name = before[place], ".".join(place)
            if flag:
                raise merge.not_finite(name, together[place][1].weight.dtype)
            if site is not None and site.checksum not in (None, found):
                raise DiffLoRAError(f"the pristine copy of {name} was changed by somebody else; load the model again.")
        taken = merge.samples([job.weight for _, job in together.values()])
        for (place, (applied, job)), sample, found in zip(together.items(), taken, sums, strict=True):
            self.sites[place] = merge.Site(job.base, applied, sample, merge.witness(job.weight), checksum=found)

    def _write(self, place: Place, applied: merge.Applied, site: merge.Site | None) -> None:
        held = self._writable(place)
        base = site.base if site is not None else merge.keep(held[0])
        value = merge.checked(base.to(held[0].device), applied, ".".join(place), self._whole)
        # Entered before it is written: a write that is interrupted is undone from here.
        self.sites[place] = merge.Site(base, (), merge.sample(value), ())
        merge.write(held, value)
        self.sites[place] = merge.Site(base, applied, merge.sample(value), merge.witness(held[0]))

    def _widen(self, place: Place, applied: merge.Applied, wide: int) -> None:
        if not wide:
            self._write(place, applied, None)
            return
        (base, *copies) = self._writable(place)
        if copies:
            raise DiffLoRAError(f"the adapter widens {'.'.join(place)}, which is offloaded. Load it before offloading.")
        value = merge.checked(widening.padded(base, wide), applied, ".".join(place), self._whole)
        widened = widening.widen(self.models[place[0]], self.target(place).module, value)
        held = self._writable(place)
        self.sites[place] = merge.Site(base, applied, merge.sample(value), merge.witness(held[0]), widened)

    def _restore(self, place: Place) -> None:
        """Give a parameter its base back, bit for bit; nothing if it has it."""
        site = self.sites.get(place)
        if site is None:
            return
        if site.widened is not None:
            widening.narrow(site.widened)
        else:
            merge.write(self._writable(place), site.base)
        del self.sites[place]

    def _whole(self, joint: Joint) -> Tensor:
        """The pristine rows of a module that the file has fused and the model has not: fp32."""
        parts: list[tuple[int, Tensor]] = []
        for place, start, stop, blocks in joint.parts:
            site = self.sites.get(place)
            base = (site.base if site is not None else self._writable(place)[0])[start:stop].float()
            pieces = torch.split(base, [last - first for first, last in blocks])
            parts += [(first, piece) for (first, _), piece in zip(blocks, pieces, strict=True)]
        ordered = [piece for _, piece in sorted(parts, key=lambda part: part[0])]
        return torch.cat([piece.to(ordered[0].device) for piece in ordered])

    def _writable(self, place: Place) -> tuple[Tensor, ...]:
        held = self.masters(place)
        if held is None:
            raise DiffLoRAError(f"the weight of {'.'.join(place)} cannot be written any more.")
        return held

    @torch.inference_mode(False)
    def reserve(self, blocks: int) -> None:
        """Keep room for so many blocks of 16 ranks on every linear layer of the denoisers, and keep them patched."""
        before = self.reserved
        self.reserved = blocks
        if blocks != before:
            self.rooms.clear()
            self._patch(dict(self.beside))

    def _patch(self, wanted: Plan) -> None:
        every = {**dict.fromkeys(self._kept(), ()), **wanted}
        for place in [p for p in self.patched if p not in every]:
            if self._here(place):
                linear.unpatch(self.target(place).module)
            self.patched.discard(place)
            self.beside.pop(place, None)
        for place in wanted:
            shards = weights.shards(self.target(place).module)
            if shards > 1:
                raise DiffLoRAError(
                    f"{'.'.join(place)} is sharded over {shards} processes, which is not supported "
                    "yet. Load adapters on a model that is whole on each process."
                )
        given = {place: linear.parts(p for p in applied if p[0].name != "bias") for place, applied in every.items()}
        sites = self._sites(given)
        for place, applied in every.items():
            module, site = self.target(place).module, sites.get(place)
            held = linear.patched(module) and linear.current(module)
            if held and linear.site(module) is site and _equal(self.beside.get(place, ()), applied):
                continue
            made = [] if site is not None else linear.terms(given[place], module)
            made += linear.bias_terms([part for part in applied if part[0].name == "bias"])
            rows = (targets.weight_shape(module) or (0,))[0]
            linear.patch(module, made, rows, site, given[place] if site is not None else ())
            self.patched.add(place)
            self.beside.pop(place, None)
            if applied:
                self.beside[place] = applied

    def _kept(self) -> list[Place]:
        """The places that are patched whatever acts there, so that compiled code need not change."""
        components = [name for name in self.models if self.reserved and not name.startswith("text_encoder")]
        return [(c, path) for c in components for path in self._tabled(c, targets.modules(self.models[c]))]

    def _tabled(self, component: str, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """The linear layers of these that the tables are for: all on one device, others add their terms in torch."""
        kept = self.reserved and not component.startswith("text_encoder")
        found = {
            path: (module, device)
            for path, module in modules.items()
            if (device := linear.device(module)) is not None and (kept or ops.kernels_for(device))
        }
        first = next((device for _, device in found.values()), None)
        return {path: module for path, (module, device) in found.items() if device == first}

    def _sites(self, given: Mapping[Place, tuple[ranks.Part, ...]]) -> dict[Place, ranks.Site]:
        """The places in the tables of kernel mode of everything that has one, with these terms entered."""
        sites: dict[Place, ranks.Site] = {}
        for component in {place[0] for place in given} | set(self.rooms):
            mine = {path: parts for (c, path), parts in given.items() if c == component}
            tabled = self._tabled(component, {path: self.target((component, path)).module for path in mine})
            room = self._room(component, tabled, mine)
            if room is not None:
                room.fill({path: [mine[path]] for path in tabled if mine[path]})
                sites.update({(component, path): room.sites[path] for path in tabled})
        return sites

    def _room(
        self, component: str, modules: Mapping[str, nn.Module], parts: Mapping[str, tuple[ranks.Part, ...]]
    ) -> ranks.Arena | None:
        """Room for these terms: what there is if they fit, else new room; None if nothing needs any."""
        room = self.rooms.get(component)
        shapes = linear.shapes(modules, targets.unwrapped(self.models[component]))
        kept = 0 if component.startswith("text_encoder") else self.reserved
        blocks = max((sum(part.blocks for part in parts[path]) for path in modules), default=0)
        if room is not None and room.holds(shapes, kept or blocks):
            return room
        self.rooms.pop(component, None)
        if modules:
            self.rooms[component] = ranks.arena(shapes, kept or -(-blocks // 4) * 4, 1, 1)
        return self.rooms.get(component)

    def _follow(self, place: Place, site: merge.Site, held: tuple[Tensor, ...] | None) -> None:
        """Recognise what became of a merged weight, and keep its base true."""
        now = held[0] if held is not None else self._unwritable(place)
        path = merge.casts(site.sample, merge.sample(now))
        if path == () and held is not None:
            site.witness = merge.witness(now)
            return
        if site.widened is not None:
            self._follow_widened(place, site, path, now)
        elif path is not None:
            # Cast, or made unwritable, with the adapters inside: the base as it would be now, to start again from.
            merge.write(held or (now,), merge.cast(site.base.to(now.device), path))
        elif held is None:
            raise self._lost(place)
        # Otherwise somebody assigned other weights: they are the new base.
        del self.sites[place]

    def _follow_widened(
        self, place: Place, site: merge.Site, path: tuple[torch.dtype, ...] | None, now: Tensor
    ) -> None:
        """A widened weight was cast or moved: its own parameter, which waits outside the module, goes the same way."""
        if site.widened is None or path is None:
            raise self._lost(place)
        original = site.widened.original
        original.data = merge.cast(original.data.to(now.device), path)
        widening.narrow(site.widened)

    def _unwritable(self, place: Place) -> Tensor:
        """What holds the weight that can no longer be written exactly: fp8, or the local part of a whole DTensor."""
        target = self.target(place)
        local: Tensor | None = target.held.to_local() if hasattr(target.held, "to_local") else target.held
        gone = weights.on_disk(target.module, self._view(place[0]).copies, target.name)
        lost = gone or weights.shards(target.module, target.name) > 1
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
