"""Every kind of delta equals the forward pass of LyCORIS, from the tensors that LyCORIS saves.

Its merge is no oracle: it scales LoHa and LoKr twice.  `alpha` differs from the rank and sizes are odd throughout, so
that a forgotten scale, a swapped axis or a wrong reshape shows.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lycoris.modules.boft import ButterflyOFTModule
from lycoris.modules.diag_oft import DiagOFTModule
from lycoris.modules.glora import GLoRAModule
from lycoris.modules.ia3 import IA3Module
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from lycoris.modules.norms import NormModule
from torch import Tensor, nn

from difflora.formats.layouts import LEAVES
from difflora.kinds import build

if TYPE_CHECKING:
    from difflora.kinds import Delta

logging.getLogger("LyCORIS").setLevel(logging.ERROR)


def layer(name: str) -> nn.Module:
    """A layer of odd sizes: rows, columns and kernel sides all differ."""
    torch.manual_seed(3)
    return {
        "linear": lambda: nn.Linear(15, 24),
        "square": lambda: nn.Linear(12, 12),
        "conv": lambda: nn.Conv2d(10, 12, (3, 2), padding=1, stride=2),
        "pointwise": lambda: nn.Conv2d(10, 12, 1),
        "conv1d": lambda: nn.Conv1d(10, 12, 3),
        "conv3d": lambda: nn.Conv3d(12, 24, (2, 3, 1)),
    }[name]()


def example(module: nn.Module) -> Tensor:
    """An input of the layer."""
    torch.manual_seed(4)
    if isinstance(module, nn.Linear):
        return torch.randn(7, module.in_features)
    channels, spatial = module.weight.shape[1], module.weight.ndim - 2
    return torch.randn(2, channels, *(5,) * spatial)


def randomised(module: nn.Module, spread: float) -> nn.Module:
    """The same module with random numbers in every trained parameter, also those that start as zeros."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("dora_scale", "rescale")):
                parameter.mul_(1 + 0.5 * torch.rand_like(parameter))
            else:
                parameter.normal_(0, spread)
    return module.eval()


def delta_of(state: dict[str, Tensor]) -> Delta:
    """The delta that the keys of one module make, by the endings that the formats know."""
    found = {key: LEAVES[key] for key in state}
    kind = next(leaf.kind for leaf in found.values() if leaf.kind)
    return build(kind, {leaf.role: state[key].detach() for key, leaf in found.items()})


@torch.no_grad()
def changes(given: nn.Module, delta: Delta, x: Tensor) -> Tensor:
    """What the layer computes with its weight changed by the delta, less what it computes without."""
    before, weight = given(x), given.weight.detach()
    change = delta.dense(weight)
    assert change.dtype == torch.float32
    given.weight.data = weight + change.reshape(weight.shape)
    after = given(x)
    given.weight.data = weight
    return after - before


def check(cls: type[Any], given: nn.Module, spread: float = 0.3, **arguments: Any) -> Delta:
    x = example(given)
    adapter = randomised(cls("", given, multiplier=1.0, **arguments), spread)
    with torch.no_grad():
        want = adapter(x) - given(x)
    delta = delta_of(dict(adapter.state_dict()))
    got = changes(given, delta, x)
    assert want.abs().max() > 0.03, "the oracle changes too little to tell anything"
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    return delta


LAYERS = ("linear", "square", "conv", "pointwise", "conv1d", "conv3d")


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("tucker", [False, True], ids=["plain", "tucker"])
@pytest.mark.parametrize("cls", [LoConModule, LohaModule, LokrModule], ids=["locon", "loha", "lokr"])
def test_additive_kinds(cls: type[Any], tucker: bool, name: str) -> None:
    delta = check(cls, layer(name), lora_dim=2, alpha=3.0, use_tucker=tucker, factor=2)
    assert (delta.rank, delta.scale, delta.needs_base, delta.joined) == (2, 1.5, False, False)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("on_output", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize("cls", [LoConModule, LohaModule, LokrModule], ids=["locon", "loha", "lokr"])
def test_decomposed_kinds(cls: type[Any], on_output: bool, name: str) -> None:
    delta = check(cls, layer(name), lora_dim=2, alpha=3.0, factor=2, weight_decompose=True, wd_on_out=on_output)
    assert delta.kind.startswith("dora+") and delta.needs_base and delta.rank == 2 and delta.scale == 1.5


@pytest.mark.parametrize("cls", [LoConModule, LohaModule], ids=["locon", "loha"])
def test_decomposed_kinds_with_a_core(cls: type[Any]) -> None:
    check(cls, layer("conv"), lora_dim=2, alpha=3.0, weight_decompose=True, use_tucker=True)


@pytest.mark.parametrize("name", ["linear", "conv"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"lora_dim": 1, "factor": 4, "decompose_both": True, "alpha": 2.0},
        {"lora_dim": 3, "factor": 2, "unbalanced_factorization": True, "alpha": 2.0},
        {"lora_dim": 3, "full_matrix": True, "alpha": 7.0},
        {"lora_dim": 1000, "alpha": 5.0},
        {"lora_dim": 2, "factor": 2, "alpha": 5.0, "rs_lora": True},
    ],
    ids=["both-factored", "larger-first", "full", "too-wide", "rslora"],
)
def test_kronecker_factors_of_every_form(arguments: dict[str, Any], name: str) -> None:
    check(LokrModule, layer(name), **arguments)


def test_two_whole_kronecker_factors_ignore_any_alpha() -> None:
    w1, w2 = torch.randn(2, 3), torch.randn(4, 5)
    delta = build("lokr", {"w1": w1, "w2": w2, "alpha": torch.tensor(64.0)})
    assert (delta.scale, delta.rank, delta.shape) == (1.0, 0, (8, 15))
    torch.testing.assert_close(delta.dense(), torch.kron(w1, w2))


@pytest.mark.parametrize("cls", [LoConModule, LohaModule], ids=["locon", "loha"])
def test_an_alpha_that_lycoris_stores_for_rslora_is_right_as_it_is(cls: type[Any]) -> None:
    delta = check(cls, layer("linear"), lora_dim=4, alpha=3.0, rs_lora=True)
    assert delta.scale == pytest.approx(3.0 / 2.0)


@pytest.mark.parametrize("name", LAYERS)
def test_glora(name: str) -> None:
    delta = check(GLoRAModule, layer(name), lora_dim=2, alpha=3.0)
    assert (delta.kind, delta.rank, delta.scale, delta.needs_base) == ("glora", 2, 1.5, True)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("on_input", [True, False], ids=["columns", "rows"])
def test_ia3(on_input: bool, name: str) -> None:
    given = layer(name)
    delta = check(IA3Module, given, train_on_input=on_input)
    rows, columns = given.weight.shape[:2]
    assert delta.shape == ((0, columns) if on_input else (rows, 0))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("rescaled", [False, True], ids=["plain", "rescaled"])
@pytest.mark.parametrize("constraint", [0, 0.01, 5.0], ids=["free", "bound", "loose"])
@pytest.mark.parametrize("cls", [DiagOFTModule, ButterflyOFTModule], ids=["oft", "boft"])
def test_rotations_of_rows(cls: type[Any], constraint: float, rescaled: bool, name: str) -> None:
    spread = 1.0 if constraint == 0.01 else 0.3
    delta = check(cls, layer(name), spread, lora_dim=6, constraint=constraint, rescaled=rescaled)
    assert delta.kind == ("oft" if cls is DiagOFTModule else "boft")
    assert (delta.rank, delta.scale, delta.shape[0]) == (0, 1.0, layer(name).weight.shape[0])


def test_norm_layers() -> None:
    norm = nn.LayerNorm(9)
    torch.nn.init.normal_(norm.weight)
    adapter = randomised(NormModule("", norm, multiplier=1.0), 0.3)
    state = {key: value.detach() for key, value in adapter.state_dict().items()}
    weight, bias = (build("diff", {"diff": state[key]}) for key in ("w_norm", "b_norm"))
    x = torch.randn(5, 9)
    want = adapter(x)
    changed = nn.functional.layer_norm(x, (9,), norm.weight + weight.dense(), norm.bias + bias.dense())
    torch.testing.assert_close(changed, want)
