"""What `inspect` reports, against numbers computed from the dense deltas; the grid by its pixels."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from difflora.deltas import LowRank
from difflora.formats.errors import DiffLoRAError
from difflora.tools import grid, inspect, inspect_adapter
from difflora.types import Adapter

torch.manual_seed(0)
FUSED = LowRank(torch.randn(3, 8), torch.randn(24, 3), alpha=torch.tensor(1.5))
DELTAS = {
    "transformer": {
        "transformer_blocks.0.attn.to_q": FUSED.rows([(0, 8)]),
        "transformer_blocks.0.attn.to_k": FUSED.rows([(8, 16)]),
        "transformer_blocks.11.ff.net.0.proj": LowRank(torch.randn(4, 8).half(), torch.randn(6, 4).half()),
        "proj_out": LowRank(torch.randn(3, 8), torch.randn(5, 3), alpha=6.0, rslora=True),
    },
    "text_encoder": {
        "text_model.encoder.layers.1.mlp.fc1": LowRank(
            torch.randn(2, 4, 1, 1), torch.randn(6, 2, 1, 1), mid=torch.randn(2, 2, 3, 3), alpha=2.0
        ),
    },
}
ADAPTER = Adapter("x", "x", "kohya", "flux", DELTAS, {"modelspec.trigger_phrase": "zz"}, notes=("a note",))


def test_counts_are_of_modules_and_each_tensor_counts_once() -> None:
    found = inspect_adapter(ADAPTER)
    assert (found.source, found.name, found.layout, found.family) == ("x", "x", "kohya", "flux")
    assert found.components == {"transformer": 4, "text_encoder": 1}
    assert found.kinds == {"lora": 4, "tucker": 1}
    assert found.ranks == ((2, 1), (3, 3), (4, 1))
    assert found.alphas == ((1.5, 2), (2.0, 1), (6.0, 1), (None, 1))
    floats = 3 * 8 + 24 * 3 + 1 + 3 * 8 + 5 * 3 + 2 * 4 + 6 * 2 + 2 * 2 * 9
    assert found.dtypes == {"float32": floats, "float16": 4 * 8 + 6 * 4}
    assert found.size == 4 * floats + 2 * (4 * 8 + 6 * 4)
    assert (found.hashes, found.bad, found.notes) == (None, (), ("a note",))
    assert (found.triggers.words, found.triggers.source) == (("zz",), "modelspec.trigger_phrase")


def test_norms_are_those_of_the_dense_change_per_block() -> None:
    def norm(component: str, *paths: str) -> float:
        return math.sqrt(sum(float(DELTAS[component][path].dense().double().square().sum()) for path in paths))

    assert inspect_adapter(ADAPTER).norms == pytest.approx(
        {
            "transformer.transformer_blocks.0": norm(
                "transformer", "transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k"
            ),
            "transformer.transformer_blocks.11": norm("transformer", "transformer_blocks.11.ff.net.0.proj"),
            "transformer.proj_out": norm("transformer", "proj_out"),
            "text_encoder.text_model.encoder.layers.1": norm("text_encoder", "text_model.encoder.layers.1.mlp.fc1"),
        },
        rel=1e-6,
    )


def test_a_change_that_cancels_has_norm_zero() -> None:
    row, column = torch.randn(1, 64), torch.randn(64, 1)
    delta = LowRank(torch.cat([row, row]), torch.cat([column, -column], dim=1) * 1000)
    assert inspect_adapter(replace(ADAPTER, components={"unet": {"a.0": delta}})).norms == {"unet.a.0": 0.0}


def test_the_sign_of_alpha_does_not_matter_to_the_norm() -> None:
    delta = LowRank(torch.ones(1, 2), torch.ones(3, 1), alpha=-2.0)
    found = inspect_adapter(replace(ADAPTER, components={"unet": {"a.0": delta}}))
    assert found.norms["unet.a.0"] == pytest.approx(2 * math.sqrt(6))


def test_bad_values_are_named_once_each() -> None:
    whole = LowRank(torch.tensor([[math.nan, 1.0]]), torch.ones(4, 1))
    deltas = {
        "a.0.q": whole.rows([(0, 2)]),
        "a.0.k": whole.rows([(2, 4)]),
        "a.1": LowRank(torch.ones(1, 2), torch.full((2, 1), math.inf), alpha=torch.tensor(math.nan)),
        "a.2": LowRank(torch.ones(1, 2).to(torch.float8_e4m3fn), torch.ones(2, 1)),
    }
    found = inspect_adapter(replace(ADAPTER, components={"unet": deltas}))
    assert found.bad == ("unet.a.0.q.down", "unet.a.1.up", "unet.a.1.alpha")
    assert found.as_dict()["norms"] == {"unet.a.0": None, "unet.a.1": None, "unet.a.2": pytest.approx(2.0)}
    json.dumps(found.as_dict(), allow_nan=False)


def test_meta_tensors_have_shapes_only() -> None:
    delta = LowRank(
        torch.ones(3, 2, device="meta"), torch.ones(2, 3, device="meta"), alpha=torch.ones((), device="meta")
    )
    found = inspect_adapter(replace(ADAPTER, components={"unet": {"a.0": delta}}))
    assert (found.ranks, found.alphas, found.norms, found.bad) == (((3, 1),), (), {}, ())


def test_as_dict_is_json_with_every_part() -> None:
    data = json.loads(json.dumps(inspect_adapter(ADAPTER).as_dict(), allow_nan=False))
    assert data["ranks"] == [[2, 1], [3, 3], [4, 1]]
    assert data["kinds"] == {"lora": 4, "tucker": 1}
    assert data["alphas"][-1] == [None, 1]
    assert data["triggers"] == {"words": ["zz"], "source": "modelspec.trigger_phrase", "common": [], "notes": []}
    assert data["metadata"] == {"modelspec.trigger_phrase": "zz"}
    assert data["hashes"] is None


def _file(path: Path) -> dict[str, torch.Tensor]:
    stem = "transformer.transformer_blocks.0.attn.to_q"
    tensors = {f"{stem}.lora_A.weight": torch.randn(4, 32), f"{stem}.lora_B.weight": torch.randn(16, 4)}
    save_file(tensors, path, {"ss_output_name": "other"})
    return tensors


def test_inspect_reads_a_file(tmp_path: Path) -> None:
    file = tmp_path / "style.safetensors"
    down, up = _file(file).values()
    file.with_suffix(".json").write_text('{"activation text": "in style"}')
    file.with_suffix(".civitai.info").write_text("broken")
    found = inspect(file, family="flux")
    assert (found.name, found.size, found.components) == ("style", file.stat().st_size, {"transformer": 1})
    assert found.hashes is not None
    assert found.hashes.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert found.norms == pytest.approx({"transformer.transformer_blocks.0": float((up @ down).norm())}, rel=1e-5)
    assert found.triggers.words == ("in style",)
    assert "style.civitai.info beside the file is not a JSON object; not used" in found.notes
    assert inspect("style", folders=(tmp_path,), family="flux").hashes == found.hashes


def test_inspect_of_a_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DiffLoRAError, match=r"none\.safetensors"):
        inspect(tmp_path / "none.safetensors")


def test_grid_places_pictures_right_of_row_labels_and_below_column_labels() -> None:
    colours = [[(255, 0, 0), (0, 255, 0), (0, 0, 255)], [(9, 9, 0), (0, 9, 9), (9, 0, 9)]]
    images = [[Image.new("RGB", (40, 30), colour) for colour in row] for row in colours]
    sheet = grid(images, ["a red circle", "b"], ["base", "x", "y"], zoom=2)
    found = {colour: count for count, colour in sheet.getcolors(1 << 20)}
    pixels = {colour: _corner(sheet, colour) for row in colours for colour in row}
    assert {found[colour] for colour in pixels} == {80 * 60}
    assert [pixels[c][1] for c in colours[0]] == [pixels[colours[0][0]][1]] * 3
    assert pixels[colours[0][0]][0] == pixels[colours[1][0]][0]
    assert pixels[colours[0][0]][0] < pixels[colours[0][1]][0] < pixels[colours[0][2]][0]
    assert pixels[colours[1][0]][1] >= pixels[colours[0][0]][1] + 60
    left, top = pixels[colours[0][0]]
    assert _has_ink(sheet.crop((0, top, left, top + 60)))
    assert _has_ink(sheet.crop((left, 0, left + 80, top)))


def _corner(sheet: Image.Image, colour: tuple[int, int, int]) -> tuple[int, int]:
    return next((x, y) for y in range(sheet.height) for x in range(sheet.width) if sheet.getpixel((x, y)) == colour)


def _has_ink(part: Image.Image) -> bool:
    return part.convert("L").getextrema()[0] < 64
