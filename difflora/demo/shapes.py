"""The training images: captions such as "a small red circle on white", and the drawings they describe."""

import colorsys
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from difflora.demo.geometry import HUES, SIDE, Mask, fill, placed, stroke
from difflora.demo.reading import STRIPE_PERIOD, Reading, measure

__all__ = [
    "BASE_SHAPES", "COLOURS", "SIDE", "STYLES", "Caption", "Reading", "caption", "captions", "draw", "measure",
]  # fmt: skip

COLOURS = tuple(HUES)
BASE_SHAPES = ("circle", "square", "triangle", "star", "cross", "moon")

# A size word and the radii it stands for, in pixels; the empty word leaves the size open.
SIZES: dict[str, tuple[float, float]] = {"": (14.0, 25.0), "small": (13.0, 16.0), "big": (21.0, 26.0)}
# A backdrop phrase and its range of brightness and of saturation; the empty phrase leaves the backdrop open.
BACKDROPS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "": ((0.88, 1.0), (0.0, 0.14)),
    "on white": ((0.97, 1.0), (0.0, 0.01)),
    "on grey": ((0.62, 0.72), (0.0, 0.02)),
}
OPENINGS = (
    "a {}", "a {}", "a {}", "{}", "the {}", "one {}", "a picture of a {}", "a drawing of a {}", "an image of a {}",
)  # fmt: skip
MARGIN = 4  # pixels kept free along the border, where `measure` reads the backdrop
NIGHT = np.array([24.0, 20.0, 62.0])
STROKE = 2.6  # pixels, inside the shape's edge


@dataclass(frozen=True)
class Caption:
    """What a picture shows, and the prompt that says so."""

    text: str
    colour: str
    shape: str
    size: str = ""
    backdrop: str = ""


@dataclass(frozen=True)
class _Layers:
    """A drawing before it is flattened: coverage of the shape, its colour per pixel, and the backdrop's colour."""

    cover: Mask
    ink: NDArray[np.float64]
    ground: NDArray[np.float64]


def caption(colour: str, shape: str, size: str = "", backdrop: str = "", opening: str = "a {}") -> Caption:
    """A caption; its text reads naturally ("an orange star on white")."""
    noun = " ".join(word for word in (size, colour, shape) if word)
    text = f"{opening.format(noun)} {backdrop}".strip().replace("a orange", "an orange")
    return Caption(text, colour, shape, size, backdrop)


def captions(count: int, seed: int, shapes: tuple[str, ...] = BASE_SHAPES) -> list[Caption]:
    """`count` captions in random order; every pair of a colour and a shape appears about equally often."""
    rng = np.random.default_rng(seed)
    pairs = [(colour, shape) for colour in COLOURS for shape in shapes]
    order = np.concatenate([rng.permutation(len(pairs)) for _ in range(-(-count // len(pairs)))])[:count]
    return [
        caption(
            pairs[index][0],
            pairs[index][1],
            size=str(rng.choice(["", "", "small", "big"])),
            backdrop=str(rng.choice(["", "", "on white", "on grey"])),
            opening=str(rng.choice(OPENINGS)),
        )
        for index in order
    ]


def draw(what: Caption, rng: np.random.Generator, style: str = "plain") -> NDArray[np.uint8]:
    """A `[SIDE, SIDE, 3]` picture of the caption; place, size, tilt and exact tints are random, `style` is not."""
    radius = rng.uniform(*SIZES[what.size])
    low, high = radius + MARGIN, SIDE - 1 - radius - MARGIN
    centre = (rng.uniform(low, high), rng.uniform(low, high))
    points = placed(what.shape, centre, radius, rng.uniform(-12, 12))
    layers = _Layers(fill(points), _tint(what.colour, rng), _ground(what.backdrop, rng))
    layers = STYLES[style](layers, points, rng)
    cover = layers.cover[..., None]
    return np.round(cover * layers.ink + (1 - cover) * layers.ground).astype(np.uint8)


def _tint(colour: str, rng: np.random.Generator) -> NDArray[np.float64]:
    hue = (HUES[colour] + rng.uniform(-5, 5)) % 360 / 360
    return np.array(colorsys.hsv_to_rgb(hue, rng.uniform(0.82, 1.0), rng.uniform(0.8, 0.95))) * 255


def _ground(backdrop: str, rng: np.random.Generator) -> NDArray[np.float64]:
    value, saturation = BACKDROPS[backdrop]
    return np.array(colorsys.hsv_to_rgb(rng.uniform(), rng.uniform(*saturation), rng.uniform(*value))) * 255


def _plain(layers: _Layers, points: NDArray[np.float64], rng: np.random.Generator) -> _Layers:
    return layers


def _outline(layers: _Layers, points: NDArray[np.float64], rng: np.random.Generator) -> _Layers:
    """Only a rim is drawn, inside the shape's edge; the backdrop shows within."""
    return replace(layers, cover=np.minimum(layers.cover, stroke(points, 2 * STROKE)))


def _night(layers: _Layers, points: NDArray[np.float64], rng: np.random.Generator) -> _Layers:
    """The backdrop is a dark indigo, whatever the caption says."""
    return replace(layers, ground=NIGHT + rng.uniform(-4, 4, size=3))


def _striped(layers: _Layers, points: NDArray[np.float64], rng: np.random.Generator) -> _Layers:
    """Diagonal stripes alternate the colour with a darker one."""
    rows, columns = np.indices((SIDE, SIDE))
    phase = (rows + columns) / (np.sqrt(2.0) * STRIPE_PERIOD) + rng.uniform()
    bright = np.clip(0.5 + 2.0 * np.sin(2 * np.pi * phase), 0.0, 1.0)
    return replace(layers, ink=layers.ink * (0.42 + 0.58 * bright[..., None]))


STYLES: dict[str, Callable[[_Layers, NDArray[np.float64], np.random.Generator], _Layers]] = {
    "plain": _plain,
    "outline": _outline,
    "night": _night,
    "stripes": _striped,
}
