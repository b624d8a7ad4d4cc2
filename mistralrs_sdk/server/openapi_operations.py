"""The endpoints of the server, as the OpenAPI description has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen
class Operation:
    """One endpoint, as it is described."""

    method: str
    path: str
    summary: str
    body: str | None = None
    """The name of the schema of its request."""
    schema: str | None = attrs.field(default=None, kw_only=True)
    """The name of the schema of its answer."""
    answer: str = attrs.field(default="application/json", kw_only=True)
    streams: bool = attrs.field(default=False, kw_only=True)
    query: Mapping[str, dict[str, Any]] = attrs.field(factory=dict, kw_only=True)
    """Parameters and their schemas."""
    statuses: tuple[int, ...] = attrs.field(default=(), kw_only=True)
    """Which errors it may answer with, beside those that any may."""
    error: str = attrs.field(default="Error", kw_only=True)
    """The name of the schema of its errors."""


_MODEL: dict[str, dict[str, Any]] = {"model": {"type": "string", "minLength": 1}}
_PAGE: dict[str, dict[str, Any]] = {
    "order": {"enum": ["asc", "desc"]},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "after": {"type": "string"},
}
_READS = (400, 404, 413, 429, 500, 503)
_ANSWERS = (*_READS, 504)
_CHANGES = (400, 404, 413, 503)
_RESPONSE = "/v1/responses/{response_id}"
_SESSION = "/v1/sessions/{session_id}"

OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a chat (OpenAI)",
        "ChatCompletionRequest",
        schema="ChatCompletion",
        streams=True,
        statuses=_ANSWERS,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue a prompt (OpenAI)",
        "CompletionRequest",
        schema="Completion",
        streams=True,
        statuses=_ANSWERS,
    ),
    Operation(
        "post",
        "/v1/embeddings",
        "Embed texts (OpenAI)",
        "EmbeddingRequest",
        schema="Embeddings",
        statuses=_READS,
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answer with items (OpenAI)",
        "ResponsesRequest",
        schema="Response",
        streams=True,
        statuses=_ANSWERS,
    ),
    Operation(
        "get",
        _RESPONSE,
        "Fetch a response",
        schema="Response",
        query={"stream": {"enum": ["false"]}},
        statuses=(400, 404),
    ),
    Operation("delete", _RESPONSE, "Delete a response", schema="Deleted", statuses=(404,)),
    Operation(
        "post",
        f"{_RESPONSE}/cancel",
        "Cancel a response in the background",
        schema="Response",
        statuses=(400, 404),
    ),
    Operation(
        "get",
        f"{_RESPONSE}/input_items",
        "What a response was asked with",
        schema="ItemPage",
        query=_PAGE,
        statuses=(400, 404),
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "Count the tokens of a request for a response",
        "ResponsesRequest",
        schema="TokenCount",
        statuses=_READS,
    ),
    Operation(
        "post",
        "/v1/messages",
        "Answer a chat (Anthropic)",
        "MessagesRequest",
        schema="Message",
        streams=True,
        statuses=_ANSWERS,
        error="AnthropicError",
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a chat (Anthropic)",
        "CountTokensRequest",
        schema="TokenCount",
        statuses=_READS,
        error="AnthropicError",
    ),
    Operation(
        "post",
        "/tokenize",
        "Text or messages to ids",
        "TokenizeRequest",
        schema="Tokens",
        statuses=_CHANGES,
    ),
    Operation(
        "post",
        "/detokenize",
        "Ids to text",
        "DetokenizeRequest",
        schema="Prompt",
        statuses=_CHANGES,
    ),
    Operation("get", "/v1/models", "List models and adapters", schema="ModelList"),
    Operation(
        "get", "/v1/models/{model_id}", "Describe a model", schema="Model", statuses=(400, 404)
    ),
    Operation(
        "post",
        "/v1/models/status",
        "Where a model is",
        "ModelIdRequest",
        schema="ModelStatus",
        statuses=_CHANGES,
    ),
    Operation(
        "post",
        "/v1/models/unload",
        "Free a model's memory",
        "ModelIdRequest",
        schema="ModelStatus",
        statuses=_CHANGES,
    ),
    Operation(
        "post",
        "/v1/models/reload",
        "Load a model again",
        "ModelIdRequest",
        schema="ModelStatus",
        statuses=_CHANGES,
    ),
    Operation(
        "post",
        "/v1/models/tune",
        "Compare ways to keep a model's weights",
        "TuneRequest",
        schema="Tuning",
        statuses=(400, 413, 500, 504),
    ),
    Operation(
        "post",
        "/re_isq",
        "Quantise a running model",
        "ReIsqRequest",
        schema="Requantised",
        statuses=_CHANGES,
    ),
    Operation(
        "get", "/v1/lora_adapters", "List LoRA adapters", query=_MODEL, statuses=(400, 404, 409)
    ),
    Operation(
        "post",
        "/v1/load_lora_adapter",
        "Load a LoRA adapter",
        "LoadAdapterRequest",
        statuses=(*_CHANGES, 409),
    ),
    Operation(
        "post",
        "/v1/unload_lora_adapter",
        "Unload a LoRA adapter",
        "UnloadAdapterRequest",
        statuses=(*_CHANGES, 409),
    ),
    Operation(
        "get", _SESSION, "Export a session", schema="Session", query=_MODEL, statuses=(400, 404)
    ),
    Operation("put", _SESSION, "Import a session", "Session", query=_MODEL, statuses=_CHANGES),
    Operation("delete", _SESSION, "Delete a session", query=_MODEL, statuses=(400, 404)),
    Operation(
        "post",
        "/v1/agent/approvals/{approval_id}",
        "Approve or deny a tool call that waits",
        "ApprovalDecision",
        schema="ApprovalStatus",
        statuses=(400, 404, 413),
    ),
    Operation("get", "/v1/system/info", "Versions and every setting", schema="SystemInfo"),
    Operation(
        "get",
        "/v1/system/stats",
        "What runs now",
        query={"model": {"type": "string"}},  # empty is the default one, too
        statuses=(404, 503),
    ),
    Operation(
        "post",
        "/v1/system/doctor",
        "Check the machine",
        schema="Findings",
        statuses=(400, 500, 504),
    ),
    Operation(
        "get",
        "/health",
        "Whether it can answer",
        answer="text/plain",
        statuses=(503,),
        error="Health",
    ),
    Operation("get", "/metrics", "Counters for Prometheus", answer="text/plain", statuses=(503,)),
)
