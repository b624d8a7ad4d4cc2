"""The scheduler simulator: its traffic, its clock, and what the knobs do in it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def gpu():
    """The preset of a large GPU."""
    return importlib.import_module("scheduler_sim").PRESETS["gpu"]


def run(*, requests: int = 150, rate: float = 20.0, settings=None, **traffic):
    """Simulate a short burst under the GPU's step costs; `settings` change the knobs."""
    preset = gpu()
    return importlib.import_module("sim_engine").simulate(
        attrs.evolve(preset.settings, **(settings or {})),
        preset.cost,
        attrs.evolve(preset.traffic, requests=requests, rate=rate, **traffic),
    )


def test_every_request_ends():
    """Without follow-ups each request is answered, canceled or rejected."""
    result = run(follow_up=0.0, canceled=0.2, patience_seconds=0.5)

    assert result.answered + result.canceled + result.rejected == 150
    assert result.canceled > 5
    assert result.first_token.count >= result.answered


def test_a_simulation_repeats_itself():
    """The same seed gives the same virtual history."""
    first, second = run(), run()

    assert first.seconds == second.seconds
    assert first.output_tokens == second.output_tokens
    assert first.first_token.percentile(99) == second.first_token.percentile(99)


def test_settings_do_not_change_what_is_asked():
    """Whoever compares two settings compares them under the same traffic."""
    one, other = (
        run(follow_up=0.3, canceled=0.0, settings={"max_num_seqs": n}, rate=5) for n in (4, 64)
    )

    assert one.prompt_tokens == other.prompt_tokens
    assert one.output_tokens == other.output_tokens


def test_follow_ups_and_system_prompts_hit_the_prefix_cache():
    """A next turn starts with all that was said, so most of it is cached; alone nothing is."""
    alone = run(follow_up=0.0, system_share=0.0)
    talking = run(follow_up=0.7, system_share=0.0)
    system = run(follow_up=0.0, system_share=1.0)

    assert alone.prefix_hit_rate == 0
    assert talking.prefix_hit_rate > 0.3
    assert system.prefix_hit_rate > 0.5


def test_urgent_requests_come_first():
    """Where many wait, those with a higher priority get their first token sooner."""
    result = run(requests=300, rate=100, urgent=0.1, settings={"max_num_seqs": 8})

    assert result.urgent_first_token.percentile(50) < result.first_token.percentile(50) / 4


def test_a_lower_decode_limit_gives_earlier_first_tokens():
    """max_decode_steps_before_prefill trades inter-token latency for time to first token."""
    low, high = (run(settings={"max_decode_steps_before_prefill": n}) for n in (1, 32))

    assert low.first_token.percentile(50) < high.first_token.percentile(50) / 2
    assert low.inter_token.percentile(50) > high.inter_token.percentile(50)


def test_a_larger_prefill_chunk_prefills_faster_and_delays_decodes():
    """max_prefill_chunk_tokens trades the pauses of running answers for prefill throughput."""
    small, large = (run(settings={"max_prefill_chunk_tokens": n}) for n in (128, 4096))

    assert large.first_token.percentile(99) < small.first_token.percentile(99) / 4
    assert large.inter_token.percentile(99) > small.inter_token.percentile(99)


def test_mixed_batches_shorten_the_pauses_of_running_answers():
    """A decode that rides along waits for the prefill step alone, not for a decode step more."""
    mixed, pure = (run(settings={"mixed_batches": mixed}) for mixed in (True, False))

    assert mixed.inter_token.percentile(99) < 0.9 * pure.inter_token.percentile(99)


def test_more_running_sequences_give_more_throughput():
    """A step of many decodes costs little more than one of few, as long as enough are there."""
    few, many = (run(rate=50, follow_up=0.0, settings={"max_num_seqs": n}) for n in (2, 32))

    assert many.output_rate > 2 * few.output_rate
    assert many.wait.percentile(99) < few.wait.percentile(99) / 4


def test_a_small_cache_preempts_and_answers_all_the_same():
    """A pool too small for the load costs recomputation, and nobody is forgotten."""
    small = run(canceled=0.0, follow_up=0.0, settings={"kv_tokens": 4096 + 64})
    large = run(canceled=0.0, follow_up=0.0)

    assert small.preemptions > large.preemptions == 0
    assert small.answered == large.answered == 150
    assert small.output_rate < large.output_rate


@pytest.mark.parametrize("mixed", [True, False])
def test_nobody_starves_in_a_burst(mixed):
    """Under four times the load that fits, no answer pauses longer than a few steps."""
    result = run(rate=100, settings={"mixed_batches": mixed})

    assert result.inter_token.largest < 0.1


def test_spreads_are_exact_to_two_percent():
    """Percentiles come from narrow buckets."""
    spread = importlib.import_module("sim_engine").Spread()
    for i in range(1, 1001):
        spread.add(i / 1000)

    assert spread.percentile(50) == pytest.approx(0.5, rel=0.02)
    assert spread.percentile(99) == pytest.approx(0.99, rel=0.02)
    assert spread.percentile(100) == 1.0


def test_the_overhead_benchmark_measures_each_pass():
    """As many times as passes were asked for, with nearly all places taken."""
    measure = importlib.import_module("scheduler_overhead").measure

    times, running = measure(running=8, blocks=100, waiting=50, passes=20)

    assert len(times) == 20
    assert 7 <= running <= 8


def test_the_simulator_prints_a_table():
    """From the command line: one run under changed settings and traffic."""
    done = subprocess.run(
        [
            *(sys.executable, BENCHMARKS / "scheduler_sim.py", "--once", "--requests", "20"),
            *("--set", "max_num_seqs=4", "--traffic", "rate=5", "urgent=0.5"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert "max_num_seqs=4" in done.stdout
    assert "TTFT p50" in done.stdout
    assert "answered" in done.stdout.splitlines()[-1]
