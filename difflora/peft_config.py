"""What a PEFT config, or the copy of one in a file's metadata, says about scales: alpha, rank, rslora, per module.

Only scales are taken from it.  A config that asks for something else (DoRA, biases, saved modules, ...) is refused by
name, since ignoring it would load a different adapter than the one that was trained.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from difflora.formats.errors import DiffLoRAError

# field -> (values that change nothing, what it asks for)
_REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "peft_type": (lambda v: v is None or v == "LORA", "an adapter type other than LoRA"),
    "use_dora": (lambda v: not v, "DoRA"),
    "bias": (lambda v: v in (None, "none"), "trained biases of the base model"),
    "lora_bias": (lambda v: not v, "LoRA biases"),
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
# A quantified group can take exponential time on a hostile pattern, and real configs hold plain module names.
_SLOW_PATTERN = re.compile(r"\)[*+{]")
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scales of one component: global alpha and rank, and regex patterns that override them per module."""

    alpha: float | None = None
    rank: int | None = None
    rslora: bool = False
    alphas: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)

    def alpha_of(self, paths: tuple[str, ...], rank: int, source: str) -> float | None:
        """Alpha of the module that goes by these names; DiffLoRAError if the config's rank is not the tensor's."""
        expected = _by_pattern(self.ranks, paths, self.rank)
        if expected is not None and expected != rank:
            raise DiffLoRAError(
                f"{source}: the config says rank {expected} for {paths[0]}, but its tensors have rank {rank}. "
                "The config belongs to another file; remove it or pass the right one."
            )
        alpha: float | None = _by_pattern(self.alphas, paths, self.alpha)
        return alpha


def _by_pattern(patterns: Mapping[str, Any], paths: tuple[str, ...], default: Any) -> Any:
    """PEFT's rule (tuners/tuners_utils.py): the first pattern that matches the end of the path, at a dot."""
    for pattern, value in patterns.items():
        if any(re.match(rf"(.*\.)?({pattern})$", path) for path in paths):
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
                f"{source}: the config sets {name}={value!r}, that is {what}, which is not supported yet. "
                "Plain LoRA (peft_type LORA without extras) is expected."
            )
    alpha = config.get("lora_alpha")
    rank = config.get("r")
    return Scaling(
        alpha=None if alpha is None else _number(alpha, "lora_alpha", source),
        rank=None if rank is None else _whole(rank, "r", source),
        rslora=bool(config.get("use_rslora")),
        alphas={p: _number(v, f"alpha_pattern[{p}]", source) for p, v in _patterns(config, "alpha_pattern", source)},
        ranks={p: _whole(v, f"rank_pattern[{p}]", source) for p, v in _patterns(config, "rank_pattern", source)},
    )


def _patterns(config: Mapping[str, Any], name: str, source: str) -> list[tuple[str, Any]]:
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict):
        raise DiffLoRAError(f"{source}: {name} of the config is {patterns!r}; expected a map of module patterns.")
    for pattern in patterns:
        try:
            re.compile(pattern)
            slow = len(pattern) > 512 or _SLOW_PATTERN.search(pattern)
        except re.error:
            slow = True
        if slow:
            raise DiffLoRAError(f"{source}: {name} holds {pattern[:80]!r}; expected a plain regular expression.")
    return list(patterns.items())


def _number(value: Any, name: str, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise DiffLoRAError(f"{source}: {name} of the config is {value!r}; expected a positive number.")
    return float(value)


def _whole(value: Any, name: str, source: str) -> int:
    number = _number(value, name, source)
    if number != int(number):
        raise DiffLoRAError(f"{source}: {name} of the config is {value!r}; expected a whole number.")
    return int(number)


def from_folder(text: str, source: str) -> Mapping[str, Scaling]:
    """{"": scales} from the text of an adapter_config.json; DiffLoRAError if it is no JSON object."""
    return {"": scaling(_object(text, source, "adapter_config.json"), source)}


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
    known = {"lora_alpha", "r", "use_rslora", "alpha_pattern", "rank_pattern", "lora_rank", "network_alpha", *_REFUSED}
    rename = {"lora_rank": "r", "network_alpha": "lora_alpha"}
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
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value, value)


def _object(text: str, source: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DiffLoRAError(f"{source}: {what} is not JSON ({error}); expected a JSON object.") from None
    if not isinstance(value, dict):
        raise DiffLoRAError(f"{source}: {what} is {type(value).__name__}; expected a JSON object.")
    return value
