"""Every example runs as it stands, from an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageChops

EXAMPLES = Path(__file__).parent.parent / "examples"
# example -> the pictures that it must write; all of one example differ from one another
PICTURES = {
    "load": ("with-outline.png", "without.png"),
    "mix": ("mix-both.png", "mix-blocks.png", "mix-base.png"),
    "per_call": ("active.png", "call.png", "base.png"),
    "port": ("ported.png",),
    "files": (),
}


def test_every_example_is_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == PICTURES.keys()


@pytest.mark.parametrize("name", PICTURES)
def test_example(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pictures = [Image.open(tmp_path / picture).convert("RGB") for picture in PICTURES[name]]
    for i, one in enumerate(pictures):
        for other in pictures[i + 1 :]:
            assert ImageChops.difference(one, other).getbbox() is not None


def test_a_tag_and_an_argument_that_ask_for_the_same_give_the_same_picture(tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLES / "per_call.py"], cwd=tmp_path, check=True, capture_output=True)
    call, tag = Image.open(tmp_path / "call.png").convert("RGB"), Image.open(tmp_path / "tag.png").convert("RGB")
    assert ImageChops.difference(call, tag).getbbox() is None
