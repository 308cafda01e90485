"""The commands for files: what they write, what they print, their exit codes; nothing is overwritten unasked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from difflora import cli, compose, load, screen
from difflora.formats.errors import DiffLoRAError
from difflora.resizing import resize
from difflora.types import Adapter

Run = Callable[..., tuple[int, str, str]]
Q = "transformer_blocks.0.attn.to_q"
STEM = "lora_unet_double_blocks_0_img_attn_proj"


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def lora(path: Path, seed: int, stem: str = f"transformer.{Q}", rank: int = 4) -> Path:
    save_file(
        {f"{stem}.lora_A.weight": rand(rank, 16, seed=seed), f"{stem}.lora_B.weight": rand(16, rank, seed=seed)}, path
    )
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with the adapters a and b, and a kohya file k."""
    monkeypatch.chdir(tmp_path)
    lora(tmp_path / "a.safetensors", 1)
    lora(tmp_path / "b.safetensors", 2)
    held = {
        f"{STEM}.lora_down.weight": rand(4, 16),
        f"{STEM}.lora_up.weight": rand(16, 4),
        f"{STEM}.alpha": torch.tensor(2.0),
    }
    save_file(held, tmp_path / "k.safetensors", {"ss_title": "k"})
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Call the console entry: (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["difflora", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            cli.main()
        out, err = capsys.readouterr()
        return int(done.value.code or 0), out, err

    yield call
    screen.log.quiet = False


def done(run: Run, *arguments: object) -> Any:
    """What a command prints as JSON."""
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def dense(path: str | Path | Adapter, module: str = Q) -> torch.Tensor:
    one = path if isinstance(path, Adapter) else load(path, family="flux")
    return one.components["transformer"][module].dense()


def files(folder: Path) -> dict[str, str]:
    return {p.name: sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()}


def test_convert(here: Path, run: Run) -> None:
    said = done(run, "convert", "k", "d.safetensors", "--to", "diffusers", "--family", "flux")
    assert said == {
        "output": "d.safetensors", "layout": "diffusers", "family": "flux", "kinds": {"lora": 1}, "ranks": [4],
        "components": {"transformer": 1}, "notes": [], "written": True}  # fmt: skip
    assert "transformer.transformer_blocks.0.attn.to_out.0.lora_A.weight" in load_file("d.safetensors")
    code, out, _ = run("convert", "d.safetensors", "k2.safetensors", "--to", "kohya")
    assert code == 0 and out == "k2.safetensors: kohya layout, family flux, 1 lora, rank 4\n"
    one, two = load_file("k.safetensors"), load_file("k2.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert done(run, "meta", "get", "k2.safetensors")["ss_title"] == "k"
    done(run, "convert", "k", "folder", "--to", "peft", "--family", "flux")
    assert sorted(path.name for path in (here / "folder").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


COMMANDS: dict[str, tuple[str, ...]] = {
    "convert": ("convert", "k", "x.safetensors", "--to", "comfy", "--family", "flux"),
    "merge": ("merge", "a:0.5", "b", "-o", "x.safetensors", "--family", "flux"),
    "resize": ("resize", "a", "x.safetensors", "--rank", "2", "--family", "flux"),
    "extract": (
        "extract",
        "--base",
        "m0.safetensors",
        "--tuned",
        "m1.safetensors",
        "-o",
        "x.safetensors",
        "--rank",
        "2",
    ),
    "bake": ("bake", "m0.safetensors", "a:0.5", "-o", "x.safetensors", "--family", "flux"),
    "set": ("meta", "set", "k.safetensors", "a=b", "-o", "x.safetensors"),
    "strip": ("meta", "strip", "k.safetensors", "-o", "x.safetensors"),
}


@pytest.fixture
def models(here: Path) -> Path:
    base = {f"{Q}.weight": rand(16, 16, seed=7), "proj_out.weight": rand(8, 16, seed=8)}
    save_file(base, here / "m0.safetensors")
    change = rand(16, 2, seed=9) @ rand(2, 16, seed=9)
    save_file({**base, f"{Q}.weight": base[f"{Q}.weight"] + change}, here / "m1.safetensors")
    return here


@pytest.mark.parametrize("name", COMMANDS)
def test_a_dry_run_writes_nothing_and_a_file_is_overwritten_by_force_alone(name: str, models: Path, run: Run) -> None:
    before = files(models)
    assert done(run, *COMMANDS[name], "--dry-run")["written"] is False
    code, out, _ = run(*COMMANDS[name], "--dry-run")
    assert code == 0 and out.endswith("nothing was written (--dry-run)\n")
    assert files(models) == before
    (models / "x.safetensors").write_bytes(b"mine")
    code, out, err = run(*COMMANDS[name])
    assert (code, out) == (1, "") and err.splitlines()[-1].startswith("difflora: x.safetensors exists")
    assert files(models) == {**before, "x.safetensors": sha256(b"mine").hexdigest()}
    assert done(run, *COMMANDS[name], "--force")["written"] is True
    assert files(models).keys() == {*before, "x.safetensors"} and (models / "x.safetensors").stat().st_size > 4
    code, out, _ = run(*COMMANDS[name], "--force")
    assert code == 0 and out.startswith("x.safetensors: ")


def test_merge_sums_at_the_strengths_and_says_of_what(here: Path, run: Run) -> None:
    said = done(run, "merge", "a:0.5", "b:-0.25", "-o", "m.safetensors", "--family", "flux")
    assert said["ranks"] == [8] and "retained" not in said
    assert torch.allclose(dense("m.safetensors"), 0.5 * dense("a") - 0.25 * dense("b"), atol=1e-5)
    recipe = json.loads(done(run, "meta", "get", "m.safetensors", "difflora.recipe")["difflora.recipe"])
    assert recipe["method"] == "sum"
    whole = sha256((here / "b.safetensors").read_bytes()).hexdigest()
    assert recipe["adapters"][1] == {"name": "b", "strength": -0.25, "sha256": whole}
    done(run, "merge", "a", "-o", "one.safetensors", "--family", "flux")
    assert torch.equal(dense("one.safetensors"), dense("a"))


def test_merge_by_name_ends_in_the_rank_asked_for(here: Path, run: Run) -> None:
    asked = ("merge", "a", "b:0.5", "-o", "m.safetensors", "--family", "flux", "--force", "--rank", "3")
    best = torch.linalg.svd(dense(compose([(load("a", family="flux"), 1.0), (load("b", family="flux"), 0.5)])))
    said = done(run, *asked, "--method", "svd")
    assert said["ranks"] == [3]
    assert said["retained"] == {f"transformer.{Q}": pytest.approx(float(best.S[:3].norm() / best.S.norm()), rel=1e-4)}
    assert torch.allclose(dense("m.safetensors"), best.U[:, :3] * best.S[:3] @ best.Vh[:3], atol=1e-4)
    done(run, *asked, "--method", "dare", "--density", "0.5", "--seed", "3")
    first = dense("m.safetensors")
    done(run, *asked, "--method", "dare", "--density", "0.5", "--seed", "3")
    assert torch.equal(dense("m.safetensors"), first)
    done(run, *asked, "--method", "dare", "--density", "0.5", "--seed", "4")
    assert not torch.allclose(dense("m.safetensors"), first)
    code, _, err = run("merge", "a:x", "-o", "z.safetensors")
    assert code == 1 and "a:x" in err


def test_resize_keeps_the_layout_of_the_file(here: Path, run: Run) -> None:
    said = done(run, "resize", "k", "small.safetensors", "--rank", "2", "--family", "flux")
    assert (said["layout"], said["ranks"]) == ("kohya", [2])
    want, _ = resize(load("k", family="flux"), 2)
    module = "transformer_blocks.0.attn.to_out.0"
    assert torch.allclose(dense("small.safetensors", module), dense(want, module), atol=1e-5)
    said = done(
        run,
        "resize",
        "a",
        "less.safetensors",
        "--rank",
        "4",
        "--method",
        "sv_cumulative",
        "--param",
        "0.5",
        "--family",
        "flux",
    )
    assert said["layout"] == "diffusers" and said["ranks"][0] < 4
    code, out, _ = run("resize", "a", "less.safetensors", "--rank", "4", "--family", "flux", "--force")
    assert code == 0 and "retained norm: 1.0000 to 1.0000, mean 1.0000" in out


def test_extract_then_bake_gives_the_tuned_model(models: Path, run: Run) -> None:
    said = done(
        run, "extract", "--base", "m0.safetensors", "--tuned", "m1.safetensors", "-o", "e.safetensors", "--rank", "2"
    )
    assert said["components"] == {"transformer": 1}
    said = done(run, "bake", "m0.safetensors", "e.safetensors", "-o", "baked.safetensors")
    assert (said["parameters"], said["tensors"]) == (1, 1)
    made, tuned = load_file("baked.safetensors"), load_file("m1.safetensors")
    assert made.keys() == tuned.keys() and all(torch.allclose(made[key], tuned[key], atol=1e-4) for key in tuned)
    code, _, err = run("bake", "m1.safetensors", "k", "-o", "no.safetensors", "--family", "flux")
    assert code == 1 and "transformer_blocks.0.attn.to_out.0" in err and not (models / "no.safetensors").exists()


def test_meta(here: Path, run: Run) -> None:
    assert run("meta", "get", "k.safetensors", "ss_title") == (0, "k\n", "")
    code, out, _ = run("meta", "set", "k.safetensors", "ss_title=é=1", "x=", "--force")
    assert code == 0 and out.startswith("k.safetensors: ss_title, x set")
    assert done(run, "meta", "get", "k.safetensors") == {"ss_title": "é=1", "x": ""}
    assert done(run, "meta", "strip", "k.safetensors", "--keep", "x", "--force")["metadata"] == {"x": ""}
    assert run("meta", "get", "k.safetensors", "ss_title")[0] == 1
    assert run("meta", "set", "k.safetensors", "nothing", "--force")[0] == 2
    assert run("meta", "set", "k.safetensors", "a=b")[0] == 1  # in place without --force


def test_verify_exits_by_what_it_finds(here: Path, run: Run) -> None:
    code, out, _ = run("verify", "k", "--family", "flux")
    assert code == 0 and "kohya, family flux, 3 tensors in 1 modules, sound" in out
    held = load_file("k.safetensors")
    save_file({**held, "what.is.this": torch.zeros(2)}, "bad.safetensors")
    code, out, _ = run("verify", "bad.safetensors")
    assert code == 1 and "problem: " in out and "what.is.this" in out
    code, out, _ = run("verify", "bad.safetensors", "--json")
    assert code == 1 and json.loads(out)["ok"] is False


def test_hash(here: Path, run: Run) -> None:
    whole = sha256((here / "k.safetensors").read_bytes()).hexdigest()
    assert done(run, "hash", "k.safetensors")["sha256"] == whole
    code, out, _ = run("hash", "k.safetensors")
    assert code == 0 and f"sha256 {whole}" in out and f"autov2 {whole[:10]}" in out and "autov1 -" in out


def test_an_adapter_that_fits_several_families_asks_for_one(here: Path, run: Run) -> None:
    code, _, err = run("convert", "a", "x.safetensors", "--to", "kohya")
    assert code == 1 and "family" in err and not (here / "x.safetensors").exists()


def test_a_resized_peft_folder_becomes_a_file_where_a_file_is_asked_for(here: Path, run: Run) -> None:
    source = load("outline").save(here / "folder", "peft")
    for target, layout in (("small.safetensors", "diffusers"), ("small", "peft")):
        assert run("resize", str(source), target, "--rank", "2")[0] == 0
        assert (here / target).is_file() == (layout == "diffusers") and load(here / target).layout == layout
    with pytest.raises(DiffLoRAError, match="takes the name of a folder"):
        load("outline").save(here / "x.safetensors", "peft")
