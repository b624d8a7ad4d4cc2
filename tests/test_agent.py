"""Agents: rounds of answers and calls, what they tell meanwhile, and how they end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mistralrs_sdk import (
    CalledFunction,
    ConfigError,
    Function,
    InferenceError,
    RequestBuilder,
    RequestError,
    Tool,
    ToolChoice,
)
from mistralrs_sdk.tools.agent_builder import AgentBuilder
from mistralrs_sdk.tools.agent_events import (
    AgentComplete,
    AgentStopReason,
    AgentTextDelta,
    AgentToolCallsComplete,
    AgentToolCallsStart,
    ToolResult,
)
from mistralrs_sdk.tools.callbacks import ToolCallback
from mistralrs_sdk.tools.loop import open_stream
from mistralrs_sdk.tools.settings import ToolSettings
from mistralrs_sdk.tools.toolbox import Toolbox
from tests.scripted_rounds import Rounds, Say

ECHO = Tool(Function("echo", "Says it again."))
CALL = Say("Let me see. ", calls=[("echo", '"x"')])


class ScriptedModel:
    """A model whose answers are written in advance."""

    def __init__(self, *script: Say) -> None:
        self.rounds = Rounds(*script)
        self.asked = self.rounds.asked

    async def stream_chat_request(self, request):
        return await self.rounds(request)


def echo(call: CalledFunction) -> str:
    return call.arguments


def agent(model: ScriptedModel, function=echo):
    return AgentBuilder(model).register_tool(ECHO, function)


async def test_run_returns_every_step():
    """Each answer with its calls and their results, and the last text."""
    model = ScriptedModel(CALL, Say("It is x."))

    response = await agent(model).build().run("What is it?")

    assert response.final_response == "It is x."
    assert response.stop_reason == AgentStopReason.TEXT_RESPONSE
    assert response.iterations == 2
    first, second = response.steps
    assert [result.result for result in first.tool_results] == ['"x"']
    assert first.response.choices[0].message.content == "Let me see. "
    assert second.tool_calls == ()
    assert model.asked[1].messages[-1]["content"] == '"x"'


async def test_stream_tells_what_happens_in_order():
    """Text as it comes, calls, each result, and the response at the end."""
    model = ScriptedModel(CALL, Say("x"))

    async with agent(model).build().run_stream("?") as stream:
        events = [event async for event in stream]
        response = await stream.collect()

    kinds = [type(event) for event in events if not isinstance(event, AgentTextDelta)]
    assert kinds == [AgentToolCallsStart, ToolResult, AgentToolCallsComplete, AgentComplete]
    text = "".join(event.text for event in events if isinstance(event, AgentTextDelta))
    assert text == "Let me see. x"
    assert events[-1].response == response


async def test_calls_run_at_once_in_the_stream_too():
    """Two threads meet at a barrier: one after the other they could not."""
    barrier = threading.Barrier(2, timeout=5)

    def meet(call: CalledFunction) -> str:
        barrier.wait()
        return call.arguments

    model = ScriptedModel(Say(calls=[("echo", "1"), ("echo", "2")]), Say("met"))
    async with agent(model, meet).build().run_stream("?") as stream:
        response = await stream.collect()

    assert [result.result for result in response.steps[0].tool_results] == ["1", "2"]


async def test_results_come_as_they_are_ready_and_are_kept_in_order():
    """The quick one is told first; the step has them as they were called."""
    quick_done = asyncio.Event()

    async def wait(call: CalledFunction) -> str:
        if call.arguments == "slow":
            await quick_done.wait()
        quick_done.set()
        return call.arguments

    model = ScriptedModel(Say(calls=[("echo", "slow"), ("echo", "quick")]), Say("done"))
    async with agent(model, wait).build().run_stream("?") as stream:
        told = [event.result async for event in stream if isinstance(event, ToolResult)]
        response = await stream.collect()

    assert told == ["quick", "slow"]
    assert [result.result for result in response.steps[0].tool_results] == ["slow", "quick"]


async def test_without_parallel_execution_calls_run_one_after_the_other():
    """In the order in which the model wrote them."""
    log = []

    async def slow(call: CalledFunction) -> str:
        log.append(f"begin {call.arguments}")
        await asyncio.sleep(0)
        log.append(f"end {call.arguments}")
        return ""

    model = ScriptedModel(Say(calls=[("echo", "1"), ("echo", "2")]), Say("done"))
    await agent(model, slow).with_parallel_tool_execution(False).build().run("?")

    assert log == ["begin 1", "end 1", "begin 2", "end 2"]


async def test_run_ends_after_the_most_iterations():
    """The calls of the last one are executed; the steps are all there."""
    model = ScriptedModel(CALL, CALL, CALL)

    response = await agent(model).with_max_iterations(2).build().run("?")

    assert response.stop_reason == AgentStopReason.MAX_ITERATIONS
    assert response.iterations == 2
    assert len(model.asked) == 2


async def test_empty_answer_is_no_action():
    """Neither text nor calls: nothing to go on with."""
    response = await agent(ScriptedModel(Say(""))).build().run("?")

    assert response.stop_reason == AgentStopReason.NO_ACTION
    assert response.final_response is None


@pytest.mark.parametrize("text", ["It is", ""])
async def test_answer_that_was_cut_says_so(text):
    """At the most tokens it may have stopped in the middle of a sentence, or before any text."""
    model = ScriptedModel(CALL, Say(text, finish_reason="length"))

    response = await agent(model).build().run("?")

    assert response.stop_reason == AgentStopReason.LENGTH
    assert response.final_response == (text or None)
    assert response.iterations == 2


async def test_aborted_answer_says_so():
    """`model.abort(id)` may end it from anywhere."""
    response = await agent(ScriptedModel(Say("It", finish_reason="canceled"))).build().run("?")

    assert response.stop_reason == AgentStopReason.CANCELED


class ModelWithTools(ScriptedModel):
    """A scripted model that executes calls of its own tools, as a `Model` does."""

    def __init__(self, box: Toolbox, *script: Say) -> None:
        super().__init__(*script)
        self.box = box

    async def stream_chat_request(self, request):
        return await open_stream(self.rounds, request, self.box)


async def test_tool_of_the_agent_comes_before_the_models_of_that_name():
    """The model's other tools are executed by the model; this one by who brought it."""
    box = Toolbox(
        ToolSettings(
            callbacks=(
                ToolCallback("echo", lambda call: "the model's"),
                ToolCallback("other", lambda call: "the other"),
            )
        )
    )
    model = ModelWithTools(
        box, Say(calls=[("other", "{}")]), Say(calls=[("echo", "mine")]), Say("done")
    )

    response = await agent(model).build().run("?")

    assert [r.result for step in response.steps for r in step.tool_results] == ["mine"]
    assert model.asked[1].messages[-1]["content"] == "the other"
    assert model.asked[2].messages[-1]["content"] == "mine"
    assert response.final_response == "done"


async def test_message_may_let_the_model_run_code_beside_the_agents_tools():
    """Code is run where the model answers; the agent's own calls go on as without it."""
    model = ScriptedModel(CALL, Say("It is x."))
    message = RequestBuilder().add_message("user", "What is it?").with_code_execution()

    response = await agent(model).build().run(message)

    assert [result.result for result in response.steps[0].tool_results] == ['"x"']
    assert all(asked.execution.code for asked in model.asked)


async def test_answer_that_fails_ends_the_run_with_its_steps():
    """What was done before is not lost."""
    model = ScriptedModel(CALL, Say("h", error=InferenceError("broken")))

    response = await agent(model).build().run("?")

    assert response.stop_reason == AgentStopReason.error("broken")
    assert len(response.steps) == 1


async def test_tool_that_raises_is_an_error_result():
    """The model reads it after `Error: `."""

    def broken(call: CalledFunction) -> str:
        raise KeyError("x")

    model = ScriptedModel(CALL, Say("sorry"))
    response = await agent(model, broken).build().run("?")

    (result,) = response.steps[0].tool_results
    assert (result.result, result.error) == (None, "KeyError: 'x'")
    assert model.asked[1].messages[-1]["content"] == "Error: KeyError: 'x'"


async def test_unknown_tool_is_an_error_result():
    """An agent has nobody to leave the call to."""
    model = ScriptedModel(Say(calls=[("other", "{}")]), Say("sorry"))

    response = await agent(model).build().run("?")

    assert "no tool 'other'" in response.steps[0].tool_results[0].error


async def test_settings_reach_the_request():
    """System prompt first, tools, choice and thinking; a required call is required once."""
    model = ScriptedModel(CALL, Say("x"))
    built = (
        agent(model)
        .with_system_prompt("Be short.")
        .with_tool_choice(ToolChoice.REQUIRED)
        .with_enable_thinking(False)
        .build()
    )

    await built.run(RequestBuilder().add_message("user", "?").set_sampler_max_len(7))

    first, second = model.asked
    assert first.messages[0] == {"role": "system", "content": "Be short."}
    assert first.tools == (ECHO,) == tuple(built.tools())
    assert (first.tool_choice, second.tool_choice) == (ToolChoice.REQUIRED, ToolChoice.AUTO)
    assert first.thinking is False
    assert second.sampling.max_len == 7
    assert built.model() is model
    assert built.config().max_iterations == 10


async def test_leaving_the_stream_cancels_the_tools():
    """break inside `async with`: nothing runs on."""
    cancelled = asyncio.Event()

    async def endless(call: CalledFunction) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return ""

    calls = Say(calls=[("echo", "1"), ("quick", "2")])
    built = agent(ScriptedModel(calls, Say("x")), endless)
    built = built.with_async_tool(Tool(Function("quick")), lambda call: "")
    async with built.build().run_stream("?") as stream:
        async for event in stream:
            if isinstance(event, ToolResult):
                break

    assert cancelled.is_set()


async def test_stream_may_be_closed_while_another_task_reads():
    """The reader's loop ends, the tool is cancelled."""
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(call: CalledFunction) -> str:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return ""

    stream = agent(ScriptedModel(CALL), endless).build().run_stream("?")

    async def read() -> list[type]:
        return [type(event) async for event in stream]

    reader = asyncio.create_task(read())
    await asyncio.wait_for(began.wait(), 5)
    await stream.aclose()

    assert AgentToolCallsStart in await asyncio.wait_for(reader, 5)
    assert cancelled.is_set()
    with pytest.raises(RuntimeError, match="closed before its end"):
        await stream.collect()


async def test_reader_that_stops_waiting_may_come_back():
    """A time limit on one `anext` does not end the run."""
    gate = asyncio.Event()

    async def slow(call: CalledFunction) -> str:
        await gate.wait()
        return "done"

    async with agent(ScriptedModel(CALL, Say("x")), slow).build().run_stream("?") as stream:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.collect(), 0.05)
        gate.set()
        response = await stream.collect()

    assert response.final_response == "x"


async def test_dropped_stream_cancels_the_tools():
    """Nobody reads it any more: nothing runs on."""
    cancelled = asyncio.Event()

    async def endless(call: CalledFunction) -> str:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return ""

    stream = agent(ScriptedModel(CALL), endless).build().run_stream("?")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.collect(), 0.05)
    del stream

    await asyncio.wait_for(cancelled.wait(), 5)


async def test_refused_later_answer_ends_the_run_with_its_steps():
    """Only the first request can be at fault for the caller: tools have run since."""

    def refuse(asked: RequestBuilder) -> Say:
        raise RequestError("too long")

    response = await agent(ScriptedModel(CALL, refuse)).build().run("?")

    assert response.stop_reason == AgentStopReason.error("too long")
    assert [step.tool_results[0].result for step in response.steps] == ['"x"']
    with pytest.raises(RequestError, match="too long"):
        await agent(ScriptedModel(refuse)).build().run("?")


async def test_deadline_is_for_the_whole_run():
    """Later answers have what is left of it; tools that outlast it end the run."""

    async def slow(call: CalledFunction) -> str:
        await asyncio.sleep(60)
        return ""

    model = ScriptedModel(CALL, Say("x"))
    asked = RequestBuilder().add_message("user", "?")
    await agent(model).build().run(asked.with_deadline(100))
    response = await agent(ScriptedModel(CALL), slow).build().run(asked.with_deadline(0.05))

    assert model.asked[1].deadline < 100
    assert response.stop_reason.kind == "error"
    assert "deadline passed while tools ran" in response.stop_reason.message
    assert response.iterations == 1


def test_two_tools_of_one_name_are_refused():
    """The second could never be called."""
    with pytest.raises(ConfigError, match="a tool 'echo' already"):
        agent(ScriptedModel()).with_sync_tool(ECHO, echo)


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("with_max_iterations", 0),
        ("with_tool_choice", "auto"),
        ("with_parallel_tool_execution", 1),
        ("with_system_prompt", None),
        ("with_tool_timeout", -1),
    ],
)
def test_bad_setting_is_refused_where_it_is_said(method, value):
    """The message names the setting."""
    with pytest.raises(ConfigError, match=method.removeprefix("with_")):
        getattr(agent(ScriptedModel()), method)(value)


async def test_agent_keeps_no_session():
    """Its rounds would put the same turns into it again and again."""
    asked = RequestBuilder().add_message("user", "?").with_session_id("s")

    with pytest.raises(RequestError, match="keeps no session"):
        await agent(ScriptedModel()).build().run(asked)
