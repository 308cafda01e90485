"""diffusers' block weights of a UNet as block patterns.

`{"down": 0.9, "mid": 1, "up": {"block_0": 0.6, "block_1": [0.4, 0.8, 1]}}` weighs the attentions of these blocks, one
by one where a list is given.  A resnet or sampler on the way down and up has the weight of the attention of its number
in its block, as `diffusers.utils.peft_utils.get_module_weight` gives it; others keep the adapter's own weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from difflora.formats.errors import DiffLoRAError

_LEVELS = {"down": "down_blocks", "mid": "mid_block", "up": "up_blocks"}


def patterns(given: Mapping[str, Any], paths: Collection[str]) -> dict[str, Any]:
    """The same weights by block pattern; `paths` are the UNet's modules.  Other keys are patterns already.

    Raises DiffLoRAError for a block that is not there or has no attention, and for a list of another length.
    """
    # down_blocks.1.attentions.0, up_blocks.0.resnets.2, ...; mid_block.attentions.0
    units = {".".join(path.split(".")[: 3 if path.startswith("mid_block.") else 4]) for path in paths}
    attentions = sorted(unit for unit in units if unit.split(".")[-2:-1] == ["attentions"])
    found = {level: value for level, value in given.items() if level not in _LEVELS}
    for level, value in given.items():
        if level in _LEVELS:
            for name, root, inner in _blocks(level, value, attentions):
                for attention, weight in _spread(name, root, inner, attentions).items():
                    found.update(dict.fromkeys(_beside(attention, units), weight))
    return found


def _blocks(level: str, value: Any, attentions: Collection[str]) -> Iterator[tuple[str, str, Any]]:
    """(name, beginning of its attentions' paths, weight or list) of each block that a level's value speaks of."""
    root = _LEVELS[level]
    if isinstance(value, Mapping):
        for block, inner in value.items():
            yield f"{level}.{block}", f"{root}.{str(block).removeprefix('block_')}.", inner
    elif isinstance(value, list) and level != "mid":
        for block in sorted({path.split(".")[1] for path in attentions if path.startswith(f"{root}.")}):
            yield f"{level}.block_{block}", f"{root}.{block}.", value
    else:
        yield level, f"{root}.", value


def _spread(name: str, root: str, value: Any, attentions: Collection[str]) -> dict[str, Any]:
    """One weight for every attention beneath `root`, or a list with one for each."""
    inside = [path for path in attentions if path.startswith(root)]
    if not inside:
        raise DiffLoRAError(f"there is no block {name!r} with attentions in this UNet; it has {len(attentions)}.")
    values = value if isinstance(value, list) else [value]
    if len(values) not in (1, len(inside)):
        raise DiffLoRAError(f"Expected {len(inside)} scales for {name}, got {len(values)}.")
    return dict(zip(inside, values * len(inside) if len(values) == 1 else values, strict=True))


def _beside(attention: str, units: Collection[str]) -> list[str]:
    """The attention, and on the way down and up what has its number in its block."""
    level, block, *rest = attention.split(".")
    if level == "mid_block":
        return [attention]
    return [unit for unit in units if unit.split(".")[:2] == [level, block] and unit.split(".")[3:] == rest[1:]]
