"""The acceptance vectors of mistral.rs' paged scheduler (generation B), without mixed batches.

Where the original preempts a sequence that cannot share a pass, ours leaves it running.
"""

from __future__ import annotations

import attrs
import pytest

from mistralrs_sdk.engine.prompt_batch import BatchRules
from mistralrs_sdk.engine.scheduler import MAX_FAILED_ADMISSIONS, Scheduler
from mistralrs_sdk.engine.sequence import Sequence, Status
from tests.engine_helpers import admit, make_request, make_scheduler, next_token

UNIFORM = BatchRules(uniform_prompts=True)


def pure(**limits) -> Scheduler:
    """A scheduler whose passes are all prompt or all decode, with blocks to spare."""
    limits = {"num_blocks": 2000, "block_size": 8, "mixed_batches": False, **limits}
    return make_scheduler(**limits)


def work(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """One pass: (id, first token, end) of each sequence."""
    output = scheduler.schedule()
    ranges = [
        (
            i.sequence.id,
            i.sequence.num_computed_tokens,
            i.sequence.num_computed_tokens + i.num_tokens,
        )
        for i in output.scheduled
    ]
    tokens = [next_token(i.sequence.tokens) if i.samples else None for i in output.scheduled]
    scheduler.update(output, tokens)
    scheduler.check()
    return ranges


def running(scheduler: Scheduler, length: int, *, computed: int, **request) -> Sequence:
    """A running prompt with `computed` of its `length` tokens done."""
    sequence = admit(scheduler, attrs.evolve(make_request(length), **request))
    scheduler.waiting.remove(sequence)
    sequence.status = Status.PREFILL
    sequence.blocks = scheduler.pool.allocate(scheduler.pool.blocks_for(length))
    sequence.num_computed_tokens = computed
    scheduler.running.append(sequence)
    return sequence


def decoder(scheduler: Scheduler, length: int = 8) -> Sequence:
    """A running decode: everything but its newest token is computed."""
    sequence = running(scheduler, length, computed=length)
    sequence.status = Status.DECODE
    sequence.tokens.append(next_token(sequence.tokens))
    return sequence


def ids(ranges: list[tuple[int, int, int]]) -> list[int]:
    return [sequence_id for sequence_id, _, _ in ranges]


def test_v1_a_newcomer_waits_one_decode_turn():
    """A decode and an admissible waiting prompt: decode first, then the prompt."""
    scheduler = pure()
    first = decoder(scheduler)
    second = admit(scheduler, make_request(8))
    assert [ids(work(scheduler)), ids(work(scheduler))] == [[first.id], [second.id]]


def test_v2_a_prompt_tail_waits_one_decode_turn():
    """A tail within the budget: one decode turn, then the tail."""
    scheduler = pure()
    first = decoder(scheduler)
    second = running(scheduler, 12, computed=8)
    assert ids(work(scheduler)) == [first.id]
    assert work(scheduler) == [(second.id, 8, 12)]


def test_v3_a_long_remainder_waits_for_the_decode_limit():
    """More than the budget is left: three decode turns (the limit), then one chunk."""
    scheduler = pure(max_num_batched_tokens=4, max_decode_steps_before_prefill=3)
    first = decoder(scheduler)
    second = running(scheduler, 12, computed=4)
    assert [ids(work(scheduler)) for _ in range(3)] == [[first.id]] * 3
    assert work(scheduler) == [(second.id, 4, 8)]


def test_v4_a_chunk_at_the_limit_is_followed_by_a_decode():
    """The quantum bounds the chunk; right after it the decode is due again."""
    scheduler = pure(
        max_num_batched_tokens=16, max_prefill_chunk_tokens=4, max_decode_steps_before_prefill=3
    )
    first = decoder(scheduler)
    second = running(scheduler, 12, computed=4)
    scheduler._decode_steps_since_prefill = 3
    assert work(scheduler) == [(second.id, 4, 8)]
    assert ids(work(scheduler)) == [first.id]


def test_v5_uniform_prompts_of_different_tails_take_turns():
    """Tails of 2 and 3 tokens cannot share a uniform pass: each runs alone, a decode between."""
    scheduler = pure(max_num_batched_tokens=8, rules=UNIFORM)
    first = decoder(scheduler)
    a, b = running(scheduler, 10, computed=8), running(scheduler, 11, computed=8)
    passes = [ids(work(scheduler)) for _ in range(4)]
    assert passes[0] == [first.id]
    assert passes[1] == [a.id]
    assert set(passes[2]) == {first.id, a.id}
    assert passes[3] == [b.id]


def test_v6_a_prompt_beyond_the_quantum_waits():
    """1024 tokens, quantum 512: decode is due; with 512 left, not after one decode turn."""
    scheduler = pure(max_prefill_chunk_tokens=512)
    decoder(scheduler)
    prompt = running(scheduler, 1024, computed=0)
    assert scheduler._decode_is_due()
    prompt.num_computed_tokens = 512
    assert scheduler._decode_is_due()
    scheduler._decode_steps_since_prefill = 1
    assert not scheduler._decode_is_due()


def test_v7_a_full_batch_lets_the_limit_pass_before_prefill_is_tried():
    """max_num_seqs decodes, one waiting, seven steps done: one more, then an attempt."""
    scheduler = pure(max_num_seqs=2)
    decoder(scheduler), decoder(scheduler)
    admit(scheduler, make_request(8))
    scheduler._decode_steps_since_prefill = 7
    assert scheduler._decode_is_due()
    work(scheduler)
    assert not scheduler._decode_is_due()
    assert len(work(scheduler)) == 2  # nobody can enter, so the decodes go on


def test_v8_a_prompt_without_blocks_does_not_stop_decoding():
    """No free blocks: decodes go on until the limit of eight."""
    scheduler = pure(num_blocks=4)
    first = decoder(scheduler, 24)
    admit(scheduler, make_request(8))
    scheduler._decode_steps_since_prefill = 1
    assert scheduler.pool.num_free == 1
    for _ in range(7):
        assert scheduler._decode_is_due()
        assert ids(work(scheduler)) == [first.id]
    assert not scheduler._decode_is_due()


@pytest.mark.parametrize("allowed", [True, False])
def test_v9_a_front_that_waited_64_passes_may_preempt(allowed):
    """Allowed, the decode loses its blocks and the prompt runs; else its counter goes on."""
    scheduler = pure(num_blocks=4, preempt_for_waiting=allowed)
    first = decoder(scheduler, 7)
    waiting = admit(scheduler, make_request(32))
    waiting.failed_admissions = MAX_FAILED_ADMISSIONS
    scheduler._decode_steps_since_prefill = 8
    output = scheduler.schedule()
    scheduled = [item.sequence for item in output.scheduled]
    assert scheduled == [waiting if allowed else first]
    assert output.preempted == ((first,) if allowed else ())
    assert waiting.failed_admissions == (0 if allowed else 65)


def test_v10_a_prompt_beyond_the_capacity_is_refused_and_others_proceed():
    """1024 tokens into 127 usable blocks of 8 never fit."""
    scheduler = pure(num_blocks=127)
    big, small = admit(scheduler, make_request(1024)), admit(scheduler, make_request(8))
    output = scheduler.schedule()
    assert output.rejected == (big,)
    assert big.finish_reason == "error"
    assert [item.sequence for item in output.scheduled] == [small]


@pytest.mark.parametrize("raw_logits", [False, True])
def test_v11_a_hit_leaves_one_block_to_compute_and_raw_logits_never_hit(raw_logits):
    """16 tokens in blocks of 8: 8 are cached; with raw logits none, and the cache is untouched."""
    scheduler = pure()
    prompt = list(range(16))
    admit(scheduler, make_request(prompt, max_tokens=1))
    work(scheduler)
    cached = scheduler.stats().cached_blocks
    again = admit(scheduler, attrs.evolve(make_request(prompt), raw_logits=raw_logits))
    work(scheduler)
    assert again.cached_tokens == (0 if raw_logits else 8)
    assert scheduler.stats().cached_blocks == cached


def test_v12_a_hit_is_counted_once():
    """Hit, preempted, admitted again: one lookup, one hit."""
    scheduler = pure()
    prompt = list(range(16))
    admit(scheduler, make_request(prompt, max_tokens=1))
    work(scheduler)
    again = admit(scheduler, make_request(prompt))
    work(scheduler)
    before = scheduler.stats()
    scheduler._preempt(again)
    work(scheduler)
    after = scheduler.stats()
    assert again.status is Status.DECODE
    assert (after.prefix_lookups, after.prefix_hits) == (before.prefix_lookups, before.prefix_hits)
    assert after.prefix_hits == 1


@pytest.mark.parametrize("uniform", [True, False])
def test_v13_decodes_of_different_lengths(uniform):
    """Uniform: the oldest one's length runs and the other waits with its blocks; ragged: both."""
    scheduler = pure(rules=BatchRules(uniform_decodes=uniform))
    a, b = decoder(scheduler, 4), decoder(scheduler, 7)
    assert ids(work(scheduler)) == ([a.id] if uniform else [a.id, b.id])
    assert b.status is Status.DECODE
    assert b.blocks


@pytest.mark.parametrize("packed", [True, False])
def test_v14_whole_prompts_of_different_lengths(packed):
    """Unsplit prompts: without packing only those of the first one's 256-token bucket."""
    scheduler = pure(rules=BatchRules(packed_prefill=packed, atomic_prompts=True))
    prompts = [admit(scheduler, make_request(length)) for length in (4, 300, 600)]
    assert ids(work(scheduler)) == [s.id for s in (prompts if packed else prompts[:1])]
    assert all(s.blocks for s in prompts)


def test_v15_a_hit_never_ends_inside_an_unsplittable_span():
    """A span 12..20 of 24 tokens, two cached blocks of 8: the hit is cut to 8."""
    scheduler = pure()
    prompt = list(range(24))
    admit(scheduler, make_request(prompt, max_tokens=1))
    work(scheduler)
    again = admit(scheduler, attrs.evolve(make_request(prompt), unsplittable=((12, 20),)))
    work(scheduler)
    assert again.cached_tokens == 8


def test_v15_a_chunk_never_ends_inside_an_unsplittable_span():
    """Chunks stop before the span, take it whole, even beyond the budget, and go on."""
    scheduler = pure(max_num_batched_tokens=6)
    sequence = admit(scheduler, attrs.evolve(make_request(24), unsplittable=((8, 18),)))
    ranges = [work(scheduler)[0][1:] for _ in range(4)]
    assert ranges == [(0, 6), (6, 8), (8, 18), (18, 24)]
    assert sequence.status is Status.DECODE


def test_v16_decodes_beyond_the_budget_rotate():
    """Budget 2, three decodes: [0, 1], [2, 0], [1, 2]."""
    scheduler = pure(max_num_batched_tokens=2)
    sequences = [decoder(scheduler) for _ in range(3)]
    number = {s.id: i for i, s in enumerate(sequences)}
    passes = [[number[i] for i in ids(work(scheduler))] for _ in range(3)]
    assert passes == [[0, 1], [2, 0], [1, 2]]


def test_v17_cancelled_everywhere_gives_every_block_back():
    """Waiting, prefilling and decoding: all canceled, nothing owned, nothing left to do."""
    scheduler = pure(max_num_seqs=2)
    everybody = [decoder(scheduler), running(scheduler, 12, computed=4)]
    everybody.append(admit(scheduler, make_request(8)))
    scheduler.end(everybody, "canceled")
    assert [s.finish_reason for s in everybody] == ["canceled"] * 3
    assert scheduler.pool.num_used == 0
    assert not scheduler.has_work
    assert scheduler.schedule().scheduled == ()


def test_v18_aligned_chunks_stop_where_an_identical_prompt_could_resume():
    """64 tokens, blocks of 8, budget 32: 0-32, 32-56, 56-64."""
    scheduler = pure(max_num_batched_tokens=32, rules=BatchRules(align_chunks=True))
    admit(scheduler, make_request(64))
    assert [work(scheduler)[0][1:] for _ in range(3)] == [(0, 32), (32, 56), (56, 64)]


def test_aligned_chunks_of_long_prompts():
    """65 tokens in blocks of 32: 64, 65. 6712 with 4096: 4096, 6688, 6712."""
    rules = BatchRules(align_chunks=True)
    for length, ends in ((65, [64, 65]), (6712, [4096, 6688, 6712])):
        scheduler = pure(block_size=32, rules=rules)
        admit(scheduler, make_request(length))
        assert [work(scheduler)[0][2] for _ in ends] == ends


def test_v19_a_raw_logits_prompt_runs_whole_and_alone():
    """Ten tokens with a budget of four: one pass, nobody beside it."""
    scheduler = pure(max_num_batched_tokens=4)
    raw = admit(scheduler, attrs.evolve(make_request(10), raw_logits=True))
    other = admit(scheduler, attrs.evolve(make_request(10), raw_logits=True))
    assert work(scheduler) == [(raw.id, 0, 10)]
    assert [ids(work(scheduler)) for _ in range(8)] == [[raw.id]] * 8  # beyond the budget: it waits
    assert work(scheduler) == [(other.id, 0, 10)]


def test_prompts_at_different_cursors_rotate_when_uniform():
    """Budget 4; computed 4, 0, 4 of 12: [0, 2], then [1], then [2, 0]."""
    scheduler = pure(max_num_batched_tokens=4, rules=UNIFORM)
    sequences = [running(scheduler, 12, computed=c) for c in (4, 0, 4)]
    number = {s.id: i for i, s in enumerate(sequences)}
    passes = [[number[i] for i in ids(work(scheduler))] for _ in range(3)]
    assert passes == [[0, 2], [1], [2, 0]]


@pytest.mark.parametrize(
    ("budget", "prompts", "size"),
    [(4096, 1, 4096), (4096, 7, 585), (4096, 8, 512), (4096, 16, 256), (512, 8, 64), (512, 16, 32)],
)
def test_the_budget_is_divided_over_the_prompts(budget, prompts, size):
    """chunk = budget // prompts."""
    scheduler = pure(max_num_batched_tokens=budget, num_blocks=20_000)
    for _ in range(prompts):
        admit(scheduler, make_request(5000))
    assert {end for _, _, end in work(scheduler)} == {size}


def test_a_budget_below_the_number_of_prompts_gives_one_token_each():
    """Budget 3, five 4-token prompts: three are admitted with one token each."""
    scheduler = pure(max_num_batched_tokens=3)
    for _ in range(5):
        admit(scheduler, make_request(4))
    assert [end - start for _, start, end in work(scheduler)] == [1, 1, 1]
    assert len(scheduler.running) == 3
