"""How merged switches use the kernel, with plain torch in its place: the flags, the checksums and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import test_tables as tables
import tiny
import torch

import difflora
from difflora import merge, surface
from difflora.kernels import merging, ops

pytest.importorskip("triton")


def plainly(jobs: Sequence[merging.Job]) -> merging.Told:
    flags, sums = [], []
    for job in jobs:
        flat = job.base.float().reshape(job.base.shape[0], -1).clone()
        for part in job.parts:
            flat[part.start : part.stop] += part.scale * part.b.float() @ part.a.float()
        job.weight.data.copy_(flat.view(job.base.shape))
        flags.append(int(not torch.isfinite(job.weight).all()))
        sums.append(merging.checksum(job.base))
    return merging.Told(torch.tensor(flags), torch.tensor(sums))


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ops, "kernels_for", lambda device: True)
    monkeypatch.setattr(merging, "merge", plainly)
    made = difflora.attach(tiny.flux_pipeline())
    for n, rank in enumerate((3, 17)):
        made.load_lora(tables.adapter(made.transformer, rank, n), name=f"r{rank}", weight=0.0, mode="merged")
    return made


def weights(pipe: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in pipe.transformer.state_dict().items()}


def test_it_is_what_one_weight_at_a_time_gives(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base = weights(pipe)
    pipe.set_loras({"r3": 0.5, "r17": -1.0})
    together = weights(pipe)
    pipe.set_loras({})
    assert all(torch.equal(tensor, base[name]) for name, tensor in weights(pipe).items())
    monkeypatch.setattr(merge, "job", lambda *given: None)
    pipe.set_loras({"r3": 0.5, "r17": -1.0})
    for name, tensor in weights(pipe).items():
        torch.testing.assert_close(tensor, together[name], atol=1e-6, rtol=1e-5)
    assert any(not torch.equal(tensor, base[name]) for name, tensor in together.items())


def test_a_raised_flag_rolls_the_switch_back(pipe: Any) -> None:
    base = weights(pipe)
    large = {key: tensor * 1e6 for key, tensor in tables.adapter(pipe.transformer, 2, 9).items()}
    pipe.load_lora(large, name="large", weight=0.0, mode="merged")
    pipe.set_loras({"r3": 0.5})
    before = weights(pipe)
    with pytest.raises(difflora.DiffLoRAError, match="not finite"):
        pipe.set_loras({"r3": 0.5, "large": 3e38})
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(pipe).items())
    pipe.unload_loras()
    assert all(torch.equal(tensor, base[name]) for name, tensor in weights(pipe).items())


def test_a_changed_copy_is_noticed(pipe: Any) -> None:
    pipe.set_loras({"r3": 0.5})
    site = next(iter(surface.engine_behind(pipe).executor.sites.values()))
    site.base.view(-1)[0] += 1
    with pytest.raises(difflora.DiffLoRAError, match=r"pristine copy .* was changed"):
        pipe.set_loras({"r3": 0.6})


def test_samples_are_those_of_each_weight() -> None:
    given = [torch.randn(5), torch.randn(90, 100).half(), torch.randn(300, 50)]
    assert all(torch.equal(one, merge.sample(two)) for one, two in zip(merge.samples(given), given, strict=True))
