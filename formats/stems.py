"""From the keys of a file to its modules, as spelled there: pairs checked, nothing left over, no family known yet."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from difflora.formats.errors import DiffLoRAError, some
from difflora.formats.layouts import IGNORED, IGNORED_HEADS, LEAVES, SLOTTED, WRAPPED, Leaf, Prefix, prefixes
from difflora.formats.refusals import REFUSALS, REFUSED_HEADS, REFUSED_PATHS, REFUSED_TAILS, Refusal
from difflora.formats.rules import outline

Shape = tuple[int, ...]
_LONGEST_ENDING = 4  # names, as in `___.layer.lora_down.weight`
_BEGINNINGS: Mapping[str, Refusal | str] = {**IGNORED_HEADS, **REFUSED_HEADS}
_ENDINGS: Mapping[str, Leaf | Refusal | str] = {**LEAVES, **REFUSED_TAILS, **IGNORED}


@dataclass(frozen=True, slots=True)
class Stem:
    """One module as the file spells it.  `[rows, cols]` is the size of its delta, the kernel of a convolution aside."""

    path: str
    place: str
    flat: bool
    layout: str
    kind: str
    keys: Mapping[str, str]
    rows: int
    cols: int
    outline: tuple[str, tuple[str, ...]]

    def __str__(self) -> str:
        return self.keys["down"]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One key, cut into the module's text and the ending."""

    key: str
    text: str
    leaf: Leaf


def read(
    shapes: Mapping[str, Shape], source: str, components: Iterable[str] = ()
) -> tuple[tuple[Stem, ...], tuple[str, ...]]:
    """Every module of a file, and notes on what was left aside.  `components` are names that a key may begin with."""
    tensors, notes = _tensors(shapes, source)
    spelled = prefixes(tuple(components))
    modules: dict[tuple[str, bool, str], list[tuple[_Tensor, Prefix]]] = {}
    for tensor in tensors:
        prefix, path = _place(tensor, spelled)
        modules.setdefault((prefix.place, prefix.flat, path), []).append((tensor, prefix))
    stems = tuple(
        _stem(path, prefix := members[0][1], [tensor for tensor, _ in members], shapes, source)
        for (_, _, path), members in modules.items()
    )
    refused: dict[Refusal, list[str]] = {}
    for stem in stems:
        for refusal, _ in REFUSED_PATHS.find(*stem.outline):
            refused.setdefault(refusal, []).extend(stem.keys.values())
    _refuse(refused, source)
    return stems, notes


def _tensors(shapes: Mapping[str, Shape], source: str) -> tuple[list[_Tensor], tuple[str, ...]]:
    """The tensors to use, in the order of their keys; raises for what is refused or unknown."""
    tensors: list[_Tensor] = []
    refused: dict[Refusal, list[str]] = {}
    ignored: dict[str, list[str]] = {}
    slots: dict[str | None, list[str]] = {}
    unknown: list[str] = []
    for key in sorted(shapes):
        parts, slot = _unslotted(key.split("."))
        if not SLOTTED.isdisjoint(parts[-2:]):
            slots.setdefault(slot, []).append(key)
        text, meaning = _ending(key, parts)
        if isinstance(meaning, Leaf) and text:
            tensors.append(_Tensor(key, text, meaning))
        elif isinstance(meaning, Refusal):
            refused.setdefault(meaning, []).append(key)
        elif isinstance(meaning, str):
            ignored.setdefault(meaning, []).append(key)
        else:
            unknown.append(key)
    _refuse(refused, source)
    if unknown:
        raise DiffLoRAError(
            f"{source}: {some(unknown)}: not the name of an adapter's tensor. Expected a module path followed by "
            ".lora_down.weight and .lora_up.weight, or .lora_A.weight and .lora_B.weight, with or without .alpha."
        )
    if not tensors:
        raise DiffLoRAError(
            f"{source} holds no LoRA tensors. Expected pairs such as .lora_down.weight and .lora_up.weight."
        )
    _one_slot(slots, source)
    notes = [f"left aside: {reason} ({some(keys)})" for reason, keys in sorted(ignored.items())]
    notes += [f"slot name {slot!r} removed" for slot in slots if slot is not None]
    return tensors, tuple(notes)


def _unslotted(parts: list[str]) -> tuple[list[str], str | None]:
    """A key's names without PEFT's adapter name, and that name."""
    if len(parts) > 3 and parts[-3] in SLOTTED and parts[-1] in ("weight", "bias"):
        return [*parts[:-2], parts[-1]], parts[-2]
    if len(parts) > 2 and parts[-2] in SLOTTED and parts[-1] not in ("weight", "bias", "scaled_oft"):
        return parts[:-1], parts[-1]
    return parts, None


def _ending(key: str, parts: list[str]) -> tuple[str, Leaf | Refusal | str | None]:
    """The text before the longest known ending of a key, and what that ending (or the key's beginning) means."""
    for head, meaning in _BEGINNINGS.items():
        if key.startswith(head):
            return "", meaning
    for size in range(min(_LONGEST_ENDING, len(parts)), 0, -1):
        ending = ".".join(parts[-size:])
        if ending in _ENDINGS:
            return ".".join(name for name in parts[:-size] if name not in WRAPPED), _ENDINGS[ending]
    return "", None


def _refuse(refused: Mapping[Refusal, list[str]], source: str) -> None:
    kinds = [refusal for refusal in REFUSALS if refusal in refused]
    if kinds:
        also = f" It also holds {', '.join(kind.kind for kind in kinds[1:])}." if kinds[1:] else ""
        raise DiffLoRAError(
            f"{source} holds {kinds[0].kind}: {kinds[0].reason}. Keys: {some(refused[kinds[0]])}.{also}"
        )


def _one_slot(slots: Mapping[str | None, list[str]], source: str) -> None:
    if len(slots) > 1:
        names = ", ".join("no name" if slot is None else repr(slot) for slot in slots)
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
    if tensor.leaf.module:
        path = ".".join((*(name for name in path.split(".") if name != "processor"), tensor.leaf.module))
    return prefix, path


def _stem(path: str, prefix: Prefix, tensors: list[_Tensor], shapes: Mapping[str, Shape], source: str) -> Stem:
    keys: dict[str, str] = {}
    for tensor in tensors:
        if tensor.leaf.role in keys:
            raise DiffLoRAError(
                f"{source}: {keys[tensor.leaf.role]} and {tensor.key} are two spellings of one tensor. Remove one."
            )
        keys[tensor.leaf.role] = tensor.key
    kinds = {tensor.leaf.kind for tensor in tensors if tensor.leaf.kind}
    if len(kinds) > 1:
        raise DiffLoRAError(f"{source}: {some(keys.values())} mix {' and '.join(sorted(kinds))} tensors in one module.")
    _paired(keys, tensors, source)
    rows, cols = _size({role: shapes[key] for role, key in keys.items()}, keys, source)
    return Stem(path, prefix.place, prefix.flat, prefix.layout, kinds.pop(), keys, rows, cols, outline(path))


def _paired(keys: Mapping[str, str], tensors: list[_Tensor], source: str) -> None:
    if {"down", "up"} <= keys.keys():
        return
    for tensor in tensors:
        if tensor.leaf.partner:
            raise DiffLoRAError(
                f"{source}: {tensor.key} stands alone. Expected {tensor.text}.{tensor.leaf.partner} beside it; "
                "the file is incomplete."
            )
    raise DiffLoRAError(
        f"{source}: {some(keys.values())} belongs to no factors. Expected {tensors[0].text}.lora_down.weight and "
        ".lora_up.weight beside it; the file is incomplete."
    )


def _size(shapes: Mapping[str, Shape], keys: Mapping[str, str], source: str) -> tuple[int, int]:
    """Rows and columns of the delta that tensors of these shapes (by role) make; raises where they do not fit.

    down [r, cols, ...], up [rows, r, 1...]; beside a mid [r, r, ...], which holds the kernel, down [r, cols, 1...];
    alpha has one element.  DyLoRA leaves out the ones of a convolution's up.
    """
    down, up, mid, alpha = (shapes.get(role, ()) for role in ("down", "up", "mid", "alpha"))
    fits = (
        len(down) >= 2
        and len(up) >= 2
        and down[0] == up[1] > 0
        and set(up[2:]) <= {1}
        and (not mid or (mid[:2] == (up[1], down[0]) and set(down[2:]) <= {1}))
    )
    if not fits:
        described = ", ".join(f"{keys[role]} {list(shape)}" for role, shape in shapes.items() if role != "alpha")
        raise DiffLoRAError(
            f"{source}: {described} do not fit together. Expected down [r, in, ...] and up [out, r] of one rank r."
        )
    if alpha not in ((), (1,)):
        raise DiffLoRAError(f"{source}: {keys['alpha']} has shape {list(alpha)}. Expected one number.")
    return up[0], down[1]
