"""`benchmarks/json_schema_suite.py`: what it counts, on a suite of a few cases of our own."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mistralrs_sdk import RequestError

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
CASES = [
    {
        "description": "whole numbers from 2 to 5",
        "schema": {"type": "integer", "minimum": 2, "maximum": 5},
        "tests": [
            {"description": "inside", "data": 3, "valid": True},
            {"description": "a float that is whole", "data": 3.0, "valid": True},
            {"description": "above", "data": 6, "valid": False},
        ],
    },
    {
        "description": "two properties",
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "null"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "tests": [
            {"description": "in another order", "data": {"b": None, "a": "é"}, "valid": True},
            {"description": "one missing", "data": {"a": ""}, "valid": False},
        ],
    },
    {
        "description": "not",
        "schema": {"not": {"type": "integer"}},
        "tests": [{"description": "a string", "data": "x", "valid": True}],
    },
]


@pytest.fixture
def bench(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("json_schema_suite")


@pytest.fixture
def suite(tmp_path) -> Path:
    folder = tmp_path / "tests" / "draft2020-12"
    (folder / "optional" / "format").mkdir(parents=True)
    (folder / "ours.json").write_text(json.dumps(CASES), encoding="utf-8")
    (folder / "optional" / "format" / "more.json").write_text(json.dumps(CASES), encoding="utf-8")
    return tmp_path


def test_schemas_and_instances_are_counted(bench, suite):
    """Refused schemas, and of the others what was accepted of the valid and of the invalid."""
    (tally,) = bench.run_suite(suite / "tests").values()

    assert (tally.schemas, tally.refused) == (3, 1)
    assert (tally.valid, tally.accepted) == (3, 2)
    assert tally.missed == {"ours": 1}
    assert (tally.invalid, tally.wrong) == (2, [])


def test_optional_cases_are_counted_apart(bench, suite):
    """They run only when they are asked for, and have a row of their own."""
    tallies = bench.run_suite(suite / "tests", optional=True)

    assert list(tallies) == ["draft2020-12", "draft2020-12 optional"]
    assert tallies["draft2020-12 optional"].schemas == 3


def test_an_invalid_instance_that_is_accepted_is_wrong(bench, suite, monkeypatch):
    """Its file, schema and name are told."""
    monkeypatch.setattr(bench.Grammar, "accepts", lambda *_: True)

    (tally,) = bench.run_suite(suite / "tests").values()

    assert tally.wrong == [
        "draft2020-12/ours.json: whole numbers from 2 to 5: above",
        "draft2020-12/ours.json: two properties: one missing",
    ]
    assert "| draft2020-12 | 3 | 1 | 3 | 3 | 2 | 2 |" in bench.report({"draft2020-12": tally})


@pytest.mark.parametrize(("error", "wrong"), [(RequestError("no"), 0), (ValueError("no"), 3)])
def test_only_a_request_error_refuses_a_schema(bench, suite, monkeypatch, error, wrong):
    """Any other error is a failure."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(bench.Grammar, "compile", fail)

    (tally,) = bench.run_suite(suite / "tests").values()

    assert (tally.refused, len(tally.wrong)) == (3 - wrong, wrong)


def test_every_order_of_properties_is_tried(bench):
    """Also of objects inside of objects and lists; the first is the one given."""
    written = [json.dumps(each) for each in bench.orders([{"a": 1, "b": {"c": 2, "d": 3}}])]

    assert written[0] == '[{"a": 1, "b": {"c": 2, "d": 3}}]'
    assert len(set(written)) == len(written) == 4


def test_the_exit_code_says_whether_all_is_well(suite):
    """0 with a table; a folder without a suite is a wrong argument."""

    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, BENCHMARKS / "json_schema_suite.py", "--suite", folder]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    done = run(suite)
    assert (done.returncode, done.stderr) == (0, "")
    assert "| draft2020-12 | 3 | 1 | 3 | 2 | 2 | 0 |" in done.stdout
    assert run(suite / "tests").returncode == 2
