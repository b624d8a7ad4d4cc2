"""The tool loop and sessions on a real engine: a tiny model whose calls the grammar writes."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mistralrs_sdk import (
    EngineClosedError,
    ModelBuilder,
    ModelLoadError,
    RequestBuilder,
    RequestError,
    ToolChoice,
)
from mistralrs_sdk.chat.function_tools import tool_from_function
from mistralrs_sdk.chat.tool_progress import AgenticToolCallProgress
from mistralrs_sdk.tools.agent_builder import AgentBuilder
from mistralrs_sdk.tools.agent_events import AgentStopReason
from mistralrs_sdk.tools.mcp_config import McpClientConfig, McpServerConfig, McpServerSource
from tests.model_helpers import assert_idle, tiny_builder

TEMPLATE = """
{%- for tool in tools or [] %}{{ tool.function.name }} <tool_call>
{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}
{% endfor %}assistant: """


def switch(on: bool) -> str:
    """Switches the light."""
    return "bright" if on else "dark"


def builder() -> ModelBuilder:
    return tiny_builder().with_chat_template(TEMPLATE)


def answering_with(callback) -> ModelBuilder:
    """`switch` is answered by this callback instead."""
    tool = tool_from_function(switch)
    return builder().with_tool_callback_and_tool("switch", callback, tool)


def must_switch() -> RequestBuilder:
    """A first answer that calls `switch`, whatever the model would say."""
    asked = RequestBuilder().add_message("user", "light?").set_sampler_max_len(100)
    return asked.set_tool_choice(ToolChoice.named("switch"))


def tell(text: str, session_id: str) -> RequestBuilder:
    asked = RequestBuilder().add_message("user", text).set_sampler_max_len(4)
    return asked.with_session_id(session_id)


async def test_model_calls_a_function_and_reads_its_result():
    """From the signature to the second round's prompt; stream and whole agree."""
    async with await builder().with_tool(switch).build() as model:
        response = await model.send_chat_request(must_switch().with_session_id("s"))
        async with await model.stream_chat_request(must_switch()) as stream:
            items = [item async for item in stream]
            again = await stream.collect()
        turns = model.export_session("s").messages
        await assert_idle(model)

    (record,) = response.agentic_tool_calls
    on = record.arguments.replace(" ", "") == '{"on":true}'
    assert record.result_content == ("bright" if on else "dark")
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "assistant"]
    assert turns[2]["tool_call_id"] == turns[1]["tool_calls"][0]["id"]
    phases = [item.phase for item in items if isinstance(item, AgenticToolCallProgress)]
    assert phases == ["calling", "complete"]
    text = "".join(item.choices[0].delta.content or "" for item in items)
    assert text == again.choices[0].message.content == response.choices[0].message.content
    assert items[-1].usage.completion_tokens == again.usage.completion_tokens
    assert again.usage.prompt_tokens == response.usage.prompt_tokens


@pytest.mark.parametrize("calls", ["executed", "returned", "none"])
async def test_openai_client_joins_the_chunks_to_the_whole_answer(calls):
    """Its own code adds up the deltas, as it would those of a server."""
    asked = must_switch().set_tools([tool_from_function(switch)])
    if calls == "none":
        asked = RequestBuilder().add_message("user", "light?").set_sampler_max_len(5)
    built = builder().with_tool(switch) if calls == "executed" else builder()
    async with await built.build() as model, await model.stream_chat_request(asked) as stream:
        items = [item async for item in stream]
        whole = await stream.collect()
    state = ChatCompletionStreamState()
    for item in items:
        if not isinstance(item, AgenticToolCallProgress):
            state.handle_chunk(ChatCompletionChunk.model_validate(item.to_dict()))

    joined = state.current_completion_snapshot.choices[0].message
    message = whole.choices[0].message
    assert joined.role == "assistant"
    assert (joined.content or "") == (message.content or "")
    assert [call.id for call in joined.tool_calls or ()] == [
        call.id for call in message.tool_calls or ()
    ]
    assert bool(message.tool_calls) is (calls == "returned")


async def test_past_call_is_rendered_alike_in_whatever_form_it_comes_back():
    """Our message, its dict, the openai client's object and its dump with all the nulls."""
    asked = must_switch().set_tools([tool_from_function(switch)])
    async with await builder().build() as model:
        whole = await model.send_chat_request(asked)
        message = whole.choices[0].message
        parsed = ChatCompletion.model_validate(whole.to_dict()).choices[0].message
        forms = [message, message.to_dict(), parsed, parsed.model_dump()]
        forms.append({**parsed.model_dump(), "tool_calls": message.tool_calls})
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "dark"}
        prompts = []
        for form in forms:
            text, _ = model.render_chat([{"role": "user", "content": "light?"}, form, result])
            prompts.append(json.loads(text.split("<tool_call>")[1].split("</tool_call>")[0]))

    assert prompts == [prompts[0]] * 5
    assert prompts[0]["name"] == "switch"


async def test_description_says_how_answers_are_read_and_why():
    """The format of calls and the tags of reasoning, each with the sign it was found by."""
    template = TEMPLATE + "{#- <think></think> #}"
    async with await tiny_builder().with_chat_template(template).build() as model:
        shown = model.describe()

    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "tool calls hermes hermes calls: <tool_call> is in the chat template" in lines
    assert "reasoning <think> ... </think> reasoning: </think> is in the chat template" in lines


async def test_agent_works_on_a_model():
    """A required call is made once, then the model says what it likes."""
    async with await builder().build() as model:
        choice = ToolChoice.named("switch")
        agent = AgentBuilder(model).with_tool(switch).with_tool_choice(choice).build()
        response = await agent.run(must_switch())

    # a random model says what it likes until it may not say more
    assert response.stop_reason in (AgentStopReason.TEXT_RESPONSE, AgentStopReason.LENGTH)
    assert response.steps[0].tool_results[0].result in ("bright", "dark")
    assert response.iterations == 2


async def test_cancelled_request_frees_the_engine_and_its_tools():
    """Cancelled while a tool runs: nothing stays behind."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def slow(call):
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async with await answering_with(slow).build() as model:
        task = asyncio.create_task(model.send_chat_request(must_switch()))
        await asyncio.wait_for(began.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_idle(model)

    assert ended.is_set()


async def test_abort_by_id_ends_a_request_whose_tool_runs():
    """The id is that of any chunk; the answer ends with what there is."""

    async def slow(call):
        await asyncio.sleep(60)

    async with (
        await answering_with(slow).build() as model,
        await model.stream_chat_request(must_switch()) as stream,
    ):
        async for item in stream:
            if isinstance(item, AgenticToolCallProgress):
                model.abort(stream.id)
        response = await stream.collect()

    assert response.choices[0].finish_reason == "canceled"


async def test_closing_the_model_ends_a_request_whose_tool_runs():
    """As every other open request it gets EngineClosedError."""
    began = asyncio.Event()

    async def slow(call):
        began.set()
        await asyncio.sleep(60)

    model = await answering_with(slow).build()
    task = asyncio.create_task(model.send_chat_request(must_switch()))
    await asyncio.wait_for(began.wait(), 20)
    await model.aclose()

    with pytest.raises(EngineClosedError):
        await asyncio.wait_for(task, 5)


async def test_fork_shares_the_blocks_of_its_source():
    """What both have in common is computed once: the fork's first request finds it cached."""
    async with await builder().build() as model:
        for text in ("a rather long message about nothing in particular", "go on"):
            await model.send_chat_request(tell(text, "source"))
        other = await model.send_chat_request(tell("go on", "other"))
        fork = model.fork_session("source", turns=1)
        response = await model.send_chat_request(tell("go on", fork))
        ids = model.list_session_ids()

    assert other.usage.cached_tokens == 0
    # the last token is always computed, and only full blocks of 8 are shared
    assert response.usage.cached_tokens >= response.usage.prompt_tokens - 8
    assert response.session_id == fork
    assert ids == ["source", "other", fork]


async def test_session_moves_to_another_model():
    """Exported from one and imported into the next, it goes on there."""
    async with await builder().build() as first:
        await first.send_chat_request(tell("one", "s"))
        data = first.export_session("s").to_dict()
    async with await builder().build() as second:
        second.import_session("s", data)
        await second.send_chat_request(tell("two", "s"))
        turns = second.export_session("s").messages
        assert second.delete_session("s")
        assert second.list_session_ids() == []

    assert [turn["content"] for turn in turns if turn["role"] == "user"] == ["one", "two"]


async def test_requests_of_one_session_do_not_overlap():
    """The second is refused at once; another session goes on."""
    async with (
        await builder().build() as model,
        await model.stream_chat_request(tell("one", "s")) as stream,
    ):
        with pytest.raises(RequestError, match="'s' is working on another request"):
            await model.send_chat_request(tell("two", "s"))
        await model.send_chat_request(tell("two", "t"))
        await stream.collect()


async def test_mcp_server_that_is_missing_fails_the_build():
    """Before any weight is read; no engine thread stays."""
    source = McpServerSource.Process("/nowhere/server")
    config = McpClientConfig(servers=[McpServerConfig(name="gone", source=source)])
    threads = threading.active_count()

    with pytest.raises(ModelLoadError, match="MCP server 'gone'"):
        await builder().with_mcp_client(config).build()

    assert threading.active_count() <= threads + 1  # the worker that opened the checkpoint
