"""What answers of the Responses API are kept, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mistralrs_sdk import (
    CalledFunction,
    ChatCompletionChunkResponse,
    ChunkChoice,
    ConfigError,
    Delta,
    Logprobs,
    ResponseLogprob,
    ToolCallResponse,
    TopLogprob,
)
from mistralrs_sdk.server.responses_api_events import ResponseAnswer
from mistralrs_sdk.server.responses_store import ResponsesStore, StoredResponse


def stored(id: str, *, status: str = "completed", said: str = "") -> StoredResponse:
    response = {"id": id, "status": status, "output": []}
    messages = [{"role": "user", "content": said}]
    return StoredResponse(answer=ResponseAnswer(response), items=[], messages=messages)


def chunk(delta: Delta, logprobs: Logprobs | None = None) -> ChatCompletionChunkResponse:
    choice = ChunkChoice(index=0, delta=delta, logprobs=logprobs)
    return ChatCompletionChunkResponse(id="x", choices=(choice,), created=0, model="m")


def filled(store: ResponsesStore, *ids: str, **settings: Any) -> ResponsesStore:
    for id in ids:
        store.put(stored(id, **settings))
    return store


def kept(store: ResponsesStore, ids: str) -> str:
    return "".join(id for id in ids if store.get(id))


def test_the_oldest_goes_when_there_are_too_many():
    """The limit is a number of answers."""
    assert kept(filled(ResponsesStore(max_responses=2), *"abc"), "abc") == "bc"


def test_the_oldest_go_when_there_is_too_much_text():
    """The limit is on all of it; one answer alone is kept."""
    store = filled(ResponsesStore(max_characters=2500), *"abc", said="x" * 800)
    assert kept(store, "abc") == "bc"

    store.put(stored("d", said="x" * 9000))

    assert kept(store, "abcd") == "d"


def test_what_is_old_goes():
    """The limit is in seconds since it was stored."""
    now = 0.0
    store = ResponsesStore(max_age_seconds=10, clock=lambda: now)
    filled(store, "a")
    now = 6.0
    filled(store, "b")
    now = 11.0

    assert kept(store, "ab") == "b"
    assert len(store) == 1


def test_what_runs_stays():
    """An answer that is being written is not lost to newer ones."""
    store = ResponsesStore(max_responses=1)
    store.put(stored("a", status="in_progress"))

    assert kept(filled(store, *"bc"), "abc") == "ac"


async def test_closing_stops_what_runs():
    """Nothing works on for a store that is gone."""
    store = ResponsesStore()
    running = stored("a", status="in_progress")
    running.task = asyncio.create_task(asyncio.sleep(60))
    store.put(running)

    await store.aclose()

    assert running.task.cancelled()
    assert len(store) == 0


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * 5000}}


@pytest.mark.parametrize(
    "held",
    [
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        {"messages": [{"role": "assistant", "content": "", "reasoning_content": "x" * 5000}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL]}]},
        {"request_bytes": 5000},  # of instructions, tools, a schema
        {"answer": 5000},
    ],
)
def test_all_that_is_held_counts(held):
    """Whatever part of request or answer is long, the older answer goes."""
    store = ResponsesStore(max_characters=6200)
    filled(store, "a")
    response = ResponseAnswer({"id": "b", "status": "completed", "output": []})
    response.characters = held.pop("answer", 0)
    store.put(StoredResponse(**{"answer": response, "items": [], "messages": [], **held}))
    assert kept(store, "ab") == "ab"

    store.put(stored("c", said="x" * 1500))

    assert kept(store, "abc") == "c"


def test_an_answer_counts_while_it_grows():
    """Text, thoughts, arguments of calls, and log probabilities, which are the longest."""
    answer = ResponseAnswer({"id": "a", "status": "in_progress", "output": []})
    call = CalledFunction(name="f", arguments="x" * 10_000)
    deltas = [
        Delta(content="x" * 100),
        Delta(reasoning_content="x" * 1000),
        Delta(tool_calls=(ToolCallResponse(index=0, id="c", function=call),)),
    ]
    top = [TopLogprob(token="a", token_id=number, logprob=-1.0) for number in range(20)]
    held = Logprobs(content=[ResponseLogprob(token="a", logprob=-1.0, top_logprobs=top)])
    sizes = [answer.characters]
    for delta in deltas:
        answer.add(chunk(delta))
        sizes.append(answer.characters)
    answer.add(chunk(Delta(content="a"), held))

    assert sizes == [0, 100, 1100, 11_100]
    assert answer.characters > 11_100 + 20 * 100


def test_what_runs_may_fill_it():
    """None of it is let go of: it is full by number, or by what it holds."""
    few, small = ResponsesStore(max_responses=2), ResponsesStore(max_characters=2000)
    full = []
    for id in "abc":
        few.put(stored(id, status="in_progress"))
        small.put(stored(id, status="in_progress", said="x" * 800))
        full.append((few.is_full, small.is_full))
    done = filled(ResponsesStore(max_responses=1), "a")

    assert full == [(False, False), (True, True), (True, True)]
    assert not done.is_full


@pytest.mark.parametrize("limit", ["max_responses", "max_age_seconds", "max_characters"])
def test_limits_are_checked(limit):
    """The error names the limit."""
    with pytest.raises(ConfigError, match=limit):
        ResponsesStore(**{limit: 0})
