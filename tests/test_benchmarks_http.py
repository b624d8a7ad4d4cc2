"""The load test of the server starts and finds nothing wrong; its real length is for a quiet
machine."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def http_load(monkeypatch):
    """The script as a module; how late the event loop is, is not judged on a busy machine."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("http_load")
    monkeypatch.setattr(module, "MAX_LAG_MS", float("inf"))
    return module


async def test_a_short_load_leaves_nothing_behind(http_load, tmp_path, capsys):
    """Clients that read, leave and talk nonsense: right texts, no block or task left."""
    place = http_load.tiny_model(tmp_path)

    code = await http_load.hold_up(place, clients=12, seconds=0.5, seed=0)

    out = capsys.readouterr().out
    assert code == 0, out
    assert "'read'" in out
    assert out.endswith("0 wrong\n")
