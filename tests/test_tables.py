"""Kernel mode through the tables of `ranks`, on a CPU: what `attach(pipe, max_rank=...)` reserves and what compiles."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

import difflora
from difflora import linear, ranks, surface
from difflora.deltas import LowRank
from difflora.formats.errors import DiffLoRAError
from difflora.kernels import ops, reference


def adapter(model: nn.Module, rank: int, seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and "blocks" in path:
            tensors[f"transformer.{path}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=made) * 0.2
            tensors[f"transformer.{path}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=made) * 0.2
    return tensors


def inputs(model: Any) -> dict[str, Any]:
    made, config = torch.Generator().manual_seed(5), model.config
    return {
        "hidden_states": torch.randn(1, 16, config.in_channels, generator=made),
        "encoder_hidden_states": torch.randn(1, 8, config.joint_attention_dim, generator=made),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, generator=made),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]) if config.guidance_embeds else None,
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
        "return_dict": False,
    }


SIZES = {"four": 4, "seventeen": 17, "thirty-two": 32, "sixty-four": 64}
SETS: list[dict[str, float]] = [
    {"four": 1.0},
    {},
    {"seventeen": 0.5},
    {"sixty-four": -1.0},
    {"thirty-two": 1.0, "seventeen": 0.3},
    {"seventeen": 0.3, "thirty-two": 1.0},
    {"four": 1.0},
]


@pytest.fixture
def merged() -> dict[int, Tensor]:
    """What merged mode makes of each set."""
    pipe = difflora.attach(tiny.flux_pipeline())
    for n, (name, rank) in enumerate(SIZES.items()):
        pipe.load_lora(adapter(pipe.transformer, rank, n), name=name, weight=0.0, mode="merged")
    found: dict[int, Tensor] = {}
    for n, weights in enumerate(SETS):
        pipe.set_loras(weights)
        with torch.no_grad():
            found[n] = pipe.transformer(**inputs(pipe.transformer))[0]
    return found


def reserved(max_rank: int = 112) -> Any:
    pipe = difflora.attach(tiny.flux_pipeline(), max_rank=max_rank)
    for n, (name, rank) in enumerate(SIZES.items()):
        pipe.load_lora(adapter(pipe.transformer, rank, n), name=name, weight=0.0, mode="kernel")
    return pipe


@pytest.mark.parametrize("how", ["eager", "whole", "blocks", "gradients"])
def test_ranks_and_strengths_change_without_recompiling(how: str, merged: dict[int, Tensor]) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    pipe = reserved()
    model = pipe.transformer
    run = model
    if how == "whole":
        run = torch.compile(model, fullgraph=True, backend="aot_eager")
    if how == "blocks":
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    graphs = 0
    with torch.set_grad_enabled(how == "gradients"):
        for n, weights in enumerate(SETS):
            pipe.set_loras(weights)
            torch.testing.assert_close(run(**inputs(model))[0], merged[n], atol=2e-5, rtol=2e-5)
            if n == 0:
                graphs = counters["unique_graphs"]
    assert counters["unique_graphs"] == graphs, "compiled again"
    assert graphs == {"eager": graphs, "gradients": graphs, "whole": graphs, "blocks": graphs}[how]
    assert how in ("eager", "gradients") or graphs > 0


def test_more_ranks_than_reserved_are_refused_and_change_nothing() -> None:
    pipe = reserved(max_rank=64)
    pipe.set_loras({"sixty-four": 1.0})
    with torch.no_grad():
        before = pipe.transformer(**inputs(pipe.transformer))[0]
        with pytest.raises(DiffLoRAError, match="max_rank=80"):
            pipe.set_loras({"sixty-four": 1.0, "four": 1.0})
        assert torch.equal(pipe.transformer(**inputs(pipe.transformer))[0], before)
    assert {row.name: row.weight for row in pipe.loras if row.weight} == {"sixty-four": 1.0}


@pytest.mark.parametrize("wrong", [-1, True, "64", 1.5])
def test_a_wrong_max_rank(wrong: Any) -> None:
    with pytest.raises(DiffLoRAError, match="max_rank"):
        difflora.attach(tiny.flux_pipeline(), max_rank=wrong)


def test_detach_undoes_the_reserved_room() -> None:
    pipe = reserved()
    pipe.set_loras({"four": 1.0})
    model = pipe.transformer
    difflora.detach(pipe)
    assert not any("_difflora" in key or key == "forward" for m in model.modules() for key in vars(m))


def test_a_cast_model_gets_tables_of_its_new_dtype() -> None:
    pipe = reserved()
    pipe.set_loras({"seventeen": 0.5})
    with torch.no_grad():
        wanted = pipe.transformer(**inputs(pipe.transformer))[0]
        pipe.transformer.to(torch.float64)
        pipe.set_loras({"seventeen": 0.5})
        given = {
            k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            for k, v in inputs(pipe.transformer).items()
        }
        torch.testing.assert_close(pipe.transformer(**given)[0].float(), wanted, atol=1e-4, rtol=1e-4)
        pipe.transformer.to(torch.bfloat16)
        pipe.set_loras({"seventeen": 0.5})
        room = surface.engine_behind(pipe).executor.rooms["transformer"]
        assert {site.b.dtype for site in room.sites.values()} == {torch.bfloat16}


def test_a_copy_of_a_patched_model_computes_the_same() -> None:
    pipe = reserved()
    pipe.set_loras({"seventeen": 0.5})
    with torch.no_grad():
        wanted = pipe.transformer(**inputs(pipe.transformer))[0]
        other = copy.deepcopy(pipe.transformer)
        pipe.unload_loras()
        torch.testing.assert_close(other(**inputs(other))[0], wanted, atol=2e-5, rtol=2e-5)


def test_autocast_keeps_the_dtype_that_the_layer_gives() -> None:
    module = nn.Linear(24, 40)
    source = LowRank(down=torch.randn(3, 24), up=torch.randn(40, 3))
    part = ranks.Part(source, (source.down,), 3, 0, 40, 0.5)
    room = ranks.arena(linear.shapes({"m": module}, nn.Sequential(module)), 1, 1, 1)
    room.fill({"m": [[part]]})
    linear.patch(module, (), 40, room.sites["m"], (part,))
    x = torch.randn(5, 24)
    wanted = x @ (module.weight + 0.5 * source.up @ source.down).T + module.bias
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, atol=5e-2, rtol=5e-2)


def test_gradients_flow_through_the_terms() -> None:
    torch.manual_seed(0)
    module = nn.Linear(24, 40)
    source = LowRank(down=torch.randn(3, 24), up=torch.randn(40, 3))
    room = ranks.arena(linear.shapes({"m": module}, nn.Sequential(module)), 1, 1, 1)
    room.fill({"m": [[ranks.Part(source, (source.down,), 3, 0, 40, 0.5)]]})
    x, y = (torch.randn(5, 24, requires_grad=True) for _ in range(2))
    y.data.copy_(x.data)
    weight = module.weight.detach().clone().requires_grad_()
    (torch.nn.functional.linear(y, weight + 0.5 * source.up @ source.down, module.bias) ** 2).sum().backward()
    linear.patch(module, (), 40, room.sites["m"])
    (module(x) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(module.weight.grad, weight.grad, atol=1e-3, rtol=1e-4)


def test_rows_of_one_batch_have_their_own_adapters() -> None:
    """As the batch of eight images would: each run of rows is as if it were alone."""
    torch.manual_seed(0)
    module = nn.Linear(24, 40)
    sets = []
    for rank, scale in ((3, 0.5), (17, -1.0)):
        source = LowRank(down=torch.randn(rank, 24), up=torch.randn(40, rank))
        sets.append([ranks.Part(source, (source.down,), rank, 0, 40, scale)])
    room = ranks.arena(linear.shapes({"m": module}, nn.Sequential(module)), 3, 3, 4)
    room.fill({"m": [*sets, []]})
    linear.patch(module, (), 40, room.sites["m"])
    x = torch.randn(4, 7, 24)
    with torch.no_grad():
        room.spread([1, 2, 0, 1])
        mixed = module(x)
        for row, request in enumerate([1, 2, 0, 1]):
            room.spread([request])
            torch.testing.assert_close(module(x[row]), mixed[row], atol=1e-5, rtol=1e-5)
        room.spread([0, 1, 2])
        with pytest.raises(ValueError, match="3 samples"):
            module(x[:, :1, :])
    with pytest.raises(DiffLoRAError, match="room was reserved for 4"):
        room.spread([0] * 5)


def test_the_operations_tell_compilers_the_truth() -> None:
    room = ranks.arena({"m": ranks.Shape("m", 40, 24, torch.float32, torch.device("cpu"))}, 2, 1, 1)
    source = LowRank(down=torch.randn(3, 24), up=torch.randn(40, 3))
    room.fill({"m": [[ranks.Part(source, (source.down,), 3, 0, 40, 0.5)]]})
    bank, site = room.banks["m"], room.sites["m"]
    x = torch.randn(2, 5, 24, requires_grad=True)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(ops.WITH_GRADIENT.shrink, (x, bank.a, bank.ids, bank.counts, room.samples), test_utils=checks)
    t = reference.shrink(x.detach().view(-1, 24), bank.a, bank.ids, bank.counts, room.samples)
    tables = (site.b, site.entries, site.scales, site.counts, room.samples)
    weight, bias = torch.randn(40, 24), torch.randn(40)
    torch.library.opcheck(ops.WITH_GRADIENT.linear, (x, weight, bias, t, *tables), test_utils=checks)
    torch.library.opcheck(ops.TRACED.expand_, (torch.randn(10, 40), t, *tables), test_utils=checks)


def test_reserved_room_is_ordinary_memory_under_inference_mode() -> None:
    with torch.inference_mode():
        pipe = difflora.attach(tiny.flux_pipeline(), max_rank=64)
    pipe.load_lora(adapter(pipe.transformer, 4, 0), mode="kernel")
    room = surface.engine_behind(pipe).executor.rooms["transformer"]
    assert not any(site.b.is_inference() for site in room.sites.values())


def test_a_reserved_pipeline_is_pickled_while_nothing_acts() -> None:
    pipe = reserved()
    with torch.no_grad():
        wanted = pipe.transformer(**inputs(pipe.transformer))[0]
        copied = pickle.loads(pickle.dumps(pipe.transformer))
        assert torch.equal(copied(**inputs(copied))[0], wanted)
    pipe.set_loras({"four": 1.0})
    with pytest.raises(DiffLoRAError, match="a pickle cannot hold them"):
        pickle.dumps(pipe.transformer)
