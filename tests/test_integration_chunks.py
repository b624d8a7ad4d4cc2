"""What the frameworks' models share: the chunks of an answer, from either kind of model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mistralrs_sdk import (
    BlockingModel,
    ChatCompletionChunkResponse,
    InferenceError,
    RequestError,
)
from mistralrs_sdk.integrations.chunks import Chunks, WholeCalls, joined, open_chunks
from tests.framework_models import (
    ARGUMENTS,
    CALLING,
    WEATHER,
    assert_blocking_idle,
    rounds_builder,
    talking_builder,
)
from tests.model_helpers import assert_idle
from tests.test_withdrawn_calls import CUT, TEXT, chunks_of

OSLO: dict[str, Any] = {"messages": "Oslo?", "temperature": 0}
ENDLESS: dict[str, Any] = {"messages": "Hi", "temperature": 0, "ignore_eos": True}


async def shown(chunks: Chunks) -> list[ChatCompletionChunkResponse]:
    calls = WholeCalls()
    async with chunks:
        return [seen async for chunk in chunks if (seen := calls.shown(chunk)) is not None]


async def test_both_kinds_of_model_give_the_same_chunks(tmp_path):
    """A `BlockingModel` too, in a loop that is not its own."""
    asked = {**OSLO, "tools": [WEATHER]}
    async with await rounds_builder(tmp_path / "a").build() as model:
        own = joined(await shown(await open_chunks(model, asked, None))).choices[0]
        whole = (await model.send_chat_request(asked)).choices[0]
    with BlockingModel.from_builder(rounds_builder(tmp_path / "b")) as blocking:
        other = joined(await shown(await open_chunks(blocking, asked, None))).choices[0]

    for choice in (own, other):
        assert choice.delta.content == whole.message.content == "Let me look."
        assert choice.delta.reasoning_content == whole.message.reasoning_content == "where to?"
        (call,) = choice.delta.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
        assert choice.finish_reason == whole.finish_reason == "tool_calls"


def test_calls_come_whole_and_with_the_end():
    """No chunk before it has a piece of one."""
    calls = WholeCalls()
    seen = [calls.shown(chunk) for chunk in chunks_of(*CALLING)]
    *before, last = [chunk for chunk in seen if chunk is not None]

    assert before
    assert all(chunk.choices[0].delta.tool_calls is None for chunk in before)
    (call,) = last.choices[0].delta.tool_calls
    assert (call.index, call.continues, call.function.arguments) == (0, False, ARGUMENTS)


def test_a_withdrawn_call_is_never_shown():
    """Its pieces were there, and are none: the last chunk has no call, and all of the text."""
    chunks = chunks_of(*CUT)
    calls = WholeCalls()
    seen = [chunk for chunk in map(calls.shown, chunks) if chunk is not None]

    assert any(chunk.choices[0].delta.tool_calls for chunk in chunks)
    assert not any(chunk.choices[0].delta.tool_calls for chunk in seen)
    assert joined(seen).choices[0].delta.content == TEXT


async def test_what_only_began_like_a_call_is_text(tmp_path):
    """It is never shown as a call, and its text is that of the whole answer, with the flag."""
    async with await rounds_builder(tmp_path).build() as model:
        asked = {**OSLO, "tools": [WEATHER], "max_tokens": 9}
        chunks = await shown(await open_chunks(model, asked, None))
        whole = (await model.send_chat_request(asked)).choices[0]

    choice = joined(chunks).choices[0]
    assert choice.delta.tool_calls is None
    assert choice.delta.content == whole.message.content
    assert "<tool_call>" in choice.delta.content
    assert choice.unparsed_tool_call


async def test_news_of_tools_that_the_model_executes_are_left_out(tmp_path):
    """A framework sees one answer, of all rounds."""

    def weather(city: str) -> str:
        return f"rain in {city}"

    async with await rounds_builder(tmp_path).with_tool(weather).build() as model:
        chunks = await shown(await open_chunks(model, OSLO, None))

    assert joined(chunks).choices[0].delta.content == "Let me look.It rains there."


async def test_log_probabilities_are_those_of_all_chunks(tmp_path):
    """One per token, joined in order."""
    async with await rounds_builder(tmp_path).build() as model:
        asked = {**OSLO, "logprobs": True, "max_tokens": 6}
        choice = joined(await shown(await open_chunks(model, asked, None))).choices[0]

    assert [entry.token for entry in choice.logprobs.content] == CALLING[:6]


@pytest.mark.parametrize("leave", ["cancel", "aclose", "break"])
async def test_leaving_a_blocking_models_chunks_frees_the_request(tmp_path, leave):
    """Whether a worker thread waits for the next one or not."""
    with BlockingModel.from_builder(talking_builder(tmp_path)) as model:
        chunks = await open_chunks(model, ENDLESS, None)
        read = asyncio.Event()

        async def reading() -> None:
            async with chunks:
                async for _ in chunks:
                    read.set()
                    if leave == "break":
                        break

        task = asyncio.create_task(reading())
        await read.wait()
        if leave == "cancel":
            task.cancel()
        elif leave == "aclose":
            await chunks.aclose()
        await asyncio.wait([task])

        assert task.cancelled() is (leave == "cancel")
        await asyncio.to_thread(assert_blocking_idle, model)


async def test_closing_from_elsewhere_ends_a_models_chunks(tmp_path):
    """Who reads meets the end, and no error."""
    async with await talking_builder(tmp_path).build() as model:
        chunks = await open_chunks(model, ENDLESS, None)
        await anext(chunks)
        reading = asyncio.ensure_future(shown(chunks))
        await asyncio.sleep(0)
        await chunks.aclose()

        await reading
        await assert_idle(model)


async def test_an_aborted_answer_is_an_error(tmp_path):
    """It would pass for a whole one."""
    async with await talking_builder(tmp_path).build() as model:
        async with await open_chunks(model, ENDLESS, None) as chunks:
            model.abort((await anext(chunks)).id)
            with pytest.raises(InferenceError, match="aborted before its end"):
                async for _ in chunks:
                    pass
        await assert_idle(model)


async def test_several_answers_are_refused(tmp_path):
    """Nobody would read the others."""
    async with await rounds_builder(tmp_path).build() as model:
        with pytest.raises(RequestError, match=r"n \(2\) must be 1"):
            await open_chunks(model, {**OSLO, "n": 2}, None)


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("pydantic_ai", "pydantic_ai", "pydantic-ai"),
        ("openai_agents", "agents", "openai-agents"),
        ("langchain", "langchain_core", "langchain"),
    ],
)
def test_without_the_framework_the_extra_is_named(module, library, extra):
    """The absence of an optional library is a sentence that says what to install."""
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        "try:\n"
        f"    import mistralrs_sdk.integrations.{module}\n"
        "except ImportError as error:\n"
        "    print(error)"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)

    assert f"pip install 'mistralrs_sdk[{extra}]'" in done.stdout, done.stderr
    assert library in done.stdout
