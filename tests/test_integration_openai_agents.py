"""`MistralRsModel` under OpenAI's Agents SDK and its own runner, on real tiny models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    AgentOutputSchema,
    CodeInterpreterTool,
    FunctionTool,
    ModelBehaviorError,
    ModelRetryAdviceRequest,
    ModelSettings,
    ModelTracing,
    RunConfig,
    Runner,
    UserError,
    function_tool,
    handoff,
    set_trace_processors,
    set_tracing_disabled,
    trace,
)
from agents.tracing import GenerationSpanData, TracingProcessor
from openai.types.shared import Reasoning
from pydantic import BaseModel

from mistralrs_sdk import (
    BlockingModel,
    EngineClosedError,
    Model,
    MultiModelBuilder,
    QueueFullError,
    RequestError,
)
from mistralrs_sdk.integrations.openai_agents import MistralRsModel, MistralRsProvider
from mistralrs_sdk.integrations.openai_agents_request import chat_request
from tests.framework_models import (
    ARGUMENTS,
    CALLING,
    TEMPLATE,
    rounds_builder,
    talking_builder,
)
from tests.model_helpers import assert_idle
from tests.scripted_rounds import Say
from tests.translated_apis import answering

GREEDY = ModelSettings(temperature=0)
ENDLESS = ModelSettings(temperature=0, extra_body={"ignore_eos": True})


class Lamp(BaseModel, extra="forbid"):
    on: bool
    colour: Literal["red", "green"]


@function_tool(strict_mode=False)
def weather(city: str) -> str:
    return f"rain in {city}"


class Processor(TracingProcessor):
    """Keeps what requests told; nothing leaves the process."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def on_span_end(self, span: Any) -> None:
        if isinstance(span.span_data, GenerationSpanData):
            self.spans.append(span)

    def on_span_start(self, span: Any) -> None: ...
    def on_trace_start(self, trace: Any) -> None: ...
    def on_trace_end(self, trace: Any) -> None: ...
    def shutdown(self) -> None: ...
    def force_flush(self) -> None: ...


@pytest.fixture(autouse=True)
def traced() -> Iterator[Processor]:
    """Traces go here and not to OpenAI; they are off unless a test switches them on."""
    processor = Processor()
    set_trace_processors([processor])
    set_tracing_disabled(True)
    yield processor
    set_tracing_disabled(True)


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


def request_for(settings: ModelSettings, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"instructions": None, "tools": [], "output": None, "handoffs": []}
    return chat_request("m", items="Hi", settings=settings, **{**given, **more})


async def ask(model: Model, **given: Any) -> Any:
    """One request, as the runner makes it."""
    asked: dict[str, Any] = {
        "system_instructions": None,
        "input": "Hi",
        "model_settings": GREEDY,
        "tools": [],
        "output_schema": None,
        "handoffs": [],
        "tracing": ModelTracing.DISABLED,
        "previous_response_id": None,
        "conversation_id": None,
        "prompt": None,
    }
    return await MistralRsModel(model).get_response(**{**asked, **given})


async def test_an_agent_calls_its_tool_and_answers(model):
    """Two requests: thoughts, text and call in the first, the answer to the result after it."""
    here = MistralRsModel(model)
    agent = Agent("A", instructions="Hurry.", model=here, tools=[weather], model_settings=GREEDY)
    result = await Runner.run(agent, "Oslo?")
    thought, text, call, returned, said = (item.raw_item for item in result.new_items)

    assert result.final_output == said.content[0].text == "It rains there."
    assert thought.summary[0].text == "where to?"
    assert text.content[0].text == "Let me look."
    assert (call.name, call.arguments) == ("weather", ARGUMENTS)
    assert (returned["call_id"], returned["output"]) == (call.call_id, "rain in Oslo")
    usage = result.context_wrapper.usage
    assert (usage.requests, usage.output_tokens) == (2, len(CALLING) + 1 + 4)
    assert usage.input_tokens_details.cached_tokens > 0


async def test_earlier_answers_are_in_the_prompt_as_they_were(model):
    """Thoughts, text, calls and results, each where the template reads it."""
    here = MistralRsModel(model)
    agent = Agent("A", instructions="Hurry.", model=here, tools=[weather], model_settings=GREEDY)
    items = (await Runner.run(agent, "Oslo?")).to_input_list()[:-1]

    name = model.get_default_model_id()
    asked = chat_request(name, "Hurry.", items, GREEDY, [], None, [])
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert model.render_chat(asked)[0] == (
        f"[system]Hurry.[user]Oslo?[assistant]where to?Let me look.{call}[tool]rain in Oslo<result>"
    )


async def test_a_streamed_run_holds_what_the_whole_one_does(model):
    """Its deltas are the texts, and its items and usage the same."""
    agent = Agent("A", model=MistralRsModel(model), tools=[weather], model_settings=GREEDY)
    whole = await Runner.run(agent, "Oslo?")
    streamed = Runner.run_streamed(agent, "Oslo?")
    raw = [e.data async for e in streamed.stream_events() if e.type == "raw_response_event"]

    def told(result: Any) -> list[Any]:
        items = [item.raw_item for item in result.new_items]
        dumped = [item if isinstance(item, dict) else item.model_dump() for item in items]
        for item in dumped:
            item.pop("call_id", None)
            item.pop("provider_data", None)
        return [dumped, result.context_wrapper.usage.output_tokens]

    assert told(streamed) == told(whole)
    texts = [event.delta for event in raw if event.type == "response.output_text.delta"]
    assert "".join(texts) == "Let me look.It rains there."
    assert "" not in texts
    thoughts = [e.delta for e in raw if e.type == "response.reasoning_summary_text.delta"]
    assert "".join(thoughts) == "where to?"


async def test_an_agent_hands_over_to_another(tmp_path):
    """The call of a handoff is one like any other."""
    calling = ["<tool_call>", '{"name": "transfer_to_b", "arguments": {}}', "</tool_call>"]
    async with await rounds_builder(tmp_path, calling).build() as model:
        here = MistralRsModel(model)
        other = Agent("B", model=here, model_settings=GREEDY)
        to_other = handoff(other)
        to_other.strict_json_schema = False
        first = Agent("A", model=here, handoffs=[to_other], model_settings=GREEDY)
        result = await Runner.run(first, "Oslo?")

    assert result.last_agent is other
    assert result.final_output == "It rains there."


async def test_output_is_held_to_its_type(random):
    """Random weights, several seeds: an instance each time."""
    agent = Agent("A", model=MistralRsModel(random), output_type=Lamp)
    configs = [
        RunConfig(model_settings=ModelSettings(extra_args={"seed": seed})) for seed in range(6)
    ]
    results = await asyncio.gather(
        *(Runner.run(agent, "Well?", run_config=config) for config in configs)
    )

    assert all(isinstance(result.final_output, Lamp) for result in results)


async def test_output_beside_tools_is_a_call_or_the_output(random):
    """Random weights: what is no call of the tool is JSON of the output's schema."""
    schema = AgentOutputSchema(Lamp)

    @function_tool
    def look(at: Literal["left", "right"]) -> str:
        return "dark"

    def settings(seed: int) -> ModelSettings:
        return ModelSettings(max_tokens=250, extra_args={"seed": seed, "temperature": 3})

    responses = await asyncio.gather(
        *(
            ask(random, model_settings=settings(seed), tools=[look], output_schema=schema)
            for seed in range(32)
        )
    )
    items = [item for response in responses for item in response.output]
    for item in items:
        if item.type == "message":
            schema.validate_json(item.content[0].text)
        else:
            assert json.loads(item.arguments)["at"] in ("left", "right")
    kinds = {item.type for item in items}
    assert kinds == {"message", "function_call"}


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([("final_output", '{"on": true, "colour": "red"}')], ["message"]),
        ([("weather", ARGUMENTS), ("final_output", "{}")], ["function_call"]),
        ([("weather", ARGUMENTS), ("weather", "{}")], ["function_call"] * 2),
    ],
)
async def test_the_output_waits_for_the_results_of_tools(model, monkeypatch, calls, expected):
    """Beside other calls it is a guess; alone it is the answer."""
    answering(model, Say(calls=calls), monkeypatch)
    response = await ask(model, tools=[weather], output_schema=AgentOutputSchema(Lamp))

    assert [item.type for item in response.output] == expected


def test_what_an_agent_with_tools_and_output_asks_for():
    """One of all must be called; a choice of the user's counts more."""
    schema = AgentOutputSchema(Lamp)
    asked = request_for(GREEDY, tools=[weather], output=schema)
    names = [tool["function"]["name"] for tool in asked["tools"]]
    assert (names, asked["tool_choice"]) == (["weather", "final_output"], "required")
    assert "response_format" not in asked

    none = request_for(ModelSettings(tool_choice="none"), tools=[weather], output=schema)
    assert none["response_format"]["json_schema"]["schema"] == schema.json_schema()
    one = request_for(ModelSettings(tool_choice="weather"), tools=[weather], output=schema)
    assert one["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert [tool["function"]["name"] for tool in one["tools"]] == ["weather"]

    async def call(*_: Any) -> str:
        return ""

    taken = FunctionTool("final_output", "", {"type": "object", "properties": {}}, call)
    with pytest.raises(UserError, match="may not be called 'final_output'"):
        request_for(GREEDY, tools=[taken], output=schema)


def test_settings_are_passed_on():
    """Under the names that a request has for them; the runner's own stay there."""
    settings = ModelSettings(
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        max_tokens=5,
        top_logprobs=2,
        metadata={"a": "b"},
        truncation="auto",
        reasoning=Reasoning(effort="low", summary="auto"),
        include_usage=True,
        timeout=9,
        parallel_tool_calls=True,
        extra_body={"seed": 1},
        extra_args={"stop": ["x"]},
    )
    asked = request_for(settings)

    assert asked.pop("messages") == [{"role": "user", "content": "Hi"}]
    assert asked == {
        "temperature": 0.5,
        "top_p": 0.9,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "max_tokens": 5,
        "top_logprobs": 2,
        "logprobs": True,
        "metadata": {"a": "b"},
        "truncate_sequence": True,
        "reasoning_effort": "low",
        "seed": 1,
        "stop": ["x"],
    }
    with_tools = request_for(ModelSettings(parallel_tool_calls=True), tools=[weather])
    assert with_tools["parallel_tool_calls"] is True


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (ModelSettings(extra_headers={"a": "b"}), "extra_headers"),
        (ModelSettings(extra_query={"a": "b"}), "extra_query"),
        (ModelSettings(response_include=["file_search_call.results"]), "file_search_call.results"),
        (ModelSettings(reasoning=Reasoning(mode="pro")), "reasoning.mode"),
        (ModelSettings(preserve_raw_usage=True), "preserve_raw_usage"),
        (ModelSettings(extra_body="a"), "extra_body"),
    ],
)
def test_settings_that_are_not_done_are_refused(settings, words):
    """By name, as the others would not know."""
    with pytest.raises(UserError, match=words):
        request_for(settings)


async def test_what_lives_on_openais_servers_is_refused(model):
    """Conversations, prompts and hosted tools."""
    for kept in ("previous_response_id", "conversation_id", "prompt"):
        with pytest.raises(UserError, match=kept):
            await ask(model, **{kept: "x"})
    hosted = CodeInterpreterTool({"type": "code_interpreter", "container": {"type": "auto"}})
    with pytest.raises(UserError, match="Hosted tools"):
        await ask(model, tools=[hosted])


async def test_log_probabilities_are_with_the_text(model):
    """As many as it has tokens, if they are asked for."""
    settings = ModelSettings(temperature=0, top_logprobs=2, extra_body={"enable_thinking": False})
    response = await ask(model, model_settings=settings)
    (message,) = [item for item in response.output if item.type == "message"]

    assert [len(entry.top_logprobs) for entry in message.content[0].logprobs][:1] == [2]


@pytest.mark.parametrize("how", ["task", "cancel", "leave"])
async def test_a_run_that_is_left_frees_its_request(talker, how):
    """Cancelled from outside or by the result's own method, or a stream that is left."""
    here = MistralRsModel(talker)
    agent = Agent("A", model=here, model_settings=ENDLESS)
    if how == "leave":
        args = (None, "Hi", ENDLESS, [], None, [], ModelTracing.DISABLED)
        events = here.stream_response(*args)
        await anext(events)
        await events.aclose()
    elif how == "cancel":
        result = Runner.run_streamed(agent, "Hi")
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                result.cancel()
    else:
        task = asyncio.create_task(Runner.run(agent, "Hi"))
        while not (await talker.stats()).running:
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    await assert_idle(talker)


async def test_errors_come_through_as_they_are(model):
    """A bad request is ours to explain, and leaves nothing behind."""
    agent = Agent("A", model=MistralRsModel(model), model_settings=ModelSettings(temperature=-1))
    with pytest.raises(RequestError, match="temperature"):
        await Runner.run(agent, "Hi")
    with pytest.raises(RequestError, match="temperature"):
        async for _ in Runner.run_streamed(agent, "Hi").stream_events():
            pass
    await assert_idle(model)


async def test_no_word_before_the_most_tokens_is_an_error(model):
    """Thoughts alone are no answer, and neither is a piece of a call that must come."""
    settings = ModelSettings(temperature=0, max_tokens=2)
    with pytest.raises(ModelBehaviorError, match="raise max_tokens"):
        await ask(model, model_settings=settings)
    settings = ModelSettings(temperature=0, max_tokens=20, tool_choice="required")
    with pytest.raises(ModelBehaviorError, match="raise max_tokens"):
        await ask(model, model_settings=settings, tools=[weather])


def test_only_a_full_queue_is_worth_another_try(tmp_path):
    """Everything else fails again, or had begun."""
    with BlockingModel.from_builder(rounds_builder(tmp_path)) as model:
        here = MistralRsModel(model)
    full = ModelRetryAdviceRequest(error=QueueFullError("full"), attempt=1, stream=False)
    closed = ModelRetryAdviceRequest(error=EngineClosedError("closed"), attempt=1, stream=False)

    assert here.get_retry_advice(full).suggested
    assert here.get_retry_advice(full).retry_after == 1
    assert here.get_retry_advice(closed) is None


async def test_a_trace_tells_of_requests_and_failures(model, traced):
    """Messages, output and usage; of a failure its name and words. Without data, none of these."""
    set_tracing_disabled(False)
    here = MistralRsModel(model)
    agent = Agent("A", model=here, tools=[weather], model_settings=GREEDY)
    bad = Agent("B", model=here, model_settings=ModelSettings(temperature=-1))
    with trace("test"):
        await Runner.run(agent, "Oslo?")
        with pytest.raises(RequestError):
            await Runner.run(bad, "Hi")
        secret = RunConfig(trace_include_sensitive_data=False)
        await Runner.run(agent, "Oslo?", run_config=secret)

    first, second, failed, *hidden = traced.spans
    assert first.span_data.input[-1] == {"role": "user", "content": "Oslo?"}
    assert first.span_data.output[-1]["arguments"] == ARGUMENTS
    assert second.span_data.usage["output_tokens"] == 4
    assert failed.error["message"] == "RequestError"
    assert "temperature" in failed.error["data"]["error"]
    assert [(s.span_data.input, s.span_data.output) for s in hidden] == [(None, None)] * 2
    assert hidden[1].span_data.usage["output_tokens"] == 4


async def test_a_provider_finds_models_by_name(tmp_path):
    """By the ids of a handle that holds several, for agents that only name theirs."""
    both = (
        MultiModelBuilder()
        .add_model_with_alias("calls", rounds_builder(tmp_path / "a"))
        .add_model_with_alias("says", rounds_builder(tmp_path / "b", ["Hello", "!"]))
    )
    async with await both.build() as model:
        config = RunConfig(model_provider=MistralRsProvider(model), model_settings=GREEDY)
        said = await Runner.run(Agent("A", model="says"), "Hi", run_config=config)
        with pytest.raises(RequestError, match="'else' is not known"):
            await Runner.run(Agent("A", model="else"), "Hi", run_config=config)

    assert said.final_output == "Hello!"


def test_plain_code_runs_an_agent_on_a_blocking_model(tmp_path):
    """`run_sync`, in another loop than the model's."""
    with BlockingModel.from_builder(rounds_builder(tmp_path)) as model, asyncio.Runner() as runner:
        asyncio.set_event_loop(runner.get_loop())
        agent = Agent("A", model=MistralRsModel(model), tools=[weather], model_settings=GREEDY)
        result = Runner.run_sync(agent, "Oslo?")
        asyncio.set_event_loop(None)

    assert result.final_output == "It rains there."
