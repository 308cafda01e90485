"""The plain operations against arithmetic written out, on round and odd shapes."""

from __future__ import annotations

import pytest
import torch

from difflora.kernels import reference
from difflora.kernels.reference import Block

SHAPES = [(8, 8, 2), (341, 17, 3), (1, 5, 1), (64, 9 * 3, 17)]


def blocks(rows: int, rank: int) -> tuple[list[Block], int]:
    """Two parts that share ranks [0, rank), and one on the lower half of the rows with ranks of its own."""
    half = rows // 2
    return [
        Block(0, rows, 0, rank, torch.randn(rows, rank), 0.5),
        Block(half, rows, 0, rank, torch.randn(rows - half, rank), -1.5),
        Block(half, rows, rank, 2 * rank, torch.randn(rows - half, rank), 2.0),
    ], 2 * rank


def expected(a: torch.Tensor, parts: list[Block], rows: int) -> torch.Tensor:
    total = torch.zeros(rows, a.shape[1], dtype=torch.float64)
    for part in parts:
        for row in range(part.start, part.stop):
            total[row] += part.scale * part.b[row - part.start].double() @ a[part.first : part.last].double()
    return total


@pytest.mark.parametrize(("rows", "width", "rank"), SHAPES)
def test_delta(rows: int, width: int, rank: int) -> None:
    torch.manual_seed(0)
    parts, height = blocks(rows, rank)
    a = torch.randn(height, width)
    found = reference.delta(a, parts, rows)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected(a, parts, rows), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_merge_rounds_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts, height = blocks(12, 2)
    a, base = torch.randn(height, 2 * 9), torch.randn(12, 2, 3, 3, dtype=torch.float64).to(dtype)
    change = reference.delta(a, parts, 12).view(base.shape)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(reference.merge(base, a, parts), (base.to(wide) + change).to(dtype))


def test_merging_nothing_is_the_base_bit_for_bit() -> None:
    base = torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(reference.merge(base, torch.zeros(1, 3), []), base)


@pytest.mark.parametrize(("rows", "width", "rank"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_rank(rows: int, width: int, rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, a, b = (torch.randn(*shape).to(dtype) for shape in ((2, 4, width), (rank, width), (rows, rank)))
    found = reference.low_rank(x, a, b, torch.tensor(0.75))
    exact = 0.75 * (x.double() @ a.double().T) @ b.double().T
    plain = 0.75 * (x @ a.T) @ b.T
    assert found.dtype == dtype
    assert (found.double() - exact).norm() <= 2 * (plain.double() - exact).norm() + 1e-6 * exact.norm()


def test_without_a_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from difflora.kernels import ops

    gpu = torch.device("cuda")
    monkeypatch.setattr(ops, "_new_enough", lambda device: True)
    for name, there in (("gcc", True), ("nothing", False)):
        ops._can_compile.cache_clear()
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(
            ops.shutil, "which", lambda wanted, name=name: f"/usr/bin/{name}" if wanted == name else None
        )
        monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: object())
        assert ops.kernels_for(gpu) is there
        assert not ops.kernels_for(torch.device("cpu"))
    ops._can_compile.cache_clear()
