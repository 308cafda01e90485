"""Distil many steps into four: the student's whole four-step path is trained to meet the teacher's pictures."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from difflora.demo.autoencoder import pictures
from difflora.demo.data import Tokens, as_pixels, readings
from difflora.demo.flow import encode, velocity
from difflora.demo.loop import Variant, autocast
from difflora.demo.shapes import Caption

STEPS = 4
TEACHER_STEPS = 24  # a multiple of STEPS, so that the teacher passes through the student's noise levels
LENGTHS = (16, 32, 64)
CLEAN = 0.87  # least fit of the teacher's pictures that the student learns from
PATH_WEIGHT = 0.2  # of the states on the way, against one for the picture
SOFTNESS = 0.05  # below this error the loss is quadratic, above it linear


@dataclass(frozen=True)
class Paths:
    """The teacher's states at the student's noise levels, `[n, STEPS + 1, tokens, channels]`, and their prompts."""

    states: torch.Tensor
    prompts: Tokens


def levels(scheduler: Any, steps: int) -> list[float]:
    """The `steps + 1` noise levels that FluxPipeline visits, from one to zero."""
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps))
    return [float(level) for level in scheduler.sigmas]


def walk(
    transformer: Any, state: torch.Tensor, path: list[float], text: tuple[torch.Tensor, torch.Tensor]
) -> list[torch.Tensor]:
    """Euler steps along `path`; the states `[n, tokens, channels]` at each level after the first."""
    states = []
    for level, following in pairwise(path):
        sigma = torch.full((len(state),), level, device=state.device)
        state = state + (following - level) * velocity(transformer, state, sigma, text).float()
        states.append(state)
    return states


def teacher_paths(pipe: Any, prompts: Tokens, what: list[Caption], batch: int) -> Paths:
    """The base model's paths for every prompt, kept where the picture shows its caption cleanly."""
    path = levels(pipe.scheduler, TEACHER_STEPS)
    kept: list[torch.Tensor] = []
    with torch.no_grad(), autocast(pipe.transformer.device.type):
        for clip, t5 in zip(torch.split(prompts.clip, batch), torch.split(prompts.t5, batch), strict=True):
            noise = torch.randn(len(clip), *latent_shape(pipe), device=clip.device)
            visited = [noise, *walk(pipe.transformer, noise, path, encode(pipe, Tokens(clip, t5), 32))]
            kept.append(torch.stack(visited[:: TEACHER_STEPS // STEPS], dim=1))
    states = torch.cat(kept)
    good = _faithful(pipe, states[:, -1], what).to(states.device)
    return Paths(states[good], Tokens(prompts.clip[good], prompts.t5[good]))


def latent_shape(pipe: Any) -> tuple[int, int]:
    """Tokens and channels of one packed latent."""
    side = pipe.vae.config.sample_size // (2 * pipe.vae_scale_factor)
    return side * side, int(pipe.transformer.config.in_channels)


def _faithful(pipe: Any, final: torch.Tensor, what: list[Caption]) -> torch.Tensor:
    seen = readings(as_pixels(pictures(pipe.vae, final)))
    matches = [
        (reading.colour, reading.shape) == (want.colour, want.shape) and reading.fit >= CLEAN
        for reading, want in zip(seen, what, strict=True)
    ]
    if not any(matches):  # an untrained teacher, as in a smoke run
        return torch.ones(len(matches), dtype=torch.bool)
    return torch.tensor(matches)


def distil_variants(pipe: Any, paths: Paths, batch: int) -> list[Variant]:
    """The distillation loss at every prompt length."""
    return [Variant(1.0, partial(distil_loss, pipe, paths, batch, length)) for length in LENGTHS]


def distil_loss(pipe: Any, paths: Paths, batch: int, length: int) -> torch.Tensor:
    """How far the student's path strays from the teacher's, on a random batch."""
    chosen = torch.randint(len(paths.states), (batch,), device=paths.states.device)
    prompts = Tokens(paths.prompts.clip[chosen], paths.prompts.t5[chosen])
    wanted = paths.states[chosen]
    path = levels(pipe.scheduler, STEPS)
    states = walk(pipe.transformer, wanted[:, 0], path, encode(pipe, prompts, length))
    errors = [_soft(state - wanted[:, index + 1]) for index, state in enumerate(states)]
    return errors[-1] + PATH_WEIGHT * torch.stack(errors[:-1]).sum()


def _soft(error: torch.Tensor) -> torch.Tensor:
    return ((error.pow(2) + SOFTNESS**2).sqrt() - SOFTNESS).mean()
