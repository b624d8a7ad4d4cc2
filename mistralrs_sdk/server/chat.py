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
    ToolLoopStream,
)
from mistralrs_sdk.server.approvals import EVENT, Asking, approval_data
from mistralrs_sdk.server.errors import HttpError, read_json
from mistralrs_sdk.server.sse import event, event_stream, unless_disconnected
from mistralrs_sdk.server.targets import Target, find_target
from mistralrs_sdk.server.translation import check_keys, invalid, mapping, switch


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
    if asks and target.body.get("agent_permission") == AgentPermission.ASK:
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
    if settings.tool_dispatch_url is not None:
        body = {**body, "tool_dispatch_url": settings.tool_dispatch_url}
    if settings.max_tool_rounds is not None and body.get("max_tool_rounds") is None:
        body = {**body, "max_tool_rounds": settings.max_tool_rounds}
    if settings.agent_permission is not AgentPermission.AUTO:
        permission = _stricter(settings.agent_permission, body.get("agent_permission"))
        body = {**body, "agent_permission": permission}
    return body


def _stricter(ours: AgentPermission, asked: Any) -> Any:
    """The permission that lets less run; what is none is left for the request to be refused."""
    order: list[Any] = list(AgentPermission)
    if asked is None or (asked in order and order.index(asked) < order.index(ours)):
        return ours
    return asked


def wants_usage(body: dict[str, Any]) -> bool:
    """Whether a stream is to end with a chunk that holds the usage.

    Raises:
        HttpError: "stream_options" is not what it should be, or there is no stream.
    """
    if body.get("stream_options") is None:
        return False
    options = check_keys(
        mapping("stream_options", body["stream_options"]),
        known=("include_usage",),
        refused={"include_obfuscation": "events are not padded here"},
    )
    wanted = switch("stream_options.include_usage", options.get("include_usage", False))
    if wanted and body.get("stream") is not True:
        raise invalid("stream_options", 'has no effect without "stream": true')
    return wanted


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
