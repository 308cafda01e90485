"""The tiny pipelines of tiny.py, fresh for each test, and a record of a run as JSON."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from diffusers import FluxPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline


@pytest.fixture
def flux() -> FluxPipeline:
    return tiny.flux_pipeline()


@pytest.fixture
def sd() -> StableDiffusionPipeline:
    return tiny.sd_pipeline()


@pytest.fixture
def sdxl() -> StableDiffusionXLPipeline:
    return tiny.sdxl_pipeline()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", help="write device, versions and every test's outcome as JSON")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = config.getoption("--record")
    if not path:
        return
    done = [
        r for kind in ("passed", "failed", "error") for r in terminalreporter.stats.get(kind, ()) if r.when == "call"
    ]
    versions = {name: version(name) for name in ("torch", "diffusers", "transformers", "accelerate", "peft")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    tests = {r.nodeid: {"outcome": r.outcome, "seconds": round(r.duration, 2), **dict(r.user_properties)} for r in done}
    record = {"device": device, "python": platform.python_version(), **versions, "tests": tests}
    Path(path).write_text(json.dumps(record, indent=1) + "\n")
