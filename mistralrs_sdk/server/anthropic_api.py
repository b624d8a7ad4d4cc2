"""The routes of Anthropic's Messages API: messages, whole or streamed, and how long they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mistralrs_sdk import ChatCompletionChunkResponse, Model
from mistralrs_sdk.server.anthropic_events import MessageAnswer
from mistralrs_sdk.server.anthropic_request import read_request
from mistralrs_sdk.server.chat import prepare_chat
from mistralrs_sdk.server.errors import anthropic_error_body, read_json
from mistralrs_sdk.server.sse import event, event_stream, unless_disconnected
from mistralrs_sdk.server.targets import find_target
from mistralrs_sdk.server.translation import Event, count_tokens, named_events, to_the_end


def routes() -> list[Route]:
    """Return the routes under /v1/messages."""
    return [
        Route("/v1/messages", _create, methods=["POST"]),
        Route("/v1/messages/count_tokens", _count, methods=["POST"]),
    ]


async def _create(request: Request) -> Response:
    model: Model = request.app.state.model
    target = await find_target(request, await read_json(request))
    asked = read_request(target.body)
    answer = MessageAnswer(model=target.shown, max_tokens=asked.max_tokens)
    events = _answer(model, prepare_chat(request, asked.chat), answer, target.model_id)
    if asked.stream:
        return await event_stream(
            request,
            named_events(events),
            done=None,
            keep_alive=request.app.state.settings.keep_alive_seconds,
            error_event=_error_event,
        )
    await unless_disconnected(request, to_the_end(events))
    return JSONResponse(answer.message)


async def _count(request: Request) -> Response:
    model: Model = request.app.state.model
    target = await find_target(request, await read_json(request))
    asked = read_request(target.body, counts_only=True)
    counting = model.tokenize(asked.chat, model_id=target.model_id)
    ids = await unless_disconnected(request, counting)
    return JSONResponse({"input_tokens": len(ids)})


async def _answer(
    model: Model, chat: dict[str, Any], answer: MessageAnswer, model_id: str | None
) -> AsyncGenerator[Event, None]:
    async with await model.stream_chat_request(chat, model_id=model_id) as stream:
        for each in answer.start():
            yield each
        async for chunk in stream:
            if isinstance(chunk, ChatCompletionChunkResponse):
                for each in answer.add(chunk):
                    yield each
        tokens = await count_tokens(model, answer.thinking, model_id=model_id)
        for each in answer.finish(thinking_tokens=tokens):
            yield each


def _error_event(exc: Exception) -> str:
    return event(anthropic_error_body(exc), name="error")
