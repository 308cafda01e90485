"""What an attached pipeline can do: difflora's own method names, and the call that carries adapters per request."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difflora import binding, factors, prompt
from difflora.composing import scaled, strength
from difflora.formats.errors import DiffLoRAError, some
from difflora.loading import Source, normalise, read
from difflora.runtime import Anchor, Engine
from difflora.sources import Hub
from difflora.types import Adapter, LoadReport, Mix, Mode, Strength

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_MODES = ("auto", "merged", "kernel")
_PROMPT = re.compile(r"prompt(_\d+)?")
_NEGATIVE = re.compile(r"negative_prompt(_\d+)?")
# What pipelines call the argument whose "scale" multiplies every adapter of one call.
_SCALE_ARGUMENTS = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")


# ---- the engine of a pipeline ---------------------------------------------------------------------------------------


def engine_on(model: nn.Module) -> Engine | None:
    """The engine that owns this module's weights, if any."""
    anchor = binding.unwrapped(model).__dict__.get(Anchor.KEY)
    return anchor.engine if isinstance(anchor, Anchor) else None


def engine_of(pipe: Any) -> Engine:
    """The engine of an attached pipeline, brought up to date with the components that it has now."""
    models = binding.components(pipe)
    for model in models.values():
        engine = engine_on(model)
        if engine is not None:
            adopt(engine, pipe)
            return engine
    raise DiffLoRAError("none of the components is attached any more; call difflora.attach(pipe) again.")


def adopt(engine: Engine, pipe: Any) -> None:
    """Take over components that the pipeline got since; DiffLoRAError if adapters act on the one that was replaced."""
    with engine.lock:
        for name, model in binding.components(pipe).items():
            known = engine.models.get(name)
            if known is not None and binding.unwrapped(known) is not binding.unwrapped(model):
                if any(place[0] == name for place in (*engine.executor.sites, *engine.executor.beside)):
                    raise DiffLoRAError(
                        f"{name} was replaced while adapters act on it; unload them before assigning another {name}."
                    )
                binding.unwrapped(known).__dict__.pop(Anchor.KEY, None)
            engine.models[name] = model
            binding.unwrapped(model).__dict__[Anchor.KEY] = Anchor(engine)


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
    with engine.lock:
        given = strength(weight, name or "the adapter", engine.models)
        adapter = opened(engine, source, folders, hub, allow_pickle, family, component)
        return engine.enter(adapter, name or adapter.name, given, mode, strict, alone=False)


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
    shapes = binding.shapes(engine.models)
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
    engine = engine_of(self)
    engine.forget([engine.resolve(name)])


def unload_loras(self: Any) -> None:
    """Unload every adapter; the base is bit-identical to before the first was loaded."""
    engine = engine_of(self)
    engine.clear()


# ---- what is loaded -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoraState:
    """One loaded adapter: what it is, and how it acts now (`weight` is None while it is inactive)."""

    name: str
    weight: Any
    layout: str
    family: str | None
    components: tuple[str, ...]
    modules: int
    ranks: tuple[int, ...]
    bytes: int
    device: str
    mode: str
    source: str


class LoraTable(tuple[LoraState, ...]):
    """The loaded adapters in loading order; prints as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "no adapters loaded"
        head = ("name", "weight", "layout", "family", "components", "modules", "rank", "MB", "device", "mode")
        rows = [head, *(_row(state) for state in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(state: LoraState) -> tuple[str, ...]:
    weight = "-" if state.weight is None else str(state.weight)
    rank = "..".join(str(r) for r in sorted({state.ranks[0], state.ranks[-1]})) if state.ranks else "-"
    return (
        state.name, weight, state.layout, state.family or "-", ",".join(state.components), str(state.modules), rank,
        f"{state.bytes / 1e6:.2f}", state.device, state.mode,
    )  # fmt: skip


def loras(self: Any) -> LoraTable:
    """What is loaded, what is active and how strongly, where it is and how big; prints as a table."""
    engine = engine_of(self)
    with engine.lock:
        active: dict[str, list[Any]] = {}
        for name, given in engine.active.items:
            active.setdefault(name, []).append(_shown(given))
        return LoraTable(_state(engine, name, active.get(name)) for name in engine.loaded)


def _shown(given: Strength) -> Any:
    if not given.components and not given.patterns:
        return given.default
    return {**dict(given.components), **{f"{c}.{p}" if c else p: w for c, p, w in given.patterns}}


def _state(engine: Engine, name: str, weights: list[Any] | None) -> LoraState:
    held = engine.loaded[name]
    report = held.report
    tensors = factors.tensors(held.bound)
    return LoraState(
        name,
        None if weights is None else weights[0] if len(weights) == 1 else weights,
        report.layout,
        report.family,
        tuple(component for component, sites in held.bound.sections.items() if sites),
        len(report.matched),
        report.ranks,
        sum(t.numel() * t.element_size() for t in tensors),
        ",".join(sorted({str(t.device) for t in tensors})),
        engine.acting(name),
        report.source,
    )


# ---- one call -------------------------------------------------------------------------------------------------------


def call(pipe: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], loras: Any) -> Any:
    """Run the pipeline's own call with the adapters that this request asks for, tags and `scale` included."""
    engine = engine_of(pipe)
    bound = inspect.signature(run).bind_partial(pipe, *args, **kwargs)
    given = bound.arguments
    tags = _cut_tags(given)
    factor = _cut_scale(given)
    with engine.lock:
        wanted = _wanted(engine, given, loras, tags, factor)
        with engine.call(wanted):
            return run(*bound.args, **bound.kwargs)


def _cut_tags(given: dict[str, Any]) -> tuple[prompt.Tag, ...]:
    """Remove the tags from every prompt argument, in place in `given`; the one set of tags that they agree on."""
    found: dict[str, tuple[prompt.Tag, ...]] = {}
    for name, value in list(given.items()):
        if _NEGATIVE.fullmatch(name) and any(prompt.parse(text)[1] for text in _texts(value)):
            raise DiffLoRAError(f"{name} holds an adapter tag; tags belong in prompt. Remove it, or use loras=.")
        if not _PROMPT.fullmatch(name) or not _texts(value):
            continue
        parsed = [prompt.parse(text) for text in _texts(value)]
        if len({tags for _, tags in parsed}) > 1:
            raise DiffLoRAError(
                f"the prompts of one call carry different adapter tags in {name}: different sets in one batch are not "
                "supported yet. Give all prompts the same tags, or call once per set."
            )
        found[name] = parsed[0][1]
        given[name] = parsed[0][0] if isinstance(value, str) else [text for text, _ in parsed]
    tags = found.get("prompt", ())
    others = [name for name, own in found.items() if own and own != tags]
    if others:
        raise DiffLoRAError(f"the tags of {some(others)} differ from those of prompt; give them once, in prompt.")
    return tags


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    return [text for text in texts if isinstance(text, str)]


def _cut_scale(given: dict[str, Any]) -> float | None:
    """diffusers' `{"scale": s}` of this call, taken out of its argument; no PEFT layer is there to read it."""
    for name in _SCALE_ARGUMENTS:
        value = given.get(name)
        if isinstance(value, Mapping) and "scale" in value:
            rest = {key: item for key, item in value.items() if key != "scale"}
            given[name] = rest or None
            return strength(value["scale"], f"{name}['scale']", ()).default
    return None


def _wanted(
    engine: Engine, given: dict[str, Any], loras: Any, tags: tuple[prompt.Tag, ...], factor: float | None
) -> Mix | None:
    if loras is None and not tags and factor is None:
        return None
    base = engine.active if loras is None else engine.mix(_one_set(loras, given))
    if loras is None and not engine.enabled:
        base = Mix()
    items = base.items + tuple(_tagged(engine, tag) for tag in tags)
    if factor is not None:
        items = tuple((name, scaled(own, factor)) for name, own in items)
    if loras is not None or tags:
        _refuse_late_text(engine, given, items)
    return Mix(items)


def _one_set(loras: Any, given: dict[str, Any]) -> Mapping[str, Any]:
    if not isinstance(loras, list | tuple):
        return loras  # type: ignore[no-any-return]
    rows = _row_count(given)
    if len(loras) != rows:
        raise DiffLoRAError(f"loras has {len(loras)} sets for {rows} prompts; expected one set per prompt.")
    if any(one != loras[0] for one in loras):
        raise DiffLoRAError(
            "loras holds different sets for one batch, which is not supported yet; call once per set, or give one set."
        )
    return loras[0]  # type: ignore[no-any-return]


def _row_count(given: dict[str, Any]) -> int:
    value = given.get("prompt")
    if value is not None:
        return 1 if isinstance(value, str) else len(value)
    embeds = given.get("prompt_embeds")
    return len(embeds) if embeds is not None else 1


def _tagged(engine: Engine, tag: prompt.Tag) -> tuple[str, Strength]:
    name = engine.resolve(tag.name)
    engine.known([name])
    if tag.text_encoder == tag.denoiser:
        return name, Strength(tag.denoiser)
    encoders = tuple((c, tag.text_encoder) for c in engine.models if c.startswith("text_encoder"))
    return name, Strength(tag.denoiser, encoders)


def _refuse_late_text(engine: Engine, given: dict[str, Any], items: tuple[tuple[str, Strength], ...]) -> None:
    """With ready prompt embeddings, what this call asks of a text encoder could not act any more."""
    if given.get("prompt_embeds") is None:
        return
    for name, own in items:
        parts = [c for c in engine.loaded[name].bound.sections if c.startswith("text_encoder")]
        acting = [c for c in parts if dict(own.components).get(c, own.default) != 0.0]
        if acting:
            raise DiffLoRAError(
                f"{name!r} changes {some(acting)}, but prompt_embeds are given, so the text is encoded already. Set "
                f"its weight there to 0 ({{'{acting[0]}': 0}}), or pass the prompt itself."
            )


@contextmanager
def lora(self: Any, weights: Mapping[str, Any]) -> Iterator[None]:
    """`with pipe.lora({"style": 0.8}):` exactly these adapters are in force inside, whatever was active before."""
    engine = engine_of(self)
    with engine.lock, engine.call(engine.mix(weights)):
        yield


METHODS: dict[str, Any] = {
    "load_lora": load_lora,
    "set_loras": set_loras,
    "unload_lora": unload_lora,
    "unload_loras": unload_loras,
    "loras": property(loras),
    "lora": lora,
}
