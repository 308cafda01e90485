"""Resized and mixed adapters: truncations are the best ones, scales stay, a mix at ratio 1 is the adapter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import difflora
from difflora import Adapter, DiffLoRAError
from difflora.mixing import merge
from difflora.resizing import kept, resize

Q, C = "transformer.transformer_blocks.0.attn.to_q", "transformer.transformer_blocks.0.attn.to_k"


def made(seed: int = 0, rank: int = 6, alpha: float | None = 3.0, dtype: torch.dtype = torch.float32) -> Adapter:
    """Two linear modules and a fused one of FLUX.1, 15 columns."""
    g = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for stem, rows in (
        (f"{Q.replace('to_q', 'to_out.0')}", 21),
        ("transformer.proj_out", 7),
        ("transformer.double_blocks.0.txt_attn.qkv", 45),
    ):
        tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, 15, generator=g).to(dtype)
        tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, rank, generator=g).to(dtype)
        if alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(alpha)
    return difflora.load(tensors, family="flux")


def dense(adapter: Adapter) -> dict[str, torch.Tensor]:
    return {path: delta.dense() for path, delta in adapter.components["transformer"].items()}


def best(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return ((u[:, :rank] * s[:rank]) @ vh[:rank]).float()


@pytest.mark.parametrize("alpha", [None, 3.0])
def test_a_rank_is_the_best_of_its_size_and_the_scale_stays(alpha: float | None) -> None:
    before = made(alpha=alpha)
    after, told = resize(before, 3)
    for path in ("transformer_blocks.0.attn.to_out.0", "proj_out"):
        old, new = before.components["transformer"][path], after.components["transformer"][path]
        assert (new.rank, new.scale, new.alpha) == (3, old.scale, None if alpha is None else old.scale * 3)
        torch.testing.assert_close(new.dense(), best(old.dense(), 3), atol=1e-4, rtol=1e-4)
        share = float(new.dense().norm() / old.dense().norm())
        assert told[f"transformer.{path}"].retained == pytest.approx(share, abs=1e-5)
        assert (told[f"transformer.{path}"].rank, told[f"transformer.{path}"].new_rank) == (6, 3)


def test_parts_of_a_fused_module_are_resized_together_and_stay_one_pair() -> None:
    before = made()
    after, _ = resize(before, 2)
    old, new = (
        [a.components["transformer"][f"transformer_blocks.0.attn.add_{c}_proj"] for c in "qkv"] for a in (before, after)
    )
    assert len({id(part.down) for part in new}) == len({id(part.up) for part in new}) == 1
    assert [part.blocks for part in new] == [part.blocks for part in old]
    whole = torch.cat([part.dense() for part in old])
    torch.testing.assert_close(torch.cat([part.dense() for part in new]), best(whole, 2), atol=1e-4, rtol=1e-4)


def test_a_rank_that_suffices_changes_nothing_and_the_dtype_stays() -> None:
    before = made(dtype=torch.bfloat16)
    after, told = resize(before, 64)
    assert {one.new_rank for one in told.values()} == {6}
    assert after.components["transformer"]["proj_out"].down.dtype == torch.bfloat16
    for path, wanted in dense(before).items():
        torch.testing.assert_close(dense(after)[path], wanted, atol=0.15, rtol=0.05)


@pytest.mark.parametrize(
    ("method", "param", "count"),
    [
        ("sv_ratio", 4.0, 2),
        ("sv_ratio", 100.0, 4),
        ("sv_cumulative", 0.5, 1),
        ("sv_cumulative", 0.6, 2),
        ("sv_cumulative", 1.0, 4),
        ("sv_fro", 0.5, 1),
        ("sv_fro", 0.96, 2),
        ("sv_fro", 0.99, 3),
        (None, 0.0, 4),
    ],
)
def test_how_many_values_each_method_keeps(method: Any, param: float, count: int) -> None:
    values = torch.tensor([8.0, 4.0, 2.0, 1.0])
    assert kept(values, method, param, 4) == count
    assert kept(values, method, param, 1) == 1
    sums, squares = values.cumsum(0) / values.sum(), values.square().cumsum(0).sqrt() / values.norm()
    if method == "sv_cumulative":
        assert sums[count - 1] >= param and (count == 1 or sums[count - 2] < param)
    if method == "sv_fro":
        assert squares[count - 1] >= param and (count == 1 or squares[count - 2] < param)


def test_convolutions_have_a_rank_of_their_own_and_cores_are_contracted() -> None:
    g = torch.Generator().manual_seed(1)
    tensors = {
        "unet.conv_in.lora_down.weight": torch.randn(5, 4, 1, 1, generator=g),
        "unet.conv_in.lora_up.weight": torch.randn(12, 5, 1, 1, generator=g),
        "unet.conv_in.lora_mid.weight": torch.randn(5, 5, 3, 3, generator=g),
        "unet.time_embedding.linear_1.lora_A.weight": torch.randn(5, 9, generator=g),
        "unet.time_embedding.linear_1.lora_B.weight": torch.randn(12, 5, generator=g),
    }
    before = difflora.load(tensors, family="sd1")
    after, _ = resize(before, 4, conv_rank=2)
    conv, linear = (after.components["unet"][path] for path in ("conv_in", "time_embedding.linear_1"))
    assert (conv.rank, linear.rank, conv.shape) == (2, 4, (12, 4, 3, 3))
    wanted = best(before.components["unet"]["conv_in"].dense().flatten(1), 2).view(12, 4, 3, 3)
    torch.testing.assert_close(conv.dense(), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 0}, "whole numbers of at least 1"),
        ({"rank": True}, "whole numbers of at least 1"),
        ({"rank": 2, "conv_rank": -1}, "whole numbers of at least 1"),
        ({"rank": 2, "method": "sv_best", "param": 1.0}, "not known"),
        ({"rank": 2, "method": "sv_fro"}, "above 0, at most 1"),
        ({"rank": 2, "method": "sv_fro", "param": 1.5}, "above 0, at most 1"),
        ({"rank": 2, "method": "sv_ratio", "param": 1.0}, "above 1"),
        ({"rank": 2, "method": "sv_ratio", "param": math.nan}, "above 1"),
        ({"rank": 2, "param": 0.5}, "goes with a method"),
    ],
)
def test_senseless_requests_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DiffLoRAError, match=said):
        resize(made(), **options)


def test_kinds_without_a_rank_are_refused_by_name() -> None:
    adapter = difflora.load({f"{Q}.diff": torch.ones(4, 4)})
    with pytest.raises(DiffLoRAError, match=r"to_q \(diff\) has no rank"):
        resize(adapter, 2)


def test_the_exact_sum_and_one_adapter_alone() -> None:
    one, two = made(1), made(2, rank=4, alpha=None)
    total, told = merge([(one, 0.7), (two, -0.4)])
    assert told == {}
    for path, change in dense(total).items():
        wanted = 0.7 * dense(one)[path] - 0.4 * dense(two)[path]
        torch.testing.assert_close(change, wanted, atol=1e-4, rtol=1e-4)
    for method in ("sum", "svd", "ties", "dare"):
        assert merge([(one, 1.0)], method)[0] is one


def test_svd_is_the_best_rank_of_the_sum() -> None:
    one, two = made(1), made(2)
    mixed, told = merge([(one, 1.0), (two, 0.5)], "svd", rank=3)
    for path, change in dense(mixed).items():
        total = dense(one)[path] + 0.5 * dense(two)[path]
        torch.testing.assert_close(change, best(total, 3), atol=1e-4, rtol=1e-4)
        share = float(change.norm() / total.norm())
        assert told[f"transformer.{path}"].retained == pytest.approx(share, abs=1e-5)


def test_ties_trims_elects_and_averages_what_agrees() -> None:
    one, two = made(1), made(2)
    mixed, _ = merge([(one, 1.0), (two, 2.0)], "ties", rank=64, density=0.25)
    for path, change in dense(mixed).items():
        trimmed = []
        for matrix in (dense(one)[path], 2.0 * dense(two)[path]):
            least = matrix.abs().flatten().sort(descending=True).values[round(0.25 * matrix.numel()) - 1]
            trimmed.append(torch.where(matrix.abs() >= least, matrix, 0.0))
        wanted = torch.zeros_like(change)
        for at in range(change.numel()):
            values = [float(matrix.flatten()[at]) for matrix in trimmed]
            sign = math.copysign(1, sum(values)) if sum(values) else 0
            agreeing = [value for value in values if value * sign > 0]
            wanted.view(-1)[at] = sum(agreeing) / len(agreeing) if agreeing else 0.0
        torch.testing.assert_close(change, wanted, atol=1e-3, rtol=1e-3)


def test_dare_is_seeded_unbiased_and_the_same_in_any_company() -> None:
    one, two = made(1), made(2)
    again = [dense(merge([(one, 1.0), (two, 1.0)], "dare", rank=64, seed=s)[0])["proj_out"] for s in (1, 1, 2)]
    assert torch.equal(again[0], again[1]) and not torch.equal(again[0], again[2])
    mean = sum(
        dense(merge([(one, 1.0), (two, 1.0)], "dare", rank=64, density=0.5, seed=s)[0])["proj_out"] for s in range(300)
    )
    wanted = dense(one)["proj_out"] + dense(two)["proj_out"]
    assert float((mean / 300 - wanted).norm() / wanted.norm()) < 0.12
    whole = merge([(one, 1.0), (two, 1.0)], "dare", rank=64, density=1.0)[0]
    torch.testing.assert_close(dense(whole)["proj_out"], wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "linear"}, "not known"),
        ({"method": "sum", "rank": 4}, "has the rank that it has"),
        ({"method": "svd", "rank": 0}, "whole number"),
        ({"method": "ties", "density": 0.0}, "share above 0"),
        ({"method": "dare", "density": 1.1}, "share above 0"),
    ],
)
def test_senseless_mixes_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DiffLoRAError, match=said):
        merge([(made(1), 1.0), (made(2), 1.0)], **options)


def test_functions_of_the_base_are_refused_in_a_mix() -> None:
    dora = difflora.load(
        {
            f"{C}.lora_A.weight": torch.ones(2, 4),
            f"{C}.lora_B.weight": torch.ones(4, 2),
            f"{C}.lora_magnitude_vector": torch.ones(4),
        }
    )
    assert merge([(dora, 1.0)])[0] is dora
    for ratio in (0.5, 2.0):
        with pytest.raises(DiffLoRAError, match=r"dora\+lora, a function of the base weight"):
            merge([(dora, ratio)])
