"""Every layout gives W + s * alpha / r * B A, and the pictures that diffusers gives wherever it reads the layout right.

Files are written by the library that owns the layout where there is one (peft, diffusers, LyCORIS), else by the few
lines below.  `diffusers=False` marks what diffusers 0.42 refuses or gets wrong: there the explicit sum alone counts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import difflora

Place = tuple[str, str]
_BUILT = {family: build() for family, build in tiny.BUILDERS.items()}


@dataclass(frozen=True)
class Pair:
    """One module's factors: down [r, in(, kh, kw)], up [out, r(, 1, 1)], alpha or None."""

    down: Tensor
    up: Tensor
    alpha: float | None = None

    @property
    def dense(self) -> Tensor:
        scale = 1.0 if self.alpha is None else self.alpha / len(self.down)
        return (self.up.flatten(1) @ self.down.flatten(1) * scale).reshape(len(self.up), *self.down.shape[1:])


Pairs = dict[Place, Pair]


def base(family: str) -> Any:
    return tiny.BUILDERS[family]()


def real(model: nn.Module, path: str) -> nn.Module:
    """The module of a canonical path, whichever of its two CLIP spellings this transformers version uses."""
    here = dict(model.named_modules())
    return next(here[name] for name in (path, path.removeprefix("text_model."), f"text_model.{path}") if name in here)


def pairs(family: str, names: dict[str, list[str]], rank: Any = 4, alpha: Any = None, seed: int = 3) -> Pairs:
    """Random factors; `rank` and `alpha` are one value, or a list that the modules take in turn."""
    pipe, generator, made = _BUILT[family], torch.Generator().manual_seed(seed), Pairs()
    for component, paths in names.items():
        for path in paths:
            weight = real(pipe.components[component], path).weight
            i = len(made)
            r = rank[i % len(rank)] if isinstance(rank, list) else rank
            made[component, path] = Pair(
                torch.randn(r, *weight.shape[1:], generator=generator) * 0.1,
                torch.randn(len(weight), r, *(1,) * (weight.ndim - 2), generator=generator) * 0.1,
                alpha[i % len(alpha)] if isinstance(alpha, list) else alpha,
            )
    return made


# ---- what is compared -----------------------------------------------------------------------------------------------


def run(pipe: Any) -> Tensor:
    """Latents; weak guidance, which would multiply the rounding of either side beyond 1e-5."""
    return tiny.run(pipe, guidance_scale=1.5)


def expected(family: str, deltas: dict[Place, Tensor]) -> dict[str, Tensor]:
    """All weights of the base plus these deltas."""
    pipe = base(family)
    for (component, path), delta in deltas.items():
        weight = real(pipe.components[component], path).weight
        weight.data += delta.reshape(weight.shape)
    return tiny.weights(pipe)


def assert_weights(pipe: Any, wanted: dict[str, Tensor]) -> None:
    have = tiny.weights(pipe)
    assert have.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(have[key], value, rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


def check(family: str, source: Any, deltas: dict[Place, Tensor], diffusers: bool, **options: Any) -> None:
    """Merged weights and pictures are those of the explicit sum, kernel mode's pictures too, and diffusers' own."""
    ours = difflora.attach(base(family))
    ours.load_lora(source, mode="merged", **options)
    wanted = expected(family, deltas)
    assert_weights(ours, wanted)
    picture, before = run(ours), run(base(family))
    assert (picture - before).abs().max() > 1e-3, "the adapter does nothing"
    beside = difflora.attach(base(family))
    beside.load_lora(source, mode="kernel", **options)
    torch.testing.assert_close(run(beside), picture, rtol=0, atol=1e-5)
    if diffusers:
        theirs = base(family)
        theirs.load_lora_weights(source)
        torch.testing.assert_close(picture, run(theirs), rtol=0, atol=1e-5)
    ours.unload_loras()
    assert torch.equal(run(ours), before)


# ---- spellings ------------------------------------------------------------------------------------------------------

NEW = ("lora_A.weight", "lora_B.weight")
OLD = ("lora.down.weight", "lora.up.weight")
LINEAR = ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight")
KOHYA = ("lora_down.weight", "lora_up.weight")


def written(made: Pairs, stem: Callable[[str, str], str], leaves: tuple[str, str]) -> dict[str, Tensor]:
    found = {}
    for (component, path), pair in made.items():
        found[f"{stem(component, path)}.{leaves[0]}"] = pair.down
        found[f"{stem(component, path)}.{leaves[1]}"] = pair.up
        if pair.alpha is not None:
            found[f"{stem(component, path)}.alpha"] = torch.tensor(pair.alpha)
    return found


def dotted(component: str, path: str) -> str:
    return f"{component}.{path}"


def flat(component: str, path: str, encoders: tuple[str, ...] = ("te",)) -> str:
    """sd-scripts' names on diffusers modules."""
    names = ["text_encoder", "text_encoder_2", "text_encoder_3"]
    prefix = f"lora_{encoders[names.index(component)]}_" if component in names else "lora_unet_"
    return prefix + path.replace(".", "_")


SGM = {
    "down_blocks.0.resnets.0": "input_blocks.1.0", "down_blocks.0.downsamplers.0.conv": "input_blocks.3.0.op",
    "down_blocks.1.attentions.0": "input_blocks.4.1", "down_blocks.1.attentions.1": "input_blocks.5.1",
    "down_blocks.2.attentions.1": "input_blocks.8.1", "mid_block.attentions.0": "middle_block.1",
    "up_blocks.0.attentions.0": "output_blocks.0.1", "up_blocks.0.attentions.2": "output_blocks.2.1",
    "up_blocks.1.attentions.1": "output_blocks.4.1", "conv1": "in_layers.2", "conv2": "out_layers.3",
}  # fmt: skip


def sgm(component: str, path: str) -> str:
    for name, native in SGM.items():
        path = path.replace(name, native)
    return flat(component, path, ("te1", "te2"))


BFL = {
    "transformer_blocks.0.attn.to_out.0": "double_blocks.0.img_attn.proj",
    "transformer_blocks.1.attn.to_add_out": "double_blocks.1.txt_attn.proj",
    "transformer_blocks.0.ff.net.0.proj": "double_blocks.0.img_mlp.0",
    "transformer_blocks.1.ff_context.net.2": "double_blocks.1.txt_mlp.2",
    "transformer_blocks.0.norm1.linear": "double_blocks.0.img_mod.lin",
    "single_transformer_blocks.0.proj_out": "single_blocks.0.linear2",
    "single_transformer_blocks.1.norm.linear": "single_blocks.1.modulation.lin",
}


def bfl(prefix: str, flatten: bool) -> Callable[[str, str], str]:
    def stem(component: str, path: str) -> str:
        if component == "text_encoder":
            return flat(component, path, ("te1",))
        native = BFL.get(path, path)
        return prefix + (native.replace(".", "_") if flatten else native)

    return stem


# ---- the modules that the files name --------------------------------------------------------------------------------

_CLIP = ["text_model.encoder.layers.0.self_attn.q_proj", "text_model.encoder.layers.1.self_attn.out_proj",
         "text_model.encoder.layers.1.mlp.fc2"]  # fmt: skip
_ATTENTION = [
    "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
    "mid_block.attentions.0.transformer_blocks.0.attn2.to_k",
    "up_blocks.1.attentions.0.transformer_blocks.0.attn1.to_v",
    "up_blocks.1.attentions.1.transformer_blocks.0.attn2.to_out.0",
]  # fmt: skip
_REST = ["down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj", "mid_block.attentions.0.proj_in",
         "up_blocks.1.attentions.1.proj_out"]  # fmt: skip
_CONV = ["down_blocks.0.resnets.0.conv1", "up_blocks.0.resnets.0.conv_shortcut", "down_blocks.0.downsamplers.0.conv"]
_XL = [
    "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
    "down_blocks.2.attentions.1.transformer_blocks.1.attn2.to_v",
    "mid_block.attentions.0.transformer_blocks.1.ff.net.0.proj",
    "up_blocks.0.attentions.2.transformer_blocks.0.attn1.to_out.0",
    "up_blocks.1.attentions.1.transformer_blocks.0.attn2.to_k", "down_blocks.1.attentions.1.proj_in",
    "up_blocks.0.attentions.0.proj_out",
]  # fmt: skip
_FLUX = [
    "transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.add_k_proj", "transformer_blocks.0.attn.to_out.0",
    "transformer_blocks.1.ff_context.net.2",
    "transformer_blocks.0.norm1.linear", "single_transformer_blocks.0.proj_mlp",
    "single_transformer_blocks.0.proj_out", "single_transformer_blocks.1.attn.to_v", "proj_out", "x_embedder",
]  # fmt: skip
_T5 = ["encoder.block.0.layer.0.SelfAttention.q", "encoder.block.1.layer.1.DenseReluDense.wi_0"]
SD = {"unet": [*_ATTENTION, *_REST], "text_encoder": _CLIP}
XL = {"unet": _XL, "text_encoder": _CLIP, "text_encoder_2": _CLIP}
FLUX = {"transformer": _FLUX, "text_encoder": _CLIP}
NATIVE = {"transformer": list(BFL)}
BFL_FLUX = {"transformer": list(BFL), "text_encoder": _CLIP}


def xl_flat(component: str, path: str) -> str:
    return flat(component, path, ("te1", "te2"))


def short(component: str, path: str) -> str:
    return f"{component}.{path.removeprefix('text_model.')}"


def processor(component: str, path: str) -> str:
    """diffusers' first files: the factors hang on the attention's processor, or beside a text encoder's attention."""
    parent, name = path.removesuffix(".0").rsplit(".", 1)
    if component == "unet":
        return f"unet.{parent}.processor.{name}_lora"
    old = {"q_proj": "to_q", "out_proj": "to_out"}[name]
    return f"{component}.{parent}.{old}_lora"


CASES: dict[str, tuple[str, Pairs, Callable[[str, str], str], tuple[str, str], bool]] = {
    # Plain files of diffusers' own spellings.
    "sd new": ("sd", pairs("sd", SD), dotted, NEW, True),
    "sd old": ("sd", pairs("sd", {"unet": [*_ATTENTION, *_REST]}), dotted, OLD, True),
    "sd attention processors": ("sd", pairs("sd", {"unet": _ATTENTION}), processor, ("down.weight", "up.weight"), True),
    "sd attention processors, text": (
        "sd", pairs("sd", {"text_encoder": _CLIP[:2]}), processor, ("down.weight", "up.weight"), True,
    ),
    "sdxl old": ("sdxl", pairs("sdxl", {"unet": _XL}), dotted, OLD, True),
    "flux old": ("flux", pairs("flux", {"transformer": _FLUX}), dotted, OLD, True),
    "sd convolutions": ("sd", pairs("sd", {"unet": [*_ATTENTION, *_CONV]}), dotted, NEW, True),
    "sd mixed ranks": ("sd", pairs("sd", SD, rank=[2, 8, 3]), dotted, NEW, True),
    "sd lora_linear_layer": ("sd", pairs("sd", {"text_encoder": _CLIP}), dotted, LINEAR, True),
    "sd short CLIP names": ("sd", pairs("sd", {"text_encoder": _CLIP}), short, NEW, True),
    "sdxl new": ("sdxl", pairs("sdxl", XL), dotted, NEW, True),
    "sdxl mixed ranks": ("sdxl", pairs("sdxl", XL, rank=[1, 4, 6]), dotted, NEW, True),
    "flux new": ("flux", pairs("flux", FLUX), dotted, NEW, True),
    "flux alpha": ("flux", pairs("flux", FLUX, alpha=2.0), dotted, NEW, True),
    "flux proj_out at the top only": ("flux", pairs("flux", {"transformer": ["proj_out"]}), dotted, NEW, True),
    "flux proj_out nested only": ("flux", pairs("flux", {"transformer": [_FLUX[6]]}), dotted, NEW, True),
    "flux both proj_out": (
        "flux", pairs("flux", {"transformer": ["proj_out", _FLUX[6]]}, rank=[2, 5]), dotted, NEW, True,
    ),
    # sd-scripts.
    "sd kohya": ("sd", pairs("sd", SD, alpha=4.0), flat, KOHYA, True),
    "sd kohya half alpha": ("sd", pairs("sd", SD, alpha=2.0), flat, KOHYA, True),
    "sd kohya, an alpha per layer": ("sd", pairs("sd", SD, alpha=[1.0, 4.0, 2.0]), flat, KOHYA, False),
    "sd kohya convolutions": ("sd", pairs("sd", {"unet": [*_ATTENTION, *_CONV]}, alpha=2.0), flat, KOHYA, True),
    "sdxl kohya": ("sdxl", pairs("sdxl", XL, alpha=2.0), sgm, KOHYA, True),
    "sdxl kohya, an alpha per layer": ("sdxl", pairs("sdxl", XL, alpha=[1.0, 4.0]), sgm, KOHYA, False),
    "sdxl kohya, diffusers names": ("sdxl", pairs("sdxl", XL, alpha=2.0), xl_flat, KOHYA, True),
    "flux kohya": ("flux", pairs("flux", BFL_FLUX, alpha=2.0), bfl("lora_unet_", True), KOHYA, True),
    "flux kohya, an alpha per layer": (
        "flux", pairs("flux", BFL_FLUX, rank=[2, 4], alpha=[1.0, 4.0, 3.0]), bfl("lora_unet_", True), KOHYA, True,
    ),
    "flux kohya T5": (
        "flux", pairs("flux", {"text_encoder_2": _T5}, alpha=2.0),
        lambda c, p: flat(c, p, ("te1", "te3")), KOHYA, False,
    ),
    # ComfyUI and trainers.
    "flux comfy": ("flux", pairs("flux", NATIVE, alpha=2.0), bfl("diffusion_model.", False), KOHYA, True),
    "flux comfy A and B": ("flux", pairs("flux", NATIVE), bfl("diffusion_model.", False), NEW, False),
    "flux transformer. down and up": ("flux", pairs("flux", {"transformer": _FLUX}, alpha=2.0), dotted, KOHYA, False),
    "flux T5 by diffusers name": ("flux", pairs("flux", {"text_encoder_2": _T5}), dotted, NEW, False),
    "flux peft root": (
        "flux", pairs("flux", {"transformer": _FLUX}), lambda _, p: f"base_model.model.{p}", NEW, False,
    ),
    "flux slot": (
        "flux", pairs("flux", {"transformer": _FLUX}), dotted,
        ("lora_A.default.weight", "lora_B.default.weight"), False,
    ),
    "flux bare": ("flux", pairs("flux", {"transformer": _FLUX}), lambda _, p: p, NEW, False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_layout(case: str) -> None:
    family, made, stem, leaves, diffusers = CASES[case]
    check(family, written(made, stem, leaves), {place: pair.dense for place, pair in made.items()}, diffusers)


# ---- files that a library writes ------------------------------------------------------------------------------------


def trained(model: nn.Module, config: LoraConfig, seed: int = 5) -> Any:
    """A PeftModel of a copy of `model` with random factors."""
    torch.manual_seed(seed)
    made = get_peft_model(copy.deepcopy(model), config)
    for name, value in made.named_parameters():
        if "lora_" in name:
            value.data = torch.randn_like(value) * 0.1
    return made


def peft_deltas(component: str, model: nn.Module, made: Any) -> dict[Place, Tensor]:
    """PEFT's own merged weights minus the base, in float64 in between."""
    merged = dict(made.merge_and_unload().named_parameters())
    found = {}
    for name, value in model.named_parameters():
        delta = (merged[name].double() - value.double()).float()
        if delta.abs().max() > 0:
            found[component, name.removesuffix(".weight")] = delta
    return found


_TARGETS = ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.proj_mlp",
            "single_transformer_blocks.1.attn.to_v", "single_transformer_blocks.0.proj_out",
            "transformer_blocks.1.ff.net.2"]  # fmt: skip
CONFIGS = {
    "alpha is not r": {"r": 4, "lora_alpha": 10},
    "rslora": {"r": 4, "lora_alpha": 6, "use_rslora": True},
    "patterns": {
        "r": 4, "lora_alpha": 4, "rank_pattern": {"single_transformer_blocks.0.proj_mlp": 2, "to_q": 6},
        "alpha_pattern": {"transformer_blocks.0.attn.to_q": 3, "net.2": 8},
    },
    "patterns and rslora": {
        "r": 4, "lora_alpha": 2, "use_rslora": True, "rank_pattern": {"to_v": 9}, "alpha_pattern": {"to_q": 5},
    },
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_peft_folder(config: str, tmp_path: Path) -> None:
    """A folder by `PeftModel.save_pretrained`, whose scales are in its adapter_config.json; diffusers ignores that."""
    transformer = base("flux").transformer
    made = trained(transformer, LoraConfig(target_modules=_TARGETS, **CONFIGS[config]))
    made.save_pretrained(tmp_path)
    assert any(key.startswith("base_model.model.") for key in load_file(tmp_path / "adapter_model.safetensors"))
    check("flux", str(tmp_path), peft_deltas("transformer", transformer, made), diffusers=False)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("family", ["sd", "sdxl", "flux"])
def test_save_lora_weights_with_metadata(family: str, config: str, tmp_path: Path) -> None:
    """diffusers' own saver with the adapter's config in the header: alpha, patterns and rslora are there alone."""
    from diffusers.training_utils import _collate_lora_metadata

    pipe = base(family)
    denoiser = "transformer" if family == "flux" else "unet"
    own = [p for c, p in CASES[f"{family} new"][1] if c == denoiser and "proj_out" not in p]
    fields = dict(CONFIGS[config], target_modules=own)
    for pattern in ("rank_pattern", "alpha_pattern"):
        values = list(fields.pop(pattern, {}).values())
        fields[pattern] = dict(zip(own, values, strict=False))
    model = pipe.components[denoiser]
    made = trained(model, LoraConfig(**fields))
    layers = get_peft_model_state_dict(made)
    layers = {key.removeprefix("base_model.model."): value for key, value in layers.items()}
    model.peft_config = made.peft_config
    metadata = _collate_lora_metadata({denoiser: model})
    del model.peft_config
    type(pipe).save_lora_weights(tmp_path, **{f"{denoiser}_lora_layers": layers}, **metadata)
    check(family, str(tmp_path), peft_deltas(denoiser, model, made), diffusers=True)


@pytest.mark.parametrize("family", ["sd", "sdxl", "flux"])
def test_save_lora_weights_without_metadata(family: str, tmp_path: Path) -> None:
    """diffusers' saver with text encoders and no alpha: scale 1."""
    made = CASES[f"{family} new"][1]
    layers: dict[str, dict[str, Tensor]] = {}
    for (component, path), pair in made.items():
        held = layers.setdefault(f"{component}_lora_layers", {})
        held |= {f"{path}.lora_A.weight": pair.down, f"{path}.lora_B.weight": pair.up}
    type(base(family)).save_lora_weights(tmp_path, **layers)
    check(family, str(tmp_path), {place: pair.dense for place, pair in made.items()}, diffusers=True)


def lycoris(unet: nn.Module, file: Path, algo: str, tucker: bool = False) -> Any:
    """A LyCORIS network on the attentions and convolutions of `unet`, random factors, saved to `file`."""
    from lycoris import LycorisNetwork, create_lycoris

    blocks = ["ResnetBlock2D", "Transformer2DModel", "Downsample2D"]
    LycorisNetwork.apply_preset({"target_module": blocks, "lora_prefix": "lora_unet"})
    sizes = {"linear_dim": 4, "linear_alpha": 2, "conv_dim": 2, "conv_alpha": 1, "block_size": 2}
    torch.manual_seed(0)
    net = create_lycoris(unet, 1.0, algo=algo, use_tucker=tucker, **sizes)
    net.apply_to()
    for value in net.parameters():
        value.data = torch.randn_like(value) * 0.1
    save_file({key: value.contiguous() for key, value in net.state_dict().items()}, file)
    return net


@pytest.mark.parametrize("tucker", [False, True])
def test_lycoris_locon(tucker: bool, tmp_path: Path) -> None:
    """Linear layers and convolutions, with and without a Tucker core: LyCORIS' own merge is the reference."""
    unet, file = base("sd").unet, tmp_path / "net.safetensors"
    net = lycoris(unet, file, "locon", tucker)
    assert any("lora_mid" in key for key in load_file(file)) == tucker
    net.merge_to(1.0)
    merged, deltas = dict(unet.named_parameters()), {}
    for name, value in base("sd").unet.named_parameters():
        if not torch.equal(merged[name], value):
            deltas["unet", name.removesuffix(".weight")] = (merged[name].double() - value.double()).float()
    assert any(delta.shape[-1] == 3 for delta in deltas.values() if delta.ndim == 4)
    check("sd", str(file), deltas, diffusers=False)


def test_lycoris_dylora(tmp_path: Path) -> None:
    """A convolution's `up` is two-dimensional.  LyCORIS merges a random part of the ranks; a file is all of them."""
    unet, file = base("sd").unet, tmp_path / "net.safetensors"
    lycoris(unet, file, "dylora")
    held = load_file(file)
    deltas = {}
    for path, module in base("sd").unet.named_modules():
        stem = "lora_unet_" + path.replace(".", "_")
        if f"{stem}.lora_up.weight" in held:
            up, down = held[f"{stem}.lora_up.weight"], held[f"{stem}.lora_down.weight"]
            assert up.ndim == 2
            scale = held[f"{stem}.alpha"].item() / len(down)
            deltas["unet", path] = (up @ down.flatten(1) * scale).reshape(module.weight.shape)
    assert len(deltas) * 3 == len(held)
    check("sd", str(file), deltas, diffusers=False)


# ---- fused modules and reordered rows -------------------------------------------------------------------------------


def fused(transformer: nn.Module, rank: int = 6) -> tuple[dict[str, Tensor], dict[Place, Tensor]]:
    """kohya's fused qkv and linear1, a final adaLN with BFL's order of halves, and what each row block means."""
    generator, state, deltas = torch.Generator().manual_seed(8), {}, {}
    d, single = "transformer_blocks.1.attn.", "single_transformer_blocks.0."
    for native, parts in {
        "double_blocks_1_img_attn_qkv": [f"{d}to_{c}" for c in "qkv"],
        "double_blocks_1_txt_attn_qkv": [f"{d}add_{c}_proj" for c in "qkv"],
        "single_blocks_0_linear1": [*(f"{single}attn.to_{c}" for c in "qkv"), f"{single}proj_mlp"],
        "final_layer_adaLN_modulation_1": ["norm_out.linear"],
    }.items():
        heights = [len(transformer.get_submodule(part).weight) for part in parts]
        width = transformer.get_submodule(parts[0]).weight.shape[1]
        down = torch.randn(rank, width, generator=generator) * 0.1
        up = torch.randn(sum(heights), rank, generator=generator) * 0.1
        stem = f"lora_unet_{native}"
        state |= {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up, f"{stem}.alpha": torch.tensor(3.0)}
        if len(parts) == 1:
            shift, scale = up.chunk(2)
            up = torch.cat([scale, shift])
        for part, rows in zip(parts, up.split(heights), strict=True):
            deltas["transformer", part] = rows @ down * (3.0 / rank)
    return state, deltas


def test_flux_fused_and_half_swapped() -> None:
    """diffusers has the published widths in its converter and drops the final adaLN: the explicit sum counts."""
    state, deltas = fused(base("flux").transformer)
    check("flux", state, deltas, diffusers=False)


def test_flux_fused_attention_as_diffusers() -> None:
    """The equal thirds of the double blocks are what diffusers splits too."""
    state, deltas = fused(base("flux").transformer)
    state = {key: value for key, value in state.items() if "double_blocks" in key}
    check("flux", state, {p: v for p, v in deltas.items() if ".attn." in p[1] and "single" not in p[1]}, diffusers=True)


def test_a_file_on_disk_is_the_same_as_its_state_dict(tmp_path: Path) -> None:
    family, made, stem, leaves, _ = CASES["sdxl kohya"]
    save_file(written(made, stem, leaves), tmp_path / "style.safetensors")
    check(family, str(tmp_path / "style.safetensors"), {p: pair.dense for p, pair in made.items()}, diffusers=True)
