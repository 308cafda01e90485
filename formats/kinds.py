"""Which tensors make a delta of each kind, and the size of the weight that their shapes are for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Size = tuple[int, int]

Sizing = Callable[[Shapes], Size | None]

_DECOMPOSED = ("magnitude", "dora_scale")
_ALSO = ", and one magnitude a row or a column if any"


@dataclass(frozen=True, slots=True)
class Kind:
    """The roles that must be there (`a|b c`: either a, or b and c), those that may, and the size of the delta.

    `size` is (rows, columns) of the weight, a convolution's kernel aside, 0 for what the tensors leave open; None where
    they do not fit together.  `expected` says what would fit.
    """

    needs: tuple[str, ...]
    may: tuple[str, ...]
    size: Sizing
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
    down, up, mid = shapes["down"], shapes["up"], shapes.get("mid")
    if len(down) < 2 or len(up) < 2 or not down[0] == up[1] > 0 or not _ones(up):
        return None
    if mid is not None and (mid[:2] != (up[1], down[0]) or not _ones(down)):
        return None
    return up[0], down[1]


def _ones(shape: Shape) -> bool:
    """Whether a matrix is all that the shape means: [o, i], or [o, i, 1, 1]."""
    return {*shape[2:]} <= {1}


def _loha(shapes: Shapes) -> Size | None:
    """A Tucker core (t1, t2) goes with transposed `a` factors."""
    sizes, kernels = set(), set()
    for n in "12":
        a, b, core = shapes[f"w{n}_a"], shapes[f"w{n}_b"], shapes.get(f"t{n}")
        if len(a) != 2 or len(b) != 2:
            return None
        rank, rows = a[::-1] if core is None else a
        if rank != b[0] or rank == 0 or (core is not None and core[:2] != (rank, rank)):
            return None
        sizes.add((rows, b[1]))
        kernels.add(core and core[2:])
    return sizes.pop() if len(sizes) == len(kernels) == 1 else None


def _factor(shapes: Shapes, name: str, core: Shape | None) -> Size | None:
    """(rows, columns) of a whole or factored Kronecker factor, which is not both."""
    a, b = shapes.get(f"{name}_a"), shapes.get(f"{name}_b")
    if name in shapes:
        whole = len(shapes[name]) >= 2 and 0 not in shapes[name] and a is b is core is None
        return (shapes[name][0], shapes[name][1]) if whole else None
    if a is None or b is None or len(a) != 2 or len(b) < 2 or (core is not None and len(b) > 2):
        return None
    rank, rows = a[::-1] if core is None else a
    return (rows, b[1]) if rank == b[0] > 0 and (core is None or core[:2] == (rank, rank)) else None


def _lokr(shapes: Shapes) -> Size | None:
    """The second factor alone has the kernel."""
    one, two = _factor(shapes, "w1", None), _factor(shapes, "w2", shapes.get("t2"))
    flat = _ones(shapes.get("w1", ())) and len(shapes.get("w1_b", ())) <= 2
    return (one[0] * two[0], one[1] * two[1]) if one and two and flat else None


def _glora(shapes: Shapes) -> Size | None:
    """b1 [out, r] and b2 [r, in]; the first files have the two the other way round, and a1 and a2 too.

    Both fit where the layer is square: the rank is the smaller of the two inner sizes.
    """
    pairs = [tuple(shapes[role] for role in roles) for roles in (("a1", "a2", "b1", "b2"), ("a2", "a1", "b2", "b1"))]
    core = shapes.get("bm")
    fitting = [(b1[1], (b1[0], b2[1])) for a1, a2, b1, b2 in pairs if _glora_fits(a1, a2, b1, b2, core)]
    return min(fitting, key=lambda found: found[0])[1] if fitting else None


def _glora_fits(a1: Shape, a2: Shape, b1: Shape, b2: Shape, core: Shape | None) -> bool:
    if min(map(len, (a1, a2, b1, b2))) < 2 or not all(map(_ones, (a1, a2, b1))):
        return False
    rank, cols = b1[1], b2[1]
    inner = b2[0] == rank and a1[:2] == (cols, rank) and a2[:2] == (rank, cols)
    return inner and (core is None or (core[:2] == (rank, rank) and _ones(b2)))


def _whole(shapes: Shapes) -> Size | None:
    """A tensor of the parameter's own shape: a vector has no columns."""
    shape = next(shapes[role] for role in ("diff", "value") if role in shapes)
    return (shape[0], shape[1] if len(shape) > 1 else 0) if shape and 0 not in shape else None


def _rotated_output(shapes: Shapes) -> Size | None:
    """The stages of BOFT pair half blocks, each twice as far apart as in the one before."""
    blocks = shapes["blocks"]
    if len(blocks) not in (3, 4) or not blocks[-2] == blocks[-1] > 0:
        return None
    *stages, count, size, _ = blocks
    rows = count * size
    paired = not stages or (size % 2 == 0 and count % 2 ** (stages[0] - 1) == 0)
    rescale = shapes.get("rescale", (rows,))
    return (rows, 0) if paired and rescale[:1] == (rows,) == (prod(rescale),) else None


def _rotated_input(shapes: Shapes) -> Size | None:
    """n blocks of b (b - 1) / 2 numbers each; one block is shared by as many as there are columns for."""
    if len(shapes["r"]) != 2:
        return None
    count, numbers = shapes["r"]
    size = round((1 + (1 + 8 * numbers) ** 0.5) / 2)
    if not numbers or size * (size - 1) != 2 * numbers:
        return None
    role, shape = next(((role, shapes[role]) for role in _DECOMPOSED if role in shapes), ("", (0,)))
    by_input, found = _by_input(role, shape, 0), prod(shape)
    if by_input and (found % size if count == 1 else found != count * size):
        return None
    return 0 if by_input else found, count * size if count > 1 else found if by_input else 0


def _scaled(shapes: Shapes) -> Size | None:
    """Numbers for rows or for columns: which, only the value of `on_input` says."""
    count = prod(shapes["weight"])
    return (count, 0) if count == max(shapes["weight"], default=0) else None


def _by_input(role: str, shape: Shape, rows: int) -> bool:
    """Whether magnitudes are those of the columns of a weight with `rows`: [1, in, ...], but [1, 1] of one row."""
    return role == "dora_scale" and len(shape) > 1 and shape[0] == 1 and (prod(shape) > 1 or rows > 1)


def _decomposed(size: Sizing, table: bool = False) -> Sizing:
    """`size`, and None where magnitudes beside the tensors are not one a row or one a column of what these make.

    The columns of a flattened kernel are more.  `table`: the factors of an embedding are those of its transpose.
    """

    def fitting(shapes: Shapes) -> Size | None:
        found, roles = size(shapes), [role for role in _DECOMPOSED if role in shapes]
        if found is None or not roles:
            return found
        role, shape = roles[0], shapes[roles[0]]
        rows, cols = found[::-1] if table else found
        by_input = table if role == "magnitude" else _by_input(role, shape, rows)
        have, want = prod(shape), cols if by_input else rows
        flat = by_input and "down" not in shapes and have and want % have == 0
        return found if len(roles) == 1 and (have == want or flat) else None

    return fitting


_PAIR = ("alpha", *_DECOMPOSED)
KINDS: Mapping[str, Kind] = {
    "lora": Kind(
        ("down", "up"), ("mid", *_PAIR), _decomposed(_lora), "down [r, in, ...] and up [out, r] of one rank r" + _ALSO
    ),
    "lora_embedding": Kind(
        ("down", "up"), _PAIR, _decomposed(_lora, table=True), "A [r, tokens] and B [width, r] of one rank r" + _ALSO
    ),
    "loha": Kind(
        ("w1_a", "w1_b", "w2_a", "w2_b"),
        ("t1", "t2", *_PAIR),
        _decomposed(_loha),
        "w_a [out, r] and w_b [r, in], twice" + _ALSO,
    ),
    "lokr": Kind(
        ("w1|w1_a w1_b", "w2|w2_a w2_b"),
        ("t2", *_PAIR),
        _lokr,
        "w1, w2: whole, or w_a [o, r] and w_b [r, i]",
    ),
    "glora": Kind(("a1", "a2", "b1", "b2"), ("bm", "alpha"), _glora, "a1 [in, r], a2 [r, in], b1 [out, r], b2 [r, in]"),
    "ia3": Kind(("weight", "on_input"), (), _scaled, "one number a row or a column"),
    "diff": Kind(("diff",), ("alpha",), _whole, "a tensor of the parameter's shape"),
    "lora_bias": Kind(("diff",), ("down", "alpha"), _whole, "one number a row"),
    "set": Kind(("value",), ("alpha",), _whole, "a tensor of the parameter's shape"),
    "oft": Kind(("blocks",), ("alpha", "rescale"), _rotated_output, "blocks [n, b, b] or [m, n, b, b]"),
    "oft_v2": Kind(("r",), ("scaled", *_DECOMPOSED), _rotated_input, "[n, b (b - 1) / 2]" + _ALSO),
}
# What acts on the inputs is the same for all rows, so every part of a fused module has the whole of it.
INPUT_SIDE = frozenset(("oft_v2", "ia3"))
