"""difflora: the LoRA loader and composer for diffusers pipelines.

Names are imported when first used, so `import difflora` stays fast and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from difflora.attaching import attach, detach
    from difflora.binding import bind
    from difflora.composing import compose
    from difflora.formats.errors import DiffLoRAError
    from difflora.loading import load
    from difflora.types import Adapter, LoadReport

__version__ = "0.1.0"
__all__ = ["Adapter", "DiffLoRAError", "LoadReport", "__version__", "attach", "bind", "compose", "detach", "load"]

_WHERE = {
    "attach": "attaching",
    "detach": "attaching",
    "bind": "binding",
    "compose": "composing",
    "load": "loading",
    "DiffLoRAError": "formats.errors",
    "Adapter": "types",
    "LoadReport": "types",
}


# Submodules that are found without an import of their own.
_MODULES = ("demo", "tools")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"difflora.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'difflora' has no attribute {name!r}")
    value = getattr(import_module(f"difflora.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*__all__, *_MODULES))
