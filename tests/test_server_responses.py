"""The Responses API, as OpenAI's own client uses it on a real socket."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from mistralrs_sdk import InferenceError, Model
from mistralrs_sdk.server.responses_store import ResponsesStore
from tests.model_helpers import assert_idle
from tests.scripted_rounds import Say
from tests.test_model_tools import ANSWER, scripted
from tests.translated_apis import answering, long_model, serving

TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
    for name in ("now", "later")
]
GREEDY: dict[str, Any] = {"model": "default", "temperature": 0}
ENDLESS: dict[str, Any] = {"model": "default", "extra_body": {"ignore_eos": True}}


class Yes(BaseModel):
    answer: Literal["yes"]


@pytest.fixture
async def model(tmp_path) -> AsyncIterator[Model]:
    async with await scripted(tmp_path, ANSWER) as model:
        yield model


@pytest.fixture
async def client(model) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(model) as url, connected(url) as client:
        yield client


def connected(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


@pytest.fixture
async def talker(tmp_path) -> AsyncIterator[Model]:
    async with await long_model(tmp_path) as model:
        yield model


def told(response: Any) -> list[Any]:
    """What a response says, without what differs between two that say the same."""
    items = [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
    return [*items, response.status, response.usage.model_dump()]


async def test_whole_answer_has_thoughts_text_and_calls_as_items(client):
    """Items come in the order in which the model wrote them."""
    response = await client.responses.create(input="When?", tools=TOOLS, **GREEDY)

    thought, message, first, second = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "what time?")
    assert response.output_text == message.content[0].text == "Let me look."
    assert (first.name, first.arguments) == ("now", '{"zone": "UTC"}')
    assert (second.name, second.arguments) == ("later", "{}")
    assert response.status == "completed"
    assert response.completed_at >= response.created_at
    assert response.usage.total_tokens == response.usage.input_tokens + len(ANSWER) + 1
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < len(ANSWER)


async def test_streamed_answer_tells_all_that_the_whole_one_says(client):
    """Events are numbered, every item is added, grows and is done, and the last one has it all."""
    whole = await client.responses.create(input="When?", tools=TOOLS, **GREEDY)
    stream = await client.responses.create(input="When?", tools=TOOLS, stream=True, **GREEDY)
    events = [event async for event in stream]

    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert told(events[-1].response) == [*told(whole)[:-1], events[-1].response.usage.model_dump()]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.item for event in done] == events[-1].response.output
    assert [event.output_index for event in done] == [0, 1, 2, 3]
    grown = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(grown) == whole.output_text
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "what time?"
    grown = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(grown) == '{"zone": "UTC"}{}'


async def test_streaming_helper_of_the_client_follows(client):
    """The client's own accumulation comes to the final response."""
    async with client.responses.stream(input="When?", tools=TOOLS, **GREEDY) as stream:
        texts = [e.snapshot async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()

    assert texts[-1] == final.output_text == "Let me look."
    assert [item.type for item in final.output[2:]] == ["function_call", "function_call"]


async def test_previous_response_goes_before_the_input(client):
    """An answer that goes on by id reads what one does that is given all items."""
    first = await client.responses.create(input="When?", tools=TOOLS, **GREEDY)
    returned = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "12:00"}
        for item in first.output[2:]
    ]
    given = [{"role": "user", "content": "When?"}, *first.output, *returned]

    by_id = await client.responses.create(
        input=returned, previous_response_id=first.id, tools=TOOLS, **GREEDY
    )
    by_items = await client.responses.create(input=given, tools=TOOLS, **GREEDY)

    assert by_id.previous_response_id == first.id
    assert by_id.usage.input_tokens == by_items.usage.input_tokens > first.usage.input_tokens


async def test_instructions_do_not_go_on_to_the_next_answer(client):
    """Each request brings its own."""
    first = await client.responses.create(input="When?", instructions="Be brief. " * 9, **GREEDY)
    after = await client.responses.create(input="Why?", previous_response_id=first.id, **GREEDY)

    counted = await client.responses.input_tokens.count(
        input=[
            {"role": "user", "content": "When?"},
            *first.output,
            {"role": "user", "content": "Why?"},
        ],
        model="default",
    )
    assert first.instructions == "Be brief. " * 9
    assert after.usage.input_tokens == counted.input_tokens


async def test_counted_tokens_are_those_the_answer_reads(client):
    """The count is of the same prompt."""
    asked: dict[str, Any] = {"input": "When?", "instructions": "Hurry.", "tools": TOOLS}
    counted = await client.responses.input_tokens.count(model="default", **asked)
    response = await client.responses.create(**asked, **GREEDY)

    assert counted.input_tokens == response.usage.input_tokens


async def test_answer_follows_a_schema(client):
    """`parse` gives the instance; the text is JSON of the schema and nothing else."""
    response = await client.responses.parse(input="Well?", text_format=Yes, **GREEDY)

    assert response.output_parsed == Yes(answer="yes")


async def test_log_probabilities_are_in_the_text_if_they_are_asked_for(client):
    """One entry per token of the text, none otherwise."""
    asked: dict[str, Any] = {"input": "When?", "extra_body": {"enable_thinking": False}, **GREEDY}
    plain = await client.responses.create(**asked)
    response = await client.responses.create(
        include=["message.output_text.logprobs"], top_logprobs=2, **asked
    )

    (part,) = response.output[-1].content
    assert plain.output[-1].content[0].logprobs == []
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert part.text.strip() in "".join(entry.token for entry in part.logprobs)


async def test_limit_makes_the_answer_incomplete(client):
    """The status, the reason and the last event say that the limit cut it."""
    stream = await client.responses.create(
        input="When?", max_output_tokens=6, stream=True, **GREEDY
    )
    events = [event async for event in stream]

    response = events[-1].response
    assert events[-1].type == "response.incomplete"
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"


async def test_stored_answers_can_be_fetched_and_deleted(client):
    """Until it is deleted, an answer and its input are there."""
    made = await client.responses.create(input="When?", metadata={"for": "test"}, **GREEDY)

    fetched = await client.responses.retrieve(made.id)
    (item,) = (await client.responses.input_items.list(made.id)).data
    await client.responses.delete(made.id)

    assert fetched == made
    assert fetched.metadata == {"for": "test"}
    assert item.content[0].text == "When?"
    with pytest.raises(openai.NotFoundError, match=made.id):
        await client.responses.retrieve(made.id)


async def test_input_items_come_in_pages(client):
    """`after` and `limit` walk through them, in both orders."""
    given: list[Any] = [{"role": "user", "content": str(n)} for n in range(3)]
    made = await client.responses.create(input=given, **GREEDY)

    pages = client.responses.input_items.list(made.id, limit=2, order="asc")
    texts = [item.content[0].text async for item in pages]
    latest = await client.responses.input_items.list(made.id, limit=1)

    assert texts == ["0", "1", "2"]
    assert latest.data[0].content[0].text == "2"
    assert latest.has_more


async def test_an_answer_that_is_not_stored_cannot_be_fetched(client):
    """With `store` false nothing stays behind."""
    made = await client.responses.create(input="When?", store=False, **GREEDY)

    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        await client.responses.create(input="Why?", previous_response_id=made.id, **GREEDY)


async def test_background_run_is_fetched_when_it_is_done(client):
    """It starts without an answer and ends with one."""
    made = await client.responses.create(input="When?", background=True, **GREEDY)
    response = made
    while response.status in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
        response = await client.responses.retrieve(made.id)

    assert made.background
    assert response.status == "completed"
    assert response.output[-1].content[0].text.startswith("Let me look.")
    assert await client.responses.cancel(made.id) == response


async def test_cancelled_background_run_frees_the_model(talker):
    """It ends at once, keeps what it had, and can be asked for again."""
    async with serving(talker) as url, connected(url) as client:
        made = await client.responses.create(input="Talk.", background=True, **ENDLESS)
        cancelled = await client.responses.cancel(made.id)

        await assert_idle(talker)
        assert made.status == "in_progress"
        assert cancelled.status == "cancelled"
        assert await client.responses.retrieve(made.id) == cancelled


async def test_deleted_background_run_is_stopped(talker):
    """Nothing runs on for an answer nobody can fetch."""
    async with serving(talker) as url, connected(url) as client:
        made = await client.responses.create(input="Talk.", background=True, **ENDLESS)
        await client.responses.delete(made.id)

        await assert_idle(talker)


async def test_running_answer_cannot_be_gone_on_from(talker):
    """What it says is not known yet."""
    async with serving(talker) as url, connected(url) as client:
        made = await client.responses.create(input="Talk.", background=True, **ENDLESS)
        with pytest.raises(openai.BadRequestError, match="still running"):
            await client.responses.create(input="On.", previous_response_id=made.id, **ENDLESS)


async def test_only_background_runs_are_cancelled(client):
    """Another answer is complete: there is nothing to cancel."""
    made = await client.responses.create(input="When?", **GREEDY)

    with pytest.raises(openai.BadRequestError, match="no background run"):
        await client.responses.cancel(made.id)


async def test_background_run_that_cannot_start_is_refused(client):
    """What is wrong with it is told at once, not when it is fetched."""
    with pytest.raises(openai.BadRequestError, match="tokens"):
        await client.responses.create(input="long " * 600, background=True, **GREEDY)


async def test_background_runs_are_bounded(talker, monkeypatch):
    """One more than can be kept is told to come back; a place is free again when one ends."""
    few = functools.partial(ResponsesStore, max_responses=1)
    monkeypatch.setattr("mistralrs_sdk.server.app.ResponsesStore", few)
    async with serving(talker) as url, connected(url) as client:
        asked = {"input": "Talk.", "background": True, **ENDLESS}
        first = await client.responses.create(**asked)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.responses.create(**asked)
        await client.responses.cancel(first.id)
        second = await client.responses.create(**asked)
        await client.responses.cancel(second.id)
        await assert_idle(talker)

    assert caught.value.code == "queue_full"
    assert caught.value.response.headers["retry-after"] == "1"


async def test_long_requests_fill_the_store(model, monkeypatch):
    """What is kept of a request counts, be it in a place that is no turn of the conversation."""
    small = functools.partial(ResponsesStore, max_characters=30_000)
    monkeypatch.setattr("mistralrs_sdk.server.app.ResponsesStore", small)
    async with serving(model) as url, connected(url) as client:
        first = await client.responses.create(input="When?", **GREEDY)
        for _ in range(2):
            last = await client.responses.create(
                input="When?", metadata={"notes": "x" * 16_000}, **GREEDY
            )
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        found = await client.responses.retrieve(last.id)

    assert found.id == last.id


async def test_what_is_null_is_as_if_it_were_not_there(client):
    """In what the answer repeats of the request, too."""
    unset = {"text": {"format": None}, "tools": None, "reasoning": None, "metadata": None}
    made = await client.responses.create(input="When?", extra_body=unset, **GREEDY)

    assert made.text.format.type == "text"
    assert (made.tools, made.metadata) == ([], {})


@pytest.mark.parametrize("streams", [False, True])
async def test_client_that_leaves_frees_the_model(talker, streams):
    """Whole or streamed, the answer ends with the connection."""
    async with serving(talker) as url, connected(url) as client:
        if streams:
            async with await client.responses.create(input="Talk.", stream=True, **ENDLESS) as s:
                async for event in s:
                    if event.type.endswith(".delta"):
                        break
        else:
            with pytest.raises(openai.APITimeoutError):
                await client.responses.create(input="Talk.", timeout=0.3, **ENDLESS)

        await assert_idle(talker)


async def test_stream_that_fails_says_so_once_and_ends(client, model, monkeypatch):
    """The last event is the failure, and the stored answer has it."""
    answering(model, Say("Half", error=InferenceError("a fault")), monkeypatch)
    stream = await client.responses.create(input="When?", stream=True, **GREEDY)
    events = [event async for event in stream]

    failed = [event for event in events if event.type == "response.failed"]
    assert failed == events[-1:]
    assert failed[0].response.error.message == "a fault"
    stored = await client.responses.retrieve(failed[0].response.id)
    assert (stored.status, stored.output_text) == ("failed", "Half")


async def test_whole_answer_that_fails_is_an_http_error(client, model, monkeypatch):
    """As for every other endpoint, with the server's status."""
    answering(model, Say("Half", error=InferenceError("a fault")), monkeypatch)

    with pytest.raises(openai.InternalServerError, match="a fault"):
        await client.responses.create(input="When?", **GREEDY)


async def test_empty_answer_has_an_empty_message(client, model, monkeypatch):
    """Clients that read the text find one."""
    answering(model, Say(""), monkeypatch)

    response = await client.responses.create(input="When?", **GREEDY)

    assert response.output[0].type == "message"
    assert response.output_text == ""


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"input": [{"type": "web_search_call"}]}, "input[0]", "web_search_call"),
        ({"temperature": -1}, None, "temperature"),
    ],
)
async def test_wrong_request_is_refused_before_anything_is_sent(client, changes, param, message):
    """A status of 400 names what is wrong, streamed or not."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=message) as refusal:
            await client.responses.create(**{"input": "When?", **GREEDY, **changes}, stream=stream)

        assert refusal.value.param == param


async def test_unknown_model_is_not_found(client):
    """The error says which there are."""
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        await client.responses.create(model="gpt-9", input="When?")
