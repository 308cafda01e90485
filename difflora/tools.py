"""Tools for adapter files and checkpoints, and the grid of pictures: every public function, from its own module."""

from __future__ import annotations

from difflora.baking import Baked, bake
from difflora.extracting import extract
from difflora.hashes import Hashes, hashes
from difflora.headers import metadata_of, set_metadata, strip_metadata
from difflora.inspecting import Inspection, inspect, inspect_adapter
from difflora.mixing import merge
from difflora.resizing import Resized, resize
from difflora.sheets import grid
from difflora.verifying import Verification, verify

__all__ = [
    "Baked",
    "Hashes",
    "Inspection",
    "Resized",
    "Verification",
    "bake",
    "extract",
    "grid",
    "hashes",
    "inspect",
    "inspect_adapter",
    "merge",
    "metadata_of",
    "resize",
    "set_metadata",
    "strip_metadata",
    "verify",
]
