"""PEFT's own loader makes of our folders what we mean by the adapter."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from difflora import DiffLoRAError, load
from difflora.deltas import Dense, LowRank
from difflora.formats.errors import DiffLoRAError as Error
from difflora.functions import DoRA
from difflora.peft_configs import _factors
from difflora.products import Hadamard, Kronecker
from difflora.rotations import InputRotation
from difflora.types import Adapter
from difflora.writing import save


class Net(nn.Module):
    """Two blocks and a head, of whose name the blocks have a module too."""

    def __init__(self) -> None:
        super().__init__()
        block = lambda: nn.ModuleDict({"proj_out": nn.Linear(24, 16), "wide": nn.Linear(16, 24)})  # noqa: E731
        self.blocks = nn.ModuleList([block(), block()])
        self.conv = nn.Conv2d(3, 8, 3)
        self.proj_out = nn.Linear(16, 12)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def weight(model: nn.Module, path: str) -> Tensor:
    return model.get_submodule(path).weight.detach().clone()  # type: ignore[operator]


def merged(folder: Path, paths: Mapping[str, Any]) -> dict[str, Tensor]:
    """The changes that PEFT makes of a folder, module by module; no other module may change."""
    before = {name: value.clone() for name, value in net().state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # missing adapter keys are a warning
        model = PeftModel.from_pretrained(net(), folder)
    after = model.merge_and_unload().state_dict()
    changed = {name: after[name] - value for name, value in before.items() if not torch.equal(after[name], value)}
    assert {name.removesuffix(".weight") for name in changed if name.endswith(".weight")} == set(paths)
    return {name.removesuffix(".weight"): value for name, value in changed.items()}


def agrees(deltas: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    one = Adapter("x", "x", "kohya", None, {"transformer": dict(deltas)})
    save(one, folder / "x", "peft")
    weights = {path: delta for path, delta in deltas.items() if not path.endswith(".bias")}
    theirs = merged(folder / "x", weights)
    for path, delta in weights.items():
        base = weight(net(), path)
        assert torch.allclose(theirs[path], delta.dense(base).reshape(base.shape), rtol=1e-3, atol=1e-4), path
    return json.loads((folder / "x" / "adapter_config.json").read_text())


def pair(model: nn.Module, path: str, rank: int, alpha: float | None, seed: int = 0) -> LowRank:
    shape = model.get_submodule(path).weight.shape
    return LowRank(
        rand(rank, *shape[1:], seed=seed), rand(shape[0], rank, *(1 for _ in shape[2:]), seed=seed + 1), alpha=alpha
    )


PATHS = ("blocks.0.proj_out", "blocks.1.wide", "conv", "proj_out")


def pairs(
    paths: tuple[str, ...] = PATHS, alphas: tuple[float | None, ...] = (2.0, 2.0, 3.0, None)
) -> dict[str, LowRank]:
    return {path: pair(net(), path, 2 + i % 3, alphas[i % 4], seed=i) for i, path in enumerate(paths)}


def test_lora_with_ranks_and_alphas_of_each_module(tmp_path: Path) -> None:
    config = agrees(pairs(), tmp_path)
    assert config["peft_type"] == "LORA" and isinstance(config["target_modules"], str)
    assert config["alpha_pattern"] == {r"^conv": 3, r"^proj_out": 2} or config["lora_alpha"] == 2


def test_a_head_s_rank_is_not_that_of_the_blocks(tmp_path: Path) -> None:
    deltas = {path: pair(net(), path, 4, 2.0) for path in ("blocks.0.proj_out", "blocks.1.proj_out")}
    config = agrees({**deltas, "proj_out": pair(net(), "proj_out", 2, 1.0)}, tmp_path)
    assert config["rank_pattern"] == {"^proj_out": 2} and config["alpha_pattern"] == {"^proj_out": 1}


def test_rslora(tmp_path: Path) -> None:
    deltas = {path: replace(delta, rslora=True, alpha=2.0) for path, delta in pairs().items()}
    assert agrees(deltas, tmp_path)["use_rslora"] is True


def test_rslora_beside_other_scales(tmp_path: Path) -> None:
    deltas: dict[str, LowRank] = pairs()
    deltas["conv"] = replace(deltas["conv"], rslora=True)
    assert agrees(deltas, tmp_path)["use_rslora"] is False


def test_dora(tmp_path: Path) -> None:
    deltas = {path: DoRA(delta, rand(delta.shape[0]).abs() + 1) for path, delta in pairs().items()}
    assert agrees(deltas, tmp_path)["use_dora"] is True


def test_biases_beside_the_pairs(tmp_path: Path) -> None:
    deltas: dict[str, Any] = {path: delta for path, delta in pairs().items() if path != "conv"}
    biases = {f"{p}.bias": Dense(rand(d.shape[0]), alpha=d.alpha, rank=d.rank) for p, d in deltas.items()}
    assert agrees({**deltas, **biases}, tmp_path)["lora_bias"] is True
    theirs = merged(tmp_path / "x", deltas)
    for path, delta in biases.items():
        assert torch.allclose(theirs[path], delta.dense(), atol=1e-6)


def test_an_embedding_has_peft_s_own_names(tmp_path: Path) -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.shared = nn.Embedding(20, 8)

    delta = LowRank(rand(2, 8), rand(20, 2), alpha=1.0)
    save(Adapter("x", "x", "kohya", None, {"text_encoder": {"shared": delta}}), tmp_path / "x", "peft")
    model = PeftModel.from_pretrained(Text(), tmp_path / "x").merge_and_unload()
    assert torch.allclose(model.shared.weight - Text().shared.weight, delta.dense(), atol=1e-5)


def loha(path: str, rank: int, alpha: float | None, core: bool = False, seed: int = 0) -> Hadamard:
    out, width, *kernel = net().get_submodule(path).weight.shape
    if core:
        sides = (rand(rank, out, seed=seed), rand(rank, width, seed=seed + 1))
        cores = {"t1": rand(rank, rank, *kernel, seed=seed), "t2": rand(rank, rank, *kernel, seed=seed + 5)}
        return Hadamard(*sides, *(side + 0.1 for side in sides), **cores, alpha=alpha)
    columns = width * int(torch.tensor(kernel).prod()) if kernel else width
    sides = (rand(out, rank, seed=seed), rand(rank, columns, seed=seed + 1))
    return Hadamard(*sides, *(side + 0.1 for side in sides), alpha=alpha)


@pytest.mark.parametrize("core", [False, True])
def test_loha(core: bool, tmp_path: Path) -> None:
    deltas = {
        path: loha(path, 2 + i, (3.0, None, 5.0, 1.0)[i], core and path == "conv", i) for i, path in enumerate(PATHS)
    }
    config = agrees(deltas, tmp_path)
    assert (config["peft_type"], config["use_effective_conv2d"]) == ("LOHA", core)


def lokr(sizes: tuple[int, int, int, int], rank: int | None, alpha: float | None, both: bool = False) -> Kronecker:
    ol, im, ok, width = sizes
    one = {"w1_a": rand(ol, rank or 1), "w1_b": rand(rank or 1, im)} if both else {"w1": rand(ol, im)}
    two = {"w2_a": rand(ok, rank), "w2_b": rand(rank, width)} if rank else {"w2": rand(ok, width)}
    return Kronecker(**one, **two, alpha=alpha)


@pytest.mark.parametrize(
    "deltas",
    [
        lambda: {"blocks.0.proj_out": lokr((4, 4, 4, 6), 1, 2.0), "blocks.1.wide": lokr((4, 4, 6, 4), 2, None)},
        lambda: {"blocks.0.proj_out": lokr((2, 2, 8, 12), 3, 2.0), "blocks.1.wide": lokr((2, 2, 12, 8), 2, 5.0)},
        lambda: {"blocks.0.proj_out": lokr((2, 2, 8, 12), None, 3.0), "proj_out": lokr((2, 2, 6, 8), None, None)},
        lambda: {"blocks.0.proj_out": lokr((4, 4, 4, 6), 1, 2.0, both=True)},
        lambda: {"blocks.0.proj_out": replace(lokr((4, 4, 4, 6), None, 3.0), r=2)},
    ],
)
def test_lokr(deltas: Callable[[], dict[str, Kronecker]], tmp_path: Path) -> None:
    assert agrees(deltas(), tmp_path)["peft_type"] == "LOKR"


def test_lokr_factors_that_no_config_makes_are_refused(tmp_path: Path) -> None:
    deltas = {"blocks.0.proj_out": lokr((4, 4, 4, 6), 1, 2.0), "blocks.1.wide": lokr((8, 8, 3, 2), 1, 2.0)}
    with pytest.raises(Error, match="no one PEFT config makes the LoKr factors"):
        save(Adapter("x", "x", "kohya", None, {"transformer": dict(deltas)}), tmp_path / "x", "peft")


def test_sizes_are_cut_in_two_as_peft_cuts_them() -> None:
    from peft.tuners.lokr.layer import factorization

    for size in range(1, 400):
        for factor in (-1, 2, 3, 4, 5, 8, 16, 21, 500):
            assert _factors(size, factor) == factorization(size, factor), (size, factor)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_oft(shared: bool, scaled: bool, tmp_path: Path) -> None:
    flag = torch.tensor(True) if scaled else None
    count = {"blocks.0.proj_out": 6, "blocks.1.wide": 4, "proj_out": 4}
    deltas = {path: InputRotation(rand(1 if shared else n, 6) / 9, scaled=flag) for path, n in count.items()}
    config = agrees(deltas, tmp_path)
    assert (config["oft_block_size"], config["block_share"]) == (4, shared)


def test_several_components_are_as_many_folders(tmp_path: Path) -> None:
    one = Adapter(
        "x",
        "x",
        "kohya",
        None,
        {"transformer": dict(pairs()), "text_encoder": {"blocks.1.wide": pairs()["blocks.1.wide"]}},
    )
    folder = save(one, tmp_path / "x", "peft")
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert found == [f"{component}/{name}" for component in ("text_encoder", "transformer") for name in names]
    assert set(merged(folder / "text_encoder", {"blocks.1.wide": 0})) == {"blocks.1.wide"}


def test_our_own_loader_reads_the_folder_as_peft_does(tmp_path: Path) -> None:
    path = "transformer_blocks.0.attn.to_q"
    delta = LowRank(rand(4, 16), rand(16, 4), alpha=3.0, rslora=True)
    save(Adapter("x", "x", "kohya", "qwen-image", {"transformer": {path: delta}}), tmp_path / "x", "peft")
    read = load(tmp_path / "x", family="qwen-image").components["transformer"][path]
    assert torch.equal(read.dense(), delta.dense())
    (tmp_path / "x" / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 8}))
    with pytest.raises(DiffLoRAError, match="rank"):
        load(tmp_path / "x", family="qwen-image")
