"""What someone runs into who tries the package for the first time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import difflora
from difflora import tools
from difflora.cli import _as_options, app
from difflora.demo import MODEL
from difflora.formats.errors import DiffLoRAError

RUN = CliRunner()


def flux(rank: int = 4, path: str = "double_blocks.0.img_attn.qkv") -> dict[str, torch.Tensor]:
    key = "lora_unet_" + path.replace(".", "_")
    return {
        f"{key}.lora_down.weight": torch.randn(rank, 3072),
        f"{key}.lora_up.weight": torch.randn(9216, rank),
        f"{key}.alpha": torch.tensor(float(rank)),
    }


def sdxl() -> dict[str, torch.Tensor]:
    key = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k"
    return {f"{key}.lora_down.weight": torch.randn(4, 2048), f"{key}.lora_up.weight": torch.randn(640, 4)}


def test_a_folder_of_the_bundled_model_is_called_as_it_is(tmp_path: Path) -> None:
    made = tmp_path / "x.png"
    done = RUN.invoke(
        app, ["generate", "a red circle", "-o", str(made), "--model", str(MODEL), "--seed", "1", "--steps", "1"]
    )
    assert done.exit_code == 0, done.output
    from PIL import Image

    assert Image.open(made).size == (64, 64)


def test_a_broken_record_of_the_call_is_refused(tmp_path: Path) -> None:
    from difflora.opening import recorded_call

    (tmp_path / "difflora.json").write_text("[]")
    with pytest.raises(DiffLoRAError, match=r"difflora\.json"):
        recorded_call(str(tmp_path))
    assert recorded_call("user/repo") == {}


def test_a_mix_is_for_the_families_that_all_are_for() -> None:
    one, two = (
        difflora.load(flux()),
        difflora.load(flux(path="single_blocks.0.linear2") if False else flux(8), family="flux"),
    )
    assert "flux" in (one.family or "")
    assert difflora.compose([(one, 0.5), (two, 0.5)]).family == "flux"


def test_adapters_of_different_models_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(DiffLoRAError, match="different models"):
        difflora.compose([(difflora.load(flux()), 1.0), (difflora.load(sdxl(), family="sdxl"), 1.0)])


@pytest.mark.parametrize("pair", [("detail", 0.5), "detail", (None, 1.0)])
def test_names_are_no_adapters(pair: Any) -> None:
    with pytest.raises(DiffLoRAError, match=r"difflora\.load"):
        difflora.compose([pair])
    with pytest.raises(DiffLoRAError, match=r"difflora\.load"):
        tools.merge([pair])


def test_the_wrong_family_is_told_the_right_one() -> None:
    with pytest.raises(DiffLoRAError, match=r"It fits .*flux"):
        difflora.load(flux(), family="sdxl")


def test_a_checkpoint_is_no_adapter() -> None:
    with pytest.raises(DiffLoRAError, match="A whole model is no adapter"):
        difflora.load({"double_blocks.0.img_attn.qkv.weight": torch.randn(4, 4), "img_in.bias": torch.randn(4)})


def test_a_name_that_is_nearly_right() -> None:
    with pytest.raises(DiffLoRAError, match=r"outline, night, stripes, heart, fast.* Did you mean 'outline'"):
        difflora.load("outlin")
    with pytest.raises(DiffLoRAError) as told:
        difflora.load("nope.safetensors")
    assert "nope.safetensors.safetensors" not in str(told.value)


def test_a_weight_that_is_no_number() -> None:
    done = RUN.invoke(app, ["merge", "outline:abc", "-o", "x.safetensors"])
    assert isinstance(done.exception, DiffLoRAError)
    assert "'abc' is no number" in str(done.exception)


def test_a_checkpoint_is_not_baked_onto_itself(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a.weight": torch.ones(2, 2)}, file)
    for target in (file, tmp_path / "y" / ".." / "x.safetensors"):
        with pytest.raises(DiffLoRAError, match="the checkpoint itself"):
            tools.bake(file, [(difflora.load("night"), 1.0)], target, force=True)
    with pytest.raises(DiffLoRAError, match="the checkpoint itself"):
        tools.bake(MODEL, [(difflora.load("night"), 1.0)], MODEL / "inside")


def test_a_dry_run_says_what_the_run_would(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file(flux(), file)
    before = file.read_bytes()
    for dry in (True, False):
        with pytest.raises(DiffLoRAError, match="exists"):
            tools.set_metadata(file, {"a": "b"}, dry_run=dry)
        with pytest.raises(DiffLoRAError, match="lora_adapter_metadata"):
            tools.set_metadata(file, {"lora_adapter_metadata": "x"}, force=True, dry_run=dry)
        with pytest.raises(DiffLoRAError, match="exists"):
            tools.bake(MODEL, [(difflora.load("night"), 1.0)], tmp_path, dry_run=dry)
    assert file.read_bytes() == before


def test_metadata_and_hashes_of_bundled_adapters() -> None:
    assert RUN.invoke(app, ["meta", "get", "night", "--json"]).exit_code == 0
    done = RUN.invoke(app, ["hash", "outline"])
    assert "autov3 - (" in done.output


def test_an_adapter_prints_in_one_line() -> None:
    assert repr(difflora.load("night")).startswith("<Adapter 'night': diffusers layout, family flux")


def test_tools_need_no_import_of_their_own() -> None:
    assert difflora.tools is tools


def test_messages_name_the_options_of_the_command_line() -> None:
    assert _as_options("Pass family='flux', or strict=False.") == "Pass --family 'flux', or --no-strict."


def test_one_factor_pair_has_the_norm_of_its_halves() -> None:
    torch.manual_seed(0)
    key = "lora_unet_double_blocks_0_img_mlp_0"
    adapter = difflora.load({f"{key}.lokr_w1": torch.randn(16, 16), f"{key}.lokr_w2": torch.randn(768, 192)})
    (norm,) = tools.inspect_adapter(adapter).norms.values()
    deltas = [delta for modules in adapter.components.values() for delta in modules.values()]
    assert norm == pytest.approx(float(sum(d.dense().double().square().sum() for d in deltas).sqrt()), rel=1e-5)


def test_extracted_adapters_know_their_family(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = {f"transformer_blocks.0.attn.{name}.weight": torch.randn(3072, 64) for name in ("to_q", "add_q_proj")}
    base = {k: torch.randn(64, 64) for k in base} | {
        "single_transformer_blocks.0.proj_mlp.weight": torch.randn(256, 64)
    }
    tuned = {k: v + 0.1 * torch.randn(len(v), 1) @ torch.randn(1, v.shape[1]) for k, v in base.items()}
    for name, tensors in (("base", base), ("tuned", tuned)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    found, _ = tools.extract(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", 2)
    assert "flux" in (found.family or "").split("|")


def test_fused_adapters_stay_in_the_table(flux: Any) -> None:
    pipe = difflora.attach(flux)
    path = next(p for p, m in pipe.transformer.named_modules() if isinstance(m, torch.nn.Linear) and "attn.to_q" in p)
    rows, cols = pipe.transformer.get_submodule(path).weight.shape
    given = {
        f"transformer.{path}.lora_A.weight": torch.randn(2, cols),
        f"transformer.{path}.lora_B.weight": torch.randn(rows, 2),
    }
    pipe.load_lora(given, name="style")
    pipe.fuse_lora()
    assert [(row.name, row.mode) for row in pipe.loras] == [("style", "fused")]
    pipe.unfuse_lora()
    assert [(row.name, row.mode) for row in pipe.loras] == [("style", "merged")]


def test_several_are_unloaded_by_name(flux: Any) -> None:
    pipe = difflora.attach(flux)
    path = next(p for p, m in pipe.transformer.named_modules() if isinstance(m, torch.nn.Linear) and "attn.to_q" in p)
    rows, cols = pipe.transformer.get_submodule(path).weight.shape
    for name in ("one", "two", "three"):
        given = {
            f"transformer.{path}.lora_A.weight": torch.randn(2, cols),
            f"transformer.{path}.lora_B.weight": torch.randn(rows, 2),
        }
        pipe.load_lora(given, name=name)
    pipe.unload_loras("one", "three")
    assert [row.name for row in pipe.loras] == ["two"]
    with pytest.raises(DiffLoRAError, match="no adapter is called 'x'"):
        pipe.unload_loras("two", "x")
    assert json.dumps([row.name for row in pipe.loras]) == '["two"]'


def test_a_terminal_obeys_no_text_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file(flux(), file, {"ss_output_name": "\x1b]0;title\x07", "b": "one\ntwo\x9b31m\u202e"})
    for command in (["inspect"], ["verify"], ["meta", "get"], ["convert", "--to", "peft", "--dry-run"]):
        target = [str(tmp_path / "y")] if command[0] == "convert" else []
        done = RUN.invoke(
            app,
            [command[0], *command[1:2], str(file), *target, *command[2:]]
            if command[0] == "meta"
            else [command[0], str(file), *target, *command[1:]],
        )
        assert done.exit_code == 0, done.output
        assert not set("\x1b\x07\x9b\u202e") & set(done.output)
    one = RUN.invoke(app, ["meta", "get", str(file), "b"])
    assert one.output == "one\ntwo\x9b31m\u202e\n"
