"""Requests of Anthropic's Messages API: checked, and as a chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from mistralrs_sdk.server.translation import (
    EXTENSIONS,
    check_keys,
    invalid,
    joined_text,
    listed,
    mapping,
    switch,
    text,
    unsupported,
    whole,
)

Message = dict[str, Any]

_TEXTS = {"text": "text"}
_SAMPLING = ("temperature", "top_p", *EXTENSIONS)
_HINTS = ("metadata", "service_tier")
"""What a chat request takes under the same name, and has no effect."""
_READ_HERE = (
    "cache_control",
    "max_tokens",
    "messages",
    "model",
    "output_config",
    "speed",
    "stop_sequences",
    "stream",
    "system",
    "thinking",
    "tool_choice",
    "tools",
)
_REFUSED = {
    "container": "there are none here",
    "context_management": "nothing is cleared or compacted here; send what the model is to read",
    "diagnostics": "cached prompt tokens are in the usage; why others are not is not told",
    "inference_geo": "the model runs where this server does",
    "mcp_servers": "give the server its MCP servers when it starts",
    "user_profile_id": "there are no profiles here",
    "workspace_id": "there are no workspaces here",
}
_MIN_BUDGET = 1024


@attrs.frozen(kw_only=True)
class MessagesRequest:
    """A request as it is run."""

    chat: dict[str, Any]
    """The chat request, always to be streamed."""
    stream: bool
    max_tokens: int | None
    """None in a request to count tokens, which needs none."""


def read_request(body: Mapping[str, Any], *, counts_only: bool = False) -> MessagesRequest:
    """Read the body of a request for a message; `counts_only`: one to count its tokens.

    What a chat request checks by itself (samplers, schemas) is left to it.

    Raises:
        HttpError: a key is unknown, a value is wrong, or something is asked for that this server
            does not do.
    """
    given = check_keys(body, known=(*_READ_HERE, *_SAMPLING, *_HINTS), refused=_REFUSED)
    for key in ("messages",) if counts_only else ("messages", "max_tokens"):
        if key not in given:
            raise invalid(key, "is missing")
    if given.get("speed", "standard") != "standard":
        raise unsupported("speed", 'there is one speed; leave it out, or say "standard"')
    chat = {key: given[key] for key in (*_SAMPLING, *_HINTS) if key in given}
    limit = whole("max_tokens", given["max_tokens"]) if "max_tokens" in given else None
    if limit is not None:
        chat["max_completion_tokens"] = limit
    if listed("stop_sequences", given.get("stop_sequences", [])):
        chat["stop"] = given["stop_sequences"]
    chat |= _output(given) | _thinking(given, limit) | _tools(given)
    chat["messages"] = _messages(given)
    stream = switch("stream", given.get("stream", False))
    return MessagesRequest(chat=chat, stream=stream, max_tokens=limit)


def _messages(given: Mapping[str, Any]) -> list[Message]:
    turns = _Turns()
    if system := joined_text("system", given.get("system", ""), kinds=_TEXTS):
        turns.messages.append({"role": "system", "content": system})
    asked = listed("messages", given["messages"])
    if not asked:
        raise invalid("messages", "must hold a turn")
    for place, message in enumerate(asked):
        turns.add(f"messages[{place}]", mapping(f"messages[{place}]", message))
    if turns.messages[-1]["role"] == "assistant":
        raise unsupported(
            f"messages[{len(asked) - 1}]",
            "an answer cannot be begun for the model; end with a turn of the user",
        )
    return turns.messages


class _Turns:
    """Turns as they are put together from messages and their blocks."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._called: dict[str, str] = {}

    def add(self, where: str, message: Mapping[str, Any]) -> None:
        role, content = message.get("role"), message.get("content")
        if role == "system":
            said = joined_text(f"{where}.content", content, kinds=_TEXTS)
            self.messages.append({"role": "system", "content": said})
        elif role not in ("user", "assistant"):
            raise invalid(f"{where}.role", f"({role!r:.80}) must be user, assistant or system")
        else:
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            read = self._answer if role == "assistant" else self._ask
            read(f"{where}.content", listed(f"{where}.content", content))

    def _ask(self, where: str, blocks: list[Any]) -> None:
        texts: list[str] = []
        for place, block in enumerate(blocks):
            here = f"{where}[{place}]"
            if mapping(here, block).get("type") != "tool_result":
                texts.append(joined_text(where, [block], kinds=_TEXTS))
                continue
            self._say_user(texts)
            texts = []
            id = text(f"{here}.tool_use_id", block.get("tool_use_id"))
            if id not in self._called:
                raise invalid(f"{here}.tool_use_id", f"({id!r:.80}) names no tool_use before it")
            content = block.get("content")
            content = "" if content is None else content
            result = joined_text(f"{here}.content", content, kinds=_TEXTS)
            if switch(f"{here}.is_error", block.get("is_error", False)):
                result = f"Error: {result}"  # as failing tools of the SDK say it
            name = self._called[id]
            self.messages.append(
                {"role": "tool", "content": result, "name": name, "tool_call_id": id}
            )
        self._say_user(texts)

    def _say_user(self, texts: list[str]) -> None:
        if texts:
            self._say("user", "".join(texts))

    def _answer(self, where: str, blocks: list[Any]) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for place, block in enumerate(blocks):
            here = f"{where}[{place}]"
            match mapping(here, block).get("type"):
                case "tool_use":
                    calls.append(self._call(here, block))
                case "thinking":
                    thoughts.append(text(f"{here}.thinking", block.get("thinking")))
                case "redacted_thinking":
                    raise unsupported(here, "redacted thinking cannot be read here; leave it out")
                case _:
                    texts.append(joined_text(where, [block], kinds=_TEXTS))
        turn = self._say("assistant", "".join(texts))
        if any(thoughts):
            turn["reasoning_content"] = turn.get("reasoning_content", "") + "".join(thoughts)
        if calls:
            turn.setdefault("tool_calls", []).extend(calls)

    def _call(self, where: str, block: Mapping[str, Any]) -> dict[str, Any]:
        id, name = text(f"{where}.id", block.get("id")), text(f"{where}.name", block.get("name"))
        given = mapping(f"{where}.input", block.get("input"))
        self._called[id] = name
        arguments = json.dumps(given, ensure_ascii=False)
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _say(self, role: str, said: str) -> Message:
        """The turn that says this: turns of one role that follow each other are one."""
        if self.messages and self.messages[-1]["role"] == role:
            turn = self.messages[-1]
            turn["content"] = "\n\n".join(filter(None, (turn["content"], said)))
            return turn
        self.messages.append({"role": role, "content": said})
        return self.messages[-1]


def _output(given: Mapping[str, Any]) -> dict[str, Any]:
    asked = check_keys(
        mapping("output_config", given.get("output_config", {})),
        known=("effort", "format"),
        refused={"task_budget": "tokens are limited by max_tokens"},
    )
    chat: dict[str, Any] = {}
    if "effort" in asked:
        chat["reasoning_effort"] = asked["effort"]
    if "format" in asked:
        wanted = mapping("output_config.format", asked["format"])
        if wanted.get("type") != "json_schema":
            raise invalid("output_config.format.type", 'must be "json_schema"')
        schema = mapping("output_config.format.schema", wanted.get("schema"))
        named = {"name": "answer", "schema": schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": named}
    return chat


def _thinking(given: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
    if "thinking" not in given:
        return {}
    asked = mapping("thinking", given["thinking"])
    if asked.get("display") not in (None, "summarized"):
        raise unsupported("thinking.display", "thinking is shown as it is; leave it out")
    kind = asked.get("type")
    if kind == "disabled":
        return {"enable_thinking": False}
    if kind == "adaptive":
        return {}  # the template decides
    if kind != "enabled":
        raise invalid("thinking.type", f"({kind!r:.80}) must be enabled, disabled or adaptive")
    budget = whole("thinking.budget_tokens", asked.get("budget_tokens"))
    if budget < _MIN_BUDGET or (limit is not None and budget >= limit):
        raise invalid(
            "thinking.budget_tokens", f"({budget}) must be from {_MIN_BUDGET} to below max_tokens"
        )
    return {"enable_thinking": True}


def _tools(given: Mapping[str, Any]) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if offered := listed("tools", given.get("tools", [])):
        chat["tools"] = [_tool(f"tools[{place}]", tool) for place, tool in enumerate(offered)]
    if "tool_choice" in given:
        asked = mapping("tool_choice", given["tool_choice"])
        if asked.get("disable_parallel_tool_use"):
            raise unsupported(
                "tool_choice.disable_parallel_tool_use",
                "name one tool in tool_choice, or use the first call only",
            )
        chat["tool_choice"] = _choice(asked)
    return chat


def _choice(asked: Mapping[str, Any]) -> Any:
    match asked.get("type"):
        case "auto" | "none" as kind:
            return kind
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "name": text("tool_choice.name", asked.get("name"))}
        case kind:
            raise invalid("tool_choice.type", f"({kind!r:.80}) must be auto, any, tool or none")


def _tool(where: str, tool: Any) -> dict[str, Any]:
    if mapping(where, tool).get("type") not in (None, "custom"):
        raise unsupported(where, f"tools of type {tool['type']!r:.80} are not here; describe yours")
    described = check_keys(
        tool,
        known=(
            "cache_control",
            "description",
            "eager_input_streaming",
            "input_schema",
            "name",
            "strict",
            "type",
        ),
        refused={
            "allowed_callers": "only the model calls tools here",
            "defer_loading": "all tools are shown to the model",
            "input_examples": "write them into the description",
        },
    )
    function = {
        key: described[key] for key in ("name", "description", "strict") if key in described
    }
    function["parameters"] = mapping(f"{where}.input_schema", described.get("input_schema"))
    return {"type": "function", "function": function}
