"""The routes of OpenAI's Responses API: create, stream, fetch, continue, cancel, delete, count."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator

import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mistralrs_sdk import ChatCompletionChunkResponse, Model
from mistralrs_sdk.server.chat import prepare_chat
from mistralrs_sdk.server.errors import RETRY_AFTER_SECONDS, HttpError, read_json
from mistralrs_sdk.server.responses_api_events import ResponseAnswer
from mistralrs_sdk.server.responses_api_request import ResponseRequest, previous_id, read_request
from mistralrs_sdk.server.responses_store import ResponsesStore, StoredResponse
from mistralrs_sdk.server.sse import event_stream, unless_disconnected
from mistralrs_sdk.server.targets import Target, find_target
from mistralrs_sdk.server.translation import (
    Event,
    count_tokens,
    invalid,
    named_events,
    to_the_end,
    unsupported,
)

START_SECONDS = 1.0
"""How long a background run is watched before it is said to be queued: until then it may fail."""

_MOST_ITEMS = 100


def routes(store: ResponsesStore | None = None) -> list[Route]:
    """Return the routes under /v1/responses. None: a store of its own, with the default limits.

    Who stops the server closes the store (`ResponsesStore.aclose`), which ends background runs.
    """
    kept = ResponsesStore() if store is None else store
    one = "/v1/responses/{response_id}"
    return [
        Route("/v1/responses", functools.partial(_create, kept), methods=["POST"]),
        Route(
            "/v1/responses/input_tokens", functools.partial(_count_input, kept), methods=["POST"]
        ),
        Route(one, functools.partial(_retrieve, kept), methods=["GET"]),
        Route(one, functools.partial(_delete, kept), methods=["DELETE"]),
        Route(f"{one}/cancel", functools.partial(_cancel, kept), methods=["POST"]),
        Route(f"{one}/input_items", functools.partial(_input_items, kept), methods=["GET"]),
    ]


@attrs.frozen(kw_only=True)
class _Run:
    """A request, the model it is for, and what is kept of it."""

    model: Model
    model_id: str | None
    asked: ResponseRequest
    stored: StoredResponse
    store: ResponsesStore


async def _create(store: ResponsesStore, request: Request) -> Response:
    target, asked = await _read(store, request)
    if asked.background and store.is_full:
        raise HttpError(
            429,
            "too many answers are made in the background: come back when some have ended",
            code="queue_full",
            headers={"retry-after": str(RETRY_AFTER_SECONDS)},
        )
    stored = StoredResponse(
        answer=ResponseAnswer(asked.response),
        items=asked.items,
        messages=asked.messages,
        request_bytes=request.state.body_bytes,
    )
    run = _Run(
        model=request.app.state.model,
        model_id=target.model_id,
        asked=asked,
        stored=stored,
        store=store,
    )
    if asked.background:
        await unless_disconnected(request, _start(run))
        return JSONResponse(stored.response)
    events = _answer(run)
    if asked.stream:
        return await event_stream(
            request,
            named_events(events),
            done=None,
            keep_alive=request.app.state.settings.keep_alive_seconds,
        )
    await unless_disconnected(request, to_the_end(events))
    if stored.answer.error is not None:
        raise stored.answer.error
    return JSONResponse(stored.response)


async def _retrieve(store: ResponsesStore, request: Request) -> Response:
    if request.query_params.get("stream", "false") != "false":
        raise unsupported("stream", "an answer is fetched whole; ask again while it runs")
    return JSONResponse(_stored(store, request).response)


async def _delete(store: ResponsesStore, request: Request) -> Response:
    id = _stored(store, request).id
    await store.delete(id)
    return JSONResponse({"id": id, "object": "response.deleted", "deleted": True})


async def _cancel(store: ResponsesStore, request: Request) -> Response:
    stored = _stored(store, request)
    if not stored.response["background"]:
        raise invalid(
            "response_id", f"({stored.id}) is no background run: only those are cancelled"
        )
    await stored.cancel()
    return JSONResponse(stored.response)


async def _input_items(store: ResponsesStore, request: Request) -> Response:
    items = list(_stored(store, request).items)
    query = request.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise invalid("order", f'({order!r:.80}) must be "asc" or "desc"')
    if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= _MOST_ITEMS:
        raise invalid("limit", f"({limit!r:.80}) must be a whole number from 1 to {_MOST_ITEMS}")
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise invalid("after", f"({after!r:.80}) is no item of this response")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
    )


async def _count_input(store: ResponsesStore, request: Request) -> Response:
    target, asked = await _read(store, request)
    counting = request.app.state.model.tokenize(asked.chat, model_id=target.model_id)
    ids = await unless_disconnected(request, counting)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(ids)})


async def _read(store: ResponsesStore, request: Request) -> tuple[Target, ResponseRequest]:
    """Check a request, and put the turns it goes on from before its own."""
    target = await find_target(request, await read_json(request))
    id = previous_id(target.body)
    previous = None
    if id is not None:
        previous = store.get(id)
        if previous is None:
            raise HttpError(
                404,
                f'"previous_response_id" ({id!r:.80}) is no stored response (any more): give its '
                "items as input",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        if previous.running:
            raise invalid("previous_response_id", f"({id}) is still running: wait until it ends")
    before = [] if previous is None else previous.conversation()
    asked = read_request(target.body, before=before, model=target.shown)
    return target, attrs.evolve(asked, chat=prepare_chat(request, asked.chat))


def _stored(store: ResponsesStore, request: Request) -> StoredResponse:
    id = request.path_params["response_id"]
    stored = store.get(id)
    if stored is None:
        raise HttpError(
            404,
            f"there is no response {id!r:.80} here (any more): answers are kept for a while, and "
            'not at all with "store": false',
            code="response_not_found",
            param="response_id",
        )
    return stored


async def _answer(run: _Run) -> AsyncGenerator[Event, None]:
    """Answer a request. What is wrong with it is raised before the first event; later, it fails."""
    model, model_id, asked, answer = run.model, run.model_id, run.asked, run.stored.answer
    async with await model.stream_chat_request(asked.chat, model_id=model_id) as stream:
        for each in answer.start():
            yield each
        try:
            async for chunk in stream:
                if isinstance(chunk, ChatCompletionChunkResponse):
                    for each in answer.add(chunk):
                        yield each
            tokens = await count_tokens(model, answer.reasoning, model_id=model_id)
            last = answer.finish(reasoning_tokens=tokens)
        except Exception as error:
            last = answer.fail(error)
    # a background run is stored already, and what fails whole is an HTTP error without an id
    if asked.store and not asked.background and (asked.stream or answer.error is None):
        run.store.put(run.stored)
    for each in last:
        yield each


async def _start(run: _Run) -> None:
    """Answer in the background. What fails at once is raised here, and leaves nothing behind."""
    started = asyncio.Event()
    stored = run.stored

    async def work() -> None:
        try:
            async with contextlib.aclosing(_answer(run)) as events:
                async for _ in events:
                    started.set()
        except asyncio.CancelledError:
            stored.answer.cancel()
            raise
        except Exception as error:
            if stored.task is None:
                raise
            stored.answer.fail(error)

    task = asyncio.create_task(work())
    waiting = asyncio.create_task(started.wait())
    try:
        await asyncio.wait(
            {task, waiting}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        waiting.cancel()
    if task.done():
        task.result()
    stored.task = task
    run.store.put(stored)
