"""What an attached pipeline can do: difflora's own method names, and the engine that they work on."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difflora import calls, targets
from difflora.composing import strength
from difflora.formats.errors import DiffLoRAError, some
from difflora.loading import Source, normalise, read
from difflora.runtime import Anchor, Engine, Request
from difflora.sources import Hub
from difflora.table import LoraTable, table
from difflora.types import Adapter, LoadReport, Mix, Mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_MODES = ("auto", "merged", "kernel")


# ---- the engine of a pipeline ---------------------------------------------------------------------------------------


def engine_on(model: nn.Module) -> Engine | None:
    """The engine that owns this module's weights, if any."""
    anchor = targets.unwrapped(model).__dict__.get(Anchor.KEY)
    return anchor.engine if isinstance(anchor, Anchor) else None


def engine_of(pipe: Any) -> Engine:
    """The engine of an attached pipeline, brought up to date with the components that it has now."""
    engine = engine_behind(pipe)
    adopt(engine, pipe)
    return engine


def engine_behind(pipe: Any) -> Engine:
    """The engine of an attached pipeline, as it was left: what unloads, whatever became of the components."""
    engines = [engine for model in targets.components(pipe).values() if (engine := engine_on(model)) is not None]
    own = [engine for engine in engines if pipe in engine.pipelines]
    if not engines:
        raise DiffLoRAError("none of the components is attached any more; call difflora.attach(pipe) again.")
    return (own or engines)[0]


def adopt(engine: Engine, pipe: Any) -> None:
    """Take over the components that the pipeline has now, and let go of those that no pipeline has.

    Raises DiffLoRAError if adapters act on one that was replaced, or if another engine owns one.
    """
    with engine.lock:
        now = targets.components(pipe)
        replaced = [n for n, m in now.items() if n in engine.models and _other(engine.models[n], m)]
        acting = {place[0] for place in (*engine.executor.sites, *engine.executor.beside)}
        for name in now:
            if name in replaced and name in acting:
                raise DiffLoRAError(
                    f"{name} was replaced while adapters act on it; unload them before assigning another {name}."
                )
            if engine_on(now[name]) not in (None, engine):
                raise DiffLoRAError(
                    f"{name} belongs to another attached pipeline; detach that one first, so that one engine owns it."
                )
        for name in replaced:
            targets.unwrapped(engine.models[name]).__dict__.pop(Anchor.KEY, None)
        for name, model in now.items():
            engine.models[name] = model
            if engine_on(model) is None:
                targets.unwrapped(model).__dict__[Anchor.KEY] = Anchor(engine)
        if engine.models.keys() - now.keys():
            held = {name for other in {*engine.pipelines, pipe} for name in targets.components(other)}
            for name in engine.models.keys() - held:
                engine.release(name)


def _other(one: nn.Module, two: nn.Module) -> bool:
    return targets.unwrapped(one) is not targets.unwrapped(two)


# ---- loading and activating -----------------------------------------------------------------------------------------


def load_lora(
    self: Any,
    source: Source | Mapping[str, Source],
    weight: Any = 1.0,
    *,
    name: str | None = None,
    component: str | None = None,
    mode: Mode = "auto",
    strict: bool = True,
    family: str | None = None,
    folders: Sequence[str | Path] = (),
    weight_name: str | None = None,
    subfolder: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    allow_pickle: bool = False,
) -> LoadReport:
    """Load an adapter and add it to the active set at `weight`; returns what was matched.

    `source` is anything that `difflora.load` takes, or {component: source} for one file per expert.  `weight` is a
    number or {component or block pattern: number}.  `mode`: "merged" writes the weights, "kernel" adds the low-rank
    terms beside them, "auto" merges wherever the weight can be written exactly.  `strict=False` applies what matches
    and reports the rest.  Raises DiffLoRAError, with nothing changed, for anything that cannot be honoured.
    """
    hub = Hub(weight_name, subfolder, revision, token, cache_dir, local_files_only)
    engine = engine_of(self)
    if mode not in _MODES:
        raise DiffLoRAError(f"mode={mode!r}; expected one of {some(_MODES)}.")
    if name is not None and not isinstance(name, str):
        raise DiffLoRAError(f"name={name!r}; expected a string.")
    with engine.lock:
        given = strength(weight, "the adapter" if name is None else name, engine.models)
        adapter = opened(engine, source, folders, hub, allow_pickle, family, component)
        called = name if name is not None else _own_name(adapter, engine.loaded)
        return engine.enter(adapter, called, given, mode, strict, alone=False)


def _own_name(adapter: Adapter, taken: Collection[str]) -> str:
    """What an adapter is called unless the user says: after its file, or `lora_{i}` for a state dict."""
    return adapter.name if adapter.path is not None else free_name("lora_{}", taken)


def free_name(form: str, taken: Collection[str]) -> str:
    """The first of `form` with 0, 1, 2, ... that is not taken."""
    return next(name for i in itertools.count() if (name := form.format(i)) not in taken)


def opened(
    engine: Engine,
    source: Source | Mapping[str, Source],
    folders: Sequence[str | Path] = (),
    hub: Hub | None = None,
    allow_pickle: bool = False,
    family: str | None = None,
    component: str | None = None,
) -> Adapter:
    """The adapter of `source`, with the engine's models as evidence for its family."""
    shapes = targets.shapes(engine.models)
    if not isinstance(source, Mapping) or not set(source) <= set(engine.models) or not source:
        raw = read(source, folders, hub, allow_pickle)  # type: ignore[arg-type]
        return normalise(raw, model=shapes, family=family, component=component)
    parts = [opened(engine, part, folders, hub, allow_pickle, family, target) for target, part in source.items()]  # type: ignore[arg-type]
    components: dict[str, Any] = {}
    for part in parts:
        twice = components.keys() & part.components.keys()
        if twice:
            raise DiffLoRAError(f"several of the files change {some(twice)}; expected one file per component.")
        components.update(part.components)
    return replace(parts[0], components=components, source=" + ".join(part.source for part in parts))


def set_loras(self: Any, weights: Mapping[str, Any]) -> None:
    """Make exactly these adapters active: {name: weight or {component or block pattern: weight}}; {} is the base."""
    engine = engine_of(self)
    engine.activate(engine.mix(weights))


def unload_lora(self: Any, name: str) -> None:
    """Unload one adapter; weights that nothing else changes are bit-identical to before it was loaded."""
    engine = engine_behind(self)
    engine.forget([engine.resolve(name)])


def unload_loras(self: Any, *names: str) -> None:
    """Unload these adapters, or every one; the base is then bit-identical to before the first was loaded."""
    engine = engine_behind(self)
    if names:
        engine.forget([engine.resolve(name) for name in names])
    else:
        engine.clear()


def loras(self: Any) -> LoraTable:
    """What is loaded, what is active and how strongly, where it is and how big; prints as a table."""
    return table(engine_of(self))


# ---- one call -------------------------------------------------------------------------------------------------------


def call(pipe: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], loras: Any) -> Any:
    """Run the pipeline's own call with the adapters that this call asks for; other threads queue until it is done."""
    engine = engine_of(pipe)
    signature = inspect.signature(run)
    # Some pipelines swallow any keyword; one that is about adapters would change nothing there, unnoticed.
    stray = [n for n in kwargs if n not in signature.parameters and ("lora" in n or n.startswith("adapter"))]
    if stray:
        raise TypeError(f"the call got {some(stray)}, which nothing reads; expected loras= or prompt tags.")
    bound = signature.bind_partial(pipe, *args, **kwargs)
    with engine.lock, engine.call(calls.request(engine, bound.arguments, loras)):
        return run(*bound.args, **bound.kwargs)


def base_only(pipe: Any) -> AbstractContextManager[None]:
    """Inside, the weights are the base with what is fused: what is written to disk holds no active adapter."""
    return engine_of(pipe).call(Request(base=Mix()))


@contextmanager
def lora(self: Any, weights: Mapping[str, Any]) -> Iterator[None]:
    """`with pipe.lora({"style": 0.8}):` exactly these adapters are in force inside, whatever was active before."""
    engine = engine_of(self)
    with engine.lock, engine.call(Request(base=engine.mix(weights))):
        yield


METHODS: dict[str, Any] = {
    "load_lora": load_lora,
    "set_loras": set_loras,
    "unload_lora": unload_lora,
    "unload_loras": unload_loras,
    "loras": property(loras),
    "lora": lora,
}
