"""Who may import whom: the layers of the library, kept by reading every import statement."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [*sorted((ROOT / "difflora").glob("*.py")), *sorted((ROOT / "difflora" / "demo").glob("*.py"))]
LAYERS = [*SOURCES, *sorted((ROOT / "formats").glob("*.py")), *sorted((ROOT / "kernels").glob("*.py"))]
# From the bottom up; a module imports only from layers beneath its own.
ORDER = [
    {"kernels", "deltas", "prompt", "hashes", "peft_config", "slots", "demo"},
    {"functions", "products"},
    {"rotations"},
    {"kinds"},
    {"types", "sources", "metadata", "weaving", "containers", "drafts"},
    {"loading", "targets", "composing", "joining", "spelling", "peft_configs", "claims", "checkpoints", "resizing"},
    {"binding", "widening", "weights", "native_writing", "peft_writing", "mixing", "extracting", "factors"},
    {"ranks", "siblings"},
    {"writing", "headers"},
    {"linear", "merge", "words", "inspecting", "sheets"},
    {"baking", "verifying"},
    {"tools"},
    {"executor"},
    {"runtime"},
    {"table", "calls", "blocks"},
    {"surface"},
    {"diffusers_api"},
    {"attaching"},
    {"opening", "screen"},
    {"drawing", "cli_common"},
    {"cli_files"},
    {"cli_tools"},
    {"cli"},
    {"__main__"},
]
# What is imported when it is called, not before: `Adapter.save` and what writes it.
LATE = {("types", "writing")}
# Third-party packages that only these modules may name.
ONLY = {
    "diffusers": {"attaching", "demo", "opening"},
    "safetensors": {"loading", "tools", "demo"},
    "typer": {"cli", "cli_common", "cli_files", "cli_tools", "drawing"},
    "rich": {"screen"},
    "huggingface_hub": {"sources"},
    "triton": {"kernels"},
    "gradio": set(),
    "peft": {"demo"},
    "lycoris": {"demo"},
    "transformers": {"demo"},
    "accelerate": set(),
}


def owner(source: Path) -> str:
    """The name that the tables use: the module, or its folder for demo/, formats/ and kernels/."""
    return source.parent.name if source.parent.name in ("demo", "formats", "kernels") else source.stem


def imported(source: Path) -> Iterator[str]:
    """Every module that the file imports, `from a import b` as both `a` and `a.b`."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rank(name: str) -> int:
    return next((i for i, layer in enumerate(ORDER) if name in layer), -1)


@pytest.mark.parametrize("source", LAYERS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_third_party_packages_stay_where_they_belong(source: Path) -> None:
    for name in imported(source):
        allowed = ONLY.get(name.split(".")[0])
        assert allowed is None or owner(source) in allowed, f"{source.name} imports {name}"


@pytest.mark.parametrize("source", sorted((ROOT / "formats").glob("*.py")), ids=lambda p: p.stem)
def test_formats_know_names_and_shapes_only(source: Path) -> None:
    import sys

    for name in imported(source):
        root = name.split(".")[0]
        assert name.startswith("difflora.formats") or root in sys.stdlib_module_names, f"{source.name} imports {name}"


@pytest.mark.parametrize(
    "source", [s for s in SOURCES if s.stem != "__init__"], ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_layers_import_downwards(source: Path) -> None:
    mine = rank(owner(source))
    assert mine >= 0, f"{source.name} has no place in ORDER"
    for name in imported(source):
        parts = name.split(".")
        if parts[0] != "difflora" or len(parts) < 2 or parts[1] in ("formats", owner(source)):
            continue
        level = rank(parts[1])
        types_only = parts[1] == "deltas" or (owner(source), parts[1]) in LATE
        assert level < mine or types_only or level == -1, f"{source.name} imports {name}, which is not beneath it"


def test_kernels_and_formats_never_meet() -> None:
    for folder, other in (("kernels", "formats"), ("formats", "kernels")):
        for source in (ROOT / folder).glob("*.py"):
            assert not any(f"difflora.{other}" in name for name in imported(source))


def test_keyword_bags_only_where_a_diffusers_signature_passes_through() -> None:
    allowed = {"attaching", "diffusers_api", "linear", "demo"}
    for source in LAYERS:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None:
                assert owner(source) in allowed, f"{source.name}:{node.lineno} {node.name}(**{node.args.kwarg.arg})"
