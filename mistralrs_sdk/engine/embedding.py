"""The engine of an embedding model: many inputs in one pass, nothing kept between passes."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence

import attrs

from mistralrs_sdk.engine.engine import MAX_FAILED_STEPS
from mistralrs_sdk.engine.metrics import EngineMetrics, MetricsRecorder
from mistralrs_sdk.engine.request import FinishReason
from mistralrs_sdk.engine.scheduler import SchedulerStats
from mistralrs_sdk.engine.throughput import ThroughputLog

logger = logging.getLogger("mistralrs_sdk.engine")

Vector = list[float]


@attrs.frozen
class EmbedInput:
    """The ids of one text, and how many of the first ones pooling leaves out."""

    ids: tuple[int, ...]
    skip: int = 0


@attrs.frozen
class _Choices:
    n_choices: int


@attrs.frozen(kw_only=True)
class EmbedRequest:
    """Inputs that were sent together; the bridge to the event loop takes each for a choice."""

    id: int
    inputs: tuple[EmbedInput, ...]

    @property
    def sampling(self) -> _Choices:
        """As many outputs come back as there are inputs."""
        return _Choices(len(self.inputs))


@attrs.frozen(kw_only=True)
class EmbedOutput:
    """What became of one input."""

    request_id: int
    choice: int
    """The number of the input in its request."""
    vector: Vector | None
    """None unless `finish_reason` is "stop"."""
    finish_reason: FinishReason
    error: str | None = None
    """Set with finish_reason "error"."""


@attrs.define(eq=False)
class _Open:
    """A request with inputs that wait."""

    request: EmbedRequest
    waiting: deque[int]


@attrs.frozen(eq=False)
class _Place:
    """One input of a batch."""

    request_id: int
    choice: int
    input: EmbedInput


class EmbeddingEngine:
    """Computes what waits, in batches; synchronous, used from one thread.

    `run` turns inputs into as many vectors. Requests take turns, one input each, so that a short
    one does not wait for all of a long one. A step has at most `max_num_seqs` inputs and
    `max_num_batched_tokens` tokens; an input that is longer than that runs by itself.
    """

    def __init__(
        self,
        run: Callable[[Sequence[EmbedInput]], Sequence[Vector]],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        log_throughput: bool = False,
    ) -> None:
        self._run = run
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._turns: deque[_Open] = deque()
        self._computed_tokens = 0
        self._failed_steps = 0
        self._metrics = MetricsRecorder()
        self._throughput = ThroughputLog(self.stats()) if log_throughput else None

    @property
    def has_work(self) -> bool:
        return bool(self._turns)

    def add(self, request: EmbedRequest) -> None:
        """Queue every input of the request; there is at least one."""
        self._turns.append(_Open(request, deque(range(len(request.inputs)))))

    def abort(self, request_id: int, choice: int | None = None) -> list[EmbedOutput]:
        """End what waits of a request, or one input of it, as canceled."""
        ended: list[EmbedOutput] = []
        for turn in [t for t in self._turns if t.request.id == request_id]:
            gone = [i for i in turn.waiting if choice in (None, i)]
            turn.waiting = deque(() if choice is None else (i for i in turn.waiting if i != choice))
            if not turn.waiting:
                self._turns.remove(turn)
            ended += [self._end(request_id, i, None, "canceled") for i in gone]
        return ended

    def step(self) -> list[EmbedOutput]:
        """Compute one batch; returns what became of each input in it.

        A batch that fails is tried again input by input: only those at fault end with the error.

        Raises:
            Exception: of the last one, when every input of three steps in a row failed.
        """
        if self._throughput is not None:
            self._throughput.before_step()
        batch = self._next_batch()
        results = self._compute([place.input for place in batch])
        errors = [result for result in results if isinstance(result, Exception)]
        self._failed_steps = self._failed_steps + 1 if len(errors) == len(batch) else 0
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise errors[-1]
        outputs = [self._finish(p, result) for p, result in zip(batch, results, strict=True)]
        if self._throughput is not None:
            self._throughput.after_step(self.stats())
        return outputs

    def stats(self) -> SchedulerStats:
        """Return what waits and what was computed; nothing runs between two steps."""
        return SchedulerStats(
            running=0,
            waiting=sum(len(turn.waiting) for turn in self._turns),
            used_blocks=0,
            cached_blocks=0,
            total_blocks=0,
            preemptions=0,
            computed_tokens=self._computed_tokens,
            prefix_lookups=0,
            prefix_hits=0,
        )

    def metrics(self) -> EngineMetrics:
        """Return what was counted since the engine was made; no token is ever drawn."""
        return self._metrics.snapshot(self.stats(), capacity=self._max_num_seqs, evictions=0)

    def _next_batch(self) -> list[_Place]:
        batch: list[_Place] = []
        tokens = 0
        while self._turns and len(batch) < self._max_num_seqs:
            turn = self._turns[0]
            index = turn.waiting[0]
            asked = turn.request.inputs[index]
            tokens += len(asked.ids)
            if batch and tokens > self._max_tokens:
                break  # strict order: nobody overtakes the front
            batch.append(_Place(turn.request.id, index, asked))
            turn.waiting.popleft()
            self._turns.popleft()
            if turn.waiting:
                self._turns.append(turn)
        return batch

    def _compute(self, inputs: list[EmbedInput]) -> list[Vector | Exception]:
        """A vector for each input, or what went wrong with it."""
        try:
            vectors = self._run(inputs)
        except Exception as error:
            if len(inputs) > 1:
                logger.warning("a step of %d inputs failed (%s): one by one", len(inputs), error)
                return [result for one in inputs for result in self._compute([one])]
            logger.exception("an input of %d tokens failed", len(inputs[0].ids))
            return [error]
        self._computed_tokens += sum(len(asked.ids) for asked in inputs)
        return [*vectors]

    def _finish(self, place: _Place, result: Vector | Exception) -> EmbedOutput:
        if isinstance(result, Exception):
            error = f"{type(result).__name__}: {result}"
        elif all(map(math.isfinite, result)):
            return self._end(place.request_id, place.choice, result, "stop")
        else:
            error = "the model computed a vector with values that are not finite"
        return self._end(place.request_id, place.choice, None, "error", error)

    def _end(
        self,
        request_id: int,
        choice: int,
        vector: Vector | None,
        reason: FinishReason,
        error: str | None = None,
    ) -> EmbedOutput:
        self._metrics.completed(-1, reason)  # what arrived when is not kept: no token is drawn
        return EmbedOutput(
            request_id=request_id,
            choice=choice,
            vector=vector,
            finish_reason=reason,
            error=error,
        )
