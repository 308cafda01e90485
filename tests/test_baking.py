"""Adapters baked into checkpoints: what a loaded adapter does to the model, on disk, whatever names the file has."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import support
import tiny
import torch
from safetensors.torch import load_file, save_file

import difflora
from difflora import DiffLoRAError
from difflora.baking import bake

ATTENTION = [f"transformer_blocks.0.attn.to_{c}" for c in "qkv"]


def native(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A FLUX.1 state dict with the first block's image attention and the last modulation by BFL's names."""
    found = dict(state)
    for end in ("weight", "bias"):
        joined = [found.pop(f"{name}.{end}") for name in ATTENTION]
        found[f"double_blocks.0.img_attn.qkv.{end}"] = torch.cat(joined)
        scale, shift = found.pop(f"norm_out.linear.{end}").chunk(2)
        found[f"final_layer.adaLN_modulation.1.{end}"] = torch.cat([shift, scale])
    found["double_blocks.0.img_attn.norm.query_norm.scale"] = found.pop("transformer_blocks.0.attn.norm_q.weight")
    return {f"model.diffusion_model.{key}": value.contiguous() for key, value in found.items()}


def diffusers_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The way back."""
    found = {key.removeprefix("model.diffusion_model."): value for key, value in state.items()}
    for end in ("weight", "bias"):
        parts = found.pop(f"double_blocks.0.img_attn.qkv.{end}").chunk(3)
        found |= {f"{name}.{end}": part for name, part in zip(ATTENTION, parts, strict=True)}
        shift, scale = found.pop(f"final_layer.adaLN_modulation.1.{end}").chunk(2)
        found[f"norm_out.linear.{end}"] = torch.cat([scale, shift])
    found["transformer_blocks.0.attn.norm_q.weight"] = found.pop("double_blocks.0.img_attn.norm.query_norm.scale")
    return found


def adapter(kind: str) -> difflora.Adapter:
    """A fused module, the swapped modulation, a norm and a bias of the tiny FLUX.1."""
    tensors = support.KINDS[kind]("double_blocks.0.img_attn.qkv", 96, 32)
    tensors |= support.KINDS["LoRA"]("final_layer.adaLN_modulation.1", 64, 32)
    tensors["double_blocks.0.img_attn.norm.query_norm.diff"] = torch.full((16,), 0.5)
    tensors["double_blocks.0.img_mlp.0.diff_b"] = torch.full((128,), -0.25)
    return difflora.load(tensors, family="flux")


def merged(loaded: difflora.Adapter, strength: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The state dict of the tiny FLUX.1 while the adapter is merged into it."""
    pipe = tiny.flux_pipeline().to(dtype)
    difflora.attach(pipe)
    folder = loaded.source
    assert folder == "the state dict"
    from difflora.surface import engine_of

    engine_of(pipe).enter(loaded, "x", difflora.types.Strength(strength), "merged", True, alone=True)
    return {key: value.detach().clone() for key, value in pipe.transformer.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind", ["LoRA", "LoKr", "DoRA", "DoRA by input", "OFT", "OFT v2", "replaced weights", "LoRA bias"]
)
def test_a_single_file_by_the_familys_own_names(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base = tiny.flux_pipeline().to(dtype).transformer.state_dict()
    save_file(native(base), tmp_path / "base.safetensors", {"modelspec.title": "tiny", "modelspec.hash_sha256": "0x1"})
    before = (tmp_path / "base.safetensors").read_bytes()
    loaded = adapter(kind)
    done = bake(tmp_path / "base.safetensors", [(loaded, 0.6)], tmp_path / "out.safetensors")
    found = diffusers_names(load_file(tmp_path / "out.safetensors"))
    wanted = merged(loaded, 0.6, dtype)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    changed = {key for key in base if not torch.equal(base[key], found[key])}
    assert {key.removesuffix(".weight").removesuffix(".bias") for key in changed} == {
        *ATTENTION, "norm_out.linear", "transformer_blocks.0.attn.norm_q", "transformer_blocks.0.ff.net.0.proj"
    }  # fmt: skip
    assert done.parameters == sum(len(deltas) for deltas in loaded.components.values())
    assert (tmp_path / "base.safetensors").read_bytes() == before
    from safetensors import safe_open

    with safe_open(tmp_path / "out.safetensors", "pt") as opened:
        said = opened.metadata()
    assert said["modelspec.title"] == "tiny" and "modelspec.hash_sha256" not in said
    assert json.loads(said["difflora.baked"]) == [{"source": "the state dict", "strength": 0.6}]


@pytest.mark.parametrize("kind", ["LoRA", "DoRA by input"])
@pytest.mark.parametrize("shape", ["component", "shards", "pipeline"])
def test_folders_of_diffusers(kind: str, shape: str, tmp_path: Path) -> None:
    pipe = tiny.flux_pipeline()
    options: dict[str, Any] = {"max_shard_size": "60KB"} if shape == "shards" else {}
    root = tmp_path / "base"
    (pipe if shape == "pipeline" else pipe.transformer).save_pretrained(root, **options)
    assert shape != "shards" or len(list(root.glob("*.safetensors"))) > 2
    loaded = adapter(kind)
    bake(root, [(loaded, 1.0), (loaded, -0.5)], tmp_path / "out")
    where = tmp_path / "out" / ("transformer" if shape == "pipeline" else "")
    found = type(pipe.transformer).from_pretrained(where).state_dict()
    wanted = merged(loaded, 0.5, torch.float32)
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], atol=1e-6, rtol=1e-6)
    names = {file.relative_to(root) for file in root.rglob("*") if file.is_file()}
    assert {file.relative_to(tmp_path / "out") for file in (tmp_path / "out").rglob("*") if file.is_file()} == names


def test_text_encoders_of_a_single_file(tmp_path: Path) -> None:
    pipe = tiny.sd_pipeline()
    encoder = {
        f"cond_stage_model.transformer.text_model.{key.removeprefix('text_model.')}": value.clone()
        for key, value in pipe.text_encoder.state_dict().items()
    }
    unet = {f"model.diffusion_model.{key}": value.clone() for key, value in pipe.unet.state_dict().items()}
    save_file(encoder | unet | {"first_stage_model.x": torch.ones(2)}, tmp_path / "base.safetensors")
    tensors = {
        "lora_te_text_model_encoder_layers_1_mlp_fc1.lora_down.weight": torch.ones(2, 16),
        "lora_te_text_model_encoder_layers_1_mlp_fc1.lora_up.weight": torch.full((24, 2), 0.5),
        "lora_unet_conv_out.lora_down.weight": torch.ones(2, 8, 3, 3),
        "lora_unet_conv_out.lora_up.weight": torch.full((4, 2, 1, 1), 0.25),
    }
    bake(tmp_path / "base.safetensors", [(difflora.load(tensors, family="sd1"), 1.0)], tmp_path / "out.safetensors")
    before, after = (load_file(tmp_path / f"{name}.safetensors") for name in ("base", "out"))
    changes = {
        key: float((after[key] - before[key]).mean()) for key in before if not torch.equal(after[key], before[key])
    }
    assert {key: round(value, 4) for key, value in changes.items()} == {
        "cond_stage_model.transformer.text_model.encoder.layers.1.mlp.fc1.weight": 1.0,
        "model.diffusion_model.conv_out.weight": 0.5,
    }


def test_what_cannot_be_baked_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    pipe = tiny.flux_pipeline()
    save_file(pipe.transformer.state_dict(), tmp_path / "base.safetensors")
    loaded = adapter("LoRA")
    out = tmp_path / "out.safetensors"
    absent = difflora.load(
        tiny.lora_dict(pipe.text_encoder_2, ["encoder.block.0.layer.0.SelfAttention.q"], prefix="text_encoder_2.")
    )
    wide = difflora.load(support.KINDS["LoRA"]("double_blocks.0.img_attn.qkv", 48, 16), family="flux")
    nan = difflora.load(
        {key: value * float("inf") for key, value in tiny.lora_dict(pipe.transformer, ATTENTION).items()}
    )
    cases = [
        ([(absent, 1.0)], "has no text_encoder_2.encoder.block.0.layer.0.SelfAttention.q"),
        ([(wide, 1.0)], "another shape"),
        ([(loaded, float("nan"))], "expected a finite number"),
        ([], "at least one adapter"),
        ([(nan, 1.0)], "not finite"),
    ]
    for weighted, said in cases:
        with pytest.raises(DiffLoRAError, match=said):
            bake(tmp_path / "base.safetensors", weighted, out)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base.safetensors"]
    bake(tmp_path / "base.safetensors", [(loaded, 1.0)], out, dry_run=True)
    assert not out.exists()
    bake(tmp_path / "base.safetensors", [(loaded, 1.0)], out)
    with pytest.raises(DiffLoRAError, match="exists"):
        bake(tmp_path / "base.safetensors", [(loaded, 1.0)], out)
    bake(tmp_path / "base.safetensors", [(loaded, 1.0)], out, force=True)
    with pytest.raises(DiffLoRAError, match="there is no checkpoint"):
        bake(tmp_path / "absent", [(loaded, 1.0)], tmp_path / "two.safetensors")
    whole = {key: (value * 9).to(torch.int8) for key, value in pipe.transformer.state_dict().items()}
    save_file(whole, tmp_path / "int8.safetensors")
    with pytest.raises(DiffLoRAError, match="a quantised weight"):
        bake(tmp_path / "int8.safetensors", [(loaded, 1.0)], tmp_path / "two.safetensors")


def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    """48 weights of 1 MB each, of which 12 change: the peak is a few of them."""
    names = [f"single_transformer_blocks.{n}.attn.to_{c}" for n in range(16) for c in "qkv"]
    save_file({f"{name}.weight": torch.zeros(512, 512) for name in names}, tmp_path / "base.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for name in names[::4]:
        tensors |= support.KINDS["LoRA"](f"transformer.{name}", 512, 512)
    loaded = difflora.load(tensors, family="flux")
    tracemalloc.start()
    bake(tmp_path / "base.safetensors", [(loaded, 1.0)], tmp_path / "out.safetensors")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20
    assert sum(bool(value.any()) for value in load_file(tmp_path / "out.safetensors").values()) == 12
