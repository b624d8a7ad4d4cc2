"""The engine's counters and latency histograms."""

from __future__ import annotations

import time

import pytest

from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.metrics import (
    FIRST_TOKEN_BOUNDS,
    INTER_TOKEN_BOUNDS,
    EngineMetrics,
    Histogram,
    MetricsRecorder,
)
from tests.engine_helpers import FakeRunner, make_request, make_scheduler, run_to_end
from tests.model_helpers import continue_ids, prompt, tiny_builder


def make_engine(runner: FakeRunner | None = None, **limits) -> Engine:
    return Engine(make_scheduler(**limits), runner or FakeRunner())


def histogram(*values: float, bounds: tuple[float, ...] = (1.0, 2.0, 4.0)) -> Histogram:
    """A histogram of these values, by way of the recorder's own counting."""
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[sum(bound < value for bound in bounds)] += 1
    return Histogram(
        bounds=bounds, counts=tuple(counts), total=sum(values), largest=max(values, default=0.0)
    )


def latencies(*gaps: float) -> EngineMetrics:
    """What a recorder says about one sequence whose tokens come after these gaps."""
    recorder = MetricsRecorder()
    now = 100.0
    recorder.arrived(0, at=now)
    for i, gap in enumerate(gaps):
        now += gap
        recorder.token(0, now=now, first=i == 0)
    return recorder.snapshot(make_scheduler().stats(), capacity=1, evictions=0)


def test_an_engine_that_did_nothing_counts_nothing():
    """Before the first request every counter is zero, and the limits are shown."""
    metrics = make_engine(num_blocks=50, max_num_seqs=7).metrics()

    assert (metrics.running, metrics.waiting, metrics.capacity) == (0, 0, 7)
    assert (metrics.blocks_used, metrics.blocks_total, metrics.blocks_cached) == (0, 50, 0)
    assert metrics.tokens_processed == metrics.tokens_generated == metrics.preemptions == 0
    assert metrics.completed == {"stop": 0, "length": 0, "canceled": 0, "error": 0}
    assert metrics.rejected == {"over_total_capacity": 0}
    assert metrics.time_to_first_token.p99 is None


def test_gauges_show_who_runs_and_who_waits():
    """Running and waiting sequences and owned blocks are those of this moment."""
    engine = make_engine(max_num_seqs=2)
    for _ in range(3):
        engine.add(make_request(6))
    engine.step()

    metrics = engine.metrics()

    assert (metrics.running, metrics.waiting) == (2, 1)
    assert metrics.blocks_used == 4


def test_every_computed_and_every_drawn_token_is_counted():
    """Processed tokens are prompts and generated ones but the last, which is never computed."""
    engine = make_engine()
    for _ in range(2):
        engine.add(make_request(10, max_tokens=5))
    run_to_end(engine)

    metrics = engine.metrics()

    assert metrics.tokens_processed == 2 * (10 + 4)
    assert metrics.tokens_generated == 10
    assert metrics.time_to_first_token.count == 2
    assert metrics.inter_token_latency.count == 8


def test_sequences_are_counted_by_how_they_ended():
    """Each choice counts once, under its finish reason."""
    engine = make_engine(FakeRunner(fail_when=lambda step: step == 20))
    engine.add(make_request(4, max_tokens=2, n=3))
    run_to_end(engine)
    engine.add(make_request(4, stop_ids=range(60_000)))
    run_to_end(engine)
    canceled = make_request(4)
    engine.add(canceled)
    engine.step()
    engine.abort(canceled.id)
    engine.add(make_request(4))
    run_to_end(engine)

    assert engine.metrics().completed == {"stop": 1, "length": 3, "canceled": 1, "error": 1}


def test_a_choice_ended_by_its_text_counts_as_stopped():
    """The engine is told to end one choice when a stop string has come, which is no cancel."""
    engine = make_engine()
    request = make_request(4, n=2)
    engine.add(request)
    engine.step()
    engine.abort(request.id, 1)
    engine.abort(request.id)

    completed = engine.metrics().completed

    assert (completed["stop"], completed["canceled"]) == (1, 1)


def test_a_sequence_that_fits_no_pool_is_rejected_not_completed():
    """What could never run counts by the reason it was refused for, and only there."""
    engine = make_engine(num_blocks=2, max_model_len=1000)
    engine.add(make_request(9))
    run_to_end(engine)

    metrics = engine.metrics()

    assert metrics.rejected == {"over_total_capacity": 1}
    assert sum(metrics.completed.values()) == 0


def test_prefix_hits_and_the_tokens_they_save_are_counted():
    """A repeated prompt is a lookup, a hit, and its full blocks of tokens."""
    engine = make_engine(block_size=4)
    for _ in range(2):
        engine.add(make_request(range(11), max_tokens=1))
        run_to_end(engine)

    metrics = engine.metrics()

    assert (metrics.prefix_lookups, metrics.prefix_hits) == (2, 1)
    assert metrics.prefix_tokens_reused == 8
    assert metrics.blocks_cached == 2


def test_evicted_prefixes_are_counted():
    """Each cached block that is handed out for something else is an eviction."""
    engine = make_engine(num_blocks=3, block_size=4, max_model_len=12)
    for _ in range(2):
        engine.add(make_request(10, max_tokens=1))
        run_to_end(engine)

    assert engine.metrics().prefix_evictions == 2


async def test_prefixes_kept_whole_are_evicted_too():
    """Without paging, a cache that makes room for a newer one is an eviction."""
    async with await tiny_builder().with_paged_attn(None).with_prefix_cache_n(1).build() as model:
        for seed in range(3):
            await continue_ids(model, prompt(20, seed=seed), 2)
        metrics = await model.metrics()

    assert metrics.prefix_evictions == 2
    assert metrics.blocks_total == 0


def test_preemptions_are_counted_and_hide_no_waiting():
    """A preempted sequence is one more preemption, and its next token comes late in the counts."""
    engine = make_engine(num_blocks=6, block_size=4)
    for _ in range(2):
        engine.add(make_request(8, max_tokens=10))
    run_to_end(engine)

    metrics = engine.metrics()

    assert metrics.preemptions >= 1
    assert metrics.time_to_first_token.count == 2
    assert metrics.inter_token_latency.count == 18


def test_the_first_token_is_timed_from_arrival():
    """Time in the queue is part of the time to the first token; later gaps are not."""
    metrics = latencies(3.0, 0.02, 0.04)

    assert metrics.time_to_first_token.total == pytest.approx(3.0)
    assert metrics.inter_token_latency.total == pytest.approx(0.06)
    assert metrics.inter_token_latency.largest == pytest.approx(0.04)


def test_waiting_in_the_queue_counts_for_the_first_token():
    """A request behind another one has waited for it when its first token comes."""
    engine = make_engine(max_num_seqs=1)
    engine.add(make_request(4, max_tokens=1))
    engine.add(make_request(4, max_tokens=1))
    time.sleep(0.03)
    run_to_end(engine)

    assert engine.metrics().time_to_first_token.total >= 0.06


def test_buckets_are_those_of_mistral_rs():
    """The bounds are fixed, so that dashboards made for mistral.rs read ours."""
    assert len(FIRST_TOKEN_BOUNDS) == 22
    assert (FIRST_TOKEN_BOUNDS[0], FIRST_TOKEN_BOUNDS[-1]) == (0.001, 2560)
    assert len(INTER_TOKEN_BOUNDS) == 19
    assert (INTER_TOKEN_BOUNDS[0], INTER_TOKEN_BOUNDS[-1]) == (0.01, 80)


def test_a_value_on_a_bound_belongs_to_the_bucket_below():
    """Bounds are inclusive, as in Prometheus."""
    counts = latencies(1.0, 0.05).inter_token_latency.counts

    assert counts[INTER_TOKEN_BOUNDS.index(0.05)] == 1


def test_percentiles_are_interpolated_within_a_bucket():
    """Four values between 1 and 2: the median lies halfway, and none exceeds the largest."""
    spread = histogram(1.1, 1.4, 1.6, 1.9)

    assert spread.p50 == pytest.approx(1.5)
    assert spread.percentile(100) == pytest.approx(1.9)
    assert spread.mean == pytest.approx(1.5)


def test_percentiles_above_the_last_bound_end_at_the_largest_value():
    """The open bucket reaches to the largest value that was seen."""
    assert histogram(0.5, 10.0).percentile(100) == pytest.approx(10.0)
    assert histogram(0.5, 10.0, 10.0, 10.0).p50 == pytest.approx(6.0)


def test_an_impossible_percentile_is_refused():
    """A percentile lies between 0 and 100; the message names the value."""
    with pytest.raises(ValueError, match=r"percent \(101\)"):
        histogram(1.0).percentile(101)


def test_metrics_read_like_a_table():
    """As text each line has a name and what people want to know."""
    engine = make_engine()
    engine.add(make_request(10, max_tokens=3))
    run_to_end(engine)

    lines = str(engine.metrics()).splitlines()

    assert lines[0] == "sequences            0 of 32 running, 0 waiting"
    assert "completed            0 stop, 1 length, 0 canceled, 0 error" in lines
    assert "tokens               12 processed, 3 generated" in lines
    assert any(line.startswith("inter-token latency  p50 ") for line in lines)


def test_a_snapshot_does_not_change():
    """What was returned stays as it was when the engine goes on."""
    engine = make_engine()
    before = engine.metrics()
    engine.add(make_request(4, max_tokens=2))
    run_to_end(engine)

    assert sum(before.completed.values()) == 0
    assert before.time_to_first_token.count == 0


def test_ended_sequences_leave_nothing_in_the_recorder():
    """The recorder remembers living sequences only, however they ended."""
    engine = make_engine(num_blocks=2, max_model_len=1000)
    engine.add(make_request(9))
    engine.add(make_request(4, max_tokens=2))
    canceled = make_request(4)
    engine.add(canceled)
    engine.abort(canceled.id)
    run_to_end(engine)

    assert engine._metrics._since == {}


def test_recording_a_token_costs_little():
    """Well under the microseconds a scheduling pass takes per sequence."""
    recorder = MetricsRecorder()
    recorder.arrived(0, at=0.0)
    tries = []
    for _ in range(20):
        started = time.perf_counter()
        for i in range(1000):
            recorder.token(0, now=0.01 * i, first=False)
        tries.append((time.perf_counter() - started) / 1000)

    assert min(tries) < 3e-6


async def test_a_model_tells_its_metrics():
    """`model.metrics()` shows what its requests did, and what the second one found cached."""
    async with await tiny_builder().build() as model:
        for _ in range(2):
            await continue_ids(model, prompt(20), 4)
        metrics = await model.metrics()

    assert metrics.completed["length"] == 2
    assert metrics.capacity == 32
    assert metrics.tokens_generated == 8
    assert metrics.prefix_tokens_reused == 16
    assert metrics.time_to_first_token.p50 > 0
