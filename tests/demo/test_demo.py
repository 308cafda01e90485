"""The drawings, the bundled model and its adapters, judged by measuring pictures."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline

from difflora.demo import ADAPTERS, CARDS, MODEL, load
from difflora.demo.evaluate import read_pictures
from difflora.demo.reading import Reading, measure
from difflora.demo.shapes import BASE_SHAPES, COLOURS, STYLES, Caption, caption, captions, draw
from difflora.demo.train import main

SEED = 7
LENGTH = 16  # tokens, enough for every caption


def _merging() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_merging", Path(__file__).with_name("merging.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


merging = _merging()


def percent(hits: list[bool]) -> float:
    return 100.0 * sum(hits) / len(hits)


def colour_share(seen: list[Reading], what: list[Caption]) -> float:
    return percent([reading.colour == want.colour for reading, want in zip(seen, what, strict=True)])


def shape_share(seen: list[Reading], what: list[Caption]) -> float:
    return percent([reading.shape == want.shape for reading, want in zip(seen, what, strict=True)])


def both_share(seen: list[Reading], what: list[Caption]) -> float:
    return percent(
        [(reading.colour, reading.shape) == (want.colour, want.shape) for reading, want in zip(seen, what, strict=True)]
    )


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def with_adapter(name: str) -> Any:
    pipe = quiet(load())
    assert merging.merge(pipe, ADAPTERS[name]) >= 40
    return pipe


@pytest.fixture(scope="module")
def prompts() -> list[Caption]:
    return captions(200, SEED)


@pytest.fixture(scope="module")
def base(prompts: list[Caption]) -> list[Reading]:
    return read_pictures(quiet(load()), prompts, steps=16, length=LENGTH)


@pytest.mark.parametrize("style", STYLES)
def test_measure_reads_the_drawings(style: str) -> None:
    rng = np.random.default_rng(SEED)
    what = captions(200, SEED, (*BASE_SHAPES, "heart"))
    seen = [measure(draw(entry, rng, style)) for entry in what]
    assert both_share(seen, what) >= 99
    assert (min(reading.hollow for reading in seen) > 0.15) == (style == "outline")
    assert (max(reading.backdrop for reading in seen) < 0.15) == (style == "night")
    assert (min(reading.stripes for reading in seen) > 0.3) == (style == "stripes")


def test_measure_finds_nothing_on_an_empty_or_a_noisy_picture() -> None:
    empty = np.full((64, 64, 3), 240, dtype=np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    assert (measure(empty).colour, measure(empty).shape, measure(noise).shape) == ("none", "none", "none")


def test_measure_refuses_another_size() -> None:
    with pytest.raises(ValueError, match="64x64"):
        measure(np.zeros((32, 32, 3), dtype=np.uint8))


def test_captions_read_naturally_and_cover_every_pair() -> None:
    assert caption("orange", "star", backdrop="on white").text == "an orange star on white"
    what = captions(200, SEED)
    assert {(entry.colour, entry.shape) for entry in what} == {(c, s) for c in COLOURS for s in BASE_SHAPES}
    assert what == captions(200, SEED) != captions(200, SEED + 1)


def test_sizes_stay_in_bounds() -> None:
    def size(path: Path) -> int:
        return (
            sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            if path.is_dir()
            else len(path.read_bytes())
        )

    assert 4_000_000 < size(MODEL) <= 8_000_000
    assert sum(size(path) for path in ADAPTERS.values()) <= 1_500_000


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, difflora.demo; print([name for name in ('torch', 'diffusers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_plain_from_pretrained_opens_the_model() -> None:
    opener: Any = FluxPipeline
    pipe = opener.from_pretrained(str(MODEL), local_files_only=True)
    parts = (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2)
    assert {part.dtype for part in parts} == {torch.float32}
    assert not any(part.training for part in parts)


def test_default_arguments_draw_what_the_prompt_says() -> None:
    pipe = quiet(load())
    for colour, shape in (("red", "circle"), ("blue", "square"), ("green", "triangle")):
        picture = pipe(f"a {colour} {shape}", generator=torch.Generator().manual_seed(SEED)).images[0]
        assert picture.size == (64, 64)
        assert (measure(picture).colour, measure(picture).shape) == (colour, shape)


def test_two_hundred_captions(base: list[Reading], prompts: list[Caption]) -> None:
    assert colour_share(base, prompts) >= 95
    assert shape_share(base, prompts) >= 90


STYLE_EFFECTS: dict[str, Callable[[Reading], float]] = {
    "night": lambda reading: 1.0 - reading.backdrop,
    "outline": lambda reading: reading.hollow,
    "stripes": lambda reading: reading.stripes,
}
# The least mean effect with the adapter and the greatest without.
BOUNDS: dict[str, tuple[float, float]] = {"night": (0.85, 0.45), "outline": (0.15, 0.02), "stripes": (0.2, 0.02)}


@pytest.mark.parametrize("name", STYLE_EFFECTS)
def test_a_style_shows(name: str, base: list[Reading], prompts: list[Caption]) -> None:
    seen = read_pictures(with_adapter(name), prompts[:48], steps=16, length=LENGTH)
    effect, (least, most) = STYLE_EFFECTS[name], BOUNDS[name]
    assert mean(effect(reading) for reading in seen) >= least
    assert mean(effect(reading) for reading in base[:48]) <= most


def test_four_steps_with_the_fast_adapter_match_sixteen_without(base: list[Reading], prompts: list[Caption]) -> None:
    """The bundled scores say equal over 600 captions; 200 captions scatter by about two points."""
    few = read_pictures(quiet(load()), prompts, steps=4, length=LENGTH)
    fast = read_pictures(with_adapter("fast"), prompts, steps=4, length=LENGTH)
    assert both_share(fast, prompts) >= both_share(base, prompts) - 2.5
    assert both_share(few, prompts) <= both_share(base, prompts) - 10
    assert both_share(few, prompts) <= both_share(fast, prompts) - 10


def test_the_heart_adapter_teaches_a_shape() -> None:
    what = captions(48, SEED, ("heart",))
    without = read_pictures(quiet(load()), what, steps=16, length=LENGTH)
    seen = read_pictures(with_adapter("heart"), what, steps=16, length=LENGTH)
    assert both_share(seen, what) >= 90
    assert shape_share(without, what) <= 10


def test_cards_name_every_adapter() -> None:
    assert list(ADAPTERS) == list(CARDS)
    assert all(path.exists() for path in ADAPTERS.values())
    assert all(trigger in card.prompt for card in CARDS.values() for trigger in card.triggers)


def test_training_runs_on_a_cpu(tmp_path: Path) -> None:
    main(["--tiny", "--out", str(tmp_path), "--device", "cpu"])
    for name, path in ADAPTERS.items():
        assert (tmp_path / "adapters" / path.name).exists(), name
    assert (tmp_path / "scores.json").exists()
    assert (tmp_path / "flux" / "model_index.json").exists()
