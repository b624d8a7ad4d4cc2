"""docs/tuning.md: the tests and plots it names exist, and each row says what shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mistralrs_sdk.config import EngineConfig

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_named_test_exists(file):
    """A test that is renamed or removed is renamed or removed in the page too."""
    source = (ROOT / "tests" / file).read_text(encoding="utf-8")
    defined = set(re.findall(r"^(?:async )?def (test_\w+)\(", source, re.MULTILINE))

    assert {name for other, name in NAMED if other == file} - defined == set()


def test_every_sentence_names_what_shows_it():
    """Each row of the table has three cells, and tests in the last."""
    table = PAGE.partition("| mistral.rs says |")[2].splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line]

    assert len(rows) > 30
    assert all(len(row) == 3 and all(row) for row in rows)
    unshown = [row for row in rows if not re.search(r"`test_\w+\.py::test_\w+`", row[2])]
    assert unshown == []


def test_plots_and_pages_belong_together():
    """Every plot a page shows is there, and none lies around that none shows."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    shown = set(re.findall(r"\]\(plots/(\w+\.png)\)", pages))

    assert shown == {path.name for path in (ROOT / "docs" / "plots").iterdir()}


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_prefill_chunk_tokens", "max_decode_steps_before_prefill"]
)
def test_defaults_in_the_text_are_the_real_ones(name):
    """The section of a knob gives its default in brackets."""
    section = re.search(rf"^##.*`{name}`\n\n(.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)

    assert section
    assert re.search(rf"\({getattr(EngineConfig(), name)}[);]", section.group(1))
