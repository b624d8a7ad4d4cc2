"""The paged scheduler: who computes how many tokens in which pass."""

from __future__ import annotations

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.scheduler import (
    MAX_FAILED_ADMISSIONS,
    SchedulerConfig,
)
from mistralrs_sdk.engine.sequence import Status
from tests.engine_helpers import (
    FakeRunner,
    admit,
    expected_tokens,
    make_request,
    make_scheduler,
    run_to_end,
    step,
    tokens_of,
)


def test_a_prompt_is_prefilled_and_then_decodes_one_token_a_step():
    """The final prompt chunk yields the first token; each later step one more."""
    scheduler = make_scheduler()
    sequence = admit(scheduler, make_request(10, max_tokens=3))
    assert step(scheduler) == [(sequence, 10)]
    assert step(scheduler) == [(sequence, 1)]
    assert step(scheduler) == [(sequence, 1)]
    assert sequence.finish_reason == "length"
    assert not scheduler.has_work


def test_a_long_prompt_is_split_by_the_token_budget():
    """A 10-token prompt with a budget of 4 runs as 4, 4 and 2; only the last chunk draws."""
    scheduler = make_scheduler(max_num_batched_tokens=4)
    sequence = admit(scheduler, make_request(10))
    assert [step(scheduler)[0][1] for _ in range(3)] == [4, 4, 2]
    assert sequence.num_generated == 1


def test_the_chunk_limit_is_divided_over_the_admitted_prompts():
    """A quantum of 16 over 8 long prompts is 2 tokens each."""
    scheduler = make_scheduler(max_prefill_chunk_tokens=16)
    sequences = [admit(scheduler, make_request(30)) for _ in range(8)]
    assert step(scheduler) == [(s, 2) for s in sequences]


def test_a_budget_smaller_than_the_prompts_rotates_over_them():
    """Budget 2 with three prompts: two get a token, then the one left out comes first."""
    scheduler = make_scheduler(max_num_batched_tokens=2)
    a, b = admit(scheduler, make_request(9)), admit(scheduler, make_request(9))
    assert step(scheduler) == [(a, 1), (b, 1)]


def test_a_long_prompt_lets_eight_decode_steps_pass_between_chunks():
    """Quantum 512, limit 8: 512 tokens, 8 decode turns, and so on; the tail waits one turn."""
    scheduler = make_scheduler(
        num_blocks=400, block_size=32, max_prefill_chunk_tokens=512, mixed_batches=False
    )
    decoder = admit(scheduler, make_request(8))
    step(scheduler)
    prompt = admit(scheduler, make_request(1536))
    passes = ["decode" if step(scheduler)[0][0] is decoder else "prefill" for _ in range(20)]
    first = passes.index("prefill")
    assert passes[first : first + 9] == ["prefill"] + ["decode"] * 8
    assert passes[first + 9 : first + 12] == ["prefill", "decode", "prefill"]
    assert prompt.status is Status.DECODE


def test_running_decodes_ride_along_in_a_prefill_pass():
    """With mixed batches a prefill pass also gives each decode its token, within the budget."""
    scheduler = make_scheduler(max_num_batched_tokens=16)
    decoder = admit(scheduler, make_request(4))
    step(scheduler)
    prompt = admit(scheduler, make_request(40))
    seen = [step(scheduler) for _ in range(4)]
    mixed = [work for work in seen if len(work) == 2]
    assert mixed
    assert mixed[0] == [(decoder, 1), (prompt, 15)]


def test_prompts_beside_decodes_are_taken_in_order_up_to_their_limit():
    """A prefill pass with a decode in it fills its limit prompt by prompt, not all a little."""
    scheduler = make_scheduler(max_mixed_prompt_tokens=8)
    decoder = admit(scheduler, make_request(4, max_tokens=9))
    step(scheduler)
    first, second = (admit(scheduler, make_request(6)) for _ in range(2))
    seen = [step(scheduler) for _ in range(3)]
    mixed = [work for work in seen if len(work) > 1]
    assert mixed[0] == [(decoder, 1), (first, 6), (second, 2)]


def test_prompts_that_no_answer_waits_for_take_the_whole_budget():
    """The limit of mixed passes does not hold where nothing decodes."""
    scheduler = make_scheduler(max_num_batched_tokens=40, max_mixed_prompt_tokens=8)
    prompts = [admit(scheduler, make_request(20)) for _ in range(2)]
    assert step(scheduler) == [(s, 20) for s in prompts]


def test_max_num_seqs_bounds_the_running_and_the_rest_wait_in_order():
    """Waiting sequences enter one by one, first come first served."""
    scheduler = make_scheduler(max_num_seqs=2)
    sequences = [admit(scheduler, make_request(3, max_tokens=2)) for _ in range(5)]
    order = []
    while scheduler.has_work:
        for sequence, _ in step(scheduler):
            if sequence not in order:
                order.append(sequence)
    assert order == sequences


def test_the_youngest_is_preempted_and_returns_to_the_front():
    """Who lacks a block takes the youngest decode's; that one is next to be admitted."""
    scheduler = make_scheduler(num_blocks=6, block_size=2, prefix_caching=False)
    first = admit(scheduler, make_request(3))
    step(scheduler)
    second = admit(scheduler, make_request(2))
    while not scheduler.stats().preemptions:
        step(scheduler)
    assert second.status is Status.WAITING
    assert scheduler.waiting.front is second
    assert second.num_generated > 0
    assert first.status is Status.DECODE


def test_a_sequence_is_not_admitted_into_the_last_free_blocks_of_running_decodes():
    """Admission leaves each running decode one block, so nobody is preempted right away."""
    scheduler = make_scheduler(num_blocks=3, block_size=2)
    first = admit(scheduler, make_request(3))
    step(scheduler)
    second = admit(scheduler, make_request(2))
    assert all(sequence is first for sequence, _ in step(scheduler))
    assert second.status is Status.WAITING


def test_the_front_of_the_queue_gets_blocks_after_64_failed_passes():
    """Beyond the limit running sequences are preempted from the back until the front fits."""
    scheduler = make_scheduler(num_blocks=8, block_size=8, max_model_len=64)
    hog = admit(scheduler, make_request(33))
    step(scheduler)
    waiting = admit(scheduler, make_request(30))
    waiting.failed_admissions = MAX_FAILED_ADMISSIONS
    for _ in range(10):
        step(scheduler)
        if waiting.status is not Status.WAITING:
            break
    assert waiting.status is not Status.WAITING
    assert hog.num_preemptions == 1


def test_a_prompt_beyond_the_pool_is_refused_and_the_next_one_runs():
    """More tokens than the whole pool holds can never fit: an error names both numbers."""
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    big, small = admit(scheduler, make_request(17)), admit(scheduler, make_request(4))
    output = scheduler.schedule()
    assert output.rejected == (big,)
    assert "17" in big.error
    assert "16" in big.error
    assert [item.sequence for item in output.scheduled] == [small]


def test_a_second_identical_prompt_reuses_all_but_the_last_block():
    """A hit covers at most len - 1 tokens: the last one runs again for its logits."""
    scheduler = make_scheduler(block_size=8)
    prompt = list(range(16))
    first = admit(scheduler, make_request(prompt, max_tokens=1))
    step(scheduler)
    second = admit(scheduler, make_request(prompt, max_tokens=1))
    assert step(scheduler) == [(second, 8)]
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)


def test_generated_tokens_are_reused_in_the_next_turn():
    """Blocks filled while decoding serve a prompt that continues the conversation."""
    scheduler = make_scheduler(block_size=4)
    first = admit(scheduler, make_request(list(range(6)), max_tokens=7))
    while scheduler.has_work:
        step(scheduler)
    second = admit(scheduler, make_request([*first.tokens, 1, 2, 3]))
    step(scheduler)
    assert second.cached_tokens == 12


def test_prefix_caching_can_be_off():
    """Without it nothing is found and nothing stays registered."""
    scheduler = make_scheduler(prefix_caching=False)
    for _ in range(2):
        sequence = admit(scheduler, make_request(list(range(16)), max_tokens=1))
        step(scheduler)
        assert sequence.cached_tokens == 0
    assert scheduler.stats().cached_blocks == 0


def test_a_prefix_hit_is_counted_once_per_sequence():
    """Preemption and readmission do not count again."""
    scheduler = make_scheduler(num_blocks=5, block_size=2, max_model_len=8)
    a = admit(scheduler, make_request([1, 2, 3]))
    step(scheduler)
    b = admit(scheduler, make_request([7, 8]))
    while scheduler.has_work:
        step(scheduler)
    assert a.num_preemptions + b.num_preemptions > 0
    assert scheduler.stats().prefix_lookups == 2


def test_clearing_the_prefix_cache_forgets_everything():
    """After a clear the same prompt is computed anew."""
    scheduler = make_scheduler(block_size=4)
    admit(scheduler, make_request(list(range(16)), max_tokens=1))
    step(scheduler)
    scheduler.clear_prefix_cache()
    again = admit(scheduler, make_request(list(range(16)), max_tokens=1))
    step(scheduler)
    assert again.cached_tokens == 0


def test_an_aborted_sequence_gives_its_blocks_back_at_once():
    """Waiting, prefilling or decoding: after abort nothing is used."""
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    decoding = admit(scheduler, make_request(4))
    step(scheduler)
    prefilling, waiting = admit(scheduler, make_request(40)), admit(scheduler, make_request(4))
    for _ in range(3):
        step(scheduler)
    everybody = [decoding, prefilling, waiting]
    scheduler.end(everybody, "canceled")
    assert all(s.finish_reason == "canceled" for s in everybody)
    assert scheduler.stats().used_blocks == 0
    assert not scheduler.has_work


def test_decodes_beyond_the_token_budget_take_turns():
    """Budget 2, three decodes: [0, 1], [2, 0], [1, 2]."""
    scheduler = make_scheduler(max_num_batched_tokens=64)
    sequences = [admit(scheduler, make_request(2)) for _ in range(3)]
    step(scheduler)
    scheduler.config = SchedulerConfig(
        max_num_seqs=32,
        max_num_batched_tokens=2,
        max_decode_steps_before_prefill=8,
        max_model_len=400,
    )
    passes = [[sequences.index(s) for s, _ in step(scheduler)] for _ in range(3)]
    assert passes == [[0, 1], [2, 0], [1, 2]]


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8),
    num_blocks=st.integers(8, 20),
    budget=st.integers(1, 40),
    chunk=st.one_of(st.none(), st.integers(1, 16)),
    seqs=st.integers(1, 8),
    caching=st.booleans(),
    mixed=st.booleans(),
    beside=st.one_of(st.none(), st.integers(1, 16)),
    shared=st.integers(0, 12),
    aborts=st.dictionaries(st.integers(0, 7), st.integers(0, 20), max_size=3),
)
def test_any_traffic_gives_everyone_its_own_tokens(
    prompts, num_blocks, budget, chunk, seqs, caching, mixed, beside, shared, aborts
):
    """Under any limits, preemption, sharing and cancelling: the right tokens, progress, no leak."""
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_prefill_chunk_tokens=chunk,
        prefix_caching=caching,
        mixed_batches=mixed,
        max_mixed_prompt_tokens=beside,
    )
    engine = Engine(scheduler, FakeRunner())
    requests = []
    for i, (length, count) in enumerate(prompts):
        prompt = [j if j < shared else 1000 * i + j for j in range(length)]
        requests.append(make_request(prompt, max_tokens=count))
        engine.add(requests[-1])
    outputs = []
    idle = 0
    for number in range(5000):
        for index, when in aborts.items():
            if when == number and index < len(requests):
                outputs += engine.abort(requests[index].id)
                scheduler.check()
        if not engine.has_work:
            break
        before = scheduler.stats().computed_tokens
        outputs += engine.step()
        scheduler.check()
        idle = 0 if scheduler.stats().computed_tokens > before else idle + 1
        assert idle < 2, "two steps without a computed token"
    else:
        raise AssertionError("no end")
    for i, (request, (_, count)) in enumerate(zip(requests, prompts, strict=True)):
        expected = expected_tokens(request.prompt_ids, count)
        got = tokens_of(outputs, request)
        assert got == expected[: len(got)]
        assert i in aborts or len(got) == count
    assert scheduler.stats().used_blocks == 0


def test_a_pool_far_too_small_still_gives_every_request_its_tokens():
    """32 requests through a pool that holds three of them."""
    scheduler = make_scheduler(num_blocks=24, block_size=4, max_model_len=64)
    engine = Engine(scheduler, FakeRunner())
    requests = [make_request(list(range(i, i + 16)), max_tokens=40) for i in range(32)]
    for request in requests:
        engine.add(request)
    outputs = run_to_end(engine)
    for request in requests:
        assert tokens_of(outputs, request) == expected_tokens(request.prompt_ids, 40)
    stats = scheduler.stats()
    assert stats.preemptions > 0
    assert stats.computed_tokens < 6 * 32 * 56


def test_light_requests_pass_a_front_that_waits_for_blocks_but_not_for_ever():
    """A hog runs, a big one waits for blocks: small ones go before it, a bounded number of them."""
    scheduler = make_scheduler(num_blocks=32, block_size=16, max_num_batched_tokens=32)
    engine = Engine(scheduler, FakeRunner())
    hog, big = make_request(400, max_tokens=60), make_request(300, max_tokens=4)
    light = [make_request(8, max_tokens=4) for _ in range(8)]
    for request in (hog, big, *light):
        engine.add(request)
    outputs = run_to_end(engine)
    ended = [o.request_id for o in outputs if o.finish_reason is not None]
    assert set(ended[:8]) == {request.id for request in light}
    for request in (hog, big, *light):
        assert tokens_of(outputs, request) == expected_tokens(
            request.prompt_ids, request.max_tokens
        )


def test_a_front_that_waits_for_blocks_is_overtaken_a_bounded_number_of_times():
    """However many small requests keep coming, at most so many enter before it."""
    scheduler = make_scheduler(num_blocks=32, block_size=16, max_num_batched_tokens=64)
    admit(scheduler, make_request(400, max_tokens=100))
    step(scheduler)
    big = admit(scheduler, make_request(300, max_tokens=4))
    light = [admit(scheduler, make_request(8, max_tokens=4)) for _ in range(60)]
    entered = []
    while big.status is Status.WAITING and len(entered) < 500:
        entered.append(sum(s.status is not Status.WAITING for s in light))
        step(scheduler)
    assert max(entered) == entered[-1] == big.times_overtaken == scheduler.config.max_overtakes


def test_a_younger_prompt_gives_its_blocks_to_an_older_decode():
    """The youngest loses its blocks, whether it decodes or still prefills."""
    scheduler = make_scheduler(num_blocks=8, block_size=2, max_num_batched_tokens=2)
    old = admit(scheduler, make_request(2, max_tokens=12))
    step(scheduler)
    prompt = admit(scheduler, make_request(9))
    for _ in range(30):
        step(scheduler)
        if prompt.num_preemptions:
            break
    assert prompt.num_generated == 0
    assert prompt.num_preemptions == 1
    assert old.num_preemptions == 0


def test_waiters_that_ended_leave_the_queue_at_once():
    """However long the queue is, ending a sequence in it takes it out."""
    scheduler = make_scheduler(max_num_seqs=1)
    first = admit(scheduler, make_request(4))
    step(scheduler)
    waiters = [admit(scheduler, make_request(2)) for _ in range(1000)]
    scheduler.end(waiters[:-1], "canceled")
    assert list(scheduler.waiting) == [waiters[-1]]
    scheduler.end([first], "canceled")
    assert step(scheduler)[0][0] is waiters[-1]


def test_a_preempted_overtaker_goes_back_behind_whom_it_overtook():
    """Its place in the queue is that of its arrival, so the front is not passed for ever."""
    scheduler = make_scheduler()
    front, overtaker = admit(scheduler, make_request(4)), admit(scheduler, make_request(4))
    later = admit(scheduler, make_request(4))
    scheduler.waiting.remove(overtaker)
    scheduler.waiting.put_back(overtaker)
    assert list(scheduler.waiting) == [front, overtaker, later]


def test_who_waited_too_long_takes_no_blocks_from_a_better_priority():
    """After 64 failed passes only sequences of the same or a later priority are preempted."""
    scheduler = make_scheduler(num_blocks=8, block_size=8, max_model_len=64)
    urgent = admit(scheduler, attrs.evolve(make_request(33), priority=-5))
    step(scheduler)
    waiting = admit(scheduler, attrs.evolve(make_request(30), priority=9))
    waiting.failed_admissions = MAX_FAILED_ADMISSIONS
    for _ in range(12):
        step(scheduler)
    assert urgent.num_preemptions == 0
    assert waiting.status is Status.WAITING


def test_nobody_is_admitted_who_cannot_reach_its_next_block():
    """Two prompts that fill the pool exactly: the second waits instead of being preempted."""
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_model_len=16)
    first, second = (admit(scheduler, make_request(8, max_tokens=4)) for _ in range(2))
    while scheduler.has_work:
        step(scheduler)
    assert first.num_preemptions + second.num_preemptions == 0
    assert (first.num_generated, second.num_generated) == (4, 4)


def test_a_prefix_that_is_being_computed_is_waited_for():
    """Four choices of one prompt, or four requests at once: the prompt is computed once."""
    scheduler = make_scheduler(num_blocks=200, block_size=4)
    prompt = list(range(100))
    sequences = [admit(scheduler, make_request(prompt, max_tokens=4)) for _ in range(4)]
    other = admit(scheduler, make_request(4, max_tokens=4))
    assert {s.id for s, _ in step(scheduler)} == {sequences[0].id, other.id}
    while scheduler.has_work:
        step(scheduler)
    assert [s.cached_tokens for s in sequences] == [0, 96, 96, 96]
    assert scheduler.stats().computed_tokens < 100 + 3 * 4 + 5 * 4 + 4
    assert scheduler._blocks._computing == {}


def test_only_sequences_that_may_share_count_as_lookups():
    """Opted out, or with the prefix cache off: no lookup, no hit."""
    scheduler = make_scheduler()
    admit(scheduler, attrs.evolve(make_request(9), use_prefix_cache=False))
    step(scheduler)
    assert scheduler.stats().prefix_lookups == 0
