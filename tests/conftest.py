"""The tiny pipelines of tiny.py, fresh for each test."""

from __future__ import annotations

import pytest
import tiny
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
