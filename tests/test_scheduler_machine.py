"""Any order of adding, stepping, ending and clearing keeps the invariants of scheduler and pool."""

from __future__ import annotations

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mistralrs_sdk.engine.scheduler import Scheduler
from mistralrs_sdk.engine.sequence import Sequence, Status
from tests.engine_helpers import admit, expected_tokens, make_request, make_scheduler, next_token


class SchedulerMachine(RuleBasedStateMachine):
    """Tiny pools, shared prefixes, priorities and salts; the fake model checks every token."""

    @initialize(
        num_blocks=st.integers(6, 16),
        budget=st.integers(1, 24),
        chunk=st.one_of(st.none(), st.integers(1, 12)),
        seqs=st.integers(1, 6),
        mixed=st.booleans(),
        beside=st.one_of(st.none(), st.integers(1, 8)),
        caching=st.booleans(),
    )
    def start(self, num_blocks, budget, chunk, seqs, mixed, beside, caching):
        self.scheduler: Scheduler = make_scheduler(
            num_blocks=num_blocks,
            block_size=2,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_prefill_chunk_tokens=chunk,
            mixed_batches=mixed,
            max_mixed_prompt_tokens=beside,
            prefix_caching=caching,
        )
        self.sequences: list[Sequence] = []
        self.idle_steps = 0

    @rule(
        length=st.integers(1, 14),
        shared=st.integers(0, 8),
        count=st.integers(1, 8),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, "a"]),
        caches=st.booleans(),
    )
    def add(self, length, shared, count, priority, salt, caches):
        number = len(self.sequences)
        prompt = [i if i < shared else 100 * (number + 1) + i for i in range(length)]
        request = attrs.evolve(
            make_request(prompt, max_tokens=count),
            priority=priority,
            cache_salt=salt,
            use_prefix_cache=caches,
        )
        self.sequences.append(admit(self.scheduler, request))

    @precondition(lambda self: self.scheduler.has_work)
    @rule()
    def step(self):
        before = self.scheduler.stats().computed_tokens
        output = self.scheduler.schedule()
        spent = sum(item.num_tokens for item in output.scheduled)
        assert spent <= self.scheduler.config.max_num_batched_tokens
        assert len({item.sequence.id for item in output.scheduled}) == len(output.scheduled)
        for item in output.scheduled:
            end = item.sequence.num_computed_tokens + item.num_tokens
            assert len(item.sequence.blocks) >= self.scheduler.pool.blocks_for(end)
        tokens = [next_token(i.sequence.tokens) if i.samples else None for i in output.scheduled]
        self.scheduler.update(output, tokens)
        moved = self.scheduler.stats().computed_tokens > before or output.rejected
        self.idle_steps = 0 if moved else self.idle_steps + 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data):
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence.status is not Status.FINISHED:
            reason = data.draw(st.sampled_from(["canceled", "error"]))
            self.scheduler.end([sequence], reason)
            assert sequence.blocks == []

    @rule()
    def clear(self):
        self.scheduler.clear_prefix_cache()
        assert self.scheduler.stats().cached_blocks == 0

    @invariant()
    def adds_up(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        assert self.idle_steps < 2, "two steps in a row without a computed token"
        waiting = list(self.scheduler.waiting)
        assert len(waiting) == len(self.scheduler.waiting)
        assert [s.request.priority for s in waiting] == sorted(s.request.priority for s in waiting)
        alive = {s.id for s in self.sequences if s.status is not Status.FINISHED}
        assert alive == {s.id for s in (*waiting, *self.scheduler.running)}
        for sequence in self.sequences:
            generated = sequence.tokens[sequence.prompt_len :]
            assert generated == expected_tokens(sequence.request.prompt_ids, len(generated))

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work
        assert self.scheduler.pool.num_used == 0
        for sequence in self.sequences:
            if sequence.finish_reason == "length":
                assert sequence.num_generated <= sequence.request.max_tokens


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
