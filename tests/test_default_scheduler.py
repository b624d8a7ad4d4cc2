"""The scheduler without paging: which lengths compute together, and what is kept for later."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mistralrs_sdk.engine.default_scheduler import DefaultScheduler
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.request import Request, SampledToken
from mistralrs_sdk.engine.scheduler import Scheduled, SchedulerConfig
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from mistralrs_sdk.engine.sequence import Status
from tests.engine_helpers import (
    FakeRunner,
    admit,
    expected_tokens,
    make_request,
    next_token,
    run_to_end,
    step,
    tokens_of,
)


@attrs.define
class TokenCaches:
    """Caches that hold the token ids themselves, so that a wrong one is seen at once."""

    rows: dict[int, list[int]] = attrs.field(factory=dict)

    @property
    def owners(self) -> Collection[int]:
        return self.rows.keys()

    def keep(self, sequence_id: int, length: int) -> list[int]:
        assert len(self.rows[sequence_id]) >= length
        return self.rows[sequence_id][:length]

    def start_from(self, sequence_id: int, kept: list[int]) -> None:
        self.rows[sequence_id] = kept

    def free(self, ids: Iterable[int]) -> None:
        for sequence_id in ids:
            self.rows.pop(sequence_id, None)


@attrs.define
class CachingRunner:
    """The fake model over `TokenCaches`: what it is said to have computed must be there."""

    caches: TokenCaches
    fail_when: int | None = None
    steps: int = 0

    def run(self, scheduled: Sequence[Scheduled]) -> list[SampledToken | None]:
        self.steps += 1
        if self.steps == self.fail_when:
            raise RuntimeError("the kernel died")
        for item in scheduled:
            sequence, start = item.sequence, item.sequence.num_computed_tokens
            have = self.caches.rows.get(sequence.id, [])[:start]
            assert have == sequence.tokens[:start], "a token's keys were never computed"
            self.caches.rows[sequence.id] = sequence.tokens[: start + item.num_tokens]
        return [SampledToken(next_token(item.sequence.tokens)) for item in scheduled]


def unpaged(*, caches: bool = True, prefix_cache_n: int | None = None, **limits):
    """A scheduler with roomy limits."""
    defaults = {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4096,
        "max_decode_steps_before_prefill": 8,
        "max_model_len": 10_000,
    }
    return DefaultScheduler(
        SchedulerConfig(**(defaults | limits)),
        caches=TokenCaches() if caches else None,
        prefix_cache_n=prefix_cache_n,
    )


def make_engine(scheduler: DefaultScheduler, **settings) -> Engine:
    return Engine(scheduler, CachingRunner(scheduler._caches, **settings))


def decoders(scheduler: DefaultScheduler, lengths: Sequence[int]) -> list[EngineSequence]:
    """Running sequences of these lengths, prefilled already."""
    sequences = [admit(scheduler, make_request(length)) for length in lengths]
    for sequence in sequences:
        scheduler.waiting.remove(sequence)
        sequence.status = Status.DECODE
        sequence.num_computed_tokens = len(sequence) - 1
        scheduler.running.append(sequence)
        scheduler._caches.rows[sequence.id] = list(sequence.tokens)
    return sequences


def passes(scheduler: DefaultScheduler, sequences: list[EngineSequence], count: int):
    """Which of the sequences ran in each of the next passes."""
    return [[sequences.index(s) for s, _ in step(scheduler)] for _ in range(count)]


def test_lengths_catch_up_and_then_stay_together():
    """V20: decoders of 5, 5 and 9 tokens; the long one gets its turn, then all are one batch."""
    scheduler = unpaged()
    sequences = decoders(scheduler, [5, 5, 9])
    together = [0, 1, 2]
    pair = [0, 1]
    assert passes(scheduler, sequences, 10) == [pair] * 3 + [[2]] + [pair] * 2 + [together] * 4


def test_the_bucket_with_the_greatest_sum_of_priorities_runs():
    """V21: two of length 8 make 6; one of length 64 that was passed over three times makes 9."""
    scheduler = unpaged(max_num_seqs=3)
    sequences = decoders(scheduler, [8, 8, 64])
    scheduler._urgency = {sequences[2].id: 3}
    admit(scheduler, make_request(5))
    assert passes(scheduler, sequences, 1) == [[2]]


def test_passed_over_sequences_gain_a_point_and_those_that_run_lose_all():
    """Urgency counts the passes since a sequence ran: 3 + log2(5) beats log2(23)."""
    scheduler = unpaged()
    a, b = decoders(scheduler, [4, 20])
    for urgency in ({b.id: 1}, {a.id: 1}, {a.id: 2}, {a.id: 3}, {b.id: 1}):
        step(scheduler)
        assert scheduler._urgency == urgency


def test_of_equal_priorities_the_oldest_runs():
    """Two of length 8 and one of length 64 make 6 each: whoever came first decides."""
    for lengths, winners in (([64, 8, 8], [0]), ([8, 64, 8], [0, 2])):
        scheduler = unpaged(max_num_seqs=3)
        sequences = decoders(scheduler, lengths)
        admit(scheduler, make_request(5))
        assert passes(scheduler, sequences, 1) == [winners]


def test_the_shortest_of_a_first_burst_go_first():
    """Nothing runs yet: prompts of one length run whole, the shortest before the others."""
    scheduler = unpaged()
    a, b, c = (admit(scheduler, make_request(n)) for n in (9, 4, 4))
    assert step(scheduler) == [(b, 4), (c, 4)]
    assert a.status is Status.PREFILL
    assert a.num_computed_tokens == 0


def test_the_limit_of_running_sequences_holds_from_the_start():
    """max_num_seqs 2: two of three prompts are admitted although nothing runs; FCFS."""
    scheduler = unpaged(max_num_seqs=2)
    a, b, c = (admit(scheduler, make_request(4, max_tokens=2)) for _ in range(3))
    assert step(scheduler) == [(a, 4), (b, 4)]
    assert step(scheduler) == [(a, 1), (b, 1)]
    assert step(scheduler) == [(c, 4)]


def test_a_parked_sequence_keeps_its_place():
    """Who was admitted runs on before anybody new comes in."""
    scheduler = unpaged(max_num_seqs=2)
    a, b = decoders(scheduler, [5, 9])
    late = admit(scheduler, make_request(3))
    for _ in range(20):
        assert {s for s, _ in step(scheduler)} <= {a, b}
    assert late.status is Status.WAITING


def test_a_parked_decoder_goes_on_where_it_was():
    """When everybody else has finished, it computes one token a pass, not its prompt again."""
    scheduler = unpaged()
    short, long = decoders(scheduler, [5, 900])
    short.request = attrs.evolve(short.request, max_tokens=1)
    assert step(scheduler) == [(short, 1)]
    assert short.status is Status.FINISHED
    assert long.status is Status.DECODE
    assert step(scheduler) == [(long, 1)]


def test_a_decoder_and_a_prompt_of_one_length_share_a_pass():
    """The decode comes first; the prompt runs whole."""
    scheduler = unpaged()
    (decoder,) = decoders(scheduler, [6])
    prompt = admit(scheduler, make_request(6))
    assert step(scheduler) == [(decoder, 1), (prompt, 6)]
    assert step(scheduler) == [(decoder, 1), (prompt, 1)]


def test_prompts_that_resume_at_different_offsets_are_different_buckets():
    """Four tokens left of 4 and four left of 8: the same length, but not the same batch."""
    scheduler = unpaged(prefix_cache_n=4)
    base = list(range(100, 104))
    scheduler._prefixes.put(scheduler._root, base, lambda: base)
    whole = admit(scheduler, make_request(4))
    resumed = admit(scheduler, make_request([*base, 7, 8, 9, 10]))
    assert step(scheduler) == [(whole, 4)]
    assert resumed.num_uncomputed_tokens == 4
    assert resumed.num_computed_tokens == 4


def test_a_stream_of_short_requests_does_not_starve_a_parked_one():
    """Each of them ends in one pass, so that nothing runs when the next comes."""
    scheduler = unpaged(max_num_seqs=2)
    (long,) = decoders(scheduler, [40])
    for _ in range(30):
        admit(scheduler, make_request(3, max_tokens=1))
        step(scheduler)
    assert long.num_generated >= 3


def test_prompts_beyond_the_budget_wait_with_more_urgency():
    """A budget of 10 takes the two oldest of four prompts of 4; the others gain a point."""
    scheduler = unpaged(max_num_batched_tokens=10, max_num_seqs=4)
    a, b, c, d = (admit(scheduler, make_request(4)) for _ in range(4))
    assert step(scheduler) == [(a, 4), (b, 4)]
    assert scheduler._urgency == {c.id: 1, d.id: 1}
    assert step(scheduler) == [(c, 4), (d, 4)]


def test_a_prompt_longer_than_the_budget_runs_alone():
    """Without paging a prompt cannot be split: at least one always runs."""
    scheduler = unpaged(max_num_batched_tokens=10, max_num_seqs=4)
    a, b = (admit(scheduler, make_request(25)) for _ in range(2))
    assert step(scheduler) == [(a, 25)]
    assert step(scheduler) == [(b, 25)]


def test_raw_logits_are_computed_alone():
    """Such a request shares its pass with nobody, and neither finds nor leaves a prefix."""
    scheduler = unpaged(prefix_cache_n=4)
    request = attrs.evolve(make_request(6, max_tokens=1), raw_logits=True)
    raw, plain = admit(scheduler, request), admit(scheduler, make_request(6))
    assert step(scheduler) == [(raw, 6)]
    assert step(scheduler) == [(plain, 6)]
    assert len(scheduler._prefixes) == 0
    assert scheduler.stats().prefix_lookups == 1


def test_without_a_cache_every_token_runs_in_every_step():
    """no_kv_cache: each pass feeds the sequences of one length whole, as many as fit the budget."""
    scheduler = unpaged(caches=False, max_num_seqs=3, max_num_batched_tokens=10)
    a, b, c = (admit(scheduler, make_request(4, max_tokens=2)) for _ in range(3))
    assert step(scheduler) == [(a, 4), (b, 4)]
    assert step(scheduler) == [(a, 5), (b, 5)]
    assert step(scheduler) == [(c, 4)]
    assert step(scheduler) == [(c, 5)]
    assert not scheduler.has_work


def test_sequences_that_end_free_their_memory_at_once():
    """Aborted while it waits, before its first pass, while parked, while it runs."""
    scheduler = unpaged(max_num_seqs=3)
    running, parked = decoders(scheduler, [5, 9])
    step(scheduler)
    fresh, waiting = admit(scheduler, make_request(30)), admit(scheduler, make_request(30))
    step(scheduler)
    for sequence in (running, parked, fresh, waiting):
        scheduler.end([sequence], "canceled")
        scheduler.check()
        assert sequence.finish_reason == "canceled"
    assert not scheduler._caches.owners
    assert not scheduler.has_work


def test_a_repeated_prompt_computes_its_last_token_only():
    """A prompt that is covered wholly is a hit of len-1: the last logits are needed."""
    scheduler = unpaged(prefix_cache_n=4)
    engine = make_engine(scheduler)
    ids = list(range(50, 70))
    for cached in (0, 19, 19):
        request = make_request(ids, max_tokens=3)
        engine.add(request)
        outputs = run_to_end(engine)
        assert tokens_of(outputs, request) == expected_tokens(ids, 3)
        assert {output.cached_tokens for output in outputs} == {cached}
    stats = scheduler.stats()
    assert (stats.prefix_lookups, stats.prefix_hits) == (3, 2)
    assert stats.computed_tokens == 22 + 3 + 3


def test_a_longer_chat_reuses_all_of_the_shorter_one():
    """The key holds what was generated too, but the last token: it has no keys yet."""
    scheduler = unpaged(prefix_cache_n=4)
    engine = make_engine(scheduler)
    first = make_request(list(range(50, 60)), max_tokens=5)
    engine.add(first)
    answer = tokens_of(run_to_end(engine), first)
    second = make_request([*first.prompt_ids, *answer, 1, 2, 3], max_tokens=2)
    engine.add(second)
    outputs = run_to_end(engine)
    assert outputs[-1].cached_tokens == 14
    assert len(scheduler._prefixes) == 1


def sent(scheduler: DefaultScheduler, request: Request) -> int:
    """Run a request to its end; returns how many tokens of its prompt were cached."""
    engine = make_engine(scheduler)
    engine._ids = iter([request.id])
    engine.add(request)
    return run_to_end(engine)[-1].cached_tokens


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        ({}, {}, 9),
        ({"cache_salt": "a"}, {"cache_salt": "a"}, 9),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, 0),
        ({"cache_salt": "a"}, {}, 0),
        ({"use_prefix_cache": False}, {}, 0),
        ({}, {"use_prefix_cache": False}, 0),
    ],
)
def test_who_may_reuse_a_prefix(first, second, cached):
    """Only requests with one salt share; whoever opts out neither leaves nor finds anything."""
    scheduler = unpaged(prefix_cache_n=4)
    ids = list(range(30, 40))
    sent(scheduler, attrs.evolve(make_request(ids, max_tokens=1), **first))
    assert sent(scheduler, attrs.evolve(make_request(ids, max_tokens=1), **second)) == cached


def test_prefixes_are_kept_on_ending_but_not_on_errors():
    """A stop string or a cancel keeps the cache, a failed step does not; clearing drops all."""
    ids = list(range(30, 40))
    for ending, cached in (("canceled", 9), ("error", 0)):
        scheduler = unpaged(prefix_cache_n=4)
        sequence = admit(scheduler, make_request(ids))
        scheduler.schedule()
        scheduler._caches.rows[sequence.id] = list(ids)
        sequence.num_computed_tokens = 10
        scheduler.end([sequence], ending)
        assert sent(scheduler, make_request(ids, max_tokens=1)) == cached
        scheduler.clear_prefix_cache()
        assert sent(scheduler, make_request(ids, max_tokens=1)) == 0


def test_a_failed_step_ends_its_sequences_only():
    """The parked ones and the kept caches live on."""
    scheduler = unpaged(prefix_cache_n=4)
    kept = list(range(30, 40))
    sent(scheduler, make_request(kept, max_tokens=1))
    engine = make_engine(scheduler, fail_when=2)
    requests = [make_request(n, max_tokens=5) for n in (4, 9)]
    for request in requests:
        engine.add(request)
    outputs = run_to_end(engine)
    reasons = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
    assert sorted(reasons.values()) == ["error", "length"]
    assert sent(scheduler, make_request(kept, max_tokens=1)) == 9


def test_without_a_size_no_prefix_is_kept():
    """prefix_cache_n None: nothing is looked up and nothing is kept."""
    scheduler = unpaged(prefix_cache_n=None)
    ids = list(range(30, 40))
    assert [sent(scheduler, make_request(ids, max_tokens=2)) for _ in range(2)] == [0, 0]
    assert scheduler.stats().prefix_lookups == 0


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=10),
    arrivals=st.lists(st.integers(0, 30), min_size=10, max_size=10),
    seqs=st.integers(1, 5),
    budget=st.sampled_from([5, 12, 4096]),
    cached=st.booleans(),
    prefixes=st.sampled_from([None, 1, 3]),
    shared=st.integers(0, 8),
    aborts=st.dictionaries(st.integers(0, 9), st.integers(0, 20), max_size=3),
)
def test_any_traffic_gives_everyone_its_own_tokens(
    prompts, arrivals, seqs, budget, cached, prefixes, shared, aborts
):
    """Under any limits: the right tokens, a token in every pass, nobody starves, no leak."""
    scheduler = unpaged(
        caches=cached, prefix_cache_n=prefixes, max_num_seqs=seqs, max_num_batched_tokens=budget
    )
    engine = make_engine(scheduler) if cached else Engine(scheduler, FakeRunner())
    requests = []
    for i, (length, count) in enumerate(prompts):
        ids = [j if j < shared else 1000 * i + j for j in range(length)]
        requests.append(make_request(ids, max_tokens=count))
    outputs, added = [], set()
    most_urgent = seqs * seqs * (1 + math.log2(24))
    for number in range(2000):
        for index, request in enumerate(requests):
            if arrivals[index] == number:
                engine.add(request)
                added.add(index)
            if aborts.get(index) == number and index in added:
                outputs += engine.abort(request.id)
                scheduler.check()
        if not engine.has_work:
            if len(added) == len(requests):
                break
            continue
        before = scheduler.stats().computed_tokens
        outputs += engine.step()
        scheduler.check()
        assert scheduler.stats().computed_tokens > before, "a pass without a computed token"
        assert all(urgency <= most_urgent for urgency in scheduler._urgency.values())
    else:
        raise AssertionError("no end")
    for i, (request, (_, count)) in enumerate(zip(requests, prompts, strict=True)):
        got = tokens_of(outputs, request)
        assert got == expected_tokens(request.prompt_ids, count)[: len(got)]
        assert i in aborts or len(got) == count
    assert not cached or not scheduler._caches.owners
