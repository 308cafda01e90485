"""W + strength * change by plain arithmetic, against a model with an adapter on it; and all as it was afterwards."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

import difflora

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAMES = ("transformer", "transformer_2", "unet", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
Changes = Mapping[str, Tensor]
_ONE_HEAD = {"num_attention_heads": 1, "attention_head_dim": 8, "in_channels": 4}
_JOINT = {**_ONE_HEAD, "num_layers": 1, "joint_attention_dim": 8}
_HUNYUAN = {**_ONE_HEAD, "out_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
            "text_embed_dim": 8, "pooled_projection_dim": 8, "rope_axes_dim": (2, 2, 4)}  # fmt: skip
_WAN = {**_ONE_HEAD, "attention_head_dim": 12, "out_channels": 4, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16,
        "num_layers": 2, "rope_max_seq_len": 16}  # fmt: skip
_LUMINA = {"sample_size": 4, "in_channels": 4, "hidden_size": 8, "num_layers": 1, "num_refiner_layers": 1,
           "num_attention_heads": 4, "num_kv_heads": 2, "axes_dim_rope": (2, 0, 0), "axes_lens": (8, 8, 8),
           "cap_feat_dim": 8, "multiple_of": 4}  # fmt: skip
_UNET = {"sample_size": 4, "block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 2,
         "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 8, "attention_head_dim": 2,
         "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}  # fmt: skip
# family -> diffusers' class, and the smallest model of it
_TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": ("FluxTransformer2DModel", {**_JOINT, "num_single_layers": 3, "patch_size": 1, "pooled_projection_dim": 8,
                                        "axes_dims_rope": (2, 2, 4)}),
    "flux2": ("Flux2Transformer2DModel", {**_JOINT, "num_single_layers": 3, "timestep_guidance_channels": 8,
                                          "axes_dims_rope": (2, 2, 2, 2)}),
    "sd3": ("SD3Transformer2DModel", {**_JOINT, "num_layers": 2, "sample_size": 4, "caption_projection_dim": 8,
                                      "pooled_projection_dim": 8, "out_channels": 4, "pos_embed_max_size": 4}),
    "qwen-image": ("QwenImageTransformer2DModel", {**_JOINT, "out_channels": 4, "axes_dims_rope": (2, 2, 4)}),
    "hunyuan-video": ("HunyuanVideoTransformer3DModel", _HUNYUAN),
    "framepack": ("HunyuanVideoFramepackTransformer3DModel", {**_HUNYUAN, "has_clean_x_embedder": True}),
    "ltx": ("LTXVideoTransformer3DModel", {**_ONE_HEAD, "out_channels": 4, "cross_attention_dim": 8, "num_layers": 1,
                                           "caption_channels": 8}),
    "wan": ("WanTransformer3DModel", _WAN),
    "wan-vace": ("WanVACETransformer3DModel", {**_WAN, "vace_layers": [0], "vace_in_channels": 4}),
    "z-image": ("ZImageTransformer2DModel", {"in_channels": 4, "dim": 8, "n_layers": 2, "n_refiner_layers": 1,
                "n_heads": 1, "n_kv_heads": 1, "cap_feat_dim": 8, "axes_dims": [2, 2, 4], "axes_lens": [8, 8, 8]}),
    "lumina2": ("Lumina2Transformer2DModel", _LUMINA),
    "minimax-h3": ("MiniMaxH3Transformer3DModel", {"num_attention_heads": 2, "attention_head_dim": 8, "hidden_size": 8,
                   "num_layers": 1, "num_refiner_layers": 1, "ffn_dim": 12, "in_channels": 4, "audio_in_channels": 4,
                   "text_dim": 8, "freq_dim": 8, "time_embed_hidden_dim": 8, "time_embed_dim": 8, "rope_freq_dim": 2}),
    "sd": ("UNet2DConditionModel", _UNET),
    "sdxl": ("UNet2DConditionModel", {**_UNET, "transformer_layers_per_block": 2, "use_linear_projection": True,
             "addition_embed_type": "text_time", "addition_time_embed_dim": 2,
             "projection_class_embeddings_input_dim": 28}),
}  # fmt: skip


def tiny_model(family: str, **changes: Any) -> nn.Module:
    """The smallest model of a family, with random weights that are the same every time."""
    name, config = _TINY[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(diffusers, name)(**{**config, **changes}).eval()


class Parts(DiffusionPipeline):
    """A pipeline of nothing but components."""

    def __init__(
        self,
        transformer: Any,
        transformer_2: Any,
        unet: Any,
        text_encoder: Any,
        text_encoder_2: Any,
        tokenizer: Any,
        tokenizer_2: Any,
    ) -> None:
        super().__init__()
        held = (transformer, transformer_2, unet, text_encoder, text_encoder_2, tokenizer, tokenizer_2)
        self.register_modules(**dict(zip(_NAMES, held, strict=True)))


def attached(model: nn.Module | None = None, **components: Any) -> Any:
    """An attached pipeline of these components; `model` is its transformer."""
    return difflora.attach(Parts(**{**dict.fromkeys(_NAMES), "transformer": model, **components}))


def tree(**modules: Any) -> nn.Module:
    """A model with a module at each path; `__` in a name stands for a dot."""
    root = nn.Module()
    for path, module in modules.items():
        *parents, leaf = path.split("__")
        holder = root
        for name in parents:
            if name not in holder._modules:
                holder.add_module(name, nn.Module())
            holder = holder.get_submodule(name)
        holder.add_module(leaf, module)
    return root


def rand(*shape: int, seed: int = 0, size: float = 0.3) -> Tensor:
    """Random numbers that are the same for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


def pair(stem: str, out: int, width: int, rank: int = 2, seed: int = 1, alpha: Any = None) -> dict[str, Tensor]:
    """`stem`.lora_A.weight [rank, width] and .lora_B.weight [out, rank]; kohya's names for a flattened stem."""
    down, up = ("lora_down", "lora_up") if stem.startswith(("lora_", "lycoris_")) else ("lora_A", "lora_B")
    found = {f"{stem}.{down}.weight": rand(rank, width, seed=seed), f"{stem}.{up}.weight": rand(out, rank, seed=-seed)}
    return found if alpha is None else {**found, f"{stem}.alpha": torch.as_tensor(alpha)}


def product(state: Mapping[str, Tensor], stem: str) -> Tensor:
    """B A of the pair called after `stem`, without any scale."""
    down, up = (
        next(v for k, v in state.items() if k.startswith(f"{stem}.lora_{r}"))
        for r in (("A", "B") if f"{stem}.lora_A.weight" in state else ("down", "up"))
    )
    return up.float() @ down.float()


def linear(out: int = 8, width: int = 6, **more: nn.Module) -> nn.Module:
    """A model of one linear layer, and more; the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tree(blocks__0__lin=nn.Linear(width, out), **more)


def held(model: nn.Module, name: str = "blocks.0.lin") -> Tensor:
    """A copy of a module's weight as it is now."""
    return model.get_submodule(name).weight.detach().clone()


def positive(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers above one half."""
    return rand(*shape, seed=seed).abs() + 0.5


# ---- what a model is and must be ------------------------------------------------------------------------------------


def _place(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """(module, parameter name) of a canonical path."""
    modules = dict(model.named_modules())
    if path in modules:
        return modules[path], "weight"
    owner, _, name = path.rpartition(".")
    return modules[owner], name


@torch.no_grad()
def expected(model: nn.Module, changes: Changes, strength: float) -> nn.Module:
    """A copy of the model with strength * change added to every parameter named; one that is missing starts at 0."""
    made = copy.deepcopy(model)
    made.__dict__.pop("_difflora_engine", None)
    for path, change in changes.items():
        module, name = _place(made, path)
        held = module._parameters[name]
        base = torch.zeros_like(change) if held is None else held.float()
        value = base + strength * change.reshape(base.shape)
        module._parameters[name] = nn.Parameter(value if held is None else value.to(held.dtype))
    return made


@torch.no_grad()
def output(module: nn.Module) -> Tensor | None:
    """What a layer makes of a fixed input, None for modules that are no layers."""
    weight = module._parameters.get("weight")
    if weight is None:
        return None
    if isinstance(module, nn.Embedding):
        return module(torch.arange(module.num_embeddings))
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        sides = (7,) * (weight.ndim - 2)
        return module(rand(2, module.in_channels, *sides, seed=5, size=1.0).to(weight.dtype))
    return module(rand(3, weight.shape[-1], seed=5, size=1.0).to(weight.dtype))


def compare(
    model: nn.Module, wanted: nn.Module, changes: Changes, outside: Collection[str] = (), atol: float = 2e-6
) -> None:
    """The layers of the model compute what those of `wanted` do, and nothing but what is named has changed.

    `outside` are paths whose change is beside the parameter, which has its own bits still.
    """
    have, want = dict(model.named_parameters()), dict(wanted.named_parameters())
    for path in changes:
        module, name = _place(model, path)
        target, _ = _place(wanted, path)
        if path not in outside:
            given, asked = module._parameters[name], target._parameters[name]
            torch.testing.assert_close(given, asked, rtol=1e-6, atol=atol, msg=lambda t, p=path: f"{p}: {t}")
        given, asked = output(module), output(target)
        if given is not None and asked is not None:
            torch.testing.assert_close(given, asked, rtol=1e-5, atol=1e-5, msg=lambda t, p=path: f"output of {p}: {t}")
    named = {id(_place(wanted, path)[0]._parameters[_place(wanted, path)[1]]) for path in changes}
    moved = [n for n, p in want.items() if id(p) not in named and not torch.equal(have[n], p)]
    assert moved == [], moved


def beside(model: nn.Module, changes: Changes, mode: str, kernel: bool) -> set[str]:
    """The changes that a mode keeps out of the parameters.

    In kernel mode biases of layers, and weights where there is a form; in either what a layer has no parameter for.
    """
    places = {path: _place(model, path) for path in changes}
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
    outside = {p for p, (module, name) in places.items() if isinstance(module, layers) and (kernel or name == "bias")}
    absent = {p for p, (module, name) in places.items() if module._parameters[name] is None}
    return absent | (outside if mode == "kernel" else set())


@contextmanager
def restored(pipe: Any) -> Iterator[None]:
    """After the block (which unloads what it loads) every parameter is the same object with the same bits."""
    models = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
    held = {n: {k: (p, p.detach().clone()) for k, p in m.named_parameters()} for n, m in models.items()}
    keys = {n: list(m.state_dict()) for n, m in models.items()}
    yield
    for name, model in models.items():
        assert list(model.state_dict()) == keys[name]
        for key, parameter in model.named_parameters():
            own, bits = held[name][key]
            assert parameter is own, f"{name}.{key} is another parameter"
            assert torch.equal(parameter, bits), f"{name}.{key} has other bits"
        assert not any("forward" in module.__dict__ for module in model.modules())
    assert len(pipe.loras) == 0


def check(
    model: nn.Module, source: Any, changes: Changes, *, kernel: bool = True, strengths: tuple[float, ...] = (1.0, 0.5),
    atol: float = 2e-6, component: str = "transformer", **options: Any,
) -> difflora.LoadReport:  # fmt: skip
    """The adapter adds strength * `changes` to the component `model`, in the weights and beside them, and goes again.

    `kernel` says whether the changes of layers' weights have a form beside these; what has none acts inside in either
    mode.
    """
    pipe = attached(**{"transformer": None, component: model})
    report: difflora.LoadReport | None = None
    with restored(pipe):
        for mode in ("merged", "kernel"):
            base = expected(model, {}, 0.0)
            held = {name: p.detach().clone() for name, p in model.named_parameters()}
            report = pipe.load_lora(source, 0.0, name="it", mode=mode, **options)
            outside = beside(model, changes, mode, kernel)
            acting = ("merged" if set(changes) - outside else "", "kernel" if outside else "")
            for strength in strengths:
                pipe.set_loras({"it": strength})
                compare(model, expected(base, changes, strength), changes, outside, atol)
                assert pipe.loras[0].mode == "+".join(filter(None, acting))
                for path in outside:
                    module, name = _place(model, path)
                    own = module._parameters[name]
                    assert own is None or any(own is p and torch.equal(p, held[n]) for n, p in model.named_parameters())
            pipe.set_loras({})
            assert all(torch.equal(p, held[name]) for name, p in model.named_parameters())
            pipe.unload_loras()
    assert report is not None
    return report


def unchanged(pipe: Any, source: Any, match: str, **options: Any) -> None:
    """The source is refused in these words, and nothing has changed."""
    with restored(pipe), pytest.raises(difflora.DiffLoRAError, match=match):
        pipe.load_lora(source, **options)
