"""`Agent`: a model with tools of its own, which works on one message until it has an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from types import TracebackType
from typing import Protocol, Self

import attrs

from mistralrs_sdk.answers.stream import ChatStream
from mistralrs_sdk.chat.messages import TextMessageRole, text_message
from mistralrs_sdk.chat.requests import RequestBuilder, RequestLike, as_request
from mistralrs_sdk.chat.responses import ChatCompletionResponse
from mistralrs_sdk.chat.tool_progress import AgenticToolCallProgress
from mistralrs_sdk.chat.tools import Tool, ToolCallResponse, ToolChoice
from mistralrs_sdk.errors import InferenceError, RequestError
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
from mistralrs_sdk.tools.execution import MAX_PARALLEL_CALLS, Approvals, ToolOutcome, run_calls
from mistralrs_sdk.tools.loop import CANCEL_GRACE, ToolLoopStream
from mistralrs_sdk.tools.rounds import calling_turn
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

        A request's own tools are replaced by the agent's. If an answer fails midway, the response
        holds the steps so far and says so in `stop_reason`.

        Raises:
            RequestError: the first request is at fault.
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        async with self.run_stream(message) as stream:
            return await stream.collect()

    def run_stream(self, message: RequestLike) -> AgentStream:
        """As `run`, telling what happens: text as it comes, and calls with their results.

        Use it as a context manager, so that leaving early cancels what runs:
        `async with agent.run_stream("...") as events:`.
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
            asked, messages=messages, tools=tuple(self.tools()), tool_choice=config.tool_choice
        )
        if config.enable_thinking is not None:
            asked = asked.enable_thinking(config.enable_thinking)
        if config.reasoning_effort is not None:
            asked = asked.with_reasoning_effort(config.reasoning_effort)
        return asked

    async def _work(self, asked: RequestBuilder) -> AsyncGenerator[AgentEvent, None]:
        steps: list[AgentStep] = []

        def complete(reason: AgentStopReason) -> AgentComplete:
            said = steps[-1].response.choices[0].message.content if steps else None
            return AgentComplete(
                AgentResponse(
                    steps=tuple(steps),
                    final_response=said or None,
                    iterations=len(steps),
                    stop_reason=reason,
                )
            )

        while len(steps) < self._config.max_iterations:
            try:
                stream = await self._model.stream_chat_request(asked)
                async with stream:
                    async for item in stream:
                        text = item.choices[0].delta.content
                        if text and not isinstance(item, AgenticToolCallProgress):
                            yield AgentTextDelta(text)
                    response = await stream.collect()
            except InferenceError as error:
                yield complete(AgentStopReason.error(str(error)))
                return
            choice = response.choices[0]
            calls = choice.message.tool_calls or ()
            if choice.finish_reason != "tool_calls" or not calls:
                steps.append(AgentStep(response=response))
                answered = bool(choice.message.content)
                yield complete(
                    AgentStopReason.TEXT_RESPONSE if answered else AgentStopReason.NO_ACTION
                )
                return
            yield AgentToolCallsStart(tuple(calls))
            outcomes: list[ToolOutcome] = []
            async with aclosing(self._execute(calls, asked, round=len(steps))) as executed:
                async for outcome in executed:
                    outcomes.append(outcome)
                    yield ToolResult.of(outcome)
            outcomes.sort(key=lambda outcome: outcome.call.index)
            results = tuple(ToolResult.of(outcome) for outcome in outcomes)
            steps.append(AgentStep(response=response, tool_calls=calls, tool_results=results))
            yield AgentToolCallsComplete()
            asked = _continued(asked, response, outcomes)
        yield complete(AgentStopReason.MAX_ITERATIONS)

    async def _execute(
        self, calls: tuple[ToolCallResponse, ...], asked: RequestBuilder, *, round: int
    ) -> AsyncGenerator[ToolOutcome, None]:
        """Outcomes as they come."""
        events: asyncio.Queue[ToolCallResponse | ToolOutcome | None] = asyncio.Queue()
        found = [(call, self._toolbox.find(call.function.name, asked)) for call in calls]
        task = asyncio.create_task(
            run_calls(
                [(call, executor) for call, executor in found if executor is not None],
                round=round,
                approvals=Approvals(asked.agent_permission, asked.agent_approval_callback),
                timeout=self._config.tool_timeout,
                emit=events.put_nowait,
                max_parallel=MAX_PARALLEL_CALLS if self._config.parallel_tool_execution else 1,
            )
        )
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, ToolOutcome):
                    yield event
            await task
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_GRACE)


class AgentStream:
    """What happens in one run of an agent: `async for event in stream`, `AgentComplete` last."""

    def __init__(self, events: AsyncGenerator[AgentEvent, None]) -> None:
        self._events = events
        self._response: AgentResponse | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AgentEvent:
        """Return the next event.

        Raises:
            RequestError, EngineDeadError, EngineClosedError: as `Agent.run`.
        """
        event = await anext(self._events)
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
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def _continued(
    asked: RequestBuilder, response: ChatCompletionResponse, outcomes: list[ToolOutcome]
) -> RequestBuilder:
    """The request after a round of calls; a call that was required was made."""
    choice = asked.tool_choice
    if choice.mode == "required":
        choice = ToolChoice("auto", choice.allowed)
    turn = calling_turn(response.choices[0], outcomes)
    return attrs.evolve(asked, messages=(*asked.messages, *turn), tool_choice=choice)
