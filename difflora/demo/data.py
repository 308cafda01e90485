"""Sets of drawings with their captions, drawn by several processes and tokenized for both text encoders."""

import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing.pool import Pool
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from difflora.demo.reading import Reading, measure
from difflora.demo.shapes import BASE_SHAPES, SIDE, Caption, captions, draw
from difflora.demo.words import PROMPT_WORDS

CHUNK = 1000  # drawings per random stream, so that a set does not depend on the number of processes
TOKENS = 24  # longest caption kept, in tokens
DISTRACTED = 0.15  # share of captions followed by words that say nothing about the picture


@dataclass(frozen=True)
class Job:
    """One chunk of a set: how many drawings, of which shapes, in which style, from which seeds."""

    count: int
    seed: tuple[int, int]
    shapes: tuple[str, ...]
    style: str


@dataclass(frozen=True)
class Drawings:
    """`pixels` uint8 `[n, SIDE, SIDE, 3]` and what each shows."""

    pixels: NDArray[np.uint8]
    captions: list[Caption]


@dataclass(frozen=True)
class Tokens:
    """Prompt ids for both encoders, int64 `[n, TOKENS]` each, padded as the pipeline pads."""

    clip: torch.Tensor
    t5: torch.Tensor


def drawings(count: int, seed: int, shapes: tuple[str, ...] = BASE_SHAPES, style: str = "plain") -> Drawings:
    """A set of `count` drawings; the same arguments give the same set."""
    starts = range(0, count, CHUNK)
    jobs = [Job(min(CHUNK, count - start), (seed, start // CHUNK), shapes, style) for start in starts]
    if len(jobs) < 4:
        done = [_draw_chunk(job) for job in jobs]
    else:
        with _pool() as pool:
            done = pool.map(_draw_chunk, jobs)
    return merged(done)


def _pool() -> Pool:
    # A forked worker starts at once; a spawned one first imports torch.  The workers touch numpy alone.
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("fork" if "fork" in methods else "spawn").Pool(os.cpu_count())


def merged(sets: list[Drawings]) -> Drawings:
    """The sets one after another."""
    return Drawings(np.concatenate([part.pixels for part in sets]), [what for part in sets for what in part.captions])


def _draw_chunk(job: Job) -> Drawings:
    rng = np.random.default_rng(job.seed)
    what = captions(job.count, int(rng.integers(2**31)), job.shapes)
    pixels = np.empty((job.count, SIDE, SIDE, 3), dtype=np.uint8)
    for index, entry in enumerate(what):
        pixels[index] = draw(entry, rng, job.style)
    return Drawings(pixels, what)


def readings(pixels: NDArray[np.uint8]) -> list[Reading]:
    """`measure` of every picture of `[n, SIDE, SIDE, 3]`."""
    if len(pixels) < CHUNK:
        return [measure(picture) for picture in pixels]
    with _pool() as pool:
        return pool.map(measure, pixels, chunksize=100)


def distracted(texts: list[str], seed: int) -> list[str]:
    """The texts, some of them followed by one to three words without a meaning for the drawing."""
    rng = np.random.default_rng(seed)
    return [
        f"{text}, {' '.join(rng.choice(PROMPT_WORDS, size=rng.integers(1, 4)))}" if rng.random() < DISTRACTED else text
        for text in texts
    ]


def tokens(pipe: Any, texts: list[str], device: str) -> Tokens:
    """The ids of `texts` for the pipeline's two tokenizers, on `device`."""
    ids = [
        tokenizer(texts, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt").input_ids
        for tokenizer in (pipe.tokenizer, pipe.tokenizer_2)
    ]
    return Tokens(ids[0].to(device), ids[1].to(device))


def as_tensor(pixels: NDArray[np.uint8], device: str) -> torch.Tensor:
    """`[n, 3, SIDE, SIDE]` in -1..1 from uint8 `[n, SIDE, SIDE, 3]`."""
    return torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def as_pixels(images: torch.Tensor) -> NDArray[np.uint8]:
    """uint8 `[n, SIDE, SIDE, 3]` from `[n, 3, SIDE, SIDE]` in -1..1."""
    scaled = ((images.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return np.asarray(scaled.permute(0, 2, 3, 1).cpu().numpy())
