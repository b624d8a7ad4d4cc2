"""The loop of calls when things go wrong: hung callbacks, readers that leave, refused rounds."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from mistralrs_sdk import (
    DeadlineError,
    EngineClosedError,
    Function,
    InferenceError,
    QueueFullError,
    RequestBuilder,
    RequestError,
    Tool,
)
from mistralrs_sdk.chat.tool_progress import AgenticToolCallProgress
from mistralrs_sdk.tools import execution
from mistralrs_sdk.tools.callbacks import ToolCallback
from mistralrs_sdk.tools.loop import ToolLoopStream, open_stream
from mistralrs_sdk.tools.settings import ToolSettings
from mistralrs_sdk.tools.toolbox import Toolbox
from tests.scripted_rounds import Rounds, Say

SUM = Tool(Function("sum", "Adds.", {"type": "object"}))
SLOW = Tool(Function("slow", "Takes long.", {"type": "object"}))
SUM_CALL = Say("I add. ", calls=[("sum", "{}")])


class StrangeExit(BaseException):
    """No `Exception`, as test frameworks and old libraries have them."""


def adding(function=lambda call: "5", **settings) -> Toolbox:
    return Toolbox(ToolSettings(callbacks=(ToolCallback("sum", function, SUM),), **settings))


def ask() -> RequestBuilder:
    return RequestBuilder().add_message("user", "2 + 3?")


async def whole(rounds, asked: RequestBuilder, box: Toolbox):
    async with await open_stream(rounds, asked, box) as stream:
        return await stream.collect()


async def until_tools_run(stream: ToolLoopStream) -> None:
    while not isinstance(await anext(stream), AgenticToolCallProgress):
        pass


@pytest.fixture
async def deaf(monkeypatch):
    """A callback that does not end when it is cancelled, only when the test does."""
    monkeypatch.setattr(execution, "CANCEL_GRACE", 1.5)
    end, ended = asyncio.Event(), asyncio.Event()

    async def callback(call):
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await end.wait()
        ended.set()
        return "late"

    yield callback
    end.set()
    await ended.wait()


@pytest.mark.parametrize("kind", ["coroutine", "plain"])
async def test_callback_may_raise_anything(kind):
    """What is no `Exception` costs no request either, and runs once."""
    runs = []

    def plain(call):
        runs.append(call)
        raise StrangeExit("out")

    async def coroutine(call):
        plain(call)

    rounds = Rounds(SUM_CALL, Say("5"))
    await whole(rounds, ask(), adding(plain if kind == "plain" else coroutine))

    assert rounds.asked[1].messages[-1]["content"] == "Error: StrangeExit: out"
    assert len(runs) == 1


@pytest.mark.parametrize("error", [asyncio.CancelledError, StrangeExit])
async def test_approval_that_cancels_itself_is_a_denial(error):
    """It is no sign that the request was cancelled or the model closed."""

    async def decide(approval):
        raise error

    rounds = Rounds(SUM_CALL, Say("no"))
    asked = ask().with_agent_permission("ask").with_agent_approval_callback(decide)
    await whole(rounds, asked, adding())

    assert "asking for approval failed" in rounds.asked[1].messages[-1]["content"]


async def test_callback_that_cannot_be_cancelled_is_left_behind(deaf):
    """The time limit holds all the same, and the model is told."""
    rounds = Rounds(SUM_CALL, Say("5"))

    await asyncio.wait_for(whole(rounds, ask(), adding(deaf, timeout=0.02)), 5)

    assert rounds.asked[1].messages[-1]["content"] == "Error: sum gave no result within 0.02 s"


async def test_abort_does_not_wait_for_a_callback_that_cannot_be_cancelled(deaf):
    """The stream ends at once."""
    box = adding(deaf)
    async with await open_stream(Rounds(SUM_CALL), ask(), box) as stream:
        await until_tools_run(stream)
        box.running_id(stream.id)
        response = await asyncio.wait_for(stream.collect(), 1.0)

    assert response.choices[0].finish_reason == "canceled"


async def test_closing_does_not_wait_for_a_callback_that_cannot_be_cancelled(deaf):
    """The stream fails at once."""
    box = adding(deaf)
    async with await open_stream(Rounds(SUM_CALL), ask(), box) as stream:
        await until_tools_run(stream)
        await box.aclose()
        with pytest.raises(EngineClosedError, match="while tools ran"):
            await asyncio.wait_for(stream.collect(), 1.0)


async def test_no_tools_run_for_a_model_that_was_closed():
    """An answer that had ended before does not set them going."""
    runs, gate = [], asyncio.Event()
    box = adding(lambda call: runs.append(call))
    say = Say("x", calls=[("sum", "{}")], waits=gate)
    async with await open_stream(Rounds(say), ask(), box) as stream:
        await box.aclose()
        gate.set()
        with pytest.raises(EngineClosedError):
            await stream.collect()

    assert not runs


async def test_reader_that_stops_waiting_for_the_next_round_may_come_back():
    """A time limit on one `anext` loses nothing, wherever it strikes."""
    rounds, gate = Rounds(SUM_CALL, Say("5")), asyncio.Event()

    async def full(asked):
        if rounds.asked:
            await gate.wait()
        return await rounds(asked)

    text = ""

    async def read() -> None:
        nonlocal text
        async for item in stream:
            text += item.choices[0].delta.content or ""

    async with await open_stream(full, ask(), adding()) as stream:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(), 0.05)
        gate.set()
        await read()

    assert text == "I add. 5"


@pytest.mark.parametrize("how", ["aclose", "abort", "drop"])
async def test_round_that_waits_for_its_place_ends_with_the_request(how):
    """Leaving while the engine is full: nothing waits on, and the session is free."""
    rounds, given_up = Rounds(SUM_CALL), asyncio.Event()

    async def full(asked):
        if not rounds.asked:
            return await rounds(asked)
        try:
            return await asyncio.Event().wait()
        finally:
            given_up.set()

    box = adding()
    stream = await open_stream(full, ask().with_session_id("s"), box)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.collect(), 0.05)
    if how == "aclose":
        await stream.aclose()
        response = await stream.collect()
    elif how == "abort":
        box.running_id(stream.id)
        response = await stream.collect()
    if how == "drop":
        del stream
        gc.collect()
    else:
        assert response.choices[0].finish_reason == "canceled"
        assert [record.result_content for record in response.agentic_tool_calls] == ["5"]

    await asyncio.wait_for(given_up.wait(), 5)
    box.sessions.lease("s")
    assert box.sessions.ids() == []


@pytest.mark.parametrize("error", [RequestError, QueueFullError])
async def test_refused_later_round_brings_the_calls_so_far(error):
    """Tools have run, so it is no request of which nothing was computed."""

    def refuse(asked: RequestBuilder) -> Say:
        raise error("too long")

    with pytest.raises(InferenceError, match="its round 2 was refused: too long") as caught:
        await whole(Rounds(SUM_CALL, refuse), ask(), adding())

    partial = caught.value.partial_response
    assert [record.result_content for record in partial.agentic_tool_calls] == ["5"]
    assert partial.choices[0].finish_reason == "error"
    assert isinstance(caught.value.__cause__, error)


@pytest.mark.parametrize("how", ["abort", "deadline", "aclose"])
async def test_calls_that_had_ended_are_recorded_when_others_are_cut_off(how):
    """What they did is done, and the caller learns of it."""

    async def slow(call):
        await asyncio.sleep(60)

    callbacks = (ToolCallback("slow", slow, SLOW), ToolCallback("sum", lambda call: "5", SUM))
    box = Toolbox(ToolSettings(callbacks=callbacks))
    asked = ask().with_deadline(0.3) if how == "deadline" else ask()
    say = Say("", calls=[("slow", "{}"), ("sum", "{}")])
    async with await open_stream(Rounds(say), asked, box) as stream:
        while getattr(await anext(stream), "phase", "") != "complete":
            pass
        if how == "abort":
            box.running_id(stream.id)
        elif how == "aclose":
            await stream.aclose()
        if how == "deadline":
            with pytest.raises(DeadlineError, match="deadline") as caught:
                await stream.collect()
            response = caught.value.partial_response
        else:
            response = await stream.collect()

    assert [record.name for record in response.agentic_tool_calls] == ["sum"]


async def test_second_reader_is_refused():
    """Two would each get a part, and one of them wait for ever."""
    say = Say("x", calls=[("sum", "{}")], waits=asyncio.Event())
    async with await open_stream(Rounds(say), ask(), adding()) as stream:
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="two tasks read one stream"):
            await anext(stream)
        first.cancel()


async def test_only_the_first_chunk_of_all_rounds_says_who_speaks():
    """Clients join the deltas into one message; a role that came again would be joined too."""
    async with await open_stream(Rounds(SUM_CALL, Say("5")), ask(), adding()) as stream:
        items = [item async for item in stream]

    chunks = [item for item in items if not isinstance(item, AgenticToolCallProgress)]
    roles = [chunk.choices[0].delta.role for chunk in chunks]
    assert roles == ["assistant"] + [None] * (len(chunks) - 1)
