"""The comparison of predictions: its text, its arithmetic, and a run over a tiny model."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import attrs
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from mistralrs_sdk.loading.checkpoint import TokenizerFiles
from tests.model_helpers import tiny_folder

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def word_files(**changes) -> TokenizerFiles:
    """A tokenizer of the words w0 to w99; "<s>" is 100."""
    vocab = {f"w{i}": i for i in range(100)} | {"<s>": 100}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    files = TokenizerFiles(
        tokenizer=tokenizer,
        bos_token="<s>",
        eos_token=None,
        eos_token_ids=frozenset(),
        adds_bos=False,
        chat_template=None,
        template_source=None,
    )
    return attrs.evolve(files, **changes)


WORDS = " ".join(f"w{i}" for i in range(100))


def cut(tokens: int, window: int, **changes) -> list[list[int]]:
    from quality_text import windows

    return windows(word_files(**changes), tokens=tokens, window=window, text=WORDS)


# Text


def test_the_text_is_prose_without_repetitions():
    """Thousands of words in whole paragraphs: no code, no headings, none twice."""
    from quality_text import prose

    paragraphs = prose().split("\n\n")

    assert len(paragraphs) == len(set(paragraphs)) > 300
    assert all(len(p) >= 120 and p.endswith(".") and "\n" not in p for p in paragraphs)
    assert not any(p.startswith((">>>", "   ")) for p in paragraphs)


def test_windows_are_alike_and_spread_over_the_text():
    """40 tokens in windows of at most 15 are three of 13, a third of the text apart."""
    assert cut(40, 15) == [list(range(start, start + 13)) for start in (0, 33, 66)]


def test_each_window_begins_with_bos_where_raw_text_does():
    """Its place counts: the windows are no longer for it."""
    assert cut(8, 4, adds_bos=True) == [[100, 0, 1, 2], [100, 50, 51, 52]]


@pytest.mark.parametrize(("tokens", "window"), [(120, 50), (200, 200)])
def test_a_text_too_short_is_refused(tokens, window):
    """Windows would overlap."""
    with pytest.raises(ValueError, match="the text has 100 tokens"):
        cut(tokens, window)


# Numbers


def test_the_divergence_is_that_of_the_definition():
    """Sum of p log(p / q), position by position; the likeliest tokens are compared."""
    from quality_numbers import compare

    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]), torch.tensor([[0.2, 0.4, 0.4]] * 2)

    found = compare(p.log() + 7, q.log() - 3)  # logits are free up to a constant

    wanted = [
        sum(a * math.log(a / b) for a, b in zip(row, (0.2, 0.4, 0.4), strict=True))
        for row in ((0.5, 0.25, 0.25), (0.8, 0.1, 0.1))
    ]
    assert found.kl.tolist() == pytest.approx(wanted, rel=1e-6)
    assert found.same.tolist() == [False, False]


def test_equal_predictions_are_at_distance_zero():
    """Over more positions than are compared at once."""
    from quality_numbers import compare, distance

    logits = torch.randn(150, 7, generator=torch.Generator().manual_seed(0))

    found = distance([compare(logits, logits.clone()), compare(logits[:3], logits[:3])])

    assert (found.kl, found.kl_p99, found.top1, found.positions) == (0, 0, 1, 153)


@pytest.mark.parametrize(
    ("kl", "top1", "holds"),
    [(0.01, 0.98, True), (0.0101, 1.0, False), (0.0, 0.979, False), (math.nan, 1.0, False)],
)
def test_a_limit_holds_for_both_numbers(kl, top1, holds):
    """Up to and including it; what is not a number fails."""
    from quality_numbers import Comparison, Distance, Limit, table, to_json

    found = Distance(kl=kl, kl_p99=1.0, top1=top1, positions=5)
    one = Comparison(what="a", against="b", distance=found, limit=Limit(kl=0.01, top1=0.98))

    assert one.passes is holds
    assert to_json([one])[0]["passes"] is holds
    assert table([one]).endswith("| pass |" if holds else "| FAIL |")


# A run


def test_a_run_compares_every_form(tmp_path, capsys):
    """A float16 file: f16 keeps its weights, 8 bits are nearer than 2, and kernels are exact to
    what 8-bit inputs allow."""
    from quality import main

    from mistralrs_sdk.kernels import native

    if not native.available():
        pytest.skip(native.reason())
    kept = tmp_path / "numbers.json"
    threads = torch.get_num_threads()
    try:
        flags = ["--tokens", "60", "--window", "30", "--threads", "1"]
        folder = str(tiny_folder("llama_tied"))
        code = main([folder, *flags, "--types", "f16,q8_0,Q4_0", "--json", str(kept)])
    finally:
        torch.set_num_threads(threads)

    rows = {row["what"]: row for row in json.loads(kept.read_text())}
    kl = {what: row["distance"]["kl"] for what, row in rows.items()}
    assert [*rows] == [
        "native f32",
        "keys and values in f16",
        "as stored",
        *(f"{kind}: {part}" for kind in ("f16", "q8_0", "q4_0") for part in PARTS),
    ]
    assert rows["native f32"]["passes"]
    assert kl["f16: weights"] < 1e-3 < kl["q8_0: weights"] < kl["q4_0: weights"]
    assert kl["f16: kernels"] < 1e-3
    assert {row["distance"]["positions"] for row in rows.values()} == {60}
    assert code == any(row["passes"] is False for row in rows.values())
    assert "| q4_0: both | the file's weights |" in capsys.readouterr().out


PARTS = ("kernels", "weights", "both")


def test_types_are_those_of_isq_and_f16():
    """Names in any case; one that nothing is quantised to is an error."""
    from argparse import ArgumentTypeError

    from quality import parse_types

    assert parse_types("F16, Q4_K,hqq8") == ["f16", "q4k", "hqq8"]
    with pytest.raises(ArgumentTypeError, match="'q8_1' is not one of f16, q4_0"):
        parse_types("q8_1")


def test_without_native_kernels_there_is_nothing_to_judge(monkeypatch):
    """The reason is said, and nothing is loaded."""
    import quality

    monkeypatch.setattr(quality.native, "available", lambda: False)
    monkeypatch.setattr(quality.native, "reason", lambda: "no compiler")
    monkeypatch.setattr(sys, "argv", ["quality.py"])
    threads = torch.get_num_threads()
    try:
        with pytest.raises(SystemExit, match="no native kernels to judge: no compiler"):
            quality.main(["no such model", "--threads", "1"])
    finally:
        torch.set_num_threads(threads)
