"""Adapters named inside prompts: `<lora:NAME:TE:UNET>`, as AUTOMATIC1111 writes them.

The first number is the text encoder's weight, the second the denoiser's (ComfyUI's text nodes have them the other way
round).  `<lyco:...>` means the same.  Every other `<...>` is text.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from difflora.formats.errors import DiffLoRAError

__all__ = ["Tag", "parse", "render"]

_OPENING = re.compile(r"<(?:lora|lyco):")
_SCHEDULES = frozenset({"lbw", "lbwe", "start", "stop", "step", "hr", "hrte", "hrunet", "w", "x"})
_UNSUPPORTED = "block weights / schedules inside prompt tags are not supported yet; use set_loras(...)"
_FORMS = "<lora:NAME>, <lora:NAME:WEIGHT>, <lora:NAME:TE:UNET> or <lora:NAME:te=TE:unet=UNET>"
_WINDOW = 60


@dataclass(frozen=True, slots=True)
class Tag:
    """One adapter that a prompt asks for: its name and the weight of its denoiser and of its text encoder part."""

    name: str
    denoiser: float = 1.0
    text_encoder: float = 1.0


def parse(prompt: str) -> tuple[str, tuple[Tag, ...]]:
    """The prompt without its tags, and the tags in order; a name that stands twice is returned twice.

    A prompt without tags comes back as it is.  Else the ends are stripped, and of two spaces that a cut brings together
    one is dropped.  DiffLoRAError with a caret under the place for anything that cannot be honoured.
    """
    text, tags, done = "", [], 0
    for opening in _OPENING.finditer(prompt):
        if opening.start() < done:
            continue
        stop = _closing(prompt, opening)
        tags.append(_tag(prompt, opening.end(), stop))
        text = _joined(text, prompt[done : opening.start()])
        done = stop + 1
    if not tags:
        return prompt, ()
    return _joined(text, prompt[done:]).strip(), tuple(tags)


def render(tags: Iterable[Tag]) -> str:
    """The tags as text that `parse` reads back; the two weights are named where they differ."""
    return "".join(_rendered(tag) for tag in tags)


def number(value: float) -> str:
    """The shortest text that reads back as the same number: `0.7`, `1`, `-0.25`."""
    return repr(float(value)).removesuffix(".0")


def _rendered(tag: Tag) -> str:
    if not tag.name.strip() or tag.name != tag.name.strip() or any(mark in tag.name for mark in ":<>\n"):
        raise DiffLoRAError(
            f"{tag.name!r} cannot be written as a prompt tag; expected a name without ':', '<', '>', line breaks and "
            "outer spaces. Load the adapter under another name."
        )
    if not (math.isfinite(tag.denoiser) and math.isfinite(tag.text_encoder)):
        raise DiffLoRAError(f"the weights of {tag.name!r} are {tag.text_encoder}, {tag.denoiser}; expected numbers.")
    if tag.denoiser == tag.text_encoder:
        return f"<lora:{tag.name}:{number(tag.denoiser)}>"
    return f"<lora:{tag.name}:te={number(tag.text_encoder)}:unet={number(tag.denoiser)}>"


def _joined(left: str, right: str) -> str:
    return left + right[1:] if (not left or left[-1].isspace()) and right[:1] == " " else left + right


def _closing(prompt: str, opening: re.Match[str]) -> int:
    stop, inner = prompt.find(">", opening.end()), prompt.find("<", opening.end())
    if stop < 0 or 0 <= inner < stop:
        raise _error(prompt, opening.start(), "the tag is not closed; expected '>' at its end")
    return stop


def _tag(prompt: str, start: int, stop: int) -> Tag:
    """The tag whose body is prompt[start:stop].  Named weights win over positions, `unet` defaults to `te`."""
    name, *pieces = prompt[start:stop].split(":")
    if not name.strip():
        raise _error(prompt, start, f"the tag names no adapter; expected {_FORMS}")
    at, weights, positional = start + len(name) + 1, dict[str, float](), list[float]()
    for piece in pieces:
        key, value, where = _split(piece, at)
        _check_key(prompt, at, key, named=weights, positions=len(positional))
        weight = _weight(prompt, where, value)
        if key is None:
            positional.append(weight)
        else:
            weights[key] = weight
        at += len(piece) + 1
    given = dict(zip(("te", "unet"), positional, strict=False)) | weights
    encoder = given.get("te", 1.0)
    return Tag(name.strip(), given.get("unet", encoder), encoder)


def _split(piece: str, at: int) -> tuple[str | None, str, int]:
    """(argument name or None, its value, where the value starts): a piece with exactly one `=` is named."""
    key, _, value = piece.partition("=")
    if piece.count("=") != 1:
        return None, piece, at
    return key.strip(), value, at + len(key) + 1


def _check_key(prompt: str, at: int, key: str | None, named: dict[str, float], positions: int) -> None:
    if key in _SCHEDULES:
        raise _error(prompt, at, _UNSUPPORTED)
    if key == "dyn" or (key is None and positions == 2):
        raise _error(prompt, at, "a third number (dyn, the rank to use) is not supported; expected at most TE and UNET")
    if key in named:
        raise _error(prompt, at, f"{key}= is given twice; expected it once")
    if key not in (None, "te", "unet"):
        raise _error(prompt, at, f"{key!r} is no argument of a tag; expected te= or unet=")


def _weight(prompt: str, at: int, text: str) -> float:
    if any(mark in text for mark in "@~,;"):
        raise _error(prompt, at, _UNSUPPORTED)
    try:
        weight = float(text) if "_" not in text else math.nan
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise _error(prompt, at, f"{text!r} is not a finite number; expected {_FORMS}")
    return weight


def _error(prompt: str, at: int, reason: str) -> DiffLoRAError:
    """The reason, the position, the line of the prompt around it and a caret below the character it is about."""
    first = max(prompt.rfind("\n", 0, at) + 1, at - _WINDOW)
    last = prompt.find("\n", at)
    line = prompt[first : min(len(prompt) if last < 0 else last, at + _WINDOW)].replace("\t", " ")
    columns = sum(_columns(char) for char in prompt[first:at])
    return DiffLoRAError(f"prompt tag: {reason} (position {at})\n  {line}\n  {' ' * columns}^")


def _columns(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
