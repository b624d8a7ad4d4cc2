"""The engine: requests in, outputs out, one step at a time."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from mistralrs_sdk.engine.request import Request, RequestOutput, SampledToken
from mistralrs_sdk.engine.scheduler import (
    Scheduled,
    SchedulerOutput,
    SchedulerStats,
)
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from mistralrs_sdk.engine.sequence import Status
from mistralrs_sdk.engine.throughput import ThroughputLog

logger = logging.getLogger("mistralrs_sdk.engine")

MAX_FAILED_STEPS = 3
"""Steps in a row that may fail before the engine gives up."""


class Runner(Protocol):
    """Computes a step: small enough to be faked in a test."""

    def run(self, scheduled: Sequence[Scheduled]) -> Sequence[SampledToken | None]: ...


class EngineScheduler(Protocol):
    """What both schedulers have in common."""

    @property
    def has_work(self) -> bool: ...
    def add(self, sequence: EngineSequence) -> None: ...
    def abort(self, matches) -> list[EngineSequence]: ...
    def fail(self, sequences: Iterable[EngineSequence], error: str) -> None: ...
    def schedule(self) -> SchedulerOutput: ...
    def update(self, output: SchedulerOutput, tokens: Iterable[int | None]) -> None: ...
    def clear_prefix_cache(self) -> None: ...
    def stats(self) -> SchedulerStats: ...
    def check(self) -> None: ...


class Engine:
    """Continuous batching over one model; synchronous, used from one thread.

    Usable without threads or event loops: `add`, then `step` while `has_work`.
    """

    def __init__(
        self,
        scheduler: EngineScheduler,
        runner: Runner,
        *,
        log_throughput: bool = False,
        log_steps: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._throughput = ThroughputLog(scheduler.stats()) if log_throughput else None
        self._log_steps = log_steps
        self._ids = itertools.count()
        self._failed_steps = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue every choice of the request."""
        for choice in range(request.sampling.n_choices):
            self.scheduler.add(EngineSequence.from_request(next(self._ids), request, choice))

    def abort(self, request_id: int, choice: int | None = None) -> list[RequestOutput]:
        """End a request, or one of its choices, as canceled; its blocks are free at once."""
        ended = self.scheduler.abort(
            lambda s: s.request.id == request_id and choice in (None, s.choice)
        )
        return [_output(s, (), now=time.perf_counter()) for s in ended]

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns what the sequences in it have to report.

        Raises:
            Exception: whatever the runner raised, when it failed three times in a row.
        """
        started = time.perf_counter()
        if self._throughput is not None:
            self._throughput.before_step()
        output = self.scheduler.schedule()
        work = _lengths(output.scheduled) if self._log_steps and output.scheduled else None
        sampled = self._run(output.scheduled)
        now = time.perf_counter()
        if work is not None:
            logger.debug("step: %s, %.1f ms", work, 1000 * (now - started))
        outputs = [_output(s, (), now=now) for s in output.rejected]
        for item, drawn in zip(output.scheduled, sampled, strict=True):
            if drawn is not None and drawn.error is not None:
                self.scheduler.fail([item.sequence], drawn.error)
        drew = [None if d is None or d.error else d for d in sampled]
        self.scheduler.update(output, [None if d is None else d.token_id for d in drew])
        for item, drawn in zip(output.scheduled, drew, strict=True):
            if drawn is not None:
                outputs.append(_output(item.sequence, (drawn,), now=now))
            elif item.sequence.status is Status.FINISHED:
                outputs.append(_output(item.sequence, (), now=now))
        if self._throughput is not None:
            self._throughput.after_step(self.scheduler.stats())
        return outputs

    def _run(self, scheduled: Sequence[Scheduled]) -> Sequence[SampledToken | None]:
        """Run the model; if that fails, the sequences of this step end with the error."""
        if not scheduled:
            return []
        now = time.perf_counter()
        for item in scheduled:
            if item.sequence.scheduled_at is None:
                item.sequence.scheduled_at = now
        try:
            sampled = self.runner.run(scheduled)
        except Exception as error:
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise
            logger.exception("a step of %d sequences failed; they end with it", len(scheduled))
            self.scheduler.fail(
                (item.sequence for item in scheduled), f"{type(error).__name__}: {error}"
            )
            return [None] * len(scheduled)
        self._failed_steps = 0
        return sampled


def _lengths(scheduled: Sequence[Scheduled]) -> str:
    """What a step computes: tokens of each prompt, and how long each decoding sequence is."""
    decodes = [len(i.sequence) for i in scheduled if i.sequence.status is Status.DECODE]
    prompts = [i.num_tokens for i in scheduled if i.sequence.status is not Status.DECODE]
    return f"prompt tokens {prompts}, decodes at lengths {decodes}"


def _output(
    sequence: EngineSequence, drawn: Sequence[SampledToken], *, now: float
) -> RequestOutput:
    if drawn and sequence.first_token_at is None:
        sequence.first_token_at = now
    started = sequence.scheduled_at if sequence.scheduled_at is not None else now
    first = sequence.first_token_at if sequence.first_token_at is not None else now
    return RequestOutput(
        request_id=sequence.request.id,
        choice=sequence.choice,
        token_ids=tuple(d.token_id for d in drawn),
        logprobs=tuple(d.logprobs for d in drawn if d.logprobs is not None),
        finish_reason=sequence.finish_reason,
        error=sequence.error,
        cached_tokens=sequence.cached_tokens or 0,
        prompt_time=first - started,
        completion_time=now - first,
    )
