"""diffusers' own adapter methods, with their arguments and return types, on difflora's engine.

A script that uses them runs after `difflora.attach(pipe)`; what differs is stated per method.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from difflora import blocks, targets
from difflora.composing import number, scaled, strength
from difflora.formats.errors import DiffLoRAError, some
from difflora.loading import Source
from difflora.sources import Hub
from difflora.surface import engine_behind, engine_of, free_name, opened
from difflora.types import Strength

if TYPE_CHECKING:
    from torch import nn

# Arguments of diffusers' loader that say how to reach the Hub, and those that have nothing to do here.
_HUB = ("weight_name", "subfolder", "revision", "token", "cache_dir", "local_files_only", "force_download")
_MOOT = ("proxies", "low_cpu_mem_usage", "unet_config", "return_lora_metadata", "resume_download", "user_agent")
# Deprecated there, where they do nothing either.
_MOOT_FUSING = ("fuse_unet", "fuse_transformer", "fuse_text_encoder")


def load_lora_weights(
    self: Any,
    pretrained_model_name_or_path_or_dict: Source,
    adapter_name: str | None = None,
    hotswap: bool = False,
    **kwargs: Any,
) -> None:
    """Load an adapter and leave only it active, at weight 1; the name defaults to `default_{i}`.

    `hotswap=True` replaces the loaded adapter of that name, at its weight.  `use_safetensors=False` allows pickle.
    """
    unknown = [name for name in kwargs if name not in (*_HUB, *_MOOT, "use_safetensors", "load_into_transformer_2")]
    if unknown:
        raise TypeError(f"load_lora_weights() got unexpected arguments: {some(unknown)}")
    engine = engine_of(self)
    hub = Hub(**{name: kwargs[name] for name in _HUB if kwargs.get(name) is not None})
    target = "transformer_2" if kwargs.get("load_into_transformer_2") else None
    pickle = kwargs.get("use_safetensors") is False
    with engine.lock:
        adapter = opened(engine, pretrained_model_name_or_path_or_dict, (), hub, pickle, None, target)
        if hotswap:
            if adapter_name is None:
                raise DiffLoRAError("hotswap=True needs the adapter_name of a loaded adapter to replace.")
            engine.replace(adapter_name, adapter)
            return
        name = adapter_name if adapter_name is not None else free_name("default_{}", engine.loaded)
        engine.enter(adapter, name, Strength(), "auto", strict=True, alone=True)


def set_adapters(self: Any, adapter_names: str | list[str], adapter_weights: Any = None) -> None:
    """Make exactly these adapters active.  Weights: one, or one per name; diffusers' block dicts too; None is 1."""
    engine = engine_of(self)
    names = _listed(adapter_names)
    weights = adapter_weights if isinstance(adapter_weights, list) else [adapter_weights] * len(names)
    if len(weights) != len(names):
        raise DiffLoRAError(
            f"Length of adapter names {len(names)} is not equal to the length of the weights {len(weights)}"
        )
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DiffLoRAError(f"{some(dict.fromkeys(map(repr, twice)))} is named more than once; give it one weight.")
    with engine.lock:
        given = {name: _weight(weight, engine.models) for name, weight in zip(names, weights, strict=True)}
        engine.activate(engine.mix(given))


def _weight(weight: Any, models: Mapping[str, nn.Module]) -> Any:
    """A weight as `set_loras` takes it; None is 1, and block dicts of a UNet become patterns."""
    if not isinstance(weight, Mapping):
        return 1.0 if weight is None else weight
    unet = models.get("unet")
    if unet is None or not isinstance(weight.get("unet"), Mapping):
        return {component: 1.0 if inner is None else inner for component, inner in weight.items()}
    return {**weight, "unet": blocks.patterns(weight["unet"], targets.modules(unet))}


def get_active_adapters(self: Any) -> list[str]:
    """The names of the active set, in every component together; `disable_lora` does not change it."""
    return list(dict(engine_of(self).active.items))


def get_list_adapters(self: Any) -> dict[str, list[str]]:
    """Component -> the adapters loaded that change it."""
    engine = engine_of(self)
    found: dict[str, list[str]] = {}
    for name, held in engine.loaded.items():
        for component, sites in held.bound.sections.items():
            if sites:
                found.setdefault(component, []).append(name)
    return found


def delete_adapters(self: Any, adapter_names: str | list[str]) -> None:
    """Unload these adapters.  Unlike PEFT, no other adapter becomes active in their place."""
    engine_behind(self).forget(_listed(adapter_names))


def unload_lora_weights(self: Any, reset_to_overwritten_params: bool = False) -> None:
    """Unload every adapter.  Fused ones stay in the weights until `unfuse_lora`."""
    engine = engine_behind(self)
    engine.forget(list(engine.loaded))


def disable_lora(self: Any) -> None:
    """Run the base until `enable_lora`; adapters stay loaded and keep their weights."""
    engine_of(self).enable(False)


def enable_lora(self: Any) -> None:
    """Let the active adapters act again."""
    engine_of(self).enable(True)


def fuse_lora(
    self: Any,
    components: list[str] | str | None = None,
    lora_scale: float = 1.0,
    safe_fusing: bool = False,
    adapter_names: list[str] | str | None = None,
    **kwargs: Any,
) -> None:
    """Keep the active adapters (or those named) in the weights until `unfuse_lora`, whatever is unloaded or set.

    Values that are not finite are always refused, so `safe_fusing` changes nothing.  An adapter that is fused again
    is fused at its newest strength.
    """
    _only_moot("fuse_lora", kwargs)
    engine = engine_of(self)
    with engine.lock:
        wanted = _listed(components) if components is not None else _fusable(self, engine.models)
        if not wanted:
            raise DiffLoRAError("`components` cannot be an empty list.")
        factor = number(lora_scale, "lora_scale")
        active = dict(engine.active.items)
        names = list(active) if adapter_names is None else _listed(adapter_names)
        if not names:
            raise DiffLoRAError("no adapter is active, so there is nothing to fuse; set_adapters first or pass names.")
        engine.fuse(wanted, {name: scaled(active.get(name, Strength()), factor) for name in names})


def _only_moot(method: str, kwargs: Mapping[str, Any]) -> None:
    unknown = [name for name in kwargs if name.removeprefix("un") not in _MOOT_FUSING]
    if unknown:
        raise TypeError(f"{method}() got unexpected arguments: {some(unknown)}")


def _listed(names: list[str] | str) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _fusable(pipe: Any, models: Mapping[str, object]) -> list[str]:
    """What the pipeline's own `fuse_lora` fuses unless told otherwise, as far as it is there; else every component."""
    own = getattr(pipe._difflora_base, "fuse_lora", None)
    listed = inspect.signature(own).parameters["components"].default if own is not None else models
    return [name for name in listed if name in models]


def unfuse_lora(self: Any, components: list[str] | str | None = None, **kwargs: Any) -> None:
    """Take fused adapters out again (of every component unless some are named); what is active acts as before."""
    _only_moot("unfuse_lora", kwargs)
    engine = engine_of(self)
    wanted = list(engine.fused) if components is None else _listed(components)
    unknown = [name for name in wanted if name not in engine.models and name not in engine.fused]
    if unknown or (components is not None and not wanted):
        raise DiffLoRAError(f"components={components!r}; expected some of {some(engine.models)}.")
    engine.unfuse(wanted)


def fused_loras(self: Any) -> set[str]:
    """The names of the adapters that are fused."""
    return {one.name for fused in engine_of(self).fused.values() for one in fused}


def num_fused_loras(self: Any) -> int:
    """How many adapters are fused."""
    return len(fused_loras(self))


def set_lora_device(self: Any, adapter_names: list[str] | str, device: Any) -> None:
    """Keep these adapters' factors on `device`.  They are brought to the weights when needed."""
    engine_of(self).move(_listed(adapter_names), device)


def enable_lora_hotswap(self: Any, target_rank: int = 128, check_compiled: str = "error") -> None:
    """Nothing to prepare: any adapter can replace any other here, whatever its rank, before or after compiling."""
    strength(target_rank, "target_rank", ())
    engine_of(self)


METHODS: dict[str, Any] = {
    "load_lora_weights": load_lora_weights,
    "set_adapters": set_adapters,
    "get_active_adapters": get_active_adapters,
    "get_list_adapters": get_list_adapters,
    "delete_adapters": delete_adapters,
    "unload_lora_weights": unload_lora_weights,
    "disable_lora": disable_lora,
    "enable_lora": enable_lora,
    "fuse_lora": fuse_lora,
    "unfuse_lora": unfuse_lora,
    "fused_loras": property(fused_loras),
    "num_fused_loras": property(num_fused_loras),
    "set_lora_device": set_lora_device,
    "enable_lora_hotswap": enable_lora_hotswap,
}
