"""The safetensors container, read and written tensor by tensor: never a whole file in memory.

A file is 8 bytes (little endian: n), n bytes of JSON header, then the tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from difflora.formats.errors import DiffLoRAError
from difflora.hashes import read_header

_CHUNK = 1 << 22
# From what the library writes last to what it writes first, by its own order of types.
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "C64": torch.complex64,
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_RANK = {name: n for n, name in enumerate(_DTYPES)}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file: its type, its shape, and the bytes [start, stop) that it is."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def chunks(self) -> Iterator[bytes]:
        """The bytes, as they are."""
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            left = self.stop - self.start
            while left and (chunk := stream.read(min(left, _CHUNK))):
                left -= len(chunk)
                yield chunk

    def tensor(self) -> Tensor:
        """The values, in memory of their own; DiffLoRAError for a type that torch has not."""
        if self.dtype not in _DTYPES:
            raise DiffLoRAError(
                f"{self.file}: tensors of type {self.dtype} cannot be read; expected floating-point ones."
            )
        data = bytearray().join(self.chunks())
        flat = torch.frombuffer(data, dtype=_DTYPES[self.dtype]) if data else torch.empty(0, dtype=_DTYPES[self.dtype])
        return flat.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to write, and how many bytes it is; they are asked for when it is its turn."""

    dtype: str
    shape: tuple[int, ...]
    size: int
    chunks: Callable[[], Iterable[bytes | memoryview]]


def contents(file: Path) -> tuple[dict[str, str], dict[str, Stored]]:
    """(metadata, key -> tensor) of a safetensors file, in the order of its bytes; DiffLoRAError if it is broken."""
    metadata, shapes = read_header(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    found: dict[str, Stored] = {}
    size = file.stat().st_size
    for key, (dtype, shape) in shapes.items():
        match header[key].get("data_offsets"):
            case [int(start), int(stop)] if 0 <= start <= stop <= size - 8 - length:
                found[key] = Stored(file, dtype, shape, 8 + length + start, 8 + length + stop)
            case _:
                raise DiffLoRAError(
                    f"{file} is not a whole safetensors file: {key!r} lies outside of it. Get it again."
                )
    return metadata, dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)))


def entry(tensor: Tensor) -> Entry:
    """A tensor in memory as what is written."""
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype not in _NAMES:
        raise DiffLoRAError(f"tensors of type {plain.dtype} have no place in safetensors files.")
    return Entry(_NAMES[plain.dtype], tuple(plain.shape), plain.nbytes, lambda: (raw(plain),))


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    return memoryview(tensor.flatten().view(torch.uint8).numpy().data)


def ordered(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries as the safetensors library orders their bytes: wide types first, then by name."""
    return dict(sorted(entries.items(), key=lambda item: (-_RANK.get(item[1].dtype, -1), item[0])))


def header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """What a file begins with: the length, and the JSON padded to a multiple of 8 bytes as the library does."""
    found: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for key, one in entries.items():
        found[key] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [at, at + one.size]}
        at += one.size
    return encoded(found)


def encoded(found: Mapping[str, object]) -> bytes:
    """A header's JSON with its length before it."""
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(
    path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str], advance: Callable[[], None] | None = None
) -> None:
    """Write a whole file; peak memory is that of one entry.  `advance` is called after each tensor."""
    with path.open("wb") as stream:
        stream.write(header(entries, metadata))
        for key, one in entries.items():
            written = sum(_put(stream, one.chunks()))
            if written != one.size:
                raise DiffLoRAError(f"{key} came to {written} bytes instead of {one.size}; nothing was written.")
            if advance:
                advance()
        stream.flush()
        os.fsync(stream.fileno())


def _put(stream: BinaryIO, chunks: Iterable[bytes | memoryview]) -> Iterator[int]:
    for chunk in chunks:
        yield stream.write(chunk)


def digest(entries: Mapping[str, Entry]) -> str:
    """sha256 of the tensors as they are written, without the header."""
    found = sha256()
    for one in entries.values():
        for chunk in one.chunks():
            found.update(chunk)
    return found.hexdigest()


def legacy_digest(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> str:
    """8 digits of sha256 over bytes 0x100000 to 0x110000 of the file with this metadata."""
    found, at = sha256(), 0
    for chunk in (header(entries, metadata), *(chunk for one in entries.values() for chunk in one.chunks())):
        found.update(memoryview(chunk)[max(0x100000 - at, 0) : max(0x110000 - at, 0)])
        at += len(chunk)
    return found.hexdigest()[:8]
