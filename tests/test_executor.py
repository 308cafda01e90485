"""Switching whole components: all or nothing, bit for bit back to the base, whatever moved or replaced the weights."""

from __future__ import annotations

import copy
import gc
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

import difflora
from difflora import DiffLoRAError
from difflora.deltas import LowRank
from difflora.surface import engine_of
from difflora.types import Adapter, Strength

LINEARS = ["x_embedder", "transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.net.2", "norm_out.linear"]
MODES = ["kernel", "merged"]


def pipeline(dtype: torch.dtype = torch.float32) -> Any:
    pipe = tiny.flux_pipeline()
    pipe.transformer.requires_grad_(False)
    return difflora.attach(pipe.to(dtype))


def adapter(seed: int = 1, rank: int = 3, names: list[str] | None = None, size: float = 0.1) -> dict[str, Tensor]:
    return tiny.lora_dict(tiny.flux_transformer(), names or LINEARS, rank=rank, alpha=2.0, seed=seed, size=size)


def by_hand(pipe: Any, *weighted: tuple[dict[str, Tensor], float]) -> None:
    """W + sum of weight * alpha / r * B @ A, on the pipeline's own weights."""
    sums: dict[str, Tensor] = {}
    for file, weight in weighted:
        for key, a in file.items():
            if key.endswith("lora_A.weight"):
                path = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
                delta = weight * 2.0 / len(a) * file[key.replace("lora_A", "lora_B")] @ a
                sums[path] = sums.get(path, torch.zeros(())) + delta
    for path, delta in sums.items():
        target = pipe.transformer.get_submodule(path).weight
        target.data = (target.data.float() + delta).to(target.dtype)


def bytes_of(pipe: Any) -> dict[str, Tensor]:
    return {key: value.detach().clone().view(torch.uint8) for key, value in pipe.transformer.state_dict().items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(value, two[key]) for key, value in one.items())


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, atol=2e-5, rtol=2e-5)


def acts(pipe: Any, twin: Any, *weighted: tuple[dict[str, Tensor], float]) -> None:
    """The output is that of `twin`, a pipeline without adapters, with its weights changed by hand."""
    base = tiny.run(twin)
    kept = copy.deepcopy(twin.transformer)
    by_hand(twin, *weighted)
    out = tiny.run(pipe)
    close(out, tiny.run(twin))
    assert (out - base).abs().max() > 1e-2
    twin.transformer = kept


# ---- switching ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_many_switches_among_several_adapters_leave_bf16_weights_as_they_were(mode: Any) -> None:
    pipe = pipeline(torch.bfloat16)
    before, chosen = bytes_of(pipe), random.Random(0)
    for i in range(5):
        pipe.load_lora(adapter(seed=i, rank=1 + 2 * i), 0.0, name=f"a{i}", mode=mode)
    for _ in range(200):
        names = chosen.sample(range(5), chosen.randint(0, 3))
        pipe.set_loras({f"a{i}": chosen.uniform(-1, 1) for i in names})
    pipe.set_loras({"a1": 0.5, "a2": 0.25})
    assert same(bytes_of(pipe), before) == (mode == "kernel")
    pipe.unload_loras()
    assert same(bytes_of(pipe), before)


@pytest.mark.parametrize("mode", MODES)
def test_a_switch_depends_on_what_is_asked_and_on_nothing_before_it(mode: Any) -> None:
    pipe, fresh = pipeline(torch.bfloat16), pipeline(torch.bfloat16)
    for each in (pipe, fresh):
        each.load_lora(adapter(1), 0.0, name="a", mode=mode)
        each.load_lora(adapter(2), 0.0, name="b", mode=mode)
    for asked in ({"a": 1.0}, {"b": -0.5, "a": 0.2}, {}, {"b": 0.9}, {"a": 0.3, "b": 0.4}):
        pipe.set_loras(asked)
    fresh.set_loras({"a": 0.3, "b": 0.4})
    assert same(bytes_of(pipe), bytes_of(fresh))
    assert torch.equal(tiny.run(pipe), tiny.run(fresh))


def test_both_modes_at_once() -> None:
    pipe, twin = pipeline(), tiny.flux_pipeline()
    one, two = adapter(1), adapter(2, rank=5)
    pipe.load_lora(one, 0.7, name="inside", mode="merged")
    pipe.load_lora(two, -0.4, name="beside", mode="kernel")
    acts(pipe, twin, (one, 0.7), (two, -0.4))
    pipe.unload_lora("inside")
    acts(pipe, twin, (two, -0.4))
    pipe.unload_lora("beside")
    assert torch.equal(tiny.run(pipe), tiny.run(twin))


@pytest.mark.parametrize("modes", [("merged", "merged"), ("kernel", "kernel"), ("merged", "kernel")])
def test_opposite_strengths_cancel(modes: tuple[Any, Any]) -> None:
    pipe = pipeline()
    base = tiny.run(pipe)
    pipe.load_lora(adapter(), 0.8, name="plus", mode=modes[0])
    pipe.load_lora(adapter(), -0.8, name="minus", mode=modes[1])
    close(tiny.run(pipe), base)
    pipe.set_loras({"plus": 0.8})
    assert (tiny.run(pipe) - base).abs().max() > 1e-2


# ---- all or nothing -------------------------------------------------------------------------------------------------


def overflowing(layer: int) -> dict[str, Tensor]:
    """An adapter whose product does not fit fp16 in one of its layers."""
    file = adapter(9)
    file[f"transformer.{LINEARS[layer]}.lora_B.weight"] *= 1e7
    return file


@pytest.mark.parametrize("layer", range(len(LINEARS)))
def test_a_merge_that_fails_in_one_layer_changes_none(layer: int) -> None:
    pipe = pipeline(torch.float16)
    pipe.load_lora(adapter(1), 0.5, name="a", mode="merged")
    pipe.load_lora(adapter(2), 0.5, name="b", mode="kernel")
    before, out = bytes_of(pipe), pipe.loras
    with pytest.raises(
        difflora.DiffLoRAError, match=rf"transformer\.{LINEARS[layer]} gives values that are not finite"
    ):
        pipe.load_lora(overflowing(layer), name="c", mode="merged")
    assert same(bytes_of(pipe), before)
    assert str(pipe.loras) == str(out)
    pipe.unload_loras()
    assert same(bytes_of(pipe), bytes_of(pipeline(torch.float16)))


@pytest.mark.parametrize("broken", ["merge.write", "linear.patch", "linear.terms"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_interruption_at_any_layer_changes_nothing(broken: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline()
    pipe.load_lora(adapter(1), 0.5, name="a", mode="merged")
    pipe.load_lora(adapter(2), 0.5, name="b", mode="kernel")
    before, out, count = bytes_of(pipe), tiny.run(pipe), iter(range(1, 100))
    module, function = broken.split(".")
    real = getattr(getattr(difflora, module), function)

    def interrupted(*args: Any) -> Any:
        if next(count) == call:
            if function == "write":  # half way through a tensor
                with torch.no_grad():
                    args[0][0].view(-1)[:5] = 0
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(f"difflora.executor.{broken}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipe.set_loras({"a": -0.1, "b": 0.9})
    assert same(bytes_of(pipe), before)
    assert torch.equal(tiny.run(pipe), out)


# ---- weights that move ----------------------------------------------------------------------------------------------


def to_dtype(dtype: torch.dtype) -> Callable[[Any], None]:
    def move(pipe: Any) -> None:
        pipe.to(dtype)

    return move


def there_and_back(pipe: Any) -> None:
    pipe.to(torch.bfloat16)
    pipe.to(torch.float32)


def reallocate(pipe: Any) -> None:
    """What a move to a device and back does to addresses."""
    for parameter in pipe.transformer.parameters():
        parameter.data = parameter.data.clone()


def half_of_the_layers(pipe: Any) -> None:
    for parameter in list(pipe.transformer.parameters())[::2]:
        parameter.data = parameter.data.clone()


def rewrap(pipe: Any) -> None:
    """New Parameter objects over the same values, as accelerate makes them."""
    for module in pipe.transformer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.data.clone(), requires_grad=False))


def reload_own(pipe: Any) -> None:
    pipe.transformer.load_state_dict(copy.deepcopy(pipe.transformer.state_dict()))


def channels_last(pipe: Any) -> None:
    pipe.transformer.to(memory_format=torch.channels_last)


MOVES: dict[str, Callable[[Any], None]] = {
    "nothing": lambda pipe: None,
    "bf16": to_dtype(torch.bfloat16),
    "fp16": to_dtype(torch.float16),
    "fp64 and back": lambda pipe: (pipe.to(torch.float64), pipe.to(torch.float32)),
    "bf16 and back": there_and_back,
    "other addresses": reallocate,
    "other addresses in half of the layers": half_of_the_layers,
    "other parameters": rewrap,
    "its own state dict": reload_own,
    "other strides": channels_last,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("move", MOVES)
def test_a_move_changes_neither_what_acts_nor_the_base(move: str, mode: Any) -> None:
    pipe, twin = pipeline(), tiny.flux_pipeline()
    pipe.load_lora(adapter(), 0.7, name="a", mode=mode)
    for each in (pipe, twin):
        MOVES[move](each)
    if move.startswith(("bf16", "fp16")) and not move.endswith("back"):
        by_hand(twin, (adapter(), 0.7))
        torch.testing.assert_close(tiny.run(pipe).float(), tiny.run(twin).float(), atol=0.1, rtol=0.1)
        twin = tiny.flux_pipeline()
        MOVES[move](twin)
    else:
        acts(pipe, twin, (adapter(), 0.7))
    assert pipe.loras[0].mode == mode
    once = tiny.run(pipe)
    for _ in range(3):
        MOVES[move](pipe)
        assert torch.equal(tiny.run(pipe), once)
    pipe.unload_lora("a")
    assert torch.equal(tiny.run(pipe), tiny.run(twin))
    assert same(bytes_of(pipe), bytes_of(twin))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("assign", [False, True])
def test_other_weights_that_are_loaded_are_the_new_base(assign: bool, mode: Any) -> None:
    pipe, other = pipeline(), tiny.flux_pipeline(seed=5)
    state = copy.deepcopy(other.transformer.state_dict())
    pipe.load_lora(adapter(), 0.7, name="a", mode=mode)
    pipe.transformer.load_state_dict(state, assign=assign)
    other.register_modules(**{n: c for n, c in pipe.components.items() if n != "transformer"})
    acts(pipe, other, (adapter(), 0.7))
    assert pipe.loras[0].mode == mode
    pipe.unload_lora("a")
    assert same(bytes_of(pipe), bytes_of(other))
    assert torch.equal(tiny.run(pipe), tiny.run(other))


@pytest.mark.parametrize("mode", MODES)
def test_one_replaced_parameter(mode: Any) -> None:
    pipe, twin = pipeline(), tiny.flux_pipeline()
    pipe.load_lora(adapter(), 0.7, name="a", mode=mode)
    other = torch.randn(32, 16, generator=torch.Generator().manual_seed(3))
    for each in (pipe, twin):
        each.transformer.x_embedder.weight = nn.Parameter(other.clone())
    acts(pipe, twin, (adapter(), 0.7))
    pipe.unload_lora("a")
    assert same(bytes_of(pipe), bytes_of(twin))


@pytest.mark.parametrize("mode", MODES)
def test_one_replaced_module(mode: Any) -> None:
    pipe, twin = pipeline(), tiny.flux_pipeline()
    pipe.load_lora(adapter(), 0.7, name="a", mode=mode)
    fresh = nn.Linear(16, 32)
    for each in (pipe, twin):
        each.transformer.x_embedder = copy.deepcopy(fresh)
    acts(pipe, twin, (adapter(), 0.7))
    pipe.unload_lora("a")
    assert same(bytes_of(pipe), bytes_of(twin))


@pytest.mark.parametrize("mode", MODES)
def test_a_module_that_is_gone_is_named_and_can_be_unloaded_from(mode: Any) -> None:
    pipe = pipeline()
    pipe.load_lora(adapter(), 0.7, name="a", mode=mode)
    kept = pipe.transformer.norm_out.linear
    pipe.transformer.norm_out.linear = nn.Identity()
    with pytest.raises(difflora.DiffLoRAError, match=r"transformer\.norm_out\.linear is no longer in the model"):
        tiny.run(pipe)
    pipe.unload_lora("a")
    pipe.transformer.norm_out.linear = nn.Linear(32, 64)
    tiny.run(pipe)
    assert kept is not pipe.transformer.norm_out.linear


def test_quantising_with_an_adapter_inside_is_refused() -> None:
    """The base would be lost: what is there now is the rounded sum."""
    pipe = pipeline()
    pipe.load_lora(adapter(), 0.7, name="a", mode="merged")
    layer = pipe.transformer.x_embedder
    scale = layer.weight.abs().max() / 127
    layer.weight = nn.Parameter((layer.weight / scale).round().to(torch.int8), requires_grad=False)
    with pytest.raises(difflora.DiffLoRAError, match=r"x_embedder was .*quantised.*while adapters were merged"):
        tiny.run(pipe)


def test_a_strange_weight_gets_the_adapter_beside_it() -> None:
    class Packed(nn.Parameter):
        pass

    pipe, twin = pipeline(), tiny.flux_pipeline()
    layer = pipe.transformer.x_embedder
    layer.weight = Packed(layer.weight.data, requires_grad=False)
    pipe.load_lora(adapter(), 0.7, name="a")
    acts(pipe, twin, (adapter(), 0.7))
    assert pipe.loras[0].mode == "merged+kernel"
    assert torch.equal(layer.weight, twin.transformer.x_embedder.weight)


# ---- copies, ties, modes of torch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_deep_copy_of_the_model_computes_with_its_own_weights(mode: Any) -> None:
    pipe, other = pipeline(), tiny.flux_pipeline()
    pipe.load_lora(adapter(), 0.7, name="a", mode=mode)
    want = tiny.run(pipe)
    other.transformer = copy.deepcopy(pipe.transformer)
    pipe.unload_lora("a")
    for parameter in pipe.transformer.parameters():
        parameter.data.zero_()
    close(tiny.run(other), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", ["shared", "encoder.embed_tokens"])
def test_tied_modules_change_together(path: str, mode: Any) -> None:
    """T5 computes with `encoder.embed_tokens`, whose weight is that of `shared`."""
    pipe = pipeline()
    twin = tiny.flux_pipeline()
    table = twin.text_encoder_2.shared.weight
    assert table is twin.text_encoder_2.encoder.embed_tokens.weight
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 24, generator=generator) * 3
    b = torch.randn(len(table), 2, generator=generator) * 3
    made = Adapter("memory", "a", "peft", None, {"text_encoder_2": {path: LowRank(a, b)}})
    engine_of(pipe).enter(made, "a", Strength(0.5), mode, strict=True, alone=False)
    base = tiny.run(twin)
    table.data += 0.5 * b @ a
    out = tiny.run(pipe)
    close(out, tiny.run(twin))
    assert (out - base).abs().max() > 1e-4
    pipe.unload_lora("a")
    assert torch.equal(tiny.run(pipe), base)


@pytest.mark.parametrize("mode", MODES)
def test_loading_in_inference_mode_and_training_after_it(mode: Any) -> None:
    pipe, twin = pipeline(), tiny.flux_pipeline()
    with torch.inference_mode():
        pipe.load_lora(adapter(), 0.7, name="a", mode=mode)
        pipe.load_lora(adapter(2), 0.0, name="b", mode=mode)
        pipe.set_loras({"a": 0.7})
    acts(pipe, twin, (adapter(), 0.7))
    layer = pipe.transformer.x_embedder
    input = torch.randn(2, 16, requires_grad=True)
    layer(input).sum().backward()
    assert input.grad is not None
    pipe.unload_loras()
    assert same(bytes_of(pipe), bytes_of(twin))


def test_weights_that_were_made_in_inference_mode() -> None:
    with torch.inference_mode():
        pipe = pipeline()
        pipe.transformer = tiny.flux_transformer()
        pipe.transformer.load_state_dict(tiny.flux_pipeline().transformer.state_dict())
    twin = tiny.flux_pipeline()
    pipe.load_lora(adapter(), 0.7, name="a", mode="merged")
    acts(pipe, twin, (adapter(), 0.7))
    pipe.unload_loras()
    assert same(bytes_of(pipe), bytes_of(twin))


@pytest.mark.parametrize("mode", MODES)
def test_loading_and_unloading_leaves_no_tensor_behind(mode: Any) -> None:
    pipe = pipeline()

    def live() -> tuple[int, int]:
        gc.collect()
        held = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
        return len(held), sum(t.numel() for t in held)

    def once(seed: int) -> None:
        pipe.load_lora(adapter(seed), 0.7, name="a", mode=mode)
        pipe.set_loras({"a": 0.1})
        tiny.run(pipe)
        pipe.unload_lora("a")

    once(0)
    before = live()
    for seed in range(50):
        once(seed)
    assert live() == before


@pytest.mark.parametrize("mode", MODES)
def test_fused_projections(mode: Any) -> None:
    """A file for q, k and v acts on the rows of the joined matrix; parts may be missing."""
    pipe, twin = pipeline(), tiny.flux_pipeline()
    leaves = ["attn.to_q", "attn.to_v", "attn.add_k_proj"]
    file = adapter(
        names=[f"transformer_blocks.0.{leaf}" for leaf in leaves] + ["single_transformer_blocks.1.attn.to_k"]
    )
    base = tiny.run(twin)
    by_hand(twin, (file, 0.7))
    pipe.transformer.fuse_qkv_projections()
    fused = tiny.run(pipe)
    pipe.load_lora(file, 0.7, name="a", mode=mode)
    close(tiny.run(pipe), tiny.run(twin))
    assert (tiny.run(pipe) - base).abs().max() > 1e-3
    pipe.unload_lora("a")
    assert torch.equal(tiny.run(pipe), fused)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("build", "part"), [(tiny.flux_pipeline, "transformer"), (tiny.sd_pipeline, "unet")])
def test_projections_fused_while_adapters_act(mode: Any, build: Any, part: str) -> None:
    """The fused copy would keep the adapter for good, or lack it: refused until that is undone."""
    pipe = difflora.attach(build())
    model = getattr(pipe, part)
    names = [name for name, _ in model.named_modules() if name.endswith("to_q")]
    tensors = tiny.lora_dict(model, names, prefix=f"{part}.", size=0.3)
    base, before = tiny.run(pipe), tiny.weights(pipe)
    pipe.load_lora(tensors, name="a", mode=mode)
    want = tiny.run(pipe)
    model.fuse_qkv_projections()
    for act in (tiny.run, lambda p: tiny.run(p, loras={}), lambda p: p.unload_lora("a")):
        with pytest.raises(DiffLoRAError, match="unfuse_qkv_projections"):
            act(pipe)
    model.unfuse_qkv_projections()
    close(tiny.run(pipe), want)
    pipe.unload_lora("a")
    after = tiny.weights(pipe)
    assert torch.equal(tiny.run(pipe), base) and all(torch.equal(before[key], after[key]) for key in before)
    # A UNet keeps the joined layers when it computes with the parts again.
    pipe.load_lora(tensors, name="a", mode=mode)
    close(tiny.run(pipe), want)


def test_a_saved_model_with_adapters_merged_loads_as_what_it_was() -> None:
    pipe, twin = pipeline(), tiny.flux_pipeline()
    pipe.load_lora(adapter(), 0.7, name="a", mode="merged")
    want = tiny.run(pipe)
    file = io.BytesIO()
    torch.save(pipe.transformer.state_dict(), file)
    file.seek(0)
    twin.transformer.load_state_dict(torch.load(file))
    assert torch.equal(tiny.run(twin), want)
