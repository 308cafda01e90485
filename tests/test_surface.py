"""The rules of the pipeline surface: what is active when, what a call may ask for, and what attaching leaves alone."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from diffusers import (
    AutoPipelineForImage2Image,
    DiffusionPipeline,
    FluxImg2ImgPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
)
from safetensors.torch import save_file
from torch import Tensor, nn

import difflora
from difflora import DiffLoRAError
from difflora.surface import engine_of

Q, PROJ, TOP = "transformer_blocks.0.attn.to_q", "single_transformer_blocks.1.proj_mlp", "proj_out"
TEXT = "encoder.layers.0.self_attn.q_proj"


def lora(pipe: Any, seed: int, *names: str, **options: Any) -> dict[str, Tensor]:
    return tiny.lora_dict(pipe.transformer, list(names or (Q, PROJ)), seed=seed, size=0.2, **options)


def text_lora(pipe: Any, seed: int) -> dict[str, Tensor]:
    return tiny.lora_dict(pipe.text_encoder, [TEXT], seed=seed, size=0.5, prefix="text_encoder.")


def weight(pipe: Any, name: str = Q) -> Tensor:
    return pipe.transformer.get_submodule(name).weight.detach().clone()


def delta(state: dict[str, Tensor], name: str = Q) -> Tensor:
    return state[f"transformer.{name}.lora_B.weight"] @ state[f"transformer.{name}.lora_A.weight"]


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


def same_weights(pipe: Any, wanted: dict[str, Tensor]) -> None:
    have = tiny.weights(pipe)
    assert have.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(have[key], wanted[key])] == []


class Seen:
    """Records a weight at each step of a call."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def __call__(self, pipe: Any, step: int, time: Any, held: dict[str, Any]) -> dict[str, Any]:
        self.weights.append(weight(pipe))
        return held


@pytest.fixture
def pipe(flux: FluxPipeline) -> Iterator[Any]:
    """An attached pipeline with `a` and `b` loaded and nothing active."""
    made = difflora.attach(flux)
    made.load_lora(lora(made, 1), name="a")
    made.load_lora(lora(made, 2), name="b")
    made.set_loras({})
    yield made
    made.unload_loras()


# ---- which adapters are active --------------------------------------------------------------------------------------


def test_load_lora_adds_and_load_lora_weights_replaces(flux: FluxPipeline) -> None:
    pipe, before = difflora.attach(flux), weight(flux)
    one, two, three = (lora(pipe, seed) for seed in (1, 2, 3))
    pipe.load_lora(one, weight=0.5, name="one")
    pipe.load_lora(two, weight=2.0, name="two")
    close(weight(pipe), before + 0.5 * delta(one) + 2.0 * delta(two))
    pipe.load_lora_weights(three, adapter_name="three")
    close(weight(pipe), before + delta(three))
    assert [state.weight for state in pipe.loras] == [None, None, 1.0]


def test_set_loras_is_the_exact_set(pipe: Any) -> None:
    before = weight(pipe)
    a, b = lora(pipe, 1), lora(pipe, 2)
    pipe.set_loras({"a": 0.3, "b": -1})
    close(weight(pipe), before + 0.3 * delta(a) - delta(b))
    pipe.set_loras({"b": 1})
    close(weight(pipe), before + delta(b))
    pipe.set_loras({})
    assert torch.equal(weight(pipe), before)


def test_loras_is_the_set_of_one_call_and_the_empty_one_is_the_base(pipe: Any) -> None:
    base = tiny.run(pipe)
    pipe.set_loras({"a": 1.0})
    with_a, held = tiny.run(pipe), weight(pipe)
    assert not torch.equal(base, with_a)
    assert torch.equal(tiny.run(pipe, loras={}), base)
    with_b = tiny.run(pipe, loras={"b": 1.0})
    assert torch.equal(weight(pipe), held)
    assert torch.equal(tiny.run(pipe), with_a)
    pipe.set_loras({"b": 1.0})
    assert torch.equal(tiny.run(pipe), with_b)


@pytest.mark.parametrize("options", [{"loras": {"b": 1.0}}, {"loras": {}}, {"prompt": "a cat <lora:b>"}])
def test_the_active_set_is_back_after_an_exception(pipe: Any, options: dict[str, Any]) -> None:
    pipe.set_loras({"a": 1.0})
    held, inside = tiny.weights(pipe), []

    def fail(*_: Any) -> None:
        inside.append(weight(pipe))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.run(pipe, **{"prompt": "a cat", **options, "callback_on_step_end": fail})
    assert not torch.equal(inside[0], held[f"transformer.{Q}.weight"])
    same_weights(pipe, held)
    assert dict(engine_of(pipe).active.items).keys() == {"a"}


def test_with_lora_restores_after_exceptions_and_nests(pipe: Any) -> None:
    pipe.set_loras({"a": 1.0})
    before, a, b = weight(pipe) - delta(lora(pipe, 1)), delta(lora(pipe, 1)), delta(lora(pipe, 2))
    held = tiny.weights(pipe)
    with pytest.raises(ZeroDivisionError), pipe.lora({"b": 0.5}):  # noqa: PT012 (what happens in between is the test)
        close(weight(pipe), before + 0.5 * b)
        with pipe.lora({}):
            close(weight(pipe), before)
        close(weight(pipe), before + 0.5 * b)
        raise ZeroDivisionError
    same_weights(pipe, held)
    with pytest.raises(DiffLoRAError, match="nobody"), pipe.lora({"nobody": 1}):
        pass
    same_weights(pipe, held)
    close(weight(pipe), before + a)


def test_inside_a_with_block_tags_and_scale_act_on_its_set(pipe: Any) -> None:
    pipe.set_loras({"a": 1.0})
    expected = tiny.run(pipe, loras={"b": 0.5, "a": 0.25})
    half = tiny.run(pipe, loras={"b": 0.25})
    with pipe.lora({"b": 0.5}):
        assert torch.equal(tiny.run(pipe, "a cat <lora:a:0.25>"), expected)
        assert torch.equal(tiny.run(pipe, joint_attention_kwargs={"scale": 0.5}), half)


def test_what_is_in_use_cannot_be_unloaded_from_inside(pipe: Any) -> None:
    with pipe.lora({"a": 1.0}):
        with pytest.raises(DiffLoRAError, match="in use"):
            pipe.unload_lora("a")
        with pytest.raises(DiffLoRAError, match="in use"):
            pipe.unload_loras()
        pipe.unload_lora("b")
    assert [state.name for state in pipe.loras] == ["a"]


def test_setting_adapters_from_a_callback_acts_at_once_under_a_call_scale(pipe: Any) -> None:
    """The scale of a call multiplies whatever is active at the time."""
    before, a, seen = weight(pipe), delta(lora(pipe, 1)), []
    pipe.set_loras({"a": 1.0})

    def change(_: Any, step: int, time: Any, held: dict[str, Any]) -> dict[str, Any]:
        seen.append(weight(pipe))
        pipe.set_adapters("a", 3.0)
        return held

    tiny.run(pipe, joint_attention_kwargs={"scale": 0.5}, callback_on_step_end=change)
    close(seen[0], before + 0.5 * a)
    close(seen[1], before + 1.5 * a)
    close(weight(pipe), before + 3.0 * a)


# ---- tags -----------------------------------------------------------------------------------------------------------


def test_tags_add_to_the_active_set_or_to_the_call_set_and_sum(pipe: Any) -> None:
    plain = "a cat"
    want = {w: tiny.run(pipe, plain, loras=w_set) for w, w_set in
            {"sum": {"a": 0.8, "b": 0.5}, "call": {"b": 1.25}, "twice": {"a": 0.5}}.items()}  # fmt: skip
    pipe.set_loras({"a": 0.5, "b": 0.5})
    close(tiny.run(pipe, "a <lora:a:0.3> cat"), want["sum"])
    close(tiny.run(pipe, "<lora:b:0.25>a cat", loras={"b": 1.0}), want["call"])
    pipe.set_loras({})
    close(tiny.run(pipe, "a cat<lora:a:0.25><lora:a:0.25>"), want["twice"])


def test_tag_weights_of_the_text_encoder_and_the_denoiser(flux: FluxPipeline) -> None:
    pipe = difflora.attach(flux)
    pipe.load_lora({**lora(pipe, 1), **text_lora(pipe, 2)}, name="both", weight=0.0)
    expected = tiny.run(pipe, loras={"both": {"transformer": 0.75, "text_encoder": 0.5}})
    assert torch.equal(tiny.run(pipe, "a cat <lora:both:0.5:0.75>"), expected)
    assert not torch.equal(tiny.run(pipe, "a cat <lora:both:0.75>"), expected)


def test_tags_are_cut_from_every_prompt_and_other_brackets_stay(pipe: Any) -> None:
    seen: dict[str, Any] = {}
    encode = type(pipe).encode_prompt

    def spy(self: Any, **options: Any) -> Any:
        seen.update(options)
        return encode(self, **options)

    pipe.encode_prompt = spy.__get__(pipe)
    tiny.run(pipe, ["a <lora:a:1> cat"], prompt_2=["<lyco:a:1>dog <b> <hypernet:x:1>"])
    assert seen["prompt"] == ["a cat"]
    assert seen["prompt_2"] == ["dog <b> <hypernet:x:1>"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prompt": "a cat", "prompt_2": "dog <lora:a>"}, "prompt_2 differ"),
        ({"prompt": "a cat <lora:a:0.5>", "prompt_2": "dog <lora:a>"}, "prompt_2 differ"),
        ({"prompt": "a cat", "negative_prompt": "bad <lora:a>"}, "negative_prompt"),
        ({"prompt": "a cat", "negative_prompt_2": ["bad <lora:a>"]}, "negative_prompt_2"),
        ({"prompt": "a cat <lora:nobody:1>"}, "nobody"),
        ({"prompt": "a cat <lora:a:much>"}, "much"),
        ({"prompt": ["a <lora:a>", "b <lora:b>"]}, "a, b"),
        ({"prompt": ["a <lora:a>", "b"]}, r"batch \(a\)"),
        ({"prompt": "a cat", "loras": {"nobody": 1}}, "nobody"),
        ({"prompt": "a cat", "loras": {"a": float("nan")}}, "nan"),
        ({"prompt": "a cat", "loras": "a"}, "name: weight"),
        ({"prompt": ["a", "b"], "loras": [{"a": 1}]}, "1 sets for 2 prompts"),
        ({"prompt": "a", "loras": []}, "0 sets for 1 prompts"),
        ({"prompt": ["a", "b"], "loras": [{"a": 1}, {"a": 0.5, "b": 1}]}, r"batch \(a, b\)"),
        ({"prompt": "a cat", "joint_attention_kwargs": {"scale": "x"}}, "scale"),
    ],
)
def test_a_call_that_cannot_be_honoured_is_refused_and_changes_nothing(
    pipe: Any, options: dict[str, Any], text: str
) -> None:
    pipe.set_loras({"a": 1.0})
    held, calls = tiny.weights(pipe), []
    with pytest.raises(DiffLoRAError, match=text):
        tiny.run(pipe, **options, callback_on_step_end=lambda *a: calls.append(a))
    assert not calls
    same_weights(pipe, held)


def test_equal_sets_of_a_batch_are_one(pipe: Any) -> None:
    two = ["a cat", "a dog"]
    expected = tiny.run(pipe, two, loras={"a": 0.5, "b": 1})
    assert torch.equal(tiny.run(pipe, two, loras=[{"a": 0.5, "b": 1.0}, {"b": 1, "a": 0.5}]), expected)
    assert torch.equal(tiny.run(pipe, ["a cat<lora:a:.5><lora:b>", "a dog<lora:b><lora:a:.5>"]), expected)


# ---- given embeddings -----------------------------------------------------------------------------------------------


def test_given_embeddings_and_a_text_encoder_part(flux: FluxPipeline) -> None:
    """The call's own set may not ask for a text encoder that has run already; the active set may."""
    pipe = difflora.attach(flux)
    pipe.load_lora({**lora(pipe, 1), **text_lora(pipe, 2)}, name="both")
    with torch.no_grad():
        embeds, pooled, _ = pipe.encode_prompt("a cat", None, max_sequence_length=8)
    given = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    close(tiny.run(pipe, None, **given), tiny.run(pipe, "a cat"))
    with pytest.raises(DiffLoRAError, match="text_encoder"):
        tiny.run(pipe, None, loras={"both": 1.0}, **given)
    without = tiny.run(pipe, None, loras={"both": {"text_encoder": 0}}, **given)
    assert torch.equal(tiny.run(pipe, None, loras=[{"both": {"text_encoder": 0}}], **given), without)
    patterned = {"both": {"text_encoder": {"encoder.layers.0": 0.0}}}
    canonical = {"both": {"text_encoder": {"text_model.encoder.layers.0": 0.0}}}
    assert torch.equal(tiny.run(pipe, None, loras=canonical, **given), without), patterned
    with pytest.raises(DiffLoRAError, match="2 sets for 1"):
        tiny.run(pipe, None, loras=[{}, {}], **given)


# ---- weights of components and blocks -------------------------------------------------------------------------------


def test_weight_is_the_component_times_the_longest_pattern(flux: FluxPipeline) -> None:
    pipe = difflora.attach(flux)
    names = [f"transformer_blocks.{i}.attn.{p}" for i in (0, 1) for p in ("to_q", "to_k")] + [PROJ]
    state = lora(pipe, 1, *names)
    before = {name: weight(pipe, name) for name in names}
    pipe.load_lora(state, name="a")
    pipe.set_loras({"a": {"transformer": 0.5, "transformer_blocks.0-9": 2.0, "transformer_blocks.1": 4.0,
                          "transformer_blocks.1.attn.to_k": -1.0}})  # fmt: skip
    factors = {names[0]: 1.0, names[1]: 1.0, names[2]: 2.0, names[3]: -0.5, PROJ: 0.5}
    for name, factor in factors.items():
        close(weight(pipe, name), before[name] + factor * delta(state, name))
    pipe.set_loras({"a": {"transformer": {"single_transformer_blocks.1-3": 3.0}}})
    close(weight(pipe, PROJ), before[PROJ] + 3.0 * delta(state, PROJ))
    close(weight(pipe, names[0]), before[names[0]] + delta(state, names[0]))


@pytest.mark.parametrize(
    "given",
    [{"transformer_blocks.7": 1}, {"blocks.0": 1}, {"attn.to_q": 1}, {"transformer": {"transformer_blocks.2-9": 1}},
     {"unet": 1.0}, {"": 1}, {"transformer": None}, {"transformer": True}, {"transformer_blocks.0": float("inf")}],
)  # fmt: skip
def test_a_pattern_or_weight_that_means_nothing_is_refused(pipe: Any, given: dict[str, Any]) -> None:
    pipe.set_loras({"a": 1.0})
    held = tiny.weights(pipe)
    with pytest.raises(DiffLoRAError):
        pipe.set_loras({"a": given})
    with pytest.raises(DiffLoRAError):
        pipe.load_lora(lora(pipe, 3), name="c", weight=given)
    same_weights(pipe, held)
    assert [state.name for state in pipe.loras] == ["a", "b"]


# ---- names ----------------------------------------------------------------------------------------------------------


def test_names_are_given_or_the_stem_or_the_folder_or_counted(flux: FluxPipeline, tmp_path: Path) -> None:
    pipe = difflora.attach(flux)
    save_file(lora(pipe, 1), tmp_path / "style.v2.safetensors", metadata={"ss_output_name": "Old Name"})
    (tmp_path / "org-x").mkdir()
    save_file(lora(pipe, 2), tmp_path / "org-x" / "pytorch_lora_weights.safetensors")
    names = [
        pipe.load_lora(tmp_path / "style.v2.safetensors").name,
        pipe.load_lora(tmp_path / "org-x").name,
        pipe.load_lora(lora(pipe, 3)).name,
        pipe.load_lora(lora(pipe, 4), name="lora_1").name,
        pipe.load_lora(lora(pipe, 5)).name,
        pipe.load_lora("style.v2", name="again", folders=[tmp_path]).name,
    ]
    assert names == ["style.v2", "org-x", "lora_0", "lora_1", "lora_2", "again"]
    with pytest.raises(DiffLoRAError, match="taken"):
        pipe.load_lora(tmp_path / "style.v2.safetensors")
    with pytest.raises(DiffLoRAError, match="several adapters"):
        pipe.set_loras({"Old Name": 1})
    pipe.unload_lora("again")
    pipe.set_loras({"Old Name": 0.5})
    assert engine_of(pipe).active.items[0][0] == "style.v2"
    with pytest.raises(DiffLoRAError, match="named twice"):
        pipe.set_loras({"Old Name": 0.5, "style.v2": 1})
    pipe.unload_lora("Old Name")
    assert "style.v2" not in [state.name for state in pipe.loras]
    with pytest.raises(DiffLoRAError, match="expected a string"):
        pipe.load_lora(lora(pipe, 1), name=3)


@pytest.mark.parametrize("name", ["v1.0", "org/x", "", " ", "🦊", "x" * 300, "a\nb", "__class__", "default"])
def test_any_string_is_a_name_row_80(flux: FluxPipeline, name: str) -> None:
    pipe, before, state = difflora.attach(flux), weight(flux), lora(flux, 1)
    assert pipe.load_lora(state, name=name).name == name
    pipe.set_loras({name: 0.5})
    close(weight(pipe), before + 0.5 * delta(state))
    assert len(str(pipe.loras).splitlines()) == 2
    assert pipe.get_active_adapters() == [name]
    pipe.load_lora_weights(lora(pipe, 2), adapter_name=name + "!")
    pipe.set_adapters([name, name + "!"], [1.0, 0.0])
    close(weight(pipe), before + delta(state))
    pipe.delete_adapters([name, name + "!"])
    assert torch.equal(weight(pipe), before)


# ---- components -----------------------------------------------------------------------------------------------------


class TwoExperts(DiffusionPipeline):
    """A pipeline with two denoisers, and without a LoRA mixin."""

    def __init__(self, transformer: FluxTransformer2DModel, transformer_2: FluxTransformer2DModel) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, transformer_2=transformer_2)

    def __call__(self, x: float = 1.0) -> Tensor:
        return x * (self.transformer.proj_out.weight - self.transformer_2.proj_out.weight)


@pytest.fixture
def experts() -> Any:
    torch.manual_seed(0)
    return difflora.attach(TwoExperts(tiny.flux_transformer(), tiny.flux_transformer()))


def test_component_sends_a_file_to_one_expert_row_13(experts: Any) -> None:
    high, low = lora(experts, 1, TOP), lora(experts, 2, TOP)
    first, second = experts.transformer.proj_out.weight, experts.transformer_2.proj_out.weight
    before = first.detach().clone(), second.detach().clone()
    experts.load_lora(high, name="high")
    experts.load_lora(low, name="low", component="transformer_2")
    assert experts.get_list_adapters() == {"transformer": ["high"], "transformer_2": ["low"]}
    close(first, before[0] + delta(high, TOP))
    close(second, before[1] + delta(low, TOP))
    experts.set_loras({"high": 1, "low": 0.5})
    close(first, before[0] + delta(high, TOP))
    close(second, before[1] + 0.5 * delta(low, TOP))
    experts.unload_loras()
    assert torch.equal(first, before[0])
    assert torch.equal(second, before[1])


def test_one_source_per_component_is_one_adapter(experts: Any, tmp_path: Path) -> None:
    high, low = lora(experts, 1, TOP), lora(experts, 2, TOP)
    save_file(low, tmp_path / "low.safetensors")
    before = [m.proj_out.weight.detach().clone() for m in (experts.transformer, experts.transformer_2)]
    report = experts.load_lora({"transformer": high, "transformer_2": tmp_path / "low.safetensors"}, name="both")
    assert sorted(report.matched) == ["transformer.proj_out", "transformer_2.proj_out"]
    experts.set_loras({"both": {"transformer": 2.0, "transformer_2": 0.5}})
    close(experts.transformer.proj_out.weight, before[0] + 2 * delta(high, TOP))
    close(experts.transformer_2.proj_out.weight, before[1] + 0.5 * delta(low, TOP))
    with pytest.raises(DiffLoRAError, match="transformer_9"):
        experts.load_lora(high, component="transformer_9")


def test_a_pipeline_without_a_lora_mixin_gets_the_names_too(experts: Any) -> None:
    state = lora(experts, 1, TOP)
    base = experts()
    experts.load_lora_weights(state, adapter_name="a")
    close(experts(), base + delta(state, TOP))
    close(experts(2.0, loras={"a": 0.5}), 2.0 * base + delta(state, TOP))
    experts.fuse_lora()
    experts.unload_lora_weights()
    close(experts(), base + delta(state, TOP))
    experts.unfuse_lora()
    assert torch.equal(experts(), base)


# ---- reports, the table, unloading ----------------------------------------------------------------------------------


def test_strict_refuses_a_partial_match_and_partial_is_reported_rows_52_to_56(pipe: Any) -> None:
    held, before = tiny.weights(pipe), str(pipe.loras)
    extra = lora(pipe, 3)
    extra |= {k.replace("transformer_blocks.0", "transformer_blocks.9"): v for k, v in extra.items() if "to_q" in k}
    for method in (pipe.load_lora, pipe.load_lora_weights):
        with pytest.raises(DiffLoRAError, match=r"1 of its 3 modules do not exist here.*strict=False"):
            method(extra)
    same_weights(pipe, held)
    assert str(pipe.loras) == before
    report = pipe.load_lora(extra, name="part", strict=False)
    assert report.partial
    assert report.unmatched == ("transformer.transformer_blocks.9.attn.to_q",)
    close(weight(pipe), held[f"transformer.{Q}.weight"] + delta(extra))


def test_no_matching_module_is_an_error_and_nothing_is_listed_rows_52_53(pipe: Any) -> None:
    held = tiny.weights(pipe)
    wrong = {k.replace("transformer_blocks", "layers"): v for k, v in lora(pipe, 3, Q).items()}
    for strict in (True, False):
        with pytest.raises(DiffLoRAError):
            pipe.load_lora(wrong, name="wrong", strict=strict)
    same_weights(pipe, held)
    assert pipe.get_list_adapters() == {"transformer": ["a", "b"]}


@pytest.mark.filterwarnings("error")
def test_nothing_harmless_warns_rows_54_55(flux: FluxPipeline, caplog: pytest.LogCaptureFixture) -> None:
    """A file for few layers of one component: no word about the others."""
    pipe = difflora.attach(flux)
    report = pipe.load_lora(lora(pipe, 1, PROJ))
    tiny.run(pipe)
    assert not caplog.records
    assert report.notes == ()
    assert f"transformer.{Q}" in report.untouched
    assert not any(name.startswith("text_encoder") for name in report.untouched)


def test_the_table_tells_what_is_loaded_and_how_it_acts(flux: FluxPipeline) -> None:
    pipe = difflora.attach(flux)
    assert repr(pipe.loras) == "no adapters loaded"
    pipe.load_lora({**lora(pipe, 1, rank=4), **text_lora(pipe, 2)}, name="both", weight={"text_encoder": 0.5})
    pipe.load_lora(lora(pipe, 3, Q), name="beside", mode="kernel", weight=0.25)
    pipe.load_lora(lora(pipe, 4), name="idle")
    pipe.set_loras({"both": {"text_encoder": 0.5}, "beside": 0.25})
    both, beside, idle = pipe.loras
    assert (both.weight, both.mode, both.modules, both.ranks) == ({"text_encoder": 0.5}, "merged", 3, (3, 4))
    assert set(both.components) == {"transformer", "text_encoder"}
    assert (beside.weight, beside.mode, beside.device) == (0.25, "kernel", "cpu")
    assert beside.bytes == sum(v.numel() * 4 for v in lora(pipe, 3, Q).values())
    assert (idle.weight, idle.mode) == (None, "-")
    lines = str(pipe.loras).splitlines()
    assert re.fullmatch(r"name +weight +layout +family +components +modules +rank +MB +device +mode", lines[0])
    assert re.match(r"beside +0.25 +diffusers +flux +transformer +1 +3 +0.00 +cpu +kernel", lines[2])


def test_unloading_brings_the_base_back_bit_for_bit_row_77(flux: FluxPipeline) -> None:
    """load, delete, load under one name: each load is the first, and the module tree never changes."""
    held, tree = tiny.weights(flux), [name for name, _ in flux.transformer.named_modules()]
    pipe, state = difflora.attach(flux), lora(flux, 1, Q, PROJ, TOP)
    pictures = []
    for mode in ("merged", "kernel", "merged", "kernel"):
        pipe.load_lora(state, name="a", mode=mode)
        pictures.append(tiny.run(pipe))
        pipe.unload_lora("a")
        same_weights(pipe, held)
        assert [name for name, _ in pipe.transformer.named_modules()] == tree
        assert not any("forward" in m.__dict__ for m in pipe.transformer.modules())
    assert torch.equal(pictures[0], pictures[2])
    assert torch.equal(pictures[1], pictures[3])
    with pytest.raises(DiffLoRAError, match="no adapter is called"):
        pipe.unload_lora("a")


def test_nothing_given_is_changed_or_kept_row_78(flux: FluxPipeline) -> None:
    other = difflora.attach(tiny.flux_pipeline(1))
    pipe, state = difflora.attach(flux), lora(flux, 1)
    copied, weights = {k: v.clone() for k, v in state.items()}, {"a": {"transformer": 0.5, "proj_out": 2.0}}
    for one in (pipe, other):
        one.load_lora(state, name="a", weight={"transformer": 0.5})
        one.load_lora_weights(state, adapter_name="b")
        one.set_loras(weights)
        one.set_adapters(["a"], [{"transformer": 0.5}])
        tiny.run(one, loras=weights)
    assert weights == {"a": {"transformer": 0.5, "proj_out": 2.0}}
    assert state.keys() == copied.keys()
    assert all(torch.equal(state[k], copied[k]) for k in copied)
    held = tiny.run(pipe)
    for value in state.values():
        value.zero_()
    pipe.set_loras({})
    pipe.set_adapters(["a"], [{"transformer": 0.5}])
    assert torch.equal(tiny.run(pipe), held)


def test_state_follows_the_request_alone_rows_65_103(pipe: Any) -> None:
    def picture(prompt: str) -> Tensor:
        return tiny.run(pipe, prompt)

    none, strong, weak = picture("a cat"), picture("a cat <lora:a:.8>"), picture("a cat <lora:a:.3>")
    assert torch.equal(picture("a cat"), none)
    assert torch.equal(picture("a cat <lora:a:.8>"), strong)
    assert not torch.equal(strong, weak)
    assert torch.equal(tiny.run(pipe, loras={"a": 0.3}), weak)


def test_every_adapter_keeps_its_own_weight_row_86(flux: FluxPipeline) -> None:
    pipe, before = difflora.attach(flux), weight(flux)
    states = {name: lora(pipe, seed) for seed, name in enumerate("xyz")}
    wanted = dict(zip("xyz", (0.2, -1.5, 0.9), strict=True))
    for name, state in states.items():
        pipe.load_lora(state, name=name, weight=wanted[name])
    close(weight(pipe), before + sum(w * delta(states[n]) for n, w in wanted.items()))
    pipe.set_loras({**wanted, "y": 0.1})
    close(weight(pipe), before + sum(w * delta(states[n]) for n, w in {**wanted, "y": 0.1}.items()))


def test_batches_never_take_the_first_prompts_set_for_all_row_111(pipe: Any) -> None:
    with pytest.raises(DiffLoRAError, match="different adapters within one batch"):
        tiny.run(pipe, ["a <lora:a>", "b <lora:b:.1>", "c <lora:b:.9>"])


@pytest.mark.parametrize("family", ["sd", "sdxl", "flux"])
def test_one_strength_for_every_pipeline_row_28(family: str) -> None:
    """0, 0.5 and 1 are three pictures, by every way to say it; an unknown argument raises."""
    pipe = difflora.attach(tiny.BUILDERS[family]())
    denoiser = "transformer" if family == "flux" else "unet"
    name = Q if family == "flux" else "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    state = tiny.lora_dict(pipe.components[denoiser], [name], prefix=f"{denoiser}.", size=0.5)
    base = tiny.run(pipe)
    pipe.load_lora(state, name="a")
    argument = "joint_attention_kwargs" if family == "flux" else "cross_attention_kwargs"
    pictures = [tiny.run(pipe, **{argument: {"scale": s}}) for s in (0.0, 0.5, 1.0)]
    assert torch.equal(pictures[0], base)
    assert (pictures[1] - base).abs().max() > 1e-4
    assert (pictures[2] - pictures[1]).abs().max() > 1e-4
    for s, picture in zip((0.0, 0.5, 1.0), pictures, strict=True):
        assert torch.equal(tiny.run(pipe, loras={"a": s}), picture)
        pipe.set_adapters("a", s)
        assert torch.equal(tiny.run(pipe), picture)
    with pytest.raises(TypeError, match="lora_scale"):
        tiny.run(pipe, lora_scale=0.5)


# ---- attaching ------------------------------------------------------------------------------------------------------


def test_attach_keeps_object_type_names_and_signature(flux: FluxPipeline) -> None:
    held, picture, listed = tiny.weights(flux), tiny.run(flux), vars(flux).keys() - {"__class__"}
    pipe = difflora.attach(flux)
    assert pipe is flux
    assert isinstance(pipe, FluxPipeline)
    assert (type(pipe).__name__, type(pipe).__qualname__, type(pipe).__module__) == (
        "FluxPipeline", "FluxPipeline", FluxPipeline.__module__,
    )  # fmt: skip
    assert inspect.signature(pipe.__call__) == inspect.signature(tiny.flux_pipeline().__call__)
    assert vars(pipe).keys() == listed
    assert torch.equal(tiny.run(pipe), picture)
    attached = type(pipe)
    assert difflora.attach(pipe) is pipe
    assert type(pipe) is attached
    assert type(difflora.attach(tiny.flux_pipeline())) is attached
    pipe.load_lora(lora(pipe, 1), name="a")
    assert difflora.detach(pipe) is flux
    assert type(pipe) is FluxPipeline
    assert not hasattr(pipe, "load_lora")
    same_weights(pipe, held)
    assert not any("_difflora" in key for m in pipe.transformer.modules() for key in vars(m))
    with pytest.raises(DiffLoRAError, match="not attached"):
        difflora.detach(pipe)


def test_attach_refuses_what_is_no_pipeline_or_holds_peft_layers(flux: FluxPipeline) -> None:
    for thing in (nn.Linear(2, 2), flux.transformer, None, "flux"):
        with pytest.raises(DiffLoRAError, match="no diffusers pipeline"):
            difflora.attach(thing)
    flux.load_lora_weights(lora(flux, 1))
    with pytest.raises(DiffLoRAError, match="PEFT"):
        difflora.attach(flux)
    assert type(flux) is FluxPipeline
    flux.unload_lora_weights()
    assert difflora.attach(flux) is flux


@pytest.mark.parametrize("make", [AutoPipelineForImage2Image.from_pipe, FluxImg2ImgPipeline.from_pipe])
def test_pipelines_over_one_model_share_the_engine(pipe: Any, make: Any) -> None:
    pipe.set_loras({"a": 1.0})
    other = make(pipe)
    assert type(other) is FluxImg2ImgPipeline
    difflora.attach(other)
    assert engine_of(other) is engine_of(pipe)
    assert [state.weight for state in other.loras] == [1.0, None]
    held = weight(pipe)
    other.set_loras({"b": 1.0})
    assert not torch.equal(weight(pipe), held)
    difflora.detach(other)
    assert [state.weight for state in pipe.loras] == [None, 1.0]
    assert not torch.equal(weight(pipe), held)


def test_saved_pipelines_are_the_base_and_reload(pipe: Any, tmp_path: Path) -> None:
    """Active adapters are no part of the model; fused ones are."""
    base, held = tiny.run(pipe, loras={}), tiny.weights(pipe)
    pipe.set_loras({"a": 1.0})
    acting = tiny.run(pipe)
    pipe.save_pretrained(tmp_path / "base")
    assert torch.equal(tiny.run(pipe), acting)
    loaded = DiffusionPipeline.from_pretrained(tmp_path / "base")
    assert type(loaded) is FluxPipeline
    loaded.set_progress_bar_config(disable=True)
    close(tiny.run(loaded), base)
    same_weights(loaded, held)
    pipe.fuse_lora()
    pipe.save_pretrained(tmp_path / "fused")
    fused = AutoPipelineForImage2Image.from_pretrained(tmp_path / "fused")
    assert torch.equal(fused.transformer.get_submodule(Q).weight, weight(pipe))


@pytest.mark.parametrize("how", ["pickle", "torch", "deepcopy"])
@pytest.mark.parametrize("mode", ["merged", "kernel"])
def test_copies_are_of_the_base_class(flux: FluxPipeline, how: str, mode: str, tmp_path: Path) -> None:
    pipe = difflora.attach(flux)
    pipe.load_lora(lora(pipe, 1), name="a", mode=mode)
    pipe.set_loras({})
    base = tiny.run(pipe)
    if how == "pickle":
        made = pickle.loads(pickle.dumps(pipe))
    elif how == "torch":
        torch.save(pipe, tmp_path / "pipe.pt")
        made = torch.load(tmp_path / "pipe.pt", weights_only=False)
    else:
        made = copy.deepcopy(pipe)
    assert type(made) is FluxPipeline
    assert made.transformer is not pipe.transformer
    assert torch.equal(tiny.run(made), base)
    difflora.attach(made)
    assert engine_of(made) is not engine_of(pipe)
    assert not made.loras
    made.load_lora(lora(made, 1), name="a", mode=mode)
    pipe.set_loras({"a": 1})
    assert torch.equal(tiny.run(made), tiny.run(pipe))


def test_a_pickle_does_not_need_the_library(pipe: Any) -> None:
    assert b"difflora" not in pickle.dumps(pipe).replace(b"_difflora_engine", b"")


def test_components_may_be_wrapped_removed_and_replaced_while_nothing_acts(flux: FluxPipeline) -> None:
    pipe, state = difflora.attach(flux), {**lora(flux, 1), **text_lora(flux, 2)}
    pipe.load_lora(state, name="a")
    old, text = pipe.transformer, pipe.text_encoder
    pipe.transformer = tiny.flux_transformer()
    with pytest.raises(DiffLoRAError, match="transformer was replaced while adapters act"):
        tiny.run(pipe)
    pipe.transformer = torch.compile(old, backend="eager")
    with_a = weight(pipe)
    pipe.set_loras({"a": 0.0})
    assert not torch.equal(old.get_submodule(Q).weight, with_a)
    pipe.set_loras({"a": 1.0})
    assert torch.equal(old.get_submodule(Q).weight, with_a)
    pipe.transformer = tiny.flux_transformer()
    pipe.unload_loras()
    close(old.get_submodule(Q).weight, with_a - delta(state))
    pipe.load_lora(lora(pipe, 3), name="c")
    assert not any("_difflora" in key for key in vars(old))
    before = text.get_submodule(TEXT).weight.detach().clone()
    pipe.load_lora(text_lora(pipe, 2), name="text")
    assert not torch.equal(text.get_submodule(TEXT).weight, before)
    pipe.text_encoder = None
    pipe.set_loras({"text": {"text_encoder": 0.5}, "c": 1.0})
    assert torch.equal(text.get_submodule(TEXT).weight, before)
    assert not any("_difflora" in key for key in vars(text))


def test_a_component_of_another_attached_pipeline_is_refused(flux: FluxPipeline) -> None:
    pipe, other = difflora.attach(flux), difflora.attach(tiny.flux_pipeline(1))
    mine = pipe.transformer
    pipe.transformer = other.transformer
    with pytest.raises(DiffLoRAError, match="another attached pipeline"):
        pipe.load_lora(lora(pipe, 1))
    assert engine_of(other).models["transformer"] is other.transformer
    pipe.transformer = mine
    pipe.load_lora(lora(pipe, 1))
    mixed = FluxPipeline(**{**tiny.flux_pipeline(2).components, "vae": pipe.vae, "transformer": other.transformer})
    with pytest.raises(DiffLoRAError, match="different attached pipelines"):
        difflora.attach(mixed)
    assert type(mixed) is FluxPipeline


# ---- threads --------------------------------------------------------------------------------------------------------


def run_together(jobs: list[Any]) -> None:
    """Run the jobs at once; the first error of any of them is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def guarded(job: Any) -> None:
        try:
            start.wait()
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_with_different_sets_each_get_their_own_result(pipe: Any) -> None:
    asked = [{"a": 1.0}, {"b": 0.5, "a": -1.0}, {}]
    alone = [tiny.run(pipe, loras=one) for one in asked]
    found: dict[int, list[Tensor]] = {i: [] for i in range(len(asked))}
    jobs = [lambda i=i: found[i].extend(tiny.run(pipe, loras=asked[i]) for _ in range(6)) for i in range(len(asked))]
    run_together(jobs)
    for i, expected in enumerate(alone):
        assert len(found[i]) == 6
        assert all(torch.equal(one, expected) for one in found[i])


def test_loads_from_two_threads_leave_the_process_alone_row_109() -> None:
    pipes = [difflora.attach(tiny.flux_pipeline(seed)) for seed in (0, 1)]
    held = [tiny.weights(pipe) for pipe in pipes]
    method = nn.Module.register_parameter

    def loads(pipe: Any) -> None:
        for i in range(100):
            pipe.load_lora(lora(pipe, i, Q), name=str(i))
            pipe.unload_lora(str(i))

    run_together([lambda pipe=pipe: loads(pipe) for pipe in pipes])
    assert nn.Linear(4, 4).weight.device.type == "cpu"
    assert nn.Module.register_parameter is method
    for pipe, before in zip(pipes, held, strict=True):
        same_weights(pipe, before)


def test_a_plain_stable_diffusion_pipeline_is_untouched_by_an_attached_one(sd: StableDiffusionPipeline) -> None:
    difflora.attach(sd)
    assert not hasattr(StableDiffusionPipeline, "load_lora")
    assert "load_lora" not in dir(tiny.sd_pipeline())
