"""The Messages API, as Anthropic's own client uses it on a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from mistralrs_sdk import InferenceError, Model
from tests.model_helpers import assert_idle
from tests.scripted_rounds import Say
from tests.test_model_tools import ANSWER, scripted
from tests.translated_apis import LONG, answering, long_model, serving

TOOLS: list[Any] = [{"name": name, "input_schema": {"type": "object"}} for name in ("now", "later")]
ASKED: dict[str, Any] = {
    "model": "default",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "When?"}],
    "extra_body": {"temperature": 0},
}


@pytest.fixture
async def model(tmp_path) -> AsyncIterator[Model]:
    async with await scripted(tmp_path, ANSWER) as model:
        yield model


@pytest.fixture
async def client(model) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with serving(model) as url, connected(url) as client:
        yield client


@pytest.fixture
async def talker(tmp_path) -> AsyncIterator[Model]:
    async with await long_model(tmp_path) as model:
        yield model


def connected(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0)


def told(message: Any) -> list[Any]:
    """What a message says, without what differs between two that say the same."""
    return [
        *(block.model_dump(exclude={"id"}) for block in message.content),
        message.stop_reason,
        message.usage.output_tokens,
    ]


async def test_whole_message_has_thoughts_text_and_calls_as_blocks(client):
    """Blocks come in the order in which the model wrote them."""
    message = await client.messages.create(**ASKED, tools=TOOLS)

    thought, said, first, second = message.content
    assert (thought.type, thought.thinking) == ("thinking", "what time?")
    assert (said.type, said.text) == ("text", "Let me look.")
    assert (first.name, first.input) == ("now", {"zone": "UTC"})
    assert (second.name, second.input) == ("later", {})
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == len(ANSWER) + 1


async def test_streamed_message_tells_all_that_the_whole_one_says(client):
    """Blocks start, grow and stop one after the other, and add up to the same."""
    whole = await client.messages.create(**ASKED, tools=TOOLS)
    async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_message()

    assert [block.model_dump(exclude={"id", "parsed_output"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert told(final)[-2:] == told(whole)[-2:]
    # the second one finds the prompt in the prefix cache
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == (
        whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    )
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2], kinds[-1]) == ("message_start", "message_delta", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    pieces = [e.delta.partial_json for e in events if _is_json_delta(e)]
    assert "".join(pieces) == '{"zone": "UTC"}{}'


def _is_json_delta(event: Any) -> bool:
    return event.type == "content_block_delta" and event.delta.type == "input_json_delta"


async def test_results_of_tools_go_to_the_model(client):
    """A turn with results is read, and counted as it is read."""
    first = await client.messages.create(**ASKED, tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "12:00"}
        for block in first.content[2:]
    ]
    turns = [
        *ASKED["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]},
    ]
    second = await client.messages.create(**{**ASKED, "messages": turns}, tools=TOOLS)
    counted = await client.messages.count_tokens(model="default", messages=turns, tools=TOOLS)

    read = second.usage.input_tokens + second.usage.cache_read_input_tokens
    assert counted.input_tokens == read > first.usage.input_tokens


async def test_stop_sequence_is_named(client):
    """The text ends before it, and the message says which one it was."""
    message = await client.messages.create(**ASKED, stop_sequences=[" look", "never"])

    assert message.content[-1].text == "Let me"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " look")


async def test_limit_and_full_context_are_told_apart(client):
    """`max_tokens` is the client's limit; the context is the model's."""
    limited = await client.messages.create(**{**ASKED, "max_tokens": 2})
    turns = [{"role": "user", "content": "x" * 505}]
    full = await client.messages.create(**{**ASKED, "messages": turns})

    assert limited.stop_reason == "max_tokens"
    assert full.stop_reason == "model_context_window_exceeded"


async def test_answer_follows_a_schema(client):
    """`output_config.format` holds the text to it."""
    schema = {
        "type": "object",
        "properties": {"answer": {"enum": ["yes"]}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    message = await client.messages.create(
        **ASKED, output_config={"format": {"type": "json_schema", "schema": schema}}
    )

    assert message.content[-1].text.replace(" ", "") == '{"answer":"yes"}'


async def test_thinking_can_be_switched_off(client):
    """The template is told, and the prompt differs by what it writes then."""
    asked: dict[str, Any] = {"model": "default", "messages": ASKED["messages"]}
    default = await client.messages.count_tokens(**asked)
    off = await client.messages.count_tokens(**asked, thinking={"type": "disabled"})

    assert off.input_tokens > default.input_tokens


async def test_system_comes_first(client):
    """The system text is a part of the prompt."""
    asked: dict[str, Any] = {"model": "default", "messages": ASKED["messages"]}
    without = await client.messages.count_tokens(**asked)
    system = await client.messages.count_tokens(
        **asked, system=[{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    )

    assert system.input_tokens == without.input_tokens + 4


@pytest.mark.parametrize("streams", [False, True])
async def test_client_that_leaves_frees_the_model(talker, streams):
    """Whole or streamed, the answer ends with the connection."""
    asked = {**ASKED, "max_tokens": LONG, "extra_body": {"ignore_eos": True}}
    async with serving(talker) as url, connected(url) as client:
        if streams:
            async with client.messages.stream(**asked) as stream:
                async for event in stream:
                    if event.type == "content_block_delta":
                        break
        else:
            with pytest.raises(anthropic.APITimeoutError):
                await client.messages.create(**asked, timeout=0.3)

        await assert_idle(talker)


async def test_stream_that_fails_sends_one_error_and_ends(client, model, monkeypatch):
    """The client raises after what had come."""
    answering(model, Say("Half", error=InferenceError("a fault")), monkeypatch)
    said = ""

    async def read() -> None:
        nonlocal said
        async for event in await client.messages.create(**ASKED, stream=True):
            said += event.delta.text if event.type == "content_block_delta" else ""

    with pytest.raises(anthropic.APIStatusError, match="a fault") as failure:
        await read()

    assert said == "Half"
    assert failure.value.body["error"]["type"] == "api_error"


async def test_whole_message_that_fails_is_an_http_error(client, model, monkeypatch):
    """With the server's status."""
    answering(model, Say("Half", error=InferenceError("a fault")), monkeypatch)

    with pytest.raises(anthropic.InternalServerError, match="a fault"):
        await client.messages.create(**ASKED)


async def test_answer_that_somebody_else_ended_is_no_complete_one(client, model, monkeypatch):
    """There is no stop reason for it, so it is an error."""
    answering(model, Say("Half", finish_reason="canceled"), monkeypatch)

    with pytest.raises(anthropic.InternalServerError, match="ended by the server"):
        await client.messages.create(**ASKED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"extra_body": {"top_p": 7}}, "top_p"),
    ],
)
async def test_wrong_request_is_refused_before_anything_is_sent(client, changes, message):
    """A status of 400 in Anthropic's shape names what is wrong, streamed or not."""
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError, match=message) as refusal:
            await client.messages.create(**{**ASKED, **changes}, stream=stream)

        assert refusal.value.body["type"] == "error"
        assert refusal.value.body["error"]["type"] == "invalid_request_error"


async def test_unknown_model_is_not_found(client):
    """The error says which there are, in Anthropic's shape."""
    with pytest.raises(anthropic.NotFoundError, match="claude-9") as refusal:
        await client.messages.create(**{**ASKED, "model": "claude-9"})

    assert refusal.value.body["error"]["type"] == "not_found_error"
