"""Completions, embeddings and tokens over HTTP, as the official openai client sees them."""

from __future__ import annotations

import contextlib
from array import array
from base64 import b64decode
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest

from mistralrs_sdk import Model, SamplingParams
from tests.embedding_models import embedder, embedding_folder
from tests.model_helpers import greedy, prompt, tiny_builder
from tests.translated_apis import serving

WRONG_COMPLETIONS = (
    {"prompt": ""},
    {"prompt": []},
    {"prompt": ["", "hello"]},
    {"prompt": [1, "a"]},
    {"prompt": {"a": 1}},
    {"prompt": [600]},
    {"prompt": "hello", "suffix": "x"},
    {"prompt": "hello", "max_tokens": -1},
    {"prompt": "hello", "max_tokens": "10"},
    {"prompt": "hello", "logprobs": 100_000},
    {"prompt": "hello", "stop": 3},
    {"prompt": "hello", "logit_bias": {"AI": 1}},
    {"prompt": "hello", "echo": "yes"},
    {"prompt": "hello", "best_of": 2, "stream": True},
    {"prompt": "hello", "best_of": 1, "n": 2},
    {"prompt": "hello", "grammar": {"type": ["regex"], "value": "a"}},
    {"prompt": "hello", "dry_base": 2},
    {"prompt": "hello", "messages": []},
    {"prompt": "hello", "model": 3},
)

WRONG_TOKENS = (
    ("/tokenize", {}),
    ("/tokenize", {"prompt": 3}),
    ("/tokenize", {"prompt": "a", "tools": []}),
    ("/tokenize", {"messages": "a"}),
    ("/tokenize", {"messages": [3]}),
    ("/detokenize", {}),
    ("/detokenize", {"tokens": ["a"]}),
    ("/detokenize", {"tokens": [-1]}),
    ("/detokenize", {"tokens": [10**30]}),
    ("/v1/embeddings", {"input": "hello"}),
)

WRONG_EMBEDDINGS = (
    {},
    {"input": []},
    {"input": [3, "a"]},
    {"input": [True]},
    {"input": "a", "dimensions": 3},
    {"input": "a", "encoding_format": "hex"},
    {"input": "a", "encoding_format": ["float"]},
    {"input": "a", "nonsense": 1},
    {"input": "a", "prompt_name": "none"},
)


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with await tiny_builder().build() as built:
        yield built


@contextlib.asynccontextmanager
async def client(model: Model) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of a server in front of the model."""
    async with (
        serving(model) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as found,
    ):
        yield found


@contextlib.asynccontextmanager
async def browser(model: Model) -> AsyncIterator[httpx2.AsyncClient]:
    """A plain client of a server in front of the model."""
    async with serving(model) as url, httpx2.AsyncClient(base_url=url) as found:
        yield found


async def test_ids_are_continued_as_in_process(model):
    """A prompt of token ids gives the SDK's greedy text."""
    ids = prompt(12)
    expected = await model.send_completion_request(ids, greedy(8))

    async with client(model) as openai_client:
        answer = await openai_client.completions.create(
            model="default",
            prompt=ids,
            temperature=0,
            max_tokens=8,
            extra_body={"ignore_eos": True},
        )

    assert answer.choices[0].text == expected.choices[0].text
    assert answer.usage.completion_tokens == 8


async def test_echo_and_logprobs_begin_with_the_prompt(model):
    """Parallel lists, the prompt's tokens first; the very first has no probability."""
    async with client(model) as openai_client:
        answer = await openai_client.completions.create(
            model="default", prompt="hello", echo=True, logprobs=2, max_tokens=3
        )

    choice = answer.choices[0]
    prompt_length = len(await model.tokenize("hello"))
    assert choice.text.startswith("hello")
    assert "".join(choice.logprobs.tokens[:prompt_length]) == "hello"
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == prompt_length + 3


async def test_best_of_returns_the_likeliest(model):
    """Of several answers n come back."""
    async with client(model) as openai_client:
        answer = await openai_client.completions.create(
            model="default", prompt="hello", best_of=4, n=2, seed=5, max_tokens=3
        )

    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.completion_tokens == 12


async def test_several_prompts_are_choices_in_their_order(model):
    """Choices are numbered prompt by prompt, whole and streamed alike."""
    asked = {
        **{"model": "default", "prompt": ["hello", "you", "world"], "n": 2, "seed": 1},
        **{"max_tokens": 4},
    }

    async with client(model) as openai_client:
        whole = await openai_client.completions.create(**asked)
        stream = await openai_client.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        texts, usage, ids = [""] * 6, None, set()
        async for chunk in stream:
            ids.add(chunk.id)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text

    assert [choice.index for choice in whole.choices] == list(range(6))
    assert [choice.text for choice in whole.choices] == texts
    assert len(ids) == 1
    assert usage.completion_tokens == whole.usage.completion_tokens == 24
    assert usage.prompt_tokens == whole.usage.prompt_tokens


async def test_a_completion_at_fault_is_400(model):
    """Before anything runs, in OpenAI's shape; then the next one is answered."""
    async with browser(model) as http:
        for wrong in WRONG_COMPLETIONS:
            answer = await http.post("/v1/completions", json={"max_tokens": 2} | wrong)
            assert answer.status_code == 400, wrong
            assert answer.json()["error"]["type"] == "invalid_request_error"
        after = await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})

    assert after.status_code == 200


async def test_a_grammar_and_a_bias_are_obeyed(model):
    """mistral.rs' extensions work in completions."""
    async with browser(model) as http:
        held = await http.post(
            "/v1/completions",
            json={"prompt": "a", "grammar": {"type": "regex", "value": "(yes|no)"}, "top_k": 50},
        )
        pushed = await http.post(
            "/v1/completions", json={"prompt": "a", "logit_bias": {"300": 100}, "max_tokens": 2}
        )
    text = await model.detokenize([300, 300])

    assert held.json()["choices"][0]["text"] in ("yes", "no")
    assert pushed.json()["choices"][0]["text"] == text


async def test_text_becomes_ids_and_text_again(model):
    """/tokenize takes a text or messages, /detokenize the ids of either."""
    async with browser(model) as http:
        plain = (await http.post("/tokenize", json={"prompt": "hello world"})).json()
        turns = [{"role": "user", "content": "hello"}]
        chat = (await http.post("/tokenize", json={"messages": turns})).json()
        text = (await http.post("/detokenize", json={"tokens": plain["tokens"]})).json()

    assert plain["tokens"] == await model.tokenize("hello world")
    assert plain["count"] == len(plain["tokens"])
    assert plain["max_model_len"] == 512
    assert chat["tokens"] == await model.tokenize(turns)
    assert text == {"prompt": "hello world"}


async def test_what_cannot_be_tokenized_is_400(model):
    """So is asking a model that chats for vectors."""
    async with browser(model) as http:
        for path, wrong in WRONG_TOKENS:
            answer = await http.post(path, json=wrong)
            assert answer.status_code == 400, wrong
            assert answer.json()["error"]["message"]


async def test_embeddings_are_the_sdks_as_numbers_and_as_base64(tmp_path):
    """The client's default is base64, which it decodes; both are the same vectors."""
    async with (
        await embedder(embedding_folder(tmp_path)).build() as model,
        client(model) as openai_client,
    ):
        expected = await model.generate_embeddings(["hello", "you"])
        packed = await openai_client.embeddings.create(model="default", input=["hello", "you"])
        numbers = await openai_client.embeddings.create(
            model="default", input=["hello", "you"], encoding_format="float"
        )

    assert [entry.embedding for entry in packed.data] == expected
    assert [entry.embedding for entry in numbers.data] == expected
    assert packed.usage.prompt_tokens == numbers.usage.total_tokens > 0


async def test_base64_is_float32(tmp_path):
    """Four bytes a value; ids may be embedded instead of text."""
    async with (
        await embedder(embedding_folder(tmp_path)).build() as model,
        browser(model) as http,
    ):
        asked = {"input": [[5, 6, 7]], "encoding_format": "base64"}
        answer = (await http.post("/v1/embeddings", json=asked)).json()
        expected = await model.generate_embedding([5, 6, 7])

    assert array("f", b64decode(answer["data"][0]["embedding"])).tolist() == expected


async def test_embeddings_at_fault_are_400(tmp_path):
    """Each says what is wrong."""
    async with (
        await embedder(embedding_folder(tmp_path)).build() as model,
        browser(model) as http,
    ):
        for wrong in WRONG_EMBEDDINGS:
            answer = await http.post("/v1/embeddings", json=wrong)
            assert answer.status_code == 400, wrong


async def test_a_model_that_embeds_does_not_chat(tmp_path):
    """It says so, and the server is well."""
    async with (
        await embedder(embedding_folder(tmp_path)).build() as model,
        browser(model) as http,
    ):
        chat = await http.post("/v1/chat/completions", json={"messages": "hello"})
        health = await http.get("/health")
        metrics = await http.get("/metrics")

    assert chat.status_code == 400
    assert health.status_code == metrics.status_code == 200


async def test_sampling_is_seeded(model):
    """One seed is one text."""
    asked = {"prompt": "hello", "seed": 11, "max_tokens": 6}
    expected = await model.send_completion_request("hello", SamplingParams(seed=11, max_len=6))

    async with browser(model) as http:
        texts = [
            (await http.post("/v1/completions", json=asked)).json()["choices"][0]["text"]
            for _ in range(2)
        ]

    assert texts == [expected.choices[0].text] * 2
