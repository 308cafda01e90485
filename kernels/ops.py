"""Kernel mode as operations of torch: opaque to compilers and safe to capture.

The tables that an operation reads are device tensors, so a captured graph follows every change of adapters.  Outside a
capture, the host knows what they hold (`facts`): where one set of adapters acts on all rows, two products of cuBLAS
are as fast as any kernel that was tried (docs/performance.md), and take the host the least time.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from difflora.kernels import facts, reference


def kernels_for(device: torch.device) -> bool:
    """Whether the kernels run on this device: a GPU from Ampere on, or AMD's, with what Triton needs to compile."""
    return device.type == "cuda" and _can_compile() and _new_enough(device)


@functools.cache
def _can_compile() -> bool:
    # Triton builds its launchers with the system's C compiler.
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    return importlib.util.find_spec("triton") is not None and compiler is not None


@functools.cache
def _new_enough(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _shrink(x: Tensor, a: Tensor, ids: Tensor, counts: Tensor, samples: Tensor) -> Tensor:
    """`reference.shrink`, but that ranks which a row's request has not may be anything."""
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if x.dtype == a.dtype else flat.to(a.dtype)
    ranks = facts.ranks(ids, samples)
    if ranks is not None:
        # One set for all rows: cuBLAS is as fast as any kernel.
        t = a.new_empty(flat.shape[0], a.shape[0])
        torch.mm(flat, a[:ranks].T, out=t[:, :ranks])
        return t
    if not kernels_for(x.device):
        return reference.shrink(flat, a, ids, counts, samples)
    from difflora.kernels import launch

    return launch.shrink(flat, a, ids, counts, samples)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, t: Tensor,
    b: Tensor, entries: Tensor, scales: Tensor, counts: Tensor, samples: Tensor,
) -> Tensor:  # fmt: skip
    y = F.linear(x, weight, bias)
    _expand(y, t, b, entries, scales, counts, samples)
    return y


def _expand(y: Tensor, t: Tensor, b: Tensor, entries: Tensor, scales: Tensor, counts: Tensor, samples: Tensor) -> None:
    """`reference.expand` in place."""
    flat = y.view(-1, y.shape[-1])
    runs = facts.runs(entries, samples)
    if runs is not None and y.dtype == b.dtype:
        for run in runs:
            _product(flat, t, run)
    elif kernels_for(y.device):
        from difflora.kernels import launch

        launch.expand(flat, t, b, entries, scales, counts, samples)
    else:
        flat.copy_(reference.expand(flat, t, b, entries, scales, counts, samples))


def _product(y: Tensor, t: Tensor, run: facts.Run) -> None:
    """y[:, rows] += alpha * (t[:, columns] * scales) @ b, in place; y: [rows, out], t: [rows, ranks]."""
    part = t if run.columns.stop - run.columns.start == t.shape[1] else t[:, run.columns]
    if run.scales is not None:
        part = torch.mul(part, run.scales, out=torch.empty_like(part))
    whole = y if run.b.shape[1] == y.shape[1] else y[:, run.rows]
    whole.addmm_(part, run.b, alpha=run.alpha)


def _shrink_shape(x: Tensor, a: Tensor, ids: Tensor, counts: Tensor, samples: Tensor) -> Tensor:
    return a.new_empty(x.numel() // x.shape[-1], a.shape[0])


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
    need, flat = ctx.needs_input_grad, dy.reshape(-1, dy.shape[-1])
    return (
        dy @ weight if need[0] else None,
        flat.T @ x.reshape(-1, x.shape[-1]) if need[1] else None,
        flat.sum(0) if ctx.bias and need[2] else None,
        reference.spread(flat, *tables, like=t) if need[3] else None,
        *(None,) * 5,
    )


_TABLES = "Tensor b, Tensor entries, Tensor scales, Tensor counts, Tensor samples"
_library: Any = torch.library.Library("difflora", "DEF")  # type: ignore[no-untyped-call]
# Twice: what knows its gradient costs a call in Python more, even where nobody asks for it.
for _end in ("", "_with_gradient"):
    _library.define(f"shrink{_end}(Tensor x, Tensor a, Tensor ids, Tensor counts, Tensor samples) -> Tensor")
    _library.define(f"linear{_end}(Tensor x, Tensor weight, Tensor? bias, Tensor t, {_TABLES}) -> Tensor")
    for _key in ("CPU", "CUDA"):
        _library.impl(f"shrink{_end}", _shrink, _key)
        _library.impl(f"linear{_end}", _linear, _key)
    torch.library.register_fake(f"difflora::shrink{_end}", _shrink_shape)
    torch.library.register_fake(f"difflora::linear{_end}", _linear_shape)
_library.define(f"expand_(Tensor(a!) y, Tensor t, {_TABLES}) -> ()")
for _key in ("CPU", "CUDA"):
    _library.impl("expand_", _expand, _key)
torch.library.register_fake("difflora::expand_", _expand_shape)
torch.library.register_autograd("difflora::shrink_with_gradient", _back_shrink, setup_context=_keep_shrink)
torch.library.register_autograd("difflora::linear_with_gradient", _back_linear, setup_context=_keep_linear)


@dataclass(frozen=True, slots=True)
class Operations:
    """shrink(x, a, ids, counts, samples) -> t; linear(x, weight, bias, t, *tables) -> y; expand_(y, t, *tables).

    x: [..., in], t: [rows, ranks of a], y: [..., out]; `tables` are b, entries, scales, counts, samples.
    """

    shrink: Any
    linear: Any
    expand_: Any


# Without torch's dispatcher, which takes longer than the kernels of a small layer.
DIRECT = Operations(_shrink, _linear, _expand)
_ops = torch.ops.difflora
TRACED = Operations(_ops.shrink.default, _ops.linear.default, _ops.expand_.default)
WITH_GRADIENT = Operations(_ops.shrink_with_gradient.default, _ops.linear_with_gradient.default, _ops.expand_.default)


def operations() -> Operations:
    """Those for where this is called: under autograd, while a compiler traces, or neither."""
    if torch.is_grad_enabled():
        return WITH_GRADIENT
    return TRACED if torch.compiler.is_compiling() else DIRECT
