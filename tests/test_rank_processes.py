"""What is left of a rank that ended: how, and its last lines."""

from __future__ import annotations

import pytest

from mistralrs_sdk import EngineConfig
from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.engine import rank_processes
from mistralrs_sdk.engine.rank_place import RankPlace
from mistralrs_sdk.engine.rank_processes import RankProcess, RankTask

PLACE = RankPlace(rank=1, size=2, local_rank=1, local_size=2)
TASK = RankTask(place=PLACE, source=ModelSource(model_id="x"), config=EngineConfig())


def last_words(monkeypatch, program: str) -> list[str]:
    """What is said of a rank that ran this program instead of its own."""
    monkeypatch.setattr(rank_processes, "_START", program)
    process = RankProcess(TASK)
    process.end(20)
    return process.last_words(20).splitlines()


def test_a_rank_leaves_its_exit_code_and_its_last_lines(monkeypatch):
    """Forty of them."""
    found = last_words(monkeypatch, "print(*range(100), sep='\\n'); raise SystemExit(3)")

    assert found[0] == "ended with exit code 3; its last output was:"
    assert found[1:] == [str(number) for number in range(60, 100)]


def test_a_rank_that_wrote_nothing_says_so(monkeypatch):
    """By a signal, with its number."""
    found = last_words(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")

    assert found == ["was ended by signal 9; it wrote nothing"]


@pytest.mark.parametrize("stacks", [10, 100])
def test_a_crash_keeps_its_cause_however_long_the_stacks_are(monkeypatch, stacks):
    """The stacks of all threads follow it, and may be more lines than are kept."""
    found = last_words(
        monkeypatch, f"print('Fatal Python error: Aborted', *range({stacks}), sep='\\n')"
    )

    cut = ["..."] if stacks == 100 else []
    kept = [str(number) for number in range(stacks)][-40:]
    assert found[1:] == ["Fatal Python error: Aborted", *cut, *kept]
