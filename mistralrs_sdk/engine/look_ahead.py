"""Resident look-ahead: a decode step is launched before the tokens of the last one are read.

So the device computes while the host hands tokens out and decides what comes next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import attrs

from mistralrs_sdk.engine.request import SampledToken
from mistralrs_sdk.engine.scheduler import Scheduled, Scheduler, SchedulerOutput
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from mistralrs_sdk.engine.sequence import Status

logger = logging.getLogger("mistralrs_sdk.engine")


class Launched(Protocol):
    """A step that was started and whose tokens are not known yet."""

    def read(self) -> Sequence[SampledToken | None]:
        """Wait for them: one entry per sequence of the step."""
        ...

    @property
    def redone(self) -> Collection[int]:
        """After `read`: the sequences that a step launched after this one had a wrong token of."""
        ...


class LaunchingRunner(Protocol):
    """Computes steps, and can start one without waiting for it."""

    def run(self, scheduled: Sequence[Scheduled]) -> Sequence[SampledToken | None]: ...

    def launch(self, scheduled: Sequence[Scheduled]) -> Any:
        """Start a step; a `Launched`, or None if it has to be run, and nothing was started."""
        ...

    def launch_after(self, step: Any, rows: Sequence[int]) -> Any:
        """Start the next decode of some of a step's sequences, from the tokens it is drawing."""
        ...


class LookAhead:
    """Hands the engine one step after the other, launching the next before it reads one.

    The next step is that of the same sequences, without those that are at their length limit. It is
    launched only if the scheduler could decide nothing else: all that run are decoding, nobody who
    waits could get in, and each has a block for its next token without taking anybody else's. A
    sequence that turns out to have ended is reported, and gives its blocks back, when the step it
    still took part in is over.
    """

    def __init__(self, scheduler: Scheduler, runner: LaunchingRunner) -> None:
        self.num_ahead = 0
        """Steps that were launched before the tokens of the last one were read."""
        self._scheduler = scheduler
        self._runner = runner
        self._flight: _Flight | None = None
        self._ended: list[tuple[Scheduled, SampledToken | None]] = []
        """Who takes part in the flight for nothing, and its last token."""

    def in_flight(self) -> bool:
        """Whether a step was launched ahead and has something to report.

        One that has nothing is waited for: what it writes to may be given away after this.
        """
        flight = self._flight
        if flight is None:
            return False
        # Between two steps anything may have happened to them, such as a preemption.
        flight.rows = [row for row in flight.rows if _decodes(row[1])]
        self._ended = [ended for ended in self._ended if _decodes(ended[0])]
        if flight.rows or self._ended:
            return True
        self._flight = None
        _wait_for(flight)
        return False

    def schedule(self) -> SchedulerOutput:
        """The step that `run` finishes: the one in flight, else what the scheduler decides."""
        if not self.in_flight():
            return self._scheduler.schedule()
        assert self._flight is not None, "it is in flight"
        ended = [item for item, _ in self._ended]
        return SchedulerOutput(scheduled=(*ended, *(item for _, item in self._flight.rows)))

    def run(
        self, output: SchedulerOutput, *, may_go_on: Callable[[], bool]
    ) -> tuple[SchedulerOutput, list[SampledToken | None]]:
        """Finish the step of `schedule`, after launching the next if `may_go_on` agrees.

        Returns what is to be reported: the step without those that are reported later.
        """
        flight, ended = self._flight, self._ended
        self._flight, self._ended = None, []
        if flight is None:
            step = self._runner.launch(output.scheduled)
            if step is None:
                return output, [*self._runner.run(output.scheduled)]
            flight = _Flight(step, list(enumerate(output.scheduled)))
        following = self._launch_after(flight, len(ended)) if may_go_on() else None
        try:
            tokens = flight.step.read()
        except Exception:
            if following is not None:
                _wait_for(following)
            raise
        drawn = [*ended, *((item, tokens[row]) for row, item in flight.rows)]
        if following is not None:
            redone = flight.step.redone
            wrong = {item.sequence.id for row, item in flight.rows if row in redone}
            drawn = self._keep_apart(drawn, following, wrong=wrong)
        return (
            attrs.evolve(output, scheduled=tuple(item for item, _ in drawn)),
            [token for _, token in drawn],
        )

    def _launch_after(self, flight: _Flight, num_ended: int) -> _Flight | None:
        """Launch the step after one that is in flight; None where that cannot be."""
        scheduler = self._scheduler
        items = [item for _, item in flight.rows]
        if len(items) + num_ended < len(scheduler.running):
            return None  # others run, who have to be scheduled
        if not all([_decodes(item) and item.num_tokens == 1 for item in items]):
            return None
        limit = scheduler.config.max_model_len
        going = [row for row in flight.rows if not _is_at_its_limit(row[1].sequence, limit)]
        num_running = len(scheduler.running)
        if scheduler.waiting and (
            num_running < scheduler.config.max_num_seqs or len(going) < num_running
        ):
            return None  # there is a place, or there will be one
        if not going or not self._reserve([item.sequence for _, item in going]):
            return None
        try:
            step = self._runner.launch_after(flight.step, [row for row, _ in going])
        except Exception:  # an error that stays is met again by the step that is scheduled
            logger.warning("a step could not be launched ahead", exc_info=True)
            return None
        self.num_ahead += 1
        return _Flight(step, [(place, item) for place, (_, item) in enumerate(going)])

    def _reserve(self, sequences: Sequence[EngineSequence]) -> bool:
        """Give every sequence a block for the token after its last, or none of them."""
        pool = self._scheduler.pool
        missing = [pool.blocks_for(len(s) + 1) - len(s.blocks) for s in sequences]
        if sum(missing) > pool.num_free:
            return False
        for sequence, count in zip(sequences, missing, strict=True):
            if count > 0:
                sequence.blocks += pool.allocate(count)
        return True

    def _keep_apart(
        self,
        drawn: Sequence[tuple[Scheduled, SampledToken | None]],
        following: _Flight,
        *,
        wrong: Collection[int],
    ) -> list[tuple[Scheduled, SampledToken | None]]:
        """Let `following` be in flight without those it has nothing right for.

        Returns what can be reported before it is over.
        """
        takes_part = {item.sequence.id for _, item in following.rows}
        reported, gone = [], set(wrong)
        for item, token in drawn:
            sequence = item.sequence
            if sequence.id in takes_part and _ends(sequence, token):
                self._ended.append((item, token))
                gone.add(sequence.id)
            else:
                reported.append((item, token))
        following.rows = [row for row in following.rows if row[1].sequence.id not in gone]
        self._flight = following
        return reported


@attrs.define(eq=False)
class _Flight:
    """A step that was launched, and which of its rows are to be reported."""

    step: Launched
    rows: list[tuple[int, Scheduled]]


def _wait_for(flight: _Flight) -> None:
    """Let a step that is of no use be over: what it writes to can then be given away."""
    try:
        flight.step.read()
    except Exception:  # an error that stays is met again by the step that is scheduled next
        logger.warning("a step that was launched ahead for nothing failed", exc_info=True)


def _decodes(item: Scheduled) -> bool:
    return item.sequence.status is Status.DECODE


def _is_at_its_limit(sequence: EngineSequence, max_model_len: int) -> bool:
    """Whether the token that is being drawn is the last there is room for."""
    longest = min(sequence.prompt_len + sequence.request.max_tokens, max_model_len)
    return len(sequence) + 1 >= longest


def _ends(sequence: EngineSequence, token: SampledToken | None) -> bool:
    return token is not None and (
        token.error is not None or token.token_id in sequence.request.stop_ids
    )
