"""What a user may type for an adapter, and what is read for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import difflora
from difflora import DiffLoRAError
from difflora.sources import Hub, choose, locate

STEM = "transformer_blocks.0.attn.to_q"


def tensors(prefix: str = "transformer.", rank: int = 2, fill: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}{STEM}.lora_A.weight": torch.full((rank, 4), fill),
        f"{prefix}{STEM}.lora_B.weight": torch.ones(4, rank),
    }


def delta(adapter: difflora.Adapter) -> torch.Tensor:
    return adapter.components["transformer"][STEM].dense()


def write(path: Path, content: dict[str, torch.Tensor] | None = None, metadata: dict[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(content if content is not None else tensors(), path, metadata=metadata)
    return path


def test_paths_with_and_without_suffix_and_names_in_folders(tmp_path: Path) -> None:
    file = write(tmp_path / "lib" / "style.safetensors")
    for source in (file, str(file), str(file)[: -len(".safetensors")]):
        assert difflora.load(source).name == "style"
    assert difflora.load("style", folders=[tmp_path / "empty", tmp_path / "lib"]).path == str(file)
    with pytest.raises(DiffLoRAError, match=r"(?s)style.*tried.*user/repo"):
        difflora.load("style", folders=[tmp_path / "empty"])


def test_a_missing_file_is_not_sought_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("asked the Hub")

    monkeypatch.setattr("difflora.sources._from_hub", never)
    with pytest.raises(DiffLoRAError, match="is no adapter: tried"):
        difflora.load("nowhere/style.safetensors")


def test_names_come_from_the_stem_the_folder_or_a_counter(tmp_path: Path) -> None:
    assert difflora.load(write(tmp_path / "v1.0.safetensors")).name == "v1.0"
    assert difflora.load(write(tmp_path / "mine" / "pytorch_lora_weights.safetensors").parent).name == "mine"
    one, two = difflora.load(tensors()), difflora.load(tensors())
    assert one.name.startswith("lora_") and one.name != two.name
    named = write(tmp_path / "x.safetensors", metadata={"ss_output_name": "neon"})
    assert difflora.load(named).aliases == ("neon",)


def peft_folder(folder: Path, **config: Any) -> Path:
    write(folder / "adapter_model.safetensors", tensors("base_model.model."))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, **config}))
    return folder


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 8}, 4.0),
        ({"lora_alpha": 0.5}, 0.25),
        ({"lora_alpha": 8, "use_rslora": True}, 8 / 2**0.5),
        ({"lora_alpha": 8, "alpha_pattern": {"attn.to_q": 2}}, 1.0),
        ({"lora_alpha": 8, "alpha_pattern": {"to_k": 2}}, 4.0),
        ({"lora_alpha": 8, "alpha_pattern": {"^transformer_blocks.0.attn.to_q": 6}}, 3.0),
        ({"lora_alpha": 8, "r": 16, "rank_pattern": {"to_q": 2}}, 4.0),
    ],
)
def test_a_peft_folder_is_read_with_its_config(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    adapter = difflora.load(peft_folder(tmp_path / "x", **config), family="flux")
    torch.testing.assert_close(delta(adapter), torch.full((4, 4), 2.0 * scale))


def test_alpha_of_the_header_counts_where_no_tensor_says_otherwise(tmp_path: Path) -> None:
    content = {**tensors(), **{k.replace("to_q", "to_k"): v.clone() for k, v in tensors().items()}}
    content[f"transformer.{STEM}.alpha"] = torch.tensor(2.0)
    header = {"transformer.lora_alpha": "8", "transformer.r": "2"}
    found = difflora.load(write(tmp_path / "x.safetensors", content, header)).components["transformer"]
    assert (found[STEM].scale, found[STEM.replace("to_q", "to_k")].scale) == (1.0, 4.0)
    nested = {"lora_adapter_metadata": json.dumps({"transformer.r": 2, "transformer.lora_alpha": 6})}
    assert difflora.load(write(tmp_path / "y.safetensors", None, nested)).components["transformer"][STEM].scale == 3.0


def test_kohya_metadata_is_never_applied_on_top(tmp_path: Path) -> None:
    header = {"ss_network_alpha": "1", "ss_network_dim": "2"}
    assert difflora.load(write(tmp_path / "x.safetensors", None, header)).components["transformer"][STEM].scale == 1.0


@pytest.mark.parametrize(
    "alpha", [torch.tensor(1.0), torch.tensor([1.0]), torch.tensor(1), torch.tensor(1.0).bfloat16()]
)
def test_alpha_tensors_of_every_form(alpha: torch.Tensor) -> None:
    adapter = difflora.load({**tensors(rank=4), f"transformer.{STEM}.alpha": alpha})
    torch.testing.assert_close(delta(adapter), torch.ones(4, 4))


def test_mixed_ranks_without_alpha_run_at_scale_one_in_any_order() -> None:
    content = {**tensors(rank=2), **{k.replace("to_q", "to_k"): v for k, v in tensors(rank=4).items()}}
    for ordered in (content, dict(reversed(content.items()))):
        found = difflora.load(ordered).components["transformer"]
        assert {path: d.scale for path, d in found.items()} == {STEM: 1.0, STEM.replace("to_q", "to_k"): 1.0}


def test_several_files_in_a_folder_are_listed_with_what_to_pass(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors")
    write(tmp_path / "b.safetensors")
    write(tmp_path / "optimizer.safetensors")
    with pytest.raises(DiffLoRAError, match=r"weight_name='a.safetensors'.*weight_name='b.safetensors'") as caught:
        difflora.load(tmp_path)
    assert "optimizer" not in str(caught.value)
    assert difflora.load(tmp_path, weight_name="b.safetensors").name == "b"
    write(tmp_path / "pytorch_lora_weights.safetensors")
    assert difflora.load(tmp_path).path == str(tmp_path / "pytorch_lora_weights.safetensors")


def test_a_pickle_is_never_chosen_unasked() -> None:
    assert choose(["x.bin", "y.safetensors"], None, "here", pickle=True) == "y.safetensors"
    with pytest.raises(DiffLoRAError, match=r"x.bin are pickles"):
        choose(["x.bin"], None, "here", pickle=False)
    assert choose(["x.bin"], None, "here", pickle=True) == "x.bin"


def cached_repository(root: Path, repo: str, files: dict[str, dict[str, torch.Tensor] | str]) -> Path:
    """A repository as huggingface_hub keeps it after a download."""
    home = root / f"models--{repo.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("c0ffee")
    for name, content in files.items():
        target = home / "snapshots" / "c0ffee" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            target.write_text(content)
        else:
            write(target, content)
    return root


def test_a_hub_repository_loads_offline_from_the_cache(tmp_path: Path) -> None:
    cache = cached_repository(tmp_path, "me/style", {"style.safetensors": tensors(), "sub/deep.safetensors": tensors()})
    options = {"cache_dir": cache, "local_files_only": True}
    assert difflora.load("me/style", **options).name == "style"
    assert difflora.load("me/style:sub/deep.safetensors", **options).name == "deep"
    assert difflora.load("me/style/sub", **options).name == "deep"
    assert difflora.load("me/style", subfolder="sub", **options).name == "deep"
    assert difflora.load("me/style:style.safetensors@main", **options).name == "style"
    with pytest.raises(DiffLoRAError, match=r"'me/style' could not be read"):
        difflora.load("me/style@v9", **options)
    with pytest.raises(DiffLoRAError, match=r"'me/absent' could not be read"):
        difflora.load("me/absent", **options)


def test_a_peft_repository_brings_its_config(tmp_path: Path) -> None:
    config = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8})
    files = {"adapter_model.safetensors": tensors("base_model.model."), "adapter_config.json": config}
    adapter = difflora.load(
        "me/peft", family="flux", cache_dir=cached_repository(tmp_path, "me/peft", files), local_files_only=True
    )
    assert adapter.name == "peft"
    assert adapter.components["transformer"][STEM].scale == 4.0


def test_revision_subfolder_and_token_reach_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "x.safetensors")
    asked: dict[str, Any] = {}

    def listing(self: Any, repo: str, revision: str | None = None) -> list[str]:
        asked["listing"] = (repo, revision, self.token)
        return ["other.safetensors", "sub/x.safetensors"]

    def download(repo: str, name: str, **options: Any) -> str:
        asked["download"] = (repo, name, options["subfolder"], options["revision"], options["token"])
        return str(file)

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", listing)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    place = locate("me/repo", hub=Hub(subfolder="sub", revision="v2", token="secret"))
    assert place.file == file
    assert asked["listing"] == ("me/repo", "v2", "secret")
    assert asked["download"] == ("me/repo", "x.safetensors", "sub", "v2", "secret")


def test_a_state_dict_is_not_changed_and_not_kept(flux: Any) -> None:
    import tiny

    given = tiny.lora_dict(flux.transformer, [STEM])
    before = {key: value.clone() for key, value in given.items()}
    difflora.attach(flux).load_lora(given, name="x")
    first = flux.transformer.get_submodule(STEM).weight.detach().clone()
    assert given.keys() == before.keys() and all(torch.equal(given[k], before[k]) for k in given)
    for value in given.values():
        value.zero_()
    flux.set_loras({})
    flux.set_loras({"x": 1.0})
    assert torch.equal(flux.transformer.get_submodule(STEM).weight, first)


def test_a_file_may_be_replaced_while_its_adapter_is_loaded(flux: Any, tmp_path: Path) -> None:
    import tiny

    file = write(tmp_path / "x.safetensors", tiny.lora_dict(flux.transformer, [STEM]))
    difflora.attach(flux).load_lora(file)
    first = flux.transformer.get_submodule(STEM).weight.detach().clone()
    file.write_bytes(b"\0" * 100)
    flux.set_loras({})
    flux.set_loras({"x": 1.0})
    assert torch.equal(flux.transformer.get_submodule(STEM).weight, first)


def test_bundled_adapters_load_by_name() -> None:
    from difflora.demo import ADAPTERS

    for name in ADAPTERS:
        assert difflora.load(name).name == name


def test_a_missing_file_of_a_folder_that_is_here_is_not_sought_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def listing(self: Any, repo: str, revision: str | None = None) -> list[str]:
        asked.append(repo)
        return []

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", listing)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loras").mkdir()
    with pytest.raises(DiffLoRAError, match="loras/nope@main asks the Hub"):
        locate("loras/nope")
    assert not asked
    for source in ("loras/nope@main", "user/nope"):
        with pytest.raises(DiffLoRAError, match="on the Hub holds no"):
            locate(source)
    assert asked == ["loras/nope", "user/nope"]


def test_one_folder_may_be_given_without_a_list(tmp_path: Path) -> None:
    save_file({"a.lora_A.weight": torch.ones(1, 2)}, tmp_path / "x.safetensors")
    assert locate("x", str(tmp_path)).file == tmp_path / "x.safetensors"
