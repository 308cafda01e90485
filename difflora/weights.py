"""Where a module's weight really lives, with offloading hooks in between, and whether it can be written in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from difflora.targets import unwrapped

WRITABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def masters(
    module: nn.Module, copies: Mapping[Tensor, Tensor | None], name: str = "weight"
) -> tuple[Tensor, ...] | None:
    """The tensors that hold a parameter of `module`: the first is read, all are written.

    None when it cannot be written exactly: not there, packed, quantised, fp8, sharded, on disk, or computed.
    `copies` is `host_copies(model)`.
    """
    weight = module._parameters.get(name)
    if weight is None:
        return None
    if weight.is_meta:
        held = _accelerate(module, name)
        return (held,) if held is not None and _plain(held) else None
    if not _plain(weight):
        return None
    if weight in copies:
        copy = copies[weight]
        if copy is None:
            return None
        return (weight,) if copy.data_ptr() == weight.data_ptr() else (weight, copy)
    return (weight,)


def _plain(weight: Tensor) -> bool:
    ordinary = type(weight) in (Tensor, nn.Parameter) and type(weight.data) is Tensor
    return ordinary and weight.dtype in WRITABLE and weight.layout is torch.strided and not weight.is_meta


def _accelerate(module: nn.Module, name: str) -> Tensor | None:
    """The host tensor that an accelerate offload hook copies in at each forward; None if it is on disk or not there."""
    hook = module.__dict__.get("_hf_hook")
    for part in getattr(hook, "hooks", [hook]):
        source = getattr(part, "weights_map", None)
        prefix = ""
        while source is not None and hasattr(source, "dataset"):
            prefix, source = getattr(source, "prefix", "") + prefix, source.dataset
        held = getattr(source, "state_dict", source)
        if isinstance(held, Mapping) and isinstance(held.get(prefix + name), Tensor):
            value = held[prefix + name]
            return value if isinstance(value, Tensor) else None
    return None


def host_copies(model: nn.Module) -> dict[Tensor, Tensor | None]:
    """Parameter -> the host copy that diffusers' group offloading restores at each offload; None if that is on disk."""
    found: dict[Tensor, Tensor | None] = {}
    for module in unwrapped(model).modules():
        registry: Any = module.__dict__.get("_diffusers_hook")
        hook = registry.get_hook("group_offloading") if registry is not None else None
        if hook is None:
            continue
        group = hook.group
        found.update(group.cpu_param_dict)
        if group.offload_to_disk_path is not None:
            found.update(dict.fromkeys(group.tensor_to_key))
    return found


def on_disk(module: nn.Module, copies: Mapping[Tensor, Tensor | None], name: str) -> bool:
    """Whether hooks keep the parameter elsewhere and the tensor in the module holds nothing."""
    weight = module._parameters.get(name)
    return weight is None or weight.is_meta or (weight in copies and copies[weight] is None)


def tied(here: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """Path -> one path of every module that computes with its weight, itself included."""
    names: dict[int, dict[int, str]] = {}
    for path, module in here.items():
        names.setdefault(_identity(module), {}).setdefault(id(module), path)
    return {path: tuple(names[_identity(module)].values()) for path, module in here.items()}


def _identity(module: nn.Module) -> int:
    weight = module._parameters.get("weight")
    if weight is not None and weight.is_meta:
        held = _accelerate(module, "weight")
        return id(weight) if held is None else held.data_ptr()
    return id(module if weight is None else weight)


def shards(module: nn.Module, name: str = "weight") -> int:
    """Over how many processes the parameter is sharded: 1 for an ordinary one."""
    mesh = getattr(module._parameters.get(name), "device_mesh", None)
    return int(mesh.size()) if mesh is not None else 1
