"""Random requests made from the server's own description: none of them may break anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anyio.from_thread
import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mistralrs_sdk import Model
from mistralrs_sdk.server import ServerSettings, create_app
from mistralrs_sdk.server.openapi_operations import OPERATIONS
from mistralrs_sdk.server.openapi_schemas import SCHEMAS
from tests.model_helpers import assert_idle, tiny_builder

WORDS = ("", "hello", "user", "default", "json_object", "a" * 300, "é\U0001f40c\0\n", "[0-9]+")
SLOW = {"n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens"}
"""Numbers that make work: they stay small."""
ELSEWHERE = ("/re_isq", "/v1/models/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""What changes the server for everybody has tests of its own."""
POSTS = {
    operation.path: operation.body
    for operation in OPERATIONS
    if operation.method == "post" and operation.body and not operation.path.startswith(ELSEWHERE)
}


BREAKERS = {"dry_multiplier": 1, "dry_sequence_breakers": False}


def any_json(leaves: int = 4) -> st.SearchStrategy[Any]:
    """Any value at all."""
    plain = st.none() | st.booleans() | st.integers(-3, 9) | st.floats(-2, 2)
    plain |= st.sampled_from([*WORDS, 2**70, 1e300])
    keys = st.sampled_from(["type", "role", "content", "name", "x"])
    return st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=leaves,
    )


def fitting(schema: dict[str, Any], key: str = "") -> st.SearchStrategy[Any]:
    """Values that a schema of the description allows."""
    if "anyOf" in schema:
        return st.one_of([fitting(each, key) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer" | "number" as kind:
            least = schema.get("minimum", -3)
            most = min(schema.get("maximum", least + 3), least + 3)
            if kind == "integer":
                big = st.nothing() if key in SLOW else st.sampled_from([2**31, 2**70])
                return st.integers(int(least), int(most)) | big
            return st.floats(least, most)
        case "string":
            return st.sampled_from([*schema.get("examples", ()) * 9, *WORDS])
        case "array":
            least = schema.get("minItems", 0)
            return st.lists(fitting(schema["items"], key), min_size=least, max_size=3)
        case "object":
            return objects(schema)
        case _:
            return any_json()


@st.composite
def objects(draw: st.DrawFn, schema: dict[str, Any]) -> dict[str, Any]:
    """What a schema asks for, some of what it allows, and now and then what it does not."""
    properties = schema.get("properties", {})
    if not properties:
        return draw(
            st.dictionaries(st.sampled_from(["type", "name", "x"]), any_json(2), max_size=3)
        )
    required = schema.get("required", [])
    optional = sorted(properties.keys() - set(required))
    chosen = draw(st.lists(st.sampled_from(optional), max_size=4, unique=True)) if optional else []
    made = {key: draw(fitting(properties[key], key)) for key in (*required, *chosen)}
    if draw(st.integers(0, 3)) == 0:
        key = draw(st.sampled_from(["nonsense", *(each for each in made if each not in SLOW)]))
        made[key] = draw(any_json())
    return made


@pytest.fixture(scope="module")
def portal() -> Iterator[anyio.from_thread.BlockingPortal]:
    with anyio.from_thread.start_blocking_portal() as started:
        yield started


@pytest.fixture(scope="module")
def model(portal) -> Iterator[Model]:
    built = portal.call(tiny_builder().build)
    yield built
    portal.call(built.aclose)


@pytest.mark.parametrize("path", POSTS)
def test_no_body_breaks_an_endpoint(portal, model, path):
    """An answer or a refusal in the API's shape, and nothing stays; 504 only for a deadline."""
    app = create_app(model, settings=ServerSettings(access_log=None, allow_diagnostics=True))
    place = path.replace("{approval_id}", "some")

    async def ask(body: dict[str, Any]) -> httpx2.Response:
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
            answer = await http.post(place, json=body)
        await assert_idle(model)
        return answer

    @settings(
        max_examples=15,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(fitting(SCHEMAS[str(POSTS[path])]))
    def check(body: dict[str, Any]) -> None:
        answer = portal.call(ask, body)
        status = answer.status_code
        late = status == 504 and body.get("deadline") is not None
        assert status in (200, 400, 404, 413, 429) or late, answer.text
        if status != 200:
            assert answer.json()["error"]["message"]
            return
        if "text/event-stream" in answer.headers["content-type"]:
            for line in answer.text.splitlines():
                if line.startswith("data: {"):
                    told = json.loads(line.removeprefix("data: ")).get("error") or {}
                    assert told.get("type") in (None, "timeout_error"), line

    check()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": "hello", "repetition_penalty": 1e-197}, 200),
        ("/v1/completions", {"prompt": "hello", "repetition_penalty": 1e300}, 200),
        ("/v1/completions", {"prompt": "x", **BREAKERS}, 400),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"9" * 5000: 1}}, 400),
        ("/v1/messages", {"messages": [], "model": "default", "max_tokens": 1}, 400),
    ],
)
def test_what_was_found_stays_found(portal, model, path, body, status):
    """Numbers that float32 cannot hold and values of a wrong kind: no failure of the server's."""
    app = create_app(model, settings=ServerSettings(access_log=None))

    async def ask() -> int:
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
            return (await http.post(path, json={"max_tokens": 4, **body})).status_code

    assert portal.call(ask) == status


@pytest.mark.parametrize(
    "number",
    ["1e999", "-1e999", "1" + "0" * 400, "-" + "9" * 309, "9" * 5000],
    ids=["1e999", "-1e999", "400 digits", "-309 digits", "5000 digits"],
)
@pytest.mark.parametrize("path", sorted(POSTS))
def test_a_number_that_is_too_large_is_no_json(portal, model, path, number):
    """No float holds it: as a deadline it would overflow, in a schema it could not be sent back."""
    app = create_app(model, settings=ServerSettings(access_log=None, allow_diagnostics=True))
    place = path.replace("{approval_id}", "some")
    bodies = [f'{{"a": [{number}]}}', f'{{"messages": "x", "prompt": "x", "deadline": {number}}}']

    async def ask(body: str) -> httpx2.Response:
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
            return await http.post(place, content=body)

    for answer in [portal.call(ask, body) for body in bodies]:
        assert answer.status_code == 400
        assert "the body is no JSON" in answer.json()["error"]["message"]
