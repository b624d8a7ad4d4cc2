"""`MistralRsModel` under Pydantic AI's own agents, on real tiny models."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("pydantic_ai")

from pydantic import BaseModel, Field
from pydantic_ai import Agent, BinaryContent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai import exceptions as pai
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.messages import (
    FinalResultEvent,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters, override_allow_model_requests
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.settings import ModelSettings, ToolOrOutput
from pydantic_ai.tools import ToolDefinition

from mistralrs_sdk import BlockingModel, Model, QueueFullError, RequestError
from mistralrs_sdk.integrations.pydantic_ai import MistralRsModel
from mistralrs_sdk.integrations.pydantic_ai_request import chat_request
from tests.framework_models import (
    ARGUMENTS,
    CALLING,
    TEMPLATE,
    Listed,
    rounds_builder,
    talking_builder,
)
from tests.model_helpers import assert_idle, endless
from tests.test_withdrawn_calls import chunks_of

GREEDY = ModelSettings(temperature=0)
ENDLESS = ModelSettings(temperature=0, extra_body={"ignore_eos": True})


class Lamp(BaseModel, extra="forbid"):
    on: bool
    colour: Literal["red", "green"]


class Story(BaseModel):
    text: str = Field(min_length=200)


@pytest.fixture
async def model(tmp_path) -> AsyncIterator[Model]:
    async with await rounds_builder(tmp_path).build() as model:
        yield model


@pytest.fixture
async def talker(tmp_path) -> AsyncIterator[Model]:
    async with await talking_builder(tmp_path).build() as model:
        yield model


@pytest.fixture
async def random(tmp_path) -> AsyncIterator[Model]:
    """A model that says anything without a thought before, and has a template for tools."""
    template = TEMPLATE.replace("think", "other")
    async with await talking_builder(tmp_path).with_chat_template(template).build() as model:
        yield model


def weather(city: str) -> str:
    return f"rain in {city}"


def asking(text: str) -> list[ModelMessage]:
    return [ModelRequest(parts=[UserPromptPart(text)])]


def tool(name: str) -> ToolDefinition:
    return ToolDefinition(name=name)


def request_for(params: ModelRequestParameters, **settings: Any) -> dict[str, Any]:
    return chat_request(asking("Hi"), ModelSettings(**settings), params)


def asked_of(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the model is asked from now on."""
    asked: list[Any] = []
    send = model.stream_chat_request

    async def stream(request: Any, *, model_id: str | None = None) -> Any:
        asked.append(request)
        return await send(request, model_id=model_id)

    monkeypatch.setattr(model, "stream_chat_request", stream)
    return asked


async def test_an_agent_calls_its_tool_and_answers(model):
    """Two requests: thoughts, text and call in the first, the answer to the result after it."""
    agent = Agent(MistralRsModel(model, settings=GREEDY), tools=[weather], instructions="Hurry.")
    result = await agent.run("Oslo?")
    asked, called, returned, said = result.all_messages()

    assert result.output == "It rains there."
    assert [type(part) for part in called.parts] == [ThinkingPart, TextPart, ToolCallPart]
    thought, text, call = called.parts
    assert (thought.content, text.content) == ("where to?", "Let me look.")
    assert (call.tool_name, call.args) == ("weather", ARGUMENTS)
    assert (called.finish_reason, said.finish_reason) == ("tool_call", "stop")
    assert returned.parts[0].content == "rain in Oslo"
    assert result.usage.input_tokens == called.usage.input_tokens + said.usage.input_tokens
    assert said.usage.output_tokens == 4
    assert said.usage.cache_read_tokens > 0
    assert asked.instructions == "Hurry."


async def test_earlier_answers_are_in_the_prompt_as_they_were(model):
    """Thoughts, text, calls and results, each where the template reads it."""
    agent = Agent(MistralRsModel(model, settings=GREEDY), tools=[weather], instructions="Hurry.")
    history = (await agent.run("Oslo?")).all_messages()

    asked = chat_request(history[:3], None, ModelRequestParameters())
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert model.render_chat(asked)[0] == (
        f"[system]Hurry.[user]Oslo?[assistant]where to?Let me look.{call}[tool]rain in Oslo<result>"
    )


async def test_a_stream_holds_what_the_whole_answer_does(model):
    """Its events make the same parts, usage and end."""
    here = MistralRsModel(model, settings=GREEDY)
    params = ModelRequestParameters(function_tools=[tool("weather")])
    whole = await model_request(here, asking("Oslo?"), model_request_parameters=params)
    async with model_request_stream(
        here, asking("Oslo?"), model_request_parameters=params
    ) as stream:
        events = [event async for event in stream]
        streamed = stream.get()

    def told(response: ModelResponse) -> list[Any]:
        parts = [dataclasses.asdict(part) for part in response.parts]
        for part in parts:
            part.pop("tool_call_id", None)
        usage = response.usage
        return [parts, response.finish_reason, usage.input_tokens, usage.output_tokens]

    assert told(streamed) == told(whole)
    assert streamed.state == "complete"
    assert len(events) > len(streamed.parts)


async def test_a_streamed_run_goes_through_all_its_rounds(model):
    """Events of both answers, and the same output."""
    texts: list[str] = []

    async def handle(_: Any, events: Any) -> None:
        async for event in events:
            part = getattr(event, "part", None) or getattr(event, "delta", None)
            if event.event_kind in ("part_start", "part_delta"):
                texts.append(getattr(part, "content", None) or getattr(part, "content_delta", ""))

    agent = Agent(MistralRsModel(model, settings=GREEDY), tools=[weather])
    result = await agent.run("Oslo?", event_stream_handler=handle)

    assert result.output == "It rains there."
    assert "".join(texts) == "where to?Let me look.It rains there."


@pytest.mark.parametrize("output", [Lamp, NativeOutput(Lamp), ToolOutput(Lamp)])
async def test_output_is_held_to_its_type(random, output):
    """Random weights, several seeds: an instance at the first try, however it is asked for."""
    agent = Agent(MistralRsModel(random), output_type=output, retries=0)
    results = await asyncio.gather(
        *(agent.run("Well?", model_settings=ModelSettings(seed=seed)) for seed in range(6))
    )

    assert all(isinstance(result.output, Lamp) for result in results)
    assert all(result.usage.requests == 1 for result in results)


async def test_output_beside_tools_is_a_tool_of_its_own(random):
    """Of an answer that could call them, a call is required, and the output is one."""
    agent = Agent(MistralRsModel(random), output_type=Lamp, tools=[weather], retries=0)
    settings = ModelSettings(tool_choice=["final_result"])
    result = await agent.run("Well?", model_settings=settings)
    (_, called, *_) = result.all_messages()

    assert isinstance(result.output, Lamp)
    assert [type(part) for part in called.parts] == [ToolCallPart]
    params = ModelRequestParameters(
        function_tools=[tool("now")],
        output_tools=[tool("out")],
        output_mode="tool",
        allow_text_output=False,
    )
    called = await model_request(
        MistralRsModel(random, settings=ModelSettings(max_tokens=40)),
        asking("Well?"),
        model_request_parameters=params,
    )
    assert {type(part) for part in called.parts} == {ToolCallPart}


@pytest.mark.parametrize(
    ("must", "pieces"), [(True, ['{"ci', 'ty": "Oslo"}']), (False, [ARGUMENTS])]
)
async def test_calls_stream_where_they_cannot_turn_out_to_be_none(model, monkeypatch, must, pieces):
    """Those that must be made while they are written, the others when they are whole."""

    async def stream(*_: Any, **__: Any) -> Listed:
        return Listed(chunks_of(*CALLING[6:]))

    monkeypatch.setattr(model, "stream_chat_request", stream)
    params = ModelRequestParameters(
        output_tools=[tool("weather")], output_mode="tool", allow_text_output=not must
    )
    async with model_request_stream(
        MistralRsModel(model), asking("Oslo?"), model_request_parameters=params
    ) as response:
        events = [event async for event in response]

    begun = [event.part.args for event in events if isinstance(event, PartStartEvent)]
    grown = [event.delta.args_delta for event in events if isinstance(event, PartDeltaEvent)]
    assert begun + grown == pieces
    assert response.get().parts[-1].args == ARGUMENTS


def test_prompted_output_is_json():
    """Of any shape, as the schema is in the instructions; beside tools it is only asked for."""
    agent = Agent(TestModel(), output_type=PromptedOutput(Lamp))
    assert agent.output_type is not None
    params = ModelRequestParameters(output_mode="prompted")

    assert request_for(params)["response_format"] == {"type": "json_object"}
    with_tools = dataclasses.replace(params, function_tools=[tool("now")])
    assert "response_format" not in request_for(with_tools)


async def test_the_schema_of_native_output_is_in_the_instructions(random, monkeypatch):
    """The grammar holds the answer, and tells the model nothing."""
    asked = asked_of(random, monkeypatch)
    await Agent(MistralRsModel(random, settings=GREEDY), output_type=Lamp).run("Well?")

    (request,) = asked
    assert request["response_format"]["json_schema"]["schema"]["required"] == ["on", "colour"]
    assert request["messages"][0]["role"] == "system"
    assert '"colour"' in request["messages"][0]["content"]


async def test_native_output_beside_tools_is_refused(random):
    """An answer held to a schema could never call them."""
    agent = Agent(MistralRsModel(random), output_type=NativeOutput(Lamp), tools=[weather])

    with pytest.raises(pai.UserError, match="cannot call tools: use ToolOutput"):
        await agent.run("Well?")


NOW, OUT = tool("now"), tool("out")
AUTO = ModelRequestParameters(function_tools=[NOW, tool("later")])
HELD = ModelRequestParameters(function_tools=[NOW], output_tools=[OUT], allow_text_output=False)
ALONE = dataclasses.replace(HELD, function_tools=[])
THREE = dataclasses.replace(HELD, function_tools=[NOW, tool("later")])


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def only(mode: str, *names: str) -> dict[str, Any]:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("params", "choice", "expected"),
    [
        (AUTO, None, "auto"),
        (AUTO, "none", "none"),
        (AUTO, "required", "required"),
        (AUTO, ["now"], named("now")),
        (AUTO, ToolOrOutput(function_tools=["now"]), only("auto", "now")),
        (HELD, None, "required"),
        (HELD, "none", named("out")),
        (HELD, "required", named("now")),
        (HELD, ToolOrOutput(function_tools=["now"]), "required"),
        (ALONE, None, named("out")),
        (THREE, ["now", "out"], only("required", "now", "out")),
        (ModelRequestParameters(), None, None),
    ],
)
def test_tool_choices_are_what_they_are_called(params, choice, expected):
    """Each as the OpenAI-shaped choice with the same meaning."""
    assert request_for(params, tool_choice=choice).get("tool_choice") == expected


def test_settings_are_passed_on():
    """Under the names that a request has for them; `extra_body` holds all others."""
    asked = request_for(
        ModelRequestParameters(thinking="max"),
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"1": 2},
        stop_sequences=["x"],
        timeout=9,
        request_timeout=8,
        cache=True,
        extra_body={"min_p": 0.1},
    )

    assert asked.pop("messages") == [{"role": "user", "content": "Hi"}]
    assert asked == {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {"1": 2},
        "stop": ["x"],
        "deadline": 9,
        "reasoning_effort": "xhigh",
        "min_p": 0.1,
    }


async def test_thinking_can_be_switched_off(model, monkeypatch):
    """The template hears of it."""
    asked = asked_of(model, monkeypatch)
    agent = Agent(MistralRsModel(model, settings=ModelSettings(temperature=0, thinking=False)))
    await agent.run("Oslo?")

    assert "</think>" in model.render_chat(asked[0])[0]


def test_a_setting_without_effect_is_said_once(caplog):
    """Others' settings are no error, so that one set serves several models."""
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            request_for(ModelRequestParameters(), openai_user="me")

    assert [record.message for record in caplog.records] == [
        "the setting 'openai_user' has no effect on mistralrs_sdk's models"
    ]


async def test_a_setting_that_is_not_done_is_warned_of_or_refused(model):
    """What nothing here can keep is Pydantic AI's warning, what would be broken an error."""
    agent = Agent(MistralRsModel(model, settings=GREEDY), tools=[weather])

    with pytest.warns(pai.UnsupportedSettingWarning, match="max_retries"):
        await agent.run("Oslo?", model_settings=ModelSettings(max_retries=1))
    with pytest.raises(pai.ModelHTTPError, match="parallel_tool_calls") as failed:
        await agent.run("Oslo?", model_settings=ModelSettings(parallel_tool_calls=False))
    assert failed.value.status_code == 400


@pytest.mark.parametrize("how", ["task", "leave", "cancel"])
async def test_a_run_that_is_left_frees_its_request(talker, how):
    """Cancelled from outside, or left after a piece: no block is held a moment later."""
    agent = Agent(MistralRsModel(talker, settings=ENDLESS))
    begun = asyncio.Event()

    async def run() -> None:
        async with agent.run_stream("Hi") as result:
            async for _ in result.stream_text(debounce_by=None):
                begun.set()
                if how == "leave":
                    return
                if how == "cancel":
                    await result.cancel()

    task = asyncio.create_task(run())
    await begun.wait()
    if how == "task":
        task.cancel()
    await asyncio.wait([task])

    assert task.cancelled() is (how == "task")
    await assert_idle(talker)


async def test_a_whole_answer_can_be_cancelled(talker):
    """`run` frees its request as well."""
    agent = Agent(MistralRsModel(talker, settings=ENDLESS))
    task = asyncio.create_task(agent.run("Hi"))
    while not (await talker.stats()).running:
        await asyncio.sleep(0.002)
    task.cancel()
    await asyncio.wait([task])

    assert task.cancelled()
    await assert_idle(talker)


async def test_a_bad_request_is_a_rejected_one(model):
    """With our error as the cause, and nothing left behind."""
    agent = Agent(MistralRsModel(model))

    with pytest.raises(pai.ModelRequestRejectedError, match="temperature") as failed:
        await agent.run("Hi", model_settings=ModelSettings(temperature=-1))

    assert isinstance(failed.value, pai.ModelHTTPError)
    assert isinstance(failed.value.__cause__, RequestError)
    await assert_idle(model)


async def test_a_full_queue_lets_another_model_answer(tmp_path):
    """It is a rate limit to a `FallbackModel`, and to who wants to wait."""
    builder = talking_builder(tmp_path).with_max_num_seqs(1).with_max_queue(0)
    async with (
        await builder.build() as model,
        await model.stream_chat_request(endless()) as running,
    ):
        await anext(running)
        with pytest.raises(pai.ModelRateLimitError) as failed:
            await Agent(MistralRsModel(model)).run("Hi")
        fallback = FallbackModel(MistralRsModel(model), TestModel(custom_output_text="me"))
        result = await Agent(fallback).run("Hi")

    assert isinstance(failed.value.__cause__, QueueFullError)
    assert (failed.value.status_code, failed.value.retry_after) == (429, 1)
    assert result.output == "me"


async def test_a_closed_model_is_unavailable(tmp_path):
    """503, as our server would say."""
    model = await rounds_builder(tmp_path).build()
    agent = Agent(MistralRsModel(model, model_id=model.get_default_model_id()))
    await model.aclose()

    with pytest.raises(pai.ModelUnavailableError):
        await agent.run("Hi")


async def test_a_failure_in_mid_stream_says_so(talker):
    """The pieces came, then the error, with the status it would have had."""
    settings = ModelSettings(timeout=0.2, extra_body={"ignore_eos": True})
    with pytest.raises(pai.ModelServerError) as failed:
        await model_request(MistralRsModel(talker), asking("Hi"), model_settings=settings)

    assert (failed.value.status_code, failed.value.in_stream) == (504, True)
    await assert_idle(talker)


async def test_a_call_cut_short_is_an_incomplete_call(random):
    """Where a call must come, the most tokens end it as Pydantic AI expects."""
    settings = ModelSettings(max_tokens=80, tool_choice=["final_result"])
    agent = Agent(MistralRsModel(random), output_type=Story, tools=[weather], retries=0)

    with pytest.raises(pai.IncompleteToolCall):
        await agent.run("Well?", model_settings=settings)


async def test_a_final_result_is_told_when_it_begins(random):
    """Before its arguments are there."""
    kinds: list[type] = []

    async def handle(_: Any, events: Any) -> None:
        kinds.extend([type(event) async for event in events])

    agent = Agent(MistralRsModel(random, settings=GREEDY), output_type=ToolOutput(Lamp))
    await agent.run("Well?", event_stream_handler=handle)

    assert FinalResultEvent in kinds[:3]


@pytest.fixture
def loop() -> Iterator[None]:
    """One that Pydantic AI finds, and would otherwise make and leave open."""
    with asyncio.Runner() as runner:
        asyncio.set_event_loop(runner.get_loop())
        yield
        asyncio.set_event_loop(None)


def test_plain_code_runs_an_agent_on_a_blocking_model(tmp_path, loop):
    """`run_sync`, twice, in another loop than the model's."""
    with BlockingModel.from_builder(rounds_builder(tmp_path)) as model:
        agent = Agent(MistralRsModel(model, settings=GREEDY), tools=[weather])
        outputs = [agent.run_sync("Oslo?").output for _ in range(2)]

    assert outputs == ["It rains there."] * 2


async def test_tokens_are_counted_as_they_will_be(model):
    """The count is of the prompt that the request has."""
    here = MistralRsModel(model, settings=GREEDY)
    params = ModelRequestParameters(function_tools=[tool("weather")])

    counted = await here.count_tokens(asking("Oslo?"), None, params)
    response = await model_request(here, asking("Oslo?"), model_request_parameters=params)

    assert counted.input_tokens == response.usage.input_tokens


async def test_what_is_no_text_is_refused(model):
    """By name, before anything runs."""
    picture = BinaryContent(b"x", media_type="image/png")
    with pytest.raises(pai.UserError, match="BinaryContent in a prompt is not supported"):
        await Agent(MistralRsModel(model)).run(["Look:", picture])
    history = [ModelRequest(parts=[UserPromptPart("Hi"), SystemPromptPart("Be brief.")])]
    with pytest.raises(pai.UserError, match="prepare_messages"):
        await model_request(MistralRsModel(model), history)
    returned = ToolReturnPart("draw", picture, tool_call_id="1")
    with pytest.raises(pai.UserError, match="'draw' returned a file"):
        await model_request(MistralRsModel(model), [ModelRequest(parts=[returned])])


async def test_the_switch_against_requests_is_heard(model):
    """As tests of applications set it."""
    with override_allow_model_requests(False), pytest.raises(RuntimeError, match="not allowed"):
        await Agent(MistralRsModel(model)).run("Hi")


async def test_the_profile_says_what_the_model_is(model):
    """Its context, and no files; what the user says of it counts more."""
    here = MistralRsModel(model)
    assert here.context_window == model.max_sequence_length() == 1024
    assert not here.profile["supports_image_input"]
    assert here.model_id == f"mistralrs:{model.get_default_model_id()}"

    own = MistralRsModel(model, profile={"supports_thinking": False})
    assert not own.profile["supports_thinking"]
    assert own.profile["supports_json_schema_output"]
