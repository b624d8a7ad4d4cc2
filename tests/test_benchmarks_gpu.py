"""The script for GPUs: it runs on stand-ins, finds what is wrong, and outlives what crashes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def module(name: str):
    return importlib.import_module(name)


def open_book(tmp_path: Path, **changes):
    options = {"stage": "stage", "until": time.time() + 60} | changes
    return module("gpu_check_report").Book(tmp_path / "findings.jsonl", **options)


def findings(tmp_path: Path) -> list:
    return module("gpu_check_report").read_findings(tmp_path / "findings.jsonl")


def make_answer(*ids: int, gap: float = 1.0):
    """Token 9 is nearly as likely as each of its tokens, 8 is not."""
    return module("gpu_check_answers").Answer(
        prompt=(5,), ids=ids, logprobs=tuple({i: -1.0, 9: -1.0 - gap, 8: -7.0} for i in ids)
    )


def test_the_whole_script_passes_on_stand_ins(tmp_path):
    """Every stage of it, in the smallest sizes; nothing fails, and the findings are written."""
    done = subprocess.run(
        [
            *(sys.executable, BENCHMARKS / "gpu_check.py", "--device", "cpu", "--tiny"),
            *("--together", "--json", tmp_path / "found.json", "--work", tmp_path),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    verdicts = [finding["verdict"] for finding in found]
    assert "failed" not in verdicts
    assert verdicts.count("passed") >= 15
    stages = list(dict.fromkeys(finding["stage"] for finding in found))
    assert stages == list(module("gpu_check").STAGES)
    assert [entry.name for entry in tmp_path.iterdir()] == ["found.json"]


# What is written down


def test_a_check_that_raises_has_failed_and_the_next_is_made(tmp_path, capsys):
    """Its error is its finding, that of a group of tasks too."""
    book = open_book(tmp_path)
    with book.check("first"):
        raise ExceptionGroup("tasks", [RuntimeError("lost\nblocks")])
    with book.check("second") as check:
        check.expect(True, "right", number=1)
        check.expect(False, "wrong")
        check.expect(True, "right again")

    first, second = findings(tmp_path)
    assert (first.verdict, first.text) == ("failed", "RuntimeError: lost blocks")
    assert (second.verdict, second.text) == ("failed", "right; NOT SO: wrong; right again")
    assert second.numbers == {"number": 1}


def test_a_check_that_expects_nothing_only_measures(tmp_path):
    """And one for which there is no time is left out."""
    book = open_book(tmp_path, until=time.time() + 5)
    with book.check("rate") as check:
        check.say("7 tokens/s", rate=7)
    with book.check("slow"):
        book.require_time(60)

    assert [finding.verdict for finding in findings(tmp_path)] == ["measured", "left out"]


@pytest.mark.parametrize(
    ("code", "seconds", "text"),
    [
        ("import os; os.abort()", 60, "the process ended with exit code -6"),
        ("import time; time.sleep(60)", 3, "it was stopped after 3 s"),
    ],
)
def test_a_stage_that_crashes_or_hangs_has_failed_at_its_check(
    tmp_path, monkeypatch, code, seconds, text
):
    """What it had found by then stays."""
    monkeypatch.setitem(module("gpu_check").STAGES, "stage", seconds)
    path = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})"
    book = f"Book(Path({str(tmp_path / 'findings.jsonl')!r}), stage='stage', until=0)"
    script = f"""
{path}
from pathlib import Path
from gpu_check_report import Book
book = {book}
with book.check("one"):
    pass
with book.check("two"):
    {code}
"""
    run = module("gpu_check").run_process
    run([sys.executable, "-c", script], "stage", tmp_path / "findings.jsonl", seconds=seconds)

    assert [found.name for found in findings(tmp_path)] == ["one", "two"]
    assert (findings(tmp_path)[-1].verdict, findings(tmp_path)[-1].text) == ("failed", text)


def test_a_stage_that_the_budget_stops_has_not_failed(tmp_path, monkeypatch):
    """Its own time was not over."""
    monkeypatch.setitem(module("gpu_check").STAGES, "stage", 60)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    module("gpu_check").run_process(command, "stage", tmp_path / "findings.jsonl", seconds=0.2)

    assert [found.verdict for found in findings(tmp_path)] == ["left out"]


def test_what_the_budget_has_no_time_for_is_left_out(tmp_path):
    """Every stage says so, and nothing has failed."""
    gpu_check = module("gpu_check")
    args = gpu_check.parse(["--device", "cpu", "--tiny", "--budget", "0"])
    args.work, args.results = str(tmp_path), tmp_path / "findings.jsonl"

    assert gpu_check.check_all(args) == 0
    found = findings(tmp_path)
    assert [finding.stage for finding in found] == list(gpu_check.STAGES)
    assert {finding.verdict for finding in found} == {"left out"}


# What is wrong


def compare(answer, ids, *, length: int | None = None):
    tally = module("gpu_check_answers").Tally(0.1)
    tally.compare(answer, ids, length=length, what="request 1")
    return tally.tokens, tally.ties, len(tally.wrong)


def test_a_token_that_is_not_the_answers_is_wrong():
    """Unless it was as likely: then the rest is left."""
    assert compare(make_answer(1, 2, 3), [1, 2, 3]) == (3, 0, 0)
    assert compare(make_answer(1, 2, 3), [1, 9, 3]) == (0, 0, 1)
    assert compare(make_answer(1, 2, 3, gap=0.01), [1, 9, 7, 7, 7]) == (1, 1, 0)
    assert compare(make_answer(1, 2, 3, gap=0.01), [1, 8, 3]) == (0, 0, 1)


def test_an_answer_of_the_wrong_length_is_wrong():
    """One that was cut short may have any length."""
    assert compare(make_answer(1, 2, 3), [1, 2], length=3) == (0, 0, 1)
    assert compare(make_answer(1, 2, 3), [1, 2]) == (2, 0, 0)


def test_kernels_that_are_wrong_fail(tmp_path, monkeypatch):
    """A scale that is off by a tenth, and a result that is no number."""
    kernels, stand_ins = module("gpu_check_kernels"), module("gpu_check_stand_ins")
    import torch

    settings = kernels.FlashInferBackend._settings

    def check(spoil) -> str:
        monkeypatch.setattr(kernels.FlashInferBackend, "_settings", spoil)
        with stand_ins.stand_ins():
            kernels.check_kernels(
                open_book(tmp_path),
                kernels.CASES[:1],
                device=torch.device("cpu"),
                graphs=stand_ins.make_graphs,
                tiny=True,
            )
        return findings(tmp_path)[-1].verdict

    def scaled(by: float):
        return lambda self, spec: settings(self, spec) | {"sm_scale": by * spec.scale}

    assert check(scaled(1.0)) == "passed"
    assert check(scaled(1.1)) == "failed"
    assert check(scaled(float("nan"))) == "failed"


def test_the_limit_of_a_step_is_memory_or_products():
    """Whichever takes longer; keys and values are read too."""
    costs = module("gpu_check_speed").Costs(
        num_bytes=1000, layer_params=400, head_params=100, kv_bytes=2, attention_width=1
    )
    limits = module("gpu_check_machine").Limits
    slow_memory, slow_products = limits(read=10, multiply=1e9), limits(read=1e9, multiply=10)

    assert costs.decode_seconds(slow_memory, batch=2, context=50) == (1000 + 200) / 10
    assert costs.decode_seconds(slow_products, batch=2, context=50) == (2000 + 400) / 10
    assert costs.prefill_seconds(slow_products, count=2, tokens=10) == (16000 + 400 + 400) / 10


def test_waiting_for_the_device_is_not_the_hosts_time(monkeypatch):
    """Time spent in an event's `synchronize` is noted, and the method is put back."""
    import torch

    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: time.sleep(0.05))
    original = torch.cuda.Event.synchronize
    with module("gpu_check_speed").waiting() as waited:
        for _ in range(2):
            torch.cuda.Event.synchronize(None)

    assert waited.count == 2
    assert 0.1 <= waited.seconds < 1
    assert torch.cuda.Event.synchronize is original


def test_wheels_are_named_to_the_first_process_only():
    """The one that it starts has them in its path already."""
    rest = module("gpu_check")._without_wheels
    assert rest(["--wheels", "a", "--tiny", "--wheels=b", "--json", "c"]) == [
        *("--tiny", "--json", "c")
    ]
