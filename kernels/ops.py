"""Kernel mode as operations of torch: opaque to compilers, safe to capture, and a plan for each shape behind them.

The tables that an operation reads are device tensors, so a captured graph follows every change of adapters.  Outside a
capture, what the host knows of them (`facts`) spares launches.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from difflora.kernels import reference

_library: Any = torch.library.Library("difflora", "DEF")  # type: ignore[no-untyped-call]
_library.define("shrink(Tensor x, Tensor a, Tensor ids, Tensor counts, Tensor samples) -> Tensor")
_library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor t, Tensor b, Tensor entries, Tensor scales, Tensor counts, "
    "Tensor samples) -> Tensor"
)
_library.define(
    "expand_(Tensor(a!) y, Tensor t, Tensor b, Tensor entries, Tensor scales, Tensor counts, Tensor samples) -> ()"
)


def kernels_for(device: torch.device) -> bool:
    """Whether the kernels run on this device: it is a GPU that Triton knows."""
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _shrink(x: Tensor, a: Tensor, ids: Tensor, counts: Tensor, samples: Tensor) -> Tensor:
    x = _flat(x).to(a.dtype)
    if not kernels_for(x.device):
        return reference.shrink(x, a, ids, counts, samples)
    from difflora.kernels import launch

    return launch.shrink(x, a, ids, counts, samples)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    t: Tensor,
    b: Tensor,
    entries: Tensor,
    scales: Tensor,
    counts: Tensor,
    samples: Tensor,
) -> Tensor:
    if kernels_for(x.device):
        from difflora.kernels import launch

        y = launch.gemm(x, weight, bias, t, b, entries, scales, counts, samples)
        if y is not None:
            return y
    y = F.linear(x, weight, bias)
    _expand(y, t, b, entries, scales, counts, samples)
    return y


def _expand(y: Tensor, t: Tensor, b: Tensor, entries: Tensor, scales: Tensor, counts: Tensor, samples: Tensor) -> None:
    flat = y.view(-1, y.shape[-1])
    if not kernels_for(y.device):
        flat.copy_(reference.expand(flat, t, b, entries, scales, counts, samples))
    else:
        from difflora.kernels import launch

        launch.expand(flat, t, b, entries, scales, counts, samples)


for _key in ("CPU", "CUDA"):
    _library.impl("shrink", _shrink, _key)
    _library.impl("linear", _linear, _key)
    _library.impl("expand_", _expand, _key)


def _shrink_shape(x: Tensor, a: Tensor, ids: Tensor, counts: Tensor, samples: Tensor) -> Tensor:
    rows = x.numel() // x.shape[-1]
    return a.new_empty(rows, a.shape[0])


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None, t: Tensor, *tables: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _expand_shape(y: Tensor, t: Tensor, *tables: Tensor) -> None:
    return None


def _keep_shrink(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *tables = inputs
    ctx.shape, ctx.dtype = x.shape, x.dtype
    ctx.save_for_backward(*tables)


def _back_shrink(ctx: Any, dt: Tensor) -> tuple[Tensor | None, ...]:
    dx = reference.unshrink(dt, *ctx.saved_tensors).view(ctx.shape).to(ctx.dtype)
    return dx, None, None, None, None


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, t, *tables = inputs
    ctx.bias = bias is not None
    ctx.save_for_backward(x, weight, t, *tables)


def _back_linear(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, t, *tables = ctx.saved_tensors
    need, flat = ctx.needs_input_grad, _flat(dy)
    return (
        dy @ weight if need[0] else None,
        flat.T @ _flat(x) if need[1] else None,
        flat.sum(0) if ctx.bias and need[2] else None,
        reference.spread(flat, *tables, like=t) if need[3] else None,
        *(None,) * 5,
    )


for _name, _shape in (("shrink", _shrink_shape), ("linear", _linear_shape), ("expand_", _expand_shape)):
    torch.library.register_fake(f"difflora::{_name}", _shape)
torch.library.register_autograd("difflora::shrink", _back_shrink, setup_context=_keep_shrink)
torch.library.register_autograd("difflora::linear", _back_linear, setup_context=_keep_linear)


class Traced:
    """The operations as compilers and autograd see them."""

    shrink = torch.ops.difflora.shrink.default
    linear = torch.ops.difflora.linear.default
    expand_ = torch.ops.difflora.expand_.default


class Direct:
    """The same without torch's dispatcher, which takes longer than the kernels of a small layer."""

    shrink = staticmethod(_shrink)
    linear = staticmethod(_linear)
    expand_ = staticmethod(_expand)


def operations() -> type[Traced] | type[Direct]:
    """`Direct` where nothing has to be traced."""
    return Traced if torch.compiler.is_compiling() or torch.is_grad_enabled() else Direct
