"""What one call of a pipeline asks for: `loras=`, tags in its prompts and diffusers' `{"scale": s}`, as a `Request`.

Tags and scale are cut out of the arguments: the pipeline itself sees plain text and no scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from difflora import prompt
from difflora.composing import strength, weight_at
from difflora.formats.errors import DiffLoRAError, some
from difflora.runtime import Engine, Request
from difflora.types import Mix, Strength

_PROMPT = re.compile(r"prompt(_\d+)?")
_NEGATIVE = re.compile(r"negative_prompt(_\d+)?")
# What pipelines call the argument whose "scale" multiplies every adapter of one call.
_SCALE_ARGUMENTS = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")


def request(engine: Engine, given: dict[str, Any], loras: Any) -> Request:
    """What a call with these arguments asks for; tags and scale are taken out of `given`.

    Raises DiffLoRAError for unknown names, for sets that differ within the batch, and for a text encoder's part that
    could not act because the embeddings are given.
    """
    tags = _cut_tags(given)
    factor = _cut_scale(given)
    base = None if loras is None else _one_set(engine, loras, _rows(given))
    extra = tuple(_tagged(engine, tag) for tag in tags)
    if given.get("prompt_embeds") is not None:
        _refuse_late_text(engine, (*(base.items if base else ()), *extra))
    return Request(base, extra, factor)


def _cut_tags(given: dict[str, Any]) -> tuple[prompt.Tag, ...]:
    """Remove the tags from every prompt argument, in place in `given`; the one set of tags that they agree on."""
    found: dict[str, tuple[prompt.Tag, ...]] = {}
    for name, value in list(given.items()):
        if _NEGATIVE.fullmatch(name) and any(prompt.parse(text)[1] for text in _texts(value)):
            raise DiffLoRAError(f"{name} holds an adapter tag; tags belong in prompt. Remove it, or use loras=.")
        if _PROMPT.fullmatch(name) and _texts(value):
            parsed = [prompt.parse(text) for text in _texts(value)]
            found[name] = _agreed(name, [tags for _, tags in parsed])
            given[name] = parsed[0][0] if isinstance(value, str) else [text for text, _ in parsed]
    tags = found.get("prompt", ())
    others = [name for name, own in found.items() if own and _key(own) != _key(tags)]
    if others:
        raise DiffLoRAError(f"the tags of {some(others)} differ from those of prompt; give them once, in prompt.")
    return tags


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    return [text for text in texts if isinstance(text, str)]


def _agreed(name: str, rows: Sequence[tuple[prompt.Tag, ...]]) -> tuple[prompt.Tag, ...]:
    """The tags that every prompt of a batch carries, in any order."""
    _refuse_mixed([_key(tags) for tags in rows], f"the tags of {name}", lambda tag: tag[0])
    return rows[0]


def _key(tags: Iterable[prompt.Tag]) -> tuple[tuple[str, float, float], ...]:
    return tuple(sorted((tag.name, tag.denoiser, tag.text_encoder) for tag in tags))


def _refuse_mixed(rows: Sequence[Iterable[Any]], what: str, name: Any) -> None:
    """DiffLoRAError, with the adapters in question, unless every row asks for the same."""
    sets = [frozenset(row) for row in rows]
    odd = frozenset.union(*sets) - frozenset.intersection(*sets)
    if odd or len({len(list(row)) for row in rows}) > 1:
        names = sorted({name(item) for item in odd}) or "the same adapters"
        raise DiffLoRAError(
            f"{what} ask for different adapters within one batch ({some(names)}), which is not supported yet. "
            "Give every prompt the same set, or call once per set."
        )


def _cut_scale(given: dict[str, Any]) -> float:
    """diffusers' `{"scale": s}` of this call, taken out of its argument; no PEFT layer is there to read it."""
    for name in _SCALE_ARGUMENTS:
        value = given.get(name)
        if isinstance(value, Mapping) and "scale" in value:
            given[name] = {key: item for key, item in value.items() if key != "scale"} or None
            return strength(value["scale"], f"{name}['scale']", ()).default
    return 1.0


def _one_set(engine: Engine, loras: Any, rows: int) -> Mix:
    """The set of one call; of a list with one set per prompt, the set that all of them are."""
    if not isinstance(loras, list | tuple):
        return engine.mix(loras)
    if len(loras) != rows:
        raise DiffLoRAError(f"loras has {len(loras)} sets for {rows} prompts; expected one set per prompt.")
    sets = [engine.mix(one) for one in loras]
    _refuse_mixed([one.items for one in sets], "the sets in loras", lambda item: item[0])
    return sets[0] if sets else Mix()


def _rows(given: Mapping[str, Any]) -> int:
    value = given.get("prompt")
    if value is not None:
        return 1 if isinstance(value, str) else len(value)
    embeds = given.get("prompt_embeds")
    return len(embeds) if embeds is not None else 1


def _tagged(engine: Engine, tag: prompt.Tag) -> tuple[str, Strength]:
    name = engine.resolve(tag.name)
    engine.known([name])
    if tag.text_encoder == tag.denoiser:
        return name, Strength(tag.denoiser)
    encoders = tuple((c, tag.text_encoder) for c in engine.models if c.startswith("text_encoder"))
    return name, Strength(tag.denoiser, encoders)


def _refuse_late_text(engine: Engine, items: Iterable[tuple[str, Strength]]) -> None:
    """With ready prompt embeddings, what this call asks of a text encoder could not act any more.

    The active set is no matter of the call: the embeddings may have been made while it was in force.
    """
    for name, own in items:
        acting = [
            component
            for component, sites in engine.loaded[name].bound.sections.items()
            if component.startswith("text_encoder")
            and any(weight_at(own, component, s.path) != 0.0 for sections in sites.values() for s in sections)
        ]
        if acting:
            raise DiffLoRAError(
                f"{name!r} changes {some(acting)}, but prompt_embeds are given, so the text is encoded already. Set "
                f"its weight there to 0 ({{'{acting[0]}': 0}}), or pass the prompt itself."
            )
