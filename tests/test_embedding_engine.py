"""The engine of embedding models: turns, limits of a step, failures, aborts."""

from __future__ import annotations

import logging
import math
import time

import pytest

from mistralrs_sdk.engine.embedding import EmbeddingEngine, EmbedInput, EmbedOutput, EmbedRequest

POISON = 13


class FakeRun:
    """Embeds an input as its length; one that holds POISON cannot be computed."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, ...]]] = []

    def __call__(self, inputs):
        self.batches.append([asked.ids for asked in inputs])
        if any(POISON in asked.ids for asked in inputs):
            raise ValueError("poison")
        return [[float(len(asked.ids))] for asked in inputs]


def request(id: int, *lengths: int, token: int = 1) -> EmbedRequest:
    return EmbedRequest(id=id, inputs=tuple(EmbedInput((token,) * n) for n in lengths))


def engine_over(run: FakeRun, *requests: EmbedRequest, **limits) -> EmbeddingEngine:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 100, **limits}
    engine = EmbeddingEngine(run, **limits)
    for asked in requests:
        engine.add(asked)
    return engine


def drain(engine: EmbeddingEngine) -> list[EmbedOutput]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def lengths(run: FakeRun) -> list[list[int]]:
    return [[len(ids) for ids in batch] for batch in run.batches]


def test_every_input_gets_its_own_vector():
    """Outputs carry the number of the input in its request."""
    outputs = drain(engine_over(FakeRun(), request(1, 3, 1, 2), request(2, 5)))

    found = {(o.request_id, o.choice): o.vector for o in outputs}
    assert found == {(1, 0): [3.0], (1, 1): [1.0], (1, 2): [2.0], (2, 0): [5.0]}
    assert {o.finish_reason for o in outputs} == {"stop"}


def test_a_step_stays_within_its_tokens_and_sequences():
    """Whichever limit is reached first ends a batch; nobody overtakes the front."""
    run = FakeRun()
    drain(engine_over(run, request(1, 4, 4, 4, 1), max_num_batched_tokens=10))
    assert lengths(run) == [[4, 4], [4, 1]]

    run = FakeRun()
    drain(engine_over(run, request(1, 1, 1, 1), max_num_seqs=2))
    assert lengths(run) == [[1, 1], [1]]


def test_an_input_longer_than_a_step_runs_alone():
    """Prompts are never split: the budget bends for one that is longer."""
    run = FakeRun()

    drain(engine_over(run, request(1, 30, 2, 30, 2), max_num_batched_tokens=10))

    assert lengths(run) == [[30], [2], [30], [2]]


def test_requests_take_turns():
    """One text does not wait for all of another request's."""
    run = FakeRun()
    engine = engine_over(run, request(1, *[1] * 6), request(2, 7), max_num_seqs=2)

    assert [(o.request_id, o.choice) for o in engine.step()] == [(1, 0), (2, 0)]
    assert len(drain(engine)) == 5


def test_an_aborted_request_is_not_computed():
    """What waits ends as canceled; the others go on."""
    run = FakeRun()
    engine = engine_over(run, request(1, 1, 2), request(2, 5))

    ended = engine.abort(1)

    assert [(o.choice, o.finish_reason, o.vector) for o in ended] == [
        (0, "canceled", None),
        (1, "canceled", None),
    ]
    assert [o.request_id for o in drain(engine)] == [2]
    assert lengths(run) == [[5]]
    assert engine.abort(1) == [] == engine.abort(9)


def test_one_input_of_a_request_can_be_aborted():
    """The others of the request are computed."""
    engine = engine_over(FakeRun(), request(1, 1, 2, 3))

    (ended,) = engine.abort(1, 1)

    assert (ended.choice, ended.finish_reason) == (1, "canceled")
    assert [o.choice for o in drain(engine)] == [0, 2]


def test_only_the_input_at_fault_fails(caplog):
    """A batch that fails is tried input by input."""
    engine = engine_over(FakeRun(), request(1, 2, 3), request(2, 4, token=POISON))

    with caplog.at_level(logging.CRITICAL, "mistralrs_sdk.engine"):
        outputs = {(o.request_id, o.choice): o for o in engine.step()}

    assert outputs[1, 0].vector == [2.0]
    assert outputs[1, 1].vector == [3.0]
    assert outputs[2, 0].error == "ValueError: poison"
    assert outputs[2, 0].finish_reason == "error"
    assert engine.metrics().completed == {"stop": 2, "length": 0, "canceled": 0, "error": 1}


def test_a_model_that_only_fails_ends_the_engine(caplog):
    """Three steps in a row without one vector are no fault of the inputs."""
    bad = [request(i, 1, token=POISON) for i in range(3)]
    engine = engine_over(FakeRun(), *bad, max_num_seqs=1)

    with caplog.at_level(logging.CRITICAL, "mistralrs_sdk.engine"):
        engine.step()
        engine.step()
        with pytest.raises(ValueError, match="poison"):
            engine.step()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_vector_that_is_not_finite_is_an_error(value):
    """Nobody gets NaN for an embedding."""
    engine = EmbeddingEngine(
        lambda inputs: [[1.0, value], [1.0, 2.0]], max_num_seqs=8, max_num_batched_tokens=100
    )
    engine.add(request(1, 1, 1))

    broken, good = engine.step()

    assert broken.error is not None
    assert "not finite" in broken.error
    assert good.vector == [1.0, 2.0]


def test_stats_and_metrics_count_what_was_done():
    """Waiting inputs, computed tokens, ends by reason; nothing is drawn."""
    engine = engine_over(FakeRun(), request(1, 5, 6), max_num_seqs=1)
    assert engine.stats().waiting == 2

    engine.step()

    metrics = engine.metrics()
    assert (metrics.waiting, metrics.tokens_processed, metrics.tokens_generated) == (1, 5, 0)
    assert metrics.capacity == 1


def test_throughput_is_logged_if_asked(caplog):
    """A line when the engine has nothing left to do."""
    engine = EmbeddingEngine(
        FakeRun(), max_num_seqs=8, max_num_batched_tokens=100, log_throughput=True
    )
    engine.add(request(1, 5))

    with caplog.at_level(logging.INFO, "mistralrs_sdk.throughput"):
        engine.step()

    assert "tokens/s" in caplog.text


def test_a_long_request_is_aborted_at_once():
    """Aborting takes time in proportion to the inputs, not to their square."""
    engine = engine_over(FakeRun(), request(1, *[1] * 30_000))
    started = time.thread_time()

    outputs = engine.abort(1)

    assert time.thread_time() - started < 2
    assert len(outputs) == 30_000
    assert not engine.has_work
