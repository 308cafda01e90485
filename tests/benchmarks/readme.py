"""The README's tables of what loads and of what was measured, made from the committed JSON records.

`python tests/benchmarks/readme.py` writes them between their marks; a test fails while the README says something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
    rows += _on_a_gpu()
    lines = ["| what | measured | wanted |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _on_a_gpu() -> list[tuple[str, str, str]]:
    """The rows of FLUX.1-dev's shape on a GPU."""
    full = read("tests/benchmarks/transformer.json")
    before = full["before the GEMM kernel was in the plan"]
    one, three = "eager one r=64", "eager three r=16+64+32"
    return [
        (
            f"FLUX.1-dev shape, {full['device']}, kernel mode, one adapter r=64, eager",
            f"{before[f'difflora {one} over']:+.1%} a step (PEFT {before[f'peft {one} over']:+.1%})",
            "≤ +5 %",
        ),
        (
            "the same, three adapters r=16+64+32",
            f"{before[f'difflora {three} over']:+.1%} (PEFT {before[f'peft {three} over']:+.1%})",
            "≤ +7 %",
        ),
        ("8 images with 8 adapters in one batch", f"{full['difflora batch 8 over']:+.1%}", "≤ +7 %"),
        (
            "`set_loras`, merged, all 494 layers at r=64",
            f"{full['set_loras, merged, r=64']:.0f} ms, of it {full['merge r=64 (128, 64, 64, 2, 4)']:.1f} on the GPU",
            "14 ms",
        ),
        (
            "unload one adapter and load another, r=64",
            f"{full['difflora unload + load r=64']:.0f} ms (PEFT's load alone {full['peft load r=64']:.0f} ms)",
            "38 ms",
        ),
    ]


def percent(score: Mapping[str, float], name: str) -> str:
    return f"{score[name]:g} %"


def support() -> str:
    """Which families, layouts and kinds load, and what is refused, in Markdown."""
    record = read("tests/support.json")
    alike: dict[tuple[tuple[str, tuple[str, ...]], ...], list[str]] = {}
    for family in record["families"]:
        alike.setdefault(_lost(record, family), []).append(family)
    lines = ["| families | layouts | kinds |", "|---|---|---|"]
    for pattern, families in alike.items():
        for kinds, layouts in _grouped(pattern).items():
            where = "all" if len(layouts) == len(record["layouts"]) else ", ".join(layouts)
            what = f"all but {', '.join(kinds)}" if kinds else "all"
            lines.append(f"| {', '.join(families)} | {where} | {what} |")
    said = [f"\nWhere not all load, {reason}." for reason in dict.fromkeys(record["refused"].values())]
    refused = [f"- {refusal.kind}: {refusal.reason}." for refusal in REFUSALS]
    names = (
        f"\nThe {len(record['layouts'])} layouts: {', '.join(record['layouts'])} (`peft` by its names and config; the "
        f"kinds that PEFT spells in its own way are below). The {len(record['kinds'])} kinds: "
        f"{'; '.join(record['kinds'])}."
    )
    return (
        "\n".join([*lines, names, *said, _peers(), "\nRefused by name, in every family and layout:\n", *refused]) + "\n"
    )


def _lost(record: Any, family: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(layout, kinds that do not load there) of a family."""
    return tuple(
        (layout, tuple(kind for kind in record["kinds"] if f"{family}, {layout}, {kind}" in record["refused"]))
        for layout in record["layouts"]
    )


def _grouped(pattern: Iterable[tuple[str, tuple[str, ...]]]) -> dict[tuple[str, ...], list[str]]:
    found: dict[tuple[str, ...], list[str]] = {}
    for layout, kinds in pattern:
        found.setdefault(kinds, []).append(layout)
    return found


def _peers() -> str:
    peers = read("tests/peers.json")
    silent, refused = peers["counts"]["silent"], peers["counts"]["refused"]
    files, right = silent["files"], silent["files right in diffusers"]
    wrong = silent["files wrong without an error in diffusers"]
    lost = refused["files"] - refused["files right in difflora"]
    return (
        f"\nMeasured beside diffusers {peers['versions']['diffusers']} on tiny models of every family "
        "(`tests/test_peers.py`):\n\n"
        "| files | diffusers | difflora |\n|---|---|---|\n"
        f"| {files} files of {silent['rows']} sorts that diffusers is known to misread | {right} right, {wrong} wrong "
        f"or without effect and no error, {files - right - wrong} refused | "
        f"{silent['files right in difflora']} right |\n"
        f"| {refused['files']} files of {refused['rows']} sorts that diffusers refuses | {refused['files']} refused | "
        f"{refused['files right in difflora']} right, {lost} refused: it holds no adapter |"
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
