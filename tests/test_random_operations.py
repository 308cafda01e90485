"""Random operations on one pipeline against a plain model of it; at the end the base is bit-identical."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny
import torch
from torch import nn

import difflora
from difflora import DiffLoRAError

POOLS = {
    "transformer": ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.net.2", "proj_out", "x_embedder",
                    "single_transformer_blocks.0.proj_mlp", "single_transformer_blocks.1.norm.linear"],
    "text_encoder": ["encoder.layers.0.self_attn.q_proj", "encoder.layers.1.mlp.fc1"],
}  # fmt: skip

# In half precision the order of fp32 sums may move a value across one rounding boundary: one unit in the last place.
TOLERANCE = {
    torch.float32: {"atol": 1e-6, "rtol": 1e-5},
    torch.bfloat16: {"atol": 1e-6, "rtol": 2**-7},
    torch.float16: {"atol": 1e-6, "rtol": 2**-10},
}


class Plain:
    """The reference: loaded factors, the active weights, and W + sum(w * alpha / r * B A) computed from them."""

    def __init__(self, pipe: Any) -> None:
        self.base = {
            (c, path): pipe.components[c].get_submodule(path).weight.detach().clone()
            for c in POOLS
            for path in POOLS[c]
        }
        self.loaded: dict[str, dict[tuple[str, str], torch.Tensor]] = {}
        self.active: dict[str, float] = {}

    def weight(self, place: tuple[str, str], active: dict[str, float]) -> torch.Tensor:
        total = torch.zeros(self.base[place].shape)
        for name, weight in active.items():
            if place in self.loaded[name]:
                total += weight * self.loaded[name][place]
        return (self.base[place].float() + total).to(self.base[place].dtype)


def random_adapter(
    rng: random.Random, pipe: Any
) -> tuple[dict[str, torch.Tensor], dict[tuple[str, str], torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    deltas: dict[tuple[str, str], torch.Tensor] = {}
    for component in rng.sample(sorted(POOLS), k=rng.choice([1, 1, 2])):
        for path in rng.sample(POOLS[component], k=rng.randint(1, len(POOLS[component]))):
            rank, alpha, seed = rng.randint(1, 5), rng.choice([None, 0.5, 4.0]), rng.randrange(10**6)
            own = tiny.lora_dict(pipe.components[component], [path], rank, f"{component}.", seed, alpha)
            tensors.update(own)
            a, b = own[f"{component}.{path}.lora_A.weight"], own[f"{component}.{path}.lora_B.weight"]
            deltas[component, path] = (1.0 if alpha is None else alpha / rank) * b @ a
    return tensors, deltas


def check(pipe: Any, plain: Plain, active: dict[str, float]) -> None:
    for component, path in plain.base:
        have = pipe.components[component].get_submodule(path).weight
        torch.testing.assert_close(have, plain.weight((component, path), active), **TOLERANCE[have.dtype])


def step(rng: random.Random, pipe: Any, plain: Plain, number: int) -> None:
    names = sorted(plain.loaded)
    weights = [-1.0, 0.0, 0.3, 1.0, 1.7]
    choice = rng.choice(["load", "load", "set", "set", "call", "fail", "unload", "weights_only", "disable"])
    if choice == "load" and len(names) < 6:
        tensors, deltas = random_adapter(rng, pipe)
        name, weight = f"a{number}", rng.choice(weights)
        pipe.load_lora(tensors, weight, name=name)
        plain.loaded[name] = deltas
        plain.active[name] = weight
    elif choice == "set":
        plain.active = {name: rng.choice(weights) for name in rng.sample(names, k=rng.randint(0, len(names)))}
        pipe.set_loras(plain.active)
    elif choice == "call" and names:
        wanted = {name: rng.choice(weights) for name in rng.sample(names, k=rng.randint(0, len(names)))}
        with pipe.lora(wanted):
            check(pipe, plain, wanted)
    elif choice == "fail":
        tensors, _ = random_adapter(rng, pipe)
        tensors[sorted(tensors)[-1]] = torch.full((2, 2, 2), float("nan"))
        with pytest.raises(DiffLoRAError):
            pipe.load_lora(tensors, name="broken")
    elif choice == "unload" and names:
        name = rng.choice(names)
        pipe.unload_lora(name)
        del plain.loaded[name]
        plain.active.pop(name, None)
    elif choice == "weights_only" and names:
        name = rng.choice(names)
        plain.active = {name: 0.5}
        pipe.set_adapters(name, 0.5)
    elif choice == "disable":
        pipe.disable_lora()
        check(pipe, plain, {})
        pipe.enable_lora()


def forwards(pipe: Any) -> dict[str, Any]:
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    return {
        f"{name}.{path}": (type(module), module.__dict__.get("forward"))
        for name, part in parts.items()
        for path, module in part.named_modules()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_five_hundred_random_operations(dtype: torch.dtype) -> None:
    operate(random.Random(7), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_many_more_random_operations(seed: int) -> None:
    operate(random.Random(seed), (torch.float32, torch.bfloat16, torch.float16)[seed % 3])


@pytest.mark.slow
def test_a_thousand_switches_among_twenty_adapters_leave_bfloat16_bit_identical() -> None:
    rng = random.Random(0)
    pipe = tiny.flux_pipeline().to(torch.bfloat16)
    before = tiny.weights(pipe)
    difflora.attach(pipe)
    for number in range(20):
        pipe.load_lora(random_adapter(rng, pipe)[0], 0.0, name=f"a{number}")
    for _ in range(1000):
        names = rng.sample(range(20), k=rng.randint(0, 4))
        pipe.set_loras({f"a{name}": rng.uniform(-1.5, 1.5) for name in names})
    pipe.unload_loras()
    after = tiny.weights(pipe)
    assert all(torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8)) for key in before)


def operate(rng: random.Random, dtype: torch.dtype) -> None:
    """500 operations, each checked; then everything is unloaded and compared with the start, bit for bit."""
    pipe = tiny.flux_pipeline().to(dtype)
    before, shape, keys = tiny.weights(pipe), forwards(pipe), list(pipe.transformer.state_dict())
    kind = type(pipe)
    difflora.attach(pipe)
    plain = Plain(pipe)
    for number in range(500):
        step(rng, pipe, plain, number)
        if number % 10 == 0:
            check(pipe, plain, plain.active)
        assert set(pipe.get_active_adapters()) == set(plain.active)
        assert [state.name for state in pipe.loras] == list(plain.loaded)
    pipe.unload_loras()
    difflora.detach(pipe)
    after = tiny.weights(pipe)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8)) for key in before)
    assert forwards(pipe) == shape and list(pipe.transformer.state_dict()) == keys and type(pipe) is kind
    assert not any(
        word in vars(part)
        for part in (pipe.transformer, pipe.text_encoder)
        for word in vars(part)
        if "difflora" in word
    )
