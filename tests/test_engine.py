"""The engine: requests, choices, failures."""

from __future__ import annotations

import attrs
import pytest

from mistralrs_sdk.engine.engine import MAX_FAILED_STEPS, MAX_STALE_DEADLINES, Engine
from mistralrs_sdk.engine.request import SampledToken
from tests.engine_helpers import (
    FakeRunner,
    expected_tokens,
    make_request,
    make_scheduler,
    next_token,
    run_to_end,
    tokens_of,
)


def test_every_choice_of_a_request_reports_for_itself():
    """n choices are n sequences; the prompt's full blocks are computed once."""
    engine = Engine(make_scheduler(), FakeRunner())
    request = make_request(10, max_tokens=3, n=3)
    engine.add(request)
    outputs = run_to_end(engine)
    for choice in range(3):
        assert tokens_of(outputs, request, choice) == expected_tokens(request.prompt_ids, 3)


def test_a_stop_id_ends_the_sequence_and_is_reported():
    """The stop token is the last token of an output that finished with "stop"."""
    engine = Engine(make_scheduler(), FakeRunner())
    prompt = [1, 2, 3]
    third = expected_tokens(prompt, 3)[-1]
    request = make_request(prompt, stop_ids=[third])
    engine.add(request)
    outputs = run_to_end(engine)
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].token_ids == (third,)
    assert len(tokens_of(outputs, request)) == 3


def test_the_context_ends_a_sequence():
    """Prompt and completion together never exceed max_model_len."""
    engine = Engine(make_scheduler(max_model_len=12), FakeRunner())
    request = make_request(10, max_tokens=100)
    engine.add(request)
    outputs = run_to_end(engine)
    assert len(tokens_of(outputs, request)) == 2
    assert outputs[-1].finish_reason == "length"


def test_a_failed_step_ends_its_own_sequences_only():
    """Who was in the failing forward gets the error; who waits runs afterwards."""
    engine = Engine(make_scheduler(max_num_seqs=1), FakeRunner(fail_when=lambda n: n == 3))
    first, second = make_request(4, max_tokens=9), make_request(4, max_tokens=9)
    engine.add(first)
    engine.add(second)
    outputs = run_to_end(engine)
    last = [o for o in outputs if o.request_id == first.id][-1]
    assert last.finish_reason == "error"
    assert "the kernel died" in last.error
    assert tokens_of(outputs, second) == expected_tokens(second.prompt_ids, 9)
    assert engine.scheduler.stats().used_blocks == 0


def test_an_engine_whose_every_step_fails_gives_up():
    """Three failed steps in a row raise the cause."""
    engine = Engine(make_scheduler(max_num_seqs=1), FakeRunner(fail_when=lambda n: True))
    for _ in range(MAX_FAILED_STEPS + 1):
        engine.add(make_request(4))
    for _ in range(MAX_FAILED_STEPS - 1):
        engine.step()
    with pytest.raises(RuntimeError, match="the kernel died"):
        engine.step()


@attrs.define
class BadRowRunner:
    """Draws an error for the request with the given id."""

    bad: int

    def run(self, scheduled):
        return [
            SampledToken(-1, error="logits are NaN")
            if item.sequence.request.id == self.bad
            else SampledToken(next_token(item.sequence.tokens))
            for item in scheduled
        ]


def test_a_row_that_cannot_be_sampled_ends_alone():
    """An error in one row of the batch leaves its neighbours' tokens as they were."""
    bad, good = make_request(4), make_request(4, max_tokens=5)
    engine = Engine(make_scheduler(), BadRowRunner(bad.id))
    engine.add(bad)
    engine.add(good)
    outputs = run_to_end(engine)
    assert tokens_of(outputs, good) == expected_tokens(good.prompt_ids, 5)
    assert [o.error for o in outputs if o.request_id == bad.id] == ["logits are NaN"]


def test_aborting_one_choice_leaves_the_others():
    """abort(id, choice) ends one sequence; abort(id) ends them all."""
    engine = Engine(make_scheduler(), FakeRunner())
    request = make_request(4, max_tokens=6, n=2)
    engine.add(request)
    engine.step()
    (ended,) = engine.abort(request.id, 0)
    assert (ended.choice, ended.finish_reason) == (0, "canceled")
    outputs = run_to_end(engine)
    assert {o.choice for o in outputs} == {1}


def test_times_are_measured_per_sequence():
    """prompt_time runs to the first token, completion_time from there to the newest."""
    engine = Engine(make_scheduler(), FakeRunner())
    request = make_request(4, max_tokens=4)
    engine.add(request)
    outputs = run_to_end(engine)
    assert outputs[0].completion_time == 0.0
    assert all(o.prompt_time == outputs[0].prompt_time > 0 for o in outputs)
    assert outputs[-1].completion_time > 0


def test_deadlines_of_ended_requests_are_forgotten():
    """A service that sets deadlines days ahead does not collect those of all its requests."""
    engine = Engine(make_scheduler(), FakeRunner())
    for _ in range(MAX_STALE_DEADLINES + 200):
        engine.add(attrs.evolve(make_request(2, max_tokens=1), deadline=1e12))
        run_to_end(engine)

    assert len(engine._deadlines) <= MAX_STALE_DEADLINES + 2
