"""The hashes by which sites and other programs know a LoRA file, from one pass over it; no tensor is decoded.

A safetensors file is 8 bytes (little endian: n), n bytes of JSON header, then the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from difflora.formats.errors import DiffLoRAError

__all__ = ["Hashes", "hashes", "read_header"]

Shapes = dict[str, tuple[str, tuple[int, ...]]]

_LONGEST_HEADER = 100 * 10**6  # the limit of the safetensors library
_LEGACY = range(0x100000, 0x110000)
_OF_NOTHING = sha256(b"").hexdigest()
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Hashes:
    """Lower-case hex digests of one file, under the names that sites use.

    `sha256`: the whole file.  `autov2`: its first 10 digits.  `autov1`: 8 digits over bytes 0x100000 to 0x110000, None
    for a file that ends before.  `addnet`: the tensors without the header, None for a pickle.  `lora_hash`: 12 digits
    of the trainer's `sshs_model_hash`, else of `addnet`, else of `sha256`; what A1111 writes into pictures.  `autov3`:
    12 digits of the hash that the header itself claims, None without one.
    """

    sha256: str
    autov2: str
    autov1: str | None
    addnet: str | None
    lora_hash: str
    autov3: str | None


def hashes(path: str | Path) -> Hashes:
    """Every hash of the file, in one pass.  DiffLoRAError if it says it is safetensors and is not."""
    file, metadata, first = Path(path), dict[str, str](), None
    if file.suffix.lower() in (".safetensors", ".sft"):
        header, first = _header(file)
        metadata = _metadata(file, header)
    whole, tensors, legacy, at = sha256(), sha256(), sha256(), 0
    with _opened(file) as stream:
        while chunk := stream.read(_CHUNK):
            view = memoryview(chunk)
            whole.update(view)
            tensors.update(view[max((first or 0) - at, 0) :])
            legacy.update(view[max(_LEGACY.start - at, 0) : max(_LEGACY.stop - at, 0)])
            at += len(chunk)
    digest, addnet = whole.hexdigest(), tensors.hexdigest() if first is not None else None
    return Hashes(
        sha256=digest,
        autov2=digest[:10],
        autov1=legacy.hexdigest()[:8] if at > _LEGACY.start else None,
        addnet=addnet,
        lora_hash=(metadata.get("sshs_model_hash") or addnet or digest)[:12].lower(),
        autov3=_claimed(metadata),
    )


def read_header(path: str | Path) -> tuple[dict[str, str], Shapes]:
    """(metadata, {key: (dtype, shape)}) of a safetensors file; DiffLoRAError if its header is broken."""
    file = Path(path)
    header, _ = _header(file)
    metadata = _metadata(file, header)
    return metadata, {key: _entry(file, key, value) for key, value in header.items() if key != "__metadata__"}


def _claimed(metadata: Mapping[str, str]) -> str | None:
    """AutoV3; some repackaging programs write the hash of nothing, which names no file."""
    claim = metadata.get("sshs_model_hash") or metadata.get("modelspec.hash_sha256") or ""
    digest = claim.strip().lower().removeprefix("0x")[:12]
    return digest if len(digest) == 12 and digest != _OF_NOTHING[:12] else None


def _header(file: Path) -> tuple[dict[str, object], int]:
    """The parsed header, and where the tensors start."""
    with _opened(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        room = file.stat().st_size - 8
        if not 2 <= length <= min(room, _LONGEST_HEADER):
            raise _broken(
                file, f"its header says it is {length} bytes long, with {max(room, 0)} bytes left in the file"
            )
        text = stream.read(length)
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"its header is not JSON ({type(error).__name__})") from error
    if not isinstance(header, dict):
        raise _broken(file, f"its header is a JSON {type(header).__name__}, not an object")
    return header, 8 + length


def _metadata(file: Path, header: Mapping[str, object]) -> dict[str, str]:
    metadata = header.get("__metadata__") or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(file, "its __metadata__ is not a map of strings")
    return metadata


def _entry(file: Path, key: str, value: object) -> tuple[str, tuple[int, ...]]:
    match value:
        case {"dtype": str(dtype), "shape": list(shape)} if all(type(n) is int and n >= 0 for n in shape):
            return dtype, tuple(shape)
    raise _broken(file, f"its header has no dtype and shape for {key!r}")


def _opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise DiffLoRAError(f"{file} cannot be opened: {error.strerror or error}. Expected a file to read.") from error


def _broken(file: Path, reason: str) -> DiffLoRAError:
    return DiffLoRAError(
        f"{file} is not a whole safetensors file: {reason}. It is damaged, incomplete or of another kind; get it again."
    )
