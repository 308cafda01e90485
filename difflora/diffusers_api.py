"""diffusers' own adapter methods, with their arguments and return types, on difflora's engine.

A script that uses them runs after `difflora.attach(pipe)`; what differs is stated per method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from difflora.composing import number, scaled, strength
from difflora.formats.errors import DiffLoRAError, some
from difflora.loading import Source
from difflora.sources import Hub
from difflora.surface import engine_of, opened
from difflora.types import Strength

# Arguments of diffusers' loader that say how to reach the Hub, and those that have nothing to do here.
_HUB = ("weight_name", "subfolder", "revision", "token", "cache_dir", "local_files_only", "force_download")
_MOOT = ("proxies", "low_cpu_mem_usage", "unet_config", "return_lora_metadata", "resume_download", "user_agent")
_UNET_BLOCKS = {"down": "down_blocks", "mid": "mid_block", "up": "up_blocks"}


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
            engine.replace(str(adapter_name), adapter)
            return
        name = adapter_name if adapter_name is not None else _free_name(engine.loaded)
        engine.enter(adapter, name, Strength(), "auto", strict=True, alone=True)


def _free_name(taken: Mapping[str, object]) -> str:
    return next(name for i in range(len(taken) + 1) if (name := f"default_{i}") not in taken)


def set_adapters(self: Any, adapter_names: str | list[str], adapter_weights: Any = None) -> None:
    """Make exactly these adapters active.  Weights: one, or one per name; diffusers' block dicts too; None is 1."""
    engine = engine_of(self)
    names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
    weights = adapter_weights if isinstance(adapter_weights, list) else [adapter_weights] * len(names)
    if len(weights) != len(names):
        raise DiffLoRAError(
            f"Length of adapter names {len(names)} is not equal to the length of the weights {len(weights)}"
        )
    engine.activate(engine.mix({n: 1.0 if w is None else _blocks(w) for n, w in zip(names, weights, strict=True)}))


def _blocks(weight: Any) -> Any:
    """diffusers' {"unet": {"down": 0.9, "up": {"block_0": 0.6, "block_1": [0.4, 0.8]}}} as block patterns."""
    if not isinstance(weight, Mapping):
        return weight
    return {c: _patterns(inner) if isinstance(inner, Mapping) else inner for c, inner in weight.items()}


def _patterns(given: Mapping[str, Any]) -> dict[str, float]:
    patterns: dict[str, float] = {}
    for level, value in given.items():
        root = _UNET_BLOCKS.get(level)
        if root is None:
            patterns[level] = value
        elif not isinstance(value, Mapping):
            patterns.update(_attentions(root, value))
        else:
            for block, inner in value.items():
                patterns.update(_attentions(f"{root}.{str(block).removeprefix('block_')}", inner))
    return patterns


def _attentions(root: str, value: Any) -> dict[str, float]:
    """A number acts on the whole block, a list on its attentions one by one."""
    if not isinstance(value, list):
        return {root: value}
    if len(value) == 1:
        return {root: value[0]}
    return {f"{root}.attentions.{i}": weight for i, weight in enumerate(value)}


def get_active_adapters(self: Any) -> list[str]:
    """The active adapters' names; empty while they are disabled."""
    engine = engine_of(self)
    return list(dict(engine.active.items)) if engine.enabled else []


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
    engine_of(self).forget([adapter_names] if isinstance(adapter_names, str) else list(adapter_names))


def unload_lora_weights(self: Any, reset_to_overwritten_params: bool = False) -> None:
    """Unload every adapter.  Fused ones stay in the weights until `unfuse_lora`."""
    engine = engine_of(self)
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
    adapter_names: list[str] | None = None,
    **kwargs: Any,
) -> None:
    """Keep the active adapters (or those named) in the weights until `unfuse_lora`, whatever is unloaded or set.

    Values that are not finite are always refused, so `safe_fusing` changes nothing.
    """
    engine = engine_of(self)
    with engine.lock:
        wanted = _listed(components) if components is not None else _fusable(self, engine.models)
        if not wanted:
            raise DiffLoRAError("`components` cannot be an empty list.")
        factor = number(lora_scale, "lora_scale")
        active = dict(engine.active.items)
        names = list(active) if adapter_names is None else list(adapter_names)
        if not names:
            raise DiffLoRAError("no adapter is active, so there is nothing to fuse; set_adapters first or pass names.")
        engine.known(names)
        engine.fuse(wanted, {name: scaled(active.get(name, Strength()), factor) for name in names})


def _listed(components: list[str] | str) -> list[str]:
    return [components] if isinstance(components, str) else list(components)


def _fusable(pipe: Any, models: Mapping[str, object]) -> list[str]:
    """diffusers' default per pipeline class: what its loader mixin lists, as far as it is there."""
    listed = getattr(pipe, "_lora_loadable_modules", None) or list(models)
    return [name for name in listed if name in models]


def unfuse_lora(self: Any, components: list[str] | str | None = None, **kwargs: Any) -> None:
    """Take fused adapters out again; the base is bit-identical where nothing else acts."""
    engine = engine_of(self)
    engine.unfuse(list(engine.fused) if components is None else _listed(components))


def fused_loras(self: Any) -> set[str]:
    """The names of the adapters that are fused."""
    return {name for fused in engine_of(self).fused.values() for name in fused}


def num_fused_loras(self: Any) -> int:
    """How many adapters are fused."""
    return len(fused_loras(self))


def set_lora_device(self: Any, adapter_names: list[str] | str, device: Any) -> None:
    """Keep these adapters' factors on `device`.  They are brought to the weights when needed."""
    names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
    engine_of(self).move(names, device)


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
