"""Requests of the Agents SDK as OpenAI-shaped chat requests; `openai_agents` is the way in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from agents import (
    AgentOutputSchemaBase,
    Handoff,
    ModelSettings,
    Tool,
    TResponseInputItem,
    UserError,
)
from agents.models.chatcmpl_converter import Converter

OUTPUT_TOOL = "final_output"
"""Called to give an agent's output, where an answer may call tools as well."""

_PASSED_ON = {
    "frequency_penalty",
    "max_tokens",
    "metadata",
    "presence_penalty",
    "prompt_cache_retention",
    "store",
    "temperature",
    "top_logprobs",
    "top_p",
    "verbosity",
}
_READ_BELOW = {
    "extra_args",
    "extra_body",
    "parallel_tool_calls",
    "reasoning",
    "response_include",
    "tool_choice",
    "truncation",
}
_THE_RUNNERS = {"include_usage", "retry", "timeout"}
"""Done by the runner; the usage is always there."""

_LOGPROBS = "message.output_text.logprobs"
_REASONING = {"effort", "summary", "generate_summary"}
"""A summary is asked for: the reasoning is given whole."""


def chat_request(
    name: str,
    instructions: str | None,
    items: str | list[TResponseInputItem],
    settings: ModelSettings,
    tools: Sequence[Tool],
    output: AgentOutputSchemaBase | None,
    handoffs: Sequence[Handoff],
) -> dict[str, Any]:
    """Return the request to the model `name`.

    Raises:
        UserError: a setting, a tool or an item is of a kind that models here do not take.
    """
    asked = _settings(settings)
    asked["messages"] = _messages(name, instructions, items)
    offered: list[dict[str, Any]] = [{**Converter.tool_to_openai(tool)} for tool in tools]
    offered += [{**Converter.convert_handoff_tool(handoff)} for handoff in handoffs]
    schema = None if output is None or output.is_plain_text() else output.json_schema()
    if offered:
        asked |= _tools(offered, settings, schema)
    elif schema is not None:
        asked["response_format"] = _held_to(schema)
    for extra in (settings.extra_body, settings.extra_args):
        if extra is not None and not isinstance(extra, Mapping):
            raise UserError(f"extra_body ({extra!r:.80}) must be a dict of a request's keys")
        asked |= extra or {}
    return asked


def _messages(
    name: str, instructions: str | None, items: str | list[TResponseInputItem]
) -> list[dict[str, Any]]:
    turns = Converter.items_to_messages(
        items,
        model=name,
        should_replay_reasoning_content=lambda past: past.reasoning.origin_model == past.model,
    )
    system = [{"role": "system", "content": instructions}] if instructions else []
    return [*system, *({**turn} for turn in turns)]


def _settings(settings: ModelSettings) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is None or field.name in (*_READ_BELOW, *_THE_RUNNERS):
            continue
        if field.name not in _PASSED_ON:
            raise UserError(
                f"ModelSettings.{field.name} ({value!r:.80}) is not supported by models of "
                "mistralrs_sdk: leave it out"
            )
        asked[field.name] = value
    if settings.truncation is not None:
        asked["truncate_sequence"] = settings.truncation == "auto"
    if settings.reasoning is not None:
        asked |= _reasoning(settings.reasoning.model_dump(exclude_none=True))
    unknown = {*(settings.response_include or ())} - {_LOGPROBS}
    if unknown:
        raise UserError(
            f"response_include ({sorted(map(str, unknown))}) may hold {_LOGPROBS!r} only: nothing "
            "here makes the others"
        )
    if settings.response_include or settings.top_logprobs is not None:
        asked["logprobs"] = True
    return asked


def _reasoning(asked: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(asked.keys() - _REASONING):
        raise UserError(
            f"ModelSettings.reasoning.{unknown[0]} ({asked[unknown[0]]!r:.80}) is not supported by "
            "models of mistralrs_sdk: leave it out"
        )
    return {"reasoning_effort": asked["effort"]} if "effort" in asked else {}


def _tools(
    offered: list[dict[str, Any]], settings: ModelSettings, schema: dict[str, Any] | None
) -> dict[str, Any]:
    """What may be called; an output that is held to a schema is one of the things to call.

    An answer is held to one thing. With the output as a tool, and a call required, it is a call of
    a tool or the output, whichever the model decides, and always one of them.
    """
    asked: dict[str, Any] = {"tools": offered}
    if settings.parallel_tool_calls is not None:
        asked["parallel_tool_calls"] = settings.parallel_tool_calls
    choice = settings.tool_choice
    if choice is not None:
        asked["tool_choice"] = Converter.convert_tool_choice(choice)
    if schema is None:
        return asked
    if choice == "none":
        return {**asked, "response_format": _held_to(schema)}
    if choice in (None, "auto"):
        if any(tool["function"]["name"] == OUTPUT_TOOL for tool in offered):
            raise UserError(f"a tool may not be called {OUTPUT_TOOL!r} beside an output_type")
        description = "Give the final answer, when no other tool is needed any more."
        function = {"name": OUTPUT_TOOL, "description": description, "parameters": schema}
        asked["tools"] = [*offered, {"type": "function", "function": function}]
        asked["tool_choice"] = "required"
    return asked


def _held_to(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": OUTPUT_TOOL, "schema": schema}}
