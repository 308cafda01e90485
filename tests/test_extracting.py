"""An adapter taken from two checkpoints: the nearest of its rank, and the way back to the tuned model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import save_file

from difflora import DiffLoRAError
from difflora.baking import bake
from difflora.extracting import extract

Q = "transformer_blocks.0.attn.to_q"


def checkpoints(folder: Path, changes: dict[str, torch.Tensor], prefix: str = "") -> tuple[Path, Path]:
    base = tiny.flux_pipeline().transformer.state_dict()
    tuned = {key: value + changes.get(key, 0) for key, value in base.items()}
    for name, state in (("base", base), ("tuned", tuned)):
        save_file({prefix + key: value.contiguous() for key, value in state.items()}, folder / f"{name}.safetensors")
    return folder / "base.safetensors", folder / "tuned.safetensors"


def low_rank(rows: int, cols: int, rank: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=g) @ torch.randn(rank, cols, generator=g)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_low_rank_difference_comes_back_and_a_vector_is_kept_as_it_is(tmp_path: Path, prefix: str) -> None:
    changes = {f"{Q}.weight": low_rank(32, 32, 3), f"{Q}.bias": torch.ones(32), "proj_out.weight": low_rank(16, 32, 5)}
    base, tuned = checkpoints(tmp_path, changes, prefix)
    found, told = extract(base, tuned, 4)
    assert set(found.components["transformer"]) == {Q, f"{Q}.bias", "proj_out"}
    query, bias, out = (found.components["transformer"][path] for path in (Q, f"{Q}.bias", "proj_out"))
    assert (query.rank, query.scale, out.rank, bias.kind) == (3, 1.0, 4, "diff")
    torch.testing.assert_close(query.dense(), changes[f"{Q}.weight"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(bias.dense(), torch.ones(32), atol=1e-5, rtol=1e-5)
    u, s, vh = torch.linalg.svd(changes["proj_out.weight"])
    torch.testing.assert_close(out.dense(), (u[:, :4] * s[:4]) @ vh[:4], atol=1e-3, rtol=1e-3)
    assert told["transformer.proj_out"].retained == pytest.approx(float(s[:4].norm() / s.norm()), abs=1e-4)
    assert told[f"transformer.{Q}"].retained == pytest.approx(1.0, abs=1e-4)


def test_extracted_saved_loaded_and_baked_is_the_tuned_model(tmp_path: Path) -> None:
    base, tuned = checkpoints(tmp_path, {f"{Q}.weight": low_rank(32, 32, 3)})
    found, _ = extract(base, tuned, 8)
    bake(base, [(found, 1.0)], tmp_path / "again.safetensors")
    from safetensors.torch import load_file

    one, two = load_file(tuned), load_file(tmp_path / "again.safetensors")
    for key in one:
        torch.testing.assert_close(two[key], one[key], atol=1e-4, rtol=1e-4)


def test_native_names_of_a_family(tmp_path: Path) -> None:
    base = {"double_blocks.0.img_attn.qkv.weight": torch.zeros(48, 16), "img_in.weight": torch.zeros(16, 8)}
    change = low_rank(48, 16, 2)
    tuned = {**base, "double_blocks.0.img_attn.qkv.weight": change}
    for name, state in (("base", base), ("tuned", tuned)):
        save_file(state, tmp_path / f"{name}.safetensors")
    found, _ = extract(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", 4, family="flux")
    parts = [found.components["transformer"][f"transformer_blocks.0.attn.to_{c}"].dense() for c in "qkv"]
    torch.testing.assert_close(torch.cat(parts), change, atol=1e-4, rtol=1e-4)


def test_what_hardly_differs_is_left_out_and_kernels_have_their_own_rank(tmp_path: Path) -> None:
    base = tiny.sd_pipeline().unet
    tuned = {key: value.clone() for key, value in base.state_dict().items()}
    tuned["conv_in.weight"] += low_rank(8, 36, 5).view(8, 4, 3, 3)
    tuned["conv_out.bias"] += 1e-3
    tuned["mid_block.attentions.0.proj_in.weight"] += low_rank(16, 16, 5).view(16, 16, 1, 1)
    save_file({key: value.contiguous() for key, value in base.state_dict().items()}, tmp_path / "base.safetensors")
    save_file({key: value.contiguous() for key, value in tuned.items()}, tmp_path / "tuned.safetensors")
    found, _ = extract(
        tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", 4, component="unet", conv_rank=2, min_diff=0.01
    )
    assert {path: delta.rank for path, delta in found.components["unet"].items()} == {
        "conv_in": 2,
        "mid_block.attentions.0.proj_in": 4,
    }
    assert found.components["unet"]["conv_in"].shape == (8, 4, 3, 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 0}, "at least 1"),
        ({"rank": 4, "conv_rank": True}, "at least 1"),
        ({"rank": 4, "min_diff": -1}, "at least 0"),
        ({"rank": 4, "family": "sd9"}, "not known"),
        ({"rank": 4, "min_diff": 1e9}, "nothing to extract"),
    ],
)
def test_senseless_requests_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    base, tuned = checkpoints(tmp_path, {f"{Q}.weight": low_rank(32, 32, 3)})
    with pytest.raises(DiffLoRAError, match=said):
        extract(base, tuned, **options)


def test_different_models_are_refused(tmp_path: Path) -> None:
    base, _ = checkpoints(tmp_path, {})
    save_file({f"{Q}.weight": torch.zeros(32, 32)}, tmp_path / "other.safetensors")
    with pytest.raises(DiffLoRAError, match="different models: only one has"):
        extract(base, tmp_path / "other.safetensors", 4)
    save_file({"x.weight": torch.zeros(4, 4)}, tmp_path / "one.safetensors")
    save_file({"x.weight": torch.zeros(4, 5)}, tmp_path / "two.safetensors")
    with pytest.raises(DiffLoRAError, match=r"\[4, 4\] in .* and \[4, 5\] in"):
        extract(tmp_path / "one.safetensors", tmp_path / "two.safetensors", 4)
