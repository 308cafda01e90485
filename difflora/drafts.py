"""Files and folders that are there whole or not at all: written beside their place, moved there at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from difflora.formats.errors import DiffLoRAError


def check_free(path: Path, force: bool) -> None:
    """DiffLoRAError if something is there already, or the folder that it shall be in is not."""
    if not path.parent.is_dir():
        raise DiffLoRAError(f"there is no folder {path.parent}; make it first.")
    if (path.exists() or path.is_symlink()) and not force:
        raise DiffLoRAError(f"{path} exists; pass force=True (--force) to overwrite it.")


@contextmanager
def placed(path: Path, force: bool) -> Iterator[Path]:
    """A path beside the target to write a file or a folder to, which takes the target's place if all goes well.

    In a folder that is there already, the files that were written replace those of their names, and no others.
    `.NAME.PID.partial` is what a killed process leaves; until the end the target is as it was.
    """
    check_free(path, force)
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield draft
        if draft.is_dir() and path.is_dir():
            _moved(draft, path)
        else:
            os.replace(draft, path)
    except OSError as error:
        raise DiffLoRAError(f"{path} cannot be written: {error.strerror or error}. Nothing was changed.") from error
    finally:
        if draft.is_dir():
            shutil.rmtree(draft)
        else:
            draft.unlink(missing_ok=True)


def _moved(draft: Path, target: Path) -> None:
    for file in sorted(file for file in draft.rglob("*") if file.is_file()):
        place = target / file.relative_to(draft)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)
