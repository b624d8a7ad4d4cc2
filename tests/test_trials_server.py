"""Failures others met, as trials over HTTP: clients that leave, streams that fail, bad requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
import pytest_asyncio

from mistralrs_sdk import ModelBuilder
from mistralrs_sdk.constraints.matcher import Matcher
from tests.model_helpers import assert_idle, tiny_builder
from tests.test_server_disconnects import Visit, text_of, until
from tests.translated_apis import serving

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
ALPHABET = "Here is the English alphabet: ABC"
FRANCE = {"messages": "What is the capital of France?", "temperature": 0, "max_tokens": 24}
PARIS = "The capital of France is Paris."
ENDLESS = {"messages": "Count.", "ignore_eos": True, "max_tokens": 2000, "temperature": 0}
CHARACTERS = 150
"""How much of a bystander's text is compared; it does not end before."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def smol(demo_model: Path):
    builder = ModelBuilder(demo_model).with_force_cpu().with_num_threads(1)
    async with await builder.with_max_num_seqs(8).build() as model:
        yield model
        await assert_idle(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(smol) -> AsyncIterator[str]:
    async with serving(smol) as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(server: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=server, timeout=120) as client:
        yield client


@pytest.fixture
def faults(monkeypatch) -> dict[str, int]:
    """Lets constrained answers fail once they have so many tokens: `faults["at"] = 5`."""
    found = {"at": 10**9}
    taken: dict[int, int] = {}
    advance = Matcher.advance

    def failing(matcher: Matcher, token: int) -> bool:
        taken[id(matcher)] = taken.get(id(matcher), 0) + 1
        return advance(matcher, token) and taken[id(matcher)] < found["at"]

    monkeypatch.setattr(Matcher, "advance", failing)
    return found


@contextlib.asynccontextmanager
async def bystander(server: str) -> AsyncIterator[Bystander]:
    """Somebody whose answer goes on whatever others do."""
    visit = await Visit.ask(server, CHAT, {**ENDLESS, "stream": True})
    try:
        yield Bystander(visit)
    finally:
        await visit.leave()


class Bystander:
    def __init__(self, visit: Visit) -> None:
        self._visit = visit

    async def text(self, length: int = CHARACTERS) -> str:
        """The beginning of the answer."""
        found = ""
        while len(found) < length:
            found += text_of(await self._visit.events(1))
        return found[:length]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(smol, server: str) -> str:
    """What a bystander is told when nobody is beside it."""
    async with bystander(server) as alone:
        text = await alone.text()
    await assert_idle(smol)
    return text


@pytest.mark.real_model
@pytest.mark.parametrize("leaving", ["streamed", "whole", "prefilling", "failing"])
async def test_a_client_that_disconnects_is_noticed_by_nobody(
    smol, server, http, faults, undisturbed, leaving
):
    """Its request ends; the text of who stays is byte for byte the same, and so is the next one."""
    asked: dict[str, Any] = dict(ENDLESS)
    if leaving == "prefilling":
        asked["messages"] = "word " * 4000
    elif leaving != "whole":
        asked |= {"stream": True, "grammar": {"type": "regex", "value": "(?s:.*)"}}
    before = (await smol.metrics()).completed
    async with bystander(server) as staying:
        await until(smol, running=1)
        visit = await Visit.ask(server, CHAT, asked)
        if asked.get("stream"):
            await visit.events(3)
        else:
            await until(smol, running=2)
        if leaving == "failing":
            faults["at"] = 1
        await visit.leave()

        await until(smol, running=1)
        assert await staying.text() == undisturbed
    await assert_idle(smol)
    after = (await smol.metrics()).completed
    ended = {reason: count - before.get(reason, 0) for reason, count in after.items()}
    assert ended.get("canceled", 0) + ended.get("error", 0) == 2
    answer = (await http.post(CHAT, json=FRANCE)).json()
    assert answer["choices"][0]["message"]["content"] == PARIS


WRONG: list[tuple[dict[str, Any], int]] = [
    ({"n": 0}, 400),
    ({"model": "nobody"}, 404),
    ({"messages": "word " * 9000, "prompt": "word " * 9000}, 400),
]


@pytest.mark.real_model
@pytest.mark.parametrize("path", [CHAT, RAW])
async def test_a_stream_that_cannot_begin_is_no_stream(http, path):
    """A wrong number, an unknown model and a prompt that is too long are plain HTTP errors."""
    for wrong, status in WRONG:
        body = {"messages": "x", "prompt": "x", "stream": True} | wrong
        del body["prompt" if path == CHAT else "messages"]
        answer = await http.post(path, json=body)

        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/json"
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.real_model
@pytest.mark.parametrize("path", [CHAT, RAW])
async def test_a_stream_that_fails_says_so_once_and_closes(
    server, http, smol, faults, undisturbed, path
):
    """At its fifth token, one error event, and the end; who runs beside it sees nothing."""
    faults["at"] = 5
    key = {"messages": "Count."} if path == CHAT else {"prompt": "One, two,"}
    asked = {**ENDLESS, **key, "stream": True, "grammar": {"type": "regex", "value": "(?s:.*)"}}
    if path == RAW:
        del asked["messages"]
    async with bystander(server) as staying:
        await until(smol, running=1)
        with anyio.fail_after(60):
            async with http.stream("POST", path, json=asked) as answer:
                lines = [line async for line in answer.aiter_lines() if line]
        assert await staying.text() == undisturbed
    await assert_idle(smol)

    assert answer.status_code == 200
    told = [json.loads(line[6:]) for line in lines[:-1]]
    assert lines[-1] == "data: [DONE]"
    assert [("error" in each) for each in told] == [False] * (len(told) - 1) + [True]
    error = told[-1]["error"]
    assert (error["type"], error["code"]) == ("server_error", "inference_failed")
    assert error["partial_response"]["usage"]["completion_tokens"] == 5


@pytest.mark.real_model
async def test_a_prompt_that_is_nothing_takes_nothing_down(http):
    """Empty in any form is 400, the whole batch with it; the next request is answered."""
    empty = [
        (RAW, {"prompt": ""}),
        (RAW, {"prompt": ["", "Hello"], "max_tokens": 1}),
        (RAW, {"prompt": []}),
        (RAW, {"prompt": [[]]}),
        (CHAT, {"messages": []}),
        ("/v1/responses", {"input": []}),
        ("/v1/messages", {"messages": [], "max_tokens": 1}),
    ]
    for path, body in empty:
        answer = await http.post(path, json=body)
        assert answer.status_code == 400, (path, body, answer.text)
        assert answer.json()["error"]["message"]

    answer = (await http.post(CHAT, json=FRANCE)).json()
    assert answer["choices"][0]["message"]["content"] == PARIS


@pytest.mark.real_model
async def test_an_over_long_prompt_is_refused_with_both_numbers(http):
    """Its own length and the limit, while another request is answered."""
    other = asyncio.create_task(http.post(CHAT, json=FRANCE))
    long = await http.post(RAW, json={"prompt": [1000] * 8193, "max_tokens": 1})

    assert long.status_code == 400
    assert "8193" in long.json()["error"]["message"]
    assert "8192" in long.json()["error"]["message"]
    assert (await other).json()["choices"][0]["message"]["content"] == PARIS


LIMITS: list[dict[str, Any]] = [
    *({"max_tokens": value} for value in (0, -1, 1.5, "10", True)),
    *({"temperature": value} for value in (-1, "hot", True)),
    *({"top_p": value} for value in (-1, 2)),
    *({"min_p": value} for value in (-1, 2)),
    {"repetition_penalty": 0},
    {"repetition_penalty": -1},
    *({"logit_bias": {key: 1}} for key in ("49152", "-1", "AI")),
    {"stop_token_ids": [999_999]},
    {"top_logprobs": 100_000, "logprobs": True},
]


@pytest.mark.real_model
async def test_numbers_out_of_range_are_refused_and_change_nobody(http):
    """Before admission: an answer that is made meanwhile is the one it is alone."""
    healthy = asyncio.create_task(http.post(CHAT, json=FRANCE))
    for wrong in LIMITS:
        answer = await http.post(CHAT, json={**FRANCE, **wrong})
        assert answer.status_code == 400, wrong
        assert answer.json()["error"]["type"] == "invalid_request_error"
    for constant in ("NaN", "Infinity", "-Infinity"):
        for key in ("temperature", "top_p", "min_p"):
            body = json.dumps(FRANCE)[:-1] + f', "{key}": {constant}}}'
            assert (await http.post(CHAT, content=body)).status_code == 400

    assert (await healthy).json()["choices"][0]["message"]["content"] == PARIS


@pytest.mark.real_model
async def test_no_new_tokens_is_refused_and_a_limit_that_is_unset_ends_at_the_end(http):
    """Nothing to be said is nothing to be asked; without a limit the model ends itself."""
    echoed = {"prompt": ALPHABET, "max_tokens": 0, "echo": True, "logprobs": 1}
    refused = await http.post(RAW, json=echoed)
    unset = {key: value for key, value in FRANCE.items() if key != "max_tokens"}
    answer = (await http.post(CHAT, json=unset)).json()

    assert refused.status_code == 400
    assert answer["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "message": {"role": "assistant", "content": PARIS},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert answer["usage"]["prompt_tokens"] == 37


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["DEFGHIJ"], ""),
        ("GHI", "DEF"),
        (["HIJ"], "DEFG"),
        (["XY", "GHI"], "DEF"),
    ],
)
async def test_no_part_of_a_stop_string_reaches_the_client(http, stop, text):
    """However it lies over the tokens, streamed and whole."""
    asked = {"prompt": ALPHABET, "temperature": 0, "max_tokens": 16, "stop": stop}
    whole = (await http.post(RAW, json=asked)).json()["choices"][0]
    async with http.stream("POST", RAW, json={**asked, "stream": True}) as answer:
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line[6:])["choices"][0] for line in lines]

    assert (whole["text"], whole["finish_reason"]) == (text, "stop")
    assert "".join(chunk["text"] for chunk in chunks) == text
    assert chunks[-1]["finish_reason"] == "stop"


@pytest.mark.real_model
async def test_choices_end_each_for_itself_streamed_and_whole(http):
    """Four of one seed differ, repeat, and are all there; greedy ones are equal."""
    asked = {"messages": "Tell me a short story", "n": 4, "seed": 7, "max_tokens": 24}

    async def whole(**more: Any) -> list[str]:
        answer = (await http.post(CHAT, json={**asked, **more})).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert all(choice["finish_reason"] for choice in answer["choices"])
        return [choice["message"]["content"] for choice in answer["choices"]]

    texts, ends = [""] * 4, [0] * 4
    async with http.stream("POST", CHAT, json={**asked, "temperature": 1, "stream": True}) as told:
        async for line in told.aiter_lines():
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                texts[choice["index"]] += choice["delta"].get("content") or ""
                ends[choice["index"]] += choice["finish_reason"] is not None

    sampled = await whole(temperature=1)
    assert sampled == await whole(temperature=1) == texts
    assert len(set(sampled)) > 1
    assert ends == [1] * 4
    assert len(set(await whole(temperature=0))) == 1


CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.mark.real_model
async def test_content_in_any_form_is_the_joined_text(http):
    """Parts are joined, nothing is nothing, a picture is refused; no prompt has a Python list."""

    async def prompt(*turns: dict[str, Any]) -> str:
        ids = (await http.post("/tokenize", json={"messages": list(turns)})).json()["tokens"]
        return (await http.post("/detokenize", json={"tokens": ids})).json()["prompt"]

    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    user = {"role": "user", "content": "Hello world"}
    said = {"role": "assistant", "content": ""}
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    refused = await http.post(CHAT, json={"messages": [{"role": "user", "content": picture}]})

    joined = await prompt(user)
    assert joined == await prompt({"role": "user", "content": parts})
    empty = await prompt(user, said, user)
    for nothing in ({"content": None}, {}):
        assert empty == await prompt(user, {"role": "assistant", **nothing}, user)
    assert "[{" not in joined + empty
    assert refused.status_code == 400


REFUSING = """
{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('no system turns, please') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('turns must alternate') }}{% endif %}
{{- message.role }}: {{ message.content }}
{% endfor %}assistant: """


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([{"role": "system", "content": "x"}], "no system turns, please"),
        ([{"role": "user", "content": "x"}] * 2, "turns must alternate"),
    ],
)
async def test_what_a_template_refuses_is_the_requests_fault(turns, words):
    """400 with its words, in each API; the next request is answered."""
    bodies = [
        (CHAT, {"messages": turns, "max_tokens": 2}),
        (CHAT, {"messages": turns, "max_tokens": 2, "stream": True}),
        ("/v1/responses", {"input": turns, "max_output_tokens": 2}),
        ("/tokenize", {"messages": turns}),
    ]
    built = tiny_builder().with_chat_template(REFUSING)
    async with (
        await built.build() as model,
        serving(model) as url,
        httpx2.AsyncClient(base_url=url) as http,
    ):
        for path, body in bodies:
            answer = await http.post(path, json=body)
            assert (answer.status_code, path) == (400, path)
            assert words in answer.json()["error"]["message"]
        fine = await http.post(CHAT, json={"messages": "hello", "max_tokens": 2})

    assert fine.status_code == 200


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "pattern": "[a-"}, "pattern"),
        ({"type": "object", "not": {}}, "not"),
        ({"$ref": "#/$defs/nothing"}, "$ref"),
        ({"$ref": "https://example.org/schema.json"}, "$ref"),
    ],
)
async def test_what_cannot_be_enforced_is_never_answered(schema, words):
    """400 that names the keyword, streamed or not and in each API; nothing is computed."""
    named = {"name": "x", "schema": schema}
    chat = {"messages": "x", "max_tokens": 2}
    chat["response_format"] = {"type": "json_schema", "json_schema": named}
    bodies = [
        (CHAT, chat),
        (CHAT, {**chat, "stream": True}),
        (RAW, {"prompt": "x", "grammar": {"type": "json_schema", "value": schema}}),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", **named}}}),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 2,
                "output_config": {"format": {"type": "json_schema", "schema": schema}},
            },
        ),
    ]
    async with (
        await tiny_builder().build() as model,
        serving(model) as url,
        httpx2.AsyncClient(base_url=url) as http,
    ):
        for path, body in bodies:
            answer = await http.post(path, json=body)
            assert (answer.status_code, path) == (400, path)
            assert words in answer.json()["error"]["message"]
        computed = (await model.metrics()).tokens_processed

    assert computed == 0


async def test_unloading_ends_what_runs_and_the_next_request_loads():
    """Three streams end with an error, none hangs; the model comes back by itself."""
    endless = {"messages": "hello", "ignore_eos": True, "stream": True}
    async with (
        await tiny_builder().build() as model,
        serving(model) as url,
        httpx2.AsyncClient(base_url=url, timeout=60) as http,
    ):
        visits = [await Visit.ask(url, CHAT, endless) for _ in range(3)]
        for visit in visits:
            await visit.events(1)
        unloaded = await http.post("/v1/models/unload", json={"model_id": "default"})
        with anyio.fail_after(20):
            rests = [await visit.reader.readuntil(b"[DONE]") for visit in visits]
        for visit in visits:
            await visit.leave()
        answer = await http.post(CHAT, json={"messages": "hello", "max_tokens": 2})
        await assert_idle(model)

    assert unloaded.json()["status"] == "unloaded"
    assert answer.status_code == 200
    for rest in rests:
        assert rest.count(b'"error"') == 1
