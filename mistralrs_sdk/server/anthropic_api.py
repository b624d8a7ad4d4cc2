"""The routes of Anthropic's Messages API: messages, whole or streamed, and how long they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mistralrs_sdk import ChatCompletionChunkResponse, Model
from mistralrs_sdk.server.anthropic_events import MessageAnswer
from mistralrs_sdk.server.anthropic_request import read_request
from mistralrs_sdk.server.chat import prepare_chat
from mistralrs_sdk.server.errors import HttpError, as_http_error, read_json
from mistralrs_sdk.server.sse import event, event_stream, unless_disconnected
from mistralrs_sdk.server.targets import find_target
from mistralrs_sdk.server.translation import Event, count_tokens, named_events, to_the_end

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def routes() -> list[Route]:
    """Return the routes under /v1/messages."""
    return [
        Route("/v1/messages", _in_its_shape(_create), methods=["POST"]),
        Route("/v1/messages/count_tokens", _in_its_shape(_count), methods=["POST"]),
    ]


def anthropic_error_body(error: HttpError) -> dict[str, Any]:
    """Return Anthropic's error object for an answer other than 200."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def anthropic_error_response(exc: BaseException) -> JSONResponse:
    """Return the response for an exception, in Anthropic's shape."""
    error = as_http_error(exc)
    return JSONResponse(
        anthropic_error_body(error), status_code=error.status, headers=error.headers
    )


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
    return event(anthropic_error_body(as_http_error(exc)), name="error")


def _in_its_shape(
    endpoint: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint, with errors as clients of this API read them."""

    async def answering(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:
            return anthropic_error_response(error)

    return answering
