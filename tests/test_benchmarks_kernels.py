"""The benchmark of the kernels: its arithmetic, and that no kernel is left out."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from mistralrs_sdk.kernels import native

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SOURCES = Path(native.__file__).parent / "src"


@pytest.fixture(autouse=True)
def _benchmarks_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def module(name: str):
    return importlib.import_module(name)


def methods(*peers: bool):
    """A native method that reads 10 GB and does 40 GOP, and what it is compared with."""
    cases = module("kernels_cases")
    return [
        cases.Method(name=f"m{i}", calls=(), num_bytes=10**10, operations=4 * 10**10, peer=peer)
        for i, peer in enumerate((False, *peers))
    ]


def table(times: list[list[float]], *peers: bool, bandwidth: float = 1e10, floats: float = 1e11):
    case = module("kernels_cases").Case(name="case", methods=methods(*peers))
    rates = {True: floats, False: 1.0}
    lines = module("kernels").report(case, times, bandwidth=bandwidth, rates=rates)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_rates_are_those_of_the_median():
    """Microseconds, then billions of bytes and of operations a second."""
    assert table([[2.0, 4.0, 100.0]])[0][2:5] == ["4000000.0", "2.5", "10.0"]


@pytest.mark.parametrize(
    ("bandwidth", "floats", "part"), [(1e10, 1e11, "50%"), (1e12, 2e10, "100%")]
)
def test_the_limit_is_memory_or_arithmetic(bandwidth, floats, part):
    """Whichever makes a call take longer."""
    assert table([[2.0]], bandwidth=bandwidth, floats=floats)[0][5] == part


def test_the_ratio_is_the_median_of_the_rounds_with_the_best_other():
    """Rounds are compared one by one; what is compared with has no ratio of its own."""
    lines = table([[1.0, 2.0, 4.0], [3.0, 4.0, 4.0], [9.0, 9.0, 9.0]], True, True)

    assert [line[6] for line in lines] == ["2.00", "", ""]


@pytest.mark.skipif(not native.available(), reason="no native kernels here")
def test_every_kernel_is_measured(monkeypatch):
    """All that the library exports for computing, each beside another way to do the same."""
    layers, tokens = module("kernels_layers"), module("kernels_tokens")
    monkeypatch.setattr(layers, "ATTENTION", {"one": [(70, 1)]})
    monkeypatch.setattr(tokens, "VOCAB", 4096)
    for part in (layers, tokens):
        monkeypatch.setattr(part, "num_copies", lambda num_bytes: 1)
    groups = (
        layers.products([(64, 32)], rows=[1], types=["Q8_0"]),
        layers.attention(),
        layers.elementwise(),
        layers.adapters(),
        tokens.sampling(),
        tokens.searches(),
    )
    called = set()

    with native.heard(lambda name, words, status: called.add(name)):
        for case in (case for group in groups for case in group):
            assert [method.peer for method in case.methods].count(True) >= 1
            for method in case.methods:
                method.calls[0]()

    text = "\n".join(file.read_text() for file in SOURCES.glob("*.cpp"))
    others = {"mistralrs_tape_run", "mistralrs_has_fast_halves"}
    assert called == set(re.findall(r"^CALLABLE\((\w+)\)", text, re.MULTILINE)) - others
