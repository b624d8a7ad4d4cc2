"""`mistralrs-sdk tune`: candidates, what is expected of them, and what is recommended."""

from __future__ import annotations

import argparse
import json

import attrs
import pytest

from mistralrs_sdk import ModelBuilder, ModelLoadError
from mistralrs_sdk.cli import main, serve, tune
from mistralrs_sdk.cli.serve_models import builder_of
from mistralrs_sdk.cli.tune_estimate import (
    BITS,
    Candidate,
    Machine,
    estimate,
    measure,
    quality_of,
    recommend,
)
from tests.model_helpers import tiny_folder

MACHINE = Machine(bytes_per_second=10e9, operations_per_second=100e9)


@pytest.fixture(scope="module", autouse=True)
def _checkpoint():
    """Made before a test looks at what is printed: saving it shows a bar."""
    tiny_folder()


@pytest.fixture
def measured(monkeypatch):
    """A machine that always has the same speed."""
    monkeypatch.setattr(tune, "measure", lambda device, dtype, num_threads: MACHINE)


@attrs.frozen
class FakePlan:
    weight_bytes: int
    num_parameters: int = 10**9


def candidate(bits, gib, *, fits=True):
    plan = FakePlan(int(gib * 2**30)) if fits else None
    rate = estimate(plan, MACHINE)[0] if plan else 0.0
    return Candidate(bits=bits, quality=quality_of(bits), plan=plan, decode_tokens_per_second=rate)


def test_a_step_reads_every_weight_and_a_prompt_multiplies_with_each():
    """7 GB at 70% of 10 GB/s take a second, and a step a little more; 2 operations a weight."""
    decode, prefill = estimate(FakePlan(7 * 10**9), MACHINE)

    assert decode == pytest.approx(1 / 1.0015)
    assert prefill == pytest.approx(40)


def test_measuring_gives_rates_of_this_machine():
    """Bytes and operations per second, both above what the slowest machine does."""
    found = measure("cpu", "f32", num_threads=1)

    assert found.bytes_per_second > 1e8
    assert found.operations_per_second > 1e8


@pytest.mark.parametrize(("profile", "bits"), [("quality", 8), ("balanced", 5), ("fast", 4)])
def test_the_fastest_that_is_good_enough_is_recommended(profile, bits):
    """quality: near-lossless; balanced: good; fast: acceptable. Never worse if that fits."""
    sizes = {None: 4.0, 8: 2.2, 6: 1.7, 5: 1.4, 4: 1.1, 3: 0.9, 2: 0.7}
    found = [candidate(bits, size) for bits, size in sizes.items()]

    best = recommend(found, profile)

    assert best is not None
    assert best.bits == bits


def test_what_is_no_smaller_than_the_file_is_not_recommended():
    """A file of four bits is not quantised to eight, whatever the profile."""
    found = [candidate(None, 1.1), candidate(8, 2.2), candidate(4, 1.1)]

    for profile in ("quality", "balanced", "fast"):
        assert recommend(found, profile) is found[0]


def test_if_only_bad_ones_fit_the_best_of_them_is_recommended():
    """Where nothing the profile allows fits, quality decides, then bits."""
    found = [candidate(None, 4, fits=False), candidate(3, 0.9), candidate(2, 0.7)]

    assert recommend(found, "quality") is found[1]
    assert recommend(found[:1], "fast") is None


def test_tune_as_json_lists_every_candidate(measured, capsys):
    """As stored and each number of bits, with sizes, and the command that serves the choice."""
    code = main(["tune", "-m", str(tiny_folder()), "--cpu", "--profile", "quality", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [entry["isq"] for entry in found["candidates"]] == [None, *map(str, BITS)]
    assert all(entry["fits"] and entry["weight_bytes"] > 0 for entry in found["candidates"])
    assert found["recommended"] == "8"
    assert found["command"] == f"mistralrs-sdk serve -m {tiny_folder()} --cpu --isq 8"


def test_tune_prints_a_table_and_a_command(measured, capsys):
    """The recommended row has a star."""
    assert main(["tune", "-m", str(tiny_folder()), "--cpu"]) == 0

    out = capsys.readouterr().out
    assert "5 bits *" in out
    assert "10 GB/s" in out
    assert "serve -m" in out


def test_the_emitted_config_is_what_serve_takes(measured, tmp_path, capsys):
    """Every flag that was given, and the choice, come back as the same builder."""
    file = tmp_path / "serve.toml"
    flags = [
        *("--cpu", "--no-mixed-batches", "--num-threads", "3", "--pa-memory-mb", "64"),
        *("--max-seqs", "7", "--seed", "5"),
    ]

    main(["tune", "-m", str(tiny_folder()), *flags, "--emit-config", str(file)])

    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command[:2] == ["mistralrs-sdk", "serve"]
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    by_file = builder_of(parser.parse_args(["serve", "--config", str(file)]))
    by_flags = builder_of(parser.parse_args(command[1:]))
    assert by_file == by_flags
    assert isinstance(by_file, ModelBuilder)
    assert by_file.config.max_num_seqs == 7
    assert by_file.config.mixed_batches is False
    assert by_file.config.isq is not None


def test_what_does_not_fit_is_shown_with_its_reason(measured, monkeypatch, capsys):
    """One candidate that fails is no error, as long as another fits."""
    plan = ModelBuilder.plan

    async def too_large_as_stored(self):
        if self.config.isq is None:
            raise ModelLoadError("it needs 90 GiB\nof 16")
        return await plan(self)

    monkeypatch.setattr(ModelBuilder, "plan", too_large_as_stored)

    assert main(["tune", "-m", str(tiny_folder()), "--cpu"]) == 0

    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "as stored: it needs 90 GiB of 16" in out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["-m", "/nowhere/at/all"], "/nowhere/at/all"),
        (["-m", "x", "--isq", "4"], "--isq"),
        (["-m", "x", "--topology", "t.yml"], "--topology"),
    ],
)
def test_what_cannot_be_tuned_is_an_error(flags, named, capsys):
    """A model that is not there, and flags that would choose already."""
    assert main(["tune", *flags]) == 1

    assert named in capsys.readouterr().err


def test_a_config_that_cannot_be_written_is_an_error(measured, tmp_path, capsys):
    """The error names the flag and the file."""
    file = tmp_path / "none" / "serve.toml"

    assert main(["tune", "-m", str(tiny_folder()), "--emit-config", str(file)]) == 1

    assert f"--emit-config {file}" in capsys.readouterr().err
