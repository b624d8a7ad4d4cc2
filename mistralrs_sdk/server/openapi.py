"""The OpenAPI description of the server, and a page that shows it."""

from __future__ import annotations

import html
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from mistralrs_sdk import __version__
from mistralrs_sdk.server.openapi_operations import OPERATIONS, Operation
from mistralrs_sdk.server.openapi_schemas import SCHEMAS

_OPEN = ("/health",)
_WHAT = {
    400: "The request is at fault",
    401: "The API key is missing or wrong",
    403: "A web page of another site asks, or the server is called by a name it does not have",
    404: "There is none of that name",
    409: "The server's state does not allow it",
    413: "The body is too long",
    429: "Too many requests wait; Retry-After says when to try again",
    500: "The request failed while it ran",
    503: "The engine is dead, or the model cannot be loaded",
    504: "The request's deadline passed, or doctor or tune took too long",
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
    settings = request.app.state.settings
    keyed = settings.api_key is not None
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        if (operation.method, operation.path) in there:
            needs_key = keyed and operation.path not in _OPEN
            refused = settings.allowed_hosts is not None
            refused = refused or (operation.method != "get" and not keyed)
            more = (*((401,) if needs_key else ()), *((403,) if refused else ()))
            described = _operation(operation, more, needs_key=needs_key)
            paths.setdefault(operation.path, {})[operation.method] = described
    components: dict[str, Any] = {"schemas": SCHEMAS}
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mistralrs_sdk", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _operation(operation: Operation, more: tuple[int, ...], *, needs_key: bool) -> dict[str, Any]:
    schema = {} if operation.schema is None else {"schema": _named(operation.schema)}
    content: dict[str, Any] = {operation.answer: schema}
    if operation.streams:
        content["text/event-stream"] = {}
    answers: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    usual = "Error" if operation.error == "Health" else operation.error
    errors = dict.fromkeys(operation.statuses, operation.error) | dict.fromkeys(more, usual)
    for status, shape in sorted(errors.items()):
        error = {"application/json": {"schema": _named(shape)}}
        answers[str(status)] = {"description": _WHAT[status], "content": error}
    described: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [_parameter(name, "path") for name in names]
    parameters += [_parameter(name, "query", schema) for name, schema in operation.query.items()]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _named(operation.body)}},
        }
    if needs_key:
        described["security"] = [{"key": []}]
    return described


def _named(schema: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _parameter(name: str, place: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "schema": {"type": "string", "minLength": 1} if schema is None else schema,
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
