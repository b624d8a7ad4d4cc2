"""Calls that were begun in a stream and turn out to be none, as callers and clients see them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest

from mistralrs_sdk import Model, RequestBuilder
from mistralrs_sdk.chat.answer_format import TOOL_FORMATS
from mistralrs_sdk.chat.answer_parser import AnswerParser
from mistralrs_sdk.chat.responses import ChatCompletionChunkResponse, ChunkChoice, Delta
from mistralrs_sdk.chat.tools import joined_calls
from mistralrs_sdk.server.anthropic_events import MessageAnswer
from mistralrs_sdk.server.responses_api_events import ResponseAnswer
from tests.test_model_tools import LATER, NOW, scripted

CUT = ["Hm. ", "Well.", "\n<tool_call>", '\n{"name": "now", ', '"arguments": {"zo', 'ne": "U']
TEXT = "".join(CUT)


@pytest.fixture
async def model(tmp_path) -> AsyncIterator[Model]:
    async with await scripted(tmp_path, CUT) as model:
        yield model


def chunks_of(*pieces: str) -> list[ChatCompletionChunkResponse]:
    """The chunks of an answer that comes in these pieces."""
    parser = AnswerParser(TOOL_FORMATS["hermes"], None)
    deltas = [*map(parser.feed, pieces), parser.finish()]
    choices = [
        ChunkChoice(
            index=0,
            delta=Delta(content=delta.content, tool_calls=delta.tool_calls or None),
            withdrawn_tool_calls=delta.withdrawn,
            unparsed_tool_call=delta.unparsed,
        )
        for delta in deltas
    ]
    reason = "tool_calls" if parser.has_calls else "stop"
    choices[-1] = attrs.evolve(choices[-1], finish_reason=reason)
    return [
        ChatCompletionChunkResponse(id="x", choices=(choice,), created=0, model="m")
        for choice in choices
    ]


async def test_whole_answers_hold_the_text_alone(model):
    """Whatever came in the stream, its calls are none, and its text is the content."""
    asked = RequestBuilder().add_message("user", "When?").set_tools([NOW, LATER])
    whole = await model.send_chat_request(asked)
    async with await model.stream_chat_request(asked) as stream:
        chunks = [chunk.choices[0] async for chunk in stream]
        collected = await stream.collect()

    for response in (whole, collected):
        (choice,) = response.choices
        assert (choice.message.content, choice.message.tool_calls) == (TEXT, None)
        assert (choice.finish_reason, choice.unparsed_tool_call) == ("stop", True)
    pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    withdrawn = [index for chunk in chunks for index in chunk.withdrawn_tool_calls]
    assert joined_calls(pieces, withdrawn) == ()
    assert "".join(chunk.delta.content or "" for chunk in chunks) == TEXT


def test_a_chunk_says_which_call_is_none():
    """In OpenAI's shape too, beside the text that it is instead."""
    *_, last = chunks_of(*CUT)

    said = last.to_dict()["choices"][0]
    assert said["withdrawn_tool_calls"] == [0]
    assert said["unparsed_tool_call"] is True
    assert said["delta"]["content"] == "".join(CUT[2:])
    assert "withdrawn_tool_calls" not in chunks_of("Hm.")[0].to_dict()["choices"][0]


async def test_left_in_the_middle_of_a_call_there_is_no_half_call(model, monkeypatch):
    """What was collected of an answer that was left holds whole calls only."""
    asked = RequestBuilder().add_message("user", "When?").set_tools([NOW, LATER])
    engine = await model.inner().thread.call(lambda engine: engine)
    step, steps, left = engine.step, itertools.count(1), threading.Event()

    def waiting() -> Any:
        if next(steps) == len(CUT):  # the step of the last piece: it comes when the reader has left
            left.wait()
        return step()

    monkeypatch.setattr(type(engine), "step", lambda self: waiting())
    async with await model.stream_chat_request(asked) as stream:
        async for chunk in stream:
            if chunk.choices[0].delta.tool_calls:
                break
    left.set()
    response = await stream.collect()

    assert response.choices[0].finish_reason == "canceled"
    assert response.choices[0].message.tool_calls is None


async def test_a_call_that_is_executed_here_is_no_event_until_it_is_one(model):
    """Nothing runs, and callers see neither the pieces nor that they were withdrawn."""
    ran: list[Any] = []
    model_tools = model._models.loaded(None).toolbox
    model_tools._executors["now"] = _Recorder(ran)
    asked = RequestBuilder().add_message("user", "When?").set_tools([NOW, LATER])
    async with await model.stream_chat_request(asked) as stream:
        chunks = [chunk async for chunk in stream]
        response = await stream.collect()

    assert not ran
    assert not any(c.choices[0].delta.tool_calls for c in chunks)
    assert not any(c.choices[0].withdrawn_tool_calls for c in chunks)
    assert response.choices[0].message.content == TEXT


class _Recorder:
    """Executes calls by noting them."""

    source = "user"

    def __init__(self, ran: list[Any]) -> None:
        self._ran = ran

    async def run(self, call: Any, context: Any) -> str:
        self._ran.append(call)
        return ""


def test_anthropics_block_stops_where_the_call_is_none():
    """The text goes on in another block; the whole message is one text."""
    answer = MessageAnswer(model="m", max_tokens=None)
    events = [event for chunk in chunks_of(*CUT) for event in answer.add(chunk)]
    events += answer.finish(thinking_tokens=0)

    begun = [e for e in events if e["type"] == "content_block_start"]
    assert [(e["index"], e["content_block"]["type"]) for e in begun] == [
        (0, "text"),
        (1, "tool_use"),
        (2, "text"),
    ]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == TEXT
    assert answer.message["content"] == [{"type": "text", "text": TEXT}]
    assert answer.message["stop_reason"] == "end_turn"


def test_item_of_the_responses_api_is_incomplete_where_the_call_is_none():
    """The text goes on in a message; the response has no such call."""
    answer = ResponseAnswer({"output": [], "status": "queued"})
    events = [event for chunk in chunks_of(*CUT) for event in answer.add(chunk)]
    events += answer.finish(reasoning_tokens=0)

    done = [e for e in events if e["type"] == "response.output_item.done"]
    assert [(e["output_index"], e["item"]["type"], e["item"]["status"]) for e in done] == [
        (0, "message", "completed"),
        (1, "function_call", "incomplete"),
        (2, "message", "completed"),
    ]
    texts = [part["text"] for item in answer.response["output"] for part in item["content"]]
    assert "".join(texts) == TEXT


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        ("{}", ", {]"),
        ("{}", "}, 7]"),
        ('{"a": nope}', "}}]"),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "}}]"),
    ],
    ids=["broken", "a number", "nonsense first", "too deep"],
)
def test_ended_blocks_and_items_of_a_list_that_is_none_go_too(first, rest):
    """The first of a list of calls ends, whole or as nonsense, before the list is none."""
    parser = AnswerParser(TOOL_FORMATS["mistral"], None)
    calls = f'{{"name": "f", "arguments": {first}}}, {{"name": "g", "arguments": {{"a": 1'
    text = f"[TOOL_CALLS][{calls}{rest}"
    deltas = [*map(parser.feed, text), parser.finish()]
    message = MessageAnswer(model="m", max_tokens=None)
    response = ResponseAnswer({"output": [], "status": "queued"})
    told: list[Any] = []
    items: list[Any] = []
    for delta in deltas:
        choice = ChunkChoice(
            index=0,
            delta=Delta(content=delta.content, tool_calls=delta.tool_calls or None),
            withdrawn_tool_calls=delta.withdrawn,
        )
        chunk = ChatCompletionChunkResponse(id="x", choices=(choice,), created=0, model="m")
        told += message.add(chunk)
        items += response.add(chunk)
    told += message.finish(thinking_tokens=0)
    items += response.finish(reasoning_tokens=0)

    assert message.message["content"] == [{"type": "text", "text": text}]
    (item,) = response.response["output"]
    assert item["content"][0]["text"] == text
    for events, begin, end in (
        (told, "content_block_start", "content_block_stop"),
        (items, "response.output_item.added", "response.output_item.done"),
    ):
        kinds = [event["type"] for event in events]
        assert kinds.count(begin) == kinds.count(end) == 3  # two calls, then the text


def test_pieces_are_forwarded_as_they_come():
    """Both APIs tell of each piece, and hold the whole call in the end."""
    chunks = chunks_of('<tool_call>{"name": "f", "arguments": {"a"', ": 1}}</tool_call>")
    message = MessageAnswer(model="m", max_tokens=None)
    response = ResponseAnswer({"output": [], "status": "queued"})
    told = [event for chunk in chunks for event in message.add(chunk)]
    told += message.finish(thinking_tokens=0)
    items = [event for chunk in chunks for event in response.add(chunk)]
    items += response.finish(reasoning_tokens=0)

    grown = [e["delta"] for e in told if e["type"] == "content_block_delta"]
    assert [delta["partial_json"] for delta in grown] == ['{"a"', ": 1}"]
    assert message.message["content"][0]["input"] == {"a": 1}
    kinds = [e["type"].removeprefix("response.") for e in items]
    assert kinds == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert response.response["output"][0]["arguments"] == '{"a": 1}'
