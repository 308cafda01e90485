"""A module whose input an adapter widens, as control LoRAs do: a wider weight while they act, the old one after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn import functional as F

from difflora.formats.errors import DiffLoRAError
from difflora.targets import NARROW, unwrapped

if TYPE_CHECKING:
    from torch import Tensor

_CONFIG = "in_channels"


@dataclass(frozen=True, eq=False, slots=True)
class Widened:
    """What `widen` replaced: the module's own parameter, and how many columns its model was configured for."""

    model: nn.Module
    module: nn.Module
    original: nn.Parameter
    columns: int
    configured: int | None


def padded(weight: Tensor, wide: int) -> Tensor:
    """The weight with zeros for the columns that it lacks: it computes the same from the first ones."""
    return F.pad(weight, (*(0, 0) * (weight.ndim - 2), 0, wide - weight.shape[1]))


def widen(model: nn.Module, module: nn.Module, value: Tensor) -> Widened:
    """Put `value` [out, more columns, ...] in the place of the module's weight, until `narrow`.

    A model that is configured for as many inputs as the module has is configured for the new number.
    """
    attribute = _attribute(module)
    original, before = module._parameters["weight"], int(getattr(module, attribute))
    if original is None or original.is_meta or "_hf_hook" in module.__dict__:
        raise DiffLoRAError(
            "the adapter widens the input of a module whose weight is not at hand (offloaded or on disk). Load it on a "
            "model that is whole in memory."
        )
    config = getattr(unwrapped(model), "config", None)
    configured = getattr(config, _CONFIG, None)
    module._parameters["weight"] = nn.Parameter(value, requires_grad=original.requires_grad)
    module.__dict__[NARROW] = before
    setattr(module, attribute, int(value.shape[1]))
    if configured == before:
        _configure(model, int(value.shape[1]))
    return Widened(model, module, original, before, before if configured == before else None)


def narrow(widened: Widened) -> None:
    """Undo `widen`: the module has its own parameter again, the same object with the same bits."""
    widened.module._parameters["weight"] = widened.original
    widened.module.__dict__.pop(NARROW, None)
    setattr(widened.module, _attribute(widened.module), widened.columns)
    if widened.configured is not None:
        _configure(widened.model, widened.configured)


def _attribute(module: nn.Module) -> str:
    return "in_features" if isinstance(module, nn.Linear) else "in_channels"


def _configure(model: nn.Module, value: int) -> None:
    inner: Any = unwrapped(model)
    inner.register_to_config(**{_CONFIG: value})
