"""Train the autoencoder, then set its scaling so that latents have mean zero and variance one."""

from typing import Any

import torch

from difflora.demo.loop import Loop, Variant, autocast, optimise

DIVERGENCE = 2e-4  # weight of the latents' divergence from a unit normal
ENCODE_BATCH = 512


def train_autoencoder(vae: Any, images: torch.Tensor, batch: int, loop: Loop) -> None:
    """Train on `images`, uint8 `[n, 3, SIDE, SIDE]` on the loop's device, in place."""

    def loss() -> torch.Tensor:
        chosen = images[torch.randint(len(images), (batch,), device=images.device)].float() / 127.5 - 1.0
        posterior = vae.encode(chosen).latent_dist
        error = vae.decode(posterior.sample()).sample - chosen
        divergence = posterior.kl().mean() / posterior.mean[0].numel()
        return torch.as_tensor(error.abs().mean() + error.pow(2).mean() + DIVERGENCE * divergence)

    vae.train()
    optimise("vae", loop, vae.parameters(), [Variant(1.0, loss)])
    vae.eval()
    means = torch.cat([_means(vae, part) for part in torch.split(images[:4096], ENCODE_BATCH)])
    vae.register_to_config(scaling_factor=1.0 / float(means.std()), shift_factor=float(means.mean()))


def latents(vae: Any, images: torch.Tensor) -> torch.Tensor:
    """Packed latents `[n, tokens, channels]` of uint8 images, normalised and arranged as FluxPipeline arranges them."""
    means = torch.cat([_means(vae, part) for part in torch.split(images, ENCODE_BATCH)])
    scaled = (means - vae.config.shift_factor) * vae.config.scaling_factor
    count, channels, height, width = scaled.shape
    tiles = scaled.view(count, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return torch.as_tensor(tiles.reshape(count, height * width // 4, channels * 4))


def pictures(vae: Any, packed: torch.Tensor) -> torch.Tensor:
    """Images `[n, 3, SIDE, SIDE]` in -1..1, the inverse of `latents`."""
    count, area, channels = packed.shape
    side = round(area**0.5)
    tiles = packed.view(count, side, side, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    scaled = tiles.reshape(count, channels // 4, 2 * side, 2 * side)
    with torch.no_grad():
        parts = torch.split(scaled / vae.config.scaling_factor + vae.config.shift_factor, ENCODE_BATCH)
        return torch.cat([vae.decode(part).sample for part in parts])


def _means(vae: Any, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), autocast(str(images.device.type)):
        return torch.as_tensor(vae.encode(images.float() / 127.5 - 1.0).latent_dist.mean.float())
