"""What the host knows of the tables on the device, by their addresses: it spares launches, and chooses between kernels.

Nothing here is needed for a right result: tables that nobody told of, and every table while a graph is captured, are
taken to be full, since what is captured must hold for every later change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """Entries of one request that are one product: y[:, rows] += alpha * (t[:, columns] * scales) @ b.

    b: [ranks, rows]; scales: fp32 [ranks] where the entries differ in it, else None.
    """

    columns: slice
    rows: slice
    b: Tensor
    alpha: float
    scales: Tensor | None


@dataclass(frozen=True, eq=False, slots=True)
class Site:
    """Of a module: the most entries of any request, the ranks where none has more than one entry (else 0), the runs."""

    most: int
    alone: int
    runs: tuple[tuple[Run, ...], ...]


@dataclass(frozen=True, slots=True)
class Bank:
    """Of siblings: the most active blocks of any request, and how many ranks of a are in use, from the first."""

    most: int
    ranks: int


_sites: dict[int, Site] = {}
_banks: dict[int, Bank] = {}
_rows: dict[int, tuple[int, ...]] = {}


def tell_site(entries: Tensor, site: Site) -> None:
    _sites[entries.data_ptr()] = site


def tell_bank(ids: Tensor, bank: Bank) -> None:
    _banks[ids.data_ptr()] = bank


def tell_rows(samples: Tensor, requests: Sequence[int]) -> None:
    _rows[samples.data_ptr()] = tuple(requests)


def forget(addresses: Iterable[int]) -> None:
    """Tables that are freed: their addresses will be somebody else's."""
    for address in addresses:
        for known in (_sites, _banks, _rows):
            known.pop(address, None)


def site(entries: Tensor) -> Site | None:
    """What is known of a module's entries."""
    return None if capturing() else _sites.get(entries.data_ptr())


def bank(ids: Tensor) -> Bank | None:
    """What is known of a bank."""
    return None if capturing() else _banks.get(ids.data_ptr())


def rows(samples: Tensor) -> tuple[int, ...] | None:
    """The request of each sample."""
    return None if capturing() else _rows.get(samples.data_ptr())


def ranks(ids: Tensor, samples: Tensor) -> int | None:
    """How many ranks of a are in use, from the first; None where rows may differ, or nothing is known."""
    if capturing():
        return None
    known, requests = _banks.get(ids.data_ptr()), _rows.get(samples.data_ptr())
    return None if known is None or requests is None or len(requests) > 1 else known.ranks


def runs(entries: Tensor, samples: Tensor) -> tuple[Run, ...] | None:
    """The products that are all of a module's terms; None where rows may differ, or nothing is known."""
    if capturing():
        return None
    known, requests = _sites.get(entries.data_ptr()), _rows.get(samples.data_ptr())
    if known is None or requests is None or len(requests) > 1:
        return None
    return known.runs[requests[0]] if requests[0] < len(known.runs) else ()


def tiles(samples: Tensor, count: int, height: int) -> int:
    """The row tiles to launch for an input of `count` rows: each sample's rows have tiles of their own."""
    known = rows(samples)
    if known is None:
        return -(-count // height) + min(count, samples.numel() - 1)
    if count % len(known):
        raise ValueError(f"an input of {count} rows does not divide into the batch's {len(known)} samples.")
    return len(known) * -(-(count // len(known)) // height)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Where Triton launches: on the current GPU, whatever its arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def capturing() -> bool:
    """Whether a graph is being captured on this stream."""
    ready: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return ready and torch.cuda.is_current_stream_capturing()
