"""Which linear layers of a model are called with one and the same input, so that one product serves their adapters.

A wrong guess costs time, not exactness: products are shared by the identity of the input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

# Last names of siblings within one attention.
_SELF = {"to_q": "to_qkv", "to_k": "to_qkv", "to_v": "to_qkv"}
_CROSS = {"to_k": "to_kv", "to_v": "to_kv"}
_ADDED = {"add_q_proj": "added", "add_k_proj": "added", "add_v_proj": "added"}


def banks(paths: Mapping[str, nn.Module], model: nn.Module) -> dict[str, tuple[str, int]]:
    """Path of a linear layer -> what is the same for siblings."""
    every = dict(model.named_modules(remove_duplicate=False))
    return {path: (_bank(path, every), int(getattr(module, "in_features", 0))) for path, module in paths.items()}


def _bank(path: str, every: Mapping[str, nn.Module]) -> str:
    parent, _, name = path.rpartition(".")
    if name == "proj_mlp" and f"{parent}.attn" in every:
        # A single-stream block: attention and feed-forward read the same states.
        return f"{parent}.attn to_qkv"
    crossed = bool(getattr(every.get(parent), "is_cross_attention", False))
    group = ((_CROSS if crossed else _SELF) | _ADDED).get(name)
    return path if group is None else f"{parent} {group}"
