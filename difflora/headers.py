"""Metadata of safetensors files, read and rewritten: the header alone changes, the bytes of the tensors are copied."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from difflora.claims import SCALES
from difflora.containers import Entry, Stored, contents, encoded, legacy_digest, ordered
from difflora.drafts import check_free, placed
from difflora.formats.errors import DiffLoRAError, some
from difflora.formats.evidence import FAMILY
from difflora.hashes import read_header
from difflora.loading import normalise, read

_CHUNK = 1 << 22
# Without these a file is read as another one, or by fewer programs.
_NEEDED = SCALES | {"format", FAMILY}


def metadata_of(file: str | Path) -> dict[str, str]:
    """The metadata in the header of a file; DiffLoRAError if it is broken."""
    return read_header(file)[0]


def set_metadata(
    file: str | Path,
    values: Mapping[str, str],
    output: str | Path | None = None,
    *,
    force: bool = False,
    dry_run: bool = False,
) -> dict[str, str]:
    """The metadata of `output` (None: of the file itself, which takes `force`), which has these values beside its own.

    DiffLoRAError for values that are no texts, for a broken file, and for what is there already unless `force`.
    """
    wrong = [f"{key}={value!r}" for key, value in values.items() if not isinstance(value, str) or not key]
    if wrong or not values:
        raise DiffLoRAError(f"metadata are texts by name; got {some(wrong) or 'none'}. Expected KEY=VALUE.")
    return _rewritten(Path(file), {**metadata_of(file), **values}, values, output, force, dry_run)


def strip_metadata(
    file: str | Path,
    keep: Iterable[str] = (),
    output: str | Path | None = None,
    *,
    force: bool = False,
    dry_run: bool = False,
) -> dict[str, str]:
    """The metadata of `output` (None: of the file itself, which takes `force`), those named in `keep` and no others.

    What a reader needs to know the tensors' scale and family stays.  DiffLoRAError for a name in `keep` that the file
    has not.
    """
    own, kept = metadata_of(file), {*keep}
    missing = sorted(kept - own.keys())
    if missing:
        raise DiffLoRAError(f"{file} has no metadata {some(missing)}; it has {some(sorted(own)) or 'none'}.")
    left = {key: text for key, text in own.items() if key in kept or {key, key.rpartition(".")[2]} & _NEEDED}
    return _rewritten(Path(file), left, left, output, force, dry_run)


def _rewritten(
    file: Path, metadata: Mapping[str, str], said: Iterable[str], output: str | Path | None, force: bool, dry_run: bool
) -> dict[str, str]:
    before, tensors = contents(file)
    target = file if output is None else Path(output)
    found = dict(metadata)
    # What sd-scripts hashes begins with a header of the ss_ fields alone: where they change, so may the hash.
    if "sshs_legacy_hash" in found and "sshs_legacy_hash" not in said and _trained(before) != _trained(found):
        found["sshs_legacy_hash"] = legacy_digest(_entries(tensors), _trained(found))
    check_free(target, force)
    _check_readable(file, found)
    if not dry_run:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            with placed(target, force) as draft, draft.open("wb") as copy:
                copy.write(encoded({"__metadata__": found, **header} if found else header))
                for chunk in iter(lambda: stream.read(_CHUNK), b""):
                    copy.write(chunk)
                copy.flush()
                os.fsync(copy.fileno())
    return found


def _check_readable(file: Path, metadata: Mapping[str, str]) -> None:
    """DiffLoRAError if the file is an adapter, and would be none with these metadata."""
    try:
        before = read(file)
        normalise(before)
    except DiffLoRAError:
        return
    normalise(replace(before, metadata=metadata))


def _trained(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in metadata.items() if key.startswith("ss_")}


def _entries(tensors: Mapping[str, Stored]) -> dict[str, Entry]:
    return ordered({key: Entry(one.dtype, one.shape, one.stop - one.start, one.chunks) for key, one in tensors.items()})
