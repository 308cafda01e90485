"""Every kernel compiles ahead of time, without a GPU, for the architectures that people have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from difflora.kernels import lowrank, merging  # noqa: E402

TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 86, 89, 90, 100)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TABLES = {"b": "", "entries": "*i32", "scales": "*fp32", "counts": "*i32", "samples": "*i32"}
SIZES = ("rows", "cols", "depth", "x_stride", "y_stride", "ranks", "blocks", "parts", "tiles_m")


def compiled(function: Any, target: str, dtype: str, tiles: Mapping[str, Any], descriptors: Mapping[str, str]) -> Any:
    """The kernel, compiled for this target, with sizes and addresses that are multiples of 16 as in use."""
    names = function.arg_names
    types = {name: f"*{dtype}" for name in ("x", "a", "t", "b", "y", "bias")} | {"ids": "*i32"}
    types |= (
        {name: kind or f"*{dtype}" for name, kind in TABLES.items()} | dict.fromkeys(SIZES, "i32") | dict(descriptors)
    )
    signature = {name: "constexpr" if name in tiles else types[name] for name in names}
    constants = {(names.index(name),): value for name, value in tiles.items()}
    whole = [n for n in names if n not in (*tiles, *descriptors, "blocks", "parts", "tiles_m")]
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in whole}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=hints)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": 4})


def code(kernel: Any) -> bytes:
    return bytes(kernel.asm.get("cubin") or kernel.asm["hsaco"])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_shrink(target: str, dtype: str) -> None:
    precision = "tf32x3" if dtype == "fp32" and target != "gfx942" else "ieee"
    tiles = {"BM": 16, "BR": 32, "BK": 64, "STAGES": 2, "PRECISION": precision}
    assert len(code(compiled(lowrank.shrink, target, dtype, tiles, {}))) > 1000


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_expand(target: str, dtype: str, single: bool) -> None:
    precision = "tf32x3" if dtype == "fp32" and target != "gfx942" else "ieee"
    tiles = {
        "BM": 32,
        "BN": 64,
        "BR": 32,
        "TILES": 2,
        "STAGES": 2,
        "SINGLE": single,
        "SHORT": single,
        "PRECISION": precision,
    }
    assert len(code(compiled(lowrank.expand, target, dtype, tiles, {}))) > 1000


def test_loads_are_wide_whatever_the_tables_say() -> None:
    """Row ranges and ranks are read from tables, which must not turn 16-byte loads into single numbers."""
    tiles = {"BM": 64, "BN": 64, "BR": 64, "TILES": 1, "STAGES": 1, "SINGLE": True, "SHORT": True, "PRECISION": "ieee"}
    text = compiled(lowrank.expand, "sm_90", "bf16", tiles, {}).asm["ptx"]
    assert "st.global.v4.b32" in text
    assert "ld.global.b16" not in text
    assert text.count("ld.global.v4.b32") >= 3


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("short", [True, False])
def test_merging(target: str, short: bool) -> None:
    import triton.language as tl

    function = merging.merge_kernel
    constants = {
        **{"W": tl.bfloat16, "F": tl.bfloat16, "BITS": tl.int16, "BM": 64, "BN": 64, "BR": 32, "STAGES": 2},
        **{"SHORT": short, "EVEN": True, "PRECISION": "ieee"},
    }
    types = {"jobs": "*i64", "parts": "*i64", "scales": "*fp32", "owners": "*i32", "flags": "*i32", "sums": "*i32"}
    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    kernel = triton.compile(source, target=TARGETS[target], options={"num_warps": 4})
    assert len(code(kernel)) > 1000
    if target == "sm_90":
        assert "st.global.v4.b32" in kernel.asm["ptx"], "16 bytes at once"
