"""Every kind at any strength: additive ones are W + s D, functions of the base W + s (W' - W); sums start from W."""

from __future__ import annotations

from typing import Any

import pytest
import support
import tiny
import torch

import difflora

Q = "transformer_blocks.0.attn.to_q"
ADDITIVE = {"LoRA", "LoHa", "LoKr", "differences of weights and biases", "LoRA bias"}


def tensors(kind: str) -> dict[str, torch.Tensor]:
    return support.KINDS[kind](f"transformer.{Q}", 32, 32)


def changes(kind: str, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the kind does to the weight, and to the bias, at strength 1."""
    deltas = difflora.load(tensors(kind)).components["transformer"]
    assert all(delta.needs_base == (kind not in ADDITIVE) for delta in deltas.values())
    names = {path: path if path.endswith(".bias") else f"{path}.weight" for path in deltas}
    return {names[path]: delta.dense(base[names[path]]) for path, delta in deltas.items()}


@pytest.mark.parametrize("strength", [-0.5, 0.0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("kind", support.KINDS)
def test_one_kind_at_any_strength(kind: str, strength: float) -> None:
    pipe = tiny.flux_pipeline()
    base = {key: value.clone() for key, value in pipe.transformer.state_dict().items()}
    difflora.attach(pipe)
    pipe.load_lora(tensors(kind), strength, name="x")
    found = pipe.transformer.state_dict()
    wanted = {**base, **{k: base[k] + strength * change for k, change in changes(kind, base).items()}}
    for key in base:
        torch.testing.assert_close(found[key], wanted[key], atol=1e-5, rtol=1e-5)
        assert torch.equal(found[key], base[key]) == (strength == 0.0 or key not in changes(kind, base))
    pipe.unload_loras()
    assert all(torch.equal(value, base[key]) for key, value in pipe.transformer.state_dict().items())


@pytest.mark.parametrize("other", ["LoRA", "DoRA", "IA3", "OFT v2", "replaced weights"])
@pytest.mark.parametrize("kind", ["LoKr", "DoRA by input", "GLoRA", "BOFT", "differences of weights and biases"])
def test_two_kinds_on_one_weight_both_start_from_the_base(kind: str, other: str) -> None:
    found: list[Any] = []
    for order in ((kind, other), (other, kind)):
        pipe = tiny.flux_pipeline()
        base = {key: value.clone() for key, value in pipe.transformer.state_dict().items()}
        difflora.attach(pipe)
        for name in order:
            pipe.load_lora(tensors(name), 0.7 if name == kind else -0.4, name=name.replace(",", ""))
        found.append(pipe.transformer.get_submodule(Q).weight.detach().clone())
        pipe.unload_loras()
        assert torch.equal(pipe.transformer.get_submodule(Q).weight, base[f"{Q}.weight"])
    key = f"{Q}.weight"
    wanted = base[key] + 0.7 * changes(kind, base)[key] - 0.4 * changes(other, base)[key]
    for weight in found:
        torch.testing.assert_close(weight, wanted, atol=1e-5, rtol=1e-5)
