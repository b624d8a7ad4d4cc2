"""Clients that leave: whatever their request was doing, its blocks are free at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from mistralrs_sdk import MemoryGpuConfig, Model, ModelBuilder, PagedAttentionMetaBuilder
from mistralrs_sdk.server import ServerSettings
from mistralrs_sdk.server.sse import event_stream, unless_disconnected
from tests.checkpoint_files import change_json
from tests.model_helpers import assert_idle
from tests.tiny_models import tiny_checkpoint
from tests.translated_apis import LONG, serving

CHAT = "/v1/chat/completions"
ENDLESS = {"messages": "hello", "ignore_eos": True}
RAW = {"prompt": "hello", "ignore_eos": True}


@pytest.fixture
async def model(tmp_path: Path) -> AsyncIterator[Model]:
    """Talks until it is stopped; runs two sequences at once."""
    path = tiny_checkpoint("llama", tmp_path)
    change_json(path / "config.json", max_position_embeddings=LONG)
    paged = PagedAttentionMetaBuilder().with_gpu_memory(MemoryGpuConfig.ContextSize(LONG))
    builder = ModelBuilder(path).with_force_cpu().with_num_threads(1).with_dtype("f32")
    async with await builder.with_paged_attn(paged.build()).with_max_num_seqs(2).build() as built:
        yield built


class Visit:
    """A connection by hand, so that it can be cut at any time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def ask(cls, url: str, path: str, body: dict[str, Any]) -> Visit:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return cls(reader, writer)

    async def events(self, count: int) -> list[bytes]:
        """The first lines of a stream that hold data."""
        found: list[bytes] = []
        while len(found) < count:
            line = await self.reader.readline()
            if line.startswith(b"data: "):
                found.append(line)
        return found

    async def leave(self) -> None:
        self._writer.transport.abort()
        await asyncio.sleep(0)


async def until(model: Model, **numbers: int) -> None:
    """Wait until the engine's numbers are these."""
    with anyio.fail_after(10):
        while True:
            stats = await model.stats()
            if all(getattr(stats, name) == value for name, value in numbers.items()):
                return
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**ENDLESS, "stream": True}),
        (CHAT, {**ENDLESS, "stream": True, "n": 2}),
        ("/v1/completions", {**RAW, "stream": True}),
        ("/v1/completions", {**RAW, "prompt": ["hello", "you"], "stream": True}),
    ],
)
async def test_leaving_a_stream_frees_its_blocks(model, path, body):
    """After some chunks the socket closes: nothing runs and nothing is held."""
    async with serving(model) as url:
        visit = await Visit.ask(url, path, body)
        await visit.events(3)
        await visit.leave()

        await assert_idle(model)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ENDLESS),
        ("/v1/completions", RAW),
        ("/v1/completions", {**RAW, "prompt": ["hello", "you"], "best_of": 1}),
    ],
)
async def test_leaving_an_answer_in_one_piece_frees_its_blocks(model, path, body):
    """A request that is not streamed ends with its client, too."""
    async with serving(model) as url:
        visit = await Visit.ask(url, path, body)
        await until(model, running=len(body["prompt"]) if "best_of" in body else 1)
        await visit.leave()

        await assert_idle(model)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_queued_takes_no_place(model, stream):
    """A request that waits is gone when its client is; those that run go on."""
    async with serving(model) as url:
        running = [await Visit.ask(url, CHAT, {**ENDLESS, "stream": True}) for _ in range(2)]
        for visit in running:
            await visit.events(1)
        queued = await Visit.ask(url, CHAT, {**ENDLESS, "stream": stream})
        await until(model, running=2, waiting=1)
        await queued.leave()

        await until(model, running=2, waiting=0)
        for visit in running:
            await visit.events(2)
            await visit.leave()
        await assert_idle(model)


async def test_a_bystander_sees_nothing_of_those_who_leave(model):
    """A stream's text is the same alone and beside streams that are cut."""
    asked = {**ENDLESS, "stream": True, "seed": 3, "max_tokens": 200}
    texts = []
    async with serving(model) as url:
        for cuts in (0, 5):
            bystander = await Visit.ask(url, CHAT, asked)
            first = await bystander.events(1)
            for _ in range(cuts):
                visit = await Visit.ask(url, CHAT, {**ENDLESS, "stream": True})
                await visit.events(1)
                await visit.leave()
            rest = (await bystander.reader.readuntil(b"[DONE]")).splitlines()
            texts.append(text_of([*first, *rest]))
            await bystander.leave()
        await assert_idle(model)

    assert texts[0] == texts[1] != ""


def text_of(lines: list[bytes]) -> str:
    """What the deltas among the lines of a stream add up to."""
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def test_leaving_leaves_no_task_behind(model):
    """However often clients leave, the loop's tasks and the answers that run do not grow."""
    async with serving(model) as url:
        before = len(asyncio.all_tasks())
        for number in range(20):
            body = {**ENDLESS, "stream": number % 2 == 0}
            visit = await Visit.ask(url, CHAT, body)
            if body["stream"]:
                await visit.events(1)
            await visit.leave()
        await assert_idle(model)
        with anyio.fail_after(2):
            while len(asyncio.all_tasks()) > before:
                await asyncio.sleep(0.005)


def event_app(events: Any, *, keep_alive: float) -> Starlette:
    """An app that answers with these events."""

    async def answer(request: Request) -> Response:
        return await event_stream(request, events(), done="[DONE]", keep_alive=keep_alive)

    return Starlette(routes=[Route("/", answer)])


async def run(app: Starlette, *, leaves_after: int | None = None) -> list[dict[str, Any]]:
    """What an app sends; the client leaves after so many messages, None: it stays."""
    sent: list[dict[str, Any]] = []
    left = asyncio.Event()
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == leaves_after:
            left.set()

    scope = {
        **{"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""},
        **{"asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": ""},
    }
    with anyio.fail_after(5):
        await app(scope, receive, send)
    return sent


def bodies(sent: list[dict[str, Any]]) -> list[str]:
    return [message["body"].decode() for message in sent if "body" in message]


async def test_a_quiet_stream_is_kept_alive():
    """Comments come where no event does, before the first one too."""

    async def events() -> AsyncIterator[dict[str, Any]]:
        await asyncio.sleep(0.12)
        yield {"a": 1}

    sent = bodies(await run(event_app(events, keep_alive=0.02)))

    assert sent[0] == ": keep-alive\n\n"
    assert sent[-2:] == ['data: {"a":1}\n\n', "data: [DONE]\n\n"]


async def test_a_busy_stream_has_no_comments():
    """As long as events come, nothing stands between them."""

    async def events() -> AsyncIterator[str]:
        for _ in range(10):
            await asyncio.sleep(0.01)
            yield "data: x\n\n"

    sent = bodies(await run(event_app(events, keep_alive=1)))

    assert sent == ["data: x\n\n"] * 10 + ["data: [DONE]\n\n"]


async def test_an_error_before_the_first_event_is_raised():
    """It is for the handler of errors: no stream has begun."""

    async def events() -> AsyncIterator[str]:
        raise KeyError("early")
        yield ""

    with pytest.raises(KeyError, match="early"):
        await run(event_app(events, keep_alive=1))


async def test_the_source_is_closed_when_the_client_leaves():
    """Its `finally` has run when the response returns."""
    closed = []

    async def events() -> AsyncIterator[str]:
        try:
            yield "data: x\n\n"
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    await run(event_app(events, keep_alive=10), leaves_after=2)

    assert closed == [True]


@pytest.mark.parametrize("whole", [False, True])
async def test_leaving_at_the_moment_the_answer_is_there_is_noticed(whole):
    """Some servers say once that a client has left: it must not be missed then."""
    closed, said = [], [{"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        if not said:
            await asyncio.sleep(60)
        return said.pop()

    async def events() -> AsyncIterator[str]:
        try:
            yield "data: x\n\n"
        finally:
            closed.append(True)

    request = Request({"type": "http", "headers": []}, receive)
    asking: Any = (
        unless_disconnected(request, asyncio.sleep(0, "answer"))
        if whole
        else event_stream(request, events(), done=None, keep_alive=10)
    )
    with anyio.fail_after(5), pytest.raises(ClientDisconnect):
        await asking

    assert closed == [True] * (not whole)


async def test_a_server_that_stops_waiting_lets_go_of_its_requests(model):
    """When the time to drain is over, what still streams is cut and frees its blocks."""
    settings = ServerSettings(access_log=None)
    async with serving(model, settings) as url:
        visit = await Visit.ask(url, CHAT, {**ENDLESS, "stream": True})
        await visit.events(1)
        tasks = [
            task for task in asyncio.all_tasks() if "RequestResponseCycle.run_asgi" in repr(task)
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        assert len(tasks) == 1
        await assert_idle(model)
        await visit.leave()
