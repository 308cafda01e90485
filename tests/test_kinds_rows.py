"""Row blocks of every kind are the rows of its whole change; every tensor is listed and mapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from difflora import deltas
from difflora.deltas import Cut, mapped
from difflora.kinds import build

if TYPE_CHECKING:
    from difflora.kinds import Delta

ROWS, COLUMNS = 12, 8
ON, OFF = torch.tensor(1), torch.tensor(0)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) * 5 + len(shape)))


PAIR = {"down": random(3, COLUMNS), "up": random(ROWS, 3), "alpha": torch.tensor(2.0)}
LOHA = {**{f"w{n}_a": random(ROWS, n + 1) for n in (1, 2)}, **{f"w{n}_b": random(n + 1, COLUMNS) for n in (1, 2)}}
TUCKER = {f"w{n}_{side}": random(2, ROWS if side == "a" else COLUMNS) for n in "12" for side in "ab"}
LOKR = {"w1": random(6, 4), "w2_a": random(2, 1), "w2_b": random(1, 2), "alpha": torch.tensor(2.0)}
# name: kind, tensors, and whether rows 3..7 need those around them (`joined`).
KINDS: dict[str, tuple[str, dict[str, Tensor], bool]] = {
    "lora": ("lora", PAIR, False),
    "locon": ("lora", {**PAIR, "down": random(3, COLUMNS, 3, 3), "up": random(ROWS, 3, 1, 1)}, False),
    "tucker": ("lora", {"down": random(3, COLUMNS, 1, 1), "up": random(ROWS, 3), "mid": random(3, 3, 2, 2)}, False),
    "embedding": ("lora_embedding", {"down": random(3, ROWS), "up": random(COLUMNS, 3)}, False),
    "loha": ("loha", {**LOHA, "alpha": torch.tensor(4.0)}, False),
    "loha-tucker": ("loha", {**TUCKER, "t1": random(2, 2, 3, 3), "t2": random(2, 2, 3, 3)}, False),
    "lokr": ("lokr", LOKR, False),
    "lokr-pairs": ("lokr", {"w1_a": random(6, 2), "w1_b": random(2, 4), "w2": random(2, 2)}, False),
    "lokr-large-second": ("lokr", {"w1": random(1, 4), "w2": random(ROWS, 2)}, False),
    "lokr-tucker": (
        "lokr",
        {"w1": random(6, 4), "w2_a": random(1, 2), "w2_b": random(1, 2), "t2": random(1, 1, 3, 3)},
        False,
    ),
    "diff": ("diff", {"diff": random(ROWS, COLUMNS)}, False),
    "diff-vector": ("diff", {"diff": random(ROWS)}, False),
    "bias": ("lora_bias", {"diff": random(ROWS), "down": random(3, COLUMNS), "alpha": torch.tensor(2.0)}, False),
    "glora": (
        "glora",
        {"a1": random(COLUMNS, 2), "a2": random(2, COLUMNS), "b1": random(ROWS, 2), "b2": random(2, COLUMNS)},
        False,
    ),
    "glora-old": (
        "glora",
        {"a2": random(COLUMNS, 2), "a1": random(2, COLUMNS), "b2": random(ROWS, 2), "b1": random(2, COLUMNS)},
        False,
    ),
    "ia3": ("ia3", {"weight": random(ROWS), "on_input": OFF}, False),
    "ia3-input": ("ia3", {"weight": random(1, COLUMNS), "on_input": ON}, False),
    "set": ("set", {"value": random(ROWS, COLUMNS)}, False),
    "oft": ("oft", {"blocks": random(4, 3, 3), "alpha": torch.tensor(0.0)}, True),
    "oft-rescaled": ("oft", {"blocks": random(6, 2, 2), "rescale": random(ROWS, 1)}, True),
    "oft-bound": ("oft", {"blocks": random(6, 2, 2), "alpha": torch.tensor(0.05)}, True),
    "boft": ("oft", {"blocks": random(2, 6, 2, 2), "rescale": random(ROWS, 1)}, True),
    "oft-inputs": ("oft_v2", {"r": random(2, 6) * 0.1, "scaled": ON}, False),
    "oft-inputs-magnitude": ("oft_v2", {"r": random(1, 1) * 0.1, "magnitude": random(ROWS)}, False),
    "dora": ("lora", {**PAIR, "magnitude": random(ROWS).abs()}, False),
    "dora-conv": ("lora", {**PAIR, "down": random(3, COLUMNS, 1, 1), "magnitude": random(1, ROWS, 1, 1)}, False),
    "dora-rows": ("loha", {**LOHA, "dora_scale": random(ROWS, 1).abs()}, False),
    "dora-columns": ("loha", {**LOHA, "dora_scale": random(1, COLUMNS).abs()}, True),
    "dora-lokr": ("lokr", {**LOKR, "dora_scale": random(ROWS)}, False),
}
# In and off the boundaries of the factors and rotations; permuted, as rows of a fused module with swapped parts.
BLOCKS: dict[str, tuple[tuple[int, int], ...]] = {
    "first": ((0, 6),),
    "last": ((6, 12),),
    "odd": ((3, 7),),
    "swapped": ((6, 12), (0, 6)),
    "interleaved": ((9, 12), (0, 1), (4, 6)),
}


def made(name: str) -> Delta:
    kind, held, _ = KINDS[name]
    return build(kind, held)


def weight_for(delta: Delta, name: str) -> Tensor:
    if delta.shape and 0 not in delta.shape:
        return random(*delta.shape)
    return random(ROWS, COLUMNS) if name != "diff-vector" else random(ROWS)


def picked(tensor: Tensor, blocks: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.cat([tensor[start:stop] for start, stop in blocks])


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("name", KINDS)
def test_rows_are_those_of_the_whole_change(name: str, blocks: tuple[tuple[int, int], ...]) -> None:
    whole = made(name)
    base = weight_for(whole, name)
    part = whole.rows(blocks)
    height = sum(stop - start for start, stop in blocks)
    got = part.dense(base if part.joined else picked(base, blocks))
    torch.testing.assert_close(got, picked(whole.dense(base), blocks), rtol=1e-5, atol=1e-5)
    assert got.shape[0] == height and part.shape[0] in (0, height)
    assert part.shape[1:] == whole.shape[1:]
    assert (part.kind, part.rank, part.scale) == (whole.kind, whole.rank, whole.scale)
    assert part.needs_base == whole.needs_base and not whole.joined


@pytest.mark.parametrize("name", KINDS)
def test_only_rows_that_hang_together_need_the_whole_base(name: str) -> None:
    assert made(name).rows(((3, 7),)).joined == KINDS[name][2]


@pytest.mark.parametrize("name", ["lora", "locon", "tucker", "loha", "lokr", "lokr-pairs"])
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_low_rank_forms_are_cut_with_the_rows(name: str, blocks: tuple[tuple[int, int], ...]) -> None:
    part = made(name).rows(blocks)
    pair = part.low_rank()
    assert (pair is None) == (made(name).low_rank() is None)
    if pair is not None:
        torch.testing.assert_close(pair[1] @ pair[0] * part.scale, part.dense().flatten(1), rtol=1e-5, atol=1e-5)


def test_cuts_within_the_boundaries_need_nothing_else() -> None:
    assert not isinstance(made("lokr").rows(((2, 6), (8, 10))), Cut)
    assert isinstance(made("lokr").rows(((2, 5),)), Cut)
    assert not isinstance(made("oft").rows(((3, 9),)), Cut)
    assert isinstance(made("oft").rows(((2, 9),)), Cut)
    assert isinstance(made("oft-bound").rows(((2, 4),)), Cut), "a bound on the whole joins all blocks"
    assert not isinstance(made("dora-lokr").rows(((3, 7),)), Cut), "the inner product is cut, not the norm of a row"


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "rows"])
@pytest.mark.parametrize("name", KINDS)
def test_every_tensor_is_listed_and_mapped(name: str, cut: bool) -> None:
    kind, held, _ = KINDS[name]
    delta = made(name).rows(((3, 7),)) if cut else made(name)
    listed = deltas.tensors(delta)
    count = len(held) - (kind == "lora_bias")
    assert len(listed) == count, "each tensor of the file, once (a bias takes but the rank of its pair)"
    seen: list[Tensor] = []

    def copied(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    other = mapped(delta, copied)
    assert {id(t) for t in seen} == {id(t) for t in listed}
    assert not {id(t) for t in deltas.tensors(other)} & {id(t) for t in listed}
    assert type(other) is type(delta) and (other.kind, other.shape) == (delta.kind, delta.shape)


def test_parts_of_a_fused_module_share_their_tensors() -> None:
    one, two = (made("dora-columns").rows((block,)) for block in ((0, 6), (6, 12)))
    assert [id(t) for t in deltas.tensors(one)] == [id(t) for t in deltas.tensors(two)]
    whole = made("lora")
    assert {id(t) for t in deltas.tensors(whole.rows(((0, 3),)))} == {id(t) for t in deltas.tensors(whole)}


@pytest.mark.parametrize("name", KINDS)
def test_shapes_kinds_and_rows_need_no_values(name: str) -> None:
    """Names and sizes of a file can be read on the meta device; only strengths and changes need numbers."""
    kind, held, _ = KINDS[name]
    delta = build(kind, {role: tensor.to("meta") for role, tensor in held.items()})
    assert (delta.kind, delta.rank) == (made(name).kind, made(name).rank)
    assert len(delta.shape) == len(made(name).shape)
    part = delta.rows(((3, 7),))
    assert (part.kind, part.shape[1:]) == (delta.kind, delta.shape[1:])


def test_a_delta_is_cut_once() -> None:
    for name in ("lora", "boft"):
        with pytest.raises(AssertionError):
            made(name).rows(((0, 6),)).rows(((0, 3),))
