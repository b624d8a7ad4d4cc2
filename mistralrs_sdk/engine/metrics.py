"""What an engine counts: queues, blocks, tokens, ends of sequences, and latency histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import attrs

from mistralrs_sdk.engine.request import FinishReason
from mistralrs_sdk.engine.scheduler import SchedulerStats

FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Upper bounds in seconds of the buckets for the time to first token (mistral.rs')."""

INTER_TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Upper bounds in seconds of the buckets for the time between two tokens (mistral.rs')."""

OVER_TOTAL_CAPACITY = "over_total_capacity"
"""Why a sequence is rejected: the whole KV cache would not hold it."""

QUEUE_FULL = "queue_full"
"""Why a sequence is rejected: as many as are allowed were running or waiting."""


@attrs.frozen(kw_only=True)
class Histogram:
    """How often a value fell into each bucket, and what the values add up to. Seconds."""

    bounds: tuple[float, ...]
    """Upper bounds, each part of its bucket; rising."""
    counts: tuple[int, ...]
    """One per bound, and one for everything above the last; not cumulated."""
    total: float
    largest: float
    """The greatest value so far; 0 without any."""

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """The average value; None without any."""
        return self.total / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """The value that `percent` of the values do not exceed; None without any.

        Read off a straight line through the bucket it falls into, so it is as exact as the bucket
        is narrow; never above the largest value.

        Raises:
            ValueError: `percent` is not between 0 and 100.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percent ({percent}) must be between 0 and 100")
        if not self.count:
            return None
        rank = self.count * percent / 100
        below = 0
        for i, count in enumerate(self.counts):
            if count and below + count >= rank:
                low = self.bounds[i - 1] if i else 0.0
                high = self.bounds[i] if i < len(self.bounds) else self.largest
                return min(self.largest, low + (high - low) * (rank - below) / count)
            below += count
        return self.largest

    @property
    def p50(self) -> float | None:
        """The median; None without any value."""
        return self.percentile(50)

    @property
    def p99(self) -> float | None:
        """What 99 of 100 values do not exceed; None without any value."""
        return self.percentile(99)

    def __str__(self) -> str:
        if not self.count:
            return "none yet"
        p50, p99 = self.percentile(50), self.percentile(99)
        return (
            f"p50 {_seconds(p50)}, p99 {_seconds(p99)}, "
            f"largest {_seconds(self.largest)} of {self.count}"
        )


@attrs.frozen(kw_only=True)
class EngineMetrics:
    """What the engine holds right now, and what it has done since it was built."""

    running: int
    waiting: int
    capacity: int
    """Most sequences that may run at once: `max_num_seqs`."""
    blocks_used: int
    """KV blocks that sequences own; 0 without a paged cache, like the other two."""
    blocks_total: int
    blocks_cached: int
    """Blocks, owned or not, whose prefix a later request could share."""
    prefix_lookups: int
    """Sequences that looked for their prefix; each counts once, however often it is admitted."""
    prefix_hits: int
    """Those of them that found one."""
    prefix_evictions: int
    """Cached blocks, or without paging whole caches, that had to make room."""
    prefix_tokens_reused: int
    """Prompt tokens that were not computed because they were cached."""
    preemptions: int
    tokens_processed: int
    """Tokens the model computed: prompts, generated ones, and what preemption made it repeat."""
    completed: dict[FinishReason, int]
    """Sequences that ran and ended, by reason. A stop string counts as "stop"."""
    rejected: dict[str, int]
    """Sequences that never ran, by reason: too large for the cache, or refused at the queue."""
    time_to_first_token: Histogram
    """Seconds from arrival in the engine, waiting included."""
    inter_token_latency: Histogram
    """Seconds between two tokens of one sequence, preemptions included."""
    steps_replayed: int = 0
    """Decode steps that ran as CUDA graphs."""
    steps_eager: Mapping[str, int] = attrs.field(factory=dict)
    """Steps of a model with CUDA graphs that ran without one, by reason."""
    steps_ahead: int = 0
    """Decode steps that were launched before the tokens of the last one were read."""

    def with_rejected(self, reason: str, count: int) -> EngineMetrics:
        """With what was rejected before the engine heard of it."""
        return attrs.evolve(self, rejected={**self.rejected, reason: count})

    @property
    def tokens_generated(self) -> int:
        """Tokens that were drawn."""
        return self.time_to_first_token.count + self.inter_token_latency.count

    def __str__(self) -> str:
        hits = f"{self.prefix_hits} of {self.prefix_lookups}"
        rows = (
            ("sequences", f"{self.running} of {self.capacity} running, {self.waiting} waiting"),
            ("completed", _by_reason(self.completed)),
            ("rejected", _by_reason(self.rejected)),
            ("preemptions", str(self.preemptions)),
            ("tokens", f"{self.tokens_processed} processed, {self.tokens_generated} generated"),
            (
                "KV blocks",
                f"{self.blocks_used} of {self.blocks_total} used, {self.blocks_cached} cached",
            ),
            (
                "prefix cache",
                f"{hits} sequences hit, {self.prefix_tokens_reused} tokens reused, "
                f"{self.prefix_evictions} evicted",
            ),
            *self._launched(),
            ("time to first token", str(self.time_to_first_token)),
            ("inter-token latency", str(self.inter_token_latency)),
        )
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _launched(self) -> tuple[tuple[str, str], ...]:
        """What there is to say of a device that runs ahead of the host."""
        if not (self.steps_replayed or self.steps_eager or self.steps_ahead):
            return ()
        eager = "".join(f", {count} not: {why}" for why, count in self.steps_eager.items())
        replayed = f"{self.steps_replayed} replayed as CUDA graphs{eager}"
        return (("steps", f"{self.steps_ahead} launched ahead, {replayed}"),)


class MetricsRecorder:
    """Counts as the engine goes; no locks, because only the engine's thread writes and reads."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        """Of each sequence that lives: when it arrived, or when its newest token came."""
        self._first = _Recording(FIRST_TOKEN_BOUNDS)
        self._next = _Recording(INTER_TOKEN_BOUNDS)
        self._completed: dict[FinishReason, int] = dict.fromkeys(
            ("stop", "length", "canceled", "error"), 0
        )
        self._rejected = {OVER_TOTAL_CAPACITY: 0}
        self._tokens_reused = 0

    def arrived(self, sequence_id: int, *, at: float) -> None:
        """A sequence came in."""
        self._since[sequence_id] = at

    def reused(self, num_tokens: int) -> None:
        """A sequence found that many tokens of its prompt in the prefix cache."""
        self._tokens_reused += num_tokens

    def token(self, sequence_id: int, *, now: float, first: bool) -> None:
        """A sequence got a token."""
        gap = now - self._since.get(sequence_id, now)
        self._since[sequence_id] = now
        (self._first if first else self._next).add(gap)

    def completed(self, sequence_id: int, reason: FinishReason) -> None:
        """A sequence ended."""
        self._since.pop(sequence_id, None)
        self._completed[reason] += 1

    def rejected(self, sequence_id: int, reason: str) -> None:
        """A sequence was refused: it could never run."""
        self._since.pop(sequence_id, None)
        self._rejected[reason] = self._rejected.get(reason, 0) + 1

    def snapshot(self, stats: SchedulerStats, *, capacity: int, evictions: int) -> EngineMetrics:
        """Join what was counted here with the scheduler's numbers."""
        return EngineMetrics(
            running=stats.running,
            waiting=stats.waiting,
            capacity=capacity,
            blocks_used=stats.used_blocks,
            blocks_total=stats.total_blocks,
            blocks_cached=stats.cached_blocks,
            prefix_lookups=stats.prefix_lookups,
            prefix_hits=stats.prefix_hits,
            prefix_evictions=evictions,
            prefix_tokens_reused=self._tokens_reused,
            preemptions=stats.preemptions,
            tokens_processed=stats.computed_tokens,
            completed=dict(self._completed),
            rejected=dict(self._rejected),
            time_to_first_token=self._first.histogram(),
            inter_token_latency=self._next.histogram(),
        )


class _Recording:
    """A histogram that grows."""

    __slots__ = ("_bounds", "_counts", "_largest", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._largest = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value
        if value > self._largest:
            self._largest = value

    def histogram(self) -> Histogram:
        return Histogram(
            bounds=self._bounds,
            counts=tuple(self._counts),
            total=self._total,
            largest=self._largest,
        )


def _seconds(value: float | None) -> str:
    assert value is not None, "there are values"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def _by_reason(counts: dict) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())
