"""What only a GPU shows: devices, offload hooks with streams, half precision, compiled kernels.

Run with `pytest -m gpu --record tests/gpu.json`; the file says on which device, with which versions, and what passed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import support
import tiny
import torch

import difflora

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NAMES = [
    "transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.net.2", "single_transformer_blocks.0.proj_out",
    "single_transformer_blocks.1.norm.linear", "proj_out",
]  # fmt: skip


def adapter(pipe: Any, seed: int = 1, size: float = 0.1) -> dict[str, torch.Tensor]:
    return tiny.lora_dict(pipe.transformer, NAMES, rank=4, alpha=2.0, seed=seed, size=size)


def expected(pipe: Any, *adapters: tuple[dict[str, torch.Tensor], float]) -> Any:
    """A copy of the pipeline with W + sum(w * alpha / r * B A) written in by plain arithmetic."""
    copied = copy.deepcopy(pipe)
    for name in NAMES:
        weight = copied.transformer.get_submodule(name).weight
        total = weight.detach().float()
        for tensors, strength in adapters:
            a, b = (tensors[f"transformer.{name}.lora_{x}.weight"].to(weight.device) for x in "AB")
            total = total + strength * 2.0 / 4 * b @ a
        weight.data.copy_(total)
    return copied


def close(one: torch.Tensor, two: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    torch.testing.assert_close(one.float(), two.float(), atol=tolerance, rtol=tolerance)


def same_bits(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(one[k].cpu().flatten().view(torch.uint8), two[k].cpu().flatten().view(torch.uint8)) for k in one
    )


@pytest.mark.parametrize("mode", ["merged", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_both_modes_on_the_gpu(mode: Any, dtype: torch.dtype) -> None:
    pipe = tiny.flux_pipeline().to("cuda", dtype)
    before, base = tiny.weights(pipe), tiny.run(pipe)
    one, two = adapter(pipe, 1), adapter(pipe, 2)
    reference = tiny.run(expected(pipe, (one, 0.7), (two, -0.3)))
    difflora.attach(pipe)
    pipe.load_lora(one, 0.7, name="one", mode=mode)
    pipe.load_lora(two, -0.3, name="two", mode=mode)
    assert {state.device for state in pipe.loras} == {"cuda:0"}
    close(tiny.run(pipe), reference, dtype)
    pipe.unload_loras()
    assert same_bits(tiny.weights(pipe), before)
    assert torch.equal(tiny.run(pipe), base)


def test_a_hundred_switches_in_bfloat16_leave_the_base_bit_identical() -> None:
    pipe = tiny.flux_pipeline().to("cuda", torch.bfloat16)
    before = tiny.weights(pipe)
    difflora.attach(pipe)
    for i in range(8):
        pipe.load_lora(adapter(pipe, i), 0.0, name=f"a{i}")
    for i in range(100):
        pipe.set_loras({f"a{i % 8}": 0.5, f"a{(i * 3 + 1) % 8}": -0.5 if i % 3 else 0.0})
    pipe.unload_loras()
    assert same_bits(tiny.weights(pipe), before)


OFFLOADS: dict[str, Callable[[Any], Any]] = {
    "model": lambda pipe: pipe.enable_model_cpu_offload(),
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(),
    "group": lambda pipe: pipe.transformer.enable_group_offload(torch.device("cuda"), offload_type="leaf_level"),
    "group with a stream": lambda pipe: pipe.transformer.enable_group_offload(
        torch.device("cuda"), offload_type="leaf_level", use_stream=True
    ),
    "blocks with a stream": lambda pipe: pipe.transformer.enable_group_offload(
        torch.device("cuda"), offload_type="block_level", num_blocks_per_group=1, use_stream=True
    ),
}


def rest_to_gpu(pipe: Any, name: str) -> None:
    if "group" in name or "blocks" in name:
        for part in (pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
            part.to("cuda")


@pytest.mark.parametrize("mode", ["auto", "kernel"])
@pytest.mark.parametrize("first", ["offload", "adapter"])
@pytest.mark.parametrize("name", OFFLOADS)
def test_offload_and_adapters_in_either_order(name: str, first: str, mode: Any) -> None:
    plain = tiny.flux_pipeline().to("cuda")
    tensors = adapter(plain)
    base, reference = tiny.run(plain), tiny.run(expected(plain, (tensors, 0.7)))
    pipe = difflora.attach(tiny.flux_pipeline())
    if first == "offload":
        rest_to_gpu(pipe, name)
        OFFLOADS[name](pipe)
    pipe.load_lora(tensors, 0.7, name="x", mode=mode)
    if first == "adapter":
        rest_to_gpu(pipe, name)
        OFFLOADS[name](pipe)
    for _ in range(3):
        close(tiny.run(pipe), reference, torch.float32)
    assert torch.equal(tiny.run(pipe, loras={}), base)
    close(tiny.run(pipe), reference, torch.float32)
    pipe.unload_loras()
    assert torch.equal(tiny.run(pipe), base)


def test_layerwise_casting_keeps_the_full_strength() -> None:
    """Beside fp8 weights the adapter acts in the compute dtype; merged into them most of it would be rounded away."""
    pipe = tiny.flux_pipeline().to("cuda")
    tensors = adapter(pipe, size=0.03)
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    base = tiny.run(pipe)
    difflora.attach(pipe)
    report = pipe.load_lora(tensors, 1.0, name="x")
    cast = [n for n in NAMES if pipe.transformer.get_submodule(n).weight.dtype == torch.float8_e4m3fn]
    assert cast and "kernel" in pipe.loras[0].mode and len(report.matched) == len(NAMES)
    output = tiny.run(pipe)

    wide = tiny.flux_pipeline().to("cuda")
    for name, weight in wide.transformer.named_parameters():
        stored = pipe.transformer.get_parameter(name).dtype
        weight.data = weight.data.to(stored).to(torch.float32)
    close(tiny.run(wide), base, torch.float32)
    close(tiny.run(expected(wide, (tensors, 1.0))), output, torch.float32)
    pipe.unload_loras()
    assert torch.equal(tiny.run(pipe), base)


@pytest.mark.parametrize("mode", ["merged", "kernel"])
def test_adapters_on_a_compiled_transformer(mode: Any) -> None:
    pipe = tiny.flux_pipeline().to("cuda")
    tensors = adapter(pipe)
    base, reference = tiny.run(pipe), tiny.run(expected(pipe, (tensors, 0.7)))
    difflora.attach(pipe)
    pipe.transformer.compile_repeated_blocks(fullgraph=True)
    close(tiny.run(pipe), base, torch.float32)
    for _ in range(2):
        pipe.load_lora(tensors, 0.7, name="x", mode=mode)
        close(tiny.run(pipe), reference, torch.float32)
        pipe.unload_loras()
        close(tiny.run(pipe), base, torch.float32)


def test_moves_between_devices_and_dtypes_while_merged() -> None:
    pipe = difflora.attach(tiny.flux_pipeline())
    before = tiny.weights(pipe)
    pipe.load_lora(adapter(pipe), 0.7, name="x")
    pipe.to("cuda")
    tiny.run(pipe)
    pipe.to("cpu")
    pipe.unload_loras()
    assert same_bits(tiny.weights(pipe), before)
    pipe.load_lora(adapter(pipe), 0.7, name="x")
    pipe.to("cuda", torch.bfloat16)
    tiny.run(pipe)
    pipe.unload_loras()
    assert same_bits(tiny.weights(pipe), {k: v.bfloat16() if v.is_floating_point() else v for k, v in before.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", support.KINDS)
def test_every_kind_on_the_gpu(kind: str, dtype: torch.dtype) -> None:
    """A fused projection of the file on a split model: W + s (W' - W) as the CPU computes it, and the base again."""
    pipe = tiny.flux_pipeline().to("cuda", dtype)
    before = tiny.weights(pipe)
    stem, names = "lora_unet_double_blocks_0_img_attn_qkv", [f"transformer_blocks.0.attn.to_{c}" for c in "qkv"]
    tensors = support.KINDS[kind](stem, 96, 32)
    whole = next(iter(difflora.load(tensors, family="flux").components["transformer"].values()))
    difflora.attach(pipe)
    pipe.load_lora(tensors, 0.5, name="x", family="flux")
    on_the_gpu = [pipe.transformer.get_submodule(name).weight.detach().float().cpu() for name in names]
    pipe.unload_loras()
    assert same_bits(before, tiny.weights(pipe))
    on_the_cpu = tiny.flux_pipeline().to(dtype)
    difflora.attach(on_the_cpu)
    on_the_cpu.load_lora(tensors, 0.5, name="x", family="flux")
    for name, found in zip(names, on_the_gpu, strict=True):
        wanted = on_the_cpu.transformer.get_submodule(name).weight.detach().float()
        assert not torch.equal(wanted, before[f"transformer.{name}.weight"].float().cpu()), whole.kind
        torch.testing.assert_close(found, wanted, atol=2e-2 if dtype == torch.bfloat16 else 1e-4, rtol=1e-2)
