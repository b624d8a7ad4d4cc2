"""docs/knobs.md against the code: one setting, three ways to write it, one value it comes to."""

from __future__ import annotations

import argparse
import inspect
import re
import shlex
from pathlib import Path

import attrs
import pytest

import mistralrs_sdk
from mistralrs_sdk import (
    EngineConfig,
    MemoryGpuConfig,
    ModelBuilder,
    PagedAttentionConfig,
    PagedAttentionMetaBuilder,
    Runner,
    Which,
    runner,
)
from mistralrs_sdk.cli import run
from mistralrs_sdk.cli.model_flags import builder_from
from mistralrs_sdk.config import ModelSource

DOCS = Path(mistralrs_sdk.__file__).parent.parent / "docs"
KNOBS = (DOCS / "knobs.md").read_text(encoding="utf-8")
NAMES = {
    "MemoryGpuConfig": MemoryGpuConfig,
    "PagedAttentionMetaBuilder": PagedAttentionMetaBuilder,
    "Which": Which,
}
NEEDS = {"imatrix": {"isq"}}
"""Fields that are refused alone, and what their example sets besides."""


@pytest.fixture(autouse=True)
def topology_file(tmp_path, monkeypatch):
    """The file that the page's example of a topology reads."""
    (tmp_path / "layers.yaml").write_text("0-4:\n  isq: q8_0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def rows(heading: str) -> list[list[list[str]]]:
    """The cells of the table under a heading, each as the code spans it holds."""
    section = KNOBS.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [
        [re.findall("`([^`]+)`", cell) for cell in line.strip("|").split("|")] for line in lines
    ]


SETTINGS = rows("How the engine runs")
SOURCES = rows("Where the files come from")
ROWS = [*SETTINGS, *SOURCES]


def flag_of(row) -> str:
    return row[0][0].split()[0]


def name_row(row) -> str:
    return row[0][0].replace(" ", "=")


def parser() -> argparse.ArgumentParser:
    """The parser of the command `run`."""
    commands = argparse.ArgumentParser().add_subparsers()
    run.add_parser(commands)
    return commands.choices["run"]


def by_flags(text: str = "") -> ModelBuilder:
    """What `run` builds, with 32 sequences so that it compares with the others."""
    return builder_from(parser().parse_args(["-m", "x", "--max-seqs", "32", *shlex.split(text)]))


def by_runner(monkeypatch, **arguments) -> ModelBuilder:
    """What a Runner builds; nothing is loaded."""

    class Loaded:
        def from_builder(self, builder):
            self.builder = builder
            return self

    loaded = Loaded()
    monkeypatch.setattr(runner, "BlockingModel", loaded)
    Runner(**{"which": Which.Plain("x"), **arguments})
    return loaded.builder


def by_method(call: str) -> ModelBuilder:
    return eval(f"builder.{call}", {**NAMES, "builder": ModelBuilder("x")})


def setting(config: EngineConfig, path: str):
    """The value of `field` or `field.inner`."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def default_of(path: str):
    if path.startswith("paged_attn."):
        return getattr(PagedAttentionConfig(), path.partition(".")[2])
    return getattr(EngineConfig(), path)


@pytest.mark.parametrize("row", ROWS, ids=name_row)
def test_every_surface_comes_to_the_same_settings(row, monkeypatch):
    """Flag, Runner argument and builder method of one row give equal builders."""
    expected = by_method(row[2][0])

    assert by_flags(row[0][0]) == expected
    for way in row[1]:
        assert by_runner(monkeypatch, **eval(f"dict({way})", NAMES)) == expected
    assert expected != ModelBuilder("x")


@pytest.mark.parametrize("row", SETTINGS, ids=name_row)
def test_a_knob_changes_its_field_and_nothing_else(row):
    """The example moves the field the row names away from its default; the others stay."""
    config = by_method(row[2][0]).config
    path = row[3][0]

    changed = {
        field.name
        for field in attrs.fields(EngineConfig)
        if getattr(config, field.name) != getattr(EngineConfig(), field.name)
    }
    assert changed - NEEDS.get(path, set()) == {path.partition(".")[0]}
    assert setting(config, path) != default_of(path)


@pytest.mark.parametrize("row", SETTINGS, ids=name_row)
def test_the_default_is_the_documented_one(row):
    """The last column is what the field holds when nothing was set."""
    assert str(default_of(row[3][0])) == row[4][0]


@pytest.mark.parametrize("row", SETTINGS, ids=name_row)
def test_numbers_in_the_help_are_the_defaults(row):
    """Where the default is a number, the flag's help ends with it."""
    (action,) = (a for a in parser()._actions if flag_of(row) in a.option_strings)
    default = 1 if flag_of(row) == "--max-seqs" else default_of(row[3][0])

    if type(default) is int:
        assert re.search(rf"\({default}[;)]", action.help)


def test_without_arguments_every_surface_has_the_same_defaults(monkeypatch):
    """Runner and builder are EngineConfig's defaults; `run` too, but for one sequence at a time."""
    alone = builder_from(parser().parse_args(["-m", "x"]))

    assert ModelBuilder("x").config == EngineConfig()
    assert by_runner(monkeypatch) == ModelBuilder("x")
    assert by_flags() == ModelBuilder("x")
    assert alone.config == attrs.evolve(EngineConfig(), max_num_seqs=1)
    assert "`run` defaults to one concurrent sequence." in KNOBS
    assert "`Runner` and the builder default to 32." in KNOBS


def test_no_setting_is_missing_from_the_page():
    """Every field of EngineConfig and of ModelSource has a row."""
    fields = {row[3][0] for row in SETTINGS}
    paged = {name.partition(".")[2] for name in fields if "." in name}
    methods = {row[2][0].partition("(")[0] for row in SOURCES}

    assert {name.partition(".")[0] for name in fields} == set(attrs.fields_dict(EngineConfig))
    assert paged == set(attrs.fields_dict(PagedAttentionConfig))
    assert len(methods) == len(attrs.fields(ModelSource)) - 2  # the model itself is no knob


def test_no_flag_is_missing_from_the_page():
    """Every flag of `run` that is no part of the question has a row."""
    own = {"--help", "--model-id", "--input", "--quiet", "--verbose"}
    own |= {"--temperature", "--top-k", "--top-p", "--max-tokens"}
    own |= {"--adapter", "--thinking", "--reasoning-effort"}
    flags = {o for a in parser()._actions for o in a.option_strings if o.startswith("--")}

    own |= {"--mixed-batches", "--flashinfer", "--cuda-graphs"}  # the rows have their opposites

    assert flags - own == {flag_of(row) for row in ROWS}


def test_no_argument_of_runner_is_missing():
    """Every argument has a row, or docs/runner.md has it: about tools, or as refused."""
    page = (DOCS / "runner.md").read_text(encoding="utf-8")
    tools = page.split("## Tools")[1].split("\n## ")[0]
    refused = page.split("These arguments of `Runner`")[1].split("\n\n")[0]
    arguments = {way.partition("=")[0] for row in ROWS for way in row[1]}
    about_tools = {"tool_callbacks", "mcp_client_config", "code_execution_config", "shell_config"}
    arguments |= about_tools & set(re.findall("`([a-z_]+)`", tools))
    arguments |= set(re.findall("`([a-z_]+)`", refused))

    assert set(inspect.signature(Runner).parameters) == arguments
