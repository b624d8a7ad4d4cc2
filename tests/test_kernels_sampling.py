"""The sampling kernels against their references, and rows alone against a batch."""

from __future__ import annotations

import math
import random
from array import array

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mistralrs_sdk.kernels import native
from mistralrs_sdk.kernels.sampling import (
    Amounts,
    Draw,
    draw,
    draw_reference,
    logprobs,
    logprobs_reference,
)

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels here")
NAN, INF = float("nan"), float("inf")
LOWEST = -9999.0

vocabularies = st.integers(1, 70) | st.sampled_from([255, 256, 257, 1000, 4096, 20_001])
seeds = st.integers(0, 9999)


def noise(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, as a view with a gap between the rows and an odd address."""
    wide = torch.full((x.shape[0], x.shape[1] + 3), NAN)
    wide[:, 1:-2] = x
    return wide[:, 1:-2]


def some_draw(number: int, *, vocab: int, edits: bool) -> Draw:
    """Settings of every kind, the same for the same number."""
    choose = random.Random(number)
    item = Draw(
        temperature=choose.choice([0.0, 1e-7, 0.1, 0.7, 1.0, 2.5, 1e38]),
        top_k=choose.choice([0, 0, 1, 2, 40, 100, 700, 2000, 10**9]),
        top_p=choose.choice([1.0, 1.0, 0.95, 0.5, 0.999, 0.0]),
        min_p=choose.choice([0.0, 0.0, 0.05, 0.5, 1e-6, 1 - 2**-24]),
        u=choose.choice([0.0, 1 - 2**-53, choose.random(), choose.random()]),
    )
    if edits:
        ids = choose.sample(range(vocab + 5), min(vocab, 9))  # some are not in the vocabulary
        item.losses = Amounts.of((token, choose.uniform(-2, 2)) for token in ids[:5])
        item.seen, item.repetition = array("q", ids[2:7]), choose.choice([1.3, 0.8])
        item.gains = Amounts.of((token, choose.choice([3.0, -4.0, 1e38])) for token in ids[4:])
    return item


def nearby(scores: torch.Tensor, item: Draw) -> list[int]:
    """What comes out with a random number that differs by less than the exponentials may."""
    draws = [attrs.evolve(item, u=item.u + step) for step in (-1e-6, 1e-6)]
    return draw_reference(scores.expand(2, -1), draws)[0]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 5),
    vocab=vocabularies,
    scale=st.sampled_from([0.0, 0.01, 1.0, 4.0, 1e36]),
    levels=st.sampled_from([None, 1.0]),
    masked=st.sampled_from([0.0, 0.5, 0.99]),
    edits=st.booleans(),
    seed=seeds,
)
def test_draws_are_those_of_the_reference(
    rows: int,
    vocab: int,
    scale: float,
    levels: float | None,
    masked: float,
    edits: bool,
    seed: int,
):
    """The same tokens and the same greatest scores, whatever is filtered, tied or impossible."""
    scores = noise(rows, vocab, seed=seed, scale=scale)
    if levels:
        scores = scores.round()
    scores[noise(rows, vocab, seed=1).sigmoid() < masked] = -INF
    draws = [some_draw(seed + i, vocab=vocab, edits=edits and i % 2 == 0) for i in range(rows)]
    before = scores.clone()

    tokens, peaks = draw(unaligned(scores), draws)

    expected, expected_peaks = draw_reference(scores, draws) if rows else ([], [])
    assert peaks == expected_peaks
    assert torch.equal(scores, before)
    for i, token in enumerate(tokens):
        assert token == expected[i] or peaks[i] == -INF or token in nearby(scores[i], draws[i])


@pytest.mark.parametrize("vocab", [300, 20_001])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999])
def test_a_wide_nucleus_is_that_of_the_reference(vocab: int, top_p: float):
    """Nearly equal scores: more tokens are kept than are looked at first, up to nearly all."""
    scores = noise(6, vocab, scale=0.1)
    draws = [
        Draw(temperature=0.9, top_p=top_p, u=(i + 0.5) / 6, min_p=0.9 * (i == 5)) for i in range(6)
    ]

    assert draw(scores, draws) == draw_reference(scores, draws)


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_filters_work_together(top_k: int, top_p: float, min_p: float):
    """Every combination leaves what it leaves in the reference."""
    scores = noise(1, 1000, scale=2.0).expand(60, -1)
    draws = [
        Draw(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, u=(i + 0.5) / 60)
        for i in range(60)
    ]

    assert draw(scores, draws) == draw_reference(scores, draws)


@pytest.mark.parametrize("params", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_tokens_come_out_as_often_as_they_are_likely(params: dict[str, float]):
    """Evenly spread random numbers meet each token in proportion to its probability."""
    count = 3000
    scores = noise(1, 30, scale=1.0)
    draws = [Draw(temperature=1.0, u=(i + 0.5) / count, **params) for i in range(count)]

    tokens, _ = draw(scores.expand(count, -1), draws)

    seen = torch.bincount(torch.tensor(tokens), minlength=30) / count
    kept = scores[0].softmax(-1) * (seen > 0)
    torch.testing.assert_close(seen, kept / kept.sum(), atol=2 / count, rtol=0)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(rows=st.integers(1, 4), vocab=vocabularies, top=st.integers(0, 20), seed=seeds)
def test_logprobs_are_those_of_the_reference(rows: int, vocab: int, top: int, seed: int):
    """The chosen token's and the best ones, of some of the rows."""
    scores = noise(rows, vocab, seed=seed)
    scores[:, 1:][noise(rows, vocab, seed=1)[:, 1:] > 2] = -INF
    lines = list(range(rows))[seed % 2 :: 2]
    tokens = [(seed + line) % vocab for line in lines]
    top = min(top, vocab)

    found = logprobs(unaligned(scores), lines, tokens=tokens, top=top, lowest=LOWEST)

    if not lines:
        assert found == []
        return
    expected = logprobs_reference(scores, lines, tokens=tokens, top=top, lowest=LOWEST)
    assert [line[1 + top :] for line in found] == [line[1 + top :] for line in expected]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=2e-6, rtol=0)


def test_equal_logprobs_come_by_id():
    """Of many tokens that are equally likely the lowest ids are reported."""
    scores = torch.zeros(1, 5000)
    scores[0, 4000] = 1.0

    (line,) = logprobs(scores, [0], tokens=[7], top=4, lowest=LOWEST)

    assert line[5:] == [4000, 0, 1, 2]
    assert line[0] == line[2] == pytest.approx(-math.log(4999 + math.e))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_is_bit_equal_alone_and_in_a_batch(threads: int):
    """Neither the other rows, nor where they lie, nor the number of threads changes anything."""
    vocab = 5003
    scores = noise(40, vocab)
    draws = [some_draw(i, vocab=vocab, edits=i % 3 == 0) for i in range(40)]
    tokens, peaks = draw(scores, draws, num_threads=threads)
    lines = logprobs(scores, range(40), tokens=tokens, top=5, lowest=LOWEST, num_threads=threads)

    for i in (0, 1, 23, 39):
        one = unaligned(scores[i : i + 1])
        assert draw(one, draws[i : i + 1], num_threads=1) == ([tokens[i]], [peaks[i]])
        assert logprobs(one, [0], tokens=[tokens[i]], top=5, lowest=LOWEST) == [lines[i]]


@pytest.mark.parametrize("place", [0, 15, 255, 256, 999])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_a_broken_row_tells_its_greatest_score(value: float, place: int, params: dict[str, float]):
    """NaN is greater than all else, wherever it stands; the other rows are not affected."""
    scores = noise(3, 1000)
    draws = [Draw(u=0.4, **params) for _ in range(3)]
    tokens, peaks = draw(scores, draws)
    scores[1, place] = value

    broken_tokens, broken_peaks = draw(scores, draws)

    assert str(broken_peaks[1]) == str(value)
    assert (broken_tokens[0], broken_tokens[2]) == (tokens[0], tokens[2])
    assert (broken_peaks[0], broken_peaks[2]) == (peaks[0], peaks[2])
    logprobs(scores, [1], tokens=[0], top=20, lowest=LOWEST)


def test_what_does_not_fit_is_refused():
    """Wrong types, shapes, ids and counts are told before anything is read."""
    scores = noise(2, 6)
    draws = [Draw(), Draw()]
    with pytest.raises(ValueError, match=r"float64 .* must be float32 on the CPU: 2 rows"):
        draw(scores.double(), draws)
    with pytest.raises(ValueError, match=r"strides \(1, 2\)\) must be .* each dense"):
        draw(noise(6, 2).T, draws)
    with pytest.raises(ValueError, match="1 rows of at least one column"):
        draw(scores, draws[:1])
    with pytest.raises(ValueError, match="at least one column"):
        draw(noise(2, 0), draws)
    with pytest.raises(ValueError, match="a value for each id"):
        draw(scores, [Draw(), Draw(gains=Amounts(array("q", [1, 2]), array("f", [1.0])))])
    with pytest.raises(ValueError, match=r"a token of \[6\] is not in scores \[2, 6\]"):
        logprobs(scores, [0], tokens=[6], top=1, lowest=LOWEST)
    with pytest.raises(ValueError, match=r"a line of \[-1\] is not in"):
        logprobs(scores, [-1], tokens=[0], top=1, lowest=LOWEST)
    with pytest.raises(ValueError, match="1 tokens for 2 lines"):
        logprobs(scores, [0, 1], tokens=[0], top=1, lowest=LOWEST)
    with pytest.raises(ValueError, match="the 7 best of 6 scores"):
        logprobs(scores, [0], tokens=[0], top=7, lowest=LOWEST)
