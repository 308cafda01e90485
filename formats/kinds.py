"""Which tensors make a delta of each kind, and the size of the weight that their shapes are for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Size = tuple[int, int]

_DECOMPOSED = ("magnitude", "dora_scale")


@dataclass(frozen=True, slots=True)
class Kind:
    """The roles that must be there (`a|b c`: either a, or b and c), those that may, and the size of the delta.

    `size` is (rows, columns) of the weight, a convolution's kernel aside, 0 for what the tensors leave open; None where
    they do not fit together.  `expected` says what would fit.
    """

    needs: tuple[str, ...]
    may: tuple[str, ...]
    size: Callable[[Shapes], Size | None]
    expected: str

    def missing(self, roles: Mapping[str, str]) -> str | None:
        """The first group of roles that is not there whole."""
        for group in self.needs:
            if not any(set(choice.split()) <= roles.keys() for choice in group.split("|")):
                return group
        return None

    def knows(self, role: str) -> bool:
        return role in self.may or any(role in choice.split() for group in self.needs for choice in group.split("|"))


def _lora(shapes: Shapes) -> Size | None:
    """DyLoRA leaves out the ones of a convolution's up; beside a core (mid) the core has the kernel."""
    down, up, mid = shapes["down"], shapes["up"], shapes.get("mid", ())
    if len(down) < 2 or len(up) < 2 or not down[0] == up[1] > 0 or not {*up[2:]} <= {1}:
        return None
    if mid and (mid[:2] != (up[1], down[0]) or not {*down[2:]} <= {1}):
        return None
    return up[0], down[1]


def _loha(shapes: Shapes) -> Size | None:
    """A Tucker core (t1, t2) goes with transposed `a` factors."""
    sizes = set()
    for n in "12":
        a, b, core = shapes[f"w{n}_a"], shapes[f"w{n}_b"], shapes.get(f"t{n}")
        if (core is None) != (f"t{3 - int(n)}" not in shapes) or len(a) != 2 or len(b) != 2:
            return None
        rank, rows = a if core else a[::-1]
        if rank != b[0] or rank == 0 or (core and core[:2] != (rank, rank)):
            return None
        sizes.add((rows, b[1]))
    return sizes.pop() if len(sizes) == 1 else None


def _factor(shapes: Shapes, name: str, core: Shape | None) -> Size | None:
    """(rows, columns) of a whole or factored Kronecker factor."""
    if name in shapes:
        return shapes[name][:2] if len(shapes[name]) >= 2 and 0 not in shapes[name] else None  # type: ignore[return-value]
    a, b = shapes[f"{name}_a"], shapes[f"{name}_b"]
    if len(a) != 2 or len(b) < 2:
        return None
    rank, rows = a if core else a[::-1]
    return (rows, b[1]) if rank == b[0] > 0 and (not core or core[:2] == (rank, rank)) else None


def _lokr(shapes: Shapes) -> Size | None:
    one, two = _factor(shapes, "w1", None), _factor(shapes, "w2", shapes.get("t2"))
    return (one[0] * two[0], one[1] * two[1]) if one and two else None


def _glora(shapes: Shapes) -> Size | None:
    """b1 [out, r] and b2 [r, in]; the first files have the two the other way round."""
    one, two = shapes["b1"], shapes["b2"]
    if any(len(shapes[role]) < 2 for role in ("a1", "a2", "b1", "b2")):
        return None
    new, old = one[1] == two[0], two[1] == one[0]
    # Both fit where the layer is square: the rank is the smaller of the two inner sizes.
    if new and (not old or one[1] <= two[1]):
        return one[0], two[1]
    return (two[0], one[1]) if old else None


def _whole(shapes: Shapes) -> Size | None:
    """A tensor of the parameter's own shape: a vector has no columns."""
    shape = next(shapes[role] for role in ("diff", "value") if role in shapes)
    return (shape[0], shape[1] if len(shape) > 1 else 0) if shape and 0 not in shape else None


def _rotated_output(shapes: Shapes) -> Size | None:
    *_, count, size, other = (0, *shapes["blocks"])
    return (count * size, 0) if len(shapes["blocks"]) in (3, 4) and size == other > 0 else None


def _rotated_input(shapes: Shapes) -> Size | None:
    """n blocks of b (b - 1) / 2 numbers each; one block is shared by as many as there are columns for."""
    if len(shapes["r"]) != 2:
        return None
    count, numbers = shapes["r"]
    size = round((1 + (1 + 8 * numbers) ** 0.5) / 2)
    rows = next((prod(shapes[role]) for role in _DECOMPOSED if role in shapes), 0)
    return (rows, count * size if count > 1 else 0) if numbers and size * (size - 1) == 2 * numbers else None


def _scaled(shapes: Shapes) -> Size | None:
    """Numbers for rows or for columns: which, only the value of `on_input` says."""
    count = prod(shapes["weight"])
    return (count, 0) if count == max(shapes["weight"], default=0) else None


_PAIR = ("alpha", *_DECOMPOSED)
KINDS: Mapping[str, Kind] = {
    "lora": Kind(("down", "up"), ("mid", *_PAIR), _lora, "down [r, in, ...] and up [out, r] of one rank r"),
    "lora_embedding": Kind(("down", "up"), _PAIR, _lora, "A [r, tokens] and B [width, r] of one rank r"),
    "loha": Kind(("w1_a", "w1_b", "w2_a", "w2_b"), ("t1", "t2", *_PAIR), _loha, "w_a [out, r] and w_b [r, in], twice"),
    "lokr": Kind(
        ("w1|w1_a w1_b", "w2|w2_a w2_b"), ("t2", *_PAIR), _lokr, "w1, w2: whole, or w_a [o, r] and w_b [r, i]"
    ),
    "glora": Kind(("a1", "a2", "b1", "b2"), ("bm", "alpha"), _glora, "a1 [in, r], a2 [r, in], b1 [out, r], b2 [r, in]"),
    "ia3": Kind(("weight", "on_input"), (), _scaled, "one number a row or a column"),
    "diff": Kind(("diff",), ("alpha",), _whole, "a tensor of the parameter's shape"),
    "lora_bias": Kind(("diff",), ("down", "alpha"), _whole, "one number a row"),
    "set": Kind(("value",), ("alpha",), _whole, "a tensor of the parameter's shape"),
    "oft": Kind(("blocks",), ("alpha", "rescale"), _rotated_output, "blocks [n, b, b] or [m, n, b, b]"),
    "oft_v2": Kind(("r",), ("scaled", *_DECOMPOSED), _rotated_input, "[n, b (b - 1) / 2]"),
}
# What acts on the inputs is the same for all rows, so every part of a fused module has the whole of it.
INPUT_SIDE = frozenset(("oft_v2", "ia3"))
