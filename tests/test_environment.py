"""Environment variables: what MISTRALRS_DEBUG logs, and that the documented list is complete."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mistralrs_sdk
from mistralrs_sdk import ModelBuilder
from mistralrs_sdk.cpu_threads import AFFINITY, COUNTS, MASK
from mistralrs_sdk.engine.engine import Engine
from tests.checkpoint_files import write_folder
from tests.engine_helpers import FakeRunner, make_request, make_scheduler, run_to_end

PACKAGE = Path(mistralrs_sdk.__file__).parent
DOCUMENT = PACKAGE.parent / "docs" / "environment.md"
LOGGER = "mistralrs_sdk.engine"


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    """The switch raises the level of the engine's logger: put it back."""
    logger = logging.getLogger(LOGGER)
    level = logger.level
    yield
    logger.setLevel(level)


def steps_in(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("step: ")]


def test_a_logged_step_says_what_it_computed_and_how_long_it_took(caplog):
    """Tokens of each prompt in the step, lengths of the decoding sequences, milliseconds."""
    engine = Engine(make_scheduler(), FakeRunner(), log_steps=True)
    with caplog.at_level(logging.DEBUG, logger=LOGGER):
        engine.add(make_request(10, max_tokens=3))
        engine.step()
        engine.add(make_request(6, max_tokens=2))
        run_to_end(engine)

    times = [re.search(r", (\d+\.\d) ms$", line) for line in steps_in(caplog)]
    assert all(times)
    assert any("prompt tokens [10], decodes at lengths [], " in line for line in steps_in(caplog))
    assert any("prompt tokens [6], " in line for line in steps_in(caplog))
    assert any("prompt tokens [], decodes at lengths [11" in line for line in steps_in(caplog))


@pytest.mark.parametrize(("value", "logged"), [("1", True), ("0", False), ("", False)])
async def test_the_switch_turns_the_log_of_steps_on(value, logged, tmp_path, monkeypatch, caplog):
    """MISTRALRS_DEBUG=1 logs each step at level debug, whatever the level was; else nothing is."""
    monkeypatch.setenv("MISTRALRS_DEBUG", value)
    logging.getLogger(LOGGER).setLevel(logging.INFO)
    builder = ModelBuilder(write_folder(tmp_path / "model")).with_force_cpu().with_num_threads(1)
    async with await builder.build() as model:
        await model.send_completion_request([1, 5, 9], max_len_two())

    assert bool(steps_in(caplog)) is logged


def max_len_two():
    return mistralrs_sdk.SamplingParams(top_k=1, max_len=2, ignore_eos=True)


def test_every_variable_the_package_reads_is_documented():
    """The names in `os.environ.get(...)` and friends are rows of docs/environment.md that say what
    they do, also those that a constant of the package names."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")]
    constants = {
        target.id: node.value.value
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names = {MASK, AFFINITY, *COUNTS}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and "environ" in ast.unparse(node):
            for argument in node.args:
                if isinstance(argument, ast.Constant):
                    names.add(argument.value)
                elif isinstance(argument, ast.Name):
                    names.add(constants.get(argument.id))
    names = {name for name in names if isinstance(name, str) and re.fullmatch("[A-Z_]+", name)}
    used, _, unused = DOCUMENT.read_text(encoding="utf-8").partition("## Not used")

    assert {"RUST_LOG", "MISTRALRS_DEBUG", "CANDLE_CPU_MASK", "MISTRALRS_API_KEY"} <= names
    assert {name for name in names if f"`{name}`" not in used} == set()
    listed = " ".join(re.findall(r"^\| (.*?) \|", unused, re.MULTILINE))
    assert {name for name in names if f"`{name}`" in listed} == set()
