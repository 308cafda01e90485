"""Give a diffusers pipeline its adapter methods, and take them away again.

The pipeline stays the same object.  Its type becomes a cached subclass that saves, pickles and prints as its base;
the engine hangs on the component modules, so pipelines over the same components share it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from difflora import diffusers_api, surface, targets
from difflora.formats.errors import DiffLoRAError, some
from difflora.runtime import Anchor, Engine

if TYPE_CHECKING:
    from typing import TypeVar

    from torch import nn

    P = TypeVar("P")

_BASE = "_difflora_base"
_classes: dict[type, type] = {}


def attach(pipe: P, *, max_rank: int | None = None) -> P:
    """The same pipeline, with `load_lora`, `set_loras`, `loras`, ... and diffusers' own adapter names on one engine.

    Changes no weight; attaching again changes nothing.  `max_rank` reserves room for so many ranks (each adapter's
    rounded up to a multiple of 16) on every linear layer of the denoiser, at addresses that stay: attach before
    torch.compile or a CUDA graph's capture, and adapters loaded with mode="kernel", their ranks and strengths change
    without recompiling.  It takes (in + out) * max_rank numbers a layer.
    Raises DiffLoRAError if it is no diffusers pipeline, holds PEFT adapters, or mixes components of pipelines that are
    attached separately.
    """
    from diffusers import DiffusionPipeline

    if not isinstance(pipe, DiffusionPipeline):
        raise DiffLoRAError(f"{type(pipe).__name__} is no diffusers pipeline; attach takes one. For a model use bind.")
    models = targets.components(pipe)
    _refuse_peft(models)
    engines = {id(e): e for e in map(surface.engine_on, models.values()) if e is not None}
    if len(engines) > 1:
        raise DiffLoRAError(
            "the components belong to different attached pipelines; detach all but one of them, so that one engine "
            "owns the weights."
        )
    engine = next(iter(engines.values()), None) or Engine()
    surface.adopt(engine, pipe)
    engine.pipelines.add(pipe)
    if max_rank is not None:
        engine.reserve(max_rank)
    if not hasattr(type(pipe), _BASE):
        pipe.__class__ = _attached(type(pipe))
    return pipe


def detach(pipe: P) -> P:
    """The same pipeline as before `attach`: its own type, and base weights bit for bit.

    Adapters stay loaded only if another attached pipeline shares the components.
    """
    base = getattr(type(pipe), _BASE, None)
    if base is None:
        raise DiffLoRAError(f"this {type(pipe).__name__} is not attached.")
    engine = surface.engine_behind(pipe)
    with engine.lock:
        if set(engine.pipelines) <= {pipe}:
            engine.clear()
            engine.reserve(0)
            for model in engine.models.values():
                targets.unwrapped(model).__dict__.pop(Anchor.KEY, None)
        engine.pipelines.discard(pipe)
        pipe.__class__ = base
    return pipe


def _refuse_peft(models: dict[str, nn.Module]) -> None:
    held = [name for name, model in models.items() if getattr(targets.unwrapped(model), "peft_config", None)]
    if held:
        raise DiffLoRAError(
            f"{some(held)} already holds PEFT adapters. Call unload_lora_weights() (or fuse_lora() first to keep them) "
            "before difflora.attach, and load them through difflora."
        )


def _attached(base: type) -> type:
    if base not in _classes:
        names: dict[str, Any] = {**surface.METHODS, **diffusers_api.METHODS}
        names.update(
            {
                _BASE: base,
                "__module__": base.__module__,
                "__qualname__": base.__qualname__,
                "__doc__": base.__doc__,
                "__call__": _call(base),
                "save_pretrained": _save(base),
                "__reduce_ex__": _reduce,
            }
        )
        _classes[base] = type(base)(base.__name__, (base,), names)
    return _classes[base]


def _call(base: Any) -> Any:
    @functools.wraps(base.__call__)
    def call(self: Any, *args: Any, loras: Any = None, **kwargs: Any) -> Any:
        return surface.call(self, base.__call__, args, kwargs, loras)

    return call


def _save(base: Any) -> Any:
    @functools.wraps(base.save_pretrained)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        with surface.base_only(self):
            return base.save_pretrained(self, *args, **kwargs)

    return save_pretrained


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle and copy as the base class: the attached type has no name of its own to be found by."""
    reduced = object.__reduce_ex__(self, 2 if protocol < 2 else protocol)
    return (object.__new__, (getattr(type(self), _BASE),), *reduced[2:])
