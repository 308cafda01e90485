"""Headers that are rewritten leave the tensors alone; a check names what is wrong with a file, and nothing else."""

from __future__ import annotations

import json
import re
import struct
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from difflora import load, tools
from difflora.formats.errors import DiffLoRAError
from difflora.tools import metadata_of, set_metadata, strip_metadata, verify

STEM = "lora_unet_double_blocks_0_img_attn_proj"


def tensors(count: int = 3, columns: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for i in range(count):
        stem = STEM.replace("blocks_0", f"blocks_{i}")
        found[f"{stem}.lora_down.weight"] = torch.randn(4, columns, generator=generator)
        found[f"{stem}.lora_up.weight"] = torch.randn(8, 4, generator=generator).half()
        found[f"{stem}.alpha"] = torch.tensor(2.0)
    return found


def written(path: Path, metadata: dict[str, str] | None = None, held: dict[str, Tensor] | None = None) -> Path:
    safetensors.torch.save_file(held or tensors(), path, metadata)
    return path


def data_of(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 + struct.unpack("<Q", data[:8])[0] :]


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


# --- metadata


def test_setting_changes_the_header_alone(tmp_path: Path) -> None:
    file = written(tmp_path / "x.safetensors", {"a": "1", "b": "2"})
    before, entries = data_of(file), {k: v for k, v in header_of(file).items() if k != "__metadata__"}
    found = set_metadata(file, {"b": "é\n", "c": "x" * 5000}, force=True)
    assert found == metadata_of(file) == {"a": "1", "b": "é\n", "c": "x" * 5000}
    assert data_of(file) == before and {k: v for k, v in header_of(file).items() if k != "__metadata__"} == entries
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == found
        assert all(torch.equal(opened.get_tensor(key), value) for key, value in tensors().items())
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_file_is_changed_in_place_only_by_force(tmp_path: Path) -> None:
    file = written(tmp_path / "x.safetensors", {"a": "1"})
    before = file.read_bytes()
    with pytest.raises(DiffLoRAError, match="exists"):
        set_metadata(file, {"a": "2"})
    assert set_metadata(file, {"a": "2"}, force=True, dry_run=True) == {"a": "2"}
    assert set_metadata(file, {"a": "2"}, tmp_path / "y.safetensors") == {"a": "2"}
    assert file.read_bytes() == before and metadata_of(tmp_path / "y.safetensors") == {"a": "2"}
    for values in ({}, {"": "x"}, {"a": 1}):
        with pytest.raises(DiffLoRAError, match="KEY=VALUE"):
            set_metadata(file, values, force=True)  # type: ignore[arg-type]
    assert file.read_bytes() == before


def test_types_that_torch_has_not_are_copied_too(tmp_path: Path) -> None:
    header = {"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\x12\x34")
    set_metadata(tmp_path / "x.safetensors", {"a": "b"}, force=True)
    assert data_of(tmp_path / "x.safetensors") == b"\x12\x34"
    assert header_of(tmp_path / "x.safetensors") == {"__metadata__": {"a": "b"}, **header}


def test_stripping_keeps_what_is_named_and_what_readers_need(tmp_path: Path) -> None:
    file = written(
        tmp_path / "x.safetensors", {"ss_tag_frequency": "{}", "ss_dim": "4", "lora_alpha": "2", "format": "pt"}
    )
    assert strip_metadata(file, ["ss_dim"], force=True) == {"ss_dim": "4", "lora_alpha": "2", "format": "pt"}
    assert metadata_of(file) == {"ss_dim": "4", "lora_alpha": "2", "format": "pt"}
    with pytest.raises(DiffLoRAError, match=r"no metadata nope; it has format, lora_alpha, ss_dim"):
        strip_metadata(file, ["nope"], force=True)


def test_a_stripped_adapter_acts_as_before(tmp_path: Path) -> None:
    one = load(tensors(), family="flux")
    file = one.save(tmp_path / "x.safetensors", metadata={"ss_tag_frequency": "{}"})
    strip_metadata(file, force=True)
    assert "ss_tag_frequency" not in metadata_of(file)
    path = "transformer_blocks.0.attn.to_out.0"
    read = load(file, family="flux").components["transformer"][path]
    assert torch.equal(read.dense(), one.components["transformer"][path].dense()) and read.scale == 0.5


def test_the_legacy_hash_follows_the_fields_that_it_is_of(tmp_path: Path) -> None:
    held = tensors(12, columns=30000)
    trained = safetensors.torch.save(held, {"ss_a": "1"})
    claims = {
        "sshs_model_hash": sha256(trained[8 + struct.unpack("<Q", trained[:8])[0] :]).hexdigest(),
        "sshs_legacy_hash": sha256(trained[0x100000:0x110000]).hexdigest()[:8],
    }
    file = written(tmp_path / "x.safetensors", {**claims, "ss_a": "1"}, held)
    assert verify(file, family="flux").remarks == ()
    assert set_metadata(file, {"other": "y" * 99}, force=True).items() >= claims.items()
    found = set_metadata(file, {"ss_a": "z" * 99}, force=True)
    again = safetensors.torch.save(held, {"ss_a": "z" * 99})
    assert found["sshs_legacy_hash"] == sha256(again[0x100000:0x110000]).hexdigest()[:8] != claims["sshs_legacy_hash"]
    assert found["sshs_model_hash"] == claims["sshs_model_hash"]
    assert verify(file, family="flux").remarks == ()
    mine = {"sshs_legacy_hash": "mine", "ss_a": "other"}
    assert set_metadata(file, mine, force=True)["sshs_legacy_hash"] == "mine"


# --- verify


def test_a_sound_file_has_neither_problems_nor_remarks(tmp_path: Path) -> None:
    found = verify(written(tmp_path / "x.safetensors"), family="flux")
    assert found.ok and (found.problems, found.remarks) == ((), ())
    assert (found.layout, found.family, found.tensors, found.modules) == ("kohya", "flux", 9, 3)
    assert json.loads(json.dumps(found.as_dict()))["ok"] is True


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {f"{STEM}.lora_up.weight": torch.full((8, 4), float("nan"))},
            r"NaN or infinite values in 1 tensors: .*to_out\.0\.up",
        ),
        ({"nothing.known": torch.zeros(2)}, r"nothing\.known"),
        ({f"{STEM}.lora_up.weight": torch.zeros(8, 5)}, "do not fit together"),
        (
            {key: torch.zeros_like(value) for key, value in tensors().items() if "up" in key},
            "change of every module is zero",
        ),
    ],
)
def test_what_is_wrong_is_a_problem(change: dict[str, Tensor], words: str, tmp_path: Path) -> None:
    found = verify(written(tmp_path / "x.safetensors", held={**tensors(), **change}), family="flux")
    assert not found.ok and len(found.problems) == 1
    assert re.search(words, found.problems[0])


def test_a_broken_container_is_a_problem_and_no_file_an_error(tmp_path: Path) -> None:
    file = written(tmp_path / "x.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    assert "lies outside of it" in verify(file).problems[0] or "no whole safetensors" in verify(file).problems[0]
    with pytest.raises(DiffLoRAError, match="is no adapter"):
        verify(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("alpha", "words"), [(0.0, "is 0: they change nothing"), (-1.0, "is negative"), (999.0, "is above 64")]
)
def test_scales_that_are_odd_are_remarks(alpha: float, words: str, tmp_path: Path) -> None:
    found = verify(
        written(tmp_path / "x.safetensors", held={**tensors(), f"{STEM}.alpha": torch.tensor(alpha)}), family="flux"
    )
    assert (
        found.ok
        and f"the scale alpha / rank of 1 modules {words} (transformer.transformer_blocks.0" in found.remarks[0]
    )


def test_alphas_that_were_not_raised_with_the_rank_are_a_remark(tmp_path: Path) -> None:
    up = torch.block_diag(*(torch.randn(8, 2) for _ in range(3)))
    stem = "lora_unet_double_blocks_0_img_attn_qkv"
    held = {
        f"{stem}.lora_down.weight": torch.randn(6, 8),
        f"{stem}.lora_up.weight": up,
        f"{stem}.alpha": torch.tensor(2.0),
    }
    found = verify(written(tmp_path / "x.safetensors", held=held), family="flux")
    assert found.ok and "alpha of one part" in found.remarks[0]


def test_a_hash_of_other_tensors_is_a_problem(tmp_path: Path) -> None:
    file = written(tmp_path / "x.safetensors")
    claim = sha256(data_of(file)).hexdigest()
    right = written(tmp_path / "right.safetensors", {"sshs_model_hash": claim.upper()})
    assert verify(right, family="flux").ok
    other = {**tensors(), f"{STEM}.alpha": torch.tensor(3.0)}
    wrong = written(tmp_path / "wrong.safetensors", {"sshs_model_hash": claim}, other)
    assert verify(wrong, family="flux").problems == (
        "sshs_model_hash is not that of these tensors: they were changed, cast or renamed after training",
    )


@pytest.mark.parametrize("order", ["the file's", "names"])
def test_the_specification_s_hash_says_which_order_it_is_of(order: str, tmp_path: Path) -> None:
    held, whole = tensors(), sha256()
    for name in sorted(held):
        whole.update(held[name].numpy().tobytes())
    data = data_of(written(tmp_path / "x.safetensors"))
    claim = sha256(data).hexdigest() if order == "the file's" else whole.hexdigest()
    found = verify(written(tmp_path / "y.safetensors", {"modelspec.hash_sha256": f"0x{claim}"}), family="flux")
    want = {"the file's": "as they are stored", "names": "in the order of their names"}[order]
    assert found.ok and found.remarks == (f"modelspec.hash_sha256 is that of the tensors {want}",)
    found = verify(written(tmp_path / "z.safetensors", {"modelspec.hash_sha256": "0x00"}), family="flux")
    assert found.remarks == ("modelspec.hash_sha256 is that of these tensors in no order that is known",)


def test_what_we_write_is_sound_in_every_layout(tmp_path: Path) -> None:
    one = load(tensors(), family="flux")
    claims = {"sshs_model_hash": "old", "sshs_legacy_hash": "old"}
    for layout in ("diffusers", "kohya", "comfy"):
        found = verify(one.save(tmp_path / f"{layout}.safetensors", layout, metadata=claims), family="flux")
        assert (found.problems, found.remarks) == ((), ()), layout
    found = verify(one.save(tmp_path / "folder", "peft"), family="flux")
    assert (found.problems, found.remarks, found.layout) == ((), (), "peft")


def test_every_tool_is_reachable() -> None:
    assert all(callable(getattr(tools, name)) for name in tools.__all__)
    assert {"bake", "extract", "grid", "hashes", "inspect", "merge", "resize", "verify"} <= {*tools.__all__}
