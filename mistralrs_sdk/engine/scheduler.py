"""The paged scheduler: how many tokens of which sequence the next step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain, islice
from operator import attrgetter

import attrs

from mistralrs_sdk.engine.block_pool import BlockPool
from mistralrs_sdk.engine.prefix_cache import identity_of, root_hash
from mistralrs_sdk.engine.prompt_batch import (
    BatchRules,
    choose_decodes,
    choose_prompts,
    fill_prompts,
)
from mistralrs_sdk.engine.request import FinishReason
from mistralrs_sdk.engine.sequence import Sequence, Status
from mistralrs_sdk.engine.sequence_blocks import SequenceBlocks
from mistralrs_sdk.engine.waiting_queue import WaitingQueue

MAX_FAILED_ADMISSIONS = 64
"""Passes the front of the queue waits for blocks before running sequences are preempted for it."""

OVERTAKE_WINDOW = 8
"""How far behind a front that must wait others are looked for."""


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """The limits of engine scheduling; see docs for what each trades against what."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_decode_steps_before_prefill: int
    max_model_len: int
    max_prefill_chunk_tokens: int | None = None
    """None where it does not apply: on a CPU."""
    prefix_caching: bool = True
    mixed_batches: bool = True
    """Running decodes ride along in prefill passes."""
    max_mixed_prompt_tokens: int | None = None
    """Prompt tokens of a pass in which decodes ride along, taken in order; None: as any pass."""
    max_overtakes: int = 16
    """How many later sequences may be admitted before a front that waits for blocks."""
    preempt_for_waiting: bool = True
    """Whether a front that waited too long may take running sequences' blocks."""
    rules: BatchRules = attrs.field(factory=BatchRules)

    @property
    def prefill_token_budget(self) -> int:
        """Prompt tokens of one pass."""
        if self.max_prefill_chunk_tokens is None:
            return self.max_num_batched_tokens
        return min(self.max_num_batched_tokens, self.max_prefill_chunk_tokens)


@attrs.frozen
class Scheduled:
    """`num_tokens` of `sequence` are computed in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that the next one is drawn."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


@attrs.frozen(kw_only=True)
class SchedulerOutput:
    """One step's work, and which sequences lost their place or were refused for it."""

    scheduled: tuple[Scheduled, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    rejected: tuple[Sequence, ...] = ()


@attrs.frozen(kw_only=True)
class SchedulerStats:
    """A snapshot for logs, metrics and tests: sequences, KV blocks, tokens and counts so far."""

    running: int
    waiting: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    preemptions: int
    computed_tokens: int
    prefix_lookups: int
    prefix_hits: int


_rank = attrgetter("rank")


class Scheduler:
    """Continuous batching over a block pool.

    Each pass is a decode pass (one token for every running sequence, more where a constraint has
    forced the next ones) or a prefill pass (chunks of prompts, with the running decodes riding
    along). Sequences are admitted by priority, then in order; only where the front must wait, for
    blocks or for a prefix that a running prompt is about to leave, may a few others go before it.
    Who runs out of blocks preempts the youngest, which goes back to its place in the queue and
    recomputes what the prefix cache has lost.

    `identity` names what besides the tokens decides keys and values, the model for one: prefixes
    are shared only under the same identity.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, **identity: str | int) -> None:
        self.config = config
        self.pool = pool
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self._blocks = SequenceBlocks(pool, prefix_caching=config.prefix_caching)
        self._forces = not config.rules.uniform_decodes
        """Whether a decode may compute more tokens than the others beside it."""
        self._identity = identity
        self._root = root_hash(**identity)
        self._decode_steps_since_prefill = 0
        self._decode_cursor = 0
        self._next_prompt_id: int | None = None
        self._preempted: list[Sequence] = []
        self._rejected: list[Sequence] = []
        self._num_preemptions = 0
        self._num_computed_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_evictions(self) -> int:
        """Cached prefix blocks that were given to others so far."""
        return self.pool.num_evictions

    def add(self, sequence: Sequence) -> None:
        own = identity_of(sequence.request)
        sequence.root = root_hash(**self._identity, **own) if own else self._root
        self.waiting.append(sequence)

    def end(
        self, sequences: Iterable[Sequence], reason: FinishReason, error: str | None = None
    ) -> None:
        """End sequences before their time; their blocks are free at once."""
        for sequence in sequences:
            was_waiting = sequence.status is Status.WAITING
            sequence.finish(reason, error)
            if was_waiting:
                self.waiting.remove(sequence)
            else:
                self._leave(sequence)

    def schedule(self) -> SchedulerOutput:
        """Decide the next step; empty when nothing can run."""
        self._preempted, self._rejected = [], []
        scheduled = self._schedule_decode() if self._decode_is_due() else self._schedule_prefill()
        if not scheduled:
            scheduled = self._schedule_decode()
        return SchedulerOutput(
            scheduled=tuple(scheduled),
            preempted=tuple(self._preempted),
            rejected=tuple(self._rejected),
        )

    def update(self, output: SchedulerOutput, tokens: Iterable[int | None]) -> None:
        """Record a finished step: `tokens` has the drawn token of each scheduled sequence.

        None stands for a sequence that drew nothing: a prompt chunk, or one that failed meanwhile.
        """
        # Looking a member up on the enum for each sequence would cost a third of the pass.
        decode, finished, limit = Status.DECODE, Status.FINISHED, self.config.max_model_len
        for item, token in zip(output.scheduled, tokens, strict=True):
            sequence = item.sequence
            if sequence.status is finished:
                continue
            self._num_computed_tokens += item.num_tokens
            sequence.num_computed_tokens += item.num_tokens
            self._blocks.cache_full(sequence)
            if token is not None:
                sequence.status = decode
                sequence.append(token, max_model_len=limit)
                if sequence.matcher is not None and sequence.status is decode and self._forces:
                    sequence.append_forced(max_model_len=limit)
                if sequence.status is finished:
                    self._leave(sequence)

    def clear_prefix_cache(self) -> None:
        """Forget all cached prefixes; running sequences keep their blocks."""
        self.pool.clear_prefixes()

    def forget_kv(self) -> None:
        """Forget all keys and values, cached or not; running sequences are preempted."""
        for sequence in sorted(self.running, key=_rank, reverse=True):
            self._preempt(sequence)
        self.pool.clear_prefixes()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self.running),
            waiting=len(self.waiting),
            used_blocks=self.pool.num_used,
            cached_blocks=self.pool.num_cached,
            total_blocks=self.pool.num_usable,
            preemptions=self._num_preemptions,
            computed_tokens=self._num_computed_tokens,
            prefix_lookups=self._blocks.num_lookups,
            prefix_hits=self._blocks.num_hits,
        )

    def check(self) -> None:
        """Verify the pool against every sequence's blocks; for tests."""
        self.pool.check(s.blocks for s in chain(self.running, self.waiting))
        assert all(not s.blocks for s in self.waiting), "a waiting sequence owns blocks"
        assert len(self.running) <= self.config.max_num_seqs, "more run than max_num_seqs"

    # Which kind of pass

    def _decode_is_due(self) -> bool:
        decoding = self._num_decoding()
        if not decoding:
            return False
        if decoding == len(self.running) and not self.waiting:
            return True
        steps = self._decode_steps_since_prefill
        prompts = [s for s in self.running if s.status is Status.PREFILL]
        pending = sum(s.num_uncomputed_tokens for s in prompts)
        if 0 < pending <= self.config.prefill_token_budget and steps > 0:
            return False  # a short tail: one decode turn was enough
        if (
            not prompts
            and self.waiting
            and len(self.running) < self.config.max_num_seqs
            and self.pool.blocks_for(len(self.waiting.front)) + decoding <= self.pool.num_free
            and steps > 0
        ):
            return False  # somebody new fits: one decode turn was enough
        return steps < self.config.max_decode_steps_before_prefill

    # Prefill passes

    def _schedule_prefill(self) -> list[Scheduled]:
        candidates = self._admit()
        if not candidates:
            return []
        riders = self._riders()
        spare = self.config.max_num_batched_tokens - sum(item.num_tokens for item in riders)
        budget = min(self.config.prefill_token_budget, spare)
        self._decode_steps_since_prefill = 0
        limit = self.config.max_mixed_prompt_tokens
        if riders and limit is not None:
            filled = fill_prompts(
                candidates,
                budget=min(budget, limit),
                block_size=self.pool.block_size,
                rules=self.config.rules,
            )
            return riders + [Scheduled(sequence, count) for sequence, count in filled]
        # Start where the last prefill pass left off, so that nobody is passed over for ever.
        ids = [s.id for s in candidates]
        start = ids.index(self._next_prompt_id) if self._next_prompt_id in ids else 0
        rotated = candidates[start:] + candidates[:start]
        chosen = choose_prompts(
            rotated, budget=budget, block_size=self.pool.block_size, rules=self.config.rules
        )
        taken = {sequence.id for sequence, _ in chosen}
        self._next_prompt_id = next((s.id for s in rotated if s.id not in taken), None)
        return riders + [Scheduled(sequence, count) for sequence, count in chosen]

    def _admit(self) -> list[Sequence]:
        """Move what fits from the queue to the running; return all prompts that now run."""
        candidates = [s for s in self.running if s.status is Status.PREFILL]
        while self.waiting and self._has_place(candidates):
            front = self.waiting.front
            if self.pool.blocks_for(len(front)) > self.pool.num_usable:
                self._reject(front)
            elif not self._blocks.is_being_computed(front) and self._place(front, candidates):
                self._enter(front, candidates)
            else:
                self._overtake(front, candidates)
                break
        return candidates

    def _has_place(self, candidates: list[Sequence]) -> bool:
        return (
            len(self.running) < self.config.max_num_seqs
            and len(candidates) < self.config.max_num_batched_tokens
        )

    def _enter(self, sequence: Sequence, candidates: list[Sequence]) -> None:
        self.waiting.remove(sequence)
        sequence.status = Status.PREFILL
        self.running.append(sequence)
        candidates.append(sequence)
        self._blocks.announce(sequence)

    def _place(self, front: Sequence, candidates: list[Sequence]) -> bool:
        """Give `front` blocks for all its tokens, or count the failure."""
        if self._blocks.take(front, num_running=len(self.running)):
            return True
        front.failed_admissions += 1
        if front.failed_admissions <= MAX_FAILED_ADMISSIONS or not self.config.preempt_for_waiting:
            return False
        priority = front.request.priority
        while victims := [s for s in self.running if s.request.priority >= priority]:
            victim = max(victims, key=_rank)
            if victim in candidates:
                candidates.remove(victim)
            self._preempt(victim)
            if self._blocks.take(front, num_running=len(self.running)):
                return True
        return False

    def _overtake(self, front: Sequence, candidates: list[Sequence]) -> None:
        """Admit others before a front that waits for blocks or for its prefix, but not for ever."""
        if front.times_overtaken >= self.config.max_overtakes:
            return
        for sequence in list(islice(self.waiting, 1, 1 + OVERTAKE_WINDOW)):
            if not self._has_place(candidates):
                return
            if self._blocks.is_being_computed(sequence):
                continue
            if not self._blocks.take(sequence, num_running=len(self.running)):
                continue
            self._enter(sequence, candidates)
            front.times_overtaken += 1
            if front.times_overtaken >= self.config.max_overtakes:
                return

    def _num_decoding(self) -> int:
        decode = Status.DECODE
        return len([s for s in self.running if s.status is decode])

    def _riders(self) -> list[Scheduled]:
        """Return the decodes that join a prefill pass; they leave it one token at least."""
        if not self.config.mixed_batches:
            return []
        decoders = choose_decodes(self._decoders(), rules=self.config.rules)
        ready = [s for s in decoders if self._blocks.grow(s)]
        return self._rotate(ready, limit=self.config.max_num_batched_tokens - 1)

    # Decode passes

    def _schedule_decode(self) -> list[Scheduled]:
        remaining = deque(self._decoders())
        ready = []
        while remaining:
            sequence = remaining.popleft()
            while not self._blocks.grow(sequence):
                victim = remaining.pop() if remaining else self._younger_prompt(sequence)
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                ready.append(sequence)
        ready = choose_decodes(ready, rules=self.config.rules)
        if ready and self._decode_steps_since_prefill < self.config.max_decode_steps_before_prefill:
            self._decode_steps_since_prefill += 1
        return self._rotate(ready, limit=self.config.max_num_batched_tokens)

    def _decoders(self) -> list[Sequence]:
        decode = Status.DECODE
        return sorted([s for s in self.running if s.status is decode], key=_rank)

    def _younger_prompt(self, sequence: Sequence) -> Sequence:
        """Return the youngest running prompt that came after `sequence`, else the sequence."""
        prompts = (s for s in self.running if s.status is Status.PREFILL)
        return max(chain(prompts, (sequence,)), key=_rank)

    def _rotate(self, ready: list[Sequence], *, limit: int) -> list[Scheduled]:
        """Take up to `limit` decodes in turn, so that a small budget starves nobody."""
        chosen = ready
        if len(ready) > limit:
            start = self._decode_cursor % len(ready)
            chosen = (ready[start:] + ready[:start])[:limit]
            self._decode_cursor = (start + limit) % len(ready)
        spare = limit - len(chosen)
        scheduled = []
        for sequence in chosen:
            count = 1
            if sequence.matcher is not None:  # else nothing is known beyond the token drawn last
                count += min(sequence.num_uncomputed_tokens - 1, spare)
                spare -= count - 1
            scheduled.append(Scheduled(sequence, count))
        return scheduled

    # Leaving

    def _preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue, to its place near the front."""
        self._blocks.release(sequence)
        self.running.remove(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.waiting.put_back(sequence)
        self._preempted.append(sequence)
        self._num_preemptions += 1

    def _reject(self, sequence: Sequence) -> None:
        capacity = self.pool.num_usable * self.pool.block_size
        self.end(
            [sequence],
            "error",
            f"{len(sequence)} tokens exceed the KV cache's {capacity}: give it more memory "
            "(PagedAttentionMetaBuilder.with_gpu_memory) or send a shorter prompt",
        )
        self._rejected.append(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._blocks.release(sequence)
        self.running.remove(sequence)
