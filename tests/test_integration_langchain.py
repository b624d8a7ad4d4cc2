"""`ChatMistralRs` and `MistralRsEmbeddings`, on real tiny models; see the suite's file as well."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("langchain_core")

from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.tools import tool
from pydantic import BaseModel, ValidationError

from mistralrs_sdk import (
    BlockingModel,
    DeadlineError,
    EmbeddingModelBuilder,
    Model,
    RequestError,
    UnsupportedError,
)
from mistralrs_sdk.integrations.langchain import ChatMistralRs, MistralRsEmbeddings
from mistralrs_sdk.integrations.langchain_messages import openai_messages
from tests.embedding_models import embedding_folder
from tests.framework_models import (
    CALLING,
    TEMPLATE,
    assert_blocking_idle,
    rounds_builder,
    talking_builder,
)
from tests.model_helpers import assert_idle

ENDLESS: dict[str, Any] = {"ignore_eos": True}


class Lamp(BaseModel, extra="forbid"):
    """A lamp."""

    on: bool
    colour: Literal["red", "green"]


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


@pytest.fixture(scope="module")
def blocking(tmp_path_factory) -> Iterator[BlockingModel]:
    builder = rounds_builder(tmp_path_factory.mktemp("model"))
    with BlockingModel.from_builder(builder) as model:
        yield model


@pytest.fixture
def chat(blocking) -> ChatMistralRs:
    return ChatMistralRs(model=blocking, temperature=0)


@pytest.fixture(scope="module")
def talker(tmp_path_factory) -> Iterator[BlockingModel]:
    with BlockingModel.from_builder(talking_builder(tmp_path_factory.mktemp("talker"))) as model:
        yield model


@pytest.fixture(scope="module")
def random(tmp_path_factory) -> Iterator[BlockingModel]:
    """A model that says anything without a thought before, and has a template for tools."""
    builder = talking_builder(tmp_path_factory.mktemp("random"))
    builder = builder.with_chat_template(TEMPLATE.replace("think", "other"))
    with BlockingModel.from_builder(builder) as model:
        yield model


@pytest.fixture
async def model(tmp_path) -> AsyncIterator[Model]:
    async with await rounds_builder(tmp_path).build() as model:
        yield model


class Heard(BaseCallbackHandler):
    """What callbacks are told."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.errors: list[BaseException] = []
        self.ended = 0

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.ended += 1

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.errors.append(error)


def summed(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return whole


def told(message: AIMessage) -> list[Any]:
    """What a message says, without what differs between two that say the same."""
    calls = [(call["name"], call["args"]) for call in message.tool_calls]
    usage = message.usage_metadata
    return [
        message.text,
        message.additional_kwargs,
        calls,
        message.invalid_tool_calls,
        message.response_metadata,
        (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]),
    ]


EXPECTED = ["Let me look.", {"reasoning_content": "where to?"}, [("weather", {"city": "Oslo"})], []]


def test_plain_code_gets_text_thoughts_calls_and_usage(chat):
    """Whole and streamed, the same."""
    asking = chat.bind_tools([weather])
    whole = asking.invoke("Oslo?")
    streamed = summed(list(asking.stream("Oslo?")))

    assert told(whole)[:4] == EXPECTED
    assert told(streamed) == told(whole)
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    assert whole.response_metadata["model_name"] == chat.model.get_default_model_id()
    assert whole.usage_metadata["output_tokens"] == len(CALLING) + 1
    assert [block["type"] for block in whole.content_blocks] == ["reasoning", "text", "tool_call"]


@pytest.mark.parametrize("kind", ["blocking", "model"])
async def test_coroutines_get_the_same(blocking, model, kind):
    """Of a `BlockingModel` in another loop than its own, and of a `Model` in its own."""
    given = {"blocking": blocking, "model": model}[kind]
    asking = ChatMistralRs(model=given, temperature=0).bind_tools([weather])
    whole = await asking.ainvoke("Oslo?")
    streamed = summed([chunk async for chunk in asking.astream("Oslo?")])
    several = await asking.abatch(["Oslo?"] * 3)

    assert told(whole)[:4] == EXPECTED
    assert told(streamed) == told(whole)
    assert [told(message)[:4] for message in several] == [EXPECTED] * 3


async def test_methods_that_wait_do_not_wait_for_their_own_loop(model, blocking):
    """A `Model` refuses them at once, anywhere; a `BlockingModel` answers in a running loop too."""
    chat = ChatMistralRs(model=model)
    with pytest.raises(RuntimeError, match="give a BlockingModel"):
        chat.invoke("Hi")
    with pytest.raises(RuntimeError, match="give a BlockingModel"):
        list(chat.stream("Hi"))
    with pytest.raises(RuntimeError, match="give a BlockingModel"):
        chat.get_num_tokens("Hi")
    with pytest.raises(RuntimeError, match="give a BlockingModel"):
        await asyncio.to_thread(MistralRsEmbeddings(model).embed_query, "Hi")

    assert ChatMistralRs(model=blocking, temperature=0).invoke("Oslo?").content


def test_a_tool_loop_comes_to_its_end(chat):
    """The model reads its call and the result, and answers."""
    asking = chat.bind_tools([weather])
    called = asking.invoke("Oslo?")
    result = weather.invoke(called.tool_calls[0])

    said = asking.invoke([HumanMessage("Oslo?"), called, result])
    assert said.content == "It rains there."
    assert said.usage_metadata["input_token_details"]["cache_read"] >= 0


@pytest.mark.parametrize("version", [None, "v1"])
def test_earlier_answers_are_in_the_prompt_as_they_were(blocking, version):
    """Thoughts, text, calls and results, each where the template reads it."""
    chat = ChatMistralRs(model=blocking, temperature=0, output_version=version)
    called = chat.bind_tools([weather]).invoke("Oslo?")
    history = [SystemMessage("Hurry."), HumanMessage("Oslo?"), called]
    history.append(ToolMessage("rain", tool_call_id=called.tool_calls[0]["id"]))

    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert blocking.render_chat(openai_messages(history))[0] == (
        f"[system]Hurry.[user]Oslo?[assistant]where to?Let me look.{call}[tool]rain<result>"
    )


def test_answers_from_elsewhere_are_read(blocking):
    """Content in blocks, with a picture refused by name."""
    blocks = AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Yes."}])
    (turn,) = openai_messages([blocks])
    assert (turn["content"], turn["reasoning_content"]) == ("Yes.", "hm")

    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
    with pytest.raises(RequestError, match="image_url"):
        ChatMistralRs(model=blocking).invoke([HumanMessage([picture])])


async def test_callbacks_hear_of_every_piece(chat, model):
    """In `stream`, and in `invoke` of a model that streams."""
    for streaming in (False, True):
        heard = Heard()
        chat = ChatMistralRs(model=chat.model, temperature=0, streaming=streaming)
        chat.invoke("Oslo?", config={"callbacks": [heard]})
        assert bool(heard.tokens) is streaming
        assert heard.ended == 1

    heard = Heard()
    chat = ChatMistralRs(model=model, temperature=0)
    pieces = [c.text async for c in chat.astream("Oslo?", config={"callbacks": [heard]})]
    assert heard.tokens == pieces

    failing = Heard()
    with pytest.raises(RequestError):
        await chat.ainvoke("Hi", temperature=-1, config={"callbacks": [failing]})
    assert [type(error) for error in failing.errors] == [RequestError]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Lamp, Lamp.model_json_schema()])
def test_answers_are_held_to_a_schema(random, method, schema):
    """Random weights, several seeds: an instance, or a dict of a schema given as one."""
    for seed in range(4):
        held = ChatMistralRs(model=random, seed=seed).with_structured_output(schema, method=method)
        found = held.invoke("Well?")
        assert isinstance(found, Lamp if schema is Lamp else dict)
        Lamp.model_validate(found)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_strict_allows_nothing_beside_the_schema(random, method):
    """Random weights invent no properties, where the schema itself lets them."""

    class Open(BaseModel):
        """Something."""

        on: bool

    chat = ChatMistralRs(model=random, seed=1)
    held = chat.with_structured_output(Open, method=method, strict=True, include_raw=True)
    raw = held.invoke("Well?")["raw"]
    found = raw.tool_calls[0]["args"] if raw.tool_calls else json.loads(raw.content)

    assert set(found) == {"on"}


def test_the_raw_answer_is_there_if_it_is_asked_for(random):
    """Beside what was parsed, or why it was not."""
    chat = ChatMistralRs(model=random)
    good = chat.with_structured_output(Lamp, include_raw=True).invoke("Well?")
    cut = chat.bind(max_tokens=3) | (lambda message: message)
    assert isinstance(good["parsed"], Lamp)
    assert good["parsing_error"] is None
    assert cut.invoke("Well?").response_metadata["finish_reason"] == "length"

    short = ChatMistralRs(model=random, max_tokens=3)
    bad = short.with_structured_output(Lamp, include_raw=True).invoke("Well?")
    assert bad["parsed"] is None
    assert bad["raw"].response_metadata["finish_reason"] == "length"
    assert bad["parsing_error"] is not None


def test_json_mode_gives_any_object(random):
    """Random weights: JSON of whatever shape, if there is room for it."""
    chat = ChatMistralRs(model=random, seed=3, model_kwargs={"logit_bias": closing(random)})
    found = chat.with_structured_output(None, method="json_mode").invoke("Well?")

    assert isinstance(found, dict)


def closing(model: BlockingModel) -> dict[int, float]:
    """A bias for what ends an object."""
    (brace,) = model.tokenize("}", add_special_tokens=False)
    return {brace: 100}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("any", "required"),
        (True, "required"),
        ("required", "required"),
        ("none", "none"),
        ("weather", {"type": "function", "function": {"name": "weather"}}),
        (None, None),
    ],
)
def test_tool_choices_are_what_they_are_called(chat, choice, expected):
    """LangChain's words as OpenAI's; with `strict` in the tools."""
    bound = chat.bind_tools([weather], tool_choice=choice, strict=True)

    assert bound.kwargs.get("tool_choice") == expected
    assert bound.kwargs["tools"][0]["function"]["strict"] is True


@pytest.mark.parametrize("choice", ["any", "Lamp"])
def test_a_call_that_must_be_made_is_made(random, choice):
    """By any model, of any tool or of the one that was named; its arguments fit."""
    for seed in range(4):
        chat = ChatMistralRs(model=random, seed=seed, max_tokens=200)
        message = chat.bind_tools([Lamp], tool_choice=choice).invoke("Well?")
        assert {call["name"] for call in message.tool_calls} == {"Lamp"}
        Lamp.model_validate(message.tool_calls[0]["args"])


def test_settings_are_passed_on(chat, monkeypatch):
    """Those of the model, then those of a call; unknown ones are refused."""
    given: dict[str, Any] = {
        "top_p": 0.9,
        "top_k": 3,
        "max_tokens": 5,
        "seed": 1,
        "stop": ["x"],
        "timeout": 9,
        "model_kwargs": {"min_p": 0.1},
    }
    asked: list[Any] = []

    def stream(request: Any, *, model_id: str | None) -> Iterator[Any]:
        asked.append((request, model_id))
        raise RequestError("seen")
        yield

    monkeypatch.setattr(chat.model, "stream_chat_request", stream)
    with pytest.raises(RequestError, match="seen"):
        ChatMistralRs(model=chat.model, **given).invoke("Hi", stop=["y"], top_k=4, model="m")
    (request, model_id) = asked[0]
    assert request.pop("messages") == [{"role": "user", "content": "Hi"}]
    assert request == {
        "top_p": 0.9,
        "top_k": 4,
        "max_tokens": 5,
        "seed": 1,
        "stop": ["y"],
        "deadline": 9,
        "min_p": 0.1,
    }
    assert model_id == "m"


def test_what_is_not_done_is_refused(chat):
    """A setting that no request has, several answers, one call at most, a schema beside tools."""
    with pytest.raises(ValidationError, match="max_retries"):
        ChatMistralRs(model=chat.model, max_retries=2)
    with pytest.raises(RequestError, match="'api_key'"):
        chat.invoke("Hi", api_key="x")
    with pytest.raises(RequestError, match=r"n \(2\) must be 1"):
        chat.invoke("Hi", n=2)
    with pytest.raises(UnsupportedError, match="parallel_tool_calls"):
        chat.bind_tools([weather], parallel_tool_calls=False).invoke("Hi")
    held = {"type": "json_object"}
    with pytest.raises(ValueError, match="contradicts tools"):
        chat.bind_tools([weather], response_format=held).invoke("Hi")
    with pytest.raises(ValueError, match="method"):
        chat.with_structured_output(Lamp, method="magic")
    with pytest.raises(ValueError, match="magic"):
        chat.with_structured_output(Lamp, magic=True)


def test_a_stop_string_ends_an_answer(chat):
    """And the finish reason says that it ended by itself."""
    said = chat.invoke("Oslo?", stop=[" look"])

    assert said.content == "Let me"
    assert said.response_metadata["finish_reason"] == "stop"


def test_time_that_is_up_is_an_error(talker):
    """`timeout` is the deadline of the request."""
    chat = ChatMistralRs(model=talker, timeout=0.2, model_kwargs=ENDLESS)
    with pytest.raises(DeadlineError):
        chat.invoke("Hi")
    assert_blocking_idle(talker)


def test_leaving_a_plain_stream_frees_the_request(talker):
    """Closed, or dropped."""
    chat = ChatMistralRs(model=talker, model_kwargs=ENDLESS)
    stream = chat.stream("Hi")
    next(stream)
    stream.close()
    assert_blocking_idle(talker)

    for _ in chat.stream("Hi"):
        break
    assert_blocking_idle(talker)


@pytest.mark.parametrize("kind", ["blocking", "model"])
@pytest.mark.parametrize("method", ["ainvoke", "astream"])
async def test_cancelling_frees_the_request(tmp_path, talker, kind, method):
    """Of either kind of model, whole or streamed."""
    own = await talking_builder(tmp_path).build() if kind == "model" else None
    chat = ChatMistralRs(model=own or talker, model_kwargs=ENDLESS)

    async def run() -> None:
        if method == "ainvoke":
            await chat.ainvoke("Hi")
        else:
            async for _ in chat.astream("Hi"):
                pass

    task = asyncio.create_task(run())
    while not (await own.stats() if own else await asyncio.to_thread(talker.stats)).running:
        await asyncio.sleep(0.002)
    task.cancel()
    await asyncio.wait([task])

    assert task.cancelled()
    if own is None:
        await asyncio.to_thread(assert_blocking_idle, talker)
    else:
        await assert_idle(own)
        await own.aclose()


def test_threads_share_a_model(chat):
    """`batch` sends its inputs from several."""
    said = chat.bind_tools([weather]).batch(["Oslo?"] * 4)

    assert [told(message)[:4] for message in said] == [EXPECTED] * 4


def test_answers_can_be_cached(blocking):
    """Under all that makes them what they are."""
    cache = InMemoryCache()
    first, again, other = (
        ChatMistralRs(model=blocking, temperature=0, seed=seed, cache=cache) for seed in (1, 1, 2)
    )
    answer = first.invoke("Oslo?")

    assert again.invoke("Oslo?").id == answer.id
    assert other.invoke("Oslo?").id != answer.id


def test_tokens_are_the_models_own(chat, blocking):
    """Of a text, and of messages as the prompt has them, for what trims histories."""
    assert chat.get_token_ids("Hello") == blocking.tokenize("Hello", add_special_tokens=False)
    history = [HumanMessage("long ago"), AIMessage("yes"), HumanMessage("now")]
    (kept,) = trim_messages(
        history, max_tokens=chat.get_num_tokens_from_messages(history[2:]), token_counter=chat
    )
    assert kept.content == "now"
    assert chat.get_num_tokens_from_messages(history, [weather]) > (
        chat.get_num_tokens_from_messages(history)
    )


def test_the_profile_says_what_the_model_is(chat):
    """Its context and tools; structured output goes by a tool, as it may stand beside others."""
    assert chat.profile["max_input_tokens"] == 1024
    assert chat.profile["tool_calling"]
    assert not chat.profile["structured_output"]
    assert "model=" not in repr(chat)


@pytest.fixture(scope="module")
def embedding_builder(tmp_path_factory) -> EmbeddingModelBuilder:
    folder = embedding_folder(
        tmp_path_factory.mktemp("embedder") / "model", prompts={"query": "Find: "}
    )
    return EmbeddingModelBuilder(folder).with_force_cpu().with_num_threads(1)


def test_vectors_are_the_models_own(embedding_builder):
    """Of documents in order, and of a query behind its instruction."""
    with BlockingModel.from_builder(embedding_builder) as model:
        embeddings = MistralRsEmbeddings(model, query_prompt="query")
        texts = ["a cat", "the market"]

        assert embeddings.embed_documents(texts) == model.generate_embeddings(texts)
        assert embeddings.embed_query("a cat") == model.generate_embedding("Find: a cat")
        assert embeddings.embed_documents([]) == []


async def test_vectors_are_awaited(embedding_builder):
    """The same from a `Model`, and from a `BlockingModel` on a thread."""
    async with await embedding_builder.build() as model:
        embeddings = MistralRsEmbeddings(model, query_prompt="query")
        documents = await embeddings.aembed_documents(["a cat"])
        query = await embeddings.aembed_query("a cat")
        assert await embeddings.aembed_documents([]) == []
        assert documents == await model.generate_embeddings(["a cat"])
        assert query == await model.generate_embedding("Find: a cat")
    with BlockingModel.from_builder(embedding_builder) as model:
        embeddings = MistralRsEmbeddings(model, query_prompt="query")
        assert await embeddings.aembed_documents(["a cat"]) == documents
        assert await embeddings.aembed_query("a cat") == query


async def test_a_model_that_does_not_embed_says_so(model):
    """Before anything is computed."""
    with pytest.raises(RequestError, match="does not embed"):
        await MistralRsEmbeddings(model).aembed_query("a cat")
