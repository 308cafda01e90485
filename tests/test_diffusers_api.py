"""diffusers' adapter methods on an attached pipeline: weights, fusing, disabling, and errors that change nothing."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from diffusers import FluxPipeline, StableDiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

import difflora
from difflora import DiffLoRAError
from difflora.surface import engine_of

Q, PROJ = "transformer_blocks.0.attn.to_q", "single_transformer_blocks.1.proj_mlp"
TEXT = "encoder.layers.0.self_attn.q_proj"


def lora(pipe: Any, seed: int, *names: str, **options: Any) -> dict[str, Tensor]:
    return tiny.lora_dict(pipe.transformer, list(names or (Q, PROJ)), seed=seed, size=0.2, **options)


def text_lora(pipe: Any, seed: int) -> dict[str, Tensor]:
    return tiny.lora_dict(pipe.text_encoder, [TEXT], seed=seed, size=0.5, prefix="text_encoder.")


def weight(pipe: Any, name: str = Q, component: str = "transformer") -> Tensor:
    return pipe.components[component].get_submodule(name).weight.detach().clone()


def delta(state: dict[str, Tensor], name: str = Q, component: str = "transformer") -> Tensor:
    return state[f"{component}.{name}.lora_B.weight"] @ state[f"{component}.{name}.lora_A.weight"]


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


def same_weights(pipe: Any, wanted: dict[str, Tensor]) -> None:
    have = tiny.weights(pipe)
    assert [key for key in wanted if not torch.equal(have[key], wanted[key])] == []


@pytest.fixture
def pipe(flux: FluxPipeline) -> Any:
    """An attached pipeline with `a` and `b` loaded; `b`, the newest, is active."""
    made = difflora.attach(flux)
    made.load_lora_weights(lora(made, 1), adapter_name="a")
    made.load_lora_weights(lora(made, 2), adapter_name="b")
    return made


@pytest.fixture
def base() -> dict[str, Tensor]:
    return tiny.weights(tiny.flux_pipeline())


# ---- signatures and refusals ----------------------------------------------------------------------------------------


def test_arguments_are_those_of_diffusers() -> None:
    """Every argument that diffusers' own methods take is taken here, in the same order and with the same default."""
    pipe = difflora.attach(tiny.sd_pipeline())
    for name in (
        "load_lora_weights", "set_adapters", "get_active_adapters", "get_list_adapters", "delete_adapters",
        "unload_lora_weights", "disable_lora", "enable_lora", "fuse_lora", "unfuse_lora", "set_lora_device",
        "enable_lora_hotswap", "save_lora_weights", "lora_state_dict",
    ):  # fmt: skip
        theirs = inspect.signature(getattr(StableDiffusionPipeline, name)).parameters
        ours = inspect.signature(getattr(type(pipe), name)).parameters
        assert set(theirs) - {"kwargs"} <= set(ours), name
        shared = [p for p in ours if p in theirs and theirs[p].kind.name != "VAR_KEYWORD"]
        assert shared == [p for p in theirs if p in ours and theirs[p].kind.name != "VAR_KEYWORD"], name
    for name in ("fused_loras", "num_fused_loras"):
        assert isinstance(inspect.getattr_static(type(pipe), name), property)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown name": (
        lambda p: p.set_adapters("typo"), DiffLoRAError, "no adapter is called 'typo'; loaded are: 'a', 'b'",
    ),
    "one unknown of two": (lambda p: p.set_adapters(["a", "typo"]), DiffLoRAError, "typo"),
    "too few weights": (
        lambda p: p.set_adapters(["a", "b"], [1.0]), DiffLoRAError,
        "Length of adapter names 2 is not equal to the length of the weights 1",
    ),
    "too many weights": (lambda p: p.set_adapters("a", [1.0, 2.0]), DiffLoRAError, "names 1"),
    "a name twice": (lambda p: p.set_adapters(["a", "a"], [1.0, 2.0]), DiffLoRAError, "more than once"),
    "unknown component": (lambda p: p.set_adapters("a", {"unet": 0.5}), DiffLoRAError, "unet"),
    "text as weight": (lambda p: p.set_adapters("a", "1.0"), DiffLoRAError, "finite number"),
    "delete unknown": (lambda p: p.delete_adapters(["a", "typo"]), DiffLoRAError, "typo"),
    "taken name": (lambda p: p.load_lora_weights(lora(p, 3), adapter_name="a"), DiffLoRAError, "taken"),
    "unknown argument": (lambda p: p.load_lora_weights(lora(p, 3), adapter_names="c"), TypeError, "adapter_names"),
    "hotswap of nothing": (lambda p: p.load_lora_weights(lora(p, 3), "c", hotswap=True), DiffLoRAError, "'c'"),
    "hotswap without a name": (lambda p: p.load_lora_weights(lora(p, 3), hotswap=True), DiffLoRAError, "adapter_name"),
    "hotswap of another model": (
        lambda p: p.load_lora_weights({"transformer.x.lora_A.weight": torch.ones(1, 2)}, "a", hotswap=True),
        DiffLoRAError, "lora_B",
    ),
    "fuse unknown": (lambda p: p.fuse_lora(adapter_names=["typo"]), DiffLoRAError, "typo"),
    "fuse nowhere": (lambda p: p.fuse_lora(components=[]), DiffLoRAError, "empty list"),
    "fuse elsewhere": (lambda p: p.fuse_lora(components=["unet"]), DiffLoRAError, "no component unet"),
    "fuse where it changes nothing": (
        lambda p: p.fuse_lora(components=["text_encoder"]), DiffLoRAError, "changes nothing in text_encoder",
    ),
    "fuse argument": (lambda p: p.fuse_lora(scale=1.0), TypeError, "scale"),
    "unfuse elsewhere": (lambda p: p.unfuse_lora(components=["unet"]), DiffLoRAError, "unet"),
    "unfuse argument": (lambda p: p.unfuse_lora(scale=1.0), TypeError, "scale"),
    "not finite": (lambda p: p.fuse_lora(lora_scale=1e39), DiffLoRAError, "finite"),
    "device of unknown": (lambda p: p.set_lora_device(["typo"], "cpu"), DiffLoRAError, "typo"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_change_nothing_rows_67_78(pipe: Any, case: str) -> None:
    action, error, text = REFUSED[case]
    held, listed, fused = tiny.weights(pipe), repr(pipe.loras), pipe.fused_loras
    with pytest.raises(error, match=text):
        action(pipe)
    same_weights(pipe, held)
    assert repr(pipe.loras) == listed
    assert pipe.fused_loras == fused == set()


def test_fusing_with_nothing_active_is_an_error_row_67(pipe: Any) -> None:
    pipe.delete_adapters("b")
    with pytest.raises(DiffLoRAError, match="no adapter is active"):
        pipe.fuse_lora()
    pipe.fuse_lora(adapter_names=["a"])
    assert pipe.num_fused_loras == 1


# ---- loading, activating, deleting ----------------------------------------------------------------------------------


def test_default_names_count_up_and_the_newest_is_active(flux: FluxPipeline, base: dict[str, Tensor]) -> None:
    pipe = difflora.attach(flux)
    assert pipe.load_lora_weights(lora(pipe, 1)) is None
    pipe.load_lora_weights(lora(pipe, 2))
    assert pipe.get_list_adapters() == {"transformer": ["default_0", "default_1"]}
    assert pipe.get_active_adapters() == ["default_1"]
    close(weight(pipe), base[f"transformer.{Q}.weight"] + delta(lora(pipe, 2)))
    pipe.delete_adapters("default_0")
    pipe.load_lora_weights(lora(pipe, 3))
    assert pipe.get_list_adapters() == {"transformer": ["default_1", "default_0"]}


def test_adapters_are_listed_by_component_and_active_in_all(pipe: Any) -> None:
    """diffusers answers get_active_adapters from the last component alone; here it is the whole set."""
    pipe.load_lora_weights({**text_lora(pipe, 3), **lora(pipe, 3)}, adapter_name="both")
    pipe.load_lora_weights(text_lora(pipe, 4), adapter_name="text")
    listed = pipe.get_list_adapters()
    assert {k: sorted(v) for k, v in listed.items()} == {
        "transformer": ["a", "b", "both"], "text_encoder": ["both", "text"],
    }  # fmt: skip
    pipe.set_adapters(["a", "text"])
    assert pipe.get_active_adapters() == ["a", "text"]


@pytest.mark.parametrize(
    ("names", "weights", "wanted"),
    [
        ("a", None, {"a": 1.0}), ("a", 0.5, {"a": 0.5}), (["a", "b"], None, {"a": 1.0, "b": 1.0}),
        (["a", "b"], 0.5, {"a": 0.5, "b": 0.5}), (["a", "b"], [0.5, -2], {"a": 0.5, "b": -2.0}),
        (["a", "b"], {"transformer": 0.3}, {"a": 0.3, "b": 0.3}),
        (["a", "b"], [{"transformer": 0.3}, {"text_encoder": 0.3}], {"a": 0.3, "b": 1.0}),
        (["a", "b"], [{"transformer": None}, None], {"a": 1.0, "b": 1.0}), ([], None, {}),
    ],
)  # fmt: skip
def test_set_adapters_takes_every_form(
    pipe: Any, base: dict[str, Tensor], names: Any, weights: Any, wanted: dict[str, float]
) -> None:
    pipe.set_adapters(names, weights)
    deltas = {"a": delta(lora(pipe, 1)), "b": delta(lora(pipe, 2))}
    close(
        weight(pipe), base[f"transformer.{Q}.weight"] + sum((w * deltas[n] for n, w in wanted.items()), torch.zeros(()))
    )
    assert pipe.get_active_adapters() == list(wanted)


def test_deleting_the_active_adapter_leaves_nothing_active_row_81(pipe: Any, base: dict[str, Tensor]) -> None:
    """PEFT would activate the first that remains."""
    pipe.delete_adapters("b")
    assert pipe.get_active_adapters() == []
    assert pipe.get_list_adapters() == {"transformer": ["a"]}
    same_weights(pipe, base)
    pipe.load_lora_weights(lora(pipe, 3, PROJ), adapter_name="c")
    pipe.set_adapters(["a", "c"])
    pipe.delete_adapters(["a"])
    assert pipe.get_active_adapters() == ["c"]
    close(weight(pipe), base[f"transformer.{Q}.weight"])
    close(weight(pipe, PROJ), base[f"transformer.{PROJ}.weight"] + delta(lora(pipe, 3, PROJ), PROJ))


def test_hotswap_replaces_at_the_same_weight(pipe: Any, base: dict[str, Tensor]) -> None:
    """Another rank, other modules and text encoders are no matter."""
    pipe.enable_lora_hotswap(target_rank=64)
    pipe.set_adapters(["a", "b"], [0.5, 0.25])
    new = {**lora(pipe, 9, Q, rank=7), **text_lora(pipe, 9)}
    pipe.load_lora_weights(new, adapter_name="a", hotswap=True)
    assert pipe.get_active_adapters() == ["a", "b"]
    close(weight(pipe), base[f"transformer.{Q}.weight"] + 0.5 * delta(new) + 0.25 * delta(lora(pipe, 2)))
    close(weight(pipe, PROJ), base[f"transformer.{PROJ}.weight"] + 0.25 * delta(lora(pipe, 2), PROJ))
    text = weight(pipe, TEXT, "text_encoder")
    close(text, base[f"text_encoder.{TEXT}.weight"] + 0.5 * delta(new, TEXT, "text_encoder"))


def test_set_lora_device_moves_the_factors_and_changes_no_result(pipe: Any) -> None:
    held = tiny.weights(pipe)
    pipe.set_lora_device(["a", "b"], torch.device("cpu"))
    same_weights(pipe, held)
    assert {state.device for state in pipe.loras} == {"cpu"}
    pipe.set_adapters("a", 2.0)
    pipe.set_adapters("b")
    same_weights(pipe, held)


# ---- block weights of a UNet ----------------------------------------------------------------------------------------

BLOCKS = ["down_blocks.1.attentions.0", "down_blocks.2.attentions.1", "mid_block.attentions.0",
          "up_blocks.0.attentions.0", "up_blocks.0.attentions.2", "up_blocks.1.attentions.1"]  # fmt: skip


@pytest.mark.parametrize(
    "scales",
    [
        {"down": 0.9, "mid": 0.5, "up": 2.0},
        {"mid": 0.0},
        {"mid": [0.25]},
        {"down": {"block_2": [0.2, 0.4]}, "up": {"block_0": [0.1, 0.2, 0.3], "block_1": 3.0}},
        {"up": [0.1, 0.2, 0.3]},
        {"down": [0.5]},
        {"up": {"block_1": [0.7]}},
        0.5,
    ],
)
def test_block_weights_are_diffusers_own(scales: Any) -> None:
    """Same weights as PEFT's scaling, module by module: what stands beside an attention shares its weight."""
    pipe, theirs = difflora.attach(tiny.sdxl_pipeline()), tiny.sdxl_pipeline()
    names = [f"{b}.transformer_blocks.0.attn1.to_q" for b in BLOCKS] + [
        "down_blocks.0.resnets.0.conv1", "down_blocks.0.downsamplers.0.conv", "down_blocks.1.resnets.0.time_emb_proj",
        "down_blocks.2.resnets.1.conv2", "down_blocks.1.downsamplers.0.conv", "mid_block.resnets.1.conv1",
        "up_blocks.0.resnets.2.conv1", "up_blocks.0.upsamplers.0.conv", "up_blocks.2.resnets.0.conv_shortcut",
    ]  # fmt: skip
    state: dict[str, Tensor] = {}
    for name in names:
        shape, generator = pipe.unet.get_submodule(name).weight.shape, torch.Generator().manual_seed(len(state))
        ones = (1,) * (len(shape) - 2)
        state[f"unet.{name}.lora_A.weight"] = torch.randn(3, *shape[1:], generator=generator) * 0.1
        state[f"unet.{name}.lora_B.weight"] = torch.randn(shape[0], 3, *ones, generator=generator) * 0.1
    before = {name: weight(pipe, name, "unet") for name in names}
    for one in (pipe, theirs):
        one.load_lora_weights(state, adapter_name="a")
        one.set_adapters("a", {"unet": scales})
    for name in names:
        factor = theirs.unet.get_submodule(name).scaling["a"]
        a, b = (state[f"unet.{name}.lora_{c}.weight"].flatten(1) for c in "AB")
        close(weight(pipe, name, "unet"), before[name] + factor * (b @ a).reshape(before[name].shape))
    torch.testing.assert_close(
        tiny.run(pipe, guidance_scale=1.5), tiny.run(theirs, guidance_scale=1.5), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("scales", "text"),
    [
        ({"down": {"block_0": 1.0}}, "down.block_0"), ({"up": {"block_7": 1.0}}, "up.block_7"),
        ({"up": {"block_1": [0.4, 0.8]}}, r"Expected 3 scales for up.block_1, got 2."),
        ({"down": [1, 2, 3]}, "Expected 2 scales for down.block_1, got 3"),
        ({"mid": [1.0, 2.0]}, "Expected 1 scales for mid, got 2"), ({"middle": 1.0}, "middle"), ({"up": "x"}, "finite"),
    ],
)  # fmt: skip
def test_block_weights_that_do_not_fit_are_refused(scales: dict[str, Any], text: str) -> None:
    pipe = difflora.attach(tiny.sdxl_pipeline())
    pipe.load_lora_weights(tiny.lora_dict(pipe.unet, [f"{BLOCKS[0]}.proj_in"], prefix="unet."), adapter_name="a")
    held = tiny.weights(pipe)
    with pytest.raises(DiffLoRAError, match=text):
        pipe.set_adapters("a", {"unet": scales})
    same_weights(pipe, held)


# ---- enabling and fusing --------------------------------------------------------------------------------------------


def test_disabled_adapters_do_nothing_and_keep_their_weights(pipe: Any, base: dict[str, Tensor]) -> None:
    pipe.set_adapters(["a", "b"], [0.5, 2.0])
    held = tiny.weights(pipe)
    pipe.disable_lora()
    same_weights(pipe, base)
    assert pipe.get_active_adapters() == ["a", "b"]
    pipe.enable_lora()
    same_weights(pipe, held)
    pipe.disable_lora()
    pipe.unload_lora_weights()
    pipe.load_lora_weights(lora(pipe, 1), adapter_name="a")
    close(weight(pipe), base[f"transformer.{Q}.weight"] + delta(lora(pipe, 1)))


def test_fused_adapters_outlive_unloading_and_disabling(pipe: Any, base: dict[str, Tensor]) -> None:
    """PEFT unmerges what is fused at the first forward after disable_lora; fused means fused here."""
    pipe.set_adapters("a", 0.5)
    assert pipe.fuse_lora(lora_scale=0.5) is None
    fused = base[f"transformer.{Q}.weight"] + 0.25 * delta(lora(pipe, 1))
    close(weight(pipe), fused)
    assert (pipe.fused_loras, pipe.num_fused_loras) == ({"a"}, 1)
    pipe.set_adapters("a", 3.0)
    close(weight(pipe), fused)
    pipe.set_adapters(["a", "b"])
    close(weight(pipe), fused + delta(lora(pipe, 2)))
    pipe.disable_lora()
    tiny.run(pipe)
    close(weight(pipe), fused)
    pipe.unload_lora_weights()
    close(weight(pipe), fused)
    assert pipe.fused_loras == {"a"}
    assert pipe.get_list_adapters() == {}
    pipe.unfuse_lora()
    same_weights(pipe, base)
    assert pipe.fused_loras == set()
    pipe.unfuse_lora()
    same_weights(pipe, base)


def test_two_fuses_before_one_unfuse_row_59(pipe: Any, base: dict[str, Tensor]) -> None:
    pipe.set_adapters("a")
    pipe.fuse_lora()
    pipe.fuse_lora()
    pipe.set_adapters("b")
    pipe.fuse_lora(safe_fusing=True)
    both = base[f"transformer.{Q}.weight"] + delta(lora(pipe, 1)) + delta(lora(pipe, 2))
    close(weight(pipe), both)
    assert pipe.fused_loras == {"a", "b"}
    pipe.unload_lora_weights()
    close(weight(pipe), both)
    pipe.unfuse_lora(components=["text_encoder"])
    close(weight(pipe), both)
    pipe.unfuse_lora(components=["transformer"])
    same_weights(pipe, base)


def test_a_name_that_was_fused_may_be_used_again(flux: FluxPipeline, base: dict[str, Tensor]) -> None:
    """load, fuse, unload, load the next: both are called default_0, and both act."""
    pipe, total = difflora.attach(flux), base[f"transformer.{Q}.weight"].clone()
    for seed in (1, 2, 3):
        pipe.load_lora_weights(lora(pipe, seed))
        assert pipe.get_active_adapters() == ["default_0"]
        total += delta(lora(pipe, seed))
        close(weight(pipe), total)
        pipe.fuse_lora()
        close(weight(pipe), total)
        pipe.unload_lora_weights()
        close(weight(pipe), total)
    assert pipe.num_fused_loras == 1
    pipe.load_lora_weights(lora(pipe, 4))
    pipe.set_lora_device(["default_0"], "cpu")
    close(weight(pipe), total + delta(lora(pipe, 4)))
    pipe.unfuse_lora()
    close(weight(pipe), base[f"transformer.{Q}.weight"] + delta(lora(pipe, 4)))


def test_fuse_takes_the_components_that_the_pipeline_class_takes(flux: FluxPipeline, base: dict[str, Tensor]) -> None:
    """FluxPipeline.fuse_lora leaves text encoders out unless they are named."""
    pipe, state = difflora.attach(flux), {**lora(flux, 1), **text_lora(flux, 2)}
    pipe.load_lora_weights(state)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    close(weight(pipe), base[f"transformer.{Q}.weight"] + delta(state))
    assert torch.equal(weight(pipe, TEXT, "text_encoder"), base[f"text_encoder.{TEXT}.weight"])
    pipe.unfuse_lora()
    pipe.load_lora_weights(state)
    pipe.fuse_lora(components=["text_encoder"])
    pipe.unload_lora_weights()
    assert torch.equal(weight(pipe), base[f"transformer.{Q}.weight"])
    assert not torch.equal(weight(pipe, TEXT, "text_encoder"), base[f"text_encoder.{TEXT}.weight"])


def test_fused_adapters_and_calls(pipe: Any, base: dict[str, Tensor]) -> None:
    """`loras={}` is the base with what is fused; a call's own set and scale leave the fused part alone."""
    pipe.set_adapters("a")
    pipe.fuse_lora()
    fused = tiny.run(pipe)
    pipe.set_adapters([])
    assert torch.equal(tiny.run(pipe), fused)
    assert torch.equal(tiny.run(pipe, loras={}), fused)
    assert torch.equal(tiny.run(pipe, loras={"a": 5.0}), fused)
    assert torch.equal(tiny.run(pipe, joint_attention_kwargs={"scale": 0.0}), fused)
    assert not torch.equal(tiny.run(pipe, loras={"b": 1.0}), fused)
    pipe.unload_loras()
    same_weights(pipe, base)


# ---- what stays of diffusers ----------------------------------------------------------------------------------------


def test_save_lora_weights_still_works(pipe: Any, tmp_path: Path) -> None:
    layers = {key.removeprefix("transformer."): value for key, value in lora(pipe, 5).items()}
    pipe.save_lora_weights(tmp_path, transformer_lora_layers=layers)
    assert load_file(tmp_path / "pytorch_lora_weights.safetensors").keys() == lora(pipe, 5).keys()
    pipe.load_lora_weights(tmp_path, adapter_name="saved")
    held = tiny.weights(pipe)
    pipe.load_lora_weights(lora(pipe, 5), adapter_name="dict")
    same_weights(pipe, held)


def test_files_are_named_as_there(flux: FluxPipeline, tmp_path: Path) -> None:
    pipe = difflora.attach(flux)
    (tmp_path / "sub").mkdir()
    save_file(lora(pipe, 1), tmp_path / "sub" / "x.safetensors")
    save_file(lora(pipe, 2), tmp_path / "sub" / "y.safetensors")
    pipe.load_lora_weights(str(tmp_path), subfolder="sub", weight_name="x.safetensors", adapter_name="x")
    held = tiny.weights(pipe)
    pipe.load_lora_weights(lora(pipe, 1), adapter_name="dict", low_cpu_mem_usage=True, use_safetensors=True)
    same_weights(pipe, held)


# ---- the state machine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_random_sequences_agree_with_a_dict_row_82(flux: FluxPipeline, base: dict[str, Tensor], seed: int) -> None:
    """load, set, disable, enable, fuse, unfuse, delete, unload in any order: one source of truth."""
    pipe, draw = difflora.attach(flux), random.Random(seed)
    deltas = {name: delta(lora(pipe, i)) for i, name in enumerate("abcd")}
    loaded: list[str] = []
    active: dict[str, float] = {}
    fused: dict[str, float] = {}
    enabled = True
    for _ in range(60):
        free = [name for name in deltas if name not in loaded and name not in fused]
        step = draw.choice(["load", "set", "disable", "enable", "fuse", "unfuse", "delete", "unload"])
        if step == "load" and free:
            pipe.load_lora_weights(lora(pipe, "abcd".index(free[0])), adapter_name=free[0])
            loaded.append(free[0])
            active = {free[0]: 1.0}
        elif step == "set":
            active = {name: draw.choice([0.5, 1.0, -1.0]) for name in draw.sample(loaded, draw.randint(0, len(loaded)))}
            pipe.set_adapters(list(active), list(active.values()))
        elif step in ("disable", "enable"):
            enabled = step == "enable" or not loaded
            getattr(pipe, f"{step}_lora")()
        elif step == "fuse" and active:
            pipe.fuse_lora(lora_scale=0.5)
            fused |= {name: 0.5 * w for name, w in active.items()}
        elif step == "unfuse":
            pipe.unfuse_lora()
            fused = {}
        elif step == "delete" and loaded:
            gone = draw.choice(loaded)
            pipe.delete_adapters(gone)
            loaded.remove(gone)
            active.pop(gone, None)
        elif step == "unload" and draw.random() < 0.3:
            pipe.unload_lora_weights()
            loaded, active = [], {}
        enabled = enabled or not loaded
        acting = {**(active if enabled else {}), **fused}
        expected = base[f"transformer.{Q}.weight"] + sum((w * deltas[n] for n, w in acting.items()), torch.zeros(()))
        close(weight(pipe), expected)
        assert pipe.get_active_adapters() == list(active)
        assert pipe.get_list_adapters() == ({"transformer": loaded} if loaded else {})
        assert pipe.fused_loras == set(fused)
        assert [state.name for state in pipe.loras] == loaded
    pipe.unload_loras()
    same_weights(pipe, base)
    assert not engine_of(pipe).executor.sites
