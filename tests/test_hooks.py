"""Hooks and adapters in every order: {hook} x {hook before, after the adapter} x {hook, adapter removed first}.

Each cell runs next to a twin: an equal pipeline that sees the same hooks and never an adapter.  While the adapter acts
the output is that of weights changed by hand; once all is removed nothing tells the pipeline from its twin.
"""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.hooks import ModelHook as AccelerateHook
from diffusers import TensorParallelConfig
from diffusers.hooks import HookRegistry, ModelHook, apply_group_offloading, apply_layerwise_casting
from diffusers.hooks.tensor_parallel import apply_tensor_parallel
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor import DTensor

import difflora

LINEARS = [
    "x_embedder",
    "norm_out.linear",
    "transformer_blocks.0.norm1.linear",
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.1.attn.to_out.0",
    "transformer_blocks.1.ff.net.2",
    "single_transformer_blocks.0.proj_mlp",
    "single_transformer_blocks.1.proj_out",
]
# In a block of each kind, so that all blocks of a kind have the same code.
REPEATED = [
    *(f"transformer_blocks.{i}.{leaf}" for i in (0, 1) for leaf in ("attn.to_q", "ff.net.2")),
    *(f"single_transformer_blocks.{i}.proj_out" for i in (0, 1)),
]
CPU = torch.device("cpu")
ALPHA, RANK, WEIGHT = 2.0, 3, 0.7


def pipeline(attached: bool = True) -> Any:
    pipe = tiny.flux_pipeline()
    pipe.transformer.requires_grad_(False)
    return difflora.attach(pipe) if attached else pipe


def adapter(model: nn.Module, names: list[str] | None = None, seed: int = 1) -> dict[str, Tensor]:
    return tiny.lora_dict(model, names or LINEARS, rank=RANK, alpha=ALPHA, seed=seed)


def add_by_hand(model: nn.Module, file: dict[str, Tensor], weight: float = WEIGHT) -> None:
    """W + weight * alpha / r * B @ A."""
    for key, a in file.items():
        if key.endswith("lora_A.weight"):
            path = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
            b = file[key.replace("lora_A", "lora_B")]
            target = model.get_submodule(path).weight
            target.data = (target.data.float() + weight * ALPHA / RANK * b @ a).to(target.dtype)


@functools.cache
def by_hand(names: tuple[str, ...] = tuple(LINEARS), seed: int = 1) -> Tensor:
    pipe = pipeline(attached=False)
    add_by_hand(pipe.transformer, adapter(pipe.transformer, list(names), seed))
    return tiny.run(pipe)


@functools.cache
def untouched() -> Tensor:
    return tiny.run(pipeline(attached=False))


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, atol=2e-5, rtol=2e-5)


# ---- the hooks ------------------------------------------------------------------------------------------------------


class Nudging(ModelHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + 1e-3, *args[1:]), kwargs


class Replacing(ModelHook):
    """A hook that brings its own forward, as diffusers' caches do."""

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.fn_ref.original_forward(*args, **kwargs) + 1e-3


class Shifting(AccelerateHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + 1e-3


def leaves(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, nn.Linear))


def registered(*made: tuple[str, Callable[[], ModelHook]], remove: tuple[str, ...] = ()) -> Any:
    """Apply and remove diffusers hooks on every linear; `remove` is the order of removal."""

    def apply(pipe: Any, folder: Path) -> None:
        for module in leaves(pipe.transformer):
            for name, make in made:
                HookRegistry.check_if_exists_or_initialize(module).register_hook(make(), name)

    def undo(pipe: Any) -> None:
        for name in remove or [name for name, _ in made]:
            HookRegistry.check_if_exists_or_initialize(pipe.transformer).remove_hook(name)

    return apply, undo


def each(*makers: Callable[[], AccelerateHook]) -> Any:
    def apply(pipe: Any, folder: Path) -> None:
        for module in leaves(pipe.transformer):
            for make in makers:
                add_hook_to_module(module, make(), append=True)

    return apply, lambda pipe: remove_hook_from_submodules(pipe.transformer)


def both_kinds(accelerate_first: bool) -> Any:
    """accelerate's hook around diffusers' or the other way round; hooks are removed from the outside in."""
    one, two = each(Shifting), registered(("nudging", Nudging))
    first, last = (one, two) if accelerate_first else (two, one)

    def apply(pipe: Any, folder: Path) -> None:
        first[0](pipe, folder)
        last[0](pipe, folder)

    def undo(pipe: Any) -> None:
        last[1](pipe)
        first[1](pipe)

    return apply, undo


def grouped(kind: str, **options: Any) -> Any:
    def apply(pipe: Any, folder: Path) -> None:
        apply_group_offloading(pipe.transformer, onload_device=CPU, offload_device=CPU, offload_type=kind, **options)

    return apply, lambda pipe: pipe.transformer._diffusers_hook.remove_hook("group_offloading")


def offloaded_model(pipe: Any, folder: Path) -> None:
    cpu_offload_with_hook(pipe.transformer, execution_device=CPU)


def wrapped(pipe: Any, folder: Path) -> None:
    pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)


def unwrap(pipe: Any) -> None:
    pipe.transformer = pipe.transformer._orig_mod
    pipe.transformer.__dict__.pop("_is_torch_compile", None)  # torch's own mark on what it has wrapped


def uncompiled(pipe: Any) -> None:
    for module in pipe.transformer.modules():
        module.__dict__.pop("_compiled_call_impl", None)


def accelerate_gone(pipe: Any) -> None:
    remove_hook_from_submodules(pipe.transformer)


HOOKS: dict[str, tuple[Callable[[Any, Path], None], Callable[[Any], None]]] = {
    "accelerate plain": each(Shifting),
    "accelerate two": each(Shifting, lambda: AlignDevicesHook(execution_device=CPU)),
    "accelerate cpu_offload": (lambda pipe, folder: cpu_offload(pipe.transformer, CPU), accelerate_gone),
    "accelerate model offload": (offloaded_model, accelerate_gone),
    "diffusers plain": registered(("nudging", Nudging)),
    "diffusers new_forward": registered(("replacing", Replacing)),
    "diffusers stacked": registered(("nudging", Nudging), ("replacing", Replacing), remove=("replacing", "nudging")),
    "diffusers stacked, inner first": registered(("replacing", Replacing), ("nudging", Nudging)),
    "diffusers in accelerate": both_kinds(accelerate_first=False),
    "accelerate in diffusers": both_kinds(accelerate_first=True),
    "group offload, leaf": grouped("leaf_level"),
    "group offload, block": grouped("block_level", num_blocks_per_group=1),
    "compile, whole": (wrapped, unwrap),
    "compile, blocks": (
        lambda p, _: p.transformer.compile_repeated_blocks(backend="eager", fullgraph=True), uncompiled,
    ),
}  # fmt: skip


# ---- what can be told apart -----------------------------------------------------------------------------------------


def effective(module: nn.Module, attribute: str) -> list[str] | None:
    """The chain of functions that an instance attribute holds, None where it is what the class has anyway."""
    held = module.__dict__.get(attribute)
    if held is None or held == type(module).forward.__get__(module):
        return None
    chain = []
    while held is not None:
        inner = held.func if isinstance(held, functools.partial) else held
        chain.append(f"{inner.__module__}.{inner.__qualname__} {inspect.signature(held)}")
        held = getattr(held, "__wrapped__", None)
    return chain


def traces(pipe: Any) -> dict[str, Any]:
    """Everything about the modules that an adapter or a hook could leave behind."""
    found: dict[str, Any] = {}
    for path, module in getattr(pipe.transformer, "_orig_mod", pipe.transformer).named_modules():
        registry = module.__dict__.get("_diffusers_hook")
        found[path] = (
            type(module),
            sorted(module.__dict__.keys() - {"forward", "_old_forward"}),
            effective(module, "forward"),
            effective(module, "_old_forward"),
            list(registry.hooks) if registry else [],
            type(module.__dict__.get("_hf_hook")),
            [(name, p.device, p.dtype, p.requires_grad, type(p)) for name, p in module.named_parameters(recurse=False)],
        )
    found["keys"] = list(pipe.transformer.state_dict())
    return found


def same_state(pipe: Any, twin: Any) -> None:
    assert traces(pipe) == traces(twin)
    mine, theirs = pipe.transformer.state_dict(), twin.transformer.state_dict()
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert value.dtype == theirs[key].dtype, key
        assert torch.equal(value.float(), theirs[key].float()) if not value.is_meta else theirs[key].is_meta, key


@dataclass
class Cell:
    """A pipeline that gets hook and adapter, a twin that gets the hook alone, one whose weights are changed by hand."""

    hook: Callable[[Any, Path], None]
    unhook: Callable[[Any], None]
    folder: Path
    mode: Any
    hooked: tuple[str, ...] = ("pipe", "twin", "hand")

    def __post_init__(self) -> None:
        self.pipe, self.twin, self.hand = pipeline(), pipeline(attached=False), pipeline(attached=False)
        add_by_hand(self.hand.transformer, adapter(self.hand.transformer))

    def put(self) -> None:
        for name in self.hooked:
            self.hook(getattr(self, name), self.folder / name)

    def remove(self) -> None:
        for name in self.hooked:
            self.unhook(getattr(self, name))

    def load(self) -> None:
        self.pipe.load_lora(adapter(pipeline(attached=False).transformer), WEIGHT, name="a", mode=self.mode)

    def acts(self) -> None:
        out = tiny.run(self.pipe)
        close(out, tiny.run(self.hand))
        assert (out - tiny.run(self.twin)).abs().max() > 1e-2

    def gone(self) -> None:
        assert torch.equal(tiny.run(self.pipe), tiny.run(self.twin))
        mine, theirs = traces(self.pipe), traces(self.twin)
        assert [mine[path] for path in LINEARS] == [theirs[path] for path in LINEARS]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("first", ["hook", "adapter"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", ["kernel", "merged"])
@pytest.mark.parametrize("hook", HOOKS)
def test_every_order(hook: str, mode: str, when: str, first: str, tmp_path: Path) -> None:
    cell = Cell(*HOOKS[hook], folder=tmp_path, mode=mode)
    if hook.startswith("compile"):
        cell.hooked = ("pipe",)  # compiling changes no value, so the others need not
    for step in (cell.put, cell.load) if when == "before" else (cell.load, cell.acts, cell.put):
        step()
    cell.acts()
    assert cell.pipe.loras[0].mode == mode
    if "offload" in hook:
        cell.acts()  # and again: the weights have moved by now
    if first == "hook":
        cell.remove()
        cell.acts()
        cell.pipe.unload_lora("a")
    else:
        cell.pipe.unload_lora("a")
        cell.gone()
        cell.remove()
    cell.gone()
    difflora.detach(cell.pipe)
    same_state(cell.pipe, cell.twin)
    assert torch.equal(cell.twin.transformer.x_embedder.weight, pipeline(False).transformer.x_embedder.weight)


# ---- compiled code --------------------------------------------------------------------------------------------------


def compiled(pipe: Any, how: str) -> Any:
    """The pipeline with a transformer compiled in this way, and the counter of its compilations."""
    counter = CompileCounter()
    if how == "whole":
        pipe.transformer = torch.compile(pipe.transformer, backend=counter, fullgraph=True)
    elif how == "in place":
        pipe.transformer.compile(backend=counter, fullgraph=True)
    else:
        pipe.transformer.compile_repeated_blocks(backend=counter, fullgraph=True)
    return counter


@pytest.mark.parametrize("mode", ["kernel", "merged"])
@pytest.mark.parametrize("how", ["whole", "in place", "blocks"])
def test_an_adapter_loaded_after_compiling_costs_one_compilation_at_most(how: str, mode: Any) -> None:
    pipe = pipeline()
    file = adapter(pipe.transformer, REPEATED)
    counter = compiled(pipe, how)
    tiny.run(pipe)
    base = counter.frame_count
    seen = []
    for weight in (None, WEIGHT, None, WEIGHT, 0.2, WEIGHT):
        if weight is not None and not pipe.loras:
            pipe.load_lora(file, weight, name="a", mode=mode)
        pipe.set_loras({} if weight is None else {"a": weight})
        seen.append(tiny.run(pipe))
    assert all(torch.equal(out, untouched()) for out in (seen[0], seen[2]))
    for out in (seen[1], seen[3], seen[5]):
        close(out, by_hand(tuple(REPEATED)))
    assert (seen[4] - seen[3]).abs().max() > 1e-2
    # One more version of each compiled block: two kinds of block, or one model.
    allowed = 0 if mode == "merged" else base
    assert counter.frame_count - base <= allowed
    pipe.unload_lora("a")
    assert torch.equal(tiny.run(pipe), untouched())


def test_other_adapters_of_one_rank_run_in_the_compiled_code() -> None:
    pipe = pipeline()
    counter = compiled(pipe, "in place")
    for seed in (1, 2, 3, 1):
        pipe.load_lora(adapter(pipe.transformer, REPEATED, seed), WEIGHT, name="a", mode="kernel")
        close(tiny.run(pipe), by_hand(tuple(REPEATED), seed))
        pipe.unload_lora("a")
    assert counter.frame_count == 1


def test_compiled_submodules_are_found() -> None:
    pipe = pipeline()
    file = adapter(pipe.transformer)
    block = pipe.transformer.transformer_blocks[0]
    pipe.transformer.transformer_blocks[0] = torch.compile(block, backend="eager")
    block.attn.to_q = torch.compile(block.attn.to_q, backend="eager")
    for mode in ("kernel", "merged"):
        assert len(pipe.load_lora(file, WEIGHT, name="a", mode=mode).matched) == len(LINEARS)
        close(tiny.run(pipe), by_hand())
        pipe.unload_lora("a")
        assert torch.equal(tiny.run(pipe), untouched())


# ---- hooks that cannot be removed, or that hide the weights ---------------------------------------------------------


def cast_layers(pipe: Any) -> None:
    apply_layerwise_casting(pipe.transformer, torch.float8_e4m3fn, torch.float32)


@pytest.mark.parametrize("mode", ["kernel", "auto"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_layerwise_casting(when: str, mode: Any) -> None:
    """An adapter acts at full strength beside fp8 weights; one that is inside comes out, and the base is cast alone."""
    pipe, twin, hand = pipeline(), pipeline(False), pipeline(False)
    file = adapter(hand.transformer)
    if when == "before":
        cast_layers(pipe)
    pipe.load_lora(file, WEIGHT, name="a", mode=mode)
    if when == "after":
        close(tiny.run(pipe), by_hand())
        cast_layers(pipe)
    cast_layers(twin)
    for module in hand.transformer.modules():  # what the casting leaves of the base, then the adapter on top in fp32
        hooked = isinstance(module, nn.Linear | nn.LayerNorm | nn.RMSNorm) and module.weight is not None
        for parameter in module.parameters(recurse=False) if hooked else ():
            parameter.data = parameter.data.clone()
    names = {n for n, p in twin.transformer.named_parameters() if p.dtype == torch.float8_e4m3fn}
    for name, parameter in hand.transformer.named_parameters():
        if name in names:
            parameter.data = parameter.data.to(torch.float8_e4m3fn).float()
    add_by_hand(hand.transformer, file)
    for _ in range(2):
        close(tiny.run(pipe), tiny.run(hand))
        # Layers whose names say "norm" stay as they are, so an adapter in them may stay inside.
        assert pipe.loras[0].mode == ("kernel" if mode == "kernel" else "merged+kernel")
    pipe.unload_lora("a")
    assert torch.equal(tiny.run(pipe), tiny.run(twin))
    difflora.detach(pipe)
    same_state(pipe, twin)


def test_casting_twice_while_merged_is_recognised() -> None:
    pipe, twin = pipeline(), pipeline(False)
    pipe.load_lora(adapter(twin.transformer), WEIGHT, name="a")
    for each_pipe in (pipe, twin):
        each_pipe.to(torch.bfloat16)
        apply_layerwise_casting(each_pipe.transformer, torch.float8_e4m3fn, torch.bfloat16)
    assert (tiny.run(pipe) - tiny.run(twin)).abs().max() > 1e-2
    assert pipe.loras[0].mode == "merged+kernel"
    pipe.unload_lora("a")
    assert torch.equal(tiny.run(pipe), tiny.run(twin))
    difflora.detach(pipe)
    same_state(pipe, twin)


def test_a_merge_into_fp8_is_refused() -> None:
    pipe = pipeline()
    cast_layers(pipe)
    with pytest.raises(difflora.DiffLoRAError, match=r"mode='merged'.*fp8.*transformer_blocks\.0\.attn\.to_q"):
        pipe.load_lora(adapter(pipeline(False).transformer), name="a", mode="merged")
    assert not pipe.loras


@pytest.mark.parametrize("first", ["hook", "adapter"])
@pytest.mark.parametrize("mode", ["kernel", "auto"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_on_disk(when: str, mode: Any, first: str, tmp_path: Path) -> None:
    hook = (lambda pipe, folder: disk_offload(pipe.transformer, str(folder), CPU), accelerate_gone)
    cell = Cell(*hook, folder=tmp_path, mode=mode)
    for step in (cell.put, cell.load) if when == "before" else (cell.load, cell.put):
        step()
    if when == "after" and mode == "auto":
        with pytest.raises(difflora.DiffLoRAError, match=r"norm_out\.linear was .*sent to disk while"):
            tiny.run(cell.pipe)
        cell.remove()  # the weights are back with the adapter inside, and it can be taken out
    else:
        cell.acts()
        assert cell.pipe.loras[0].mode == "kernel"
        if first == "hook":
            cell.remove()
    cell.acts()
    cell.pipe.unload_lora("a")
    cell.gone()
    if first == "adapter" and (when, mode) != ("after", "auto"):
        cell.remove()
    difflora.detach(cell.pipe)
    same_state(cell.pipe, cell.twin)


def test_a_merge_into_weights_on_disk_is_refused(tmp_path: Path) -> None:
    pipe = pipeline()
    file = adapter(pipe.transformer)
    disk_offload(pipe.transformer, str(tmp_path), CPU)
    with pytest.raises(
        difflora.DiffLoRAError, match=r"'a' asks for mode='merged'.*on disk.*transformer\.norm_out\.linear"
    ):
        pipe.load_lora(file, name="a", mode="merged")
    assert torch.equal(tiny.run(pipe), untouched())


@pytest.mark.parametrize("when", ["before", "after"])
def test_group_offloading_to_disk(when: str, tmp_path: Path) -> None:
    """Before: the adapter acts beside.  After a merge: refused, as the file on disk holds the adapter."""
    pipe = pipeline()
    file = adapter(pipe.transformer)
    options = {"onload_device": CPU, "offload_type": "leaf_level", "offload_to_disk_path": str(tmp_path)}
    if when == "before":
        apply_group_offloading(pipe.transformer, **options)
        pipe.load_lora(file, WEIGHT, name="a")
        close(tiny.run(pipe), by_hand())
        assert pipe.loras[0].mode == "kernel"
        pipe.unload_lora("a")
        close(tiny.run(pipe), untouched())  # weights read from a file lie at other alignments
    else:
        pipe.load_lora(file, WEIGHT, name="a")
        apply_group_offloading(pipe.transformer, **options)
        with pytest.raises(difflora.DiffLoRAError, match="sent to disk while adapters were merged"):
            tiny.run(pipe)


class HostCopies(ModelHook):
    """What diffusers' group offloading with a stream does to one layer: host copies that come back at each offload."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.group = self
        self.config = SimpleNamespace(onload_device=CPU)
        self.offload_to_disk_path = None
        self.cpu_param_dict = {p: p.data.clone() for p in module.parameters()}
        self.load = lambda: [setattr(p, "data", held.clone()) for p, held in self.cpu_param_dict.items()]
        self.unload = lambda: [setattr(p, "data", held) for p, held in self.cpu_param_dict.items()]
        self.unload()

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.load()
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.unload()
        return output


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_merge_reaches_the_host_copies_of_group_offloading(when: str, resident: bool) -> None:
    """Also while the layer is on the device (`resident`): the next offload brings back what is in the copies."""
    pipe = pipeline()
    hooks = []

    def put() -> None:
        for module in leaves(pipe.transformer):
            hooks.append(HostCopies(module))
            HookRegistry.check_if_exists_or_initialize(module).register_hook(hooks[-1], "group_offloading")

    def move() -> None:
        for hook in hooks if resident else ():
            hook.load()

    file = adapter(pipe.transformer)
    for step in (put, move) if when == "before" else ():
        step()
    pipe.load_lora(file, WEIGHT, name="a", mode="merged")
    for step in () if when == "before" else (put, move):
        step()
    for _ in range(2):
        close(tiny.run(pipe), by_hand())
        move()
    pipe.unload_lora("a")
    for _ in range(2):
        assert torch.equal(tiny.run(pipe), untouched())
    base = pipeline(False).transformer.state_dict()
    for key, value in pipe.transformer.state_dict().items():
        assert torch.equal(value, base[key])
    # and the copies are those of the base, so that the next onload is too
    for hook in hooks:
        for parameter, held in hook.cpu_param_dict.items():
            assert torch.equal(parameter, held)


# ---- wrappers that nobody can see through ---------------------------------------------------------------------------


def test_a_forward_wrapped_by_a_closure() -> None:
    pipe, layer = pipeline(), None
    file = adapter(pipe.transformer)
    layer = pipe.transformer.x_embedder
    pipe.load_lora(file, WEIGHT, name="a", mode="kernel")
    inner = layer.forward
    layer.forward = lambda x: inner(x)
    for _ in range(2):
        close(tiny.run(pipe), by_hand())
        pipe.unload_lora("a")
        assert torch.equal(tiny.run(pipe), untouched())
        pipe.load_lora(file, WEIGHT, name="a", mode="kernel")
    layer.forward = inner
    pipe.unload_lora("a")
    assert torch.equal(tiny.run(pipe), untouched())
    assert effective(layer, "forward") is None


def test_a_patch_that_somebody_removed_is_put_back() -> None:
    pipe = pipeline()
    pipe.load_lora(adapter(pipe.transformer), WEIGHT, name="a", mode="kernel")
    del pipe.transformer.x_embedder.forward
    close(tiny.run(pipe), by_hand())


@pytest.mark.parametrize("order", [("nudging", "replacing"), ("replacing", "nudging")])
def test_hooks_of_which_the_inner_one_goes_first(order: tuple[str, str]) -> None:
    """diffusers then leaves a stale reference to the hook that went; the adapter neither acts twice nor stays."""
    makers = {"nudging": Nudging, "replacing": Replacing}
    pipe, twin = pipeline(), pipeline(False)
    file = adapter(twin.transformer)
    apply, _ = registered(*((name, makers[name]) for name in order))
    pipe.load_lora(file, WEIGHT, name="a", mode="kernel")
    for each_pipe in (pipe, twin):
        apply(each_pipe, Path())
    for name in order:
        for each_pipe in (pipe, twin):
            HookRegistry.check_if_exists_or_initialize(each_pipe.transformer).remove_hook(name)
        difference = tiny.run(pipe) - tiny.run(twin)
        pipe.set_loras({})
        assert torch.equal(tiny.run(pipe), tiny.run(twin))
        pipe.set_loras({"a": WEIGHT})
        assert torch.equal(tiny.run(pipe) - tiny.run(twin), difference)
        assert difference.abs().max() > 1e-2


# ---- tensor parallelism ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A mesh of this one process; the group is gone again before the tests of the next file."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def parallelise(pipe: Any, mesh: Any) -> None:
    """FLUX's own plan, as `enable_parallelism` applies it (which itself wants an accelerator)."""
    config = TensorParallelConfig(mesh=mesh)
    config.setup(dist.get_rank(), dist.get_world_size(), CPU, mesh)
    apply_tensor_parallel(pipe.transformer, config, pipe.transformer._tp_plan)


@pytest.mark.parametrize("mode", ["kernel", "auto"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_tensor_parallel(when: str, mode: Any, mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor weights are left alone: the adapter acts inside the sharded layers, one that was merged comes out."""
    monkeypatch.setattr("diffusers.hooks.tensor_parallel._SUPPORTED_TP_DEVICES", ("cpu",))
    pipe, twin = pipeline(), pipeline(False)
    file = adapter(twin.transformer)
    if when == "before":
        parallelise(pipe, mesh)
    pipe.load_lora(file, WEIGHT, name="a", mode=mode)
    if when == "after":
        close(tiny.run(pipe), by_hand())
        parallelise(pipe, mesh)
    parallelise(twin, mesh)
    assert isinstance(pipe.transformer.transformer_blocks[0].attn.to_q.weight, DTensor)
    for weight in (WEIGHT, 0.0, WEIGHT):
        pipe.set_loras({"a": weight})
        if weight:
            close(tiny.run(pipe), by_hand())
            assert pipe.loras[0].mode == ("kernel" if mode == "kernel" else "merged+kernel")
        else:
            assert torch.equal(tiny.run(pipe), tiny.run(twin))
    pipe.unload_lora("a")
    assert torch.equal(tiny.run(pipe), tiny.run(twin))
    assert pipe.transformer.state_dict().keys() == twin.transformer.state_dict().keys()
    difflora.detach(pipe)
    assert traces(pipe) == traces(twin)
    for (name, mine), theirs in zip(pipe.transformer.named_parameters(), twin.transformer.parameters(), strict=True):
        one, two = (p.to_local() if isinstance(p, DTensor) else p for p in (mine, theirs))
        assert torch.equal(one, two), name


def test_a_merge_into_sharded_weights_is_refused(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusers.hooks.tensor_parallel._SUPPORTED_TP_DEVICES", ("cpu",))
    pipe = pipeline()
    parallelise(pipe, mesh)
    with pytest.raises(difflora.DiffLoRAError, match=r"mode='merged', but 5 weights .*sharded.*attn\.to_q"):
        pipe.load_lora(adapter(pipeline(False).transformer), name="a", mode="merged")


TWO_PROCESSES = """
import sys
import torch, torch.distributed as dist
sys.path.insert(0, "tests")
import test_hooks as t
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
import diffusers.hooks.tensor_parallel as plan
plan._SUPPORTED_TP_DEVICES = ("cpu",)
mesh = dist.init_device_mesh("cpu", (2,))

def refused(action):
    try:
        action()
    except t.difflora.DiffLoRAError as error:
        return str(error)

beside, inside, late = t.pipeline(), t.pipeline(), t.pipeline()
file = t.adapter(late.transformer)
base = t.tiny.run(late)
beside.load_lora(file, name="a", mode="kernel")
inside.load_lora(file, name="a", mode="merged")
for pipe in (beside, inside, late):
    t.parallelise(pipe, mesh)
torch.testing.assert_close(t.tiny.run(late), base, atol=1e-4, rtol=1e-4)
for action in (lambda: late.load_lora(file, name="a"), lambda: t.tiny.run(beside), lambda: t.tiny.run(inside)):
    text = refused(action)
    assert text and "transformer.single_transformer_blocks.0.proj_mlp" in text and "sharded" in text, text
assert not late.loras
torch.testing.assert_close(t.tiny.run(late), base, atol=1e-4, rtol=1e-4)
beside.unload_lora("a")
torch.testing.assert_close(t.tiny.run(beside), base, atol=1e-4, rtol=1e-4)
store.set(f"done{rank}", "")  # nobody leaves while the other may still be receiving
store.wait(["done0", "done1"])
dist.destroy_process_group()
"""


def test_weights_sharded_over_two_processes_are_refused_by_name(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(rank), str(tmp_path / "store")],
            cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    errors = [process.communicate(timeout=120)[1] for process in processes]
    if any(process.returncode for process in processes):
        pytest.fail("\n".join(errors))
