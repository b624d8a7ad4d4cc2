"""The scheduler without a KV cache: first come first served, every token computed in every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from mistralrs_sdk.engine.scheduler import (
    Scheduled,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerStats,
)
from mistralrs_sdk.engine.sequence import Sequence, Status


class DefaultScheduler:
    """Runs up to `max_num_seqs` sequences, each from its first token, within the token budget.

    A sequence longer than the budget runs alone: without a cache its prompt cannot be split.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._num_computed_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def abort(self, matches: Callable[[Sequence], bool]) -> list[Sequence]:
        """End the sequences that match as canceled."""
        ended = [s for s in [*self.running, *self.waiting] if matches(s)]
        for sequence in ended:
            sequence.finish("canceled")
        self._remove_finished()
        return ended

    def fail(self, sequences: Iterable[Sequence], error: str) -> None:
        """End sequences whose step went wrong."""
        for sequence in sequences:
            sequence.finish("error", error)
        self._remove_finished()

    def schedule(self) -> SchedulerOutput:
        """Take the sequences in turn while their tokens fit the budget; always at least one."""
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting.popleft()
            sequence.status = Status.PREFILL
            sequence.cached_tokens = 0
            self.running.append(sequence)
        scheduled: list[Scheduled] = []
        budget = self.config.max_num_batched_tokens
        for sequence in self.running:
            if scheduled and len(sequence) > budget:
                break
            scheduled.append(Scheduled(sequence, len(sequence)))
            budget -= len(sequence)
        # Who ran goes behind who did not, so that a small budget starves nobody.
        ran = {item.sequence.id for item in scheduled}
        self.running.sort(key=lambda s: s.id in ran)
        return SchedulerOutput(scheduled=tuple(scheduled))

    def update(self, output: SchedulerOutput, tokens: Iterable[int | None]) -> None:
        """Record a finished step: `tokens` has the drawn token of each scheduled sequence."""
        for item, token in zip(output.scheduled, tokens, strict=True):
            self._num_computed_tokens += item.num_tokens
            if item.sequence.status is not Status.FINISHED and token is not None:
                item.sequence.status = Status.DECODE
                item.sequence.append(token, max_model_len=self.config.max_model_len)
        self._remove_finished()

    def clear_prefix_cache(self) -> None:
        """Nothing is cached, so there is nothing to forget."""

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self.running),
            waiting=len(self.waiting),
            used_blocks=0,
            cached_blocks=0,
            total_blocks=0,
            preemptions=0,
            computed_tokens=self._num_computed_tokens,
            prefix_lookups=0,
            prefix_hits=0,
        )

    def check(self) -> None:
        """Verify the queue; for tests."""
        assert len(self.running) <= self.config.max_num_seqs, "more run than max_num_seqs"

    def _remove_finished(self) -> None:
        self.running = [s for s in self.running if s.status is not Status.FINISHED]
        self.waiting = deque(s for s in self.waiting if s.status is not Status.FINISHED)
