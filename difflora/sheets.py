"""Pictures laid out in a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


def grid(images: Sequence[Sequence[Image]], rows: Sequence[str], columns: Sequence[str], zoom: int = 1) -> Image:
    """One picture of rows x columns pictures of equal size, `zoom` times enlarged, with a label for each of both."""
    from PIL import Image as Pictures
    from PIL import ImageDraw, ImageFont

    width, height = images[0][0].width * zoom, images[0][0].height * zoom
    font, gap = ImageFont.load_default(size=max(11, height // 10)), 6
    pen = ImageDraw.Draw(Pictures.new("RGB", (1, 1)))
    left = gap * 2 + max(int(pen.textlength(label, font)) for label in rows)
    top = gap * 2 + int(font.getbbox("Ag")[3])
    width_of = max(width, *(int(pen.textlength(label, font)) for label in columns)) + gap
    sheet = Pictures.new("RGB", (left + width_of * len(columns), top + (height + gap) * len(rows)), "white")
    pen = ImageDraw.Draw(sheet)
    for j, label in enumerate(columns):
        pen.text((left + j * width_of + width / 2, top - gap), label, "black", font, anchor="ms")
    for i, label in enumerate(rows):
        pen.text((left - gap, top + i * (height + gap) + height / 2), label, "black", font, anchor="rm")
        for j, image in enumerate(images[i]):
            picture = image.resize((width, height), Pictures.Resampling.NEAREST)
            sheet.paste(picture, (left + j * width_of, top + i * (height + gap)))
    return sheet
