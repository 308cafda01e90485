"""Adapters written into a checkpoint on disk, tensor by tensor: never the whole model in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from difflora import merge
from difflora.binding import fits
from difflora.checkpoints import Checkpoint, Piece, opened, written_back
from difflora.composing import common_family, number
from difflora.containers import Entry, Stored, raw, write
from difflora.deltas import Cut
from difflora.drafts import check_free, placed
from difflora.formats.errors import DiffLoRAError
from difflora.types import Joint, Section

if TYPE_CHECKING:
    from torch import Tensor

    from difflora.types import Adapter

Place = tuple[str, str]
Applied = list[tuple[Section, float]]
# Claims of a header about its own tensors, which are others afterwards.
_CLAIMS = ("modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")


@dataclass(frozen=True, slots=True)
class Baked:
    """What a bake did: the file or folder written, and how many parameters in how many tensors it changed."""

    path: Path
    parameters: int
    tensors: int


def bake(
    checkpoint: str | Path,
    weighted: Sequence[tuple[Adapter, float]],
    output: str | Path,
    *,
    force: bool = False,
    dry_run: bool = False,
    advance: Callable[[], None] | None = None,
) -> Baked:
    """Write the checkpoint with W + sum of strength * change in place of its weights, each rounded once to its dtype.

    `checkpoint` is a .safetensors file, a component's folder or a pipeline's folder; other tensors and files are copied
    as they are.  The output is there whole or not at all.  Raises DiffLoRAError, before anything is written, if a
    parameter of an adapter is not in the checkpoint or has another shape there.
    """
    root, target = Path(checkpoint), Path(output)
    if target.resolve() == root.resolve() or (root.is_dir() and root.resolve() in target.resolve().parents):
        raise DiffLoRAError(f"{target} is the checkpoint itself, or inside it, which would be lost; write elsewhere.")
    plan = _plan(root, weighted)
    components = dict.fromkeys(component for component, _ in plan)
    found = opened(root, common_family(weighted), components, plan)
    _check_shapes(found, plan, root)
    changed: dict[tuple[Path, str], list[Place]] = {}
    for place in plan:
        piece = found.pieces[place]
        changed.setdefault((piece.stored.file, piece.key), []).append(place)
    result = Baked(target, len(plan), len(changed))
    if target.suffix != root.suffix:
        raise DiffLoRAError(f"{root} becomes {target}; expected a {'file' if root.is_file() else 'folder'} like it.")
    check_free(target, force)
    if dry_run:
        return result
    said = json.dumps([{"source": adapter.source, "strength": float(ratio)} for adapter, ratio in weighted])
    with placed(target, force) as draft:
        for file, (metadata, tensors) in found.files.items():
            own = {key: places for (where, key), places in changed.items() if where == file}
            here = draft if root.is_file() else draft / file.relative_to(root)
            here.parent.mkdir(parents=True, exist_ok=True)
            kept = {name: text for name, text in metadata.items() if name not in _CLAIMS}
            entries = {key: _entry(key, one, own.get(key, ()), found, plan) for key, one in tensors.items()}
            write(here, entries, {**kept, "difflora.baked": said} if own else kept, advance)
        if root.is_dir():
            _copy_rest(root, draft, found.files)
    return result


def _plan(root: Path, weighted: Sequence[tuple[Adapter, float]]) -> dict[Place, Applied]:
    """Canonical parameter -> the sections that act on it, with their strengths."""
    if not weighted:
        raise DiffLoRAError(f"nothing to bake into {root}; expected at least one adapter.")
    plan: dict[Place, Applied] = {}
    for adapter, ratio in weighted:
        strength = number(ratio, repr(adapter.name))
        if adapter.uneven:
            raise DiffLoRAError(f"{adapter.source}: {adapter.uneven[0]}. The file is damaged.")
        if adapter.vectors:
            raise DiffLoRAError(f"{adapter.source} brings words along, which belong to a tokenizer. Load it instead.")
        wholes = _wholes(adapter)
        for component, deltas in adapter.components.items():
            for path, delta in deltas.items():
                section = Section(path, delta, 0, delta.shape[0])
                if isinstance(delta, Cut) and delta.joined:
                    section = replace(section, joint=wholes[id(delta.whole)])
                plan.setdefault((component, path), []).append((section, strength))
    return plan


def _wholes(adapter: Adapter) -> dict[int, Joint]:
    """For each delta that is a function of a whole fused module, where its rows are."""
    found: dict[int, list[tuple[Place, int, int, tuple[tuple[int, int], ...]]]] = {}
    rows: dict[int, int] = {}
    for component, deltas in adapter.components.items():
        for path, delta in deltas.items():
            if isinstance(delta, Cut) and delta.joined:
                key = id(delta.whole)
                rows[key] = delta.whole.shape[0]
                found.setdefault(key, []).append(((component, path), 0, delta.shape[0], tuple(delta.blocks)))
    return {key: Joint(rows[key], tuple(parts)) for key, parts in found.items()}


def _check_shapes(found: Checkpoint, plan: Mapping[Place, Applied], root: Path) -> None:
    wrong = [
        f"{'.'.join(place)}: {list(section.delta.shape)} in {section.path!r}, {list(found.pieces[place].shape)} there"
        for place, applied in plan.items()
        for section, _ in applied
        if not fits(section.delta.shape, found.pieces[place].shape)
    ]
    if wrong:
        raise DiffLoRAError(f"{root}: {len(wrong)} parameters have another shape: {'; '.join(wrong[:4])}.")


def _entry(
    key: str, stored: Stored, places: Iterable[Place], found: Checkpoint, plan: Mapping[Place, Applied]
) -> Entry:
    """The tensor as it is written: its own bytes, or computed when it is its turn."""
    mine = list(places)
    size = stored.stop - stored.start
    if not mine:
        return Entry(stored.dtype, stored.shape, size, stored.chunks)

    def computed() -> tuple[memoryview, ...]:
        whole = stored.tensor()
        for place in mine:
            piece = found.pieces[place]
            # Some kinds leave their number of rows to the model.
            applied = tuple((replace(section, stop=piece.shape[0]), weight) for section, weight in plan[place])
            value = merge.checked(piece.read(), applied, ".".join(place), lambda j: _whole(j, found))
            written_back(piece, whole, value)
        return (raw(whole.contiguous()),)

    return Entry(stored.dtype, stored.shape, size, computed)


def _whole(joint: Joint, found: Checkpoint) -> Tensor:
    """The rows of a fused module, in the order of the adapter's file: fp32."""
    parts = [
        (start, part)
        for place, _, _, blocks in joint.parts
        for (start, _), part in zip(
            blocks, torch.split(_base(found.pieces[place]), [stop - start for start, stop in blocks]), strict=True
        )
    ]
    return torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])])


def _base(piece: Piece) -> Tensor:
    return piece.read().float()


def _copy_rest(root: Path, draft: Path, written: Iterable[Path]) -> None:
    done = set(written)
    for file in sorted(file for file in root.rglob("*") if file.is_file() and file not in done):
        place = draft / file.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
