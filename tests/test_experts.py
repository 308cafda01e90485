"""Pipelines with two denoisers of one architecture: which of them a file is for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from diffusers import WanTransformer3DModel

from difflora.loading import Raw, normalise
from difflora.targets import shapes


def wan() -> Any:
    """Two tiny Wan transformers, as the Wan 2.2 pipelines hold them."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
        "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32,
    }  # fmt: skip
    return SimpleNamespace(
        components={name: WanTransformer3DModel(**config) for name in ("transformer", "transformer_2")}
    )


@pytest.mark.parametrize(
    ("name", "component", "expected"),
    [
        ("style", None, "transformer"),
        ("style_low_noise", None, "transformer_2"),
        ("Wan2.2-LowNoise-style", None, "transformer_2"),
        ("style_high_noise", None, "transformer"),
        ("high_and_low", None, "transformer"),
        ("yellow_flower", None, "transformer"),
        ("style_low_noise", "transformer", "transformer"),
        ("style", "transformer_2", "transformer_2"),
    ],
)
@pytest.mark.parametrize("prefix", ["transformer.", "diffusion_model."])
def test_the_name_of_a_file_says_which_expert(name: str, component: str | None, expected: str, prefix: str) -> None:
    models = wan().components
    tensors = tiny.lora_dict(models["transformer"], ["blocks.0.attn1.to_q"], prefix=prefix)
    adapter = normalise(Raw(name, name, tensors), model=shapes(models), component=component)
    assert list(adapter.components) == [expected]
    assert any("low noise" in note for note in adapter.notes) == (component is None and expected == "transformer_2")


def test_one_denoiser_takes_every_file() -> None:
    models = {"transformer": wan().components["transformer"]}
    tensors = tiny.lora_dict(models["transformer"], ["blocks.0.attn1.to_q"])
    adapter = normalise(Raw("style_low_noise", "style_low_noise", tensors), model=shapes(models))
    assert list(adapter.components) == ["transformer"] and not adapter.notes
