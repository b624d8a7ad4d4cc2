"""Server-sent events: streams that start late enough to fail properly, and end with their client.

And the same care for answers that come in one piece (`unless_disconnected`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mistralrs_sdk.server.errors import error_body

T = TypeVar("T")

KEEP_ALIVE = ": keep-alive\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def event(data: dict[str, Any], *, name: str | None = None) -> str:
    """Return one event as it is sent: `event:` if it has a name, then `data:` with the JSON."""
    text = _encode(data)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"


def openai_error_event(exc: Exception) -> str:
    """Return the event that ends a stream of OpenAI's which failed in its middle."""
    return event(error_body(exc))


async def event_stream(
    request: Request,
    events: AsyncIterator[str | dict[str, Any]],
    *,
    done: str | None,
    keep_alive: float,
    error_event: Callable[[Exception], str] = openai_error_event,
) -> Response:
    """Answer with what `events` yields: a dict is an unnamed event, a str is sent as it is.

    The first one is waited for before the response starts, for `keep_alive` seconds, so that an
    error until then is raised here and becomes a plain HTTP error; one that comes later is sent as
    `error_event` makes it. `done` ends the stream, after an error too. After `keep_alive` seconds
    without an event a comment is sent. When the client leaves, `events` is closed at once: the
    generator sees a CancelledError or GeneratorExit, and must then let go of its request.

    Raises:
        ClientDisconnect: the client left before the first event.
        Exception: what `events` raised before its first event.
    """
    first = asyncio.ensure_future(_next(events))
    try:
        await _unless_gone(request, asyncio.wait({first}, timeout=keep_alive))
        if first.done():
            first.result()
    except BaseException:
        await _drop(first, events)
        raise
    return _EventStream(first, events, done=done, keep_alive=keep_alive, error_event=error_event)


async def unless_disconnected(request: Request, answer: Awaitable[T]) -> T:
    """Wait for an answer, and cancel it when the client leaves. The body must have been read.

    Raises:
        ClientDisconnect: the client left.
    """
    return await _unless_gone(request, answer)


class _EventStream(Response):
    """The response that sends events; always ends its source, whatever happens to it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[str | dict[str, Any] | None],
        events: AsyncIterator[str | dict[str, Any]],
        *,
        done: str | None,
        keep_alive: float,
        error_event: Callable[[Exception], str],
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]  # what an empty body would have
        self._first = first
        self._events = events
        self._done = done
        self._keep_alive = keep_alive
        self._error_event = error_event
        self._turn = asyncio.Lock()
        self._quiet = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as tasks:

                async def send_text(text: str, *, more: bool = True) -> None:
                    body = {"type": "http.response.body", "body": text.encode(), "more_body": more}
                    try:
                        async with self._turn:  # a comment and an event may come at once
                            await send(body)
                    except OSError:  # how some servers say that the client has left
                        tasks.cancel_scope.cancel()

                tasks.start_soon(_then_cancel, receive, tasks.cancel_scope)
                head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(head)
                tasks.start_soon(self._keep_awake, send_text)
                await self._send_all(send_text)
                tasks.cancel_scope.cancel()
        finally:
            await _drop(self._first, self._events)

    async def _send_all(self, send_text: Callable[..., Awaitable[None]]) -> None:
        try:
            item = await self._first
            while item is not None:
                self._quiet = False
                await send_text(item if isinstance(item, str) else event(item))
                item = await _next(self._events)
        except Exception as error:
            await send_text(self._error_event(error))
        await send_text("" if self._done is None else f"data: {self._done}\n\n", more=False)

    async def _keep_awake(self, send_text: Callable[..., Awaitable[None]]) -> None:
        while True:
            self._quiet = True
            await asyncio.sleep(self._keep_alive)
            if self._quiet:
                await send_text(KEEP_ALIVE)


async def _next(events: AsyncIterator[T]) -> T | None:
    return await anext(events, None)


async def _unless_gone(request: Request, answer: Awaitable[T]) -> T:
    """Race the answer against the client's leaving."""
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():  # some servers say it once
            raise ClientDisconnect
        return answering.result()
    finally:
        await _cancelled(answering, leaving)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _then_cancel(receive: Receive, scope: anyio.CancelScope) -> None:
    await _gone(receive)
    scope.cancel()


async def _drop(first: asyncio.Future[Any], events: AsyncIterator[Any]) -> None:
    """End a source of events, even while the task that does so is being cancelled."""
    with anyio.CancelScope(shield=True):
        await _cancelled(first)
        close: Callable[[], Coroutine[Any, Any, None]] | None = getattr(events, "aclose", None)
        if close is not None:
            with contextlib.suppress(Exception):  # the stream has ended: nobody is left to tell
                await close()


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    with anyio.CancelScope(shield=True):
        await asyncio.gather(*tasks, return_exceptions=True)
