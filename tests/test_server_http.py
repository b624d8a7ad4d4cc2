"""What surrounds every endpoint: bodies, keys, ids, logs, origins, metrics, the description."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from mistralrs_sdk import ConfigError, Model
from mistralrs_sdk.server import ServerSettings, create_app
from tests.model_helpers import endless, tiny_builder
from tests.translated_apis import serving

CHAT = "/v1/chat/completions"
HELLO = {"messages": "hello", "max_tokens": 2}


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with await tiny_builder().build() as built:
        yield built


@contextlib.asynccontextmanager
async def browser(model: Model, **settings: object) -> AsyncIterator[httpx2.AsyncClient]:
    """A plain client of a server with these settings."""
    found = ServerSettings(**{"access_log": None, **settings})  # type: ignore[arg-type]
    async with serving(model, found) as url, httpx2.AsyncClient(base_url=url) as client:
        yield client


async def test_bodies_that_are_no_json_object_are_400(model):
    """Whatever garbage comes, the answer says what is wrong with it."""
    garbage = [
        *(b"", b"{", b"[]", b"3", b"null", b'"a"', b"\xff\xfe", b'{"messages": NaN}'),
        *(b"[" * 100_000, b'{"messages": "\\ud800"}', b'{"a": ' * 5000 + b"1" + b"}" * 5000),
    ]
    async with browser(model) as http:
        for body in garbage:
            for path in (CHAT, "/v1/completions", "/v1/embeddings", "/tokenize", "/re_isq"):
                answer = await http.post(path, content=body)
                assert answer.status_code == 400, body[:40]
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_body_over_the_limit_is_413(model):
    """Announced or in chunks; one that is just not too long is read."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    exact = json.dumps(HELLO).encode().ljust(1000)
    async with browser(model, max_body_bytes=1000) as http:
        fits = await http.post(CHAT, content=exact)
        announced = await http.post(CHAT, content=exact + b" ")
        chunked = await http.post(CHAT, content=chunks())
        after = await http.post(CHAT, json=HELLO)

    assert (fits.status_code, announced.status_code, chunked.status_code) == (200, 413, 413)
    assert announced.json()["error"]["type"] == "invalid_request_error"
    assert after.status_code == 200


async def test_a_key_is_asked_for(model):
    """As a bearer or x-api-key; without it 401, but for what holds no secret."""
    async with browser(model, api_key="s3cret") as http:
        statuses = [
            (await http.post(CHAT, json=HELLO, headers=headers)).status_code
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": "Basic s3cret"},
                {"authorization": "Bearer s3cret"},
                {"authorization": "bearer s3cret"},
                {"x-api-key": "s3cret"},
            )
        ]
        shut = [
            await http.get(path) for path in ("/metrics", "/v1/models", "/nope", "/v1/system/stats")
        ]
        everyone = [await http.get(path) for path in ("/", "/health", "/docs", "/openapi.json")]

    assert statuses == [401, 401, 401, 200, 200, 200]
    assert [answer.status_code for answer in shut] == [401] * 4
    assert [answer.status_code for answer in everyone] == [200] * 4
    assert shut[0].headers["www-authenticate"] == "Bearer"
    assert shut[0].json()["error"]["type"] == "authentication_error"


async def test_a_request_id_is_echoed_or_made(model):
    """A fit one comes back, others are replaced; every answer has one, errors too."""
    async with browser(model) as http:
        own = await http.get("/health", headers={"x-request-id": "mine-1"})
        long = await http.get("/health", headers={"x-request-id": "x" * 200})
        made = await http.get("/nope")
    async with browser(model, request_id_header=False) as http:
        none = await http.get("/health", headers={"x-request-id": "mine-1"})

    assert own.headers["x-request-id"] == "mine-1"
    assert len(long.headers["x-request-id"]) == len(made.headers["x-request-id"]) == 32
    assert "x-request-id" not in none.headers


async def test_only_named_origins_may_call(model):
    """A browser's question is answered without a key, for those origins."""
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "x"}
    async with browser(model, cors_origins=["https://a.example"], api_key="k") as http:
        named = await http.options(CHAT, headers={**ask, "origin": "https://a.example"})
        other = await http.options(CHAT, headers={**ask, "origin": "https://b.example"})
        refused = await http.get("/v1/models", headers={"origin": "https://a.example"})
    async with browser(model) as http:
        closed = await http.options(CHAT, headers={**ask, "origin": "https://a.example"})

    assert named.headers["access-control-allow-origin"] == "https://a.example"
    assert other.status_code == 400
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in closed.headers


async def test_the_log_has_a_line_for_each_request(model, caplog):
    """Who, what, how long and for which model; probes only if they are asked for."""
    with caplog.at_level(logging.INFO, logger="mistralrs_sdk.server.access"):
        async with browser(model, access_log="text") as http:
            await http.post(CHAT, json=HELLO, headers={"x-request-id": "abc"})
            await http.get("/nope%0Aforged")
            await http.get("/health")
        async with browser(model, access_log="json", access_log_health=True) as http:
            await http.get("/health")

    chat, missing, health = [record.message for record in caplog.records]
    assert chat.startswith(f"127.0.0.1 POST {CHAT} 200 ")
    assert chat.endswith(f"model={model.get_default_model_id()} id=abc")
    assert "/nope\\nforged" in missing
    assert json.loads(health)["path"] == "/health"
    assert json.loads(health)["status"] == 200


async def test_a_wrong_path_or_method_is_in_openais_shape(model):
    """404 and 405 say what was asked and where to look."""
    async with browser(model) as http:
        missing = await http.get("/v1/nothing")
        method = await http.get(CHAT)

    assert missing.status_code == 404
    assert "/v1/nothing" in missing.json()["error"]["message"]
    assert method.status_code == 405
    assert method.headers["allow"] == "POST"


async def test_allow_names_every_method_of_a_path(model):
    """Where several routes share it, too."""
    async with browser(model) as http:
        session = await http.post("/v1/sessions/x")
        response = await http.options("/v1/responses/x")

    assert (session.status_code, response.status_code) == (405, 405)
    assert session.headers["allow"] == "DELETE, GET, HEAD, PUT"
    assert response.headers["allow"] == "DELETE, GET, HEAD"


async def test_what_nobody_foresaw_is_a_500_without_details(model, monkeypatch, caplog):
    """The client learns the kind of error, the log the rest."""

    async def broken(*args: object, **kwargs: object) -> None:
        raise LookupError("a secret detail")

    monkeypatch.setattr(model, "send_chat_request", broken)
    async with browser(model) as http:
        answer = await http.post(CHAT, json=HELLO)

    assert answer.status_code == 500
    assert answer.headers["x-request-id"]
    assert "LookupError" in answer.json()["error"]["message"]
    assert "secret" not in answer.text
    assert "secret" in caplog.text


async def test_metrics_have_the_names_of_mistralrs(model):
    """Counters of requests and engines, with the buckets dashboards know."""
    async with browser(model) as http:
        await http.post(CHAT, json=HELLO)
        await http.post(CHAT, json={**HELLO, "model": "nobody"})
        await http.get("/health")
        running = await model.stream_chat_request(endless())
        await anext(running)
        text = (await http.get("/metrics")).text
        await running.aclose()
    name = model.get_default_model_id()
    lines = text.splitlines()

    labels = f'method="POST",model="{name}",path="{CHAT}"'
    assert f'http_requests_total{{{labels},status="200"}} 1.0' in lines
    assert (
        f'http_requests_total{{method="POST",model="unknown",path="{CHAT}",status="404"}} 1.0'
        in (lines)
    )
    assert f'mistralrs_sequences_running{{model="{name}"}} 1.0' in lines
    assert f'mistralrs_sequences_completed_total{{model="{name}",reason="length"}} 1.0' in lines
    for known in (
        *("http_request_duration_seconds_bucket", "http_request_body_bytes_sum"),
        *("mistralrs_tokens_processed_total", "mistralrs_prefix_cache_lookups_total"),
        *("mistralrs_prefix_cache_hits_total", "mistralrs_prefix_cache_evictions_total"),
        *("mistralrs_sequences_waiting", "mistralrs_sequences_capacity"),
        *("mistralrs_kv_cache_blocks_used", "mistralrs_kv_cache_blocks_total"),
        "mistralrs_paged_preemptions_total",
    ):
        assert any(line.startswith(f"{known}{{") for line in lines), known
    first = [line for line in lines if "time_to_first_token_seconds_bucket" in line]
    assert len(first) == 23
    assert first[0].startswith('mistralrs_time_to_first_token_seconds_bucket{le="0.001"')
    assert first[-1].endswith(" 2.0")
    assert "health" not in text
    assert "_created" not in text


async def test_clients_cannot_make_labels_of_their_own(model):
    """Methods, paths and models of their invention are counted together."""
    async with browser(model) as http:
        for number in range(3):
            await http.request(f"ODD{number}", f"/nothing/{number}")
            await http.post(CHAT, json={**HELLO, "model": f"nobody-{number}"})
        text = (await http.get("/metrics")).text
    counts = [line for line in text.splitlines() if line.startswith("http_requests_total{")]

    assert sorted(counts) == [
        'http_requests_total{method="POST",model="unknown",path="/v1/chat/completions",'
        'status="404"} 3.0',
        'http_requests_total{method="other",model="none",path="<unmatched>",status="404"} 3.0',
    ]


async def test_metrics_can_be_off(model):
    """503 then, as in mistral.rs."""
    async with browser(model, metrics=False) as http:
        answer = await http.get("/metrics")

    assert answer.status_code == 503


async def test_two_apps_count_for_themselves(model):
    """Each app has a registry of its own: making a second one in a process works."""
    async with browser(model) as first, browser(model) as second:
        await first.post(CHAT, json=HELLO)
        texts = [(await http.get("/metrics")).text for http in (first, second)]

    assert ["http_requests_total{" in text for text in texts] == [True, False]


async def test_requests_in_flight_are_a_gauge(model):
    """While an answer runs it counts, with its path and model."""
    async with browser(model) as http:
        asked = {"messages": "hello", "ignore_eos": True, "stream": True}
        async with http.stream("POST", CHAT, json=asked) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            text = (await http.get("/metrics")).text

    assert f'path="{CHAT}"}} 1.0' in next(
        line for line in text.splitlines() if line.startswith("http_requests_in_flight{")
    )


async def test_the_description_covers_every_route(model):
    """Each route but the page's and the description's own is described, with its errors."""
    allowed = ServerSettings(allow_runtime_adapters=True, allow_diagnostics=True, api_key="k")
    app = create_app(model, settings=allowed)
    async with serving(model, app.state.settings) as url, httpx2.AsyncClient(base_url=url) as http:
        document = (await http.get("/openapi.json")).json()
        page = await http.get("/docs")

    described = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    undescribed = ("/", "/ui", "/docs", "/openapi.json", "/api-doc/openapi.json")
    there = {
        (method, route.path.replace(":path}", "}"))
        for route in app.routes
        for method in route.methods - {"HEAD"}
        if route.path not in undescribed and not route.path.startswith("/ui/")
    }
    assert described == there
    names = {
        part.rpartition("/")[2]
        for part in json.dumps(document).split('"')
        if part.startswith("#/components/schemas/")
    }
    assert names == set(document["components"]["schemas"])
    assert "/v1/chat/completions" in page.text
    assert "<script" not in page.text


async def test_the_app_can_be_mounted(model):
    """In another app, under a prefix, it answers as it does alone."""
    app = create_app(model, settings=ServerSettings(access_log=None, api_key="k"))
    outer = Starlette(routes=[Mount("/llm", app=app)])
    transport = httpx2.ASGITransport(app=outer)
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
        key = {"authorization": "Bearer k"}
        answer = await http.post(f"/llm{CHAT}", json=HELLO, headers=key)
        health = await http.get("/llm/health")
        metrics = await http.get("/llm/metrics", headers=key)

    assert (answer.status_code, health.status_code) == (200, 200)
    assert 'status="200"' in metrics.text


async def test_probes_of_a_mounted_app_are_no_traffic(model, caplog):
    """They are not counted and not in the log, wherever the app is."""
    inner = create_app(model, settings=ServerSettings(access_log="text"))
    transport = httpx2.ASGITransport(app=Starlette(routes=[Mount("/llm", app=inner)]))
    with caplog.at_level(logging.INFO, logger="mistralrs_sdk.server.access"):
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
            await http.get("/llm/health")
            await http.get("/llm/v1/models")
            text = (await http.get("/llm/metrics")).text

    assert [record.message.split()[2] for record in caplog.records] == ["/llm/v1/models"]
    assert 'path="/health"' not in text
    assert 'path="/v1/models"' in text


async def test_without_its_page_the_root_says_ok(model):
    """And without docs there are none."""
    async with browser(model, web_page=False, docs=False) as http:
        root = await http.get("/")
        docs = await http.get("/docs")

    assert root.text == "OK"
    assert docs.status_code == 404


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1},
        {"port": True},
        {"port": 70_000},
        {"host": ""},
        {"api_key": ""},
        {"api_key": "schlüssel"},
        {"cors_origins": "https://a.example"},
        {"max_body_bytes": 0},
        {"keep_alive_seconds": 0},
        {"keep_alive_seconds": float("nan")},
        {"drain_seconds": -1},
        {"access_log": "xml"},
        {"metrics": 1},
        {"allow_diagnostics": "yes"},
        {"max_tool_rounds": -1},
        {"tool_dispatch_url": "ftp://x"},
    ],
)
def test_settings_are_checked_when_made(wrong):
    """The error names the setting; a key is not shown."""
    with pytest.raises(ConfigError, match=next(iter(wrong))) as caught:
        ServerSettings(**wrong)

    assert "schlüssel" not in str(caught.value)
    assert "hidden" not in repr(ServerSettings(api_key="hidden"))


@pytest.mark.parametrize(
    ("host", "key", "is_open"),
    [
        ("127.0.0.1", None, False),
        ("127.0.0.9", None, False),
        ("::1", None, False),
        ("localhost", None, False),
        ("0.0.0.0", None, True),
        ("::", None, True),
        ("example.org", None, True),
        ("0.0.0.0", "k", False),
    ],
)
def test_a_server_without_a_key_is_open_beyond_loopback(host, key, is_open):
    """That is what `serve` warns of."""
    assert ServerSettings(host=host, api_key=key).open_to_others is is_open


async def test_a_huge_prompt_does_not_hold_up_others(model):
    """While 5 MB are refused, /health answers quickly."""
    body = json.dumps({"messages": "word " * 1_000_000})
    gaps = []
    async with browser(model) as http:
        asking = asyncio.create_task(http.post(CHAT, content=body, timeout=60))
        while not asking.done():
            started = time.monotonic()
            health = await http.get("/health")
            gaps.append(time.monotonic() - started)
            assert health.status_code == 200
        answer = await asking

    assert answer.status_code == 400
    assert sorted(gaps)[len(gaps) // 2] < 0.2  # the slowest one depends on who shares the machine
