"""The README's tables of what loads and of what was measured, made from the committed JSON records.

`python tests/benchmarks/readme.py` writes them between their marks; a test fails while the README says something else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from difflora.formats.refusals import REFUSALS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def read(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def measured() -> str:
    """What was measured, in Markdown."""
    cost, names = read("tests/benchmarks/import_cost.json"), read("tests/benchmarks/normalise.json")
    gpu, scores = read("tests/gpu.json"), read("difflora/demo/scores.json")
    passed = sum(test["outcome"] == "passed" for test in gpu["tests"].values())
    base, fast = scores["base"], scores["adapters"]["fast"]
    rows = [
        ("`import difflora`", f"{cost['cpu_seconds']['import difflora']} s of CPU time", "≤ 0.25 s"),
        ("`difflora --help`", f"{cost['cpu_seconds']['difflora --help']} s of CPU time", "≤ 0.5 s"),
        (f"names of a {names['keys']}-key FLUX.1 file", f"{names['median_s']:.3f} s", "≤ 0.2 s"),
        (f"GPU tests ({gpu['device']}, torch {gpu['torch']})", f"{passed} of {len(gpu['tests'])} pass", "all"),
        (
            f"bundled model, {scores['captions']} captions, 16 steps: colour",
            percent(base["16 steps"], "colour"),
            "≥ 95 %",
        ),
        ("the same: shape", percent(base["16 steps"], "shape"), "≥ 90 %"),
        ("the same: both", percent(base["16 steps"], "both"), ""),
        ("4 steps: both", percent(base["4 steps"], "both"), "≥ 10 points below"),
        ("4 steps with `fast`: both", percent(fast["4 steps"], "both"), "that of 16 steps"),
    ]
    mutated = [test["outcomes"] for test in read("tests/soak.json")["tests"].values() if "outcomes" in test]
    files = sum(sum(one.values()) for one in mutated)
    rows.insert(4, (f"{files:,} mutated files: errors that are not ours, hangs, changes left behind", "0", "0"))
    lines = ["| what | measured | wanted |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def percent(score: Mapping[str, float], name: str) -> str:
    return f"{score[name]:g} %"


def support() -> str:
    """Which families, layouts and kinds load, and what is refused, in Markdown."""
    record = read("tests/support.json")
    lines = [f"| family | {' | '.join(record['layouts'])} |", f"|---|{'---|' * len(record['layouts'])}"]
    for family in record["families"]:
        cells = []
        for layout in record["layouts"]:
            lost = [kind for kind in record["kinds"] if f"{family}, {layout}, {kind}" in record["refused"]]
            cells.append(f"all but {', '.join(lost)}" if lost else "all")
        lines.append(f"| {family} | {' | '.join(cells)} |")
    said = [f"\nWhere not all load, {reason}." for reason in dict.fromkeys(record["refused"].values())]
    refused = [f"- {refusal.kind}: {refusal.reason}." for refusal in REFUSALS]
    peers = read("tests/peers.json")
    silent, refused_there = peers["counts"]["silent"], peers["counts"]["refused"]
    compared = (
        f"\nBeside diffusers {peers['versions']['diffusers']}, one process, tiny models of every family: of "
        f"{silent['files']} files of the {silent['rows']} sorts that it is known to read wrongly, diffusers is right "
        f"with {silent['files right in diffusers']} and, without an error, wrong or idle with "
        f"{silent['files wrong without an error in diffusers']}; difflora is right with "
        f"{silent['files right in difflora']}. Of {refused_there['files']} files of {refused_there['rows']} sorts that "
        f"it refuses, difflora loads {refused_there['files right in difflora']} rightly and refuses "
        f"{refused_there['files'] - refused_there['files right in difflora']}, which holds no adapter "
        "(`tests/test_peers.py`)."
    )
    kinds = f"\nThe {len(record['kinds'])} kinds: {', '.join(record['kinds'])}."
    return (
        "\n".join([*lines, *said, kinds, compared, "\nRefused by name, in every family and layout:\n", *refused]) + "\n"
    )


# mark -> what stands between its two comments
PARTS = {"support": support, "measured": measured}


def replaced(text: str) -> str:
    """The README with its tables made anew."""
    for mark, part in PARTS.items():
        begin, end = f"<!-- {mark}: begin -->\n", f"<!-- {mark}: end -->\n"
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = head + begin + part() + end + tail
    return text


if __name__ == "__main__":
    README.write_text(replaced(README.read_text()))
