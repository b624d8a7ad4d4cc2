"""Past tool calls in the shape that a chat template reads: found by trying it out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

_NAME, _KEY = "probe_tool_name", "probe_argument"


@attrs.frozen(kw_only=True)
class CallShape:
    """How a template wants a turn with calls."""

    arguments_as_text: bool = False
    """The arguments as JSON text; most templates want the object itself."""
    null_content: bool = False
    """An empty content as none; most templates want an empty string."""

    def apply(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages, those with calls rewritten."""
        return [self._turn(dict(message)) for message in messages]

    def _turn(self, message: dict[str, Any]) -> dict[str, Any]:
        if not message.get("tool_calls"):
            return message
        message["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        if self.null_content and not message.get("content"):
            message["content"] = None
        return message

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call  # no shape we know: the template decides
        arguments = function.get("arguments")
        if self.arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not self.arguments_as_text and isinstance(arguments, str):
            arguments = _object_or_text(arguments)
        rest = {key: value for key, value in call.items() if key != "index"}
        said = {key: value for key, value in function.items() if value is not None}
        return {**rest, "function": {**said, "arguments": arguments}}


def find_call_shape(render: Callable[[list[dict[str, Any]]], str | None]) -> CallShape | None:
    """The first shape with which `render` shows a call and its arguments; None if none does.

    `render` returns None where the template fails.
    """
    for null_content in (False, True):
        for arguments_as_text in (False, True):
            shape = CallShape(arguments_as_text=arguments_as_text, null_content=null_content)
            text = render(shape.apply(_probe()))
            if text is not None and _shows_call(text):
                return shape
    return None


def _probe() -> list[dict[str, Any]]:
    function = {"name": _NAME, "arguments": {_KEY: "value"}}
    call = {"id": "a1b2c3d4e", "type": "function", "function": function}
    return [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "result", "name": _NAME, "tool_call_id": "a1b2c3d4e"},
    ]


def _shows_call(text: str) -> bool:
    # an object that was turned to text without care, and text that was quoted once more
    spoilt = f"'{_KEY}'" in text or f'\\"{_KEY}' in text
    return _NAME in text and _KEY in text and not spoilt


def _object_or_text(text: str) -> Any:
    """The object that JSON text describes; text that describes none stays."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
