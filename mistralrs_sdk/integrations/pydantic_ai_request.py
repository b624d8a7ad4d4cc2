"""Requests of Pydantic AI as OpenAI-shaped ones; `pydantic_ai` is the way in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_ai import messages
from pydantic_ai.exceptions import UserError
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.settings import ModelSettings, ToolOrOutput
from pydantic_ai.tools import ToolDefinition

logger = logging.getLogger("mistralrs_sdk.integrations")

_SETTINGS = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "stop_sequences": "stop",
    "parallel_tool_calls": "parallel_tool_calls",
    "service_tier": "service_tier",
    "timeout": "deadline",
}
"""Settings that a request has too, and what they are called there."""

_READ_ELSEWHERE = {
    "cache",
    "extra_body",
    "extra_headers",
    "first_event_timeout",
    "framing_announcement",
    "max_retries",
    "request_timeout",
    "tool_choice",
}
"""By Pydantic AI itself, which warns of those that a model does not take; or below."""

_mentioned: set[str] = set()


def chat_request(
    history: Sequence[messages.ModelMessage],
    settings: ModelSettings | None,
    params: ModelRequestParameters,
) -> dict[str, Any]:
    """Return the request; settings and parameters are prepared already.

    Raises:
        UserError: something in it cannot be said to a model here.
    """
    given: dict[str, Any] = {**(settings or {})}
    asked: dict[str, Any] = {"messages": _messages(history, params)}
    for key, value in given.items():
        if key in _SETTINGS:
            asked[_SETTINGS[key]] = value
        elif key not in _READ_ELSEWHERE and key not in _mentioned:
            _mentioned.add(key)
            logger.warning("the setting %r has no effect on mistralrs_sdk's models", key)
    asked |= _tools(given.get("tool_choice"), params) | _output(params) | _thinking(params)
    extra = given.get("extra_body")
    if extra is not None and not isinstance(extra, Mapping):
        raise UserError(f"extra_body ({extra!r:.80}) must be a dict of a request's keys")
    asked |= extra or {}
    if "response_format" in asked and asked.get("tools") and asked["tool_choice"] != "none":
        raise UserError(
            "an answer that is held to a schema (NativeOutput) cannot call tools: use ToolOutput, "
            "or an agent without tools"
        )
    return asked


def must_call(asked: Mapping[str, Any]) -> bool:
    """Whether a request asks for calls and nothing else."""
    choice = asked.get("tool_choice")
    if not isinstance(choice, Mapping):
        return choice == "required"
    return choice["type"] == "function" or choice["allowed_tools"]["mode"] == "required"


def _tools(choice: Any, params: ModelRequestParameters) -> dict[str, Any]:
    offered = params.declared_tool_defs
    if not offered:
        return {}
    functions = [tool.name for tool in params.declared_function_tools]
    outputs = [tool.name for tool in params.output_tools]
    mode = "auto" if params.allow_text_output else "required"
    if choice in (None, "auto"):
        names = [*functions, *outputs]
    elif choice in ("none", []):
        names = outputs
    elif choice == "required":
        mode, names = "required", functions
    elif isinstance(choice, ToolOrOutput):
        names = [*choice.function_tools, *outputs]
    else:
        mode, names = "required", list(choice)
    return {
        "tools": [_tool(tool) for tool in offered.values()],
        "tool_choice": _tool_choice(mode, names, all_of_them=set(names) == offered.keys()),
    }


def _tool_choice(mode: str, names: Sequence[str], *, all_of_them: bool) -> Any:
    if not names:
        return "none"
    allowed = [{"type": "function", "function": {"name": name}} for name in names]
    if mode == "required" and len(names) == 1:  # exactly one call of it
        return allowed[0]
    if all_of_them:
        return mode
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters_json_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _output(params: ModelRequestParameters) -> dict[str, Any]:
    if params.output_mode == "native" and params.output_object is not None:
        schema = {"name": "output", "schema": params.output_object.json_schema}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if params.output_mode == "prompted" and not params.declared_tool_defs:
        return {"response_format": {"type": "json_object"}}
    return {}


def _thinking(params: ModelRequestParameters) -> dict[str, Any]:
    thinking = params.thinking
    if thinking is None:
        return {}
    if isinstance(thinking, bool):
        return {"enable_thinking": thinking}
    return {"reasoning_effort": "xhigh" if thinking == "max" else thinking}


def _messages(
    history: Sequence[messages.ModelMessage], params: ModelRequestParameters
) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for message in history:
        if isinstance(message, messages.ModelRequest):
            turns += map(_asked, message.parts)
        else:
            turns.append(_answered(message))
    systems = [turn["content"] for turn in turns if turn["role"] == "system"]
    if any(turn["role"] == "system" for turn in turns[len(systems) :]):
        raise UserError(
            "a SystemPromptPart after the first turn is in no chat template: call "
            "model.prepare_messages(messages) first, as agents do"
        )
    systems += _instructions(history, params)
    turns = [turn for turn in turns if turn["role"] != "system"]
    if systems:  # chat templates know one
        turns.insert(0, {"role": "system", "content": "\n\n".join(systems)})
    return turns


def _instructions(
    history: Sequence[messages.ModelMessage], params: ModelRequestParameters
) -> list[str]:
    if params.instruction_parts is not None:
        return [part.content for part in params.instruction_parts]
    for message in reversed(history):
        if isinstance(message, messages.ModelRequest) and message.instructions:
            return [message.instructions]
    return []


def _asked(part: messages.ModelRequestPart) -> dict[str, Any]:
    match part:
        case messages.SystemPromptPart():
            return {"role": "system", "content": part.content}
        case messages.UserPromptPart():
            return {"role": "user", "content": _text(part.content)}
        case messages.ToolReturnPart():
            if part.files:
                raise UserError(
                    f"tool {part.tool_name!r} returned a file, and models here read text only"
                )
            content = part.model_response_str()
            return {"role": "tool", "tool_call_id": part.tool_call_id, "content": content}
        case _:
            raise UserError(
                f"{type(part).__name__} cannot be sent as it is: call "
                "model.prepare_messages(messages) first, as agents do"
            )


def _text(content: str | Sequence[messages.UserContent]) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for item in content:
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, messages.TextContent):
            texts.append(item.content)
        elif not isinstance(item, messages.CachePoint):  # prefixes are cached anyway
            raise UserError(
                f"{type(item).__name__} in a prompt is not supported: models here read text only"
            )
    return "\n\n".join(texts)


def _answered(response: messages.ModelResponse) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in response.parts:
        match part:
            case messages.TextPart():
                texts.append(part.content)
            case messages.ThinkingPart():
                thoughts.append(part.content)
            case messages.ToolCallPart():
                function = {"name": part.tool_name, "arguments": part.args_as_json_str()}
                calls.append({"id": part.tool_call_id, "type": "function", "function": function})
            case _:
                raise UserError(
                    f"{type(part).__name__} of an earlier answer is not supported: models here "
                    "read and write text, thoughts and calls; take it out of the history"
                )
    turn: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(texts)}
    if any(thoughts):
        turn["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn
