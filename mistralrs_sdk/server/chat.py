"""`POST /v1/chat/completions`, whole and streamed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mistralrs_sdk import (
    AgenticToolCallProgress,
    AgentPermission,
    AgentToolApproval,
    ChatCompletionChunkResponse,
    ChatStream,
    RequestError,
    ToolLoopStream,
)
from mistralrs_sdk.server.approvals import EVENT, Asking, approval_data
from mistralrs_sdk.server.errors import HttpError, read_json
from mistralrs_sdk.server.sse import event, event_stream, unless_disconnected
from mistralrs_sdk.server.targets import Target, find_target


def routes() -> list[Route]:
    """The routes of this module."""
    return [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]


async def create_chat_completion(request: Request) -> Response:
    """Answer a chat in OpenAI's shape; what else a request may hold is mistral.rs'."""
    target = await find_target(request, await read_json(request))
    body = prepare_chat(request, target.body)
    include_usage = wants_usage(body)
    model, name = request.app.state.model, target.model_id
    asks = body.get("agent_permission") == AgentPermission.ASK
    if body.get("stream") is True:
        asking = Asking(request.app.state.approvals) if asks else None
        if asking is not None:
            body = {**body, "agent_approval_callback": asking.ask}
        opening = model.stream_chat_request(body, model_id=name)
        stream = await unless_disconnected(request, opening)
        return await event_stream(
            request,
            _events(stream, target, asking, include_usage=include_usage),
            done="[DONE]",
            keep_alive=request.app.state.settings.keep_alive_seconds,
        )
    if asks:
        raise HttpError(
            400,
            '"agent_permission" ("ask") needs "stream": true: the stream is where it is asked',
            param="agent_permission",
        )
    answering = model.send_chat_request(body, model_id=name)
    response = await unless_disconnected(request, answering)
    return JSONResponse({**response.to_dict(), "model": target.shown})


def prepare_chat(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    """Refuse what only the server may set, and add what its settings say of tools.

    Raises:
        HttpError: 400.
    """
    settings = request.app.state.settings
    if "messages" not in body:
        raise HttpError(400, '"messages" is missing: give a list of messages', param="messages")
    if body.get("tool_dispatch_url") is not None:
        # whoever may ask questions must not make the server call any address
        raise HttpError(
            400,
            '"tool_dispatch_url" is for the server to set: start it with --tool-dispatch-url',
            param="tool_dispatch_url",
        )
    _require_json_of_code(request, body)
    if settings.tool_dispatch_url is not None:
        body = {**body, "tool_dispatch_url": settings.tool_dispatch_url}
    if settings.max_tool_rounds is not None and body.get("max_tool_rounds") is None:
        body = {**body, "max_tool_rounds": settings.max_tool_rounds}
    return body


def _require_json_of_code(request: Request, body: dict[str, Any]) -> None:
    """Refuse to run code for a body not declared JSON: any web page can make a browser send that.

    For JSON a browser asks first, and only the pages of `cors_origins` are told yes.
    """
    if "json" in request.headers.get("content-type", "").lower():
        return
    for key in ("enable_code_execution", "enable_shell"):
        if body.get(key):
            raise HttpError(
                400, f'"{key}" needs the header "content-type: application/json"', param=key
            )


def wants_usage(body: dict[str, Any]) -> bool:
    """Whether a stream is to end with a chunk that holds the usage.

    Raises:
        RequestError: "stream_options" is not what it should be.
    """
    options = body.get("stream_options")
    if options is None:
        return False
    wanted = options.get("include_usage") if isinstance(options, dict) else options
    if wanted is not None and not isinstance(wanted, bool):
        raise RequestError(
            f'"stream_options" ({options!r:.80}) must be an object such as '
            '{"include_usage": true}'
        )
    return bool(wanted)


async def _events(
    stream: ChatStream | ToolLoopStream,
    target: Target,
    asking: Asking | None,
    *,
    include_usage: bool,
) -> AsyncIterator[str | dict[str, Any]]:
    begun: set[int] = set()
    merged = None if asking is None else contextlib.aclosing(asking.among(stream))
    async with stream, merged or contextlib.nullcontext(stream) as items:
        async for item in items:
            if isinstance(item, AgentToolApproval):
                yield event(approval_data(item), name=EVENT)
                continue
            if isinstance(item, AgenticToolCallProgress):
                yield event(item.to_dict(), name="agentic_tool_call_progress")
                continue
            usage = item.usage
            yield _chunk(item, target, begun, include_usage=include_usage)
            if include_usage and usage is not None:
                last = {**item.to_dict(), "model": target.shown}
                yield {**last, "choices": [], "usage": usage.to_dict()}


def _chunk(
    item: ChatCompletionChunkResponse, target: Target, begun: set[int], *, include_usage: bool
) -> dict[str, Any]:
    """A chunk as OpenAI sends it: the role comes once, the usage alone and if it was asked for."""
    data = {**item.to_dict(), "model": target.shown}
    data.pop("usage", None)
    if include_usage:
        data["usage"] = None
    for choice in data["choices"]:
        if choice["index"] in begun:
            choice["delta"].pop("role", None)
        begun.add(choice["index"])
    return data
