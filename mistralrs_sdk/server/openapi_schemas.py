"""The shapes of requests and errors in the OpenAPI description."""

from __future__ import annotations

from typing import Any


def _object(properties: dict[str, Any], *required: str, open: bool = False) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    if not open:
        schema["additionalProperties"] = False
    return schema


def _maybe(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT: dict[str, Any] = {"type": "string"}
_FLAG: dict[str, Any] = {"type": "boolean"}
_MAP: dict[str, Any] = {"type": "object"}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}
_MESSAGES: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {},
        },
        "required": ["role"],
    },
}


def _number(least: float | None = None, most: float | None = None) -> dict[str, Any]:
    return _bounded("number", least, most)


def _whole(least: float | None = None, most: float | None = None) -> dict[str, Any]:
    return _bounded("integer", least, most)


def _bounded(kind: str, least: float | None, most: float | None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": kind}
    if least is not None:
        schema["minimum"] = least
    if most is not None:
        schema["maximum"] = most
    return schema


_STOP = {"anyOf": [_TEXT, _TEXTS]}
_GRAMMAR = _object(
    {"type": {"enum": ["regex", "json_schema", "lark", "llguidance"]}, "value": {}},
    *("type", "value"),
)
_SAMPLING: dict[str, Any] = {
    "model": _maybe(_TEXT),
    "temperature": _maybe(_number(0)),
    "top_p": _maybe(_number(0, 1)),
    "top_k": _maybe(_whole(-1)),
    "min_p": _maybe(_number(0, 1)),
    "frequency_penalty": _maybe(_number(-2, 2)),
    "presence_penalty": _maybe(_number(-2, 2)),
    "repetition_penalty": _maybe(_number(0)),
    "dry_multiplier": _maybe(_number(0)),
    "dry_base": _maybe(_number(1)),
    "dry_allowed_length": _maybe(_whole(0)),
    "dry_sequence_breakers": _maybe(_TEXTS),
    "n": _maybe(_whole(1, 128)),
    "seed": _maybe(_whole()),
    "stop": _maybe(_STOP),
    "logit_bias": _maybe({"type": "object", "additionalProperties": _number()}),
    "ignore_eos": _maybe(_FLAG),
    "max_tokens": _maybe(_whole(1)),
    "stream": _maybe(_FLAG),
    "stream_options": _maybe(_object({"include_usage": _maybe(_FLAG)}, open=True)),
    "grammar": _maybe(_GRAMMAR),
    "truncate_sequence": _maybe(_FLAG),
    "adapter": _maybe(_TEXT),
    "priority": _maybe(_whole()),
    "deadline": _maybe(_number(0)),
    "cache_salt": _maybe(_TEXT),
    "user": _maybe(_TEXT),
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": _maybe(_TEXT),
                    "code": _maybe(_TEXT),
                    "partial_response": _MAP,
                },
                *("message", "type", "param", "code"),
            )
        },
        "error",
        open=True,
    ),
    "ChatCompletionRequest": _object(
        {
            **_SAMPLING,
            "messages": {"anyOf": [_TEXT, _MESSAGES]},
            "max_completion_tokens": _maybe(_whole(1)),
            "logprobs": _maybe(_FLAG),
            "top_logprobs": _maybe(_whole(0, 20)),
            "tools": _maybe({"type": "array", "items": _MAP}),
            "tool_choice": {},
            "parallel_tool_calls": _maybe(_FLAG),
            "response_format": _maybe(_MAP),
            "enable_thinking": _maybe(_FLAG),
            "reasoning_effort": _maybe(_TEXT),
            "chat_template_kwargs": _maybe(_MAP),
            "session_id": _maybe(_TEXT),
            "max_tool_rounds": _maybe(_whole(0)),
            "agent_permission": _maybe({"enum": ["auto", "ask", "deny"]}),
        },
        "messages",
        open=True,
    ),
    "CompletionRequest": _object(
        {
            **_SAMPLING,
            "prompt": {"anyOf": [_TEXT, _TEXTS, _IDS, {"type": "array", "items": _IDS}]},
            "best_of": _maybe(_whole(1, 128)),
            "echo": _maybe(_FLAG),
            "logprobs": _maybe(_whole(0, 20)),
        },
        "prompt",
    ),
    "EmbeddingRequest": _object(
        {
            "input": {"anyOf": [_TEXT, _TEXTS, _IDS, {"type": "array", "items": _IDS}]},
            "model": _maybe(_TEXT),
            "encoding_format": _maybe({"enum": ["float", "base64"]}),
            "truncate_sequence": _maybe(_FLAG),
            "prompt_name": _maybe(_TEXT),
            "user": _maybe(_TEXT),
        },
        "input",
    ),
    "ResponsesRequest": _object(
        {
            "input": {"anyOf": [_TEXT, {"type": "array", "items": _MAP}]},
            "model": _maybe(_TEXT),
            "instructions": _maybe(_TEXT),
            "previous_response_id": _maybe(_TEXT),
            "max_output_tokens": _maybe(_whole(1)),
            "stream": _maybe(_FLAG),
            "store": _maybe(_FLAG),
            "background": _maybe(_FLAG),
        },
        "input",
        open=True,
    ),
    "MessagesRequest": _object(
        {
            "messages": _MESSAGES,
            "model": _TEXT,
            "max_tokens": _whole(1),
            "system": {},
            "stream": _maybe(_FLAG),
        },
        *("messages", "model", "max_tokens"),
        open=True,
    ),
    "CountTokensRequest": _object(
        {"messages": _MESSAGES, "model": _TEXT, "system": {}}, "messages", "model", open=True
    ),
    "TokenizeRequest": _object(
        {
            "prompt": _TEXT,
            "messages": _MESSAGES,
            "model": _maybe(_TEXT),
            "tools": _maybe({"type": "array", "items": _MAP}),
            "add_special_tokens": _maybe(_FLAG),
            "add_generation_prompt": _maybe(_FLAG),
            "enable_thinking": _maybe(_FLAG),
            "reasoning_effort": _maybe(_TEXT),
        }
    ),
    "DetokenizeRequest": _object(
        {"tokens": _IDS, "model": _maybe(_TEXT), "skip_special_tokens": _maybe(_FLAG)}, "tokens"
    ),
    "ModelIdRequest": _object({"model_id": _TEXT}, "model_id", open=True),
    "ReIsqRequest": _object(
        {"ggml_type": {"type": ["string", "integer"]}, "model": _maybe(_TEXT)},
        "ggml_type",
        open=True,
    ),
    "LoadAdapterRequest": _object(
        {
            "lora_name": _TEXT,
            "lora_path": _TEXT,
            "revision": _maybe(_TEXT),
            "load_inplace": _maybe(_FLAG),
            "expected_generation": _maybe(_TEXT),
            "model": _maybe(_TEXT),
        },
        *("lora_name", "lora_path"),
        open=True,
    ),
    "UnloadAdapterRequest": _object(
        {"lora_name": _TEXT, "expected_generation": _maybe(_TEXT), "model": _maybe(_TEXT)},
        "lora_name",
        open=True,
    ),
    "Session": _object({"messages": {"type": "array", "items": _MAP}}, "messages", open=True),
}
