"""The loop of calls and answers: what runs, what the model and the caller see, how it ends."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from mistralrs_sdk import (
    Constraint,
    DeadlineError,
    EngineClosedError,
    Function,
    InferenceError,
    ModelBuilder,
    RequestBuilder,
    RequestError,
    Tool,
    ToolChoice,
)
from mistralrs_sdk.chat.tool_events import AgentToolApprovalDecision
from mistralrs_sdk.chat.tool_progress import AgenticToolCallProgress
from mistralrs_sdk.tools.callbacks import ToolCallback
from mistralrs_sdk.tools.loop import ToolLoopStream, open_stream
from mistralrs_sdk.tools.settings import ToolSettings
from mistralrs_sdk.tools.toolbox import Toolbox
from tests.scripted_rounds import Rounds, Say

SUM = Tool(Function("sum", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}}))


def add(call, context) -> str:
    arguments = json.loads(call.arguments)
    return str(arguments["a"] + arguments["b"])


def area(width: int, height: int = 1) -> dict[str, int]:
    """Multiplies."""
    return {"area": width * height}


def toolbox(*callbacks: ToolCallback, **settings) -> Toolbox:
    return Toolbox(ToolSettings(callbacks=callbacks, **settings))


def adding(function=add) -> Toolbox:
    return toolbox(ToolCallback("sum", function, SUM))


def ask(text: str = "2 + 3?") -> RequestBuilder:
    return RequestBuilder().add_message("user", text)


SUM_CALL = Say("I add. ", calls=[("sum", '{"a": 2, "b": 3}')])


async def whole(rounds: Rounds, asked: RequestBuilder, box: Toolbox):
    async with await open_stream(rounds, asked, box) as stream:
        return await stream.collect()


async def items(rounds: Rounds, asked: RequestBuilder, box: Toolbox) -> list:
    async with await open_stream(rounds, asked, box) as stream:
        return [item async for item in stream]


def text_of(found: list) -> str:
    chunks = [item for item in found if not isinstance(item, AgenticToolCallProgress)]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def progress_of(found: list) -> list:
    return [
        (item.round, item.tool_name, item.phase, item.error)
        for item in found
        if isinstance(item, AgenticToolCallProgress)
    ]


async def test_result_of_a_call_reaches_the_model():
    """The next round's messages end with the call and its result."""
    rounds = Rounds(SUM_CALL, Say("5"))

    response = await whole(rounds, ask(), adding())

    calling, result = rounds.asked[1].messages[1:]
    assert calling["tool_calls"][0]["function"]["arguments"] == '{"a": 2, "b": 3}'
    assert calling["content"] == "I add. "
    assert result == {"role": "tool", "content": "5", "tool_call_id": "chat-1-call-0"}
    assert response.choices[0].message.content == "5"


async def test_response_records_the_calls_and_sums_the_usage():
    """What was executed and what all rounds took is in the one response."""
    response = await whole(Rounds(SUM_CALL, SUM_CALL, Say("5")), ask(), adding())

    assert response.id == "chat-1"
    assert [(c.round, c.name, c.result_content) for c in response.agentic_tool_calls] == [
        (0, "sum", "5"),
        (1, "sum", "5"),
    ]
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (30, 15)
    assert response.usage.total_completion_time_sec == 1.5


async def test_stream_shows_all_rounds_with_progress_between():
    """One id, one finish reason and one usage, however many rounds there are."""
    found = await items(Rounds(SUM_CALL, Say("5")), ask(), adding())

    assert text_of(found) == "I add. 5"
    assert progress_of(found) == [(0, "sum", "calling", None), (0, "sum", "complete", None)]
    chunks = [item for item in found if not isinstance(item, AgenticToolCallProgress)]
    assert {chunk.id for chunk in chunks} == {"chat-1"}
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.usage] == ["stop"]
    assert [c.choices[0].finish_reason for c in chunks].count(None) == len(chunks) - 1
    assert chunks[-1].usage.prompt_tokens == 20
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)


async def test_without_tools_the_answer_is_the_plain_stream():
    """Where nothing is to be executed nothing is put in between."""
    rounds = Rounds(Say("5"))

    stream = await open_stream(rounds, ask(), Toolbox())

    assert stream is rounds.streams[0]


async def test_registered_tools_are_offered():
    """A tool with its schema as it is, one without takes any arguments."""
    rounds = Rounds(Say("5"))
    box = toolbox(ToolCallback("sum", add, SUM), ToolCallback("log", add))

    await whole(rounds, ask(), box)

    assert rounds.asked[0].tools[0] == SUM
    assert rounds.asked[0].tools[1].to_dict()["function"] == {
        "name": "log",
        "parameters": {"type": "object"},
    }


async def test_request_describes_a_registered_tool_itself():
    """A request's tool of the same name replaces the schema; the callback answers."""
    own = Tool(Function("sum", "Adds two numbers."))
    rounds = Rounds(SUM_CALL, Say("5"))

    response = await whole(rounds, ask().set_tools([own]), adding())

    assert rounds.asked[0].tools == (own,)
    assert response.agentic_tool_calls[0].result_content == "5"


async def test_tool_choice_none_offers_and_executes_nothing():
    """Who wants no calls gets one plain answer."""
    rounds = Rounds(Say("5"))

    stream = await open_stream(rounds, ask().set_tool_choice(ToolChoice.NONE), adding())

    assert stream is rounds.streams[0]
    assert rounds.asked[0].tools == ()


async def test_constrained_request_is_offered_no_registered_tools():
    """What the answer must match is no call; strict tools would even contradict it."""
    rounds = Rounds(Say("5"))

    await open_stream(rounds, ask().set_constraint(Constraint.Regex("[0-9]")), adding())

    assert rounds.asked[0].tools == ()


async def test_zero_rounds_leave_all_calls_to_the_caller():
    """Registered tools are offered, and their calls come back."""
    asked = ask().with_max_tool_rounds(0)

    response = await whole(Rounds(SUM_CALL), asked, adding())

    assert response.choices[0].finish_reason == "tool_calls"
    assert response.choices[0].message.tool_calls[0].function.name == "sum"


async def test_after_the_last_round_an_answer_must_come():
    """The round after the limit may not call."""
    rounds = Rounds(SUM_CALL, SUM_CALL, Say("enough"))

    response = await whole(rounds, ask().with_max_tool_rounds(2), adding())

    assert [asked.tool_choice.mode for asked in rounds.asked] == ["auto", "auto", "none"]
    assert response.choices[0].message.content == "enough"


async def test_required_call_is_required_once():
    """Otherwise the model could never answer."""
    rounds = Rounds(SUM_CALL, Say("5"))

    await whole(rounds, ask().set_tool_choice(ToolChoice.named("sum")), adding())

    assert rounds.asked[0].tool_choice == ToolChoice.named("sum")
    assert rounds.asked[1].tool_choice == ToolChoice("auto", ("sum",))


async def test_call_without_callback_ends_the_answer():
    """It is returned to the caller, in stream and whole."""
    other = Tool(Function("other"))
    asked = ask().set_tools([other])
    say = Say(calls=[("other", "{}")])

    response = await whole(Rounds(say), asked, adding())
    found = await items(Rounds(say), asked, adding())

    assert response.choices[0].finish_reason == "tool_calls"
    assert response.agentic_tool_calls == ()
    shown = [call for item in found for call in item.choices[0].delta.tool_calls or ()]
    assert shown == list(response.choices[0].message.tool_calls)
    assert found[-1].choices[0].finish_reason == "tool_calls"


async def test_mixed_round_executes_what_it_can_and_returns_the_rest():
    """The caller sees only what is left to do, numbered from 0, and the records of the rest."""
    other = Tool(Function("other"))
    asked = ask().set_tools([other])
    say = Say("Both. ", calls=[("sum", '{"a": 1, "b": 1}'), ("other", "{}")])

    response = await whole(Rounds(say), asked, adding())
    found = await items(Rounds(say), asked, adding())

    (left,) = response.choices[0].message.tool_calls
    assert (left.index, left.function.name) == (0, "other")
    assert [call.result_content for call in response.agentic_tool_calls] == ["2"]
    chunks = [item for item in found if not isinstance(item, AgenticToolCallProgress)]
    assert [call for c in chunks for call in c.choices[0].delta.tool_calls or ()] == [left]
    assert text_of(found) == "Both. "
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_call_that_was_cut_off_by_the_length_is_not_executed():
    """Only an answer that ends with its calls has them executed; stream and whole show them."""
    say = Say(calls=[("sum", "{}")], finish_reason="length")

    response = await whole(Rounds(say), ask(), adding())
    found = await items(Rounds(say), ask(), adding())

    assert response.choices[0].finish_reason == "length"
    assert found[-1].choices[0].delta.tool_calls == response.choices[0].message.tool_calls


async def test_invented_tool_is_an_error_the_model_reads():
    """A name that was not offered is told to the model, with those that were."""
    rounds = Rounds(Say(calls=[("product", "{}")]), Say("sorry"))

    await whole(rounds, ask(), adding())

    assert rounds.asked[1].messages[-1]["content"] == (
        "Error: there is no tool 'product' to call; there are: sum"
    )


@pytest.mark.parametrize("exception", [ValueError("bad luck"), SystemExit(1), TimeoutError("slow")])
async def test_callback_that_raises_is_read_by_the_model_and_told_the_caller(exception):
    """The request goes on; even leaving the interpreter is only a failed call."""

    def broken(call, context):
        raise exception

    rounds = Rounds(SUM_CALL, Say("no luck"))
    found = await items(rounds, ask(), adding(broken))

    reason = f"{type(exception).__name__}: {exception}"
    assert rounds.asked[1].messages[-1]["content"] == f"Error: {reason}"
    assert progress_of(found)[1] == (0, "sum", "complete", reason)
    assert text_of(found) == "I add. no luck"


async def test_coroutine_callback_that_cancels_itself_is_a_failed_call():
    """A CancelledError of the tool's own making does not end the request."""

    async def canceling(call, context):
        raise asyncio.CancelledError

    rounds = Rounds(SUM_CALL, Say("no luck"))
    await whole(rounds, ask(), adding(canceling))

    assert rounds.asked[1].messages[-1]["content"] == "Error: CancelledError: "


async def test_calls_of_one_round_run_side_by_side():
    """Coroutines and threads alike: each waits here until the others have begun."""
    barrier = threading.Barrier(2, timeout=5)
    met = asyncio.Event()
    started: list[str] = []

    async def coroutine(call, context):
        started.append(call.arguments)
        if len(started) == 2:
            met.set()
        await asyncio.wait_for(met.wait(), 5)
        return call.arguments

    def plain(call, context):
        barrier.wait()
        return call.arguments

    box = toolbox(ToolCallback("a", coroutine), ToolCallback("t", plain))
    calls = [("a", "1"), ("a", "2"), ("t", "3"), ("t", "4")]
    response = await whole(Rounds(Say(calls=calls), Say("done")), ask(), box)

    assert [call.result_content for call in response.agentic_tool_calls] == ["1", "2", "3", "4"]


async def test_no_more_calls_run_at_once_than_the_limit():
    """The rest waits; the results keep the order of the calls."""
    running = 0
    most = 0

    async def count(call, context):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return call.arguments

    calls = [("count", str(n)) for n in range(40)]
    box = toolbox(ToolCallback("count", count))
    response = await whole(Rounds(Say(calls=calls), Say("done")), ask(), box)

    assert most == 16
    assert [call.result_content for call in response.agentic_tool_calls] == [a for _, a in calls]


async def test_call_that_takes_too_long_is_given_up():
    """The model reads how long it was waited for."""

    async def slow(call, context):
        await asyncio.sleep(60)

    rounds = Rounds(SUM_CALL, Say("no"))
    await whole(rounds, ask(), toolbox(ToolCallback("sum", slow, SUM), timeout=0.01))

    assert rounds.asked[1].messages[-1]["content"] == "Error: sum gave no result within 0.01 s"


async def test_plain_callbacks_do_not_hold_up_the_event_loop():
    """They run on threads of their own."""
    release = threading.Event()

    def blocking(call, context):
        assert release.wait(5)
        return threading.current_thread().name

    async with await open_stream(Rounds(SUM_CALL, Say("5")), ask(), adding(blocking)) as stream:
        async for item in stream:
            if isinstance(item, AgenticToolCallProgress) and item.phase == "calling":
                release.set()  # only reachable if the loop runs meanwhile
        response = await stream.collect()

    assert response.agentic_tool_calls[0].result_content != threading.current_thread().name


async def test_callback_sees_where_the_call_comes_from():
    """Session, round and tool are in the context."""
    seen = []

    async def look(call, context):
        seen.append((context.session_id, context.round, context.tool_name, call.name))
        return ""

    asked = ask().with_session_id("s")
    await whole(Rounds(SUM_CALL, SUM_CALL, Say("5")), asked, adding(look))

    assert seen == [("s", 0, "sum", "sum"), ("s", 1, "sum", "sum")]


async def test_function_gets_its_arguments_as_keywords():
    """A function that became a tool is called like one; what it returns is JSON for the model."""
    good, bad = Say(calls=[("area", '{"width": 3}')]), Say(calls=[("area", "[3]")])
    unfit = Say(calls=[("area", '{"width": 3, "depth": 1}')])
    rounds = Rounds(good, bad, unfit, Say("ok"))

    await whole(rounds, ask(), Toolbox(ModelBuilder("model").with_tool(area).tools))

    assert rounds.asked[0].tools[0].function.description == "Multiplies."
    assert rounds.asked[1].messages[-1]["content"] == '{"area": 3}'
    assert "must be a JSON object" in rounds.asked[2].messages[-1]["content"]
    assert "depth" in rounds.asked[3].messages[-1]["content"]


# Approvals


async def test_denied_call_is_told_the_model():
    """The tool does not run; the denial's own words are what the model reads."""
    ran = []
    rounds = Rounds(SUM_CALL, Say("fine"))
    asked = ask().with_agent_approval_callback(lambda a: AgentToolApprovalDecision.deny("not now"))

    found = await items(rounds, asked, adding(lambda call, context: ran.append(call) or ""))

    assert not ran
    assert rounds.asked[1].messages[-1]["content"] == "Error: not now"
    assert progress_of(found)[1] == (0, "sum", "complete", "not now")


async def test_approval_describes_the_call():
    """Who is asked sees tool, arguments and round; a bool is an answer too."""
    seen = []

    async def approve(approval):
        seen.append((approval.tool.label, approval.tool.source, approval.arguments, approval.round))
        return True

    asked = ask().with_agent_approval_async_callback(approve)
    response = await whole(Rounds(SUM_CALL, Say("5")), asked, adding())

    assert seen == [("sum", "user", '{"a": 2, "b": 3}', 0)]
    assert response.agentic_tool_calls[0].result_content == "5"


async def test_approval_for_the_session_is_not_asked_again():
    """It holds for later rounds and for later requests of the session, for that tool."""
    asks = []

    def approve(approval):
        asks.append(approval.tool.label)
        return AgentToolApprovalDecision.approve_for_session()

    box = adding()
    asked = ask().with_session_id("s").with_agent_approval_callback(approve)
    await whole(Rounds(SUM_CALL, SUM_CALL, Say("5")), asked, box)
    await whole(Rounds(SUM_CALL, Say("5")), asked, box)

    assert asks == ["sum"]


async def test_approval_that_fails_is_a_denial():
    """Nothing runs because asking went wrong."""
    rounds = Rounds(SUM_CALL, Say("fine"))
    asked = ask().with_agent_approval_callback(lambda approval: 1 / 0)

    await whole(rounds, asked, adding())

    assert "denied" in rounds.asked[1].messages[-1]["content"]


async def test_asking_needs_somebody_to_ask():
    """Permission ask without a callback is refused before anything runs."""
    with pytest.raises(RequestError, match="with_agent_approval_callback"):
        await open_stream(Rounds(), ask().with_agent_permission("ask"), adding())


async def test_denied_permission_denies_every_call():
    """Deny runs nothing and asks nobody."""
    rounds = Rounds(SUM_CALL, Say("fine"))

    await whole(rounds, ask().with_agent_permission("deny"), adding())

    assert "may execute no tools" in rounds.asked[1].messages[-1]["content"]


# Ending early


async def test_leaving_the_stream_cancels_running_callbacks():
    """break inside `async with`: the callback is cancelled and no further round begins."""
    cancelled = asyncio.Event()

    async def endless(call, context):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    rounds = Rounds(SUM_CALL, Say("5"))
    async with await open_stream(rounds, ask(), adding(endless)) as stream:
        async for item in stream:
            if isinstance(item, AgenticToolCallProgress):
                break

    assert cancelled.is_set()
    assert len(rounds.asked) == 1


async def test_cancelling_the_caller_cancels_running_callbacks():
    """As `send_chat_request` is used: its task is cancelled while a tool runs."""
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(call, context):
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    task = asyncio.create_task(whole(Rounds(SUM_CALL, Say("5")), ask(), adding(endless)))
    await asyncio.wait_for(began.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert cancelled.is_set()


async def test_dropped_stream_cancels_running_callbacks():
    """A stream that nobody holds any more does not let its tools run on."""
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(call, context):
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    box = adding(endless)
    stream = await open_stream(Rounds(SUM_CALL, Say("5")), ask().with_session_id("s"), box)
    while not isinstance(await anext(stream), AgenticToolCallProgress):
        pass
    await asyncio.wait_for(began.wait(), 5)
    del stream

    await asyncio.wait_for(cancelled.wait(), 5)
    box.sessions.lease("s")  # free again


async def test_leaving_the_stream_aborts_the_answer():
    """The round that runs is closed."""
    rounds = Rounds(Say("abc"))
    async with await open_stream(rounds, ask(), adding()) as stream:
        await anext(stream)

    assert rounds.streams[0].closed
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_abort_while_tools_run_ends_with_canceled():
    """The id of the stream ends it from anywhere, whatever round it is in."""

    async def endless(call, context):
        await asyncio.sleep(60)

    box = adding(endless)
    async with await open_stream(Rounds(SUM_CALL), ask(), box) as stream:
        found = []
        async for item in stream:
            found.append(item)
            if isinstance(item, AgenticToolCallProgress):
                assert box.running_id(stream.id) == "chat-1"
        response = await stream.collect()

    assert found[-1].choices[0].finish_reason == "canceled"
    assert response.choices[0].finish_reason == "canceled"
    assert box.running_id("chat-1") == "chat-1"
    assert not box.running


async def test_abort_names_the_round_that_runs_in_the_engine():
    """In the second round the stream's id leads to that round's own."""
    box = adding()
    async with await open_stream(Rounds(SUM_CALL, Say("5")), ask(), box) as stream:
        async for item in stream:
            if not isinstance(item, AgenticToolCallProgress) and "5" in (
                item.choices[0].delta.content or ""
            ):
                assert box.running_id(stream.id) == "chat-2"


async def test_closing_the_model_fails_requests_whose_tools_run():
    """They get what other open requests get."""

    async def endless(call, context):
        await asyncio.sleep(60)

    box = adding(endless)
    async with await open_stream(Rounds(SUM_CALL), ask(), box) as stream:
        while not isinstance(await anext(stream), AgenticToolCallProgress):
            pass
        await box.aclose()
        with pytest.raises(EngineClosedError, match="while tools ran"):
            await stream.collect()


async def test_deadline_counts_rounds_and_tools_together():
    """A tool that outlasts the request's deadline fails it, with what there is."""

    async def slow(call, context):
        await asyncio.sleep(60)

    with pytest.raises(DeadlineError, match="deadline passed while tools ran") as caught:
        await whole(Rounds(SUM_CALL), ask().with_deadline(0.02), adding(slow))

    assert caught.value.partial_response.choices[0].message.content == "I add. "


async def test_later_round_gets_what_is_left_of_the_deadline():
    """Time that went by is not given again."""
    rounds = Rounds(SUM_CALL, Say("5"))

    await whole(rounds, ask().with_deadline(100), adding())

    assert rounds.asked[1].deadline < 100


async def test_failure_of_a_later_round_brings_the_calls_so_far():
    """The partial response knows what was executed and used."""

    def failing(asked: RequestBuilder) -> Say:
        error = InferenceError("the request failed: broken")
        error.partial_response = response
        return Say("h", error=error)

    response = await whole(Rounds(Say("h")), ask(), Toolbox())
    with pytest.raises(InferenceError, match="broken") as caught:
        await whole(Rounds(SUM_CALL, failing), ask(), adding())

    partial = caught.value.partial_response
    assert [call.name for call in partial.agentic_tool_calls] == ["sum"]
    assert partial.usage.prompt_tokens == 20


async def test_several_choices_are_refused_where_calls_are_executed():
    """The message says how to have them."""
    with pytest.raises(RequestError, match=r"n_choices \(2\) must be 1.*with_max_tool_rounds\(0\)"):
        await open_stream(Rounds(), ask().set_sampler_n_choices(2), adding())


# Sessions


async def test_session_brings_the_turns_before():
    """The second request sees the first one's turns, tool results included."""
    box = adding()
    rounds = Rounds(SUM_CALL, Say("5"), Say("you are welcome"))

    response = await whole(rounds, ask().with_session_id("s"), box)
    await whole(rounds, ask("thanks").with_session_id("s"), box)

    assert response.session_id == "s"
    roles = [message["role"] for message in rounds.asked[2].messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    assert len(box.sessions.export("s").messages) == 6


async def test_session_works_without_tools():
    """It needs nothing to execute; the last chunk names it."""
    box = Toolbox()
    found = await items(Rounds(Say("hi")), ask().with_session_id("s"), box)

    assert found[-1].session_id == "s"
    assert found[-1].choices[0].finish_reason == "stop"
    assert box.sessions.ids() == ["s"]


async def test_repeated_system_message_is_there_once():
    """A request may bring the session's own system message again."""
    box = Toolbox()
    rounds = Rounds(Say("a"), Say("b"))
    for text in ("one", "two"):
        asked = RequestBuilder().add_message("system", "Be short.").add_message("user", text)
        await whole(rounds, asked.with_session_id("s"), box)

    roles = [message["role"] for message in rounds.asked[1].messages]
    assert roles == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("how", ["failed", "left", "aborted"])
async def test_session_keeps_nothing_of_an_answer_that_did_not_end(how):
    """Failed, left early or aborted: the session is as it was, and free."""
    box = adding()
    failure = InferenceError("broken") if how == "failed" else None
    say = Say("abc", error=failure, finish_reason="canceled")
    async with await open_stream(Rounds(say), ask().with_session_id("s"), box) as stream:
        if how == "failed":
            with pytest.raises(InferenceError):
                await stream.collect()
        elif how == "left":
            await anext(stream)
        else:
            await stream.collect()

    assert box.sessions.ids() == []
    box.sessions.lease("s")


async def test_session_is_free_again_when_a_round_is_refused():
    """A request that is at fault does not lock its session."""

    async def refuse(asked):
        raise RequestError("no")

    box = adding()
    with pytest.raises(RequestError, match="no"):
        await open_stream(refuse, ask().with_session_id("s"), box)

    box.sessions.lease("s")


async def test_session_after_a_returned_call_goes_on_with_its_result():
    """The session holds the call; the caller's next request brings what it gave."""
    other = Tool(Function("other"))
    box = adding()
    rounds = Rounds(Say(calls=[("other", "{}"), ("sum", '{"a": 1, "b": 1}')]), Say("done"))
    asked = ask().set_tools([other]).with_session_id("s")

    response = await whole(rounds, asked, box)
    (call,) = response.choices[0].message.tool_calls
    follow = RequestBuilder().set_tools([other]).add_tool_message("7", call.id)
    await whole(rounds, follow.with_session_id("s"), box)

    roles = [message["role"] for message in rounds.asked[1].messages]
    assert roles == ["user", "assistant", "tool", "tool"]
    assert len(rounds.asked[1].messages[1]["tool_calls"]) == 2


async def test_loop_type_is_told_apart():
    """A request that may execute tools gets the stream that says so."""
    async with await open_stream(Rounds(Say("5")), ask(), adding()) as stream:
        assert isinstance(stream, ToolLoopStream)
        assert (await stream.collect()).agentic_tool_calls == ()
