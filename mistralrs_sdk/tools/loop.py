"""The loop of calls and answers: rounds of one request, until the model answers without calling."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Self

import attrs

from mistralrs_sdk.answers.leaving import ClosedOnLeaving
from mistralrs_sdk.answers.stream import ChatStream
from mistralrs_sdk.chat.messages import Message
from mistralrs_sdk.chat.requests import RequestBuilder
from mistralrs_sdk.chat.responses import ChatCompletionResponse, Usage
from mistralrs_sdk.chat.tool_events import AgenticToolCallRecord
from mistralrs_sdk.errors import (
    DeadlineError,
    EngineClosedError,
    InferenceError,
    QueueFullError,
    RequestError,
)
from mistralrs_sdk.tools.execution import CANCEL_GRACE, RunningCalls, ToolOutcome
from mistralrs_sdk.tools.joined_chunks import JoinedChunks, StreamItem
from mistralrs_sdk.tools.rounds import (
    calling_turn,
    continued,
    ended_by,
    joined,
    progress,
    require_one_choice,
    sum_of,
    with_calls,
)
from mistralrs_sdk.tools.sessions import SessionLease
from mistralrs_sdk.tools.toolbox import Toolbox, approvals_of

MAX_TOOL_ROUNDS = 256
"""Rounds of calls if the request sets no limit."""

StreamRound = Callable[[RequestBuilder], Awaitable[ChatStream]]


async def open_stream(
    stream_round: StreamRound, asked: RequestBuilder, toolbox: Toolbox
) -> ChatStream | ToolLoopStream:
    """Answer a request, in as many rounds as its tools take and with its session's turns.

    `stream_round` answers once. A request without session whose calls nothing here executes is
    just that.

    Raises:
        RequestError: several choices are asked for where rounds or a session need one; the session
            is working on another request; approval is needed and nobody can be asked.
    """
    asked = toolbox.offer(asked)
    executes = toolbox.executes(asked)
    if asked.session_id is None and not executes:
        return await stream_round(asked)
    require_one_choice(asked, executes)
    if executes:
        toolbox.require_somebody_to_ask(asked)
    lease = None if asked.session_id is None else toolbox.sessions.lease(asked.session_id)
    try:
        if lease is not None:
            asked = attrs.evolve(asked, messages=joined(lease.messages, asked.messages))
        return ToolLoopStream(
            await stream_round(asked),
            asked,
            stream_round=stream_round,
            toolbox=toolbox,
            lease=lease,
        )
    except BaseException:
        if lease is not None:
            lease.release()
        raise


class ToolLoopStream(ClosedOnLeaving):
    """The chunks of all rounds of one request, and between them what its tools do.

    Like a `ChatStream`: iterate it, `collect()` it, use it as a context manager. Leaving early
    aborts the answer and cancels callbacks that run. Calls that are executed here appear as
    `AgenticToolCallProgress` instead of in chunks; only the last chunk has a `finish_reason`, and
    the usage of all rounds. Calls that nothing here executes end the answer and are in it.
    """

    def __init__(
        self,
        first: ChatStream,
        asked: RequestBuilder,
        *,
        stream_round: StreamRound,
        toolbox: Toolbox,
        lease: SessionLease | None,
    ) -> None:
        self.id = first.id
        """The id of every chunk and of the response: `model.abort(id)` ends it from anywhere."""
        self._loop = asyncio.get_running_loop()
        self._deadline = None if asked.deadline is None else self._loop.time() + asked.deadline
        self._stream = first
        self._asked = asked
        self._stream_round = stream_round
        self._toolbox = toolbox
        self._lease = lease
        self._executes = toolbox.executes(asked)
        self._approvals = approvals_of(asked)
        if lease is not None:
            self._approvals.remembered = lease.approved
        self._round = 0
        self._usages: list[Usage] = []
        self._records: list[AgenticToolCallRecord] = []
        self._chunks = JoinedChunks(self.id, is_hidden=self._hidden())
        self._running: RunningCalls | None = None
        self._opening: asyncio.Task[ChatStream] | None = None
        """The next round, while it waits for its place in the engine."""
        self._in_question: ChatCompletionResponse | None = None
        """The answer whose calls are executed, until the next round begins."""
        self._answer: ChatCompletionResponse | None = None
        self._is_read = False
        self._aborted = False
        self._closed = False
        self._ended = False
        toolbox.running[self.id] = self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamItem:
        """Return the next chunk or event.

        Raises:
            InferenceError: a round failed, or a later one was refused; `partial_response` holds
                what the last round had, and the calls that were executed.
            EngineDeadError, EngineClosedError: there is no engine any more.
            RuntimeError: another task is reading.
        """
        while not self._chunks.ready:
            if self._ended:
                raise StopAsyncIteration
            await self._advance()
        return self._chunks.ready.popleft()

    async def collect(self) -> ChatCompletionResponse:
        """Read to the end and return the last round's answer, with the calls and usage of all.

        Raises:
            InferenceError, EngineDeadError, EngineClosedError: as iterating does.
        """
        while not self._ended:
            await self._advance()
        self._chunks.ready.clear()
        return self._answer or self._complete(await self._stream.collect())

    async def aclose(self) -> None:
        """Abort the answer and cancel the callbacks that run."""
        self._chunks.ready.clear()
        running, self._running = self._running, None
        opening, self._opening = self._opening, None
        if running is not None:
            self._record(running)
        if self._in_question is not None and self._answer is None:
            self._answer = self._complete(ended_by(self._in_question, "canceled"))
        self._end()
        await self._stream.aclose()
        if running is not None:
            await running.aclose()
        if opening is not None:
            await _discard(opening)
        await self._toolbox.workspaces.ended()

    def abort(self) -> str:
        """End it; returns the id of the current round, to be aborted in the engine."""
        self._aborted = True
        self._interrupt()
        return self._stream.id

    def cancel_tools(self) -> None:
        """Stop running tools, as the model is closed: the stream then fails."""
        self._closed = True
        self._interrupt()

    def __del__(self) -> None:
        if not self._ended and not self._loop.is_closed():
            running, opening, lease = self._running, self._opening, self._lease
            if running is not None:
                self._loop.call_soon_threadsafe(running.interrupt)
            if opening is not None:
                self._loop.call_soon_threadsafe(opening.cancel)
            if lease is not None:
                self._loop.call_soon_threadsafe(lease.release)
            end, id = self._toolbox.workspaces.end_request, self.id
            self._loop.call_soon_threadsafe(end, id)

    # Inside

    async def _advance(self) -> None:
        """Wait for what comes next and make it ready, or end. Who stops waiting may come back."""
        if self._is_read:
            raise RuntimeError("two tasks read one stream: let one read it and share what comes")
        self._is_read = True
        try:
            if self._running is not None:
                await self._follow(self._running)
            elif self._opening is not None:
                await self._begin_round(self._opening)
            else:
                await self._read()
        finally:
            self._is_read = False

    async def _read(self) -> None:
        try:
            chunk = await anext(self._stream, None)
            response = await self._stream.collect() if chunk is None else None
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._end()
            if isinstance(error, InferenceError) and error.partial_response is not None:
                self._usages.append(error.partial_response.usage)
                error.partial_response = self._complete(error.partial_response)
            raise
        if chunk is not None:
            self._chunks.show(chunk)
        elif response is not None and not self._ended:
            self._end_round(response)

    def _end_round(self, response: ChatCompletionResponse) -> None:
        """Execute the calls of a finished round, or end with its answer."""
        self._usages.append(response.usage)
        choice = response.choices[0]
        calls = choice.message.tool_calls or ()
        found = [(call, self._toolbox.find(call.function.name, self._asked)) for call in calls]
        ours = [(call, executor) for call, executor in found if executor is not None]
        if not self._executes or choice.finish_reason != "tool_calls" or not ours or self._aborted:
            self._chunks.show_hidden(response)
            self._finish(response)
            return
        self._check_open()
        self._chunks.show_last()
        self._in_question = response
        self._running = RunningCalls(
            ours,
            round=self._round,
            session_id=None if self._lease is None else self._lease.id,
            request_id=self.id,
            approvals=self._approvals,
            timeout=self._toolbox.settings.timeout,
            deadline=self._deadline,
        )

    def _interrupt(self) -> None:
        """Cancel what runs between two answers, without waiting for what does not heed it."""
        if self._running is not None:
            self._running.interrupt()
        if self._opening is not None:
            self._opening.cancel()

    async def _follow(self, running: RunningCalls) -> None:
        """Tell what tools do; give their results to the model, or what is left to the caller."""
        event = await running.next_event()
        if event is not None:
            self._chunks.ready.append(progress(event, self._round))
            return
        if self._running is None:  # closed meanwhile
            return
        response, self._running = self._in_question, None
        assert response is not None
        self._record(running)
        if self._aborted:
            self._finish(ended_by(response, "canceled"))
            return
        self._check_open()
        outcomes = self._outcomes(running, response)
        choice = response.choices[0]
        turn = calling_turn(choice, outcomes)
        executed = {outcome.call.id for outcome in outcomes}
        left = [call for call in choice.message.tool_calls or () if call.id not in executed]
        if left:
            self._finish(with_calls(response, left), turn)
            return
        self._round += 1
        limit, deadline = self._asked.max_tool_rounds, self._deadline
        self._asked = continued(
            self._asked,
            turn,
            must_answer=self._round >= (MAX_TOOL_ROUNDS if limit is None else limit),
            deadline=None if deadline is None else deadline - self._loop.time(),
        )
        self._opening = self._loop.create_task(_open(self._stream_round, self._asked))

    def _outcomes(self, ended: RunningCalls, response: ChatCompletionResponse) -> list[ToolOutcome]:
        try:
            return ended.outcomes()
        except TimeoutError:
            self._end()
            raise DeadlineError(
                "the request failed: its deadline passed while tools ran",
                partial_response=self._complete(ended_by(response, "error")),
            ) from None
        except BaseException:
            self._end()
            raise

    async def _begin_round(self, opening: asyncio.Task[ChatStream]) -> None:
        """Wait until the next round has its place in the engine."""
        await asyncio.wait([opening])
        if self._opening is None:  # closed meanwhile
            return
        response, self._opening = self._in_question, None
        assert response is not None
        if self._aborted:
            self._finish(ended_by(response, "canceled"))
            await _discard(opening)
            return
        self._check_open()
        try:
            self._stream = opening.result()
        except (RequestError, QueueFullError) as error:  # tools have run: it did begin
            self._end()
            raise InferenceError(
                f"the request failed: its round {self._round + 1} was refused: {error}",
                partial_response=self._complete(ended_by(response, "error")),
            ) from error
        except BaseException:
            self._end()
            raise
        self._in_question = None
        self._chunks.begin_round(self._hidden())

    def _record(self, running: RunningCalls) -> None:
        self._records += [outcome.record(self._round) for outcome in running.ended()]

    def _check_open(self) -> None:
        if self._closed:
            self._end()
            raise EngineClosedError("the model was closed while tools ran")

    def _finish(
        self, response: ChatCompletionResponse, turn: Iterable[Message] | None = None
    ) -> None:
        """End with this answer; `turn` is what a session keeps of it, None: its message."""
        choice = response.choices[0]
        if self._lease is not None and choice.finish_reason not in ("canceled", "error"):
            turn = calling_turn(choice, ()) if turn is None else turn
            self._lease.commit((*self._asked.messages, *turn))
        self._answer = self._complete(response)
        self._chunks.end(self._answer)
        self._end()

    def _complete(self, response: ChatCompletionResponse) -> ChatCompletionResponse:
        """One round's response as that of all rounds."""
        return attrs.evolve(
            response,
            id=self.id,
            usage=sum_of(self._usages or [response.usage]),
            agentic_tool_calls=tuple(self._records) if self._executes else None,
            session_id=None if self._lease is None else self._lease.id,
        )

    def _end(self) -> None:
        self._ended = True
        self._toolbox.running.pop(self.id, None)
        self._toolbox.workspaces.end_request(self.id)
        if self._lease is not None:
            self._lease.release()

    def _hidden(self) -> Callable[[str], bool]:
        """Tells which tools' calls chunks do not show; it must not keep the stream alive."""
        if not self._executes:
            return lambda name: False
        toolbox, asked = self._toolbox, self._asked
        return lambda name: toolbox.find(name, asked) is not None


async def _open(stream_round: StreamRound, asked: RequestBuilder) -> ChatStream:
    return await stream_round(asked)


async def _discard(opening: asyncio.Task[ChatStream]) -> None:
    """Let go of a round that nobody wants any more, however far it has come."""
    opening.cancel()
    await asyncio.wait([opening], timeout=CANCEL_GRACE)
    if opening.done() and not opening.cancelled() and opening.exception() is None:
        await opening.result().aclose()
