"""Measure a picture of one shape by its pixels: which colour, which shape, hollow, striped, on what backdrop."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from difflora.demo.geometry import HUES, POLYGONS, SIDE, Mask, area_and_centroid, fill

Pixels = NDArray[np.float64]

NONE = "none"
READABLE = 0.8  # least overlap (intersection over union) with the best shape for the picture to show a shape at all
HUE_REACH = 20.0  # degrees a colour may lie off its name's hue
# A tenth below the palest ink of the drawings (0.82): a washed-out picture does not show the colour it was asked for.
LEAST_SATURATION = 0.9 * 0.82
LEAST_CONTRAST = 45.0  # distance in RGB (0..255 each) between a shape and its backdrop
LEAST_AREA = 60  # pixels
MOST_AREA = 2600  # pixels; what covers more is no shape on a backdrop
STRIPE_PERIOD = 8.0  # pixels, across the stripes, which run from the lower left to the upper right
LUMA = np.array([0.299, 0.587, 0.114])
TURNS = range(-18, 19, 6)


@dataclass(frozen=True)
class Reading:
    """What the pixels show.

    `colour` and `shape` are names, or "none" where nothing readable is there.  `fit` is the overlap (0..1) with the
    ideal shape, `hollow` the share of the shape's area that shows the backdrop, `stripes` the strength of the
    diagonal stripes relative to the mean brightness inside the shape, and `backdrop` the backdrop's luma (0..1).
    """

    colour: str
    shape: str
    fit: float
    hollow: float
    stripes: float
    backdrop: float


def measure(image: Image.Image | NDArray[np.uint8]) -> Reading:
    """Read a picture of `SIDE` x `SIDE` RGB pixels; deterministic, no learned parts.

    Raises ValueError for a picture of another size.
    """
    pixels = np.asarray(image, dtype=np.float64)
    if pixels.shape != (SIDE, SIDE, 3):
        raise ValueError(f"measure got an array of shape {pixels.shape}; pass an RGB picture of {SIDE}x{SIDE} pixels")
    ground = _backdrop(pixels)
    ink = _foreground(pixels, ground)
    solid = _largest(fill_holes(ink))
    ink &= solid
    luma = float(ground @ LUMA) / 255.0
    if ink.sum() < LEAST_AREA or solid.sum() > MOST_AREA:
        return Reading(NONE, NONE, 0.0, 0.0, 0.0, luma)
    shape, fit = _best_shape(solid)
    return Reading(
        colour=_hue_name(pixels[ink]),
        shape=shape if fit >= READABLE else NONE,
        fit=fit,
        hollow=1.0 - float(ink.sum() / solid.sum()),
        stripes=_stripes(pixels, _shrink(ink)),
        backdrop=luma,
    )


def _backdrop(pixels: Pixels) -> Pixels:
    edge = np.concatenate([pixels[:2].reshape(-1, 3), pixels[-2:].reshape(-1, 3), pixels[:, :2].reshape(-1, 3)])
    return np.asarray(np.median(edge, axis=0))


def _foreground(pixels: Pixels, ground: Pixels) -> NDArray[np.bool_]:
    distance = np.linalg.norm(pixels - ground, axis=-1)
    peak = float(np.percentile(distance, 98))
    return np.asarray(distance > max(0.5 * peak, LEAST_CONTRAST))


def _spread(seed: NDArray[np.bool_], inside: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """All pixels of `inside` that 4-connected paths through `inside` reach from `seed`."""
    reached = seed & inside
    while True:
        grown = reached.copy()
        grown[1:] |= reached[:-1]
        grown[:-1] |= reached[1:]
        grown[:, 1:] |= reached[:, :-1]
        grown[:, :-1] |= reached[:, 1:]
        grown &= inside
        if grown.sum() == reached.sum():
            return reached
        reached = grown


def fill_holes(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The mask with every pixel that cannot be reached from the border added."""
    border = np.ones_like(mask)
    border[1:-1, 1:-1] = False
    return ~_spread(border, ~mask)


def _largest(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The largest 4-connected part of a mask."""
    left, best = mask.copy(), np.zeros_like(mask)
    while left.sum() > best.sum():
        seed = np.zeros_like(mask)
        seed.flat[int(left.argmax())] = True
        part = _spread(seed, left)
        if part.sum() > best.sum():
            best = part
        left &= ~part
    return best


def _shrink(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The mask without its one-pixel rim, or the mask itself where nothing would be left."""
    inner = mask.copy()
    inner[1:] &= mask[:-1]
    inner[:-1] &= mask[1:]
    inner[:, 1:] &= mask[:, :-1]
    inner[:, :-1] &= mask[:, 1:]
    return inner if inner.any() else mask


def _best_shape(solid: NDArray[np.bool_]) -> tuple[str, float]:
    """The shape whose polygon, at the mask's area and centroid, overlaps it most, and that overlap."""
    area = float(solid.sum())
    rows, columns = np.nonzero(solid)
    centre = np.array([columns.mean(), rows.mean()])
    overlaps = {
        (shape, turn): _overlap(_fitted(shape, turn, area, centre), solid) for shape in POLYGONS for turn in TURNS
    }
    best = max(overlaps, key=lambda key: overlaps[key])
    return best[0], overlaps[best]


def _fitted(shape: str, degrees: float, area: float, centre: NDArray[np.float64]) -> Mask:
    unit_area, centroid = area_and_centroid(POLYGONS[shape])
    angle = np.radians(degrees)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    return fill((POLYGONS[shape] - centroid) @ turn * np.sqrt(area / unit_area) + centre)


def _overlap(mask: Mask, solid: NDArray[np.bool_]) -> float:
    both = np.minimum(mask, solid).sum()
    return float(both / np.maximum(mask, solid).sum())


def _hue_name(colours: Pixels) -> str:
    """The name of the saturation-weighted mean hue of RGB rows (0..255), or "none" when grey or between names."""
    top, low = colours.max(axis=1), colours.min(axis=1)
    saturation = (top - low) / np.maximum(top, 1.0)
    if float(np.median(saturation)) < LEAST_SATURATION:
        return NONE
    red, green, blue = colours.T
    hue = np.arctan2(np.sqrt(3.0) * (green - blue), 2 * red - green - blue)
    mean = np.degrees(np.angle((saturation * np.exp(1j * hue)).sum()))
    off = {name: abs((_plane_angle(degrees) - mean + 180.0) % 360.0 - 180.0) for name, degrees in HUES.items()}
    best = min(off, key=lambda name: off[name])
    return best if off[best] <= HUE_REACH else NONE


def _plane_angle(hue: float) -> float:
    """The angle in the colour plane of a hue of the HSV hexagon, both in degrees."""
    red, green, blue = (np.clip(abs((hue + shift) % 360.0 - 180.0) / 60.0 - 1.0, 0.0, 1.0) for shift in (0, 240, 120))
    return float(np.degrees(np.arctan2(np.sqrt(3.0) * (green - blue), 2 * red - green - blue)))


def _stripes(pixels: Pixels, inside: NDArray[np.bool_]) -> float:
    luma = pixels @ LUMA
    rows, columns = np.nonzero(inside)
    values = luma[inside]
    wave = np.exp(2j * np.pi * (rows + columns) / (np.sqrt(2.0) * STRIPE_PERIOD))
    return float(2 * abs(((values - values.mean()) * wave).mean()) / max(values.mean(), 1.0))
