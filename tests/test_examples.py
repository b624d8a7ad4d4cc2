"""The examples run as they stand, on the demo model."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "getting_started"


@pytest.mark.real_model
@pytest.mark.timeout(300)  # loads the model and answers, maybe on a busy machine
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("text_generation", "The capital of France is Paris."),
        ("streaming", ""),
        ("gguf_locally", "The capital of France is Paris."),
        ("batching", "France: The capital of France is Paris."),
    ],
)
async def test_example_runs(name, shown, demo_model, monkeypatch, capsys):
    """Each example prints an answer."""
    monkeypatch.syspath_prepend(FOLDER)

    await importlib.import_module(name).main(str(demo_model))

    out = capsys.readouterr().out
    assert out.strip()
    assert shown in out
