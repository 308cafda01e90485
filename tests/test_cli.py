"""The command line: what it writes and prints where, its exit codes, and that it checks before it loads a model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from diffusers import FluxPipeline
from PIL import Image
from safetensors.torch import save_file

import difflora
from difflora import cli, demo, drawing, opening, screen
from difflora.formats.errors import DiffLoRAError
from difflora.hashes import hashes
from difflora.metadata import read_parameters, read_png

Run = Callable[..., tuple[int, str, str]]
SIZE = ("--width", "16", "--height", "16", "--steps", "2")
STYLE, TEXT = ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.1.attn.to_k"], ["encoder.layers.0.mlp.fc1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny.flux_pipeline().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with two adapters in `loras`."""
    monkeypatch.chdir(tmp_path)
    pipe = tiny.flux_pipeline()
    (tmp_path / "loras").mkdir()
    style = tiny.lora_dict(pipe.transformer, STYLE, size=0.8)
    text = tiny.lora_dict(pipe.text_encoder, TEXT, prefix="text_encoder.text_model.", size=0.8)
    both = {**tiny.lora_dict(pipe.transformer, STYLE[:1], seed=3, size=0.8), **text}
    save_file(style, tmp_path / "loras" / "style.safetensors")
    save_file(both, tmp_path / "loras" / "both.safetensors", {"modelspec.trigger_phrase": "zz [top]"})
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the console entry: (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["difflora", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            cli.main()
        out, err = capsys.readouterr()
        return done.value.code, out, err

    return call


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening any model is a failure of the test."""

    def opened(*_: object) -> None:
        pytest.fail("the model was opened before the request was checked")

    monkeypatch.setattr(cli, "opened", opened)


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def drawn(model: str, seed: int, prompt: str, weights: dict[str, float], here: Path, **options: Any) -> np.ndarray:
    """The picture that the library itself makes."""
    pipe = difflora.attach(FluxPipeline.from_pretrained(model))
    for name, weight in weights.items():
        pipe.load_lora(here / "loras" / f"{name}.safetensors", weight=weight)
    generator = torch.Generator().manual_seed(seed)
    made = pipe(prompt, width=16, height=16, num_inference_steps=2, generator=generator, **options)
    return np.asarray(made.images[0])


# ---- generate -------------------------------------------------------------------------------------------------------


def test_generate_draws_what_the_library_draws_and_says_how(run: Run, here: Path, model: str) -> None:
    code, out, err = run(
        "generate", "a cat <lora:both:te=0.5:unet=0.25>", "-o", "out.png", "--model", model, "--seed", 7, *SIZE,
        "--lora", "loras/style.safetensors:0.75", "--lora-dir", "loras", "--guidance", "2.5",
    )  # fmt: skip
    assert (code, out) == (0, "out.png\n")
    assert "style: diffusers layout" in err
    assert "seed 7" in err
    expected = drawn(
        model, 7, "a cat <lora:both:te=0.5:unet=0.25>", {"style": 0.75, "both": 0.0}, here, guidance_scale=2.5
    )
    assert np.array_equal(pixels(here / "out.png"), expected)
    assert not np.array_equal(pixels(here / "out.png"), drawn(model, 7, "a cat", {}, here))

    text, job = read_png(here / "out.png")
    assert job is not None
    assert (job.prompt, job.model, job.pipeline, job.seed) == (
        "a cat <lora:both:te=0.5:unet=0.25>", model, "FluxPipeline", 7,
    )  # fmt: skip
    assert (job.steps, job.guidance, job.width, job.height) == (2, 2.5, 16, 16)
    assert (job.scheduler, job.dtype, job.negative_prompt) == ("FlowMatchEulerDiscreteScheduler", "float32", None)
    assert job.max_sequence_length == 512
    assert dict(job.versions)["torch"] == torch.__version__
    style, both = job.loras
    assert (style.name, style.source, style.components) == (
        "style", "loras/style.safetensors", (("transformer", 0.75),),
    )  # fmt: skip
    assert (both.name, dict(both.components)) == ("both", {"text_encoder": 0.5, "transformer": 0.25})
    assert both.sha256 == hashes(here / "loras" / "both.safetensors").sha256
    read = read_parameters(text or "")
    assert read.prompt == "a cat <lora:style:0.75> <lora:both:0.25>"
    assert read.fields["Lora hashes"] == f"style: {style.lora_hash}, both: {both.lora_hash}"


def test_count_uses_the_following_seeds_one_file_each(run: Run, here: Path, model: str) -> None:
    code, out, _ = run("generate", "a cat", "-o", "out.png", "--model", model, "--seed", 2**32 - 1, "--count", 2, *SIZE)
    assert (code, out) == (0, "out-1.png\nout-2.png\n")
    assert run("generate", "a cat", "-o", "zero.png", "--model", model, "--seed", 0, *SIZE)[0] == 0
    assert np.array_equal(pixels(here / "out-2.png"), pixels(here / "zero.png"))
    assert not np.array_equal(pixels(here / "out-1.png"), pixels(here / "zero.png"))
    assert [read_png(here / f"out-{n}.png")[1].seed for n in (1, 2)] == [2**32 - 1, 0]


def test_without_a_seed_one_is_drawn_printed_and_stored(run: Run, here: Path, model: str) -> None:
    seeds = []
    for _ in range(2):
        code, _, err = run("generate", "a cat", "-o", "out.png", "--model", model, "--force", *SIZE)
        printed = re.search(r"^seed (\d+)$", err, re.M)
        assert code == 0
        assert printed is not None
        assert read_png(here / "out.png")[1].seed == int(printed[1])
        seeds.append(printed[1])
    assert seeds[0] != seeds[1]


def test_a_tag_adds_to_the_weight_that_the_option_gives(run: Run, here: Path, model: str) -> None:
    base = ("--model", model, "--seed", 1, *SIZE)
    assert run("generate", "a <lora:style:0.5>", "-o", "a.png", "--lora", "loras/style:0.25", *base)[0] == 0
    assert run("generate", "a", "-o", "b.png", "--lora", "loras/style:0.75", *base)[0] == 0
    assert np.array_equal(pixels(here / "a.png"), pixels(here / "b.png"))
    assert read_png(here / "a.png")[1].loras[0].components == (("transformer", 0.75),)


def test_a_tag_that_names_a_file_in_the_current_folder_is_found(run: Run, here: Path, model: str) -> None:
    (here / "style.safetensors").write_bytes((here / "loras" / "style.safetensors").read_bytes())
    assert run("generate", "a <lora:style>", "-o", "a.png", "--model", model, "--seed", 1, *SIZE)[0] == 0
    assert np.array_equal(pixels(here / "a.png"), drawn(model, 1, "a", {"style": 1.0}, here))


def test_a_bundled_adapter_is_recorded_by_name(
    run: Run, here: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(demo.ADAPTERS, "ours", here / "loras" / "style.safetensors")
    assert run("generate", "a <lora:ours:0.5>", "-o", "a.png", "--model", model, "--seed", 1, *SIZE)[0] == 0
    assert np.array_equal(pixels(here / "a.png"), drawn(model, 1, "a", {"style": 0.5}, here))
    (ours,) = read_png(here / "a.png")[1].loras
    assert (ours.name, ours.source, ours.components) == ("ours", "ours", (("transformer", 0.5),))


def test_an_adapter_of_weight_zero_leaves_no_trace(run: Run, here: Path, model: str) -> None:
    assert run("generate", "a", "-o", "a.png", "--lora", "loras/style:0", "--model", model, "--seed", 1, *SIZE)[0] == 0
    assert read_png(here / "a.png")[1].loras == ()
    assert np.array_equal(pixels(here / "a.png"), drawn(model, 1, "a", {}, here))


def test_a_partial_match_needs_no_strict(run: Run, here: Path, model: str) -> None:
    pipe = tiny.flux_pipeline()
    part = tiny.lora_dict(pipe.transformer, STYLE)
    part.update({k.replace("blocks.0.", "blocks.9."): v.clone() for k, v in part.items() if "blocks.0." in k})
    save_file(part, here / "part.safetensors")
    command = ("generate", "a", "-o", "a.png", "--model", model, "--lora", "part", *SIZE)
    code, out, err = run(*command)
    assert (code, out) == (1, "")
    assert "transformer_blocks.9.attn.to_q" in err
    assert not (here / "a.png").exists()
    code, out, err = run(*command, "--no-strict")
    assert (code, out) == (0, "a.png\n")
    assert "unmatched 1" in err


def test_a_negative_prompt_acts_with_true_cfg_and_is_refused_without(run: Run, here: Path, model: str) -> None:
    command = ("generate", "a cat", "-o", "a.png", "--model", model, "--seed", 1, "--negative", "a dog", *SIZE)
    code, _, err = run(*command)
    assert code == 1
    assert "FluxPipeline uses a negative prompt only with --true-cfg above 1" in err
    assert run(*command, "--true-cfg", "4")[0] == 0
    text, job = read_png(here / "a.png")
    assert (job.negative_prompt, job.true_cfg) == ("a dog", 4.0)
    assert "\nNegative prompt: a dog\n" in text
    assert "CFG scale: 4, Distilled CFG Scale: 3.5" in text
    expected = drawn(model, 1, "a cat", {}, here, negative_prompt="a dog", true_cfg_scale=4.0)
    assert np.array_equal(pixels(here / "a.png"), expected)


def test_an_option_that_the_pipeline_does_not_take_is_refused(run: Run, here: Path) -> None:
    tiny.sd_pipeline().save_pretrained(here / "sd")
    code, _, err = run("generate", "a", "-o", "a.png", "--model", "sd", "--true-cfg", "2", *SIZE)
    assert code == 1
    assert err.endswith("\ndifflora: StableDiffusionPipeline takes no true_cfg_scale; leave it out.\n")
    assert run("generate", "a", "-o", "a.png", "--model", "sd", "--negative", "b", "--guidance", "6", *SIZE)[0] == 0
    assert "Sampler: DDIM, CFG scale: 6, Seed: " in read_png(here / "a.png")[0]


def test_quiet_prints_the_file_only(here: Path, model: str) -> None:
    command = ("-q", "generate", "a", "-o", "a.png", "--model", model, "--lora", "loras/style", *SIZE)
    done = subprocess.run([sys.executable, "-m", "difflora", *command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("a.png\n", "")


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("a", "-o", "there.png"), 1, "difflora: there.png exists; pass --force to overwrite."),
        (("a", "-o", "there.png", "--count", "2"), 1, "there-2.png exists"),
        (("a", "-o", "none/a.png"), 1, "there is no folder none; make it first"),
        (("a", "-o", "a.jpg"), 2, "a.jpg must end in .png"),
        (("a",), 2, "Missing option"),
        (("a", "-o", "a.png", "--count", "0"), 2, "--count"),
        (("a", "-o", "a.png", "--seed", "4294967296"), 2, "--seed"),
        (("a", "-o", "a.png", "--dtype", "int8"), 2, "--dtype"),
        (("a", "-o", "a.png", "--lora-dir", "none"), 2, "--lora-dir"),
        (("a <lora:style:x>", "-o", "a.png"), 1, "'x' is not a finite number"),
        (("a <lora:nope:1>", "-o", "a.png"), 1, "asks for 'nope', which is no bundled adapter; tried nope.safetensors"),
        (("a <lora:../x:1>", "-o", "a.png"), 1, "asks for '../x'"),
        (("a", "-o", "a.png", "--negative", "<lora:style:1>"), 1, "--negative holds an adapter tag"),
        (("a", "-o", "a.png", "--lora", "nope:0.5"), 1, "'nope' is no adapter: tried nope"),
        (("a", "-o", "a.png", "--lora", "loras/style:nan"), 1, "with a finite number"),
        (("a", "-o", "a.png", "--lora", "loras/style", "--lora", "loras/style:2"), 1, "names 'style' twice"),
    ],
)
def test_a_wrong_request_is_refused_before_the_model_is_opened(
    run: Run, here: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    (here / "there.png").write_bytes(b"mine")
    (here / "there-2.png").write_bytes(b"mine")
    found, out, err = run("generate", *arguments)
    assert (found, out) == (code, "")
    assert words in err
    assert (here / "there.png").read_bytes() == b"mine"
    assert not (here / "a.png").exists()


def test_the_caret_of_a_bad_tag_reaches_the_terminal(run: Run, here: Path) -> None:
    _, _, err = run("generate", "a <lora:x:y>", "-o", "a.png")
    assert err.split("\n")[1:] == ["  a <lora:x:y>", "  " + " " * 10 + "^", ""]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "none.safetensors"), "--model none.safetensors is no file, no folder and no Hub id"),
        (("--model", "none"), "--model none is no file, no folder and no Hub id"),
        (("--model", "loras"), "the model loras cannot be loaded: "),
        (("--model", "loras/style.safetensors"), "is no checkpoint of FluxPipeline, StableDiffusionXLPipeline"),
        (("--device", "gpu"), "--device gpu is no device"),
        (("--device", "meta"), "--device meta is not available here"),
        (("--device", "cpu", "--offload", "model"), "--offload model needs an accelerator"),
    ],
)
def test_a_model_or_device_that_is_none_is_one_line_and_exit_1(
    run: Run, here: Path, options: tuple[str, ...], words: str
) -> None:
    code, out, err = run("generate", "a", "-o", "a.png", *options)
    assert (code, out) == (1, "")
    assert err.startswith("difflora: ")
    assert words in err
    assert "Traceback" not in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that must be missing")
def test_a_missing_accelerator_is_named(run: Run, here: Path) -> None:
    assert run("generate", "a", "-o", "a.png", "--device", "cuda")[2].startswith(
        "difflora: --device cuda is not available"
    )


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("style", ("style", 1.0)),
        ("style:0.5", ("style", 0.5)),
        ("style:-2", ("style", -2.0)),
        ("user/repo:file.safetensors", ("user/repo:file.safetensors", 1.0)),
        ("user/repo:file.safetensors@main:0.3", ("user/repo:file.safetensors@main", 0.3)),
        ("C:\\loras\\a.safetensors", ("C:\\loras\\a.safetensors", 1.0)),
    ],
)
def test_the_weight_of_lora_stands_behind_the_last_colon(spec: str, expected: tuple[str, float]) -> None:
    assert drawing.split_weight(spec) == expected


@pytest.mark.parametrize("spec", [":0.5", "a:inf", "a:nan"])
def test_a_weight_that_is_none_is_refused(spec: str) -> None:
    with pytest.raises(DiffLoRAError, match="expected NAME_OR_PATH"):
        drawing.split_weight(spec)


# ---- single-file checkpoints ----------------------------------------------------------------------------------------

SDXL = "conditioner.embedders.1.model.ln_final.weight"


@pytest.mark.parametrize(
    ("shapes", "pipeline"),
    [
        ({"double_blocks.0.img_attn.qkv.weight": (3, 1), "img_in.weight": (8, 64)}, "FluxPipeline"),
        ({SDXL: (8,), "input_blocks.0.0.weight": (8, 4, 3, 3)}, "StableDiffusionXLPipeline"),
        ({"cond_stage_model.x": (8,), "input_blocks.0.0.weight": (8, 4, 3, 3)}, "StableDiffusionPipeline"),
        ({"cond_stage_model.x": (8,), "input_blocks.0.0.weight": (8, 9, 3, 3)}, "reads 9 channels instead of 4"),
        (
            {"double_blocks.0.img_attn.qkv.weight": (3, 1), "img_in.weight": (8, 384)},
            "reads 384 channels instead of 64",
        ),
        ({SDXL: (8,)}, "reads 0 channels"),
        ({"joint_blocks.0.x": (1,)}, "it holds joint_blocks.0.x"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_the_pipeline_of_a_checkpoint_is_told_by_its_keys(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], pipeline: str, prefix: str
) -> None:
    bare = ("cond_stage_model", "conditioner")
    tensors = {k if k.startswith(bare) else prefix + k: torch.zeros(shape) for k, shape in shapes.items()}
    save_file(tensors, tmp_path / "x.safetensors")
    if pipeline.endswith("Pipeline"):
        assert opening.checkpoint_pipeline(tmp_path / "x.safetensors") == pipeline
    else:
        with pytest.raises(DiffLoRAError, match=re.escape(pipeline)):
            opening.checkpoint_pipeline(tmp_path / "x.safetensors")


# ---- inspect --------------------------------------------------------------------------------------------------------


def test_inspect_prints_json_of_the_inspection(run: Run, here: Path) -> None:
    code, out, err = run("inspect", "loras/both.safetensors", "--json")
    found = difflora.tools.inspect("loras/both.safetensors")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(json.dumps(found.as_dict()))
    assert json.loads(out)["components"] == {"transformer": 1, "text_encoder": 1}


def test_inspect_prints_a_table(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen.out, "width", 160)
    code, out, err = run("inspect", "loras/both.safetensors")
    assert (code, err) == (0, "")
    for words in (
        "diffusers",
        "lora: 2",
        "3 (2x)",
        "zz [top] (modelspec.trigger_phrase)",
        "transformer.transformer_blocks.0",
    ):
        assert words in out
    assert hashes("loras/both.safetensors").sha256 in out


def test_inspect_names_bad_tensors(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen.out, "width", 160)
    bad = tiny.lora_dict(tiny.flux_pipeline().transformer, STYLE)
    bad["transformer.transformer_blocks.0.attn.to_q.lora_B.weight"][0, 0] = torch.nan
    save_file(bad, here / "bad.safetensors")
    assert "1 tensors: transformer.transformer_blocks.0.attn.to_q.up" in run("inspect", "bad.safetensors")[1]


@pytest.mark.parametrize("content", [b"", b"not a safetensors file at all"])
def test_inspect_of_a_broken_file_is_one_line_and_exit_1(run: Run, here: Path, content: bytes) -> None:
    (here / "broken.safetensors").write_bytes(content)
    code, out, err = run("inspect", "broken.safetensors", "--json")
    assert (code, out) == (1, "")
    assert err.startswith("difflora: broken.safetensors ")
    assert err.count("\n") == 1


# ---- demo -----------------------------------------------------------------------------------------------------------


def test_demo_draws_prompts_by_adapters(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> FluxPipeline:
        pipe = tiny.flux_pipeline()
        pipe.default_sample_size = 8
        return pipe

    cards = {
        "both": demo.Card(here / "loras" / "both.safetensors", "", "", (), "a cat"),
        "style": demo.Card(here / "loras" / "style.safetensors", "", "", (), "a dog", steps=1),
    }
    monkeypatch.setattr(demo, "load", load)
    monkeypatch.setattr(demo, "CARDS", cards)
    monkeypatch.setattr(cli, "MIXES", ({"both": 0.5, "style": 1.0},))
    monkeypatch.setattr(cli, "recorded_call", lambda model: {"num_inference_steps": 2, "max_sequence_length": 8})
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = run("demo", "--seed", "5")
    assert code == 0
    assert re.search(r"style\s*│ diffusers\s*│ flux\s*│ 2 lora\s*│ 3\s*│ 2\s*│ 0", out)
    assert out.endswith("difflora-demo.png\n")
    sheet = pixels(here / "difflora-demo.png")
    pipe = difflora.attach(load())
    pipe.load_lora(cards["both"].path, weight=0.5)
    pipe.load_lora(cards["style"].path)
    made = pipe(
        "a dog", num_inference_steps=2, max_sequence_length=8, generator=torch.Generator().manual_seed(5)
    ).images[0]
    expected = np.asarray(made.resize((32, 32), Image.Resampling.NEAREST))
    windows = np.lib.stride_tricks.sliding_window_view(sheet, (32, 32, 3))[:, :, 0]
    assert int((windows == expected).all(axis=(2, 3, 4)).sum()) == 1
    assert run("demo")[2] == "difflora: difflora-demo.png exists; pass --force to overwrite.\n"


def test_the_mixes_of_the_demo_name_bundled_adapters() -> None:
    assert all(mix.keys() <= demo.CARDS.keys() for mix in cli.MIXES)
    assert len({tuple(mix) for mix in cli.MIXES}) == len(cli.MIXES) == 2


# ---- the program ----------------------------------------------------------------------------------------------------

HEAVY = "{'torch', 'diffusers', 'transformers', 'numpy', 'PIL', 'safetensors', 'huggingface_hub'}"


@pytest.mark.parametrize(
    "code",
    [
        "import difflora, difflora.prompt, difflora.metadata, difflora.hashes, difflora.demo",
        "sys.argv = ['difflora', '--help']; from difflora.cli import main; run(main)",
        "sys.argv = ['difflora', 'generate', '--help']; from difflora.cli import main; run(main)",
        "sys.argv = ['difflora', '--version']; from difflora.cli import main; run(main)",
        "sys.argv = ['difflora', 'generate', '<lora:x:y>', '-o', 'a.png']; from difflora.cli import main; run(main)",
    ],
)
def test_light_commands_import_nothing_heavy(code: str) -> None:
    program = f"""
import sys
def run(main):
    try:
        main()
    except SystemExit:
        pass
{code}
print('heavy:', sorted({HEAVY} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "heavy: []"


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "difflora", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"difflora {difflora.__version__}\n"


def test_no_arguments_print_the_help(run: Run) -> None:
    code, out, err = run()
    assert code == 2
    assert "generate" in out + err


def test_ctrl_c_is_130(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "opened", interrupted)
    assert run("generate", "a", "-o", "a.png")[0] == 130


def test_no_color_is_honoured(here: Path) -> None:
    code = [sys.executable, "-m", "difflora", "inspect", "loras/style.safetensors"]
    env = {"PATH": "", "FORCE_COLOR": "1", "NO_COLOR": "1"}
    assert "\x1b[3" not in subprocess.run(code, capture_output=True, text=True, check=True, env=env).stdout
