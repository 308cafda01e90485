"""diffusers' block weights of a UNet as block patterns.

`{"down": 0.9, "mid": 1, "up": {"block_0": 0.6, "block_1": [0.4, 0.8, 1]}}` weighs the attentions of these blocks, one
by one where a list is given; resnets and samplers keep the adapter's own weight, as they do there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from difflora.formats.errors import DiffLoRAError

_LEVELS = {"down": "down_blocks", "mid": "mid_block", "up": "up_blocks"}


def patterns(given: Mapping[str, Any], paths: Collection[str]) -> dict[str, Any]:
    """The same weights by block pattern; `paths` are the UNet's modules.  Other keys are patterns already.

    Raises DiffLoRAError for a block that is not there or has no attention, and for a list of another length.
    """
    attentions = sorted({".".join(path.split(".")[: path.split(".").index("attentions") + 2]) for path in paths
                         if "attentions" in path.split(".")})  # fmt: skip
    found: dict[str, Any] = {}
    for level, value in given.items():
        if level not in _LEVELS:
            found[level] = value
        elif isinstance(value, Mapping):
            for block, inner in value.items():
                root = f"{_LEVELS[level]}.{str(block).removeprefix('block_')}"
                found.update(_spread(f"{level}.{block}", f"{root}.", inner, attentions))
        elif isinstance(value, list) and level != "mid":
            for root in sorted({name.split(".attentions.")[0] for name in attentions if name.startswith(f"{level}_")}):
                found.update(_spread(level, f"{root}.", value, attentions))
        else:
            found.update(_spread(level, f"{_LEVELS[level]}.", value, attentions))
    return found


def _spread(name: str, root: str, value: Any, attentions: Collection[str]) -> dict[str, Any]:
    """One weight for every attention beneath `root`, or a list with one for each."""
    inside = [path for path in attentions if path.startswith(root)]
    if not inside:
        raise DiffLoRAError(f"there is no block {name!r} with attentions in this UNet; {len(attentions)} exist.")
    values = value if isinstance(value, list) else [value]
    if len(values) not in (1, len(inside)):
        raise DiffLoRAError(f"Expected {len(inside)} scales for {name}, got {len(values)}.")
    return dict(zip(inside, values * len(inside) if len(values) == 1 else values, strict=True))
