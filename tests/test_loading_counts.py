"""A load creates no random numbers and copies no tensor of the file twice: counted, not timed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

import difflora

RANDOM = ("normal", "uniform", "rand", "bernoulli", "random", "exponential", "kaiming")
COPIES = ("aten::clone", "aten::copy_", "aten::_to_copy", "aten::cat")


class Count(TorchDispatchMode):
    """Counts operators, and the elements that each source tensor's storage was copied from."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.copied: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        self.operators[name] += 1
        if name in COPIES:
            sources = args[0] if name == "aten::cat" else [args[1] if name == "aten::copy_" else args[0]]
            for tensor in sources:
                if tensor.numel():
                    self.copied[tensor.data_ptr(), tensor.numel()] += 1
        return func(*args, **(kwargs or {}))


def kohya_file(folder: Path, pipe: Any) -> Path:
    """A BFL-named kohya file over the tiny transformer, fused projections and the swapped last layer included."""
    width = 32
    rows = {
        "double_blocks_0_img_attn_qkv": (3 * width, width), "double_blocks_1_txt_attn_proj": (width, width),
        "single_blocks_0_linear1": (7 * width, width), "single_blocks_1_linear2": (width, 5 * width),
        "final_layer_adaLN_modulation_1": (2 * width, width),
    }  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    for i, (stem, (out, width)) in enumerate(rows.items()):
        tensors[f"lora_unet_{stem}.lora_down.weight"] = torch.randn(4, width)
        tensors[f"lora_unet_{stem}.lora_up.weight"] = torch.randn(out, 4)
        tensors[f"lora_unet_{stem}.alpha"] = torch.tensor(float(i + 1))
    save_file(tensors, folder / "x.safetensors")
    return folder / "x.safetensors"


def test_reading_copies_nothing_and_loading_copies_each_tensor_once(flux: Any, tmp_path: Path) -> None:
    file = kohya_file(tmp_path, flux)
    with Count() as count:
        adapter = difflora.load(file, family="flux")
    assert sum(count.operators[name] for name in COPIES) == 0, count.operators
    assert len(adapter.components["transformer"]) == 3 + 1 + 4 + 1 + 1

    difflora.attach(flux)
    with Count() as count:
        flux.load_lora(file, weight=0.0)
    assert not [name for name in count.operators if any(word in name for word in RANDOM)], count.operators
    assert len(count.copied) == 15, "five modules of three tensors"
    assert set(count.copied.values()) == {1}


def test_shared_factors_are_stored_once(flux: Any, tmp_path: Path) -> None:
    file = kohya_file(tmp_path, flux)
    pipe = difflora.attach(flux)
    pipe.load_lora(file)
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    stored = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
    assert pipe.loras[0].bytes == stored


def test_a_new_weight_reads_no_file_and_binds_nothing(flux: Any, tmp_path: Path, monkeypatch: Any) -> None:
    pipe = difflora.attach(flux)
    pipe.load_lora(kohya_file(tmp_path, flux), name="x")

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a weight change went back to the file")

    for place in ("difflora.surface.read", "difflora.surface.normalise", "difflora.binding.match"):
        monkeypatch.setattr(place, never, raising=False)
    before = tiny.run(pipe)
    pipe.set_loras({"x": 0.3})
    assert not torch.equal(tiny.run(pipe), before)
    pipe.set_loras({"x": 1.0})
    assert torch.equal(tiny.run(pipe), before)


def test_switching_costs_as_many_merges_as_modules_of_the_adapters_named(flux: Any, monkeypatch: Any) -> None:
    """Adapters that are loaded but not active cost nothing in a switch."""
    from difflora import merge

    pipe = difflora.attach(flux)
    for i in range(20):
        pipe.load_lora(tiny.lora_dict(flux.transformer, ["proj_out"], seed=i), 0.0, name=f"a{i}")
    merges = []
    original = merge.merged
    monkeypatch.setattr(merge, "merged", lambda *args: merges.append(1) or original(*args))
    pipe.set_loras({"a3": 1.0})
    pipe.set_loras({"a4": 1.0})
    pipe.set_loras({"a4": 1.0})
    assert len(merges) == 2
