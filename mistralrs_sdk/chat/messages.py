"""Chat messages: turns of text, and what may be given for them."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, Self

import attrs

from mistralrs_sdk.chat.refused import RefusedMedia
from mistralrs_sdk.errors import RequestError

Message = Mapping[str, Any]
"""One OpenAI-shaped turn: {"role": ..., "content": ...} and what else its template reads."""

Content = str | Iterable[Mapping[str, Any]] | None
"""Text, or a list of `{"type": "text", "text": ...}` parts, or nothing."""


class TextMessageRole(enum.StrEnum):
    """Who speaks in a turn; any other role is given as a plain str."""

    USER = "user"
    User = USER  # mistral.rs' name
    ASSISTANT = "assistant"
    Assistant = ASSISTANT
    SYSTEM = "system"
    System = SYSTEM
    TOOL = "tool"
    Tool = TOOL


class ReasoningEffort(enum.StrEnum):
    """How much a model thinks before it answers, where its template knows the choice."""

    OFF = "off"
    Off = OFF  # mistral.rs' name
    LOW = "low"
    Low = LOW
    MEDIUM = "medium"
    Medium = MEDIUM
    HIGH = "high"
    High = HIGH
    XHIGH = "xhigh"
    XHigh = XHIGH


@attrs.frozen
class TextMessages:
    """Text turns, answered greedily. Every method returns a new value and leaves this one alone.

    `TextMessages().add_message(TextMessageRole.USER, "Hi")`

    Raises:
        RequestError: from each method, at once: a value is of the wrong type, or thinking and
            reasoning effort contradict each other.
    """

    messages: tuple[Message, ...] = attrs.field(default=(), hash=False)
    thinking: bool | None = None
    """Passed to the template as `enable_thinking`; None leaves it to the template."""
    reasoning_effort: ReasoningEffort | None = None
    """Passed to the template; None leaves it to the template."""

    def __attrs_post_init__(self) -> None:
        require_one_wish(self.thinking, self.reasoning_effort)

    def add_message(self, role: TextMessageRole | str, text: Content) -> Self:
        """Append one turn; text parts are joined without a separator.

        Raises:
            RequestError: the role is empty, or the content is not text.
        """
        return attrs.evolve(self, messages=(*self.messages, text_message(role, text)))

    def enable_thinking(self, enable: bool) -> Self:
        """Ask for (or against) reasoning before the answer, if the template knows the switch."""
        return attrs.evolve(self, thinking=flag("enable_thinking", enable))

    def with_reasoning_effort(self, effort: ReasoningEffort | str) -> Self:
        """Ask for this much reasoning: off, low, medium, high or xhigh.

        Raises:
            RequestError: it is none of these, or contradicts `enable_thinking`.
        """
        return attrs.evolve(self, reasoning_effort=reasoning_effort(effort))

    def clear(self) -> Self:
        """Drop the turns, keep the rest."""
        return attrs.evolve(self, messages=())


@attrs.frozen
class MultimodalMessages(RefusedMedia, TextMessages):
    """Text turns under mistral.rs' name for turns of any kind; images and sound are refused."""


def from_openai(message: object) -> Message:
    """Read one OpenAI-shaped turn: a dict, or an object that says what it is as one.

    Such are the `message` of a response, ours or of the `openai` package. The role "developer" is
    read as "system", which templates know. What is null or an empty list of calls is left out:
    templates ask whether it is there.

    Raises:
        RequestError: it has no role, or its content is not text.
    """
    if not isinstance(message, Mapping):
        message = _as_dict(message)
    if not isinstance(message, Mapping) or "role" not in message:
        raise RequestError(f'message {message!r:.120} must be a dict with "role" and "content"')
    role = "system" if message["role"] == "developer" else message["role"]
    # other keys (name, tool_calls, tool_call_id ...) are the template's business
    rest = {key: value for key, value in message.items() if value is not None}
    if calls := rest.pop("tool_calls", None):
        rest["tool_calls"] = _calls(calls)
    return {**rest, **text_message(role, message.get("content"))}


def _calls(calls: object) -> list[Any]:
    if not isinstance(calls, list | tuple):
        raise RequestError(f"tool_calls {calls!r:.80} must be a list of the calls of an answer")
    found = [call if isinstance(call, Mapping) else _as_dict(call) for call in calls]
    for call in found:
        if not isinstance(call, Mapping):
            raise RequestError(
                f'tool call {call!r:.80} must be {{"id": ..., "type": "function", "function": '
                '{"name": ..., "arguments": "..."}}'
            )
    return found


def _as_dict(message: object) -> object:
    """What a response's message says it is; what says nothing stays as it is."""
    if callable(dump := getattr(message, "model_dump", None)):  # pydantic's
        return dump(exclude_none=True)
    if callable(to_dict := getattr(message, "to_dict", None)):
        return to_dict()
    return message


def text_message(role: object, content: Content) -> dict[str, Any]:
    if not isinstance(role, str) or not role:
        raise RequestError(f"role {role!r} must be a TextMessageRole or a non-empty str")
    return {"role": str(role), "content": _flatten(content)}


def _flatten(content: Any) -> str:
    """The text of a content; templates that join strings cannot read lists or None."""
    if content is None:
        return ""
    if isinstance(content, str):
        return str(content)
    if isinstance(content, Mapping) or not isinstance(content, Iterable):
        raise RequestError(
            f"content of type {type(content).__name__} must be a str or a list of text parts"
        )
    return "".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part, Mapping):
        raise RequestError(
            f'content part {kind!r} is not supported: give {{"type": "text", "text": ...}} parts'
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f'text part {part!r} must have a str under "text"')
    return part["text"]


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} ({value!r}) must be True or False")
    return value


def reasoning_effort(value: Any) -> ReasoningEffort:
    try:
        return ReasoningEffort(value)
    except ValueError:
        known = ", ".join(ReasoningEffort)
        raise RequestError(f"reasoning_effort ({value!r}) must be one of {known}") from None


def require_one_wish(thinking: bool | None, effort: ReasoningEffort | None) -> None:
    """Refuse to be told to think and not to think.

    Raises:
        RequestError: `enable_thinking` and `reasoning_effort` contradict each other.
    """
    if thinking is None or effort is None:
        return
    if thinking is (effort is ReasoningEffort.OFF):
        raise RequestError(
            f"enable_thinking({thinking}) contradicts reasoning_effort {effort.value!r}: set one"
        )
