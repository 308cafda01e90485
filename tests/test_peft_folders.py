"""PEFT folders: of several components, as `save` writes them, and of one text encoder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch

import difflora
from difflora import DiffLoRAError


def both() -> difflora.Adapter:
    pipe = tiny.flux_pipeline()
    tensors = tiny.lora_dict(pipe.transformer, ["transformer_blocks.0.attn.to_q", "proj_out"], alpha=6.0)
    tensors |= tiny.lora_dict(
        pipe.text_encoder, ["encoder.layers.0.mlp.fc1"], rank=2, prefix="text_encoder.", alpha=1.0
    )
    return difflora.load(tensors)


def test_several_components_are_read_as_they_were_written(tmp_path: Path) -> None:
    adapter = both()
    folder = adapter.save(tmp_path / "style", "peft")
    assert sorted(path.name for path in folder.iterdir()) == ["text_encoder", "transformer"]
    again = difflora.load(folder)
    assert (again.name, again.layout, again.components.keys()) == ("style", "peft", adapter.components.keys())
    for component, deltas in adapter.components.items():
        for path, delta in deltas.items():
            found = again.components[component][path]
            assert found.scale == delta.scale
            assert torch.equal(found.dense(), delta.dense())


@pytest.mark.parametrize("as_text", [True, False])
def test_one_component_of_it_is_sent_where_it_belongs(tmp_path: Path, as_text: bool) -> None:
    adapter = both()
    folder = adapter.save(tmp_path / "style", "peft") / "text_encoder"
    again = difflora.load(str(folder) if as_text else folder, component="text_encoder")
    assert again.components.keys() == {"text_encoder"}
    wanted = adapter.components["text_encoder"]["text_model.encoder.layers.0.mlp.fc1"]
    assert torch.equal(again.components["text_encoder"]["text_model.encoder.layers.0.mlp.fc1"].dense(), wanted.dense())


def test_a_pipeline_loads_the_folder(tmp_path: Path) -> None:
    pipe = tiny.flux_pipeline()
    base = tiny.run(pipe)
    difflora.attach(pipe)
    pipe.load_lora(both().save(tmp_path / "style", "peft"), 0.5)
    from_folder = tiny.run(pipe)
    pipe.unload_loras()
    assert torch.equal(tiny.run(pipe), base) and not torch.equal(from_folder, base)
    pipe.load_lora(both().save(tmp_path / "style.safetensors"), 0.5)
    torch.testing.assert_close(tiny.run(pipe), from_folder, atol=1e-6, rtol=1e-6)


def test_each_config_speaks_for_its_own_component(tmp_path: Path) -> None:
    folder = both().save(tmp_path / "style", "peft")
    config = folder / "text_encoder" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "r": 5}))
    with pytest.raises(
        DiffLoRAError, match=r"rank 5 for text_model.encoder.layers.0.mlp.fc1, but its tensors have rank 2"
    ):
        difflora.load(folder)
