"""Every kind of delta equals the forward pass of PEFT, from the tensors that PEFT saves and its config's scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn

from difflora.formats.errors import DiffLoRAError
from difflora.formats.layouts import LEAVES
from difflora.kinds import build

if TYPE_CHECKING:
    from difflora.kinds import Delta

LAYERS = {
    "linear": lambda: nn.Linear(18, 24),
    "square": lambda: nn.Linear(18, 18),
    "conv": lambda: nn.Conv2d(6, 12, (3, 2), padding=1),
    "pointwise": lambda: nn.Conv2d(6, 12, 1),
    "conv1d": lambda: nn.Conv1d(6, 12, 3),
    "conv3d": lambda: nn.Conv3d(6, 12, (2, 3, 1)),
    "embedding": lambda: nn.Embedding(11, 6),
}
INPUTS = {
    "linear": (5, 18),
    "square": (5, 18),
    "conv": (2, 6, 5, 5),
    "pointwise": (2, 6, 5, 5),
    "conv1d": (2, 6, 7),
    "conv3d": (1, 6, 4, 4, 4),
}


class Net(nn.Module):
    """One layer with a name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def trained(config: Any, name: str, spread: float = 0.3) -> tuple[Net, nn.Module, dict[str, Tensor], Tensor]:
    """(the plain net, PEFT's around a copy with random weights, what PEFT saves of it by role's ending, an input)."""
    torch.manual_seed(1)
    layer = LAYERS[name]()
    plain = Net(LAYERS[name]())
    plain.layer.load_state_dict(layer.state_dict())
    model = get_peft_model(Net(layer), config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "magnitude" in key:
                parameter.mul_(1 + 0.5 * torch.rand_like(parameter))
            elif parameter.requires_grad:
                parameter.normal_(0, spread)
    head = "base_model.model.layer."
    state = {key.removeprefix(head): value.detach() for key, value in get_peft_model_state_dict(model).items()}
    x = torch.randint(0, 11, (3, 4)) if name == "embedding" else torch.randn(*INPUTS[name])
    return plain, model, state, x


def deltas(state: dict[str, Tensor], **scaling: Any) -> dict[str, Delta]:
    """{"weight": ..., "bias": ...} from PEFT's endings."""
    found = {key: LEAVES[key if key in LEAVES else key.removesuffix(".weight")] for key in state}
    held = {leaf.role: state[key] for key, leaf in found.items() if not leaf.bias}
    kind = next(leaf.kind for leaf in found.values() if leaf.kind and not leaf.bias)
    made = {"weight": build(kind, held, **scaling)}
    for key, leaf in found.items():
        if leaf.bias:
            made["bias"] = build(leaf.kind, {leaf.role: state[key], "down": held["down"]}, **scaling)
    return made


@torch.no_grad()
def check(config: Any, name: str, spread: float = 0.3, **scaling: Any) -> dict[str, Delta]:
    plain, model, state, x = trained(config, name, spread)
    before, want = plain(x), model(x)
    made = deltas(state, **scaling)
    for parameter, delta in made.items():
        value = getattr(plain.layer, parameter)
        value += delta.dense(value.clone()).reshape(value.shape)
    assert (want - before).abs().max() > 0.03, "the oracle changes too little to tell anything"
    torch.testing.assert_close(plain(x), want, rtol=1e-4, atol=2e-5)
    return made


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rslora"])
def test_lora(rslora: bool, dora: bool, name: str) -> None:
    config = LoraConfig(r=4, lora_alpha=6, use_rslora=rslora, use_dora=dora, target_modules=["layer"])
    delta = check(config, name, alpha=6.0, rslora=rslora, rank=4)["weight"]
    assert delta.scale == pytest.approx(6 / math.sqrt(4) if rslora else 6 / 4)
    assert delta.needs_base == dora and delta.kind.startswith("dora+") == dora


def test_the_magnitudes_of_an_embedding_are_those_of_its_columns() -> None:
    """PEFT decomposes the transposed table: one number a dimension, its norm over all tokens, square tables too."""
    LAYERS["tokens"] = lambda: nn.Embedding(6, 6)
    try:
        torch.manual_seed(1)
        plain = LAYERS["tokens"]()
        config = LoraConfig(r=2, lora_alpha=3, use_dora=True, target_modules=["layer"])
        model = get_peft_model(Net(plain), config).eval()
        before = plain.weight.detach().clone()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.rand_like(parameter) * 0.5 if "magnitude" in key else torch.randn(1))
        state = {
            k.removeprefix("base_model.model.layer."): v.detach() for k, v in get_peft_model_state_dict(model).items()
        }
        made = deltas(state, alpha=3.0)["weight"]
        want = model(torch.arange(6)).detach() - before
        torch.testing.assert_close(made.dense(before), want, rtol=1e-4, atol=2e-5)
    finally:
        del LAYERS["tokens"]


@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rslora"])
@pytest.mark.parametrize("name", ["linear", "conv"])
def test_the_bias_of_a_lora_is_scaled_like_its_pair(name: str, rslora: bool) -> None:
    config = LoraConfig(r=4, lora_alpha=6, lora_bias=True, use_rslora=rslora, target_modules=["layer"])
    made = check(config, name, alpha=6.0, rslora=rslora, rank=4)
    assert made["bias"].scale == made["weight"].scale == (3.0 if rslora else 1.5)
    assert made["bias"].dense().shape == made["bias"].shape


@pytest.mark.parametrize("name", ["linear", "conv", "pointwise", "conv1d"])
@pytest.mark.parametrize("effective", [False, True], ids=["plain", "tucker"])
def test_loha(effective: bool, name: str) -> None:
    config = LoHaConfig(r=4, alpha=6, use_effective_conv2d=effective, init_weights=False, target_modules=["layer"])
    assert check(config, name, 0.5, alpha=6.0, rank=4)["weight"].scale == 1.5


# PEFT's own kron fails on some one-dimensional convolutions, and aligns the wrong axes of others.
_LOKR = [
    (name, effective, rank)
    for name in ("linear", "conv", "pointwise", "conv1d")
    for effective in (False, True)
    for rank in (1, 2, 32)
    if name != "conv1d" or (effective, rank) in ((False, 1), (False, 2), (True, 2))
]


@pytest.mark.parametrize(("name", "effective", "rank"), _LOKR)
def test_lokr_is_scaled_by_the_rank_of_its_config_whatever_its_factors(name: str, effective: bool, rank: int) -> None:
    config = LoKrConfig(
        r=rank, alpha=6, use_effective_conv2d=effective, init_weights=False, decompose_factor=2, decompose_both=True,
        target_modules=["layer"],
    )  # fmt: skip
    delta = check(config, name, 1.0, alpha=6.0, rank=rank)["weight"]
    assert delta.scale == 6 / rank


@pytest.mark.parametrize("name", ["linear", "square"])
@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_oft_rotates_the_inputs_of_linear_layers(size: int, share: bool, name: str) -> None:
    config = OFTConfig(r=0, oft_block_size=size, block_share=share, target_modules=["layer"], init_weights=False)
    delta = check(config, name, 0.15)["weight"]
    assert (delta.kind, delta.rank, delta.scale) == ("oft_v2", 0, 1.0)
    assert delta.shape == (0, 0 if share else 18)


def test_oft_of_a_convolution_is_refused_by_name() -> None:
    """PEFT's forward pass folds overlapping patches, which is no change of a weight; trainers rotate the other way."""
    config = OFTConfig(r=0, oft_block_size=3, target_modules=["layer"], init_weights=False)
    plain, _, state, _ = trained(config, "conv")
    with pytest.raises(DiffLoRAError, match="OFT"):
        deltas(state)["weight"].dense(plain.layer.weight)


def test_a_file_s_own_alpha_beats_the_config_s() -> None:
    held = {"down": torch.randn(4, 6), "up": torch.randn(5, 4), "alpha": torch.tensor(8.0)}
    assert build("lora", held, alpha=2.0).scale == 2.0
    lokr = {"w1": torch.randn(2, 2), "w2": torch.randn(3, 3), "alpha": torch.tensor(8.0)}
    assert build("lokr", lokr, alpha=2.0, rank=4).scale == 1.0
