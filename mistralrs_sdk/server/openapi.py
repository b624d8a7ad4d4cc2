"""The OpenAPI description of the server, and a page that shows it."""

from __future__ import annotations

import html
import json
from typing import Any

import attrs
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from mistralrs_sdk import __version__
from mistralrs_sdk.server.openapi_schemas import SCHEMAS


@attrs.frozen
class Operation:
    """One endpoint, as it is described."""

    method: str
    path: str
    summary: str
    body: str | None = None
    """The name of the schema of its request."""
    answer: str = "application/json"
    streams: bool = False
    query: tuple[str, ...] = ()
    statuses: tuple[int, ...] = ()
    """Which errors it may answer with, beside those that any may."""


_MODEL = ("model",)
_ANSWERS = (400, 404, 413, 429, 500, 503)
_CHANGES = (400, 404, 413, 503)

OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a chat (OpenAI)",
        "ChatCompletionRequest",
        streams=True,
        statuses=_ANSWERS,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue a prompt (OpenAI)",
        "CompletionRequest",
        streams=True,
        statuses=_ANSWERS,
    ),
    Operation(
        "post",
        "/v1/embeddings",
        "Embed texts (OpenAI)",
        "EmbeddingRequest",
        statuses=_ANSWERS,
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answer with items (OpenAI)",
        "ResponsesRequest",
        streams=True,
        statuses=_ANSWERS,
    ),
    Operation("get", "/v1/responses/{response_id}", "Fetch a response", statuses=(404,)),
    Operation("delete", "/v1/responses/{response_id}", "Delete a response", statuses=(404,)),
    Operation(
        "post",
        "/v1/responses/{response_id}/cancel",
        "Cancel a response in the background",
        statuses=(400, 404),
    ),
    Operation(
        "get",
        "/v1/responses/{response_id}/input_items",
        "What a response was asked with",
        statuses=(400, 404),
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "Count the tokens of a request for a response",
        "ResponsesRequest",
        statuses=_ANSWERS,
    ),
    Operation(
        "post",
        "/v1/messages",
        "Answer a chat (Anthropic)",
        "MessagesRequest",
        streams=True,
        statuses=_ANSWERS,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a chat (Anthropic)",
        "CountTokensRequest",
        statuses=_ANSWERS,
    ),
    Operation("post", "/tokenize", "Text or messages to ids", "TokenizeRequest", statuses=_CHANGES),
    Operation("post", "/detokenize", "Ids to text", "DetokenizeRequest", statuses=_CHANGES),
    Operation("get", "/v1/models", "List models and adapters"),
    Operation("get", "/v1/models/{model_id}", "Describe a model", statuses=(404,)),
    Operation("post", "/v1/models/status", "Where a model is", "ModelIdRequest", statuses=_CHANGES),
    Operation(
        "post", "/v1/models/unload", "Free a model's memory", "ModelIdRequest", statuses=_CHANGES
    ),
    Operation(
        "post", "/v1/models/reload", "Load a model again", "ModelIdRequest", statuses=_CHANGES
    ),
    Operation("post", "/re_isq", "Quantise a running model", "ReIsqRequest", statuses=_CHANGES),
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
        "get", "/v1/sessions/{session_id}", "Export a session", query=_MODEL, statuses=(400, 404)
    ),
    Operation(
        "put",
        "/v1/sessions/{session_id}",
        "Import a session",
        "Session",
        query=_MODEL,
        statuses=_CHANGES,
    ),
    Operation(
        "delete",
        "/v1/sessions/{session_id}",
        "Delete a session",
        query=_MODEL,
        statuses=(400, 404),
    ),
    Operation("get", "/v1/system/stats", "What runs now", query=_MODEL, statuses=(404, 503)),
    Operation("get", "/health", "Whether it can answer", answer="text/plain", statuses=(503,)),
    Operation("get", "/metrics", "Counters for Prometheus", answer="text/plain", statuses=(503,)),
)

_OPEN = ("/health",)
_WHAT = {
    400: "The request is at fault",
    401: "The API key is missing or wrong",
    404: "There is none of that name",
    409: "The server's state does not allow it",
    413: "The body is too long",
    429: "Too many requests wait; Retry-After says when to try again",
    500: "The request failed while it ran",
    503: "The engine is dead, or the model cannot be loaded",
}


def routes() -> list[Route]:
    """The routes of this module."""
    return [
        Route("/openapi.json", show_description, methods=["GET"]),
        Route("/api-doc/openapi.json", show_description, methods=["GET"]),
        Route("/docs", show_page, methods=["GET"]),
    ]


async def show_description(request: Request) -> Response:
    """The description as JSON."""
    return JSONResponse(description(request))


async def show_page(request: Request) -> Response:
    """The description for people: one page, no scripts."""
    return HTMLResponse(_page(description(request)))


def description(request: Request) -> dict[str, Any]:
    """The OpenAPI document of an app: of all endpoints, those that it has."""
    there = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in request.app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    keyed = request.app.state.settings.api_key is not None
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        if (operation.method, operation.path) in there:
            needs_key = keyed and operation.path not in _OPEN
            paths.setdefault(operation.path, {})[operation.method] = _operation(
                operation, needs_key=needs_key
            )
    components: dict[str, Any] = {"schemas": SCHEMAS}
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mistralrs_sdk", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _operation(operation: Operation, *, needs_key: bool) -> dict[str, Any]:
    content: dict[str, Any] = {operation.answer: {}}
    if operation.streams:
        content["text/event-stream"] = {}
    answers: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    errors = (*operation.statuses, *((401,) if needs_key else ()))
    for status in sorted(errors):
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        answers[str(status)] = {"description": _WHAT[status], "content": error}
    described: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [_parameter(name, "path") for name in names]
    parameters += [_parameter(name, "query") for name in operation.query]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body}"}
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if needs_key:
        described["security"] = [{"key": []}]
    return described


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "schema": {"type": "string"},
    }


def _page(document: dict[str, Any]) -> str:
    sections = "".join(
        _section(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    title = f"{document['info']['title']} {document['info']['version']}"
    return _PAGE.format(title=html.escape(title), sections=sections)


def _section(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = [
        f"<details><summary><b>{method.upper()}</b> <code>{html.escape(path)}</code> "
        f"{html.escape(operation['summary'])}</summary>"
    ]
    body = operation.get("requestBody")
    if body is not None:
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        text = json.dumps(SCHEMAS[name], indent=2)
        parts.append(f"<p>Body: {name}</p><pre>{html.escape(text)}</pre>")
    rows = "".join(
        f"<tr><td>{status}</td><td>{html.escape(answer['description'])}</td></tr>"
        for status, answer in operation["responses"].items()
    )
    parts.append(f"<table>{rows}</table></details>")
    return "".join(parts)


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: endpoints</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; }}
body {{ margin: 2rem auto; padding: 0 1rem; }}
summary {{ padding: 0.4rem 0; cursor: pointer; }}
b {{ display: inline-block; min-width: 4.5rem; }}
pre {{ overflow: auto; padding: 0.8rem; border: 1px solid; border-radius: 0.4rem; }}
td {{ padding-right: 1rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>
{sections}
</body>
</html>
"""
