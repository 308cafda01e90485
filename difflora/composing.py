"""From a mix of adapters to one `Stack` per module: strengths are resolved and every scale applied once, in fp32."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from difflora.deltas import Dense, LowRank
from difflora.formats.errors import DiffLoRAError, some
from difflora.kernels.reference import Block
from difflora.types import Adapter, Mix, Section, Stack, Strength

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.kinds import Delta


def number(value: Any, what: str) -> float:
    """`value` as a finite float; DiffLoRAError otherwise."""
    if isinstance(value, Real) and not isinstance(value, bool):  # numpy's numbers are Real too
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if math.isfinite(found):
            return found
    raise DiffLoRAError(f"the weight of {what} is {value!r}; expected a finite number.")


def strength(value: Any, name: str, components: Collection[str]) -> Strength:
    """What a user gave as the weight of adapter `name`: a number, or {component or block pattern: number}.

    Under a component a map of its own patterns is allowed too: {"unet": {"down_blocks.0-1": 0.5}}.
    """
    if isinstance(value, Strength):
        return value
    if not isinstance(value, Mapping):
        return Strength(number(value, repr(name)))
    whole: list[tuple[str, float]] = []
    patterns: list[tuple[str, str, float]] = []
    for key, weight in value.items():
        if not isinstance(key, str) or not key:
            raise DiffLoRAError(
                f"the weights of {name!r} have the key {key!r}; expected a component or a block pattern."
            )
        if isinstance(weight, Mapping):
            if key not in components:
                raise DiffLoRAError(f"the weights of {name!r} name {key!r}; the components are {some(components)}.")
            if not all(isinstance(p, str) for p in weight):
                raise DiffLoRAError(f"the weights of {name!r} in {key} have keys that are no block patterns.")
            patterns += [(key, p, number(w, f"{name!r} at {key}.{p}")) for p, w in weight.items()]
        elif key in components:
            whole.append((key, number(weight, f"{name!r} in {key}")))
        else:
            patterns.append(("", key, number(weight, f"{name!r} at {key}")))
    return Strength(1.0, tuple(whole), tuple(patterns))


def scaled(given: Strength, factor: float) -> Strength:
    """The same strength times `factor`."""
    components = tuple((component, weight * factor) for component, weight in given.components)
    return Strength(given.default * factor, components, given.patterns)


def mix(weights: Mapping[str, Any], components: Collection[str]) -> Mix:
    """{name: weight} as a Mix, in the order given."""
    return Mix(tuple((name, strength(value, name, components)) for name, value in weights.items()))


def weight_at(given: Strength, component: str, path: str) -> float:
    """The weight of one module: its component's, times that of the longest pattern that matches its path."""
    weight = dict(given.components).get(component, given.default)
    matching = [
        (_length(pattern), factor)
        for where, pattern, factor in given.patterns
        if where in ("", component) and covers(pattern, path)
    ]
    return weight * max(matching)[1] if matching else weight


def covers(pattern: str, path: str) -> bool:
    """Whether a block pattern, anchored at the component's root, covers a module path.

    "transformer_blocks.0-9" covers "transformer_blocks.3.attn.to_q"; a whole path covers itself.
    """
    wanted, given = pattern.split("."), path.split(".")
    return len(wanted) <= len(given) and all(map(_segment, wanted, given))


def _segment(wanted: str, given: str) -> bool:
    first, dash, last = wanted.partition("-")
    if dash and _whole(first) and _whole(last):
        return _whole(given) and int(first) <= int(given) <= int(last)
    return wanted == given


def _whole(text: str) -> bool:
    """Whether this is a layer number: `isdigit` alone is true of digits, and of lengths, that `int` does not read."""
    return text.isascii() and text.isdigit() and len(text) < 10


def _length(pattern: str) -> tuple[int, int]:
    """(segments, segments that are no range): longer wins, then the more exact."""
    segments = pattern.split(".")
    return len(segments), sum("-" not in segment for segment in segments)


def check_patterns(given: Strength, name: str, paths: Mapping[str, Collection[str]]) -> None:
    """DiffLoRAError for a pattern that covers no module of the components it may act on."""
    for where, pattern, _ in given.patterns:
        pools = [paths[c] for c in paths if where in ("", c)]
        if not any(covers(pattern, path) for pool in pools for path in pool):
            raise DiffLoRAError(
                f"the block pattern {pattern!r} of {name!r} matches no module of {where or some(paths)}; expected a "
                "path from the component's root such as 'transformer_blocks.0-9' or 'down_blocks.1.attentions'."
            )


def stack(parts: Iterable[tuple[Section, float]], device: torch.device) -> Stack:
    """Low-rank deltas that act on one module, as one Stack on `device`; `parts` are (section, weight).

    a: [R, in * kernel] fp32 holds each distinct `down` once; each part's scale is weight * alpha / rank.
    """
    blocks: list[Tensor] = []
    first: dict[tuple[int, ...], int] = {}
    built: list[Block] = []
    height = 0
    for section, weight in parts:
        delta = section.delta
        pair = delta.low_rank()
        assert pair is not None, "what is stacked has a low-rank form"
        a, b = pair
        key = (id(delta.down), id(delta.mid)) if isinstance(delta, LowRank) else (id(delta),)
        if key not in first:
            first[key] = height
            blocks.append(a.to(device))
            height += a.shape[0]
        start, scale = first[key], full_scale(section, weight)
        built.append(Block(section.start, section.stop, start, start + a.shape[0], b.to(device), scale))
    return Stack(torch.cat(blocks) if len(blocks) > 1 else blocks[0], tuple(built))


def full_scale(section: Section, weight: float) -> float:
    """weight * alpha / rank; DiffLoRAError if that is no finite number in fp32."""
    scale = weight * section.delta.scale
    if abs(scale) > torch.finfo(torch.float32).max:
        raise DiffLoRAError(f"the weight of {section.path} times alpha / rank is {scale:g}, no finite number in fp32.")
    return scale


def compose(weighted: Sequence[tuple[Adapter, float]]) -> Adapter:
    """The exact weighted sum of adapters as one adapter: ranks are concatenated, scales folded into `up` in fp32.

    Every module satisfies dense(sum) = sum of weight * dense(adapter).  The sum has no alpha (scale 1).  Changes that
    are not low rank are summed as what they are, whole matrices.  One adapter at weight 1 is itself.
    Raises DiffLoRAError for an empty list, weights that are not finite, modules of different shapes, and kinds that are
    functions of the base weight (DoRA, OFT, IA3, ...), whose sum is not one without it.
    """
    if not weighted:
        raise DiffLoRAError("nothing to compose; expected at least one (adapter, weight).")
    for pair in weighted:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], Adapter):
            given = repr(pair) if not isinstance(pair, tuple | list) or len(pair) != 2 else repr(pair[0])
            raise DiffLoRAError(
                f"{given} was given; expected (adapter, weight) pairs; difflora.load(path) gives an adapter."
            )
    family = common_family(weighted)
    for adapter, _ in weighted:
        if adapter.uneven:
            raise DiffLoRAError(f"{adapter.source}: {adapter.uneven[0]}. The file is damaged.")
    if len(weighted) == 1 and number(weighted[0][1], repr(weighted[0][0].name)) == 1.0:
        return weighted[0][0]
    gathered: dict[str, dict[str, list[tuple[Delta, float]]]] = {}
    for adapter, weight in weighted:
        factor = number(weight, repr(adapter.name))
        for component, deltas in adapter.components.items():
            for path, delta in deltas.items():
                gathered.setdefault(component, {}).setdefault(path, []).append((delta, factor))
    components = {c: {p: _sum(p, terms) for p, terms in paths.items()} for c, paths in gathered.items()}
    return Adapter(
        source=" + ".join(f"{weight:g} x {adapter.name}" for adapter, weight in weighted),
        name="+".join(adapter.name for adapter, _ in weighted),
        layout="diffusers",
        family=family,
        components=components,
    )


def common_family(weighted: Sequence[tuple[Adapter, float]]) -> str | None:
    """The families that all adapters may be for, as `"flux|chroma"`; None if none knows its own.

    DiffLoRAError if they are for different models.
    """
    known = [adapter.family.split("|") for adapter, _ in weighted if adapter.family]
    common = [name for name in (known[0] if known else ()) if all(name in others for others in known)]
    if known and not common:
        listed = some(f"{adapter.name}: {adapter.family}" for adapter, _ in weighted if adapter.family)
        raise DiffLoRAError(f"the adapters are for different models ({listed}); expected one family.")
    return "|".join(common) or None


def _sum(path: str, terms: Sequence[tuple[Delta, float]]) -> Delta:
    if len({delta.shape for delta, _ in terms}) > 1:
        listed = some([list(delta.shape) for delta, _ in terms])
        raise DiffLoRAError(
            f"{path} has different shapes in these adapters ({listed}); they belong to different models."
        )
    based = sorted({delta.kind for delta, _ in terms if delta.needs_base})
    if based:
        raise DiffLoRAError(
            f"{path} has {some(based)}, a function of the base weight: a sum of it is no adapter. Expected additive "
            "kinds, or one adapter at weight 1; mix the others on a pipeline, or bake them into a checkpoint."
        )
    pairs = [(delta.low_rank(), delta, weight) for delta, weight in terms]
    shape = terms[0][0].shape
    if any(pair is None for pair, _, _ in pairs):
        total = torch.zeros(shape, dtype=torch.float32)
        for delta, weight in terms:
            total = total + weight * delta.dense().reshape(shape)
        return Dense(diff=total)
    down = torch.cat([pair[0] for pair, _, _ in pairs if pair]).reshape(-1, *shape[1:])
    up = torch.cat([pair[1] * (weight * delta.scale) for pair, delta, weight in pairs if pair], dim=1)
    return LowRank(down=down, up=up.reshape(*up.shape, *(1,) * (len(shape) - 2)))
