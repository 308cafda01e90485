"""Port by one line: a script with diffusers' own LoRA calls runs with `difflora.attach(pipe)` added, and nothing else.

Each script is run twice as text, with and without the line.  `record` keeps pictures (equal within 1e-5) and answers
(equal, of the same type).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import save_file
from torch import Tensor

ATTENTION = [
    "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
    "mid_block.attentions.0.transformer_blocks.0.attn2.to_k",
    "up_blocks.1.attentions.0.transformer_blocks.0.attn1.to_v",
    "up_blocks.1.attentions.1.transformer_blocks.0.attn2.to_v",
]  # fmt: skip
XL = [
    "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
    "mid_block.attentions.0.transformer_blocks.1.attn2.to_v",
    "up_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
    "up_blocks.0.attentions.2.transformer_blocks.1.attn2.to_k",
]  # fmt: skip
FLUX = ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.1.proj_mlp", "proj_out"]
NAMES = {"sd": ATTENTION, "sdxl": XL, "flux": FLUX}

LOADING = """
pipe.load_lora_weights(style)
record(pipe.get_active_adapters(), pipe.get_list_adapters(), image())
pipe.load_lora_weights(folder, weight_name="pixel.safetensors", adapter_name="pixel")
record(sorted(pipe.get_list_adapters()[denoiser]), image())
pipe.set_adapters(["default_0", "pixel"])
record(image(), image("a dog"))
pipe.delete_adapters("pixel")
record(pipe.get_list_adapters(), image())
pipe.unload_lora_weights()
record(pipe.get_active_adapters(), pipe.get_list_adapters(), image())
pipe.load_lora_weights(folder + "/pixel.safetensors", adapter_name="pixel")
record(pipe.get_active_adapters(), image())
"""

WEIGHTS = """
pipe.load_lora_weights(style, adapter_name="style")
pipe.load_lora_weights(pixel, adapter_name="pixel")
record(pipe.get_active_adapters(), image())
for names, weights in [
    ("style", None), ("style", 0.5), ("pixel", [0.25]), (["style", "pixel"], 0.5), (["style", "pixel"], [0.75, -0.5]),
    (["pixel", "style"], [{denoiser: 0.3}, 0.6]), (["style", "pixel"], [{denoiser: 0.5}, {denoiser: 0.5}]),
    ("style", {denoiser: 0.5, "text_encoder": 0.0}), (["pixel"], [0.0]),
]:
    pipe.set_adapters(names, weights)
    record(pipe.get_active_adapters(), image())
pipe.set_adapters(["style", "pixel"], [1.0, 0.5])
pipe.disable_lora()
record(pipe.get_active_adapters(), image())
pipe.enable_lora()
record(image())
for scale in (0.5, 1.0, -1.0, 2.5):
    record(image(**{attention_kwargs: {"scale": scale}}))
record(image())
"""

BLOCKS = """
pipe.load_lora_weights(style, adapter_name="style")
pipe.load_lora_weights(pixel, adapter_name="pixel")
first = [up for up, block in enumerate(pipe.unet.up_blocks) if hasattr(block, "attentions")][0]
many = len(pipe.unet.up_blocks[first].attentions)
for scales in [
    {"down": 0.5}, {"mid": 0.1}, {"down": 0.9, "mid": 0.7, "up": 0.2}, {"up": {f"block_{first}": 0.3}},
    {"up": {f"block_{first}": [0.2 * (i + 1) for i in range(many)]}}, {"mid": [0.4], "up": [0.6]},
]:
    pipe.set_adapters("style", {"unet": scales})
    record(image())
    pipe.set_adapters(["style", "pixel"], [{"unet": scales, "text_encoder": 0.5}, 0.4])
    record(pipe.get_active_adapters(), image())
"""

FUSING = """
pipe.load_lora_weights(style, adapter_name="style")
pipe.load_lora_weights(pixel, adapter_name="pixel")
record(pipe.num_fused_loras, pipe.fused_loras)
pipe.set_adapters(["style", "pixel"], [0.5, 1.0])
pipe.fuse_lora(lora_scale=0.7, safe_fusing=True)
record(pipe.num_fused_loras, pipe.fused_loras, image())
pipe.unfuse_lora()
record(pipe.num_fused_loras, pipe.fused_loras)
pipe.set_adapters("style", 1.0)
record(image())
pipe.fuse_lora(adapter_names=["pixel"], components=[denoiser])
record(pipe.fused_loras)
pipe.unfuse_lora(components=[denoiser])
pipe.unload_lora_weights()
record(image())
for source in (style, pixel):
    pipe.load_lora_weights(source)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    record(pipe.get_list_adapters(), image())
"""

SCHEDULE = """
pipe.load_lora_weights(style, adapter_name="style")
pipe.load_lora_weights(pixel, adapter_name="pixel")
scales = [1.0, 0.5, 0.0, -0.5]
steps = []

def callback(pipe, step, time, held):
    steps.append(held["latents"].clone())
    pipe.set_adapters(["style", "pixel"], [scales[step + 1], 1.0 - scales[step + 1]])
    return held

pipe.set_adapters(["style", "pixel"], [scales[0], 0.0])
record(image(num_inference_steps=3, callback_on_step_end=callback))
record(*steps)
record(pipe.get_active_adapters(), image())
pipe.set_adapters(["style", "pixel"], [scales[0], 0.0])
record(image(num_inference_steps=3, callback_on_step_end=callback, **{attention_kwargs: {"scale": 0.5}}))
"""

SAVING = """
pipe.save_lora_weights(folder + "/saved", **{denoiser + "_lora_layers": bare})
pipe.load_lora_weights(folder + "/saved", adapter_name="saved")
pipe.set_lora_device(["saved"], "cpu")
record(pipe.get_list_adapters(), image())
pipe.load_lora_weights(style, adapter_name="style")
pipe.set_adapters(["saved", "style"], [0.5, 0.5])
record(pipe.components.keys() == pipe.components.keys(), type(pipe).__name__, image())
"""

SCRIPTS = {"loading": LOADING, "weights": WEIGHTS, "blocks": BLOCKS, "fusing": FUSING, "schedule": SCHEDULE,
           "saving": SAVING}  # fmt: skip


def adapter(pipe: Any, denoiser: str, names: list[str], seed: int) -> dict[str, Tensor]:
    """A file with a denoiser part and a text encoder part of which every module acts."""
    made = tiny.lora_dict(pipe.components[denoiser], names, prefix=f"{denoiser}.", seed=seed, size=0.3)
    text = ["encoder.layers.0.self_attn.q_proj", "encoder.layers.1.self_attn.v_proj"]
    return made | tiny.lora_dict(pipe.text_encoder, text, prefix="text_encoder.", seed=seed, size=0.3)


def play(script: str, family: str, folder: Path, attach: bool) -> list[Any]:
    """What the script records."""
    pipe, recorded = tiny.BUILDERS[family](), []
    denoiser = "transformer" if family == "flux" else "unet"
    style, pixel = (adapter(pipe, denoiser, NAMES[family], seed) for seed in (1, 2))
    bare = {k.removeprefix(f"{denoiser}."): v for k, v in pixel.items() if k.startswith(denoiser)}
    save_file(pixel, folder / "pixel.safetensors")

    def image(prompt: str = "a cat", **options: Any) -> Tensor:
        return tiny.run(pipe, prompt, guidance_scale=1.5, **options)

    scope = {
        "pipe": pipe, "style": style, "pixel": pixel, "bare": bare, "folder": str(folder), "denoiser": denoiser,
        "attention_kwargs": "joint_attention_kwargs" if family == "flux" else "cross_attention_kwargs", "image": image,
        "record": lambda *values: recorded.extend(values),
    }  # fmt: skip
    line = "import difflora; difflora.attach(pipe)\n" if attach else ""
    exec(line + script, scope)
    return recorded


PLAYED = [(script, family) for script in SCRIPTS for family in NAMES if (script, family) != ("blocks", "flux")]


@pytest.mark.parametrize(("script", "family"), PLAYED)
@pytest.mark.filterwarnings("ignore")
def test_one_line_ports_a_script(script: str, family: str, tmp_path: Path) -> None:
    theirs = play(SCRIPTS[script], family, tmp_path, attach=False)
    ours = play(SCRIPTS[script], family, tmp_path, attach=True)
    assert len(ours) == len(theirs) > 3
    pictures = 0
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert type(mine) is type(other), i
        if isinstance(mine, Tensor):
            pictures += 1
            # 1e-6 of the value, since some latents here are near 20.
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-5, msg=lambda text, i=i: f"record {i}: {text}")
        else:
            assert mine == other, i
    assert pictures > 1


# ---- where diffusers and difflora differ on purpose -----------------------------------------------------------------


def differing(script: str, tmp_path: Path, family: str = "flux") -> tuple[list[Any], list[Any]]:
    """(diffusers' records, ours)."""
    return play(script, family, tmp_path, attach=False), play(script, family, tmp_path, attach=True)


@pytest.mark.filterwarnings("ignore")
def test_deleting_the_active_adapter_activates_no_other(tmp_path: Path) -> None:
    theirs, ours = differing(
        """
record(image())
pipe.load_lora_weights(style, adapter_name="style")
pipe.load_lora_weights(pixel, adapter_name="pixel")
pipe.delete_adapters("pixel")
record(pipe.get_active_adapters(), image())
""",
        tmp_path,
    )
    assert theirs[1] == ["style"]
    assert ours[1] == []
    assert torch.equal(ours[2], ours[0])
    assert not torch.equal(theirs[2], theirs[0])


@pytest.mark.filterwarnings("ignore")
def test_one_dict_of_weights_is_for_every_adapter(tmp_path: Path) -> None:
    """diffusers empties the dict at the first adapter and gives the others weight 1."""
    script = """
pipe.load_lora_weights(style, adapter_name="style")
pipe.load_lora_weights(pixel, adapter_name="pixel")
both = {"transformer": 0.5, "text_encoder": 0.5}
pipe.set_adapters(["style", "pixel"], both)
record(image(), both)
pipe.set_adapters(["style", "pixel"], 0.5)
record(image())
pipe.set_adapters(["style", "pixel"], [0.5, 1.0])
record(image())
"""
    theirs, ours = differing(script, tmp_path)
    assert torch.equal(ours[0], ours[2])
    assert torch.equal(theirs[0], theirs[3])
    assert ours[1] == {"transformer": 0.5, "text_encoder": 0.5}


@pytest.mark.filterwarnings("ignore")
def test_a_call_at_scale_zero_changes_no_weight(tmp_path: Path) -> None:
    """diffusers gives every active adapter weight 1 after a call with {"scale": 0}."""
    script = """
record(image())
pipe.load_lora_weights(style, adapter_name="style")
pipe.set_adapters("style", 0.5)
record(image(), image(joint_attention_kwargs={"scale": 0.0}), image())
pipe.set_adapters("style", 1.0)
record(image())
"""
    theirs, ours = differing(script, tmp_path)
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-6, atol=1e-5)
    assert torch.equal(ours[2], ours[0])
    assert torch.equal(ours[3], ours[1])
    assert torch.equal(theirs[3], theirs[4])


@pytest.mark.filterwarnings("ignore")
def test_disabling_leaves_fused_adapters_in(tmp_path: Path) -> None:
    """diffusers' first forward after disable_lora takes fused adapters out, while fused_loras still lists them."""
    theirs, ours = differing(
        """
base = image()
pipe.load_lora_weights(style, adapter_name="style")
pipe.fuse_lora(components=["transformer", "text_encoder"])
fused = image()
pipe.disable_lora()
record(base, fused, image(), pipe.fused_loras)
""",
        tmp_path,
    )
    torch.testing.assert_close(theirs[2], theirs[0], rtol=0, atol=1e-4)
    assert torch.equal(ours[2], ours[1])
    assert ours[3] == theirs[3] == {"style"}


@pytest.mark.filterwarnings("ignore")
def test_unfusing_is_exact(tmp_path: Path) -> None:
    """diffusers subtracts and keeps a residue; the base comes back bit for bit here."""
    theirs, ours = differing(
        """
before = pipe.transformer.proj_out.weight.clone()
pipe.load_lora_weights(style, adapter_name="style")
for _ in range(5):
    pipe.fuse_lora()
    pipe.unfuse_lora()
pipe.unload_lora_weights()
record(before, pipe.transformer.proj_out.weight.clone())
""",
        tmp_path,
    )
    assert torch.equal(ours[0], ours[1])
    assert not torch.equal(theirs[0], theirs[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "script",
    [
        "pipe.load_lora_weights({**style, **{k.replace('proj_out', 'proj_nowhere'): v for k, v in style.items()}})",
        "pipe.load_lora_weights({k.replace('transformer.', 'denoiser.', 1): v for k, v in style.items()})",
        "pipe.load_lora_weights(style, adapter_name='a'); pipe.set_adapters('a', {'unet': 0.5})",
        "pipe.load_lora_weights(style, adapter_name='a'); pipe.delete_adapters(['typo'])",
        "pipe.load_lora_weights(style, adapter_nam='a')",
    ],
)
def test_what_diffusers_only_warns_of_or_ignores_is_an_error(script: str, tmp_path: Path) -> None:
    play(script, "flux", tmp_path, attach=False)
    with pytest.raises((ValueError, TypeError)):
        play(script, "flux", tmp_path, attach=True)


def test_the_class_itself_is_never_changed(tmp_path: Path) -> None:
    play(WEIGHTS, "sd", tmp_path, attach=True)
    assert StableDiffusionPipeline.load_lora_weights.__module__ == "diffusers.loaders.lora_pipeline"
