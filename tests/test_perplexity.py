"""examples/advanced/perplexity.py: equal to Hugging Face's loss, window by window."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch

from tests.model_helpers import tiny_builder, tiny_folder
from tests.tiny_models import hf_logits

FOLDER = Path(__file__).parent.parent / "examples" / "advanced"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", ["perplexity.py"])
    return importlib.import_module("perplexity")


async def test_perplexity_is_hugging_faces(example):
    """Windows of their own, the last one shorter; a window of one token predicts nothing."""
    text = "the rain in spain stays mainly in the plain " * 6
    async with await tiny_builder().build() as model:
        ids = await model.tokenize(text)
        ours = [await example.perplexity(model, text, window=w) for w in (50, len(ids) - 1, 500)]

    for window, found in zip((50, len(ids) - 1, 500), ours, strict=True):
        losses = []
        for start in range(0, len(ids), window):
            part = ids[start : start + window]
            rows = hf_logits(tiny_folder(), part)[:-1].log_softmax(-1)
            targets = torch.tensor(part[1:], dtype=torch.int64)
            losses += (-rows[torch.arange(len(targets)), targets]).tolist()
        assert found == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


@pytest.mark.real_model
@pytest.mark.timeout(300)  # loads the model and reads a text, maybe on a busy machine
async def test_the_example_runs_on_the_demo_model(example, demo_model, capsys):
    """It prints a perplexity of a model that knows English."""
    await example.main(str(demo_model))

    name, value = capsys.readouterr().out.split()
    assert name == "perplexity:"
    assert 1 < float(value) < 40
