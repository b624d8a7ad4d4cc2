"""The engine: requests in, outputs out, one step at a time."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import attrs

from mistralrs_sdk.engine.look_ahead import LookAhead
from mistralrs_sdk.engine.metrics import OVER_TOTAL_CAPACITY, EngineMetrics, MetricsRecorder
from mistralrs_sdk.engine.request import (
    DEADLINE_PASSED,
    FinishReason,
    Request,
    RequestOutput,
    SampledToken,
)
from mistralrs_sdk.engine.scheduler import (
    Scheduled,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerStats,
)
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from mistralrs_sdk.engine.sequence import Status
from mistralrs_sdk.engine.throughput import ThroughputLog
from mistralrs_sdk.machine import is_out_of_memory

logger = logging.getLogger("mistralrs_sdk.engine")

MAX_FAILED_STEPS = 3
"""Steps in a row that may fail before the engine gives up; running out of memory does not count."""
MAX_STALE_DEADLINES = 1024
"""Deadlines of requests that have ended, kept until the next is set: some are days ahead."""


class Runner(Protocol):
    """Computes a step: small enough to be faked in a test."""

    def run(self, scheduled: Sequence[Scheduled]) -> Sequence[SampledToken | None]: ...


class EngineScheduler(Protocol):
    """What both schedulers have in common."""

    config: SchedulerConfig

    @property
    def has_work(self) -> bool: ...
    @property
    def num_evictions(self) -> int: ...
    def add(self, sequence: EngineSequence) -> None: ...
    def end(
        self, sequences: Iterable[EngineSequence], reason: FinishReason, error: str | None = None
    ) -> None: ...
    def schedule(self) -> SchedulerOutput: ...
    def update(self, output: SchedulerOutput, tokens: Iterable[int | None]) -> None: ...
    def clear_prefix_cache(self) -> None: ...
    def forget_kv(self) -> None: ...
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
        look_ahead: LookAhead | None = None,
        replay_counts: Callable[[], tuple[int, Mapping[str, int]]] = lambda: (0, {}),
        release_memory: Callable[[], None] = lambda: None,
        log_throughput: bool = False,
        log_steps: bool = False,
    ) -> None:
        """`look_ahead`, over the same scheduler and runner, launches steps early.

        `replay_counts` says how many steps were CUDA graphs, and how many not though there are
        some, by reason. `release_memory` is called when a step ran out of memory and what it held
        is gone.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.is_wanted: Callable[[], bool] = lambda: False
        """Asked before a step is launched ahead, which is left: does somebody wait for a pause?"""
        self._look_ahead = look_ahead
        self._replay_counts = replay_counts
        self._release_memory = release_memory
        self._throughput = ThroughputLog(scheduler.stats()) if log_throughput else None
        self._log_steps = log_steps
        self._metrics = MetricsRecorder()
        self._ids = itertools.count()
        self._open: dict[int, list[EngineSequence]] = {}
        """The sequences of each request that have not ended."""
        self._deadlines: list[tuple[float, int]] = []
        self._failed_steps = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue every choice of the request."""
        now = time.perf_counter()
        sequences = self._open[request.id] = [
            EngineSequence.from_request(next(self._ids), request, choice, arrived_at=now)
            for choice in range(request.sampling.n_choices)
        ]
        for sequence in sequences:
            self.scheduler.add(sequence)
            self._metrics.arrived(sequence.id, at=now)
        if request.deadline is not None:
            if len(self._deadlines) > MAX_STALE_DEADLINES + 2 * len(self._open):
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._open]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline, request.id))

    def abort(self, request_id: int, choice: int | None = None) -> list[RequestOutput]:
        """End a request, or one of its choices, as canceled; its blocks are free at once.

        A step that was launched ahead is finished first, so others may have news too.
        """
        outputs = self._land() if request_id in self._open else []
        ended = [s for s in self._open.get(request_id, ()) if choice in (None, s.choice)]
        self.scheduler.end(ended, "canceled")
        now = time.perf_counter()
        # Only the text side ends one choice: it has seen a stop string.
        reason = "canceled" if choice is None else "stop"
        return outputs + [self._close(sequence, reason, now=now) for sequence in ended]

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns what the sequences in it have to report.

        Raises:
            Exception: whatever the runner raised, when it failed three times in a row, not counting
                lack of memory.
        """
        outputs = self._expire(time.perf_counter())
        if self._throughput is not None:
            self._throughput.before_step()
        outputs += self._advance(may_go_on=self._is_undisturbed)
        if self._throughput is not None:
            self._throughput.after_step(self.scheduler.stats())
        return outputs

    def _advance(self, *, may_go_on: Callable[[], bool]) -> list[RequestOutput]:
        """Compute or finish a step and report it; `may_go_on` allows to launch another early."""
        started = time.perf_counter()
        ahead = self._look_ahead
        output = self.scheduler.schedule() if ahead is None else ahead.schedule()
        work = _lengths(output.scheduled) if self._log_steps and output.scheduled else None
        if ahead is None:
            sampled = self._run(output.scheduled)
        else:
            output, sampled = self._run_ahead(ahead, output, may_go_on=may_go_on)
        now = time.perf_counter()
        if work is not None:
            logger.debug("step: %s, %.1f ms", work, 1000 * (now - started))
        outputs: list[RequestOutput] = []
        for sequence in output.rejected:
            self._metrics.rejected(sequence.id, OVER_TOTAL_CAPACITY)
            self._forget(sequence)
            outputs.append(_output(sequence, None, now=now))
        for item, drawn in zip(output.scheduled, sampled, strict=True):
            if drawn is not None and drawn.error is not None:
                self.scheduler.end([item.sequence], "error", drawn.error)
        drew = [None if d is None or d.error else d for d in sampled]
        lengths = [len(item.sequence) for item in output.scheduled]
        self.scheduler.update(output, [None if d is None else d.token_id for d in drew])
        for item, drawn, before in zip(output.scheduled, drew, lengths, strict=True):
            sequence = item.sequence
            if drawn is not None:
                first = sequence.first_token_at is None
                self._metrics.token(sequence.id, now=now, first=first)
                outputs.append(_output(sequence, drawn, now=now, before=before))
            elif sequence.status is Status.FINISHED:
                outputs.append(_output(sequence, None, now=now))
            if sequence.finish_reason is not None:
                self._metrics.completed(sequence.id, sequence.finish_reason)
                self._forget(sequence)
        return outputs

    def _land(self) -> list[RequestOutput]:
        """Finish the step that was launched ahead, if there is one, and launch no other."""
        if self._look_ahead is None or not self._look_ahead.in_flight():
            return []
        return self._advance(may_go_on=lambda: False)

    def _is_undisturbed(self) -> bool:
        due = self._deadlines and self._deadlines[0][0] <= time.perf_counter()
        return not due and not self.is_wanted()

    def _expire(self, now: float) -> list[RequestOutput]:
        """End the requests whose deadline has passed."""
        if not self._deadlines or self._deadlines[0][0] > now:
            return []
        outputs = self._land()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            late = list(self._open.get(request_id, ()))
            self.scheduler.end(late, "error", DEADLINE_PASSED)
            outputs += [self._close(sequence, "error", now=now) for sequence in late]
        return outputs

    def _close(
        self, sequence: EngineSequence, reason: FinishReason, *, now: float
    ) -> RequestOutput:
        """Report a sequence that was ended between two steps."""
        self._metrics.completed(sequence.id, reason)
        self._forget(sequence)
        return _output(sequence, None, now=now)

    def _forget(self, sequence: EngineSequence) -> None:
        siblings = self._open[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._open[sequence.request.id]
            if sequence.request.adapter is not None:
                sequence.request.adapter.release()

    def metrics(self) -> EngineMetrics:
        """Return what runs right now and what was counted since the engine was made."""
        counted = self._metrics.snapshot(
            self.scheduler.stats(),
            capacity=self.scheduler.config.max_num_seqs,
            evictions=self.scheduler.num_evictions,
        )
        replayed, eager = self._replay_counts()
        ahead = 0 if self._look_ahead is None else self._look_ahead.num_ahead
        return attrs.evolve(counted, steps_ahead=ahead, steps_replayed=replayed, steps_eager=eager)

    def _run(self, scheduled: Sequence[Scheduled]) -> Sequence[SampledToken | None]:
        """Run the model; if that fails, the sequences of this step end with the error."""
        if not scheduled:
            return []
        self._note_start(scheduled)
        try:
            sampled = self.runner.run(scheduled)
        except Exception as error:
            return self._fail(scheduled, error)
        self._failed_steps = 0
        return sampled

    def _run_ahead(
        self, look_ahead: LookAhead, output: SchedulerOutput, *, may_go_on: Callable[[], bool]
    ) -> tuple[SchedulerOutput, Sequence[SampledToken | None]]:
        """As `_run`, and the step without the sequences that are reported later."""
        if not output.scheduled:
            return output, []
        self._note_start(output.scheduled)
        try:
            reported = look_ahead.run(output, may_go_on=may_go_on)
        except Exception as error:
            return output, self._fail(output.scheduled, error)
        self._failed_steps = 0
        return reported

    def _note_start(self, scheduled: Sequence[Scheduled]) -> None:
        now = time.perf_counter()
        for item in scheduled:
            if item.sequence.scheduled_at is None:
                item.sequence.scheduled_at = now
                self._metrics.reused(item.sequence.cached_tokens or 0)

    def _fail(
        self, scheduled: Sequence[Scheduled], error: Exception
    ) -> Sequence[SampledToken | None]:
        """End the sequences of a failed step; raise the error if it is one too many in a row."""
        if is_out_of_memory(error):
            return self._end_for_memory(scheduled, error)
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise error
        logger.error(
            "a step of %d sequences failed; they end with it", len(scheduled), exc_info=error
        )
        failed = [item.sequence for item in scheduled]
        self.scheduler.end(failed, "error", f"{type(error).__name__}: {error}")
        return [None] * len(scheduled)

    def _end_for_memory(
        self, scheduled: Sequence[Scheduled], error: Exception
    ) -> Sequence[SampledToken | None]:
        """End the sequences of a step that ran out of memory, and go on with the others.

        However often: the next step may be smaller, or others give memory back.
        """
        logger.error(
            "a step ran out of memory (%s); its sequences end with that",
            _lengths(scheduled),
            exc_info=error,
        )
        tokens = sum(item.num_tokens for item in scheduled)
        self.scheduler.end(
            [item.sequence for item in scheduled],
            "error",
            f"memory ran out in a step of {tokens} tokens of {len(scheduled)} sequences "
            f"({type(error).__name__}: {error}); lower max_num_batched_tokens, "
            "max_prefill_chunk_tokens or max_num_seqs, or leave more memory beside the KV cache "
            "(PagedAttentionMetaBuilder().with_gpu_memory)",
        )
        # The tensors of the step are alive as long as the frames that the traceback names.
        traceback.clear_frames(error.__traceback__)
        self._release_memory()
        return [None] * len(scheduled)


def _lengths(scheduled: Sequence[Scheduled]) -> str:
    """What a step computes: tokens of each prompt, and how long each decoding sequence is."""
    decodes = [len(i.sequence) for i in scheduled if i.sequence.status is Status.DECODE]
    prompts = [i.num_tokens for i in scheduled if i.sequence.status is not Status.DECODE]
    return f"prompt tokens {prompts}, decodes at lengths {decodes}"


def _output(
    sequence: EngineSequence, drawn: SampledToken | None, *, now: float, before: int = 0
) -> RequestOutput:
    """What a sequence has to report; if it drew a token, all from index `before` on are new."""
    if drawn is not None and sequence.first_token_at is None:
        sequence.first_token_at = now
    started = sequence.scheduled_at if sequence.scheduled_at is not None else now
    first = sequence.first_token_at if sequence.first_token_at is not None else now
    return RequestOutput(
        request_id=sequence.request.id,
        choice=sequence.choice,
        token_ids=() if drawn is None else tuple(sequence.tokens[before:]),
        logprobs=() if drawn is None or drawn.logprobs is None else (drawn.logprobs,),
        finish_reason=sequence.finish_reason,
        error=sequence.error,
        cached_tokens=sequence.cached_tokens or 0,
        prompt_time=first - started,
        completion_time=now - first,
        prompt_logits=None if drawn is None else drawn.prompt_logits,
    )
