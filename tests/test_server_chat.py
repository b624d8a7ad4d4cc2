"""Chat completions over HTTP, as the official openai client sees them on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import sys
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest

from mistralrs_sdk import InferenceError, Model
from mistralrs_sdk.server import ServerSettings
from mistralrs_sdk.server.sessions import MAX_SESSION_BYTES
from tests.model_helpers import tiny_builder
from tests.scripted_rounds import Say
from tests.test_model_tools import ANSWER, scripted
from tests.translated_apis import answering, serving

HELLO = [{"role": "user", "content": "hello"}]
WRONG = (
    {"messages": []},
    {"n": 0},
    {"temperature": -1},
    {"max_tokens": 0},
    {"top_logprobs": 100_000, "logprobs": True},
    {"messages": [{"role": "user", "content": "word " * 400}]},
    {"stream_options": {"include_usage": 3}},
    {"stream_options": {"colour": True}},
    {"stream_options": {"include_obfuscation": True}},
    {"stream_options": ["include_usage"]},
    {"extra_body": {"tool_dispatch_url": "http://127.0.0.1:1/"}},
    {"extra_body": {"nonsense": 1}},
    {"extra_body": {"agent_approval_callback": "print"}},
    {"extra_body": {"dry_multiplier": 1, "dry_sequence_breakers": False}},
    {"extra_body": {"adapter": "none"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {"logit_bias": {"9999999": 1}},
)
"""What a chat request must not say."""

QUIET = ServerSettings(access_log=None)


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with await tiny_builder().build() as built:
        yield built


@contextlib.asynccontextmanager
async def client(
    model: Model, settings: ServerSettings = QUIET
) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of a server in front of the model."""
    async with (
        serving(model, settings) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as found,
    ):
        yield found


async def test_a_plain_answer_is_the_sdks(model):
    """The text, the finish reason and the usage are those of the same request in process."""
    asked = {"messages": HELLO, "temperature": 0, "max_tokens": 8}
    expected = await model.send_chat_request(asked)

    async with client(model) as openai_client:
        answer = await openai_client.chat.completions.create(
            model="default", messages=HELLO, temperature=0, max_tokens=8
        )

    assert answer.choices[0].message.content == expected.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.model == model.get_default_model_id()


async def test_streamed_text_is_the_whole_text(model):
    """The deltas add up to the answer in one piece; the last one says why it ends."""
    asked = {"model": "default", "messages": HELLO, "temperature": 0, "max_tokens": 12}

    async with client(model) as openai_client:
        whole = await openai_client.chat.completions.create(**asked)
        chunks = [
            chunk
            async for chunk in await openai_client.chat.completions.create(**asked, stream=True)
        ]

    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


async def test_the_role_comes_once(model, monkeypatch):
    """In the first chunk, as OpenAI sends it: clients add up what they get."""
    answering(model, Say("abc"), monkeypatch)

    async with client(model) as openai_client:
        stream = await openai_client.chat.completions.create(
            model="default", messages=HELLO, stream=True
        )
        roles = [chunk.choices[0].delta.role async for chunk in stream]

    assert roles[0] == "assistant"
    assert set(roles[1:]) == {None}
    assert len(roles) >= 3


async def test_usage_comes_in_a_last_chunk_if_it_is_asked_for(model):
    """With stream_options the last chunk has the usage and no choices."""
    async with client(model) as openai_client:
        stream = await openai_client.chat.completions.create(
            model="default",
            messages=HELLO,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        *others, last = [chunk async for chunk in stream]

    assert last.choices == []
    assert last.usage.completion_tokens == 5
    assert all(chunk.usage is None and chunk.choices for chunk in others)


async def test_the_clients_own_accumulator_reads_the_stream(tmp_path):
    """`chat.completions.stream` of the client puts the chunks together to a whole message."""
    async with (
        await scripted(tmp_path, ["one", " two", " three"]) as model,
        client(model) as openai_client,
        openai_client.chat.completions.stream(
            model="default", messages=HELLO, temperature=0
        ) as stream,
    ):
        final = await stream.get_final_completion()

    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].message.content == "one two three"
    assert final.choices[0].finish_reason == "stop"


async def test_several_choices_keep_their_indices(model):
    """Each of n answers has its index, whole and streamed; their tokens add up."""
    asked = {"model": "default", "messages": HELLO, "n": 3, "seed": 7, "max_tokens": 4}

    async with client(model) as openai_client:
        whole = await openai_client.chat.completions.create(**asked)
        stream = await openai_client.chat.completions.create(**asked, stream=True)
        texts = {0: "", 1: "", 2: ""}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""

    assert [choice.message.content for choice in whole.choices] == list(texts.values())
    assert whole.usage.completion_tokens == 12


async def test_logprobs_are_in_openais_shape(model):
    """One entry per token, each with its alternatives and bytes."""
    async with client(model) as openai_client:
        answer = await openai_client.chat.completions.create(
            model="default", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=2
        )

    entries = answer.choices[0].logprobs.content
    assert len(entries) == 4
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == (
        answer.choices[0].message.content
    )


async def test_a_response_format_is_held_to(model):
    """A JSON schema decides what comes, whatever the model would say."""
    schema = {
        "type": "object",
        "properties": {"answer": {"enum": ["yes", "no"]}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    named = {"name": "verdict", "schema": schema, "strict": True}

    async with client(model) as openai_client:
        answer = await openai_client.chat.completions.create(
            model="default",
            messages=HELLO,
            max_tokens=60,
            response_format={"type": "json_schema", "json_schema": named},
        )

    assert json.loads(answer.choices[0].message.content) in ({"answer": "yes"}, {"answer": "no"})


async def test_a_stop_string_ends_the_answer(model):
    """The text ends before the stop string."""
    asked = {"model": "default", "messages": HELLO, "temperature": 0, "max_tokens": 12}

    async with client(model) as openai_client:
        whole = (await openai_client.chat.completions.create(**asked)).choices[0].message.content
        middle = whole[len(whole) // 2]
        cut = await openai_client.chat.completions.create(**asked, stop=[middle])

    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == whole[: whole.index(middle)]


async def test_tool_calls_come_whole_and_streamed(tmp_path):
    """Calls that nothing here executes are the client's, in both forms the same."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("now", "later")
    ]
    asked = {"model": "default", "messages": HELLO, "tools": tools, "temperature": 0}

    async with await scripted(tmp_path, ANSWER) as model, client(model) as openai_client:
        whole = await openai_client.chat.completions.create(**asked)
        stream = await openai_client.chat.completions.create(**asked, stream=True)
        pieces, reason, thoughts = [], None, ""
        async for chunk in stream:
            choice = chunk.choices[0]
            pieces += choice.delta.tool_calls or []
            thoughts += getattr(choice.delta, "reasoning_content", None) or ""
            reason = choice.finish_reason or reason
        async with openai_client.chat.completions.stream(**asked) as helper:
            final = (await helper.get_final_completion()).choices[0].message

    message = whole.choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["now", "later"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"zone": "UTC"}
    assert [piece.function.name for piece in pieces if piece.id] == ["now", "later"]
    for index, arguments in enumerate(('{"zone": "UTC"}', "{}")):
        assert arguments == "".join(p.function.arguments for p in pieces if p.index == index)
    assert [(c.function.name, c.function.arguments) for c in final.tool_calls] == [
        (c.function.name, c.function.arguments) for c in message.tool_calls
    ]
    assert (whole.choices[0].finish_reason, reason) == ("tool_calls", "tool_calls")
    assert thoughts == message.reasoning_content == "what time?"


async def test_what_is_wrong_is_said_before_the_first_byte(model):
    """A request at fault is a plain 400 or 404 in OpenAI's shape, streamed or not."""
    async with client(model) as openai_client:
        for wrong, stream in itertools.product(WRONG, (False, True)):
            asked = {"model": "default", "messages": HELLO, "max_tokens": 4} | wrong
            with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
                await openai_client.chat.completions.create(**asked, stream=stream)

            assert set(caught.value.body) >= {"message", "type", "param", "code"}, wrong
            assert caught.value.body["message"]


async def test_stream_options_are_for_streams(model):
    """Without one they would have no effect; null and false are as if they were not there."""
    usage = {"include_usage": True}
    async with client(model) as openai_client:
        asked = {"model": "default", "messages": HELLO, "max_tokens": 2}
        with pytest.raises(openai.BadRequestError, match='without "stream": true'):
            await openai_client.chat.completions.create(**asked, stream_options=usage)
        with pytest.raises(openai.BadRequestError, match='without "stream": true'):
            await openai_client.completions.create(
                model="default", prompt="x", extra_body={"stream_options": usage}
            )
        for options in (None, {}, {"include_usage": False}, {"include_obfuscation": False}):
            answer = await openai_client.chat.completions.create(
                **asked, extra_body={"stream_options": options}
            )
            assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_not_found(model, stream):
    """404 with the models there are."""
    async with client(model) as openai_client:
        with pytest.raises(openai.NotFoundError, match="nobody") as caught:
            await openai_client.chat.completions.create(
                model="nobody", messages=HELLO, stream=stream
            )

    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


async def test_a_failure_in_the_middle_is_one_error_event(model, monkeypatch):
    """What fails while it streams ends with one event that says why, then [DONE]."""
    answering(model, Say("abc", error=InferenceError("a tooth broke")), monkeypatch)

    async with serving(model) as url, httpx2.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})

    events = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")]
    errors = [event for event in events if '"error"' in event]
    assert answer.status_code == 200
    assert len(errors) == 1
    assert json.loads(errors[0])["error"]["type"] == "server_error"
    assert events[-2:] == [errors[0], "[DONE]"]


async def test_an_error_event_is_an_error_of_the_client(model, monkeypatch):
    """The official client raises what failed in the middle, after what had come."""
    answering(model, Say("abc", error=RuntimeError("a tooth broke")), monkeypatch)
    got: list[str | None] = []

    async def read(openai_client: openai.AsyncOpenAI) -> None:
        async for chunk in await openai_client.chat.completions.create(
            model="default", messages=HELLO, stream=True
        ):
            got.append(chunk.choices[0].delta.content)  # noqa: PERF401 (it counts if a later one fails)

    async with client(model) as openai_client:
        with pytest.raises(openai.APIError, match="internal error: RuntimeError"):
            await read(openai_client)

    assert got == ["a", "b", "c"]


async def test_a_full_queue_is_429_with_the_time_to_come_back():
    """Who finds no place is told when to try again, streamed or not."""
    builder = tiny_builder().with_max_num_seqs(1).with_max_queue(0)
    async with await builder.build() as model, client(model) as openai_client:
        running = await openai_client.chat.completions.create(
            model="default", messages=HELLO, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(running))
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await openai_client.chat.completions.create(
                    model="default", messages=HELLO, stream=stream
                )
            assert int(caught.value.response.headers["retry-after"]) >= 1
        await running.close()


async def test_a_dead_engine_is_503(model):
    """Requests and /health say that it is dead, and why."""

    def break_it(engine):
        def step():
            raise RuntimeError("out of luck")

        engine.step = step

    await model.inner().thread.call(break_it)
    async with client(model) as openai_client:
        for _ in range(2):  # the one that was running, and one that comes later
            with pytest.raises(openai.InternalServerError, match="out of luck") as caught:
                await openai_client.chat.completions.create(model="default", messages=HELLO)
            assert caught.value.status_code == 503
        async with httpx2.AsyncClient() as http:
            health = await http.get(f"{str(openai_client.base_url).removesuffix('/v1/')}/health")

    assert health.status_code == 503
    assert "out of luck" in health.text


async def test_a_session_goes_on_and_can_be_taken_along(model):
    """Turns of a session are kept, exported, deleted and imported again."""
    asked = {"messages": HELLO, "session_id": "ours", "max_tokens": 4}

    async with serving(model) as url, httpx2.AsyncClient(base_url=url) as http:
        first = (await http.post("/v1/chat/completions", json=asked)).json()
        kept = (await http.get("/v1/sessions/ours")).json()
        deleted = await http.delete("/v1/sessions/ours")
        gone = await http.get("/v1/sessions/ours")
        again = await http.delete("/v1/sessions/ours")
        imported = await http.put("/v1/sessions/ours", json=kept)
        back = (await http.get("/v1/sessions/ours")).json()
        long = {"messages": [{"role": "user", "content": "x" * MAX_SESSION_BYTES}]}
        refused = await http.put("/v1/sessions/ours", json=long)

    assert first["session_id"] == "ours"
    assert [turn["role"] for turn in kept["messages"]] == ["user", "assistant"]
    assert (deleted.status_code, gone.status_code, again.status_code) == (200, 404, 404)
    assert (imported.status_code, refused.status_code) == (200, 413)
    assert back == kept


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_gets_an_answer_and_a_stream(model):
    """The two ways people try a server from a shell."""
    body = json.dumps({"messages": HELLO, "max_tokens": 4, "temperature": 0})
    streamed = json.dumps({**json.loads(body), "stream": True})

    async def curl(url: str, data: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *("curl", "-sN", "--max-time", "20", f"{url}/v1/chat/completions", "-d", data),
            stdout=asyncio.subprocess.PIPE,
            stderr=sys.stderr,
        )
        return (await process.communicate())[0].decode()

    async with serving(model) as url:
        whole = json.loads(await curl(url, body))
        lines = (await curl(url, streamed)).split("\n\n")

    texts = [
        json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        for line in lines
        if line.startswith("data: {")
    ]
    assert "".join(texts) == whole["choices"][0]["message"]["content"]
    assert lines[-2:] == ["data: [DONE]", ""]
