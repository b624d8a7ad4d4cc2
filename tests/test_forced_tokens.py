"""Tokens known in advance: how sequences take them and the scheduler computes them."""

from __future__ import annotations

import random

import attrs
import pytest

from mistralrs_sdk.engine.prompt_batch import BatchRules
from mistralrs_sdk.engine.sequence import Sequence, Status
from tests.engine_helpers import make_request, make_scheduler

EOS = 2


@attrs.define(eq=False)
class FakeMatcher:
    """Forces 0 to 5 tokens after each drawn one; complete after `length` tokens, if given."""

    length: int | None = None
    fails_at: int | None = None
    eos_ids: tuple[int, ...] = (EOS,)
    error: str | None = None
    taken: list[int] = attrs.field(factory=list)

    def advance(self, token: int) -> bool:
        self.taken.append(token)
        if len(self.taken) == self.fails_at:
            self.error = "too much"
        return self.error is None

    @property
    def is_complete(self) -> bool:
        return len(self.taken) == self.length

    def forced(self) -> list[int]:
        count = random.Random(len(self.taken)).randrange(6)
        return [100 + len(self.taken) + i for i in range(count)]


def sequence(prompt: int = 3, *, number: int = 0, matcher=None, **limits) -> Sequence:
    made = Sequence.from_request(number, make_request(prompt, **limits), 0)
    made.matcher = matcher
    return made


def run(scheduler, *, steps: int = 500) -> list[tuple[int, ...]]:
    """Step until all is done; returns how many tokens each step computed of each sequence."""
    shapes = []
    for step in range(steps):
        output = scheduler.schedule()
        if not output.scheduled:
            break
        assert (
            sum(i.num_tokens for i in output.scheduled) <= scheduler.config.max_num_batched_tokens
        )
        shapes.append(tuple(i.num_tokens for i in output.scheduled))
        tokens = [1000 + step if item.samples else None for item in output.scheduled]
        scheduler.update(output, tokens)
        scheduler.check()
    assert not scheduler.has_work
    return shapes


def test_forced_tokens_are_computed_in_one_step_with_the_drawn_one():
    """After a draw that forces n tokens the next step has 1 + n of that sequence."""
    scheduler = make_scheduler()
    matcher = FakeMatcher()
    scheduler.add(sequence(matcher=matcher, max_tokens=30))

    shapes = run(scheduler)

    assert shapes[0] == (3,)
    assert max(shapes[1:]) > (3,)
    assert len(matcher.taken) == 30
    assert len(shapes) < 20


def test_a_sequence_ends_inside_of_forced_tokens():
    """The length and the end of the grammar are met among them too, to the token."""
    cut, whole = FakeMatcher(), FakeMatcher(length=11)
    scheduler = make_scheduler()
    first = sequence(number=0, matcher=cut, max_tokens=7)
    second = sequence(number=1, matcher=whole)
    scheduler.add(first)
    scheduler.add(second)

    run(scheduler)

    assert (first.finish_reason, first.num_generated) == ("length", 7)
    assert (second.finish_reason, second.num_generated) == ("stop", 12)
    assert second.tokens[-1] == EOS
    assert second.tokens[3:-1] == whole.taken


def test_a_matcher_that_fails_ends_its_sequence():
    """An error of the matcher is the sequence's, with the matcher's words."""
    scheduler = make_scheduler()
    failing = sequence(matcher=FakeMatcher(fails_at=4))
    scheduler.add(failing)

    run(scheduler)

    assert failing.finish_reason == "error"
    assert failing.error == "its constraint cannot go on: too much"


@pytest.mark.parametrize("seed", range(20))
def test_budgets_and_blocks_hold_with_forced_tokens(seed):
    """Small budgets, small pools and preemption: all end, each with every token computed once."""
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks=rng.randrange(16, 40),
        block_size=4,
        max_num_seqs=rng.randrange(2, 9),
        max_num_batched_tokens=rng.randrange(8, 24),
        max_decode_steps_before_prefill=rng.randrange(1, 5),
    )
    made = [
        sequence(
            rng.randrange(1, 20),
            number=i,
            matcher=FakeMatcher() if rng.random() < 0.7 else None,
            max_tokens=rng.randrange(1, 30),
        )
        for i in range(12)
    ]
    for item in made:
        scheduler.add(item)

    run(scheduler, steps=5000)

    for item in made:
        assert item.status is Status.FINISHED
        assert item.num_generated == item.request.max_tokens
        if item.matcher is not None:
            assert item.matcher.taken == item.tokens[item.prompt_len :]


def test_where_decodes_must_be_equal_nothing_is_forced():
    """A backend that takes one token per decode gets one token per decode."""
    scheduler = make_scheduler(rules=BatchRules(uniform_decodes=True))
    scheduler.add(sequence(matcher=FakeMatcher(), max_tokens=12))

    assert run(scheduler)[1:] == [(1,)] * 11
