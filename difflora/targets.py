"""What of a model an adapter can act on: its modules, their parameters, and the shapes that these have.

Nothing here reads or writes a weight; it works on meta-device models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from difflora.formats.errors import DiffLoRAError, some

if TYPE_CHECKING:
    from difflora.types import Adapter

# What diffusers calls the projections that `fuse_qkv_projections` joins, and the parts in the order of their rows.
_FUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}
CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BIAS = ".bias"
# Where a module keeps the number of its own input columns while an adapter widens it.
NARROW = "_difflora_columns"


@dataclass(frozen=True, eq=False, slots=True)
class Target:
    """One parameter that a delta can act on: `name` in `module` (it may hold none there), and its declared shape."""

    module: nn.Module
    name: str
    shape: tuple[int, ...]

    @property
    def held(self) -> Any:
        """The parameter, None where the module has none, as a bias that it was built without."""
        return self.module._parameters.get(self.name)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside a torch.compile wrapper, or the module itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> module for all with rows and columns (linear, convolution, embedding), inside compile wrappers too."""
    return {path: module for path, module in _walked(model) if weight_shape(module) is not None}


def targets(model: nn.Module) -> dict[str, Target]:
    """Everything that a delta can act on: weights by module path, biases and bare parameters by their own path."""
    found: dict[str, Target] = {}
    for path, module in _walked(model):
        shape = weight_shape(module)
        if shape is not None:
            found[path] = Target(module, "weight", shape)
            if not isinstance(module, nn.Embedding):
                found[path + _BIAS] = Target(module, "bias", shape[:1])
        for name, parameter in module._parameters.items():
            own = path if name == "weight" else f"{path}.{name}".lstrip(".")
            if parameter is not None and own not in found:
                found[own] = Target(module, name, tuple(parameter.shape))
    return found


def _walked(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    found = dict(unwrapped(model).named_modules(remove_duplicate=False))
    for path, module in found.items():
        if not path.endswith("_orig_mod") and not _left_behind(path, found):
            yield path.replace("_orig_mod.", ""), unwrapped(module)


def _left_behind(path: str, found: Mapping[str, nn.Module]) -> bool:
    """Whether this is a fused projection that its attention computes with no longer.

    `unfuse_qkv_projections` of a UNet puts the processors back and leaves the joined layers where they are.
    """
    parent, _, leaf = path.rpartition(".")
    if leaf not in _FUSED or not all(f"{parent}.{part}" in found for part in _FUSED[leaf]):
        return False
    attention = found[parent]
    processor = type(getattr(attention, "processor", None)).__name__
    return not hasattr(attention, "unfuse_projections") and "Fused" not in processor


def fused_over(path: str, here: Mapping[str, Target]) -> str | None:
    """The fused projection that the model computes with instead of this parameter, which is still there."""
    return next((real for real, _, _ in fused_sites(path, here)), None) if path in here else None


def fused_sites(path: str, here: Mapping[str, Target]) -> Iterator[tuple[str, int, int]]:
    """The rows of a fused projection that `path` is, while the model computes with the fused one.

    diffusers keeps the parts beside the fused projection and then computes with the fused one alone.
    """
    bias = _BIAS if path.endswith(_BIAS) else ""
    parent, _, leaf = path.removesuffix(bias).rpartition(".")
    for fused, parts in _FUSED.items():
        real = f"{parent}.{fused}{bias}"
        if leaf in parts and real in here and (path not in here or here[path].module is not here[real].module):
            total = here[real].shape[0]
            widths = [_width(f"{parent}.{part}{bias}", here, total // len(parts)) for part in parts]
            start = sum(widths[: parts.index(leaf)])
            if sum(widths) == total:
                yield real, start, start + widths[parts.index(leaf)]


def _width(path: str, here: Mapping[str, Target], otherwise: int) -> int:
    return here[path].shape[0] if path in here else otherwise


def weight_shape(module: nn.Module) -> tuple[int, ...] | None:
    """The shape of the weight as the module declares it (a packed one has another), None for other modules."""
    if isinstance(module, nn.Linear):
        return (module.out_features, module.__dict__.get(NARROW, module.in_features))
    if isinstance(module, CONV):
        channels: int = module.__dict__.get(NARROW, module.in_channels)
        return (module.out_channels, channels // module.groups, *module.kernel_size)
    if isinstance(module, nn.Embedding):
        return (module.num_embeddings, module.embedding_dim)
    return None


def shapes(models: Mapping[str, nn.Module]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Component -> path -> shape, biases aside: what the formats code takes as evidence."""
    return {
        name: {path: target.shape for path, target in targets(model).items() if target.name != "bias"}
        for name, model in models.items()
    }


def components(target: Any, adapter: Adapter | None = None) -> dict[str, nn.Module]:
    """The components of a pipeline, or {component: model} for a bare model that stands for the adapter's denoiser."""
    if isinstance(target, nn.Module):
        names = list(adapter.components) if adapter else []
        denoisers = [n for n in names if not n.startswith("text_encoder")] or names
        if len(denoisers) != 1:
            raise DiffLoRAError(
                f"a bare model takes one component of a file; this one has {some(names)}. Pass a pipeline."
            )
        return {denoisers[0]: target}
    held = getattr(target, "components", None)
    if not isinstance(held, Mapping):
        raise DiffLoRAError(f"{type(target).__name__} is neither a diffusers pipeline nor a torch module.")
    return {name: part for name, part in held.items() if isinstance(part, nn.Module)}
