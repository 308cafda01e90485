"""Where a module's forwards are kept while accelerate and diffusers hooks wrap it, and which is the innermost."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def slots(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """(owner, attribute) of every forward of the module, from the innermost hook outwards."""
    registry = module.__dict__.get("_diffusers_hook")
    for reference in getattr(registry, "_fn_refs", ()):
        if reference.original_forward is not None:
            yield reference, "original_forward"
        yield reference, "forward"
    if "_old_forward" in module.__dict__:
        yield module, "_old_forward"
    yield module, "forward"


def innermost(module: nn.Module) -> tuple[Any, str]:
    """(owner, attribute) of the innermost forward.  Hooks keep partials; the innermost is the first that is none."""
    places = list(slots(module))
    for owner, name in places:
        if not isinstance(getattr(owner, name), functools.partial):
            return owner, name
    return places[-1]


def is_own(held: Any, module: nn.Module) -> bool:
    """Whether `held` is the forward of the module's class, bound to the module."""
    return getattr(held, "__func__", None) is type(module).forward and held.__self__ is module


def swap(module: nn.Module, function: Any, original: Any) -> bool:
    """Put `original` wherever a method of `function` is kept; whether one was.

    The attribute goes where the class's own forward would be all that it held.
    """
    places = [place for place in slots(module) if _is(getattr(*place), function)]
    for owner, name in slots(module):
        # functools.update_wrapper left this for inspect.signature to follow.
        if _is(getattr(getattr(owner, name), "__wrapped__", None), function):
            getattr(owner, name).__wrapped__ = original
    for owner, name in places:
        if owner is module and name == "forward" and is_own(original, module):
            delattr(module, "forward")
        else:
            setattr(owner, name, original)
    return bool(places)


def _is(held: Any, function: Any) -> bool:
    return getattr(held, "__func__", None) is function
