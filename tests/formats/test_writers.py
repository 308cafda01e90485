"""Files as PEFT and diffusers write them, from tiny models: every module that was adapted is found by its own name."""

from typing import Any

import pytest
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from diffusers.utils import convert_state_dict_to_diffusers, convert_state_dict_to_kohya
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import CLIPTextConfig, CLIPTextModel

from difflora.formats.match import explain
from difflora.formats.text_encoders import canonical

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "conv1", "conv_in", "net.2", "proj_mlp", "norm_out.linear"]


def unet() -> Any:
    return UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=12,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )


def flux() -> Any:
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(2, 2, 4),
    )


def clip() -> Any:
    return CLIPTextModel(
        CLIPTextConfig(vocab_size=20, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    )


MODELS = {
    "unet": ("unet", unet, TARGETS),
    "flux": ("transformer", flux, TARGETS),
    "clip": ("text_encoder", clip, ["q_proj", "out_proj", "fc1", "token_embedding"]),
}


def adapted(name: str) -> tuple[str, Any, set[tuple[str, str]]]:
    """A component, its model with PEFT layers, and the adapted modules by canonical name."""
    component, build, targets = MODELS[name]
    model = get_peft_model(build(), LoraConfig(r=2, target_modules=targets))
    paths = {path for path, module in model.base_model.model.named_modules() if hasattr(module, "lora_A")}
    assert len(paths) > 4
    return component, model, {(component, canonical(component, path)) for path in paths}


def shapes(state: dict[str, Any], prefix: str = "") -> dict[str, tuple[int, ...]]:
    return {prefix + key: tuple(tensor.shape) for key, tensor in state.items()}


@pytest.mark.parametrize("name", MODELS)
def test_peft_state(name: str) -> None:
    component, model, modules = adapted(name)
    saved = get_peft_model_state_dict(model)
    whole = {key: tensor for key, tensor in model.state_dict().items() if ".lora_" in key}
    named = {key.removeprefix("base_model.model."): tensor for key, tensor in saved.items()}
    files = [shapes(named, f"{component}."), shapes(saved, f"{component}."), shapes(whole, f"{component}.")]
    if component != "text_encoder":
        files += [shapes(saved), shapes(whole), shapes(named), shapes(named, "diffusion_model.")]
    for keys in files:
        found = explain(keys)
        assert {(entry.component, entry.path) for entry in found.entries} == modules
        assert {key for entry in found.entries for key in entry.keys.values()} == keys.keys()
    kinds = {entry.kind for entry in found.entries}
    assert kinds == ({"lora", "lora_embedding"} if name == "clip" else {"lora"})


@pytest.mark.parametrize("name", ["unet", "flux"])
def test_diffusers_conversions(name: str) -> None:
    component, model, modules = adapted(name)
    saved = get_peft_model_state_dict(model).items()
    state = {f"{component}.{key.removeprefix('base_model.model.')}": tensor for key, tensor in saved}
    files = [convert_state_dict_to_diffusers(state)]
    if component == "unet":  # of a transformer it writes `transformer_...` without `lora_`, which nothing reads
        files.append(convert_state_dict_to_kohya(state))
    for file in files:
        found = explain(shapes(file))
        assert {(entry.component, entry.path) for entry in found.entries} == modules
