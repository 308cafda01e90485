"""Flow matching: the velocity the transformer predicts, its loss, and the training of the base model."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from difflora.demo.data import Tokens
from difflora.demo.loop import Loop, Variant, optimise

# T5 sees prompts padded to the caller's `max_sequence_length` (512 when not given) and FLUX passes no mask, so the
# model must meet many lengths while it trains.  Length -> share of the steps.
LENGTHS: dict[int, float] = {16: 0.3, 24: 0.2, 32: 0.15, 48: 0.12, 77: 0.1, 128: 0.06, 256: 0.04, 512: 0.03}
LONG = 128  # from this length on a step takes a quarter of the batch
UNPROMPTED = 0.08  # share of pictures trained with an empty prompt, for guidance with a negative prompt


@dataclass(frozen=True)
class Samples:
    """Packed latents `[n, tokens, channels]`, their prompts, and the ids of the empty prompt `[1, TOKENS]`."""

    latents: torch.Tensor
    prompts: Tokens
    empty: Tokens


def encode(pipe: Any, prompts: Tokens, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pooled CLIP states `[n, width]` and the T5 states `[n, length, width]` as FluxPipeline computes them."""
    padding = prompts.t5.new_zeros(len(prompts.t5), max(0, length - prompts.t5.shape[1]))
    padded = torch.cat([prompts.t5, padding], dim=1)[:, :length]
    return pipe.text_encoder(prompts.clip).pooler_output, pipe.text_encoder_2(padded)[0]


def velocity(
    transformer: Any, noisy: torch.Tensor, sigma: torch.Tensor, text: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The predicted direction from picture to noise, shaped like `noisy` `[n, tokens, channels]`; `sigma` is `[n]`."""
    pooled, states = text
    side = round(noisy.shape[1] ** 0.5)
    place = torch.cartesian_prod(*[torch.arange(side, device=noisy.device)] * 2)
    image_ids = torch.cat([torch.zeros_like(place[:, :1]), place], dim=1)
    return torch.as_tensor(
        transformer(
            hidden_states=noisy,
            encoder_hidden_states=states,
            pooled_projections=pooled,
            timestep=sigma,
            img_ids=image_ids.float(),
            txt_ids=noisy.new_zeros(states.shape[1], 3),
            return_dict=False,
        )[0]
    )


def noise_levels(count: int, device: torch.device) -> torch.Tensor:
    """Noise levels `[count]` in 0..1: half uniform, half crowded around the middle, where shapes form."""
    uniform = torch.rand(count, device=device)
    middle = torch.sigmoid(0.4 + 1.0 * torch.randn(count, device=device))
    return torch.where(torch.rand(count, device=device) < 0.5, uniform, middle)


def flow_variants(pipe: Any, samples: Samples, batch: int) -> list[Variant]:
    """The flow-matching loss at every prompt length."""
    return [
        Variant(share, partial(flow_loss, pipe, samples, max(1, batch // 4) if length >= LONG else batch, length))
        for length, share in LENGTHS.items()
    ]


def flow_loss(pipe: Any, samples: Samples, count: int, length: int) -> torch.Tensor:
    """The mean squared error of the velocity on `count` random samples with prompts padded to `length` tokens."""
    device = samples.latents.device
    chosen = torch.randint(len(samples.latents), (count,), device=device)
    dropped = (torch.rand(count, 1, device=device) < UNPROMPTED).expand(-1, samples.prompts.clip.shape[1])
    prompts = Tokens(
        torch.where(dropped, samples.empty.clip, samples.prompts.clip[chosen]),
        torch.where(dropped, samples.empty.t5, samples.prompts.t5[chosen]),
    )
    clean = samples.latents[chosen]
    noise = torch.randn_like(clean)
    sigma = noise_levels(count, device)
    noisy = torch.lerp(clean, noise, sigma[:, None, None])
    predicted = velocity(pipe.transformer, noisy, sigma, encode(pipe, prompts, length))
    return (predicted.float() - (noise - clean)).pow(2).mean()


def train_base(pipe: Any, samples: Samples, batch: int, loop: Loop) -> None:
    """Train the transformer and both text encoders from scratch, in place."""
    parts = (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2)
    weights = [weight for part in parts for weight in part.parameters()]
    optimise("base", loop, weights, flow_variants(pipe, samples, batch))
