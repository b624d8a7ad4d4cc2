"""Requests of the Responses API: checked, and as a chat request and what the answer repeats."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import attrs

from mistralrs_sdk.server.responses_api_items import (
    Message,
    input_items,
    messages_of,
    with_instructions,
)
from mistralrs_sdk.server.translation import (
    EXTENSIONS,
    check_keys,
    invalid,
    listed,
    mapping,
    new_id,
    switch,
    text,
    unsupported,
    whole,
)

LOGPROBS = "message.output_text.logprobs"

_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""The second one has no effect: reasoning comes back readable, and is taken back as it came."""

_SAMPLING = ("temperature", "top_p", "stop", *EXTENSIONS)
_HINTS = (
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
)
"""What a chat request takes under the same name, and has no effect."""
_READ_HERE = (
    "background",
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "metadata",
    "model",
    "parallel_tool_calls",
    "previous_response_id",
    "reasoning",
    "store",
    "stream",
    "stream_options",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncation",
)
_REFUSED = {
    "access_programs": "there are none here",
    "background_options": "background runs start at once",
    "context_management": 'nothing is compacted here; set "truncation": "auto"',
    "conversation": "name the answer to go on from as previous_response_id",
    "image": "models here read text",
    "max_tool_calls": "there are no built-in tools here; limit rounds with max_tool_rounds",
    "moderation": "nothing is moderated here",
    "prompt": "there are no stored prompts here; give input and instructions",
    "prompt_cache_options": "prefixes are cached by themselves",
    "session_id": "name the answer to go on from as previous_response_id",
}


@attrs.frozen(kw_only=True)
class ResponseRequest:
    """A request as it is run."""

    chat: dict[str, Any]
    """The chat request, always to be streamed."""
    messages: list[Message] = attrs.field(repr=False)
    """The turns of `chat` without the instructions, which do not go on to the next answer."""
    items: list[dict[str, Any]] = attrs.field(repr=False)
    """The input, each item with an id."""
    response: dict[str, Any] = attrs.field(repr=False)
    """The response as it begins."""
    stream: bool
    store: bool
    background: bool


def previous_id(body: Mapping[str, Any]) -> str | None:
    """Return the id of the answer a request goes on from.

    Raises:
        HttpError: it is no string.
    """
    id = body.get("previous_response_id")
    return None if id is None else text("previous_response_id", id)


def read_request(body: Mapping[str, Any], *, before: list[Message], model: str) -> ResponseRequest:
    """Read the body of a create request; `before` are the turns of the previous answer.

    `model` is what the answer calls the model; which one it is, is not read here.

    What a chat request checks by itself (samplers, schemas, tools) is left to it.

    Raises:
        HttpError: a key is unknown, a value is wrong, or something is asked for that this server
            does not do.
    """
    given = check_keys(body, known=(*_READ_HERE, *_SAMPLING, *_HINTS), refused=_REFUSED)
    stream, background, store = _ways(given)
    items = input_items(_required(given, "input"))
    messages = messages_of(items, after=before)
    instructions = given.get("instructions")
    if instructions is not None:
        text("instructions", instructions)
    chat = {
        **{key: given[key] for key in (*_SAMPLING, *_HINTS) if key in given},
        **_chat_settings(given),
        "messages": with_instructions(messages, instructions),
    }
    return ResponseRequest(
        chat=chat,
        messages=messages,
        items=items,
        response=_response(given, model=model, background=background),
        stream=stream,
        store=store,
        background=background,
    )


def _ways(given: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    stream = switch("stream", given.get("stream", False))
    background = switch("background", given.get("background", False))
    store = switch("store", given.get("store", True))
    if background and not store:
        raise invalid("background", 'needs "store": true: the answer is fetched later')
    if background and stream:
        raise unsupported(
            "stream", "a background run is not streamed: fetch it by its id, or drop background"
        )
    options = check_keys(
        mapping("stream_options", given.get("stream_options", {})),
        known=(),
        refused={"include_obfuscation": "events are not padded here"},
    )
    if options and not stream:
        raise invalid("stream_options", 'has no effect without "stream": true')
    return stream, background, store


def _chat_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if "max_output_tokens" in given:
        chat["max_completion_tokens"] = whole("max_output_tokens", given["max_output_tokens"])
    if "parallel_tool_calls" in given:
        chat["parallel_tool_calls"] = switch("parallel_tool_calls", given["parallel_tool_calls"])
    if offered := listed("tools", given.get("tools", [])):
        chat["tools"] = [_tool(f"tools[{place}]", tool) for place, tool in enumerate(offered)]
    if "tool_choice" in given:
        chat["tool_choice"] = given["tool_choice"]
    if _wants_logprobs(given):
        chat["logprobs"] = True
        chat["top_logprobs"] = given.get("top_logprobs")
    truncation = given.get("truncation", "disabled")
    if truncation not in ("auto", "disabled"):
        raise invalid("truncation", f'({truncation!r:.80}) must be "auto" or "disabled"')
    chat["truncate_sequence"] = truncation == "auto"
    return {**chat, **_text(given), **_reasoning(given)}


def _wants_logprobs(given: Mapping[str, Any]) -> bool:
    included = listed("include", given.get("include", []))
    for place, what in enumerate(included):
        if what not in _INCLUDED:
            raise unsupported(
                f"include[{place}]", f"{what!r:.80} is not one of {', '.join(_INCLUDED)}"
            )
    return LOGPROBS in included or "top_logprobs" in given


def _text(given: Mapping[str, Any]) -> dict[str, Any]:
    asked = check_keys(
        mapping("text", given.get("text", {})), known=("format", "verbosity"), refused={}
    )
    chat: dict[str, Any] = {}
    if "verbosity" in asked:
        chat["verbosity"] = asked["verbosity"]
    wanted = mapping("text.format", asked.get("format", {"type": "text"}))
    kind = wanted.get("type")
    if kind == "json_schema":
        named = {key: wanted[key] for key in ("name", "schema", "strict") if key in wanted}
        chat["response_format"] = {"type": kind, "json_schema": named}
        mapping("text.format.schema", wanted.get("schema"))
    elif kind == "json_object":
        chat["response_format"] = {"type": kind}
    elif kind != "text":
        raise invalid(
            "text.format.type", f"({kind!r:.80}) must be text, json_schema or json_object"
        )
    return chat


def _reasoning(given: Mapping[str, Any]) -> dict[str, Any]:
    asked = check_keys(
        mapping("reasoning", given.get("reasoning", {})),
        known=("context", "effort", "generate_summary", "mode", "summary"),
        refused={},
    )
    for key in ("summary", "generate_summary", "context"):
        if asked.get(key, "auto") != "auto":
            raise unsupported(
                f"reasoning.{key}", 'reasoning comes back as it is; leave it out, or say "auto"'
            )
    if asked.get("mode", "standard") != "standard":
        raise unsupported("reasoning.mode", 'there is one mode; leave it out, or say "standard"')
    return {"reasoning_effort": asked["effort"]} if "effort" in asked else {}


def _tool(where: str, tool: Any) -> dict[str, Any]:
    kind = mapping(where, tool).get("type")
    if kind != "function":
        raise unsupported(where, f"tools of type {kind!r} are not here; offer functions")
    described = check_keys(
        tool,
        known=("type", "name", "description", "parameters", "strict"),
        refused={
            "allowed_callers": "only the model calls tools here",
            "async": "calls are answered before the next turn",
            "defer_loading": "all tools are shown to the model",
            "output_schema": "results are not checked here",
        },
    )
    return {"type": "function", "function": {k: v for k, v in described.items() if k != "type"}}


def _response(given: Mapping[str, Any], *, model: str, background: bool) -> dict[str, Any]:
    metadata = mapping("metadata", given.get("metadata", {}))
    if len(metadata) > 16 or not all(isinstance(value, str) for value in metadata.values()):
        raise invalid("metadata", "must be at most 16 strings by name")
    reasoning = given.get("reasoning", {})
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if background else "in_progress",
        "background": background,
        "error": None,
        "incomplete_details": None,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": dict(metadata),
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": given.get("previous_response_id"),
        "prompt_cache_key": given.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": given.get("safety_identifier"),
        "service_tier": "default",
        "store": given.get("store", True),
        "temperature": given.get("temperature", 1.0),
        "presence_penalty": given.get("presence_penalty", 0.0),
        "frequency_penalty": given.get("frequency_penalty", 0.0),
        "text": {"format": {"type": "text"}, **_set(given.get("text", {}))},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [
            {"description": None, "parameters": None, "strict": None, **tool}
            for tool in given.get("tools", [])
        ],
        "top_logprobs": given.get("top_logprobs", 0),
        "top_p": given.get("top_p", 1.0),
        "truncation": given.get("truncation", "disabled"),
        "usage": None,
        "user": given.get("user"),
    }


def _set(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


def _required(given: Mapping[str, Any], key: str) -> Any:
    if key not in given:
        raise invalid(key, "is missing")
    return given[key]
