"""The loop of calls and answers: rounds of one request, until the model answers without calling."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self

import attrs

from mistralrs_sdk.answers.stream import ChatStream
from mistralrs_sdk.chat.messages import Message
from mistralrs_sdk.chat.requests import RequestBuilder
from mistralrs_sdk.chat.responses import (
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    Usage,
)
from mistralrs_sdk.chat.tool_events import AgenticToolCallRecord
from mistralrs_sdk.chat.tool_progress import AgenticToolCallProgress
from mistralrs_sdk.chat.tools import ToolCallResponse, ToolChoice
from mistralrs_sdk.errors import EngineClosedError, InferenceError, RequestError
from mistralrs_sdk.tools.execution import Approvals, ToolOutcome, run_calls
from mistralrs_sdk.tools.rounds import (
    CallFilter,
    calling_turn,
    ended_by,
    joined,
    only_end,
    progress,
    require_one_choice,
    says_something,
    sum_of,
    with_calls,
    without_end,
)
from mistralrs_sdk.tools.sessions import SessionLease
from mistralrs_sdk.tools.toolbox import Toolbox

MAX_TOOL_ROUNDS = 256
"""Rounds of calls if the request sets no limit."""
CANCEL_GRACE = 1.0
"""Seconds that cancelled callbacks have to clean up before nobody waits for them any more."""

StreamRound = Callable[[RequestBuilder], Awaitable[ChatStream]]
StreamItem = ChatCompletionChunkResponse | AgenticToolCallProgress
"""What a stream gives: chunks of answers, and between them what tools do."""


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
    if executes and asked.agent_permission == "ask" and asked.agent_approval_callback is None:
        raise RequestError(
            'agent_permission "ask" needs somebody to ask: add with_agent_approval_callback'
        )
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


class ToolLoopStream:
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
        self._approvals = Approvals(asked.agent_permission, asked.agent_approval_callback)
        if lease is not None:
            self._approvals.remembered = lease.approved
        self._round = 0
        self._usages: list[Usage] = []
        self._records: list[AgenticToolCallRecord] = []
        self._ready: deque[StreamItem] = deque()
        self._last_chunk: ChatCompletionChunkResponse | None = None
        self._calls = CallFilter(self._hidden())
        self._events: asyncio.Queue[ToolCallResponse | ToolOutcome | None] = asyncio.Queue()
        self._running: asyncio.Task[list[ToolOutcome]] | None = None
        self._in_question: ChatCompletionResponse | None = None
        self._answer: ChatCompletionResponse | None = None
        self._aborted = False
        self._ended = False
        toolbox.running[self.id] = self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamItem:
        """Return the next chunk or event.

        Raises:
            InferenceError: a round failed; `partial_response` holds what that round had.
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            await self._advance()
        return self._ready.popleft()

    async def collect(self) -> ChatCompletionResponse:
        """Read to the end and return the last round's answer, with the calls and usage of all.

        Raises:
            InferenceError: as iterating does.
        """
        while not self._ended:
            await self._advance()
        self._ready.clear()
        return self._answer or self._complete(await self._stream.collect())

    async def aclose(self) -> None:
        """Abort the answer and cancel the callbacks that run."""
        self._ready.clear()
        running, self._running = self._running, None
        self._end()
        await self._stream.aclose()
        if running is not None:
            running.cancel()
            await asyncio.wait([running], timeout=CANCEL_GRACE)

    def abort(self) -> str:
        """End it; returns the id of the current round, to be aborted in the engine."""
        self._aborted = True
        self.cancel_tools()
        return self._stream.id

    def cancel_tools(self) -> None:
        """Stop running tools: without `abort` the stream then fails, as the model was closed."""
        if self._running is not None:
            self._running.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._ended and not self._loop.is_closed():
            running, lease = self._running, self._lease
            if running is not None:
                self._loop.call_soon_threadsafe(running.cancel)
            if lease is not None:
                self._loop.call_soon_threadsafe(lease.release)

    # Inside

    async def _advance(self) -> None:
        """Wait for what comes next and make it ready, or end."""
        if self._running is not None:
            event = await self._events.get()
            if event is not None:
                self._ready.append(progress(event, self._round))
            elif self._running is not None:  # else it was closed meanwhile
                await self._go_on(self._running)
            return
        try:
            chunk = await anext(self._stream, None)
            response = await self._stream.collect() if chunk is None else None
        except asyncio.CancelledError:
            raise  # whoever waits may come back
        except BaseException as error:
            self._end()
            if isinstance(error, InferenceError) and error.partial_response is not None:
                self._usages.append(error.partial_response.usage)
                error.partial_response = self._complete(error.partial_response)
            raise
        if chunk is not None:
            self._show(chunk)
        elif response is not None and not self._ended:
            self._end_round(response)

    def _show(self, chunk: ChatCompletionChunkResponse) -> None:
        """Pass a chunk on, without what only the end can tell and without calls executed here."""
        choice = chunk.choices[0]
        delta = attrs.evolve(choice.delta, tool_calls=self._calls.shown(choice.delta.tool_calls))
        chunk = attrs.evolve(
            chunk, id=self.id, choices=(attrs.evolve(choice, delta=delta),), usage=None
        )
        if choice.finish_reason is not None:
            self._last_chunk = chunk
        elif says_something(chunk):
            self._ready.append(chunk)

    def _end_round(self, response: ChatCompletionResponse) -> None:
        """Execute the calls of a finished round, or end with its answer."""
        self._usages.append(response.usage)
        choice = response.choices[0]
        calls = choice.message.tool_calls or ()
        found = [(call, self._toolbox.find(call.function.name, self._asked)) for call in calls]
        ours = [(call, executor) for call, executor in found if executor is not None]
        if not self._executes or choice.finish_reason != "tool_calls" or not ours or self._aborted:
            self._show_rest()
            self._finish(response)
            return
        if self._last_chunk is not None and says_something(self._last_chunk):
            self._ready.append(without_end(self._last_chunk))
        self._in_question = response
        run = run_calls(
            ours,
            round=self._round,
            session_id=None if self._lease is None else self._lease.id,
            approvals=self._approvals,
            timeout=self._toolbox.settings.timeout,
            emit=self._events.put_nowait,
        )
        self._running = self._loop.create_task(_until(run, self._deadline))
        wake = functools.partial(self._events.put_nowait, None)
        self._running.add_done_callback(lambda _: wake())

    def _show_rest(self) -> None:
        """Show calls that were kept back to be executed and are not."""
        rest, last = self._calls.rest(), self._last_chunk
        if rest is not None and last is not None:
            choice = last.choices[0]
            delta = attrs.evolve(choice.delta, tool_calls=(choice.delta.tool_calls or ()) + rest)
            self._last_chunk = attrs.evolve(last, choices=(attrs.evolve(choice, delta=delta),))

    async def _go_on(self, done: asyncio.Task[list[ToolOutcome]]) -> None:
        """Give the results to the model, or the calls that are left to the caller."""
        response, self._in_question, self._running = self._in_question, None, None
        assert response is not None
        self._last_chunk = None if self._last_chunk is None else only_end(self._last_chunk)
        if self._aborted:
            self._finish(ended_by(response, "canceled"))
            return
        outcomes = self._outcomes(done, response)
        self._records += [outcome.record(self._round) for outcome in outcomes]
        choice = response.choices[0]
        turn = calling_turn(choice, outcomes)
        executed = {outcome.call.id for outcome in outcomes}
        left = [call for call in choice.message.tool_calls or () if call.id not in executed]
        if left:
            self._finish(with_calls(response, left), turn)
            return
        self._round += 1
        self._asked = self._next_request(turn)
        try:
            stream = await self._stream_round(self._asked)
        except BaseException:
            self._end()
            raise
        if self._ended or self._aborted:  # while the next round was being opened
            await stream.aclose()
            self._finish(ended_by(response, "canceled"))
            return
        self._stream = stream
        self._calls = CallFilter(self._hidden())
        self._last_chunk = None

    def _outcomes(
        self, done: asyncio.Task[list[ToolOutcome]], response: ChatCompletionResponse
    ) -> list[ToolOutcome]:
        try:
            return done.result()
        except asyncio.CancelledError:
            self._end()
            raise EngineClosedError("the model was closed while tools ran") from None
        except TimeoutError:
            self._end()
            raise InferenceError(
                "the request failed: its deadline passed while tools ran",
                partial_response=self._complete(ended_by(response, "error")),
            ) from None

    def _next_request(self, turn: Iterable[Message]) -> RequestBuilder:
        choice = self._asked.tool_choice
        if choice.mode == "required":  # it was called; now the model decides
            choice = ToolChoice("auto", choice.allowed)
        limit = self._asked.max_tool_rounds
        if self._round >= (MAX_TOOL_ROUNDS if limit is None else limit):
            choice = ToolChoice.NONE  # an answer must come
        deadline = self._deadline
        return attrs.evolve(
            self._asked,
            messages=(*self._asked.messages, *turn),
            tool_choice=choice,
            deadline=None if deadline is None else max(deadline - self._loop.time(), 1e-3),
        )

    def _finish(
        self, response: ChatCompletionResponse, turn: Iterable[Message] | None = None
    ) -> None:
        """End with this answer; `turn` is what a session keeps of it, None: its message."""
        choice = response.choices[0]
        if self._lease is not None and choice.finish_reason not in ("canceled", "error"):
            turn = calling_turn(choice, ()) if turn is None else turn
            self._lease.commit((*self._asked.messages, *turn))
        self._answer = self._complete(response)
        last = self._last_chunk
        if last is not None:
            ending = attrs.evolve(
                last.choices[0],
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            self._ready.append(
                attrs.evolve(
                    last,
                    choices=(ending,),
                    usage=self._answer.usage,
                    session_id=self._answer.session_id,
                )
            )
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
        if self._lease is not None:
            self._lease.release()

    def _hidden(self) -> Callable[[str], bool]:
        """Tells which tools' calls chunks do not show; it must not keep the stream alive."""
        if not self._executes:
            return lambda name: False
        toolbox, asked = self._toolbox, self._asked
        return lambda name: toolbox.find(name, asked) is not None


async def _until(run: Awaitable[list[ToolOutcome]], deadline: float | None) -> list[ToolOutcome]:
    async with asyncio.timeout_at(deadline):
        return await run
