"""`Agent`: a model with tools of its own, which works on one message until it has an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Protocol, Self

import attrs

from mistralrs_sdk.answers.leaving import ClosedOnLeaving
from mistralrs_sdk.answers.stream import ChatStream
from mistralrs_sdk.chat.execution_options import ExecutionOptions
from mistralrs_sdk.chat.messages import TextMessageRole, text_message
from mistralrs_sdk.chat.requests import RequestBuilder, RequestLike, as_request
from mistralrs_sdk.chat.responses import Choice
from mistralrs_sdk.chat.tool_progress import AgenticToolCallProgress
from mistralrs_sdk.chat.tools import Tool, ToolCallResponse
from mistralrs_sdk.errors import InferenceError, QueueFullError, RequestError
from mistralrs_sdk.tools.agent_config import AgentConfig
from mistralrs_sdk.tools.agent_events import (
    AgentComplete,
    AgentEvent,
    AgentResponse,
    AgentStep,
    AgentStopReason,
    AgentTextDelta,
    AgentToolCallsComplete,
    AgentToolCallsStart,
    ToolResult,
)
from mistralrs_sdk.tools.execution import (
    CANCEL_GRACE,
    MAX_PARALLEL_CALLS,
    Approvals,
    RunningCalls,
    ToolOutcome,
)
from mistralrs_sdk.tools.loop import ToolLoopStream
from mistralrs_sdk.tools.rounds import calling_turn, continued
from mistralrs_sdk.tools.settings import ToolSettings
from mistralrs_sdk.tools.toolbox import Toolbox


class ChatModel(Protocol):
    """What an agent needs of a `Model`."""

    def stream_chat_request(self, request: RequestLike) -> Awaitable[ChatStream | ToolLoopStream]:
        """Answer once, in chunks."""
        ...


class Agent:
    """Asks a model, executes the calls it makes, and asks again, until it answers without calls.

    Made by `AgentBuilder(model).with_tool(function).build()`. Each run starts anew: what was said
    in an earlier one is only known if the request holds it. Runs may overlap.
    """

    def __init__(self, model: ChatModel, config: AgentConfig) -> None:
        self._model = model
        self._config = config
        self._toolbox = Toolbox(ToolSettings(callbacks=config.tools, timeout=config.tool_timeout))

    def model(self) -> ChatModel:
        """The model it asks."""
        return self._model

    def config(self) -> AgentConfig:
        """Its settings."""
        return self._config

    def tools(self) -> list[Tool]:
        """The tools it offers."""
        return [callback.offered for callback in self._config.tools]

    async def run(self, message: RequestLike) -> AgentResponse:
        """Work on a message (text, messages or a whole request) and return every step.

        A request's own tools are replaced by the agent's; its deadline is for the whole run. If it
        fails midway, or a later answer is refused, the response holds the steps so far and says so
        in `stop_reason`.

        Raises:
            RequestError, UnsupportedError, QueueFullError: the first request is refused.
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        async with self.run_stream(message) as stream:
            return await stream.collect()

    def run_stream(self, message: RequestLike) -> AgentStream:
        """As `run`, telling what happens: text as it comes, and calls with their results.

        Use it as a context manager, so that leaving early cancels what runs:
        `async with agent.run_stream("...") as events:`.

        Raises:
            RequestError, UnsupportedError: the message is at fault. Reading raises as `run`.
        """
        return AgentStream(self._work(self._request(message)))

    def _request(self, message: RequestLike) -> RequestBuilder:
        asked, config = as_request(message), self._config
        if asked.session_id is not None:
            raise RequestError(
                f"an agent keeps no session ({asked.session_id!r}): give it the messages so far"
            )
        messages = asked.messages
        if config.system_prompt is not None:
            messages = (text_message(TextMessageRole.SYSTEM, config.system_prompt), *messages)
        asked = attrs.evolve(
            asked,
            messages=messages,
            tools=tuple(self.tools()),
            tool_choice=config.tool_choice,
            # a callback of the model may have the name of one of these
            left_to_caller=frozenset(callback.name for callback in config.tools),
        )
        if config.enable_thinking is not None:
            asked = asked.enable_thinking(config.enable_thinking)
        if config.reasoning_effort is not None:
            asked = asked.with_reasoning_effort(config.reasoning_effort)
        return asked

    async def _work(self, asked: RequestBuilder) -> AsyncGenerator[AgentEvent, None]:
        loop, deadline = asyncio.get_running_loop(), None
        if asked.deadline is not None:
            deadline = loop.time() + asked.deadline
        steps: list[AgentStep] = []
        while len(steps) < self._config.max_iterations:
            try:
                stream = await self._model.stream_chat_request(asked)
                async with stream:
                    async for item in stream:
                        text = item.choices[0].delta.content
                        if text and not isinstance(item, AgenticToolCallProgress):
                            yield AgentTextDelta(text)
                    response = await stream.collect()
            except (InferenceError, RequestError, QueueFullError) as error:
                if not steps and not isinstance(error, InferenceError):
                    raise
                yield _complete(steps, AgentStopReason.error(str(error)))
                return
            choice = response.choices[0]
            calls = choice.message.tool_calls or ()
            if choice.finish_reason != "tool_calls" or not calls:
                steps.append(AgentStep(response=response))
                yield _complete(steps, _reason_of(choice))
                return
            yield AgentToolCallsStart(tuple(calls))
            running = self._execute(calls, asked, round=len(steps), deadline=deadline)
            try:
                while (event := await running.next_event()) is not None:
                    if isinstance(event, ToolOutcome):
                        yield ToolResult.of(event)
            finally:
                await running.aclose()
            results = tuple(ToolResult.of(outcome) for outcome in running.ended())
            steps.append(AgentStep(response=response, tool_calls=calls, tool_results=results))
            try:
                turn = calling_turn(choice, running.outcomes())
            except TimeoutError:
                reason = "the run failed: its deadline passed while tools ran"
                yield _complete(steps, AgentStopReason.error(reason))
                return
            yield AgentToolCallsComplete()
            left = None if deadline is None else deadline - loop.time()
            asked = continued(asked, turn, deadline=left)
        yield _complete(steps, AgentStopReason.MAX_ITERATIONS)

    def _execute(
        self,
        calls: tuple[ToolCallResponse, ...],
        asked: RequestBuilder,
        *,
        round: int,
        deadline: float | None,
    ) -> RunningCalls:
        # here is the caller, and code is run where the model answers
        asked = attrs.evolve(asked, left_to_caller=frozenset(), execution=ExecutionOptions())
        found = [(call, self._toolbox.find(call.function.name, asked)) for call in calls]
        return RunningCalls(
            [(call, executor) for call, executor in found if executor is not None],
            round=round,
            approvals=Approvals(asked.agent_permission, asked.agent_approval_callback),
            timeout=self._config.tool_timeout,
            deadline=deadline,
            max_parallel=MAX_PARALLEL_CALLS if self._config.parallel_tool_execution else 1,
        )


class AgentStream(ClosedOnLeaving):
    """What happens in one run of an agent: `async for event in stream`, `AgentComplete` last."""

    def __init__(self, events: AsyncGenerator[AgentEvent, None]) -> None:
        self._events = events
        self._next: asyncio.Task[AgentEvent | None] | None = None
        """What comes next, which goes on if who waits for it is cancelled."""
        self._closed = False
        self._response: AgentResponse | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AgentEvent:
        """Return the next event. Who is cancelled while waiting may come back.

        Raises:
            RequestError, EngineDeadError, EngineClosedError: as `Agent.run`.
        """
        if self._closed:
            raise StopAsyncIteration
        if self._next is None:
            self._next = asyncio.create_task(_next_event(self._events))
        coming = self._next
        await asyncio.wait([coming])
        if self._closed:
            raise StopAsyncIteration
        self._next = None
        event = coming.result()
        if event is None:
            raise StopAsyncIteration
        if isinstance(event, AgentComplete):
            self._response = event.response
        return event

    async def collect(self) -> AgentResponse:
        """Read to the end and return all steps.

        Raises:
            RuntimeError: the stream was closed before its end.
        """
        async for _ in self:
            pass
        if self._response is None:
            raise RuntimeError("the agent's stream was closed before its end: there is no response")
        return self._response

    async def aclose(self) -> None:
        """Abort the answer that runs, and cancel the tools."""
        self._closed = True
        coming, self._next = self._next, None
        if coming is not None:
            coming.cancel()
            await asyncio.wait([coming], timeout=2 * CANCEL_GRACE)  # the tools have theirs
        if coming is None or coming.done():
            await self._events.aclose()

    def __del__(self) -> None:
        coming = self._next
        if coming is not None and not coming.get_loop().is_closed():
            coming.get_loop().call_soon_threadsafe(coming.cancel)


async def _next_event(events: AsyncGenerator[AgentEvent, None]) -> AgentEvent | None:
    return await anext(events, None)


def _reason_of(choice: Choice) -> AgentStopReason:
    """Why the last answer was the last: it may have been cut instead of having said its all."""
    match choice.finish_reason:
        case "length":
            return AgentStopReason.LENGTH
        case "canceled":
            return AgentStopReason.CANCELED
        case _ if choice.message.content:
            return AgentStopReason.TEXT_RESPONSE
        case _:
            return AgentStopReason.NO_ACTION


def _complete(steps: list[AgentStep], reason: AgentStopReason) -> AgentComplete:
    said = steps[-1].response.choices[0].message.content if steps else None
    return AgentComplete(
        AgentResponse(
            steps=tuple(steps),
            final_response=said or None,
            iterations=len(steps),
            stop_reason=reason,
        )
    )
