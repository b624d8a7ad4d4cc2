"""Steps that are launched before the tokens of the last one are read."""

from __future__ import annotations

import time

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mistralrs_sdk.engine.engine import MAX_FAILED_STEPS, Engine
from mistralrs_sdk.engine.look_ahead import LookAhead
from mistralrs_sdk.engine.request import Request, RequestOutput
from mistralrs_sdk.engine.scheduler import Scheduler
from tests.engine_helpers import (
    expected_tokens,
    make_request,
    make_scheduler,
    run_to_end,
    tokens_of,
)
from tests.launching_runner import LaunchingFake

BLOCK = 4


@attrs.define
class Rig:
    """An engine that looks ahead, and what is below it."""

    engine: Engine
    scheduler: Scheduler
    runner: LaunchingFake
    look_ahead: LookAhead

    @classmethod
    def of(cls, runner: LaunchingFake | None = None, **limits) -> Rig:
        scheduler = make_scheduler(block_size=BLOCK, **limits)
        runner = runner or LaunchingFake(BLOCK)
        look_ahead = LookAhead(scheduler, runner)
        return cls(Engine(scheduler, runner, look_ahead=look_ahead), scheduler, runner, look_ahead)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)

    def step(self, count: int = 1) -> list[RequestOutput]:
        outputs = []
        for _ in range(count):
            outputs += self.engine.step()
            self.check()
        return outputs

    def check(self) -> None:
        self.scheduler.check()
        self.runner.check()

    def finish(self, *, max_steps: int = 2000) -> list[RequestOutput]:
        outputs = []
        for _ in range(max_steps):
            if not self.engine.has_work:
                assert not self.look_ahead.in_flight()
                assert self.scheduler.stats().used_blocks == 0
                return outputs
            outputs += self.step()
        raise AssertionError(f"no end after {max_steps} steps")


def stop_after(request: Request, count: int) -> Request:
    """The same request, which ends with its token number `count`."""
    return attrs.evolve(
        request, stop_ids=frozenset(expected_tokens(request.prompt_ids, count)[-1:])
    )


def test_the_next_step_is_launched_before_a_token_is_read():
    """From the second token on; a prompt is followed by an ordinary step."""
    rig = Rig.of()
    request = make_request(3, max_tokens=4)
    rig.add(request)

    outputs = rig.finish()

    assert rig.runner.log == ["launch", "read", "launch", "ahead", "read", "ahead", "read", "read"]
    assert tokens_of(outputs, request) == expected_tokens(request.prompt_ids, 4)
    assert rig.look_ahead.num_ahead == 2


def test_who_is_at_its_limit_takes_no_part_in_the_next_step():
    """The others go on without it, and it is reported at once."""
    rig = Rig.of()
    short, long = make_request(3, max_tokens=3), make_request(3, max_tokens=8)
    rig.add(short, long)
    rig.step(2)
    outputs = rig.step()

    assert [o.finish_reason for o in outputs if o.request_id == short.id] == ["length"]
    assert [len(step.sequences) for step in rig.runner.unread] == [1]
    rest = rig.finish()
    assert tokens_of(rest, long) == expected_tokens(long.prompt_ids, 8)[3:]
    assert rig.runner.log.count("launch") == 2, "all other steps were launched ahead"


def test_the_context_is_a_limit_too():
    """The model's length ends a sequence as its own limit does."""
    rig = Rig.of(max_model_len=7)
    request = make_request(3, max_tokens=100)
    rig.add(request)

    assert tokens_of(rig.finish(), request) == expected_tokens(request.prompt_ids, 4)


def test_a_sequence_that_ended_keeps_its_blocks_until_the_step_is_over():
    """Its row in the next step is computed for nothing, and dropped."""
    rig = Rig.of()
    ends = stop_after(make_request(6, max_tokens=50), 3)
    goes_on = make_request(6, max_tokens=6)
    rig.add(ends, goes_on)
    rig.step(2)

    outputs = rig.step()

    assert [o.request_id for o in outputs] == [goes_on.id], "the end is not reported yet"
    assert len(rig.scheduler.running) == 2
    [step] = rig.runner.unread
    assert len(step.sequences) == 2
    outputs = rig.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [
        (ends.id, "stop"),
        (goes_on.id, None),
    ]
    assert len(rig.scheduler.running) == 1
    rest = rig.finish()
    assert tokens_of(rest, goes_on) == expected_tokens(goes_on.prompt_ids, 6)[4:]


def test_the_others_stay_ahead_when_a_sequence_ends():
    """The step after that is launched early as well, without the sequence."""
    rig = Rig.of()
    rig.add(stop_after(make_request(6), 3), make_request(6, max_tokens=9))

    rig.finish()

    assert rig.runner.log.count("launch") == 2


def test_a_sequence_whose_logits_are_void_ends_in_time():
    """An error is an end like another."""
    rig = Rig.of(LaunchingFake(BLOCK, broken=lambda ids: len(ids) == 9))
    first, second = make_request(5, max_tokens=20), make_request(2, max_tokens=6)
    rig.add(first, second)

    outputs = rig.finish()

    assert [o.error for o in outputs if o.request_id == first.id][-1] == "NaN"
    assert tokens_of(outputs, second) == expected_tokens(second.prompt_ids, 6)


def test_a_request_that_waits_is_let_in():
    """Nothing is launched ahead while somebody could join."""
    rig = Rig.of()
    rig.add(make_request(3, max_tokens=50))
    rig.step(4)
    assert rig.look_ahead.in_flight()

    late = make_request(3, max_tokens=2)
    rig.add(late)
    rig.step()

    assert not rig.look_ahead.in_flight()
    outputs = rig.step()
    assert late.id in {o.request_id for o in outputs}


def test_a_prompt_that_runs_is_not_passed_over():
    """Decodes are not launched ahead while a part of a prompt is still to be computed."""
    rig = Rig.of(max_num_batched_tokens=8, mixed_batches=False)
    rig.add(make_request(3, max_tokens=200))
    rig.step(2)
    long = make_request(40, max_tokens=1)
    rig.add(long)

    outputs = rig.step(60)

    assert tokens_of(outputs, long) == expected_tokens(long.prompt_ids, 1)


def test_steps_are_launched_ahead_of_a_queue_that_finds_no_place():
    """When all places are taken, who waits changes nothing; when one becomes free, it does."""
    rig = Rig.of(max_num_seqs=2)
    requests = [make_request(3, max_tokens=n) for n in (5, 9, 4)]
    rig.add(*requests)
    rig.step(3)
    assert rig.look_ahead.in_flight()
    assert len(rig.scheduler.waiting) == 1

    outputs = rig.finish()

    assert tokens_of(outputs, requests[2]) == expected_tokens(requests[2].prompt_ids, 4)


def test_without_a_free_block_nothing_is_launched_ahead():
    """Nobody is preempted for a step that nobody has decided."""
    rig = Rig.of(num_blocks=4)
    requests = [make_request(2, max_tokens=n) for n in (13, 14)]
    rig.add(*requests)

    outputs = rig.finish()

    for request in requests:
        assert tokens_of(outputs, request) == expected_tokens(
            request.prompt_ids, request.max_tokens
        )
    assert rig.scheduler.stats().preemptions > 0
    assert rig.look_ahead.num_ahead > 0


def test_a_row_that_the_host_draws_ends_the_look_ahead():
    """Its batch is run step by step."""
    rig = Rig.of(LaunchingFake(BLOCK, plain=lambda sequence: len(sequence.tokens) != 7))
    request = make_request(3, max_tokens=9)
    rig.add(request)

    assert tokens_of(rig.finish(), request) == expected_tokens(request.prompt_ids, 9)


def test_an_abort_finishes_the_step_first():
    """The others' tokens of that step are reported with it, and the blocks are free."""
    rig = Rig.of()
    gone, stays = make_request(6, max_tokens=90), make_request(6, max_tokens=8)
    rig.add(gone, stays)
    outputs = rig.step(4)
    assert rig.look_ahead.in_flight()

    news = rig.engine.abort(gone.id)
    rig.check()

    assert not rig.runner.unread
    assert news[-1].finish_reason == "canceled"
    assert [s.request.id for s in rig.scheduler.running] == [stays.id]
    outputs += news + rig.finish()
    assert tokens_of(outputs, stays) == expected_tokens(stays.prompt_ids, 8)


def test_an_unknown_abort_disturbs_nothing():
    """Streams that have ended are closed all the time."""
    rig = Rig.of()
    rig.add(make_request(3))
    rig.step(3)

    assert rig.engine.abort(10**9) == []

    assert rig.look_ahead.in_flight()


def test_a_sequence_that_ended_in_flight_is_not_canceled():
    """Its end was on the way when the abort came."""
    rig = Rig.of()
    request = stop_after(make_request(6), 3)
    rig.add(request)
    rig.step(3)

    assert [o.finish_reason for o in rig.engine.abort(request.id)] == ["stop"]
    assert not rig.engine.has_work


def test_a_deadline_finishes_the_step_first():
    """Then the request ends, and its blocks are free."""
    rig = Rig.of()
    request = attrs.evolve(make_request(6), deadline=time.perf_counter() + 0.05)
    rig.add(request)
    rig.step(3)
    assert rig.look_ahead.in_flight()
    time.sleep(0.06)

    outputs = rig.step()

    assert outputs[-1].error == "its deadline passed"
    assert not rig.runner.unread
    assert not rig.engine.has_work


def test_nothing_is_launched_ahead_while_somebody_wants_a_word():
    """Commands that have come in are not made to wait for one more step."""
    rig = Rig.of()
    rig.add(make_request(3))
    rig.step(3)
    assert rig.look_ahead.in_flight()
    rig.engine.is_wanted = lambda: True

    rig.step()

    assert not rig.look_ahead.in_flight()


def test_a_token_that_is_drawn_again_costs_the_step_that_started_from_it():
    """The row is computed anew with the right token; its neighbours keep what they have."""
    rig = Rig.of(LaunchingFake(BLOCK, late=lambda ids: len(ids) % 5 == 0))
    requests = [make_request(length, max_tokens=12) for length in (3, 5, 7)]
    rig.add(*requests)

    outputs = rig.finish()

    for request in requests:
        assert tokens_of(outputs, request) == expected_tokens(request.prompt_ids, 12)
    assert rig.look_ahead.num_ahead > 0


def test_a_step_that_cannot_be_launched_ahead_is_run_in_its_turn(caplog):
    """Out of memory, say: the request does not notice."""

    def fail(number: int) -> None:
        if number == 2:
            raise RuntimeError("out of memory")

    rig = Rig.of(LaunchingFake(BLOCK, fail_ahead=fail))
    request = make_request(3, max_tokens=9)
    rig.add(request)

    assert tokens_of(rig.finish(), request) == expected_tokens(request.prompt_ids, 9)
    assert "could not be launched ahead" in caplog.text


def test_a_step_that_fails_ends_its_sequences_and_the_flight():
    """What was launched from its tokens is forgotten; the next request is served."""

    def fail(number: int) -> None:
        if number == 7:
            raise RuntimeError("the kernel died")

    rig = Rig.of(LaunchingFake(BLOCK, fail_read=fail))
    first, second = make_request(3), make_request(3, max_tokens=5)
    rig.add(first)
    outputs = rig.step(4)
    assert outputs[-1].error == "RuntimeError: the kernel died"
    assert not rig.engine.has_work
    rig.add(second)

    assert tokens_of(rig.finish(), second) == expected_tokens(second.prompt_ids, 5)


def test_a_device_whose_every_step_fails_ends_the_engine():
    """As without look-ahead, after three."""

    def fail(number: int) -> None:
        raise RuntimeError("the device is gone")

    rig = Rig.of(LaunchingFake(BLOCK, fail_read=fail), max_num_seqs=1)
    rig.add(*(make_request(3) for _ in range(MAX_FAILED_STEPS)))
    for _ in range(MAX_FAILED_STEPS - 1):
        rig.engine.step()

    with pytest.raises(RuntimeError, match="the device is gone"):
        rig.engine.step()


def test_forgotten_keys_are_computed_again():
    """Whoever was preempted between two steps loses nothing but time."""
    rig = Rig.of()
    requests = [make_request(6, max_tokens=9), stop_after(make_request(3), 3)]
    rig.add(*requests)
    outputs = rig.step(3)
    rig.scheduler.forget_kv()
    rig.scheduler.check()
    rig.runner.store.clear()

    outputs += rig.finish()

    assert tokens_of(outputs, requests[0]) == expected_tokens(requests[0].prompt_ids, 9)
    assert tokens_of(outputs, requests[1]) == expected_tokens(requests[1].prompt_ids, 3)


def test_an_engine_without_look_ahead_runs_as_before():
    """The plain path asks the runner for one step after the other."""
    runner = LaunchingFake(BLOCK)
    engine = Engine(make_scheduler(block_size=BLOCK), runner)
    request = make_request(3, max_tokens=4)
    engine.add(request)

    assert tokens_of(run_to_end(engine), request) == expected_tokens(request.prompt_ids, 4)
    assert set(runner.log) == {"run"}


asks = st.fixed_dictionaries(
    {
        "length": st.integers(1, 14),
        "shared": st.booleans(),
        "max_tokens": st.integers(1, 20),
        "stop_at": st.none() | st.integers(1, 20),
        "n": st.sampled_from([1, 1, 1, 2]),
        "priority": st.integers(0, 1),
        "plain": st.sampled_from([True, True, True, False]),
        "aborted_after": st.none() | st.integers(0, 25),
        "pause": st.integers(0, 6),
    }
)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    plan=st.lists(asks, min_size=1, max_size=7),
    num_blocks=st.integers(9, 30),
    seqs=st.integers(1, 5),
    budget=st.integers(5, 40),
    caching=st.booleans(),
    rhythm=st.integers(2, 9),
)
def test_tokens_are_those_of_the_plain_engine(plan, num_blocks, seqs, budget, caching, rhythm):
    """Whatever arrives, ends, is aborted, preempted, void or drawn again, and whenever."""
    by_hand: set[int] = set()
    runner = LaunchingFake(
        BLOCK,
        plain=lambda sequence: sequence.request.id not in by_hand,
        late=lambda ids: sum(ids) % (3 * rhythm) == 0,
        broken=lambda ids: sum(ids) % 97 == 5,
    )
    rig = Rig.of(
        runner,
        num_blocks=num_blocks,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        prefix_caching=caching,
    )
    outputs: list[RequestOutput] = []
    requests: list[Request] = []
    aborts: dict[int, list[int]] = {}
    clock = 0

    def tick() -> None:
        nonlocal clock, outputs
        clock += 1
        outputs += rig.step()
        for request_id in aborts.pop(clock, ()):
            outputs += rig.engine.abort(request_id)
            rig.check()

    for ask in plan:
        prompt = list(range(ask["length"])) if ask["shared"] else ask["length"]
        request = make_request(prompt, max_tokens=ask["max_tokens"], n=ask["n"])
        if ask["stop_at"] is not None:
            request = stop_after(request, ask["stop_at"])
        request = attrs.evolve(request, priority=ask["priority"])
        requests.append(request)
        if not ask["plain"]:
            by_hand.add(request.id)
        if ask["aborted_after"] is not None:
            aborts.setdefault(clock + 1 + ask["aborted_after"], []).append(request.id)
        rig.add(request)
        for _ in range(ask["pause"]):
            tick()
    for _ in range(3000):
        if not rig.engine.has_work:
            break
        tick()

    assert not rig.engine.has_work
    assert not runner.unread
    assert rig.scheduler.stats().used_blocks == 0
    for request in requests:
        for choice in range(request.sampling.n_choices):
            last = [o for o in outputs if (o.request_id, o.choice) == (request.id, choice)][-1]
            found = tokens_of(outputs, request, choice)
            assert found == expected_tokens(request.prompt_ids, len(found))
            match last.finish_reason:
                case "stop":
                    assert set(found[:-1]).isdisjoint(request.stop_ids)
                    assert found[-1] in request.stop_ids
                case "length":
                    assert set(found[:-1]).isdisjoint(request.stop_ids)
                    assert len(found) == request.max_tokens or (
                        len(found) + len(request.prompt_ids) == num_blocks * BLOCK
                    )
                case "error":
                    assert last.error == "NaN" or "exceed the KV cache" in (last.error or "")
                case other:
                    assert other == "canceled"
