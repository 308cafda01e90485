"""From the keys of a file to its deltas, as spelled there: complete, nothing left over, no family known yet."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from difflora.formats import layouts
from difflora.formats.errors import DiffLoRAError, some
from difflora.formats.kinds import KINDS, Shape
from difflora.formats.layouts import LEAVES, Leaf, Prefix, prefixes
from difflora.formats.refusals import REFUSALS, REFUSED_HEADS, REFUSED_TAILS, Refusal
from difflora.formats.rules import outline

_LONGEST_ENDING = 4  # names, as in `___.layer.lora_down.weight`
# Letters that only patterns have, and numbers of no layer.
_NO_MODULE = re.compile(r"[#{}\x00-\x1f]|[0-9]{10}")
_LONGEST_TEXT = 500
_MOST_AXES = 5  # of a three-dimensional convolution
_WHOLE = " A whole model is no adapter: use it as the model, or extract one from it and its base."
_BEGINNINGS: Mapping[str, Refusal | str] = {**layouts.IGNORED_HEADS, **REFUSED_HEADS}
_ENDINGS: Mapping[str, Leaf | Refusal | str] = {**LEAVES, **REFUSED_TAILS, **layouts.IGNORED}


@dataclass(frozen=True, slots=True)
class Stem:
    """One delta of one module as the file spells it.

    `[rows, cols]` is the size of the weight, the kernel of a convolution aside, 0 where the tensors leave it open.
    `bias` says that it acts on the module's bias; `slotted` that its keys hold PEFT's name of the adapter.
    """

    path: str
    place: str
    flat: bool
    layout: str
    kind: str
    keys: Mapping[str, str]
    rows: int
    cols: int
    outline: tuple[str, tuple[str, ...]]
    bias: bool = False
    slotted: bool = False

    def __str__(self) -> str:
        return next(iter(self.keys.values()))


@dataclass(frozen=True, slots=True)
class Vector:
    """Textual-inversion vectors in the file: the word that stands for them, the place of their encoder, their key."""

    token: str
    place: str
    key: str


@dataclass(frozen=True, slots=True)
class File:
    """Everything that the keys of a file mean by themselves."""

    stems: tuple[Stem, ...]
    vectors: tuple[Vector, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One key, cut into the module's text and the ending."""

    key: str
    text: str
    leaf: Leaf
    ending: str
    slotted: bool


def read(shapes: Mapping[str, Shape], source: str, components: Iterable[str] = ()) -> File:
    """Every delta of a file, and notes on what was left aside.  `components` are names that a key may begin with."""
    tensors, vectors, notes = _tensors(shapes, source)
    spelled = prefixes(tuple(components))
    modules: dict[tuple[str, bool, str], list[tuple[_Tensor, Prefix]]] = {}
    for tensor in tensors:
        prefix, path = _place(tensor, spelled)
        modules.setdefault((prefix.place, prefix.flat, path), []).append((tensor, prefix))
    stems = (
        stem
        for (_, _, path), members in modules.items()
        for stem in _stems(path, members[0][1], [tensor for tensor, _ in members], shapes, source)
    )
    return File(tuple(stems), vectors, notes)


def _tensors(shapes: Mapping[str, Shape], source: str) -> tuple[list[_Tensor], tuple[Vector, ...], tuple[str, ...]]:
    """The tensors to use, in the order of their keys; raises for what is refused or unknown."""
    tensors: list[_Tensor] = []
    vectors: list[Vector] = []
    refused: dict[Refusal, list[str]] = {}
    ignored: dict[str, list[str]] = {}
    slots: dict[str | None, list[str]] = {}
    unknown: list[str] = []
    for key in sorted(shapes):
        parts, slot = _unslotted(key.split("."))
        if not layouts.SLOTTED.isdisjoint(parts[-2:]):
            slots.setdefault(slot, []).append(key)
        vector = _vector(key)
        text, ending, meaning = _ending(key, parts, shapes)
        if vector:
            vectors.append(vector)
        elif isinstance(meaning, Leaf) and _names_module(text):
            if 0 in shapes[key]:
                ignored.setdefault(layouts.EMPTY, []).append(key)
            else:
                tensors.append(_Tensor(key, text, meaning, ending, slot is not None))
        elif isinstance(meaning, Refusal):
            refused.setdefault(meaning, []).append(key)
        elif isinstance(meaning, str):
            ignored.setdefault(meaning, []).append(key)
        else:
            unknown.append(key)
    _refuse(refused, source)
    if unknown:
        raise DiffLoRAError(
            f"{source}: {some(map(_short, unknown))}: not the name of an adapter's tensor. Expected a module path "
            "followed by .lora_down.weight and .lora_up.weight, or .lora_A.weight and .lora_B.weight, with or without "
            f".alpha.{'' if tensors else _WHOLE}"
        )
    if not tensors:
        raise DiffLoRAError(
            f"{source} holds no LoRA tensors. Expected pairs such as .lora_down.weight and .lora_up.weight."
        )
    _one_slot(slots, source)
    notes = [f"left aside: {reason} ({some(keys)})" for reason, keys in sorted(ignored.items())]
    notes += [f"slot name {slot!r} removed" for slot in slots if slot is not None]
    return tensors, tuple(vectors), tuple(notes)


def _names_module(text: str) -> bool:
    return 0 < len(text) <= _LONGEST_TEXT and not _NO_MODULE.search(text)


def _short(key: str) -> str:
    return key if len(key) <= _LONGEST_TEXT else f"{key[:80]}... ({len(key)} letters)"


def _vector(key: str) -> Vector | None:
    if not key.startswith(layouts.EMBEDDING):
        return None
    found = (
        (key[len(layouts.EMBEDDING) : -len(ending) - 1], place)
        for ending, place in layouts.EMBEDDINGS.items()
        if key.endswith("." + ending)
    )
    return next((Vector(token, place, key) for token, place in found if token), None)


def _unslotted(parts: list[str]) -> tuple[list[str], str | None]:
    """A key's names without PEFT's adapter name, and that name."""
    if len(parts) > 3 and parts[-3] in layouts.SLOTTED and parts[-1] in ("weight", "bias"):
        return [*parts[:-2], parts[-1]], parts[-2]
    if len(parts) > 2 and parts[-2] in layouts.SLOTTED and parts[-1] not in ("weight", "bias", "scaled_oft"):
        return parts[:-1], parts[-1]
    return parts, None


def _ending(key: str, parts: list[str], keys: Iterable[str]) -> tuple[str, str, Leaf | Refusal | str | None]:
    """The text before the longest known ending of a key, that ending, and what it (or the key's beginning) means."""
    for head, meaning in _BEGINNINGS.items():
        if key.startswith(head):
            return "", "", meaning
    for ending, beside in layouts.ONLY_BESIDE.items():
        if parts[-1] == ending and ".".join((*parts[:-1], beside)) in keys:
            return _unwrapped(parts[:-1]), ending, _ENDINGS[ending]
    for size in range(min(_LONGEST_ENDING, len(parts)), 0, -1):
        ending = ".".join(parts[-size:])
        if ending in _ENDINGS and ending not in layouts.ONLY_BESIDE:
            return _unwrapped(parts[:-size]), ending, _ENDINGS[ending]
    return "", "", None


def _unwrapped(parts: list[str]) -> str:
    return ".".join(name for name in parts if name not in layouts.WRAPPED)


def _refuse(refused: Mapping[Refusal, list[str]], source: str) -> None:
    kinds = [refusal for refusal in REFUSALS if refusal in refused]
    if kinds:
        also = f" It also holds {', '.join(kind.kind for kind in kinds[1:])}." if kinds[1:] else ""
        raise DiffLoRAError(
            f"{source} holds {kinds[0].kind}: {kinds[0].reason}. Keys: {some(refused[kinds[0]])}.{also}"
        )


def _one_slot(slots: Mapping[str | None, list[str]], source: str) -> None:
    if len(slots) > 1:
        names = some("no name" if slot is None else repr(slot) for slot in slots)
        raise DiffLoRAError(
            f"{source} holds several adapters in one file ({names}), as in {some(keys[0] for keys in slots.values())}. "
            "Expected one; save each adapter to a file of its own."
        )


def _place(tensor: _Tensor, spelled: tuple[Prefix, ...]) -> tuple[Prefix, str]:
    """The prefix of a tensor's module, and the module path after it."""
    prefix = next(prefix for prefix in spelled if tensor.text.startswith(prefix.text))
    path = tensor.text[len(prefix.text) :]
    if prefix.flat:
        path = path.removesuffix("_")
    if tensor.leaf.module and tensor.leaf.kind == "lora":
        path = ".".join(name for name in path.split(".") if name != "processor")
    if tensor.leaf.module:
        path += ("_" if prefix.flat else ".") + tensor.leaf.module
    return prefix, path


def _stems(
    path: str, prefix: Prefix, tensors: list[_Tensor], shapes: Mapping[str, Shape], source: str
) -> Iterator[Stem]:
    """The delta of a module's weight, and that of its bias, from the tensors that are called after the module."""
    weight, bias = ([t for t in tensors if t.leaf.bias == wanted] for wanted in (False, True))
    shared = _roles([t for t in weight if t.leaf.kind in ("lora", "")], source) if bias else {}
    columns = 0
    if weight and not (bias and all(t.leaf.role == "alpha" for t in weight)):
        stem = _stem(path, prefix, weight, {}, shapes, source)
        columns = stem.cols
        yield stem
    if bias:
        stem = _stem(path, prefix, bias, shared, shapes, source)
        yield replace(stem, bias=True, cols=columns)


def _roles(tensors: list[_Tensor], source: str) -> dict[str, str]:
    keys: dict[str, str] = {}
    # The first key is the one that messages name.
    for tensor in sorted(tensors, key=lambda tensor: tensor.leaf.role == "alpha"):
        if tensor.leaf.role in keys:
            raise DiffLoRAError(
                f"{source}: {keys[tensor.leaf.role]} and {tensor.key} are two spellings of one tensor. Remove one."
            )
        keys[tensor.leaf.role] = tensor.key
    return keys


def _stem(
    path: str,
    prefix: Prefix,
    tensors: list[_Tensor],
    shared: Mapping[str, str],
    shapes: Mapping[str, Shape],
    source: str,
) -> Stem:
    """One delta.  `shared` are keys of the module's weight, by role, that a delta of its bias may be scaled by."""
    keys = _roles(tensors, source)
    kinds = sorted({tensor.leaf.kind for tensor in tensors if tensor.leaf.kind})
    if not kinds:
        raise DiffLoRAError(
            f"{source}: {some(keys.values())} belongs to no factors. Expected {tensors[0].text}.lora_down.weight and "
            ".lora_up.weight beside it; the file is incomplete."
        )
    if len(kinds) > 1:
        raise DiffLoRAError(f"{source}: {some(keys.values())} mix {' and '.join(kinds)} tensors in one module.")
    kind = KINDS[kinds[0]]
    keys |= {role: key for role, key in shared.items() if kind.knows(role) and role not in keys}
    _complete(kinds[0], keys, tensors, source)
    found = {role: shapes[key] for role, key in keys.items()}
    for role, shape in found.items():
        if len(shape) > _MOST_AXES:
            raise DiffLoRAError(f"{source}: {keys[role]} has {len(shape)} axes. Expected at most {_MOST_AXES}.")
    size = kind.size(found)
    if size is None:
        described = ", ".join(f"{keys[role]} {list(shape)}" for role, shape in found.items() if role != "alpha")
        raise DiffLoRAError(f"{source}: {described} do not fit together. Expected {kind.expected}.")
    for role in ("alpha", "on_input", "scaled"):
        if found.get(role, ()) not in ((), (1,)):
            raise DiffLoRAError(f"{source}: {keys[role]} has shape {list(found[role])}. Expected one number.")
    slotted = any(tensor.slotted for tensor in tensors)
    return Stem(path, prefix.place, prefix.flat, prefix.layout, kinds[0], keys, *size, outline(path), slotted=slotted)


def _complete(kind: str, keys: Mapping[str, str], tensors: list[_Tensor], source: str) -> None:
    """Raises for a tensor that its kind has no use for, and for one that is missing."""
    for role, key in keys.items():
        if not KINDS[kind].knows(role):
            raise DiffLoRAError(f"{source}: {key} belongs to no {kind} tensors; {some(keys.values())} are one module.")
    missing = KINDS[kind].missing(keys)
    if missing is None:
        return
    for tensor in tensors:
        if tensor.ending in layouts.PARTNERS:
            raise DiffLoRAError(
                f"{source}: {tensor.key} stands alone. Expected {tensor.text}.{layouts.PARTNERS[tensor.ending]} "
                "beside it; the file is incomplete."
            )
    roles = missing.replace("|", " ").split()
    wanted = some(end for end, leaf in LEAVES.items() if leaf.kind == kind and leaf.role in roles)
    raise DiffLoRAError(
        f"{source}: {some(keys.values())} belongs to no factors. Expected {tensors[0].text}.{wanted} beside it; "
        "the file is incomplete."
    )
