"""What `gpu_check.py` has found: one line of JSON as soon as it is known, then a table."""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import attrs

Verdict = Literal["passed", "failed", "measured", "left out"]

SHOWN: dict[str, str] = {"passed": "ok", "failed": "FAILED", "measured": "", "left out": "left out"}


class LeftOutError(Exception):
    """A check cannot be made here; the message says why."""


@attrs.frozen(kw_only=True)
class Finding:
    """What one check came to."""

    stage: str
    name: str
    verdict: Verdict
    text: str
    numbers: Mapping[str, float] = attrs.field(factory=dict)
    seconds: float = 0.0


@attrs.define
class Check:
    """A check that is being made: what it has to say so far."""

    passed: bool | None = None
    """None as long as nothing was expected: then it only measures."""
    texts: list[str] = attrs.field(factory=list)
    numbers: dict[str, float] = attrs.field(factory=dict)

    @property
    def verdict(self) -> Verdict:
        if self.passed is None:
            return "measured"
        return "passed" if self.passed else "failed"

    def say(self, text: str, **numbers: float) -> None:
        """Report something without judging it."""
        self.texts.append(text)
        self.numbers |= numbers

    def expect(self, holds: bool, text: str, **numbers: float) -> None:
        """Report something that must hold."""
        self.say(text if holds else f"NOT SO: {text}", **numbers)
        self.passed = holds and self.passed is not False


class Book:
    """Where a stage writes its findings; `until`, on `time.time`'s clock, is when it ends."""

    def __init__(self, file: Path, *, stage: str, until: float) -> None:
        self._file = file
        self._stage = stage
        self._until = until

    @contextmanager
    def check(self, name: str) -> Iterator[Check]:
        """Make a check: whatever it raises is its finding, and what follows goes on."""
        self._write({"stage": self._stage, "started": name})
        check, started = Check(), time.perf_counter()
        verdict: Verdict
        try:
            yield check
        except LeftOutError as reason:
            verdict = "left out"
            check.texts.append(str(reason))
        except Exception as error:
            traceback.print_exc()
            verdict = "failed"
            check.texts.append(_in_a_line(error))
        else:
            verdict = check.verdict
        finding = Finding(
            stage=self._stage,
            name=name,
            verdict=verdict,
            text="; ".join(check.texts),
            numbers={k: v for k, v in check.numbers.items() if math.isfinite(v)},
            seconds=time.perf_counter() - started,
        )
        self._write(attrs.asdict(finding))
        print(line(finding), flush=True)

    def require_time(self, seconds: float) -> None:
        """Leave a check out that might not be over before the stage ends."""
        left = self._until - time.time()
        if left < seconds:
            raise LeftOutError(f"it may take {seconds:.0f} s, and {max(left, 0):.0f} s are left")

    def _write(self, entry: Mapping[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def read_findings(file: Path) -> list[Finding]:
    """All findings of a file; none of a check that was started and not ended."""
    return [Finding(**entry) for entry in _entries(file) if "started" not in entry]


def unfinished(file: Path, stage: str) -> str | None:
    """The check that a stage had started last, if it did not end."""
    entries = [entry for entry in _entries(file) if entry["stage"] == stage]
    return entries[-1].get("started") if entries else None


def add_finding(file: Path, finding: Finding) -> None:
    """Write what somebody else has to say about a stage."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(attrs.asdict(finding)) + "\n")
    print(line(finding), flush=True)


def line(finding: Finding) -> str:
    """One finding for a terminal."""
    verdict = SHOWN[finding.verdict]
    return f"{finding.stage:11} {finding.name:42} {verdict:8} {finding.seconds:6.1f} s  " + (
        finding.text
    )


def table(findings: Sequence[Finding]) -> str:
    """All findings as Markdown."""
    rows = ["| Stage | Check | | Seconds | |", "|---|---|---|---:|---|"]
    for found in findings:
        text = found.text.replace("|", "\\|")
        verdict = SHOWN[found.verdict]
        rows.append(f"| {found.stage} | {found.name} | {verdict} | {found.seconds:.1f} | {text} |")
    return "\n".join(rows)


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each verdict."""
    verdicts = [finding.verdict for finding in findings]
    kinds: tuple[Verdict, ...] = ("passed", "failed", "left out", "measured")
    return ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds)


def _entries(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    entries = []
    for number, text in enumerate(lines, start=1):
        try:
            entries.append(json.loads(text))
        except ValueError:  # a process was killed while it wrote
            print(f"line {number} of {file.name} is cut short", file=sys.stderr)
    return entries


def _in_a_line(error: Exception) -> str:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]
