"""Files that diffusers applies wrongly or refuses, by row of what is known: difflora applies them as they are meant.

Every file is made for a tiny model of diffusers' own class, and every change is compared with plain arithmetic.  What
diffusers does is measured in the same process and kept in peers.json, for the versions that are written there:
`python tests/test_peers.py` measures again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from peers.common import COMMON
from peers.files import File
from peers.models import pipeline
from peers.outcomes import Case, judged, of_difflora, of_diffusers, weights
from peers.refused import REFUSED
from peers.silent import SILENT

RECORD = Path(__file__).parent / "peers.json"
# What diffusers loads and applies wrongly, what it refuses, and what it applies right.
TABLES: Mapping[str, tuple[Case, ...]] = {"silent": SILENT, "refused": REFUSED, "common": COMMON}
CASES = {case.name: case for cases in TABLES.values() for case in cases}
_KNOWN = json.loads(RECORD.read_text()) if RECORD.exists() else {"versions": {}, "files": {}}


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("diffusers", "peft", "transformers")}


@pytest.mark.parametrize("name", CASES)
def test_difflora_applies_it_as_it_is_meant(name: str) -> None:
    outcome = of_difflora(CASES[name])
    if CASES[name].refused:
        assert re.match(f"refuses: .*{CASES[name].refused}", outcome, re.DOTALL), outcome
    else:
        assert outcome == "right"


@pytest.mark.skipif(_KNOWN["versions"] != _versions(), reason="recorded with other versions")
@pytest.mark.parametrize("name", CASES)
def test_diffusers_does_what_is_written_down(name: str) -> None:
    assert of_diffusers(CASES[name]) == _KNOWN["files"][name]["diffusers"]


def test_the_record_is_of_these_files() -> None:
    assert list(_KNOWN["files"]) == [case.name for cases in TABLES.values() for case in cases]
    assert _KNOWN["counts"] == counts(_KNOWN["files"])


@pytest.mark.parametrize("case", COMMON, ids=lambda case: case.name)
def test_diffusers_applies_the_common_ones(case: Case) -> None:
    """So that what it does with the others is not due to the tiny models or to the measurement."""
    assert _KNOWN["files"][case.name]["diffusers"] == "right"


def counts(files: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, int]]:
    """How many rows and files there are, and of how many every file that means something is applied right."""
    found = {}
    for table, cases in TABLES.items():
        meant = [case for case in cases if not case.refused]
        found[table] = {
            "rows": len({case.row for case in cases}),
            "files": len(cases),
            "without meaning": len(cases) - len(meant),
        }
        for library in ("difflora", "diffusers"):
            wrong = [case for case in meant if files[case.name][library] != "right"]
            found[table][f"rows right in {library}"] = len({c.row for c in meant} - {c.row for c in wrong})
            found[table][f"files right in {library}"] = len(meant) - len(wrong)
            silent = [case for case in wrong if files[case.name][library].startswith("changes")]
            found[table][f"files wrong without an error in {library}"] = len(silent)
    return found


# ---- whether the comparison can fail --------------------------------------------------------------------------------


def _file() -> File:
    file = File(pipeline("Wan"))
    file.lora("blocks.0.attn1.to_q", "blocks.0.attn1.to_q")
    file.diff("blocks.0.norm2.diff", "blocks.0.norm2.weight")
    return file


@torch.no_grad()
def _applied(file: File, factor: float) -> dict[str, Any]:
    after = weights(file.pipe)
    for name, change in file.changes.items():
        after[name] += (factor * change).float().reshape(after[name].shape)
    return after


@pytest.mark.parametrize(
    ("factor", "outcome"),
    [(1.0, "right"), (0.0, "changes nothing"), (1.0001, "changes 0 of 2 parameters right"),
     (0.5, "changes 0 of 2 parameters right")],
)  # fmt: skip
def test_a_change_of_another_strength_is_wrong(factor: float, outcome: str) -> None:
    file = _file()
    assert judged(weights(file.pipe), _applied(file, factor), file) == outcome


def test_a_change_of_another_module_is_wrong() -> None:
    file = _file()
    after = _applied(file, 1.0)
    after["transformer.blocks.1.attn1.to_q.weight"] += 1e-6
    outcome = judged(weights(file.pipe), after, file)
    assert outcome == "changes 2 of 2 parameters right, and 1 that are not in the file"


def record() -> dict[str, Any]:
    """Everything measured anew; a refusal by difflora without its text, which names the reason."""
    files = {}
    for name, case in CASES.items():
        ours = of_difflora(case)
        files[name] = {"difflora": "refuses" if ours.startswith("refuses") else ours, "diffusers": of_diffusers(case)}
    return {"versions": _versions(), "counts": counts(files), "files": files}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=1) + "\n")
