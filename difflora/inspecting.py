"""What an adapter file holds: counts, ranks, alphas, norms, hashes, trigger words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difflora.deltas import number
from difflora.hashes import Hashes, hashes
from difflora.loading import load
from difflora.metadata import Triggers, trigger_words
from difflora.products import Kronecker

if TYPE_CHECKING:
    from difflora.kinds import Delta
    from difflora.loading import Source
    from difflora.types import Adapter


@dataclass(frozen=True, slots=True)
class Inspection:
    """What an adapter holds.

    `size` is the file's in bytes (the tensors' without a file).  `components` and `kinds` count modules; `ranks` and
    `alphas` are (value, number of modules), where an alpha of None means "none in the file"; `dtypes` count numbers.
    `norms` is the Frobenius norm of the change at strength 1, over the modules of each block.  `bad` names the tensors
    with NaN or infinite values.  On meta tensors `alphas`, `norms` and `bad` are empty.
    """

    source: str
    name: str
    layout: str
    family: str | None
    size: int
    components: Mapping[str, int]
    kinds: Mapping[str, int]
    ranks: tuple[tuple[int, int], ...]
    alphas: tuple[tuple[float | None, int], ...]
    dtypes: Mapping[str, int]
    norms: Mapping[str, float]
    bad: tuple[str, ...]
    triggers: Triggers
    hashes: Hashes | None
    metadata: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON can hold it; numbers that are not finite become None."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def inspect(
    source: Source,
    *,
    family: str | None = None,
    component: str | None = None,
    folders: Sequence[str | Path] = (),
    weight_name: str | None = None,
    subfolder: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    allow_pickle: bool = False,
) -> Inspection:
    """What `source` holds; the arguments are those of `load`, and so are the errors."""
    adapter = load(
        source,
        family=family,
        component=component,
        folders=folders,
        weight_name=weight_name,
        subfolder=subfolder,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        allow_pickle=allow_pickle,
    )
    return inspect_adapter(adapter)


def inspect_adapter(adapter: Adapter) -> Inspection:
    """What a loaded adapter holds; its file, if it has one, is read once more for the hashes."""
    deltas = [delta for modules in adapter.components.values() for delta in modules.values()]
    tensors = _tensors(adapter)
    real = not any(tensor.is_meta for tensor in tensors.values())
    triggers = trigger_words(adapter.path, adapter.metadata)
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return Inspection(
        source=adapter.source,
        name=adapter.name,
        layout=adapter.layout,
        family=adapter.family,
        size=held if adapter.path is None else Path(adapter.path).stat().st_size,
        components={name: len(modules) for name, modules in adapter.components.items()},
        kinds=dict(Counter(delta.kind for delta in deltas)),
        ranks=tuple(sorted(Counter(delta.rank for delta in deltas).items())),
        alphas=_alphas(deltas) if real else (),
        dtypes=_dtypes(tensors.values()),
        norms=_norms(adapter) if real else {},
        bad=tuple(name for name, tensor in tensors.items() if not _finite(tensor)) if real else (),
        triggers=triggers,
        hashes=None if adapter.path is None else hashes(adapter.path),
        metadata=dict(adapter.metadata),
        notes=(*adapter.notes, *triggers.notes),
    )


def _tensors(adapter: Adapter) -> dict[str, torch.Tensor]:
    """`component.path.role` -> tensor, each tensor once: sections of one fused module share theirs."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for component, path, delta in _modules(adapter):
        for role in fields(delta):
            value = getattr(delta, role.name)
            if isinstance(value, torch.Tensor):
                found.setdefault(id(value), (f"{component}.{path}.{role.name}", value))
    return dict(found.values())


def _modules(adapter: Adapter) -> Iterator[tuple[str, str, Delta]]:
    for component, modules in adapter.components.items():
        for path, delta in modules.items():
            yield component, path, delta


def _alphas(deltas: Sequence[Delta]) -> tuple[tuple[float | None, int], ...]:
    counts = Counter(None if delta.alpha is None else number(delta.alpha) for delta in deltas)
    return tuple(sorted(counts.items(), key=lambda item: (item[0] is None, item[0] or 0.0)))


def _dtypes(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    counts = Counter[str]()
    for tensor in tensors:
        counts[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return dict(counts)


def _finite(tensor: torch.Tensor) -> bool:
    # isfinite has no fp8 kernel
    return bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all())


def _norms(adapter: Adapter) -> dict[str, float]:
    """Block -> sqrt of the sum over its modules of ||dW||_F^2."""
    squares: dict[str, float] = {}
    for component, path, delta in _modules(adapter):
        block = f"{component}.{_block(path)}"
        squares[block] = squares.get(block, 0.0) + _square(delta)
    return {block: math.sqrt(square) for block, square in squares.items()}


def _block(path: str) -> str:
    """The path up to and including its first layer number; its first piece where it has none."""
    pieces = path.split(".")
    return ".".join(pieces[: next((i for i, piece in enumerate(pieces) if piece.isdecimal()), 0) + 1])


def _square(delta: Delta) -> float:
    """||dW||_F^2: sum((B^T B) * (A A^T)) for low rank, r x r products instead of the dense matrix.

    In fp64, since the sum cancels where the columns of B A nearly do.  Zero for what only a base weight gives a size.
    """
    if delta.needs_base:
        return 0.0
    if isinstance(delta, Kronecker):
        # ||kron(a, b)|| = ||a|| ||b||
        one, two = (half.double().square().sum() for half in delta.halves())
        return float(delta.scale * delta.scale * one * two)
    pair = delta.low_rank()
    if pair is None:
        return float(delta.dense().double().square().sum())
    a, b = (factor.double() for factor in pair)
    square = float((b.T @ b * (a @ a.T)).sum())
    return float(delta.scale * delta.scale * (square if math.isnan(square) else max(square, 0.0)))
