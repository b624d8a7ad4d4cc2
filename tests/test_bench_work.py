"""What `bench` sends: prompts, lengths and arrivals, and the numbers it works out."""

from __future__ import annotations

import pytest

from mistralrs_sdk import ConfigError
from mistralrs_sdk.cli.bench_numbers import (
    Answer,
    Spread,
    decode_result,
    first_token_result,
    load_result,
)
from mistralrs_sdk.cli.bench_work import (
    Load,
    TokenIds,
    arrival_times,
    counted_prompt,
    make_jobs,
    mix_lengths,
    read_lengths,
)


def test_counted_prompts_are_mistral_rs():
    """Consecutive ids from 1000 on, wrapping after 2048, shifted by iteration and case."""
    assert counted_prompt(TokenIds(), 3, iteration=0, case=0) == (1131, 1132, 1133)
    assert counted_prompt(TokenIds(), 2, iteration=14, case=0) == (2965, 2966)
    assert counted_prompt(TokenIds(), 2, iteration=0, case=2) == (1000 + 131 + 1438, 2570)
    assert counted_prompt(TokenIds(), 1, iteration=0, case=0, salt=9) == (1140,)


def test_no_two_runs_begin_alike():
    """Every iteration of every case starts at an id of its own."""
    starts = {
        counted_prompt(TokenIds(), 1, iteration=i, case=case) for i in range(5) for case in range(6)
    }

    assert len(starts) == 30


@pytest.mark.parametrize("size", [2, 300, 512, 3047, 3048, 50_000])
def test_ids_stay_inside_the_vocabulary(size):
    """A small vocabulary gives its upper two thirds; a large one the usual ids."""
    ids = TokenIds.below(size)

    assert 0 <= ids.first < ids.first + ids.count <= size
    assert (ids == TokenIds()) is (size >= 3048)


def test_jobs_share_the_prefix_and_nothing_else():
    """The prefix comes on top of each length; the rest is random, and the same for one seed."""
    jobs = make_jobs([(20, 5), (30, 6)], TokenIds(), shared_prefix=10, seed=1)

    assert [(len(job.prompt), job.new_tokens) for job in jobs] == [(30, 5), (40, 6)]
    assert jobs[0].prompt[:10] == jobs[1].prompt[:10]
    assert jobs[0].prompt[10:20] != jobs[1].prompt[10:20]
    assert jobs == make_jobs([(20, 5), (30, 6)], TokenIds(), shared_prefix=10, seed=1)
    assert jobs != make_jobs([(20, 5), (30, 6)], TokenIds(), shared_prefix=10, seed=2)


def test_the_mix_is_seeded_and_within_its_lengths():
    """32 to 512 tokens in, 16 to 128 out, short prompts more often than long ones."""
    lengths = mix_lengths(400, seed=0)

    assert lengths == mix_lengths(400, seed=0) != mix_lengths(400, seed=1)
    assert {32 <= a <= 512 and 16 <= b <= 128 for a, b in lengths} == {True}
    assert sorted(a for a, _ in lengths)[200] < 200


def test_a_dataset_is_read_line_by_line(tmp_path):
    """Blank lines and other fields are passed over."""
    file = tmp_path / "traffic.jsonl"
    file.write_text(
        '{"prompt_tokens": 3, "output_tokens": 4}\n\n'
        '{"output_tokens": 6, "prompt_tokens": 5, "at": 1.5}\n'
    )

    assert read_lengths(file) == [(3, 4), (5, 6)]


@pytest.mark.parametrize(
    "line",
    ['{"prompt_tokens": 3}', '{"prompt_tokens": 0, "output_tokens": 1}', "[1, 2]", "nonsense"],
)
def test_a_wrong_line_of_a_dataset_is_named(line, tmp_path):
    """The error names file and line."""
    file = tmp_path / "traffic.jsonl"
    file.write_text('{"prompt_tokens": 3, "output_tokens": 4}\n' + line)

    with pytest.raises(ConfigError, match=r"traffic.jsonl:2 "):
        read_lengths(file)


@pytest.mark.parametrize("text", [None, " \n"])
def test_a_dataset_without_requests_is_an_error(text, tmp_path):
    """A file that is missing or empty says so."""
    file = tmp_path / "traffic.jsonl"
    if text is not None:
        file.write_text(text)

    with pytest.raises(ConfigError, match=r"traffic\.jsonl"):
        read_lengths(file)


def test_arrivals_come_at_the_rate():
    """A Poisson process: rising times, on average so many a second, the same for one seed."""
    times = list(arrival_times(2000, 50.0, seed=3))

    assert times == sorted(times) == list(arrival_times(2000, 50.0, seed=3))
    assert times[-1] == pytest.approx(40, rel=0.1)


def test_percentiles_are_read_off_straight_lines():
    """Between two sorted values by their distance; nothing gives zeros."""
    spread = Spread.of([3.0, 1.0, 2.0])

    assert (spread.mean, spread.p50) == (2.0, 2.0)
    assert (spread.p95, spread.p99) == pytest.approx((2.9, 2.98))
    assert Spread.of([]) == Spread()


def test_first_token_rate_is_prompt_by_time():
    """Tokens per second and milliseconds, with the population's deviation."""
    answers = [Answer(sent=1.0, times=(1.5,)), Answer(sent=2.0, times=(2.25,))]

    found = first_token_result(answers, prompt_tokens=100)

    assert found.test == "TTFT (100 input tokens)"
    assert (found.tokens_per_second, found.tokens_per_second_std) == (300, 100)
    assert (found.latency_ms, found.latency_ms_std) == (375, 125)


def test_decode_rate_leaves_the_first_token_out():
    """(n - 1) tokens by the time from the first to the last."""
    answers = [Answer(sent=0.0, times=(1.0, 1.5, 2.0, 3.0), new_tokens=5)]

    found = decode_result(answers, new_tokens=5, depth=4)

    assert found.test == "Decode (5 tokens @ d4)"
    assert (found.tokens_per_second, found.latency_ms) == (2.0, 500.0)


def test_a_load_adds_up_what_succeeded():
    """Rates are over the time from the first request to the last answer; failures are counted."""
    good = dict(prompt_tokens=10, new_tokens=3, cached_tokens=4)
    answers = [
        Answer(sent=0.0, times=(0.5, 1.0, 2.0), **good),
        Answer(sent=1.0, times=(1.25, 3.25, 4.0), **good),
        Answer(sent=1.0, error="HTTP 429: busy"),
        Answer(sent=1.0),
    ]

    found = load_result(Load(concurrency=2), answers)

    assert (found.load, found.requests, found.failed) == ("2 at once", 4, 2)
    assert found.errors == {"HTTP 429: busy": 1, "the answer was empty": 1}
    assert (found.seconds, found.output_tokens_per_second) == (4.0, 1.5)
    assert (found.prompt_tokens_per_second, found.cached_tokens) == (5.0, 8)
    assert found.ttft_ms.mean == 375
    assert found.itl_ms.mean == pytest.approx((500 + 1000 + 2000 + 750) / 4)
    assert found.latency_ms.p50 == 2500
