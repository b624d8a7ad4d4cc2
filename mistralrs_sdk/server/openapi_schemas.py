"""The shapes of requests, answers and errors in the OpenAPI description."""

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
_NAME: dict[str, Any] = {"type": "string", "minLength": 1, "examples": ["default"]}
"""What a model is called."""
_FLAG: dict[str, Any] = {"type": "boolean"}
_PERMISSION: dict[str, Any] = {"enum": ["auto", "ask", "deny"]}
_MAP: dict[str, Any] = {"type": "object"}
_MAPS: dict[str, Any] = {"type": "array", "items": _MAP}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}
_WORDS: dict[str, Any] = {"type": "string", "minLength": 1}
_PROMPTS: dict[str, Any] = {
    "anyOf": [
        _WORDS,
        {"type": "array", "items": _WORDS, "minItems": 1},
        {**_IDS, "minItems": 1},
        {"type": "array", "items": {**_IDS, "minItems": 1}, "minItems": 1},
    ]
}
_MESSAGES: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
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
    "model": _maybe(_NAME),
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
    "stream_options": _maybe(_object({"include_usage": _maybe(_FLAG)})),
    "grammar": _maybe(_GRAMMAR),
    "truncate_sequence": _maybe(_FLAG),
    "adapter": _maybe(_TEXT),
    "priority": _maybe(_whole()),
    "deadline": _maybe(_number(0)),
    "cache_salt": _maybe(_TEXT),
    "user": _maybe(_TEXT),
}

_REQUESTS: dict[str, dict[str, Any]] = {
    "ChatCompletionRequest": _object(
        {
            **_SAMPLING,
            "messages": {"anyOf": [_TEXT, _MESSAGES]},
            "max_completion_tokens": _maybe(_whole(1)),
            "logprobs": _maybe(_FLAG),
            "top_logprobs": _maybe(_whole(0, 20)),
            "tools": _maybe(_MAPS),
            "tool_choice": {},
            "parallel_tool_calls": _maybe(_FLAG),
            "response_format": _maybe(_MAP),
            "enable_thinking": _maybe(_FLAG),
            "reasoning_effort": _maybe(_TEXT),
            "chat_template_kwargs": _maybe(_MAP),
            "session_id": _maybe(_TEXT),
            "max_tool_rounds": _maybe(_whole(0)),
            "agent_permission": _maybe(_PERMISSION),
            "enable_code_execution": _maybe(_FLAG),
            "code_execution_permission": _maybe(_PERMISSION),
            "enable_shell": _maybe(_FLAG),
        },
        "messages",
        open=True,
    ),
    "CompletionRequest": _object(
        {
            **_SAMPLING,
            "prompt": _PROMPTS,
            "best_of": _maybe(_whole(1, 128)),
            "echo": _maybe(_FLAG),
            "logprobs": _maybe(_whole(0, 20)),
        },
        "prompt",
    ),
    "EmbeddingRequest": _object(
        {
            "input": _PROMPTS,
            "model": _maybe(_NAME),
            "encoding_format": _maybe({"enum": ["float", "base64"]}),
            "dimensions": _maybe(_whole(1)),
            "truncate_sequence": _maybe(_FLAG),
            "prompt_name": _maybe(_TEXT),
            "user": _maybe(_TEXT),
        },
        "input",
    ),
    "ResponsesRequest": _object(
        {
            "input": {"anyOf": [_TEXT, {**_MAPS, "minItems": 1}]},
            "model": _maybe(_NAME),
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
            "model": _NAME,
            "max_tokens": _whole(1),
            "system": {},
            "stream": _maybe(_FLAG),
        },
        *("messages", "model", "max_tokens"),
        open=True,
    ),
    "CountTokensRequest": _object(
        {"messages": _MESSAGES, "model": _NAME, "system": {}}, "messages", "model", open=True
    ),
    "TokenizeRequest": {
        "anyOf": [
            _object(
                {"prompt": _TEXT, "model": _maybe(_NAME), "add_special_tokens": _maybe(_FLAG)},
                "prompt",
            ),
            _object(
                {
                    "messages": _MESSAGES,
                    "model": _maybe(_NAME),
                    "tools": _maybe(_MAPS),
                    "add_generation_prompt": _maybe(_FLAG),
                    "enable_thinking": _maybe(_FLAG),
                    "reasoning_effort": _maybe(_TEXT),
                },
                "messages",
            ),
        ]
    },
    "DetokenizeRequest": _object(
        {"tokens": _IDS, "model": _maybe(_NAME), "skip_special_tokens": _maybe(_FLAG)}, "tokens"
    ),
    "ModelIdRequest": _object({"model_id": _NAME}, "model_id"),
    "ReIsqRequest": _object(
        {"ggml_type": {"type": ["string", "integer"]}, "model": _maybe(_NAME)},
        "ggml_type",
    ),
    "LoadAdapterRequest": _object(
        {
            "lora_name": _WORDS,
            "lora_path": _WORDS,
            "revision": _maybe(_TEXT),
            "load_inplace": _maybe(_FLAG),
            "expected_generation": _maybe(_TEXT),
            "model": _maybe(_NAME),
        },
        *("lora_name", "lora_path"),
    ),
    "UnloadAdapterRequest": _object(
        {"lora_name": _WORDS, "expected_generation": _maybe(_TEXT), "model": _maybe(_NAME)},
        "lora_name",
    ),
    "Session": _object({"messages": _MAPS}, "messages", open=True),
    "ApprovalDecision": _object(
        {
            "decision": {"enum": ["approve", "deny"]},
            "remember_for_session": _maybe(_FLAG),
            "message": _maybe(_TEXT),
        },
        "decision",
    ),
    "TuneRequest": _object(
        {
            "model_id": _TEXT,
            "dtype": _maybe(_TEXT),
            "profile": _maybe({"enum": ["quality", "balanced", "fast"]}),
            "max_seq_len": _maybe(_whole(1)),
            "max_batch_size": _maybe(_whole(1)),
            "hf_revision": _maybe(_WORDS),
            "cpu": _maybe(_FLAG),
        },
        "model_id",
    ),
}


def _answer(kind: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """An answer that says what it is under "object"."""
    return _object({"object": {"const": kind}, **properties}, "object", *required, open=True)


_CREATED: dict[str, Any] = {"id": _TEXT, "created": _whole(0), "model": _TEXT}
_MODEL: dict[str, Any] = {
    "id": _TEXT,
    "status": {"enum": ["loaded", "unloaded", "reloading"]},
    "max_model_len": _whole(1),
}
_ERROR = _object(
    {
        "message": _TEXT,
        "type": _TEXT,
        "param": _maybe(_TEXT),
        "code": _maybe(_TEXT),
        "partial_response": _MAP,
    },
    *("message", "type", "param", "code"),
)

_ANSWERS: dict[str, dict[str, Any]] = {
    "Error": _object({"error": _ERROR}, "error"),
    "AnthropicError": _object(
        {
            "type": {"const": "error"},
            "error": _object({"type": _TEXT, "message": _TEXT}, "type", "message"),
        },
        *("type", "error"),
    ),
    "ChatCompletion": _answer(
        "chat.completion",
        {**_CREATED, "choices": _MAPS, "usage": _MAP},
        *("id", "created", "model", "choices", "usage"),
    ),
    "Completion": _answer(
        "text_completion",
        {**_CREATED, "choices": _MAPS, "usage": _MAP},
        *("id", "created", "model", "choices", "usage"),
    ),
    "Embeddings": _answer(
        "list", {"data": _MAPS, "model": _TEXT, "usage": _MAP}, *("data", "model", "usage")
    ),
    "Response": _answer(
        "response",
        {"id": _TEXT, "status": _TEXT, "output": _MAPS, "error": _maybe(_MAP)},
        *("id", "status", "output", "error"),
    ),
    "Deleted": _answer(
        "response.deleted", {"id": _TEXT, "deleted": {"const": True}}, "id", "deleted"
    ),
    "ItemPage": _answer(
        "list",
        {"data": _MAPS, "first_id": _maybe(_TEXT), "last_id": _maybe(_TEXT), "has_more": _FLAG},
        *("data", "first_id", "last_id", "has_more"),
    ),
    "Message": _object(
        {
            "id": _TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _TEXT,
            "content": _MAPS,
            "stop_reason": _TEXT,
            "stop_sequence": _maybe(_TEXT),
            "usage": _MAP,
        },
        *("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"),
    ),
    "TokenCount": _object({"input_tokens": _whole(0)}, "input_tokens", open=True),
    "Tokens": _object(
        {"count": _whole(0), "max_model_len": _whole(1), "tokens": _IDS},
        *("count", "max_model_len", "tokens"),
    ),
    "Prompt": _object({"prompt": _TEXT}, "prompt"),
    "Model": _answer("model", _MODEL, "id", "status"),
    "ModelList": _answer(
        "list", {"data": {"type": "array", "items": _answer("model", _MODEL, "id")}}, "data"
    ),
    "ModelStatus": _object(
        {"model_id": _TEXT, "status": _MODEL["status"]}, *("model_id", "status")
    ),
    "Requantised": _object(
        {"model": _TEXT, "ggml_type": {"type": ["string", "integer"]}}, "model", "ggml_type"
    ),
    "ApprovalStatus": _object({"status": {"const": "resolved"}}, "status"),
    "SystemInfo": _object(
        {
            "version": _TEXT,
            "system": _TEXT,
            "python": _TEXT,
            "cpus": _whole(1),
            "default_model": _TEXT,
            "models": _MAPS,
        },
        *("version", "system", "python", "cpus", "default_model", "models"),
    ),
    "Findings": _object({"version": _TEXT, "checks": _MAPS}, "version", "checks"),
    "Tuning": _object(
        {"candidates": _MAPS, "recommended": _maybe(_TEXT), "command": _TEXT},
        *("candidates", "recommended", "command"),
        open=True,
    ),
    "Health": _object({"status": {"const": "dead"}, "models": {}}, "status", "models"),
}

SCHEMAS = {**_ANSWERS, **_REQUESTS}
"""Every shape by its name."""
