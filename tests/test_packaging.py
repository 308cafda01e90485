"""The folders at the root import as parts of difflora and never hide Hugging Face's `kernels`."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("folder", ["kernels", "formats", "tests", "tests/formats", "tests/kernels", "tests/demo"])
def test_no_package_of_that_name_at_the_root(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_the_links_lead_to_the_folders() -> None:
    for name in ("kernels", "formats"):
        assert os.readlink(ROOT / "difflora" / name) == f"../{name}"


def test_hugging_face_kernels_is_never_shadowed(tmp_path: Path) -> None:
    """With a stand-in for Hugging Face's package installed, a script at the root still gets that one."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("def get_kernel(): return 'theirs'\n")
    code = "import difflora.formats.match, kernels; print(kernels.get_kernel())"
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "theirs", done.stderr


def test_every_folder_with_code_is_in_the_wheel() -> None:
    """A folder missing from the map would be missing from wheels only, where nobody looks."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"difflora", "difflora.kernels", "difflora.formats"}
    for source in (ROOT / "difflora").rglob("*.py"):
        found.add(".".join(source.relative_to(ROOT).parent.parts))
    for folder in ("kernels", "formats"):
        nested = {p.parent for p in (ROOT / folder).rglob("*.py")} - {ROOT / folder}
        assert not nested, f"{folder}/ stays flat: {nested}"
    assert found == listed


def test_importing_is_light() -> None:
    """`import difflora` and reading key names need neither torch nor diffusers nor triton nor gradio."""
    heavy = "{'torch', 'diffusers', 'transformers', 'triton', 'gradio', 'peft', 'numpy', 'rich', 'typer'}"
    code = f"import sys, difflora, difflora.formats.match, difflora.prompt; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_submodules_do_not_hide_the_functions() -> None:
    """Importing every module leaves `difflora.load`, `bind`, ... callable: no module has the name of a function."""
    code = (
        "import difflora, difflora.attaching, difflora.loading, difflora.binding, difflora.composing\n"
        "print([name for name in difflora.__all__ if name != '__version__' and not callable(getattr(difflora, name))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
