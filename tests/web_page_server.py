"""A server for the web page whose answers a test writes, and a browser to look at it with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import anyio.from_thread
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from mistralrs_sdk import EngineClosedError, RequestError
from mistralrs_sdk.server import ServerSettings, create_app, web_page
from mistralrs_sdk.server.errors import HttpError, error_response
from tests.model_helpers import tiny_builder

USAGE = {
    "choices": [],
    "usage": {"completion_tokens": 5, "total_tokens": 64, "avg_compl_tok_per_sec": 41.5},
}


def said(content: str = "", *, thought: str = "", reason: str | None = None) -> dict[str, Any]:
    """Return a chunk in OpenAI's shape."""
    delta = {"content": content, "reasoning_content": thought}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


class FakeModel:
    """What the page's numbers are read from."""

    unloaded = ("sleeping",)
    adapters = ("polite",)

    def __init__(self) -> None:
        self.metrics_now = SimpleNamespace(
            running=3,
            waiting=2,
            capacity=32,
            blocks_used=64,
            blocks_total=256,
            prefix_lookups=8,
            prefix_hits=6,
            preemptions=1,
            tokens_processed=1000,
        )

    def get_default_model_id(self) -> str:
        return "tiny"

    def inner(self, *, model_id: str) -> None:
        if model_id not in ("tiny", "embedder", *self.unloaded):
            raise RequestError(f"there is no model {model_id!r}")

    async def metrics(self, *, model_id: str) -> SimpleNamespace:
        if model_id in self.unloaded:
            raise EngineClosedError("unloaded")
        return self.metrics_now

    def max_sequence_length(self, *, model_id: str) -> int:
        return 256

    async def list_lora_adapters(self, *, model_id: str) -> tuple[SimpleNamespace, ...]:
        if model_id == "embedder":
            raise RequestError("it embeds")
        return tuple(SimpleNamespace(alias=alias) for alias in self.adapters)


class FakeServer:
    """Serves the page under `address` and answers chats with the chunks of `answer`."""

    def __init__(self, *, prefix: str = "") -> None:
        self.model = FakeModel()
        self.app = self._app(prefix)
        self.address = ""
        """Where the page is while the server runs."""
        self._prefix = prefix
        self.reset()

    def reset(self) -> None:
        """Greet every chat, and forget what was asked."""
        self.answer: Sequence[dict[str, Any] | str] = [said("Hello!"), said(reason="stop"), USAGE]
        self.refusal: HttpError | None = None
        self.key: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.hold_after: int | None = None
        """How many chunks come before the answer waits for `go_on`; None: all of them."""
        self.go_on = threading.Event()
        self.left = threading.Event()
        """Set when a client leaves before the answer is complete."""

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeServer]:
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{listening.getsockname()[1]}{self._prefix}/"
        config = uvicorn.Config(self.app, log_level="error", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield self
        finally:
            self.go_on.set()
            server.should_exit = True
            thread.join(10)
            listening.close()
            assert not thread.is_alive()

    def _app(self, prefix: str) -> Starlette:
        app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                *web_page.routes(),
            ],
            exception_handlers={HttpError: _refuse},
        )
        app.state.model = self.model
        return Starlette(routes=[Mount(prefix, app)]) if prefix else app

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        ids = ("default", "tiny", "sleeping")
        listed: list[dict[str, Any]] = [{"id": id, "status": "loaded"} for id in ids]
        return JSONResponse({"data": [*listed, {"id": "polite", "parent": "tiny"}]})

    async def _chat(self, request: Request) -> Response:
        self._check_key(request)
        self.bodies.append(await request.json())
        if self.refusal is not None:
            raise self.refusal
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        try:
            for index, chunk in enumerate(self.answer):
                if index == self.hold_after:
                    while not self.go_on.is_set():
                        yield ": still here\n\n"
                        await asyncio.sleep(0.02)
                yield chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"
        except (GeneratorExit, asyncio.CancelledError):
            self.left.set()
            raise

    def _check_key(self, request: Request) -> None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            raise HttpError(401, "the API key is missing or wrong")


async def _refuse(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope)


@contextlib.contextmanager
def served_model(**settings: Any) -> Iterator[str]:
    """Serve a tiny model with `create_app` in a thread; yield the address."""
    listening = socket.create_server(("127.0.0.1", 0))
    with anyio.from_thread.start_blocking_portal() as portal:
        model = portal.call(tiny_builder().build)
        app = create_app(model, settings=ServerSettings(**{"access_log": None, **settings}))
        config = uvicorn.Config(app, log_level="error", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        served = portal.start_task_soon(server.serve, [listening])
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            served.result(10)
            portal.call(model.aclose)


@contextlib.contextmanager
def headless_chromium() -> Iterator[Any]:
    """Yield Playwright's browser; skip the test where there is no Chromium or no Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as started:
        browser = launch_chromium(started.chromium)
        try:
            yield browser
        finally:
            browser.close()


def launch_chromium(kind: Any, *flags: str) -> Any:
    """Return a browser of Playwright's kind, started with these flags; skip where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("needs a Chromium on the path")
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    return kind.launch(executable_path=path, args=[*as_root, *flags])


@contextlib.contextmanager
def opened(browser: Any, address: str, **settings: Any) -> Iterator[Any]:
    """Yield the page in a browser that has never seen it; fail if it had errors of its own."""
    usual = {"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce"}
    context = browser.new_context(**{**usual, **settings})
    page = context.new_page()
    page.set_default_timeout(10_000)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if _is_fault(message) else None)
    try:
        page.goto(address)
        yield page
        assert faults == []
    finally:
        context.close()


def wait_for_models(page: Any) -> None:
    """Wait until the page knows which models there are: requests name one from then on."""
    page.locator("#model option").last.wait_for(state="attached")


def ask(page: Any, text: str, *, wait: bool = True) -> Any:
    """Send a message with the keyboard and return the newest answer, complete if `wait`."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    answer = page.locator(".message.assistant").last
    answer.wait_for()
    if wait:
        page.locator("#send:visible").wait_for()
    return answer


def _is_fault(message: Any) -> bool:
    # that an answer was refused is what some tests are about
    return message.type in ("error", "warning") and "Failed to load resource" not in message.text
