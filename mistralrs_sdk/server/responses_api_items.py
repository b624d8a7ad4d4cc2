"""Items of the Responses API as chat messages: what was said, called, returned and thought."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mistralrs_sdk.server.translation import (
    invalid,
    joined_text,
    listed,
    mapping,
    new_id,
    text,
    unsupported,
)

Message = dict[str, Any]

_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_THOUGHTS = {"reasoning_text": "text", "summary_text": "text", "text": "text"}
_ROLES = ("user", "assistant", "system", "developer")


def input_items(given: Any) -> list[dict[str, Any]]:
    """Return an `input` as items, each with an id; a string is one user message.

    Raises:
        HttpError: it is neither a string nor a list of objects.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items: list[dict[str, Any]] = []
    for place, item in enumerate(listed("input", given)):
        item = dict(mapping(f"input[{place}]", item))
        if item.get("type") is None and "role" in item:
            item["type"] = "message"
        if item.get("type") == "message" and isinstance(item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        if item.get("id") is None:
            item["id"] = new_id(_PREFIXES.get(str(item.get("type")), "item"))
        items.append(item)
    return items


def messages_of(
    items: Iterable[Mapping[str, Any]], *, after: Sequence[Message] = ()
) -> list[Message]:
    """Return the turns of a chat that `after` and then these items are.

    Reasoning, text and calls that follow each other are one turn of the assistant.

    Raises:
        HttpError: an item is of a type that is not supported, lacks something, or returns what
            nothing called.
    """
    turns = _Turns(after)
    for place, item in enumerate(items):
        turns.add(f"input[{place}]", item)
    return turns.finish()


def with_instructions(messages: list[Message], instructions: str | None) -> list[Message]:
    """Return the turns behind a system turn; one that begins with them already joins it.

    Many templates know one system turn only, the first.
    """
    first = [] if instructions is None else [instructions]
    rest = 0
    while rest < len(messages) and messages[rest]["role"] in ("system", "developer"):
        first.append(messages[rest]["content"])
        rest += 1
    if not first:
        return messages
    return [{"role": "system", "content": "\n\n".join(first)}, *messages[rest:]]


class _Turns:
    """Turns as they are put together from items."""

    def __init__(self, before: Sequence[Message]) -> None:
        self._messages = list(before)
        self._open: Message | None = None
        self._called = {
            call["id"]: call["function"]["name"]
            for message in before
            for call in message.get("tool_calls", ())
        }

    def add(self, where: str, item: Mapping[str, Any]) -> None:
        match item.get("type"):
            case "message":
                self._say(where, item)
            case "function_call":
                self._call(where, item)
            case "function_call_output":
                self._return(where, item)
            case "reasoning":
                self._think(where, item)
            case "item_reference":
                raise unsupported(
                    where, "give the item itself, or the answer it is of as previous_response_id"
                )
            case kind:
                raise unsupported(
                    where,
                    f"items of type {kind!r} are unknown here; known are message, function_call, "
                    "function_call_output and reasoning",
                )

    def finish(self) -> list[Message]:
        self._close()
        return self._messages

    def _say(self, where: str, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise invalid(f"{where}.role", f"({role!r:.80}) must be one of {', '.join(_ROLES)}")
        content = joined_text(f"{where}.content", item.get("content"), kinds=_TEXTS)
        if role != "assistant":
            self._close()
            self._messages.append({"role": role, "content": content})
            return
        self._assistant(new=self._has_spoken())["content"] = content

    def _call(self, where: str, item: Mapping[str, Any]) -> None:
        name = text(f"{where}.name", item.get("name"))
        id = text(f"{where}.call_id", item.get("call_id"))
        arguments = text(f"{where}.arguments", item.get("arguments"))
        call = {
            "id": id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._assistant().setdefault("tool_calls", []).append(call)
        self._called[id] = name

    def _return(self, where: str, item: Mapping[str, Any]) -> None:
        id = text(f"{where}.call_id", item.get("call_id"))
        if id not in self._called:
            raise invalid(f"{where}.call_id", f"({id!r:.80}) names no function_call before it")
        self._close()
        content = joined_text(f"{where}.output", item.get("output"), kinds=_TEXTS)
        name = self._called[id]
        self._messages.append(
            {"role": "tool", "content": content, "name": name, "tool_call_id": id}
        )

    def _think(self, where: str, item: Mapping[str, Any]) -> None:
        parts = item.get("content") or item.get("summary") or []
        thoughts = joined_text(f"{where}.content", parts, kinds=_THOUGHTS)
        if not thoughts:
            if item.get("encrypted_content"):
                raise unsupported(where, "encrypted reasoning cannot be read here; leave it out")
            return
        turn = self._assistant(new=self._has_spoken())
        turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts

    def _has_spoken(self) -> bool:
        turn = self._open
        return turn is not None and bool(turn["content"] or turn.get("tool_calls"))

    def _assistant(self, *, new: bool = False) -> Message:
        if new:
            self._close()
        if self._open is None:
            self._open = {"role": "assistant", "content": ""}
        return self._open

    def _close(self) -> None:
        if self._open is not None:
            self._messages.append(self._open)
        self._open = None


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
