"""How the request and the answer of one round become part of those in rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from mistralrs_sdk.chat.messages import Message
from mistralrs_sdk.chat.requests import RequestBuilder
from mistralrs_sdk.chat.responses import ChatCompletionResponse, Choice, Usage
from mistralrs_sdk.chat.tool_progress import AgenticToolCallProgress
from mistralrs_sdk.chat.tools import ToolCallResponse, ToolChoice
from mistralrs_sdk.errors import RequestError
from mistralrs_sdk.tools.execution import ToolOutcome


class CallFilter:
    """Takes the calls that are executed here out of one round's chunks."""

    def __init__(self, is_hidden: Callable[[str], bool]) -> None:
        self._is_hidden = is_hidden
        self._places: dict[int, int] = {}
        """Of each call that was shown, its index in the round, and for the caller."""

    def shown(
        self, calls: tuple[ToolCallResponse, ...] | None
    ) -> tuple[ToolCallResponse, ...] | None:
        """The calls for the caller, or pieces of them, numbered anew; None if there are none."""
        given = [call for call in calls or () if not self._is_hidden(call.function.name)]
        places = [self._places.setdefault(call.index, len(self._places)) for call in given]
        return tuple(map(_placed, given, places)) or None

    def withdrawn(self, indices: tuple[int, ...]) -> tuple[int, ...]:
        """Those that the caller has seen of calls that are none."""
        return tuple(self._places[index] for index in indices if index in self._places)

    def rest(
        self, calls: tuple[ToolCallResponse, ...] | None
    ) -> tuple[ToolCallResponse, ...] | None:
        """Those of a round's whole calls that were kept back, as nothing executes them."""
        hidden = [call for call in calls or () if self._is_hidden(call.function.name)]
        return numbered(hidden, start=len(self._places)) or None


def require_one_choice(asked: RequestBuilder, executes: bool) -> None:
    """Refuse several choices where only one can go on.

    Raises:
        RequestError: it asks for more, and calls are executed or a session keeps the answer.
    """
    choices = asked.sampling_params.n_choices
    if choices == 1:
        return
    if executes:
        raise RequestError(
            f"n_choices ({choices}) must be 1 where calls are executed: ask for one choice, or "
            "leave the calls to you with with_max_tool_rounds(0)"
        )
    raise RequestError(
        f"n_choices ({choices}) must be 1 in a session, which keeps one answer: ask for one choice"
    )


def joined(kept: tuple[Message, ...], new: tuple[Message, ...]) -> tuple[Message, ...]:
    """A session's turns and then a request's, which may repeat the system message."""
    if kept and new and new[0]["role"] == "system" and dict(new[0]) == dict(kept[0]):
        new = new[1:]
    return (*kept, *new)


def calling_turn(choice: Choice, outcomes: Iterable[ToolOutcome]) -> list[Message]:
    """The messages that an answer and the results of its calls leave behind."""
    message = choice.message
    said: dict[str, Any] = {"role": "assistant", "content": message.content or ""}
    if message.reasoning_content:
        said["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        said["tool_calls"] = [call.to_dict() for call in message.tool_calls]
    results = [
        {"role": "tool", "content": outcome.content, "tool_call_id": outcome.call.id}
        for outcome in outcomes
    ]
    return [said, *results]


def continued(
    asked: RequestBuilder,
    turn: Iterable[Message],
    *,
    must_answer: bool = False,
    deadline: float | None = None,
) -> RequestBuilder:
    """The request for the round after this turn, `deadline` seconds of its time being left.

    A call that was required was made: now the model decides. Or it `must_answer` without a call.
    """
    choice = asked.tool_choice
    if must_answer:
        choice = ToolChoice.NONE
    elif choice.mode == "required":
        choice = ToolChoice("auto", choice.allowed)
    return attrs.evolve(
        asked,
        messages=(*asked.messages, *turn),
        tool_choice=choice,
        deadline=None if deadline is None else max(deadline, 1e-3),
    )


def progress(event: ToolCallResponse | ToolOutcome, round: int) -> AgenticToolCallProgress:
    """What a stream shows of a call that begins or has ended."""
    call = event.call if isinstance(event, ToolOutcome) else event
    return AgenticToolCallProgress(
        round=round,
        tool_call_id=call.id,
        tool_name=call.function.name,
        phase="complete" if isinstance(event, ToolOutcome) else "calling",
        error=event.error if isinstance(event, ToolOutcome) else None,
    )


def numbered(calls: Iterable[ToolCallResponse], *, start: int = 0) -> tuple[ToolCallResponse, ...]:
    """Calls with their places counted anew."""
    return tuple(_placed(call, n) for n, call in enumerate(calls, start=start))


def _placed(call: ToolCallResponse, index: int) -> ToolCallResponse:
    return attrs.evolve(call, index=index)


def with_calls(
    response: ChatCompletionResponse, calls: Iterable[ToolCallResponse]
) -> ChatCompletionResponse:
    """A response that calls only these."""
    choice = response.choices[0]
    message = attrs.evolve(choice.message, tool_calls=numbered(calls))
    return attrs.evolve(response, choices=(attrs.evolve(choice, message=message),))


def ended_by(response: ChatCompletionResponse, finish_reason: str) -> ChatCompletionResponse:
    """A response that ended for this reason."""
    choice = attrs.evolve(response.choices[0], finish_reason=finish_reason, stop_reason=None)
    return attrs.evolve(response, choices=(choice,))


def sum_of(usages: Iterable[Usage]) -> Usage:
    """Tokens and seconds of all rounds together."""
    usages = list(usages)
    return Usage.measure(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        prompt_time=sum(usage.total_prompt_time_sec for usage in usages),
        completion_time=sum(usage.total_completion_time_sec for usage in usages),
    )
