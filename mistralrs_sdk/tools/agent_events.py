"""What an agent's run tells while it goes on, and what it leaves."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs

from mistralrs_sdk.chat.responses import ChatCompletionResponse
from mistralrs_sdk.chat.tools import ToolCallResponse
from mistralrs_sdk.tools.execution import ToolOutcome


@attrs.frozen
class AgentStopReason:
    """Why a run ended."""

    kind: Literal["text_response", "max_iterations", "no_action", "length", "canceled", "error"]
    message: str | None = None
    """What went wrong, for an error."""

    TEXT_RESPONSE: ClassVar[AgentStopReason]
    LENGTH: ClassVar[AgentStopReason]
    """The last answer was cut at the most tokens, or at the end of the context."""
    CANCELED: ClassVar[AgentStopReason]
    """The last answer was aborted."""
    MAX_ITERATIONS: ClassVar[AgentStopReason]
    NO_ACTION: ClassVar[AgentStopReason]

    @classmethod
    def error(cls, message: str) -> AgentStopReason:
        """An answer failed midway."""
        return cls("error", message)


AgentStopReason.TEXT_RESPONSE = AgentStopReason("text_response")
AgentStopReason.LENGTH = AgentStopReason("length")
AgentStopReason.CANCELED = AgentStopReason("canceled")
AgentStopReason.MAX_ITERATIONS = AgentStopReason("max_iterations")
AgentStopReason.NO_ACTION = AgentStopReason("no_action")


class AgentEvent:
    """Something that happens in a run; each kind is a class of its own."""

    __slots__ = ()


@attrs.frozen
class AgentTextDelta(AgentEvent):
    """A piece of text; that of rounds with calls too."""

    text: str


@attrs.frozen
class AgentToolCallsStart(AgentEvent):
    """The model called these tools; they are executed now."""

    tool_calls: tuple[ToolCallResponse, ...]


@attrs.frozen(kw_only=True)
class ToolResult(AgentEvent):
    """What one call gave; as an event it comes as soon as it is there."""

    tool_call_id: str
    tool_name: str
    result: str | None = None
    """None if there is none; then there is an error."""
    error: str | None = None
    """Why there is no result; the model reads it after `Error: `."""

    @classmethod
    def of(cls, outcome: ToolOutcome) -> ToolResult:
        """The result of a call that was executed."""
        return cls(
            tool_call_id=outcome.call.id,
            tool_name=outcome.call.function.name,
            result=outcome.result if outcome.error is None else None,
            error=outcome.error,
        )


@attrs.frozen
class AgentToolCallsComplete(AgentEvent):
    """All calls of the round have their results."""


@attrs.frozen(kw_only=True)
class AgentStep:
    """One answer of the model with what its calls gave."""

    response: ChatCompletionResponse
    tool_calls: tuple[ToolCallResponse, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    """In the order of the calls."""


@attrs.frozen(kw_only=True)
class AgentResponse:
    """All steps of a run."""

    steps: tuple[AgentStep, ...]
    final_response: str | None
    """What the model said last; None if that was nothing."""
    iterations: int
    """Answers of the model, those with calls and the last one."""
    stop_reason: AgentStopReason


@attrs.frozen
class AgentComplete(AgentEvent):
    """The run is over."""

    response: AgentResponse
