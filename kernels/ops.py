"""Kernel mode as operations of torch: opaque to compilers, safe to capture, and a plan for each shape behind them.

The tables that an operation reads are device tensors, so a captured graph follows every change of adapters.  Outside a
capture the host's copy of the counts (`announce`) spares the launches for modules on which nothing acts.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from difflora.kernels import reference
from difflora.kernels.reference import RANKS

_library: Any = torch.library.Library("difflora", "DEF")  # type: ignore[no-untyped-call]
_library.define("shrink(Tensor x, Tensor a, Tensor ids, Tensor counts, Tensor samples) -> Tensor")
_library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor t, Tensor b, Tensor entries, Tensor scales, Tensor counts, "
    "Tensor samples) -> Tensor"
)
_library.define(
    "expand_(Tensor(a!) y, Tensor t, Tensor b, Tensor entries, Tensor scales, Tensor counts, Tensor samples) -> ()"
)

# The most blocks of any request, by the address of a table of counts; and the number of samples, by theirs.
_counts: dict[int, int] = {}
_samples: dict[int, int] = {}
_ranks: dict[int, int] = {}
_longest: dict[int, int] = {}


def announce(counts: Tensor, values: Tensor) -> None:
    """Tell what a table of counts on the device holds."""
    _counts[counts.data_ptr()] = int(values.max())


def announce_ranks(a: Tensor, blocks: int) -> None:
    """Tell how many blocks of ranks of an a are in use: the first ones."""
    _ranks[a.data_ptr()] = blocks


def announce_entries(entries: Tensor, longest: int) -> None:
    """Tell the most ranks of any request of a module where none has more than one entry; else a very large number."""
    _longest[entries.data_ptr()] = longest


def announce_rows(samples: Tensor, requests: Sequence[int]) -> None:
    """Tell how many samples a table of samples on the device has."""
    _samples[samples.data_ptr()] = len(requests)


def withdraw(addresses: Iterable[int]) -> None:
    """Forget tables that are freed: their addresses will be somebody else's."""
    for address in addresses:
        for known in (_counts, _samples, _ranks, _longest):
            known.pop(address, None)


def kernels_for(device: torch.device) -> bool:
    """Whether the kernels run on this device: it is a GPU that Triton knows."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def most(counts: Tensor, capacity: int) -> int:
    """The blocks of ranks to launch for: what a graph is captured with must hold for every later change."""
    return capacity if capturing() else _counts.get(counts.data_ptr(), capacity)


def ranks(a: Tensor) -> int:
    """The ranks of an a that may be in use, from the first."""
    return a.shape[0] if capturing() else RANKS * _ranks.get(a.data_ptr(), a.shape[0] // RANKS)


def tiles(samples: Tensor, rows: int, height: int) -> int:
    """The row tiles to launch for: each sample's rows have tiles of their own."""
    count = None if capturing() else _samples.get(samples.data_ptr())
    if count is None:
        return -(-rows // height) + min(rows, samples.numel() - 1)
    if rows % count:
        raise ValueError(f"an input of {rows} rows does not divide into the batch's {count} samples.")
    return count * -(-rows // count // height)


def short(entries: Tensor, ranks: int) -> bool:
    """Whether no request has more than one entry, of at most so many ranks."""
    return not capturing() and _longest.get(entries.data_ptr(), sys.maxsize) <= ranks


def mixed(samples: Tensor) -> bool:
    """Whether rows of one batch may have different requests."""
    return capturing() or _samples.get(samples.data_ptr(), 2) > 1


def capturing() -> bool:
    """Whether a graph is being captured on this stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


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
    if kernels_for(x.device) and most(counts, entries.shape[1]):
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
    elif most(counts, entries.shape[1]):
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
shrink = torch.ops.difflora.shrink.default
linear = torch.ops.difflora.linear.default
expand_ = torch.ops.difflora.expand_.default
