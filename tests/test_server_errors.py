"""Errors over HTTP: deadlines that pass, and the shape in which each API's clients read errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from mistralrs_sdk import DeadlineError, InferenceError, Model
from mistralrs_sdk.server import ServerSettings, create_app
from mistralrs_sdk.server.errors import as_http_error
from tests.model_helpers import assert_idle, tiny_builder
from tests.scripted_rounds import Say
from tests.translated_apis import answering, long_model, serving

MESSAGES = [{"role": "user", "content": "hello"}]
ENDLESS = {"ignore_eos": True, "max_tokens": 10_000}
SHAPES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, **ENDLESS},
    "/v1/completions": {"prompt": "hello", **ENDLESS},
    "/v1/responses": {"input": "hello", "ignore_eos": True},
    "/v1/messages": {"messages": MESSAGES, "model": "default", **ENDLESS},
}
"""A request that does not end by itself, for each way to ask for an answer."""
NO_TIME, SOME_TIME = 1e-4, 0.3
LATE = DeadlineError("the request failed: its deadline passed")


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with await tiny_builder().build() as built:
        yield built


@pytest.fixture
async def talker(tmp_path) -> AsyncIterator[Model]:
    async with await long_model(tmp_path) as built:
        yield built


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of every event of a stream."""
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", SHAPES)
async def test_a_deadline_that_passes_is_504(talker, path):
    """Typed, and with word to clients not to wait as long again; the request is gone."""
    async with serving(talker) as url, httpx2.AsyncClient(base_url=url) as http:
        answer = await http.post(path, json={**SHAPES[path], "deadline": SOME_TIME})
        await assert_idle(talker)

    assert answer.status_code == 504
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert error["type"] == "timeout_error"
    assert "its deadline passed" in error["message"]
    if path != "/v1/messages":
        assert error["code"] == "deadline_exceeded"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_deadline_that_passes_before_the_first_token_is_504_of_a_stream_too(model, path):
    """Nothing was sent yet, so it is a plain HTTP error."""
    asked = {**SHAPES[path], "max_tokens": 100, "stream": True, "deadline": NO_TIME}
    async with serving(model) as url, httpx2.AsyncClient(base_url=url) as http:
        answer = await http.post(path, json=asked)

    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("path", SHAPES)
async def test_a_deadline_that_passes_in_mid_stream_is_an_event_of_its_type(talker, path):
    """The last event says so in the words of the API; what had come stays."""
    async with serving(talker) as url, httpx2.AsyncClient(base_url=url, timeout=30) as http:
        asked = {**SHAPES[path], "stream": True, "deadline": SOME_TIME}
        answer = await http.post(path, json=asked)

    *before, last = events_of(answer.text)
    assert answer.status_code == 200
    assert before
    if path == "/v1/responses":
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["code"] == "deadline_exceeded"
    else:
        assert last["error"]["type"] == "timeout_error"


async def test_a_deadline_is_an_error_of_each_official_client(talker):
    """Anthropic's has a class for it, and neither tries again."""
    late = {"deadline": SOME_TIME, "ignore_eos": True}
    async with serving(talker) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(
                    model="default", messages=MESSAGES, extra_body=late
                )
        async with anthropic.AsyncAnthropic(base_url=url, api_key="any") as client:
            with pytest.raises(anthropic.APIStatusError) as told:
                await client.messages.create(
                    model="default", messages=MESSAGES, max_tokens=10_000, extra_body=late
                )
        completed = (await talker.metrics()).completed

    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert told.value.status_code == 504
    assert told.value.body["error"]["type"] == "timeout_error"
    assert sum(completed.values()) == 2


def test_other_failures_stay_500():
    """What a deadline ended is told by its type: a text that reads like it is no timeout."""
    alike = InferenceError(str(LATE))
    told = [as_http_error(error).status for error in (LATE, alike)]

    assert told == [504, 500]


@pytest.mark.parametrize("mounted", [False, True])
async def test_what_surrounds_messages_has_anthropics_shape(model, mounted, monkeypatch):
    """Key, path, method, body and what nobody foresaw; other paths keep OpenAI's."""
    settings = ServerSettings(access_log=None, api_key="k", max_body_bytes=1000)
    app: Any = create_app(model, settings=settings)
    answering(model, Say(error=LookupError("a secret")), monkeypatch)
    prefix = "/llm" if mounted else ""
    if mounted:
        app = Starlette(routes=[Mount(prefix, app=app)])
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url=f"http://x{prefix}") as http:
        no_key = await http.post("/v1/messages", json=SHAPES["/v1/messages"])
        http.headers["x-api-key"] = "k"
        answers = [
            await http.get("/v1/messages"),
            await http.get("/v1/messages/batches"),
            await http.post("/v1/messages", content=b"{"),
            await http.post("/v1/messages", content=b" " * 2000),
            await http.post("/v1/messages", json={**SHAPES["/v1/messages"], "model": "nobody"}),
            await http.post("/v1/messages", json=SHAPES["/v1/messages"]),
        ]
        other = await http.get("/v1/messagesque")

    told = [(answer.status_code, answer.json()["error"]["type"]) for answer in (no_key, *answers)]
    assert told == [
        (401, "authentication_error"),
        (405, "invalid_request_error"),
        (404, "not_found_error"),
        (400, "invalid_request_error"),
        (413, "request_too_large"),
        (404, "not_found_error"),
        (500, "api_error"),
    ]
    assert all(answer.json()["type"] == "error" for answer in (no_key, *answers))
    assert set(other.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_full_queue_and_a_dead_engine_have_anthropics_shape():
    """429 with the time to come back, 503 with the reason."""

    def break_it(engine: Any) -> None:
        def step() -> None:
            raise RuntimeError("out of luck")

        engine.step = step

    builder = tiny_builder().with_max_num_seqs(1).with_max_queue(0)
    async with (
        await builder.build() as model,
        serving(model) as url,
        httpx2.AsyncClient(base_url=url) as http,
    ):
        asked = {**SHAPES["/v1/messages"], "max_tokens": 200}
        async with http.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as s:
            await anext(s.aiter_lines())
            full = await http.post("/v1/messages", json=asked)
        await model.inner().thread.call(break_it)
        dead = [await http.post("/v1/messages", json=asked) for _ in range(2)][1]

    assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(full.headers["retry-after"]) >= 1
    assert (dead.status_code, dead.json()["error"]["type"]) == (503, "overloaded_error")
