"""The scheduler without paging: first come first served, in batches of equal length."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, Protocol

from mistralrs_sdk.engine.prefix_cache import identity_of, root_hash
from mistralrs_sdk.engine.request import FinishReason
from mistralrs_sdk.engine.scheduler import (
    Scheduled,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerStats,
)
from mistralrs_sdk.engine.sequence import Sequence, Status
from mistralrs_sdk.engine.waiting_queue import WaitingQueue
from mistralrs_sdk.engine.whole_prefix_cache import WholePrefixCache

LEAST_USEFUL_PREFIX = 16
"""Shorter shared beginnings are computed anew, unless they are half of the prompt."""


class SequenceCaches(Protocol):
    """What the scheduler needs of the store that holds a cache per sequence."""

    @property
    def owners(self) -> Collection[int]: ...
    def keep(self, sequence_id: int, length: int) -> Any | None: ...
    def start_from(self, sequence_id: int, kept: Any) -> None: ...
    def free(self, ids: Iterable[int]) -> None: ...


class DefaultScheduler:
    """Admits up to `max_num_seqs` sequences in order; those of one length compute together.

    Each pass chooses one bucket of equal length. Prompts run whole, and share the pass with the
    decodes whose length they have. Everyone else is parked: it keeps its cache, and its urgency
    rises by one for every pass until it runs. A sequence's priority is its urgency plus the binary
    logarithm of its length; the bucket with the greatest sum runs. Only while nobody is parked,
    and either nothing ran yet or nobody waits, the shortest go first, to catch up. Among equals the
    bucket with the oldest sequence wins.

    If a bucket exceeds `max_num_batched_tokens`, its oldest prompts run, at least one, and the
    others are parked. With `caches` None there is no KV cache: each pass computes every token of
    its sequences. `prefix_cache_n` caches of ended sequences are kept whole for later prompts,
    at most `prefix_cache_tokens` tokens in all.
    `identity` names what besides the tokens decides keys and values, the model for one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        caches: SequenceCaches | None = None,
        prefix_cache_n: int | None = None,
        prefix_cache_tokens: int | None = None,
        **identity: str | int,
    ) -> None:
        self.config = config
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """The admitted, parked ones included."""
        self._caches = caches
        self._prefixes: WholePrefixCache[Any] | None = None
        if prefix_cache_n:
            self._prefixes = WholePrefixCache(prefix_cache_n, max_tokens=prefix_cache_tokens)
        self._identity = identity
        self._root = root_hash(**identity)
        self._urgency: dict[int, int] = {}
        """Passes in which each parked sequence was passed over since it ran."""
        self._num_computed_tokens = 0
        self._num_lookups = 0
        self._num_hits = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_evictions(self) -> int:
        """Caches of ended sequences that had to go for newer ones."""
        return 0 if self._prefixes is None else self._prefixes.num_evictions

    def add(self, sequence: Sequence) -> None:
        own = identity_of(sequence.request)
        sequence.root = root_hash(**self._identity, **own) if own else self._root
        self.waiting.append(sequence)

    def end(
        self, sequences: Iterable[Sequence], reason: FinishReason, error: str | None = None
    ) -> None:
        """End sequences before their time; their memory is free at once."""
        running = []
        for sequence in sequences:
            was_waiting = sequence.status is Status.WAITING
            sequence.finish(reason, error)
            if was_waiting:
                self.waiting.remove(sequence)
            else:
                running.append(sequence)
        self._leave(running)

    def schedule(self) -> SchedulerOutput:
        """Decide the next step; empty when nothing can run."""
        arrivals = bool(self.running and self.waiting)
        self._admit()
        if not self.running:
            return SchedulerOutput()
        buckets: dict[tuple[int, int, int], list[Sequence]] = {}
        for sequence in self.running:
            buckets.setdefault(_shape(sequence), []).append(sequence)
        # Buckets stand in the order of their oldest member; of equals the first is taken.
        if arrivals or self._urgency:
            bucket = max(buckets.values(), key=self._priority)
        else:
            bucket = min(buckets.values(), key=lambda bucket: _length(bucket[0]))
        scheduled = self._within_budget(bucket)
        chosen = {item.sequence.id for item in scheduled}
        self._urgency = {
            s.id: self._urgency.get(s.id, 0) + 1 for s in self.running if s.id not in chosen
        }
        return SchedulerOutput(scheduled=tuple(scheduled))

    def update(self, output: SchedulerOutput, tokens: Iterable[int | None]) -> None:
        """Record a finished step: `tokens` has the drawn token of each scheduled sequence."""
        ended = []
        for item, token in zip(output.scheduled, tokens, strict=True):
            sequence = item.sequence
            if sequence.status is Status.FINISHED:
                continue
            self._num_computed_tokens += item.num_tokens
            if self._caches is not None:
                sequence.num_computed_tokens += item.num_tokens
            if token is not None:
                sequence.status = Status.DECODE
                sequence.append(token, max_model_len=self.config.max_model_len)
                if sequence.status is Status.FINISHED:
                    ended.append(sequence)
        if ended:
            self._leave(ended)

    def clear_prefix_cache(self) -> None:
        """Forget the caches of ended sequences."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def forget_kv(self) -> None:
        """Forget all keys and values, kept or not; running sequences compute theirs again."""
        self.clear_prefix_cache()
        if self._caches is None:
            return
        for sequence in self.running:
            sequence.status = Status.PREFILL
            sequence.num_computed_tokens = 0
        self._caches.free([s.id for s in self.running])

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self.running),
            waiting=len(self.waiting),
            used_blocks=0,
            cached_blocks=0,
            total_blocks=0,
            preemptions=0,
            computed_tokens=self._num_computed_tokens,
            prefix_lookups=self._num_lookups,
            prefix_hits=self._num_hits,
        )

    def check(self) -> None:
        """Verify the queue and who owns memory; for tests."""
        ids = {s.id for s in self.running}
        assert len(self.running) <= self.config.max_num_seqs, "more run than max_num_seqs"
        assert all(s.status in (Status.PREFILL, Status.DECODE) for s in self.running)
        assert self._urgency.keys() <= ids, "somebody who left is still waited for"
        if self._caches is not None:
            assert ids.issuperset(self._caches.owners), "a cache belongs to nobody who runs"

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting.front
            self.waiting.remove(sequence)
            sequence.status = Status.PREFILL
            sequence.cached_tokens = sequence.num_computed_tokens = self._reuse_prefix(sequence)
            self.running.append(sequence)

    def _reuse_prefix(self, sequence: Sequence) -> int:
        """Start from a kept cache if one fits; returns how many tokens of it are used."""
        if self._caches is None or self._prefixes is None or not _uses_prefixes(sequence):
            return 0
        self._num_lookups += 1
        found = self._prefixes.find(sequence.root, sequence.tokens)
        if found is None:
            return 0
        kept, shared = found
        usable = min(shared, len(sequence) - 1)  # the last token runs again: its logits are needed
        if not usable or usable < min(LEAST_USEFUL_PREFIX, len(sequence) // 2):
            return 0
        self._caches.start_from(sequence.id, kept)
        self._num_hits += 1
        return usable

    def _priority(self, bucket: list[Sequence]) -> float:
        urgency = sum(self._urgency.get(s.id, 0) for s in bucket)
        return urgency + len(bucket) * math.log2(_length(bucket[0]))

    def _within_budget(self, bucket: list[Sequence]) -> list[Scheduled]:
        """Decodes first, then the oldest prompts, while they fit."""
        scheduled: list[Scheduled] = []
        budget = self.config.max_num_batched_tokens
        for sequence in sorted(bucket, key=lambda s: s.status is Status.PREFILL):
            budget -= sequence.num_uncomputed_tokens
            if scheduled and budget < 0:
                break
            scheduled.append(Scheduled(sequence, sequence.num_uncomputed_tokens))
        return scheduled

    def _leave(self, sequences: list[Sequence]) -> None:
        gone = {s.id for s in sequences}
        self.running = [s for s in self.running if s.id not in gone]
        for sequence_id in gone:
            self._urgency.pop(sequence_id, None)
        for sequence in sequences:
            self._keep_prefix(sequence)
        if self._caches is not None:
            self._caches.free(gone)

    def _keep_prefix(self, sequence: Sequence) -> None:
        """Keep the cache of a sequence that ended well, or was left after its first token."""
        if self._caches is None or self._prefixes is None or not _uses_prefixes(sequence):
            return
        count = sequence.num_computed_tokens
        if sequence.finish_reason == "error" or count < sequence.prompt_len:
            return
        self._prefixes.put(
            sequence.root,
            sequence.tokens[:count],
            partial(self._caches.keep, sequence.id, count),
        )


def _length(sequence: Sequence) -> int:
    if sequence.status is Status.PREFILL:
        return sequence.num_uncomputed_tokens
    return len(sequence)


def _shape(sequence: Sequence) -> tuple[int, int, int]:
    """What sequences of one bucket have in common: length, offset, and who must run alone."""
    offset = sequence.num_computed_tokens if sequence.status is Status.PREFILL else 0
    return _length(sequence), offset, sequence.id if sequence.request.raw_logits else -1


def _uses_prefixes(sequence: Sequence) -> bool:
    return sequence.request.use_prefix_cache and not sequence.request.raw_logits
