"""The engine of one set of components: which adapters are loaded, and which of them act.

All state is behind one lock: a call keeps it from its first switch to its last, so other threads queue.  Every change
is all or nothing: after an error the weights, the forwards and the registry are as they were.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from difflora import binding, composing, factors, linear, targets, words
from difflora.executor import Executor, Place
from difflora.formats.errors import DiffLoRAError, some
from difflora.types import Adapter, BoundAdapter, LoadReport, Mix, Mode, Section, Strength, Vectors
from difflora.words import Words

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, eq=False, slots=True)
class Loaded:
    """A registered adapter; its factors are the engine's own copies."""

    bound: BoundAdapter
    report: LoadReport
    mode: Mode
    vectors: tuple[Vectors, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Fused:
    """An adapter that stays in the weights at this strength, whatever becomes of its name."""

    name: str
    held: Loaded
    given: Strength


@dataclass(frozen=True, slots=True)
class Request:
    """What one call asks for: its own set (None: what is in force around it), more adapters, a factor on all."""

    base: Mix | None = None
    extra: tuple[tuple[str, Strength], ...] = ()
    factor: float = 1.0


class Engine:
    """Adapters and weights of the components that one or more pipelines share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.models: dict[str, nn.Module] = {}
        self.executor = Executor(self.models)
        self.words = Words(self.models)
        self.loaded: dict[str, Loaded] = {}
        self.active = Mix()
        self.enabled = True
        self.requests: list[Request] = []
        self.fused: dict[str, list[Fused]] = {}
        self.pipelines: weakref.WeakSet[Any] = weakref.WeakSet()

    # ---- what is loaded -------------------------------------------------------------------------------------------

    def enter(self, adapter: Adapter, name: str, given: Strength, mode: Mode, strict: bool, alone: bool) -> LoadReport:
        """Register an adapter and add it to the active set (`alone`: make it the set), or do neither."""
        with self.lock:
            if name in self.loaded:
                raise DiffLoRAError(f"the name {name!r} is taken; loaded are {some(self.loaded)}. Pass another name.")
            held = self._held(adapter, name, mode, strict)
            composing.check_patterns(given, name, self._paths(adapter))
            self.loaded[name] = held
            try:
                self.activate(Mix((*(() if alone else self.active.items), (name, given))))
            except BaseException:
                del self.loaded[name]
                raise
            return held.report

    def replace(self, name: str, adapter: Adapter) -> None:
        """Put another adapter in the place of the one called `name`; its weight stays."""
        with self.lock:
            self.known([name])
            before = self.loaded[name]
            self.loaded[name] = self._held(adapter, name, before.mode, strict=True)
            try:
                self.refresh()
            except BaseException:
                self.loaded[name] = before
                raise

    def _held(self, adapter: Adapter, name: str, mode: Mode, strict: bool) -> Loaded:
        bound, report = binding.match(adapter, self.models, strict)
        modules = {
            c: {path: target.module for path, target in targets.targets(self.models[c]).items()}
            for c in bound.sections
            if c in self.models
        }
        for given in adapter.vectors:
            words.check(given, self.models, adapter.source)
        vectors = tuple(factors.own_vectors(v, adapter.source) for v in adapter.vectors)
        held = Loaded(factors.own(bound, modules), replace(report, name=name), mode, vectors)
        self._refuse_tables(held)
        self.executor.look()
        places = [
            ((c, real), section)
            for c, sites in held.bound.sections.items()
            for real, sections in sites.items()
            for section in sections
        ]
        fixed = [(place, section) for place, section in places if self.executor.masters(place) is None]
        inside = [place for place in places if not linear.runs(place[1], self.executor.target(place[0]).module)]
        _refuse_fixed(held, fixed, inside)
        if inside and mode == "kernel":
            kinds = some(sorted({section.delta.kind for _, section in inside}))
            note = f"{len(inside)} of its changes ({kinds}) have no kernel form and act in the weights"
            held = replace(held, report=replace(held.report, notes=(*held.report.notes, note)))
        return held

    def _refuse_tables(self, held: Loaded) -> None:
        """DiffLoRAError where one adapter brings words and another changes the table that they go to."""
        every = [held, *self.loaded.values()]
        for component in {vectors.component for one in every for vectors in one.vectors}:
            table = words.embedding(self.models[component], component)
            here = targets.modules(self.models[component])
            changed = [p for one in every for p in one.bound.sections.get(component, ()) if here.get(p) is table]
            if changed:
                raise DiffLoRAError(
                    f"{held.report.name!r}: words are added to {component}.{changed[0]}, and an adapter changes it. "
                    "Load one of the two."
                )

    def forget(self, names: Collection[str]) -> None:
        """Unload adapters; the base comes back bit for bit where nothing else acts."""
        with self.lock:
            self.known(names)
            busy = {name for r in self.requests for name, _ in (*(r.base.items if r.base else ()), *r.extra)}
            if busy & set(names):
                raise DiffLoRAError(
                    f"{some(busy & set(names))} is in use by the call (or with block) that is running; "
                    "unload it afterwards."
                )
            self.activate(Mix(tuple(item for item in self.active.items if item[0] not in names)))
            for name in set(names):
                del self.loaded[name]
            # With nothing left to disable, the next adapter starts enabled.
            self.enabled = self.enabled or not self.loaded

    def clear(self) -> None:
        """Unload everything, fused adapters too."""
        with self.lock:
            self.forget(list(self.loaded))
            self.unfuse(list(self.fused))

    def move(self, names: Collection[str], device: Any) -> None:
        """Keep the factors of these adapters on `device`."""
        with self.lock:
            self.known(names)
            for name in names:
                held = self.loaded[name]
                self.loaded[name] = replace(held, bound=factors.own(held.bound, {}, torch.device(device)))
            self.refresh()

    def reserve(self, ranks: int) -> None:
        """Keep room for so many ranks on every linear layer of the denoisers; 0 gives it up."""
        with self.lock:
            if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 0:
                raise DiffLoRAError(f"max_rank is {ranks!r}; expected a whole number of ranks, 0 or more.")
            self.executor.look()
            self.executor.reserve(-(-ranks // linear.RANKS))

    def known(self, names: Collection[str]) -> None:
        """DiffLoRAError unless every name is loaded."""
        missing = [repr(name) for name in names if name not in self.loaded]
        if missing:
            have = some(map(repr, self.loaded)) or "none"
            raise DiffLoRAError(f"no adapter is called {some(missing)}; loaded are: {have}.")

    def resolve(self, name: str) -> str:
        """The name of the loaded adapter that `name` means: itself, or one whose file has it as an alias."""
        if name in self.loaded:
            return name
        others = [own for own, held in self.loaded.items() if name in held.bound.adapter.aliases]
        if len(others) > 1:
            raise DiffLoRAError(f"{name!r} is an alias of several adapters: {some(others)}; use one of these names.")
        return others[0] if others else name

    def acting(self, name: str) -> str:
        """How an adapter acts now: "merged", "kernel", "merged+kernel", or "-" while it does not."""
        mine = {id(s) for sites in self.loaded[name].bound.sections.values() for parts in sites.values() for s in parts}
        inside = any(id(s) in mine for site in self.executor.sites.values() for s, _ in site.applied)
        outside = any(id(s) in mine for applied in self.executor.beside.values() for s, _ in applied)
        return "+".join(word for word, so in (("merged", inside), ("kernel", outside)) if so) or "-"

    # ---- what is asked for ----------------------------------------------------------------------------------------

    def mix(self, asked: Mapping[str, Any]) -> Mix:
        """{name: weight} as a checked Mix: names are loaded, weights finite, block patterns match something."""
        with self.lock:
            if not isinstance(asked, Mapping):
                raise DiffLoRAError(
                    f"adapters were given as {asked!r}; expected {{name: weight}}, as in {{'style': 1.0}}."
                )
            named = [(self.resolve(name), weight) for name, weight in asked.items()]
            self.known([name for name, _ in named])
            if len(dict(named)) < len(named):
                raise DiffLoRAError(f"one adapter is named twice in {some(map(repr, asked))}; give it one weight.")
            parts = {c for held in self.loaded.values() for c in held.bound.sections}
            wanted = composing.mix(dict(named), self.models.keys() | parts)
            for name, given in wanted.items:
                if given.patterns:
                    composing.check_patterns(given, name, self._paths(self.loaded[name].bound.adapter))
            return wanted

    def _paths(self, adapter: Adapter) -> dict[str, set[str]]:
        """Component -> the paths that a block pattern may name: the model's own and those of the file."""
        found = {name: set(targets.targets(model)) for name, model in self.models.items()}
        for component, deltas in adapter.components.items():
            found.setdefault(component, set()).update(deltas)
        return found

    def activate(self, wanted: Mix) -> None:
        """Make `wanted` the active set, at once unless a call with its own set is running."""
        with self.lock:
            before, self.active = self.active, wanted
            try:
                self.refresh()
            except BaseException:
                self.active = before
                raise

    def enable(self, on: bool) -> None:
        """Let the active set act, or the base alone; with nothing loaded there is nothing to disable."""
        with self.lock:
            before, self.enabled = self.enabled, on or not self.loaded
            try:
                self.refresh()
            except BaseException:
                self.enabled = before
                raise

    @contextmanager
    def call(self, request: Request) -> Iterator[None]:
        """Run with `request` in force and put back what was in force before, whatever happens."""
        with self.lock:
            self.requests.append(request)
            try:
                self.refresh()
                yield
            finally:
                self.requests.pop()
                self.refresh()

    # ---- fused adapters -------------------------------------------------------------------------------------------

    def fuse(self, components: Collection[str], strengths: Mapping[str, Strength]) -> None:
        """Keep adapters in these components at these strengths until `unfuse`; DiffLoRAError if none acts there."""
        with self.lock:
            unknown = [name for name in components if name not in self.models]
            if unknown:
                raise DiffLoRAError(f"there is no component {some(unknown)}; the components are {some(self.models)}.")
            self.known(strengths)
            adapters = [Fused(name, self.loaded[name], given) for name, given in strengths.items()]
            fused = {component: self._fused_in(component, adapters) for component in components}
            if not any(one in fused[component] for one in adapters for component in components):
                raise DiffLoRAError(f"{some(strengths)} changes nothing in {some(components)}, so nothing was fused.")
            self._fuse_exactly({**self.fused, **fused})

    def _fused_in(self, component: str, adapters: list[Fused]) -> list[Fused]:
        """What is fused in a component once `adapters` are: each of them once, at its newest strength."""
        new = [one for one in adapters if one.held.bound.sections.get(component)]
        again = {id(one.held.report) for one in new}
        return [*(one for one in self.fused.get(component, ()) if id(one.held.report) not in again), *new]

    def unfuse(self, components: Collection[str]) -> None:
        """Take fused adapters out of these components."""
        with self.lock:
            self._fuse_exactly({c: fused for c, fused in self.fused.items() if c not in components})

    def _fuse_exactly(self, fused: dict[str, list[Fused]]) -> None:
        before, self.fused = self.fused, fused
        try:
            self.refresh()
        except BaseException:
            self.fused = before
            raise

    # ---- what acts ------------------------------------------------------------------------------------------------

    def in_force(self) -> Mix:
        """The active set, or what the calls that are running make of it."""
        items = self.active.items if self.enabled else ()
        for request in self.requests:
            items = (request.base.items if request.base is not None else items) + request.extra
            items = tuple((name, composing.scaled(given, request.factor)) for name, given in items)
        return Mix(items)

    def refresh(self) -> None:
        """Bring weights, forwards and words to what is asked for now."""
        with self.lock:
            self.executor.look()
            before = self.words.current
            self.words.show(self._vectors(), self.pipelines)
            try:
                self.executor.switch(self._asked(self.models))
            except BaseException:
                self.words.show(before, self.pipelines)
                raise

    def _vectors(self) -> tuple[Vectors, ...]:
        """The words of the adapters that are in force, whatever their strength: vectors have none."""
        names = dict.fromkeys(name for name, _ in self.in_force().items)
        return tuple(vectors for name in names for vectors in self.loaded[name].vectors)

    def release(self, component: str) -> None:
        """Let go of a component that no pipeline has any more; its weights are the base's again."""
        with self.lock:
            self.executor.look()
            self.executor.switch(self._asked(self.models.keys() - {component}))
            targets.unwrapped(self.models.pop(component)).__dict__.pop(Anchor.KEY, None)

    def _asked(self, components: Collection[str]) -> dict[Place, list[tuple[Section, float, Mode]]]:
        """Per module, the sections that act on it with their weights: the fused adapters', then those in force."""
        asked: dict[Place, list[tuple[Section, float, Mode]]] = {}
        wanted = self.in_force().items
        for component in components:
            fused = self.fused.get(component, ())
            # By report: it stays the same object when the factors are moved, and is another for another adapter.
            inside = {id(one.held.report) for one in fused}
            for one in fused:
                _ask(asked, one.held, one.given, component)
            for name, given in wanted:
                held = self.loaded[name]
                if id(held.report) not in inside and component in held.bound.sections:
                    _ask(asked, held, given, component)
        return asked


def _refuse_fixed(held: Loaded, fixed: list[tuple[Place, Section]], inside: list[tuple[Place, Section]]) -> None:
    """DiffLoRAError for what would have to be written into parameters that cannot be: `inside` has no kernel form."""
    why = "cannot be written exactly (quantised, fp8, sharded or on disk)"
    stuck = [".".join(place) for place, section in fixed if section.name != "bias"]
    if held.mode == "merged" and stuck:
        raise DiffLoRAError(
            f"{held.report.name!r} asks for mode='merged', but {len(stuck)} weights {why}: {some(stuck)}. "
            "Use mode='auto' or mode='kernel'."
        )
    merged_only = [place for place in fixed if place in inside]
    if merged_only:
        kinds = some(sorted({section.delta.kind for _, section in merged_only}))
        raise DiffLoRAError(
            f"{held.report.name!r} holds {kinds}, which act in the weights alone, but {len(merged_only)} of these "
            f"{why}: {some('.'.join(place) for place, _ in merged_only)}. Expected a bf16, fp16 or fp32 model."
        )


def _ask(asked: dict[Place, list[tuple[Section, float, Mode]]], held: Loaded, given: Strength, component: str) -> None:
    for real, sections in held.bound.sections[component].items():
        for section in sections:
            weight = composing.weight_at(given, component, section.path)
            if weight != 0.0:
                asked.setdefault((component, real), []).append((section, weight, held.mode))


class Anchor:
    """Ties an engine to a component module; copies and pickles of the module come without it."""

    KEY = "_difflora_engine"
    __slots__ = ("engine",)

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> Anchor:
        return Anchor()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A pickle names nothing of this library, so it can be read without it.
        return type(None), ()
