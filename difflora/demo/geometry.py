"""The named colours and shapes, and how a shape becomes a mask.

A shape is a polygon in a unit frame: `x` to the right, `y` downwards, farthest point about one from the centre.
"""

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Points = NDArray[np.float64]
Mask = NDArray[np.float64]

SIDE = 64  # pixels, of every drawing and of the model's pictures
OVERSAMPLE = 4  # masks are drawn this much larger and averaged down, which gives soft edges

HUES: dict[str, float] = {
    "red": 0.0,
    "orange": 30.0,
    "yellow": 56.0,
    "green": 120.0,
    "cyan": 183.0,
    "blue": 225.0,
    "purple": 272.0,
    "pink": 322.0,
}


def _arc(start: float, stop: float, radius: float = 1.0, centre: float = 0.0, count: int = 40) -> Points:
    """Points of a circle around `(centre, 0)` from angle `start` to `stop` (degrees), shape `[count, 2]`."""
    angles = np.radians(np.linspace(start, stop, count))
    return np.stack([centre + radius * np.cos(angles), radius * np.sin(angles)], axis=1)


def _star(tips: int = 5, inner: float = 0.45) -> Points:
    angles = np.arange(2 * tips) * math.pi / tips - math.pi / 2
    radii = np.where(np.arange(2 * tips) % 2 == 0, 1.0, inner)
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def _cross(arm: float = 0.32, reach: float = 0.95) -> Points:
    corner = [(arm, -reach), (arm, -arm), (reach, -arm)]
    turns = [np.array(corner, dtype=np.float64)]
    for _ in range(3):
        turns.append(np.stack([-turns[-1][:, 1], turns[-1][:, 0]], axis=1))
    return np.concatenate(turns)


def _heart() -> Points:
    t = np.linspace(0.0, 2 * math.pi, 60, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
    return np.stack([x, y - 2.5], axis=1) / 16.5


POLYGONS: dict[str, Points] = {
    "circle": _arc(0, 354, count=60) * 0.9,
    "square": np.array([(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]),
    "triangle": np.array([(0.0, -0.95), (0.95, 0.75), (-0.95, 0.75)]),
    "star": _star(),
    "cross": _cross(),
    "moon": np.concatenate([_arc(51, 309), _arc(-77, -283, radius=0.8, centre=0.45)]),
    "heart": _heart(),
}


def placed(shape: str, centre: tuple[float, float], radius: float, degrees: float = 0.0) -> Points:
    """The polygon of `shape` in pixels, shape `[points, 2]`, turned by `degrees` about `centre`."""
    angle = math.radians(degrees)
    turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    return np.asarray(POLYGONS[shape] @ turn * radius + np.array(centre))


def fill(points: Points, side: int = SIDE) -> Mask:
    """The coverage of a polygon in pixels: `[side, side]` in 0..1."""
    return _paint(points, side, None)


def stroke(points: Points, width: float, side: int = SIDE) -> Mask:
    """The coverage of a polygon's contour, `width` pixels wide: `[side, side]` in 0..1."""
    return _paint(points, side, width)


def _paint(points: Points, side: int, width: float | None) -> Mask:
    canvas = Image.new("L", (side * OVERSAMPLE, side * OVERSAMPLE))
    corners = [(float(x), float(y)) for x, y in (points + 0.5) * OVERSAMPLE]
    if width is None:
        ImageDraw.Draw(canvas).polygon(corners, fill=255)
    else:
        closed = corners + corners[:2]
        ImageDraw.Draw(canvas).line(closed, fill=255, width=round(width * OVERSAMPLE), joint="curve")
    small = canvas.resize((side, side), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64) / 255.0


def area_and_centroid(points: Points) -> tuple[float, Points]:
    """The area and the centroid `[2]` of a simple polygon, by the shoelace formula."""
    ahead = np.roll(points, -1, axis=0)
    cross = points[:, 0] * ahead[:, 1] - ahead[:, 0] * points[:, 1]
    doubled = cross.sum()
    centroid = ((points + ahead) * cross[:, None]).sum(axis=0) / (3 * doubled)
    return abs(float(doubled)) / 2, centroid
