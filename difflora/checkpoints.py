"""Model checkpoints on disk: where each canonical parameter lies, by the names of diffusers or of the family's code.

A checkpoint is one .safetensors file, a component's folder (whole or in shards), or a pipeline's folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from difflora.containers import Stored, contents
from difflora.deltas import chosen
from difflora.formats.errors import DiffLoRAError, some
from difflora.formats.families import FAMILIES
from difflora.formats.rules import Family, Network, Span, outline
from difflora.formats.text_encoders import canonical

if TYPE_CHECKING:
    from torch import Tensor

# What a file that holds a whole model puts before the names of its parts: a place, as adapters call it.
_PREFIXES = {
    "model.diffusion_model.": "denoiser",
    "diffusion_model.": "denoiser",
    "transformer.": "denoiser",
    "unet.": "denoiser",
    "cond_stage_model.transformer.": "clip_l",
    "conditioner.embedders.0.transformer.": "clip_l",
    "text_encoders.clip_l.transformer.": "clip_l",
    "text_encoders.t5xxl.transformer.": "t5xxl",
    "": "denoiser",
}
_INDEX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Piece:
    """A canonical parameter in a checkpoint: the tensor that holds it, and which of its rows it is (all if empty)."""

    key: str
    stored: Stored
    blocks: tuple[Span, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the parameter."""
        rows = sum(stop - start for start, stop in self.blocks)
        return (rows, *self.stored.shape[1:]) if self.blocks else self.stored.shape

    def read(self) -> Tensor:
        """The values, in the order of the canonical rows."""
        tensor = self.stored.tensor()
        if not tensor.is_floating_point():
            raise DiffLoRAError(
                f"{self.stored.file}: {self.key} is stored as {tensor.dtype}, a quantised weight. Expected fp32, fp16, "
                "bf16 or fp8."
            )
        return chosen(tensor, self.blocks) if self.blocks else tensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint by file, with the metadata of each, and the canonical parameters among them."""

    root: Path
    files: Mapping[Path, tuple[Mapping[str, str], Mapping[str, Stored]]]
    pieces: Mapping[tuple[str, str], Piece]


def opened(root: Path, family: str | None, components: Iterable[str], wanted: Iterable[tuple[str, str]]) -> Checkpoint:
    """The checkpoint at `root`, read by the first of the `family` names (`a|b`, None: any) that has all `wanted`.

    `components` are those that an adapter changes: the subfolders of a pipeline, or the part that a file is.  Raises
    DiffLoRAError for what is no checkpoint, and if parameters are missing, with up to four of them.
    """
    names, places = list(components), list(wanted)
    parts = _parts(root, names)
    files = {file: contents(file) for _, file in parts}
    known = [one for one in FAMILIES if family is None or one.name in family.split("|")]
    best: dict[tuple[str, str], Piece] = {}
    for candidate in (*known, None):
        pieces: dict[tuple[str, str], Piece] = {}
        for component, file in parts:
            pieces.update(_pieces(files[file][1], component, candidate, names))
        if all(place in pieces for place in places):
            return Checkpoint(root, files, pieces)
        best = max(best, pieces, key=lambda found: sum(place in found for place in places))
    missing = [".".join(place) for place in places if place not in best]
    raise DiffLoRAError(
        f"{root} has no {some(missing)} ({len(missing)} of {len(places)} parameters that the adapter changes). "
        "Expected the model that the adapter was made for, by the names of diffusers or of its own code."
    )


def read_as(root: Path, component: str, family: str | None) -> Checkpoint:
    """The checkpoint at `root` as one component, by the names of `family`, or (None) by the model's own.

    Raises DiffLoRAError for what is no checkpoint, and for a family that is not known.
    """
    known = {one.name: one for one in FAMILIES}
    if family is not None and family not in known:
        raise DiffLoRAError(f"family={family!r} is not known. Expected one of {', '.join(known)}.")
    parts = _parts(root, [component])
    files = {file: contents(file) for _, file in parts}
    chosen_family = known[family] if family else None
    pieces: dict[tuple[str, str], Piece] = {}
    for name, file in parts:
        pieces.update(_pieces(files[file][1], name, chosen_family, [component]))
    return Checkpoint(root, files, pieces)


def _parts(root: Path, components: list[str]) -> list[tuple[str | None, Path]]:
    """(component, or None for a file that may hold several, weight file) of every file that may be changed."""
    if root.is_file():
        if root.suffix not in (".safetensors", ".sft"):
            raise DiffLoRAError(f"{root} has the suffix {root.suffix!r}; expected a .safetensors checkpoint.")
        return [(None, root)]
    if not root.is_dir():
        raise DiffLoRAError(f"there is no checkpoint {root}; expected a .safetensors file or a diffusers folder.")
    if (root / "model_index.json").is_file():
        return [(name, file) for name in components for file in _weights(root / name)]
    return [(None, file) for file in _weights(root)]


def _weights(folder: Path) -> list[Path]:
    """The weight files of a component's folder: its shards, or the only one."""
    indices = sorted(folder.glob(f"*{_INDEX}"))
    if indices:
        try:
            listed = json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"]
            return [folder / name for name in sorted({Path(str(name)).name for name in listed.values()})]
        except (ValueError, KeyError, AttributeError, OSError) as error:
            raise DiffLoRAError(f"{indices[0]} is no index of weight files ({type(error).__name__}).") from error
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        raise DiffLoRAError(f"{folder} holds {len(found)} .safetensors files; expected one, or shards with an index.")
    return found


def _pieces(
    tensors: Mapping[str, Stored], component: str | None, family: Family | None, components: list[str]
) -> Iterator[tuple[tuple[str, str], Piece]]:
    """Every canonical parameter of one file."""
    for key, stored in tensors.items():
        for where, network, name in _meanings(key, component, family, components):
            found = list(_named(name, stored, tensors, key, network))
            for path, blocks in found:
                yield (where, canonical(where, path)), Piece(key, stored, blocks)
            if found:
                break


def _meanings(
    key: str, component: str | None, family: Family | None, components: list[str]
) -> Iterator[tuple[str, Network, str]]:
    """(component, its modules, name there) that a key may mean, the likeliest first."""
    networks = {family.denoiser: family.network} if family else {}
    networks |= {encoder.component: encoder.network for encoder in family.encoders} if family else {}
    if component is not None:
        yield component, networks.get(component, Network()), key
        return
    for prefix, place in _PREFIXES.items():
        if not key.startswith(prefix):
            continue
        name = key[len(prefix) :]
        if place == "denoiser":
            # A folder or file of one component alone says nowhere which it is.
            lone = [family.denoiser] if family and family.denoiser in components else components[:1]
            yield from ((where, networks.get(where, Network()), name) for where in lone)
        elif family:
            encoders = (encoder for encoder in family.encoders if place in encoder.places)
            yield from ((encoder.component, encoder.network, name) for encoder in encoders)


def _named(
    name: str, stored: Stored, tensors: Mapping[str, Stored], key: str, network: Network
) -> Iterator[tuple[str, tuple[Span, ...]]]:
    """(canonical path, its row blocks) of the parameters that a tensor of this name is."""
    module, _, leaf = name.rpartition(".")
    bare = leaf not in ("weight", "scale", "bias")
    module, end = (name, "") if bare else (module, ".bias" if leaf == "bias" else "")
    rows = stored.shape[0] if stored.shape else 0
    sibling = tensors.get(f"{key[: -len(leaf)]}weight", stored)
    columns = sibling.shape[1] if len(sibling.shape) > 1 else 0
    meanings = network.find(*outline(module), flat=False)
    for sections, rule in meanings.items():
        spans = rule.spans(rows, columns)
        if spans is not None:
            yield from ((section + end, blocks) for section, blocks in zip(sections, spans, strict=True))
            return
    if not meanings:
        yield module + end, ()


def written_back(piece: Piece, whole: Tensor, value: Tensor) -> None:
    """Put the new values of a parameter where they lie in the tensor that holds it."""
    if not piece.blocks:
        whole.copy_(value)
        return
    at = 0
    with torch.no_grad():
        for start, stop in piece.blocks:
            whole[start:stop] = value[at : at + stop - start]
            at += stop - start
