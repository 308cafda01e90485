"""What the README says is what was measured, and what it names exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_the_table_is_that_of_the_records() -> None:
    made = runpy.run_path(str(ROOT / "tests" / "benchmarks" / "readme.py"))
    assert made["replaced"](TEXT) == TEXT, "run python tests/benchmarks/readme.py"


def test_every_file_it_links_exists() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_the_methods_it_names_exist() -> None:
    from difflora import diffusers_api, surface

    promised = re.search(r"`load_lora_weights`, .*?`enable_lora_hotswap`", TEXT, re.S)
    assert promised is not None
    for name in re.findall(r"`(\w+)`", promised[0]):
        assert name in diffusers_api.METHODS, name
    for name in set(re.findall(r"pipe\.(\w*lora\w*)\(", TEXT)) - diffusers_api.METHODS.keys():
        assert name in surface.METHODS, name


def test_the_bundled_adapters_it_names_exist() -> None:
    from difflora.demo import CARDS

    for name in CARDS:
        assert f"`{name}`" in TEXT, name
