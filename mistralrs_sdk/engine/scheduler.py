"""The paged scheduler: how many tokens of which sequence the next step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain

import attrs

from mistralrs_sdk.engine.block_pool import BlockPool
from mistralrs_sdk.engine.prefix_cache import extend_block_hashes
from mistralrs_sdk.engine.sequence import Sequence, Status

MAX_FAILED_ADMISSIONS = 64
"""Passes the front of the queue waits for blocks before running sequences are preempted for it."""


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
    """A snapshot for logs, metrics and tests."""

    running: int
    waiting: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    preemptions: int
    computed_tokens: int
    prefix_lookups: int
    prefix_hits: int


class Scheduler:
    """Continuous batching over a block pool.

    Each pass is a decode pass (one token for every running sequence) or a prefill pass (chunks of
    prompts, with the running decodes riding along). Sequences are admitted strictly in order; who
    runs out of blocks preempts the youngest, which goes back to the front of the queue and
    recomputes what the prefix cache has lost.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, *, root: bytes = b"") -> None:
        self.config = config
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._root = root
        self._decode_steps_since_prefill = 0
        self._decode_cursor = 0
        self._next_prompt_id: int | None = None
        self._preempted: list[Sequence] = []
        self._rejected: list[Sequence] = []
        self._num_preemptions = 0
        self._num_computed_tokens = 0
        self._num_lookups = 0
        self._num_hits = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def abort(self, matches: Callable[[Sequence], bool]) -> list[Sequence]:
        """End the sequences that match as canceled; their blocks are free at once."""
        ended = [s for s in chain(self.running, self.waiting) if matches(s)]
        for sequence in ended:
            sequence.finish("canceled")
        self._remove_finished(ended)
        return ended

    def fail(self, sequences: Iterable[Sequence], error: str) -> None:
        """End sequences whose step went wrong; nothing of it enters the prefix cache."""
        ended = list(sequences)
        for sequence in ended:
            sequence.finish("error", error)
        self._remove_finished(ended)

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
        for item, token in zip(output.scheduled, tokens, strict=True):
            sequence = item.sequence
            if sequence.status is Status.FINISHED:
                continue
            self._num_computed_tokens += item.num_tokens
            sequence.num_computed_tokens += item.num_tokens
            self._cache_full_blocks(sequence)
            if token is not None:
                sequence.status = Status.DECODE
                sequence.append(token, max_model_len=self.config.max_model_len)
        self._remove_finished([item.sequence for item in output.scheduled])

    def clear_prefix_cache(self) -> None:
        """Forget all cached prefixes; running sequences keep their blocks."""
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
            prefix_lookups=self._num_lookups,
            prefix_hits=self._num_hits,
        )

    def check(self) -> None:
        """Verify the pool against every sequence's blocks; for tests."""
        self.pool.check(s.blocks for s in chain(self.running, self.waiting))
        assert all(not s.blocks for s in self.waiting), "a waiting sequence owns blocks"
        assert len(self.running) <= self.config.max_num_seqs, "more run than max_num_seqs"

    # Which kind of pass

    def _decode_is_due(self) -> bool:
        decoding = sum(s.status is Status.DECODE for s in self.running)
        if not decoding:
            return False
        steps = self._decode_steps_since_prefill
        prompts = [s for s in self.running if s.status is Status.PREFILL]
        pending = sum(s.num_uncomputed_tokens for s in prompts)
        if 0 < pending <= self.config.prefill_token_budget and steps > 0:
            return False  # a short tail: one decode turn was enough
        if (
            not prompts
            and self.waiting
            and len(self.running) < self.config.max_num_seqs
            and self.pool.blocks_for(len(self.waiting[0])) + decoding <= self.pool.num_free
            and steps > 0
        ):
            return False  # somebody new fits: one decode turn was enough
        if not prompts and not self.waiting:
            return True
        return steps < self.config.max_decode_steps_before_prefill

    # Prefill passes

    def _schedule_prefill(self) -> list[Scheduled]:
        candidates = self._admit()
        if not candidates:
            return []
        riders = self._riders()
        budget = min(
            self.config.prefill_token_budget, self.config.max_num_batched_tokens - len(riders)
        )
        chunks = self._chunks(candidates, budget)
        self._decode_steps_since_prefill = 0
        return riders + chunks

    def _admit(self) -> list[Sequence]:
        """Move what fits from the queue to the running; return all prompts that now run."""
        candidates = [s for s in self.running if s.status is Status.PREFILL]
        while (
            self.waiting
            and len(self.running) < self.config.max_num_seqs
            and len(candidates) < self.config.max_num_batched_tokens
        ):
            front = self.waiting[0]
            if self.pool.blocks_for(len(front)) > self.pool.num_usable:
                self._reject(self.waiting.popleft())
                continue
            if not self._place(front, candidates):
                break  # strict order: nobody overtakes the front
            self.waiting.popleft()
            front.status = Status.PREFILL
            self.running.append(front)
            candidates.append(front)
        return candidates

    def _place(self, front: Sequence, candidates: list[Sequence]) -> bool:
        """Give `front` blocks for all its tokens, or count the failure."""
        # One spare block per running decode: who is admitted shall not be preempted right away.
        decoding = sum(s.status is Status.DECODE for s in self.running)
        if self._take_blocks(front, spare=decoding):
            return True
        front.failed_admissions += 1
        if front.failed_admissions <= MAX_FAILED_ADMISSIONS:
            return False
        while self.running:
            victim = self.running[-1]
            if victim in candidates:
                candidates.remove(victim)
            self.waiting.popleft()
            self._preempt(victim)
            self.waiting.appendleft(front)
            if self._take_blocks(front, spare=0):
                return True
        return False

    def _take_blocks(self, sequence: Sequence, *, spare: int) -> bool:
        hits = self._find_prefix(sequence)
        needed = self.pool.blocks_for(len(sequence)) - len(hits)
        if needed + self.pool.count_free(hits) + spare > self.pool.num_free:
            return False
        self.pool.share(hits)
        sequence.blocks = hits + self.pool.allocate(needed)
        sequence.num_computed_tokens = len(hits) * self.pool.block_size
        sequence.num_cached_blocks = len(hits)
        sequence.failed_admissions = 0
        if sequence.cached_tokens is None:  # counted once in a sequence's life
            sequence.cached_tokens = sequence.num_computed_tokens
            self._num_lookups += 1
            self._num_hits += bool(hits)
        return True

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        if not self.config.prefix_caching:
            return []
        # At least the last token runs again: its logits are needed.
        num_blocks = (len(sequence) - 1) // self.pool.block_size
        return self.pool.find_prefix(
            extend_block_hashes(
                sequence,
                num_blocks=num_blocks,
                block_size=self.pool.block_size,
                root=self._root,
            )
        )

    def _chunks(self, candidates: list[Sequence], budget: int) -> list[Scheduled]:
        """Divide the budget over the prompts, starting where the last prefill pass left off."""
        ids = [s.id for s in candidates]
        start = ids.index(self._next_prompt_id) if self._next_prompt_id in ids else 0
        rotated = candidates[start:] + candidates[:start]
        eligible = rotated[:budget]
        chunk_size = max(1, budget // len(eligible))
        chunks = [Scheduled(s, min(chunk_size, s.num_uncomputed_tokens)) for s in eligible]
        # Prompts that end in this pass and prompts that go on are not mixed (as in mistral.rs).
        chosen = [chunk for chunk in chunks if chunk.samples == chunks[0].samples]
        taken = {chunk.sequence.id for chunk in chosen}
        self._next_prompt_id = next((s.id for s in rotated if s.id not in taken), None)
        return chosen

    def _riders(self) -> list[Scheduled]:
        """Return the decodes that join a prefill pass, one token each; they leave it one token."""
        if not self.config.mixed_batches:
            return []
        ready = [s for s in self._decoders() if self._grow(s)]
        return self._rotate(ready, limit=self.config.max_num_batched_tokens - 1)

    # Decode passes

    def _schedule_decode(self) -> list[Scheduled]:
        remaining = deque(self._decoders())
        ready = []
        while remaining:
            sequence = remaining.popleft()
            while not self._grow(sequence):
                victim = remaining.pop() if remaining else sequence
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                ready.append(sequence)
        if ready and self._decode_steps_since_prefill < self.config.max_decode_steps_before_prefill:
            self._decode_steps_since_prefill += 1
        return self._rotate(ready, limit=self.config.max_num_batched_tokens)

    def _decoders(self) -> list[Sequence]:
        return sorted((s for s in self.running if s.status is Status.DECODE), key=lambda s: s.id)

    def _rotate(self, ready: list[Sequence], *, limit: int) -> list[Scheduled]:
        """Take up to `limit` decodes in turn, so that a small budget starves nobody."""
        if len(ready) <= limit:
            return [Scheduled(s, 1) for s in ready]
        start = self._decode_cursor % len(ready)
        chosen = (ready[start:] + ready[:start])[:limit]
        self._decode_cursor = (start + limit) % len(ready)
        return [Scheduled(s, 1) for s in chosen]

    def _grow(self, sequence: Sequence) -> bool:
        """Own a block for every token of the sequence."""
        missing = self.pool.blocks_for(len(sequence)) - len(sequence.blocks)
        if missing > self.pool.num_free:
            return False
        sequence.blocks += self.pool.allocate(missing)
        return True

    # Leaving

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        self.running.remove(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)
        self._preempted.append(sequence)
        self._num_preemptions += 1

    def _reject(self, sequence: Sequence) -> None:
        capacity = self.pool.num_usable * self.pool.block_size
        sequence.finish(
            "error",
            f"{len(sequence)} tokens exceed the KV cache's {capacity}: give it more memory "
            "(PagedAttentionMetaBuilder.with_gpu_memory) or send a shorter prompt",
        )
        self._rejected.append(sequence)

    def _remove_finished(self, candidates: list[Sequence]) -> None:
        finished = [s for s in candidates if s.status is Status.FINISHED]
        if not finished:
            return
        for sequence in finished:
            self._release(sequence)
        self.running = [s for s in self.running if s.status is not Status.FINISHED]
        if any(s.status is Status.FINISHED for s in self.waiting):
            self.waiting = deque(s for s in self.waiting if s.status is not Status.FINISHED)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def _cache_full_blocks(self, sequence: Sequence) -> None:
        if not self.config.prefix_caching:
            return
        full = sequence.num_computed_tokens // self.pool.block_size
        if full <= sequence.num_cached_blocks:
            return
        hashes = extend_block_hashes(
            sequence, num_blocks=full, block_size=self.pool.block_size, root=self._root
        )
        for i in range(sequence.num_cached_blocks, full):
            self.pool.register(sequence.blocks[i], hashes[i])
        sequence.num_cached_blocks = full
