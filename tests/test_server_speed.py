"""What the server may do for each chunk, counted, not timed; and how its process is set up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import sys
import types
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import attrs
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mistralrs_sdk.server import ServerSettings, create_app
from mistralrs_sdk.server.running import listening_on, run_server, uvicorn_config
from mistralrs_sdk.server.sse import event_stream
from tests.translated_apis import long_model

FEW, MANY = 20, 120


@attrs.define
class Work:
    """What a loop was given to do."""

    tasks: int = 0
    callbacks: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Work]:
    """Count the tasks and callbacks that the running loop is given meanwhile."""
    loop = asyncio.get_running_loop()
    work = Work()
    soon, threadsafe = loop.call_soon, loop.call_soon_threadsafe

    def make_task(loop: Any, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        work.tasks += 1
        return asyncio.Task(coroutine, loop=loop, **more)

    def count(schedule: Any) -> Any:
        def counting(*args: Any, **more: Any) -> Any:
            work.callbacks += 1
            return schedule(*args, **more)

        return counting

    loop.set_task_factory(make_task)
    vars(loop).update(call_soon=count(soon), call_soon_threadsafe=count(threadsafe))
    try:
        yield work
    finally:
        loop.set_task_factory(None)
        del loop.call_soon, loop.call_soon_threadsafe


async def answer_of(app: Starlette, path: str, body: Any = None) -> tuple[list[bytes], Work]:
    """What an app sends, message by message, and what it took."""
    asked = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])
    sent: list[bytes] = []

    async def receive() -> Any:
        return next(asked, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    scope = {
        **{"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""},
        **{"asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": ""},
    }
    with anyio.fail_after(20), counted() as work:
        await app(scope, receive, send)
    return sent, work


def ready_events(count: int) -> Starlette:
    """An app whose events are there at once."""

    async def events() -> AsyncIterator[dict[str, Any]]:
        for number in range(count):
            yield {"number": number}

    async def answer(request: Request) -> Response:
        return await event_stream(request, events(), done="[DONE]", keep_alive=5)

    return Starlette(routes=[Route("/", answer, methods=["POST"])])


async def test_an_event_is_one_message():
    """Beside them there are the head and the end."""
    sent, _ = await answer_of(ready_events(MANY), "/")

    assert len(sent) == MANY + 2


async def test_an_event_that_is_ready_costs_no_task_and_no_turn_of_the_loop():
    """A long stream gives the loop no more to do than a short one."""
    _, few = await answer_of(ready_events(FEW), "/")
    _, many = await answer_of(ready_events(MANY), "/")

    assert many == few


async def test_a_streamed_token_costs_two_callbacks_and_no_task(tmp_path):
    """One callback hands over the step's outputs, the other wakes who reads them."""
    asked = {"messages": "hello", "stream": True, "ignore_eos": True, "temperature": 0}
    async with await long_model(tmp_path) as model:
        app = create_app(model, settings=ServerSettings(access_log=None))
        _, few = await answer_of(app, "/v1/chat/completions", {**asked, "max_tokens": FEW})
        sent, many = await answer_of(app, "/v1/chat/completions", {**asked, "max_tokens": MANY})

    assert many.tasks == few.tasks
    assert many.callbacks - few.callbacks <= 2 * (MANY - FEW) + FEW
    assert len(sent) <= MANY + 3


async def test_a_chunk_is_short(tmp_path):
    """What stands around the text: ids and nulls, no usage; who speaks is said once."""
    asked = {"messages": "hello", "stream": True, "ignore_eos": True, "max_tokens": FEW}
    async with await long_model(tmp_path) as model:
        app = create_app(model, settings=ServerSettings(access_log=None))
        sent, _ = await answer_of(app, "/v1/chat/completions", {**asked, "temperature": 0})
        name = str(model.get_default_model_id())
    _, first, *more = sent
    chunk = json.loads(first.removeprefix(b"data: "))
    around = first.decode().replace(name, "").replace(chunk["id"], "")

    assert len(around) - len(chunk["choices"][0]["delta"]["content"]) < 220
    assert not any(b"assistant" in data or b"usage" in data for data in more)


async def test_a_server_of_its_own_runs_on_uvloop(monkeypatch):
    """Where uvloop is not installed asyncio's loop does."""

    async def loop_kind() -> str:
        return type(asyncio.get_running_loop()).__name__

    class Faster(asyncio.SelectorEventLoop):
        pass

    def run() -> str:
        return run_server(loop_kind())

    monkeypatch.setitem(sys.modules, "uvloop", types.SimpleNamespace(new_event_loop=Faster))
    fast = await asyncio.to_thread(run)
    monkeypatch.setitem(sys.modules, "uvloop", None)

    assert fast == "Faster"
    assert await asyncio.to_thread(run) == type(asyncio.get_running_loop()).__name__


def test_what_was_there_before_a_server_is_not_collected_again():
    """Nothing stays frozen behind it."""

    async def frozen() -> int:
        return gc.get_freeze_count()

    before = gc.get_freeze_count()

    assert run_server(frozen()) > 1000
    assert gc.get_freeze_count() <= before


async def test_a_chunk_does_not_wait_for_the_one_before():
    """Nagle's algorithm is off: else a stream's first chunk would come 40 ms after its head."""
    served: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_once = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        served.set_result(at_once)
        writer.close()

    with listening_on("127.0.0.1", 0) as place:
        async with await asyncio.start_server(connected, sock=place):
            _, writer = await asyncio.open_connection(*place.getsockname())

            assert await served
            writer.close()


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[int]:
    """A server that answers with the body it got, set up as `serve` does it; gives its port."""

    async def echo(request: Request) -> Response:
        return Response(await request.body())

    app = Starlette(routes=[Route("/", echo, methods=["POST"])])
    server = uvicorn.Server(uvicorn_config(app, ServerSettings()))
    with listening_on("127.0.0.1", 0) as place:
        task = asyncio.create_task(server._serve([place]))
        while not server.started:
            await asyncio.sleep(0.005)
        try:
            yield place.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def answer_to(port: int, head: str, body: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{head}\r\n{body}".encode())
    with anyio.fail_after(5):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("offer", ["", "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"])
async def test_a_client_that_offers_http_2_is_answered(offer):
    """Java's does in each request; the body is read all the same."""
    connection = "Connection: Upgrade, HTTP2-Settings\r\n" if offer else ""
    async with echoing() as port:
        answer = await answer_to(port, f"{connection}{offer}Content-Length: 5\r\n", "hello")

    assert answer.endswith(b"\r\n\r\nhello")


async def test_a_head_without_end_is_refused():
    """Nobody fills the memory with headers."""
    async with echoing() as port:
        answer = await answer_to(port, f"X-Long: {'a' * 100_000}", "")

    assert answer.startswith(b"HTTP/1.1 400")
