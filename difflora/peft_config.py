"""What a PEFT config, or the copy of one in a file's metadata, says about scales: alpha, rank, rslora, per module.

Only scales are taken from it.  A config that asks for something that the tensors do not hold or that cannot be honoured
(saved modules, trained biases, ...) is refused by name, since ignoring it would load a different adapter than the one
that was trained.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from difflora.formats.errors import DiffLoRAError

# field -> (values that change nothing, what it asks for)
_REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "peft_type": (
        lambda v: v in (None, "LORA", "LOHA", "LOKR", "OFT"),
        "another adapter type than LoRA, LoHa, LoKr and OFT",
    ),
    "bias": (lambda v: v in (None, "none"), "trained biases of the base model"),
    "coft": (lambda v: not v, "constrained OFT"),
    "use_cayley_neumann": (lambda v: v is None or v is True, "OFT with an exact inverse"),
    "num_cayley_neumann_terms": (lambda v: v in (None, 5), "another number of Cayley-Neumann terms than 5"),
    "fan_in_fan_out": (lambda v: not v, "transposed (fan_in_fan_out) weights"),
    "modules_to_save": (lambda v: not v, "whole trained modules (modules_to_save)"),
    "layer_replication": (lambda v: not v, "layer replication"),
    "target_parameters": (lambda v: not v, "LoRA on bare parameters (target_parameters)"),
    "trainable_token_indices": (lambda v: not v, "trained tokens"),
    "alora_invocation_tokens": (lambda v: not v, "activated LoRA"),
    "use_qalora": (lambda v: not v, "QALoRA"),
    "use_bdlora": (lambda v: not v, "block-diagonal LoRA"),
    "init_lora_weights": (
        lambda v: not (isinstance(v, str) and v.lower().startswith(("pissa", "olora", "corda"))),
        "an initialisation that changes the base weights",
    ),
}
# Real configs hold plain module names.  On a hostile pattern a quantified group takes exponential time, a repetition
# multiplies it by the length of the name, and a choice doubles it: this is what each counts, and how much is allowed.
_SLOW_PATTERN = re.compile(r"\)[*+{]")
# What a later version of Python may read as operations on sets, which it warns of.
_SET_PATTERN = re.compile(r"\[\[|--|&&|~~|\|\|")
_COSTS = {"*": 4, "+": 4, "{": 4, "?": 1, "|": 1}
_MOST_COSTS = 10
_LONGEST_PATTERN = 512
_LONGEST_NAME = 200
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scales of one component: global alpha and rank, and patterns that override them per module.

    `dora` and `bias` say that the modules have magnitudes, or biases beside their factors; `type` is PEFT's word for
    the kind of all.
    """

    alpha: float | None = None
    rank: int | None = None
    rslora: bool = False
    dora: bool = False
    bias: bool = False
    type: str | None = None
    alphas: Mapping[re.Pattern[str], float] = field(default_factory=dict)
    ranks: Mapping[re.Pattern[str], int] = field(default_factory=dict)

    def alpha_of(self, paths: tuple[str, ...], rank: int, source: str) -> float | None:
        """Alpha of the module that goes by these names; DiffLoRAError if the config's rank is not the tensor's."""
        if (self.alphas or self.ranks) and max(map(len, paths)) > _LONGEST_NAME:
            raise DiffLoRAError(f"{source}: {paths[0][:80]}... is no module; its name has {len(paths[0])} letters.")
        expected = _by_pattern(self.ranks, paths, self.rank)
        if expected is not None and rank not in (0, expected):
            raise DiffLoRAError(
                f"{source}: the config says rank {expected} for {paths[0]}, but its tensors have rank {rank}. "
                "The config belongs to another file; remove it or pass the right one."
            )
        alpha: float | None = _by_pattern(self.alphas, paths, self.alpha)
        return alpha


def _by_pattern(patterns: Mapping[re.Pattern[str], Any], paths: tuple[str, ...], default: Any) -> Any:
    """PEFT's rule (tuners/tuners_utils.py): the first pattern that matches the end of the path, at a dot."""
    for pattern, value in patterns.items():
        if any(pattern.match(path) for path in paths):
            return value
    return default


def scaling(config: Mapping[str, Any], source: str) -> Scaling:
    """The scales that a PEFT config gives.

    Raises DiffLoRAError for a field that asks for more than plain LoRA, and for values that are not positive numbers.
    """
    for name, (harmless, what) in _REFUSED.items():
        value = config.get(name)
        if not harmless(value):
            raise DiffLoRAError(
                f"{source}: the config sets {name}={_short(value)}, that is {what}, which is not supported. "
                "Expected LoRA, LoHa, LoKr or OFT of weights."
            )
    alpha = config.get("lora_alpha", config.get("alpha"))
    rank = config.get("r") or None
    return Scaling(
        alpha=None if alpha is None else _number(alpha, "lora_alpha", source),
        rank=None if rank is None else _whole(rank, "r", source),
        rslora=_yes(config.get("use_rslora"), "use_rslora", source),
        dora=_yes(config.get("use_dora"), "use_dora", source),
        bias=_yes(config.get("lora_bias"), "lora_bias", source),
        type=config.get("peft_type"),
        alphas={p: _number(v, f"alpha_pattern[{p}]", source) for p, v in _patterns(config, "alpha_pattern", source)},
        ranks={p: _whole(v, f"rank_pattern[{p}]", source) for p, v in _patterns(config, "rank_pattern", source)},
    )


def _patterns(config: Mapping[str, Any], name: str, source: str) -> list[tuple[re.Pattern[str], Any]]:
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict):
        raise DiffLoRAError(f"{source}: {name} of the config is {_short(patterns)}; expected a map of module patterns.")
    return [(_compiled(pattern, name, source), value) for pattern, value in patterns.items()]


def _compiled(pattern: str, name: str, source: str) -> re.Pattern[str]:
    """The pattern at the end of a path, at a dot; DiffLoRAError for one that is wrong or could take long."""
    costs = sum(_COSTS.get(mark, 0) for mark in pattern)
    if len(pattern) <= _LONGEST_PATTERN and costs <= _MOST_COSTS and not _odd(pattern):
        try:
            re.compile(pattern)  # by itself too: it must not close the group around it
            return re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, OverflowError, RecursionError, ValueError):
            pass
    raise DiffLoRAError(f"{source}: {name} holds {pattern[:80]!r}; expected a plain regular expression.")


def _odd(pattern: str) -> bool:
    return bool(_SLOW_PATTERN.search(pattern) or _SET_PATTERN.search(pattern))


def _yes(value: Any, name: str, source: str) -> bool:
    if value not in (None, True, False):
        raise DiffLoRAError(f"{source}: {name} of the config is {_short(value)}; expected true or false.")
    return bool(value)


def _number(value: Any, name: str, source: str) -> float:
    # Compared before it is converted: JSON has whole numbers that no float can hold.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise DiffLoRAError(f"{source}: {name} of the config is {_short(value)}; expected a positive number.")
    return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _whole(value: Any, name: str, source: str) -> int:
    number = _number(value, name, source)
    if number != int(number):
        raise DiffLoRAError(f"{source}: {name} of the config is {_short(value)}; expected a whole number.")
    return int(number)


def from_folder(text: str, source: str) -> Scaling:
    """The scales from the text of an adapter_config.json; DiffLoRAError if it is no JSON object."""
    return scaling(_object(text, source, "adapter_config.json"), source)


def from_metadata(metadata: Mapping[str, str], source: str) -> Mapping[str, Scaling]:
    """Component -> scales, from the safetensors header; "" stands for any component.

    Reads diffusers' `lora_adapter_metadata` (JSON; fields with or without a component prefix), header fields such as
    `transformer.lora_alpha` with `transformer.r`, and a bare `lora_alpha` or `network_alpha`.
    """
    found = _prefixed(metadata)
    if "lora_adapter_metadata" in metadata:
        found = _prefixed(_object(metadata["lora_adapter_metadata"], source, "lora_adapter_metadata"))
    return {component: scaling(config, source) for component, config in found.items()}


def _prefixed(fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{"transformer.r": 4, "lora_alpha": 8} -> {"transformer": {"r": 4}, "": {"lora_alpha": 8}}, known fields only."""
    rename = {"lora_rank": "r", "network_alpha": "lora_alpha", "alpha": "lora_alpha"}
    known = {
        "lora_alpha",
        "r",
        "use_rslora",
        "use_dora",
        "lora_bias",
        "alpha_pattern",
        "rank_pattern",
        *rename,
        *_REFUSED,
    }
    found: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        component, _, leaf = name.rpartition(".")
        if leaf in known:
            parsed = _parsed(value)
            if parsed is not _MISSING:
                found.setdefault(component, {})[rename.get(leaf, leaf)] = parsed
    return {c: config for c, config in found.items() if "lora_alpha" in config or "alpha_pattern" in config}


def _parsed(value: Any) -> Any:
    """Header values are strings: numbers, booleans and JSON are read, other text stays text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(value, value)


def _object(text: str, source: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DiffLoRAError(f"{source}: {what} is not JSON ({error}); expected a JSON object.") from None
    if not isinstance(value, dict):
        raise DiffLoRAError(f"{source}: {what} is {type(value).__name__}; expected a JSON object.")
    return value
