"""What pages of other sites can have a browser send, and names that lead here: refused with 403."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.routing import Mount

from mistralrs_sdk import ConfigError, Model
from mistralrs_sdk.cli import serve
from mistralrs_sdk.server import ServerSettings, create_app
from mistralrs_sdk.server.origins import is_own_name, refused_page
from tests.model_helpers import tiny_builder
from tests.test_serve_command import parse
from tests.translated_apis import serving

CHAT = "/v1/chat/completions"
EVIL = "https://evil.example"
ALLOWED = ("https://a.example", "http://localhost:3000")


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with await tiny_builder().build() as built:
        yield built


@contextlib.asynccontextmanager
async def client(model: Model, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
    found = ServerSettings(**{"access_log": None, **settings})
    async with serving(model, found) as url, httpx2.AsyncClient(base_url=url) as http:
        yield http


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({}, True),  # curl, SDKs
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "same-origin", "origin": "http://me:1234"}, True),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "Cross-Site"}, False),
        ({"origin": "http://me:1234"}, True),
        ({"origin": "http://ME:1234", "host": "Me:1234"}, True),
        ({"origin": "https://me:1234"}, True),  # something before this server speaks TLS
        ({"origin": "https://me", "host": "me"}, True),
        ({"origin": "https://me", "host": "me:443"}, True),
        ({"origin": "http://me", "host": "me:80"}, True),
        ({"origin": "http://[::1]:1234", "host": "[::1]:1234"}, True),
        ({"origin": "http://me"}, False),
        ({"origin": "http://me:3000"}, False),
        ({"origin": "http://me:12345"}, False),
        ({"origin": EVIL}, False),
        ({"origin": f"{EVIL}.me:1234"}, False),
        ({"origin": "null"}, False),
        ({"origin": "null", "host": ""}, False),
        ({"origin": "", "host": ""}, False),
        ({"origin": EVIL, "sec-fetch-site": "none"}, False),
        ({"origin": "chrome-extension://abc", "sec-fetch-site": "none"}, False),
        # a proxy between gave it another name: the browser's own word counts
        ({"origin": EVIL, "sec-fetch-site": "same-origin"}, True),
        ({"origin": "https://a.example", "sec-fetch-site": "cross-site"}, True),
        ({"origin": "HTTPS://A.example"}, True),
        ({"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, True),
        ({"origin": "http://localhost:3001", "sec-fetch-site": "same-site"}, False),
        ({"origin": "https://a.example.evil.example"}, False),
    ],
)
def test_pages_of_this_server_and_of_named_origins_pass(headers, passes):
    """A browser's two headers decide; what has neither comes from no browser."""
    found = refused_page(Headers({"host": "me:1234", **headers}), ALLOWED)

    assert (found is None) is passes
    assert refused_page(Headers(headers), ("*",)) is None


@pytest.mark.parametrize(
    ("host", "own"),
    [
        *((name, True) for name in ("127.0.0.1:1234", "localhost", "LOCALHOST:1", "[::1]:1234")),
        *((name, True) for name in ("[fe80::1]", "app.localhost:1234", "localhost.:1234", "")),
        *((name, True) for name in ("192.168.1.7:1234", "chat.example:99", "Chat.Example.")),
        *((name, False) for name in ("evil.example:1234", "x.chat.example", "127.0.0.1.evil")),
        *((name, False) for name in ("localhost.evil:1", "notlocalhost", "[evil]:1")),
    ],
)
def test_addresses_localhost_and_named_hosts_are_own_names(host, own):
    """Any other name may be somebody else's that leads here."""
    assert is_own_name(host, ("chat.example",)) is own


WRITES = (
    ("POST", CHAT),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/resp_1/cancel"),
    ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/tokenize"),
    ("POST", "/re_isq"),
    ("POST", "/v1/models/unload"),
    ("POST", "/v1/models/reload"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/system/doctor"),
    ("POST", "/v1/agent/approvals/x"),
    ("PUT", "/v1/sessions/s"),
    ("DELETE", "/v1/sessions/s"),
    ("PATCH", "/"),
    ("POST", "/nothing"),
)


async def test_whatever_changes_something_is_refused_to_a_foreign_page(model):
    """In OpenAI's shape, before anything is read or computed, whatever the content type says."""
    body = json.dumps({"messages": "hello", "prompt": "hello", "max_tokens": 2})
    settings = {"allow_diagnostics": True, "allow_runtime_adapters": True}
    async with client(model, **settings) as http:
        for kind in ("text/plain", "application/json"):
            for method, path in WRITES:
                headers = {"origin": EVIL, "sec-fetch-site": "cross-site", "content-type": kind}
                answer = await http.request(method, path, content=body, headers=headers)

                error = answer.json()["error"]
                assert (answer.status_code, path) == (403, path)
                assert (error["type"], error["code"]) == ("permission_error", "cross_site_request")
                assert EVIL in error["message"]
                assert "cors_origins" in error["message"]
        started = (await model.metrics()).completed
        loaded = model.is_model_loaded()

    assert sum(started.values()) == 0
    assert loaded


async def test_under_messages_the_refusals_have_anthropics_shape(model):
    """As every error there."""
    async with client(model, allowed_hosts=()) as http:
        for headers in ({"origin": EVIL}, {"host": "evil.example"}):
            answer = await http.post("/v1/messages", json={}, headers=headers)

            assert answer.status_code == 403
            assert answer.json()["type"] == "error"
            assert answer.json()["error"]["type"] == "permission_error"


async def test_reading_is_left_to_the_browser(model):
    """It shows a foreign page no answer; links to the page and the description work."""
    headers = {"sec-fetch-site": "cross-site", "origin": EVIL}
    async with client(model) as http:
        found = [await http.get(path, headers=headers) for path in ("/", "/docs", "/v1/models")]

    assert [answer.status_code for answer in found] == [200] * 3
    assert all("access-control-allow-origin" not in answer.headers for answer in found)


async def test_an_origin_that_was_let_in_may_send(model):
    """It reads the answer, and what an error says of when to come back."""
    asked = {"messages": "hello", "max_tokens": 2}
    headers = {"origin": "https://a.example", "sec-fetch-site": "cross-site"}
    ask = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    async with client(model, cors_origins=["https://A.example"]) as http:
        answer = await http.post(CHAT, json=asked, headers=headers)
        leave = await http.options(CHAT, headers=ask)

    assert answer.status_code == leave.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    assert "retry-after" in answer.headers["access-control-expose-headers"]
    assert leave.headers["access-control-allow-private-network"] == "true"


async def test_with_a_key_origins_do_not_matter(model):
    """No browser adds it by itself: who sends it means it, a proxy that passes Origin on too."""
    body = {"messages": "hello", "max_tokens": 2}
    async with client(model, api_key="k") as http:
        without = await http.post(CHAT, json=body, headers={"origin": EVIL})
        key = {"origin": EVIL, "authorization": "Bearer k"}
        with_key = await http.post(CHAT, json=body, headers=key)

    assert (without.status_code, with_key.status_code) == (401, 200)


async def test_a_name_that_is_not_the_servers_is_refused(model):
    """For reading too: to a browser such a page is of one origin with the server."""
    async with client(model, allowed_hosts=["Chat.example"]) as http:
        refused = [
            await http.request(method, path, headers={"host": "evil.example:80"})
            for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("POST", CHAT))
        ]
        named = await http.get("/v1/models", headers={"host": "chat.example:80"})
        usual = await http.get("/v1/models")
    async with client(model) as http:
        anybody = await http.get("/v1/models", headers={"host": "evil.example"})

    assert [answer.status_code for answer in refused] == [403] * 3
    assert refused[0].json()["error"]["code"] == "host_not_allowed"
    assert "evil.example" in refused[0].json()["error"]["message"]
    assert [named.status_code, usual.status_code, anybody.status_code] == [200] * 3


async def test_pages_of_the_app_around_it_may_send(model):
    """Mounted, it has the names and origins of that app, whichever those are."""
    inner = create_app(model, settings=ServerSettings(access_log=None))
    outer = Starlette(routes=[Mount("/llm", app=inner)])
    body = {"messages": "hello", "max_tokens": 2}
    transport = httpx2.ASGITransport(app=outer)
    async with httpx2.AsyncClient(transport=transport, base_url="https://app.example") as http:
        own = await http.post(f"/llm{CHAT}", json=body, headers={"origin": "https://app.example"})
        other = await http.post(f"/llm{CHAT}", json=body, headers={"origin": EVIL})
        messages = await http.post("/llm/v1/messages", json=body, headers={"origin": EVIL})

    assert (own.status_code, other.status_code, messages.status_code) == (200, 403, 403)
    assert messages.json()["type"] == "error"


@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        ((), ()),
        (("--host", "::1"), ()),
        (("--host", "localhost"), ()),
        (("--host", "0.0.0.0"), None),
        (("--api-key", "k"), None),
        (("--allowed-host", "chat.example"), ("chat.example",)),
        (("--host", "0.0.0.0", "--allowed-host", "a", "--allowed-host", "B"), ("a", "b")),
        (("--allowed-host", "*"), None),
    ],
)
def test_a_keyless_server_on_loopback_answers_to_its_own_names(flags, hosts):
    """Where others reach it, or a key is needed, to any; the flag says which else."""
    assert serve.settings_from(parse("-m", "x", *flags), {}).allowed_hosts == hosts


@pytest.mark.parametrize(
    "settings",
    [
        *({"cors_origins": [value]} for value in ("null", "a.example", "https://a.example/", "")),
        *({"cors_origins": [value]} for value in ("https://a.example/x", "https://", 3)),
        {"cors_origins": "https://a.example"},
        *({"allowed_hosts": [value]} for value in ("a:80", "http://a", "", "*", "*.a", 3)),
        {"allowed_hosts": "a"},
    ],
)
def test_what_no_browser_would_send_is_refused_as_a_setting(settings):
    """It would never match; "null" is what any page can be called."""
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServerSettings(**settings)


async def test_the_description_tells_of_the_refusals(model):
    """For what changes something where no key is asked for, and for all where names count."""

    async def refusing(**settings: Any) -> set[str]:
        async with client(model, **settings) as http:
            paths = (await http.get("/openapi.json")).json()["paths"]
        found = (("get", "/v1/models"), ("post", CHAT), ("post", "/v1/messages"))
        return {path for method, path in found if "403" in paths[path][method]["responses"]}

    assert await refusing() == {CHAT, "/v1/messages"}
    assert await refusing(api_key="k") == set()
    assert await refusing(allowed_hosts=()) == {"/v1/models", CHAT, "/v1/messages"}
