"""`Model` and `BlockingModel` as a whole: mistral.rs' names, who they are for, what is refused."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import torch

from mistralrs_sdk import (
    BlockingModel,
    EngineClosedError,
    Model,
    RequestBuilder,
    RequestError,
    TextMessages,
    UnsupportedError,
)
from mistralrs_sdk.builders.multi_model_builder import MultiModelBuilder
from mistralrs_sdk.errors import AdapterError
from tests.model_helpers import tiny_builder

NAMES = [
    "add_model",
    "apply_calibration",
    "begin_calibration",
    "calibration_status",
    "chat",
    "config",
    "delete_session",
    "detokenize",
    "export_session",
    "find_file",
    "fork_session",
    "generate_embedding",
    "generate_embeddings",
    "generate_image",
    "generate_speech",
    "generate_structured",
    "get_default_model_id",
    "import_session",
    "inner",
    "is_model_loaded",
    "list_lora_adapters",
    "list_mcp_tools",
    "list_models",
    "list_models_with_status",
    "list_session_ids",
    "load_lora_adapter",
    "load_lora_adapter_with_model_and_policy",
    "load_lora_adapter_with_policy",
    "lora_adapter_status",
    "max_sequence_length",
    "re_isq_model",
    "reload_model",
    "remove_model",
    "send_chat_request",
    "send_raw_chat_request",
    "set_default_model_id",
    "stream_chat_request",
    "tokenize",
    "tokenize_with_reasoning_effort",
    "tokenize_with_reasoning_effort_and_model",
    "unload_lora_adapter",
    "unload_lora_adapter_if_generation",
    "unload_lora_adapter_with_model_if_generation",
    "unload_model",
]
WITH_MODEL = [
    "apply_calibration",
    "begin_calibration",
    "calibration_status",
    "config",
    "detokenize",
    "generate_embedding",
    "generate_embeddings",
    "generate_image",
    "generate_speech",
    "generate_structured",
    "list_lora_adapters",
    "load_lora_adapter",
    "lora_adapter_status",
    "max_sequence_length",
    "re_isq_model",
    "send_chat_request",
    "send_raw_chat_request",
    "stream_chat_request",
    "tokenize",
    "unload_lora_adapter",
]
NOT_DONE = (
    "apply_calibration",
    "begin_calibration",
    "calibration_status",
    "generate_image",
    "generate_speech",
)


def public_methods(kind: type) -> set[str]:
    return {
        name for name, _ in inspect.getmembers(kind, inspect.isroutine) if not name.startswith("_")
    }


@pytest.fixture
async def model():
    builder = (
        MultiModelBuilder()
        .add_model_with_alias("a", tiny_builder("llama"))
        .add_model_with_alias("b", tiny_builder("qwen3").with_max_model_len(64))
    )
    async with await builder.build() as model:
        yield model


@pytest.mark.parametrize("name", [*NAMES, *(f"{name}_with_model" for name in WITH_MODEL)])
def test_every_name_of_the_rust_sdk_is_there(name):
    """Each with a docstring, on both models."""
    for kind in (Model, BlockingModel):
        assert inspect.getdoc(getattr(kind, name)), f"{kind.__name__}.{name}"


def test_every_method_for_one_model_takes_a_model_id():
    """By keyword, None for the default; mistral.rs' spellings have a place for it or a twin."""
    without = {
        name
        for name in public_methods(Model)
        if "model_id" not in inspect.signature(getattr(Model, name)).parameters
    }

    refused = {name for name in without if name.startswith(NOT_DONE)}
    assert without - refused == {
        "aclose",
        "build",
        "find_file",
        "get_default_model_id",
        "list_models",
        "list_models_with_status",
        "load_lora_adapter_with_policy",
        "unload_lora_adapter_if_generation",
    }


async def test_the_names_with_model_are_for_the_model_they_name(model):
    """What they return is what the plain method returns with `model_id`."""
    chat = TextMessages().add_message("user", "hi")
    expected = await model.send_chat_request(chat, model_id="b")
    response = await model.send_chat_request_with_model(chat, "b")
    assert response.choices[0].message == expected.choices[0].message
    async with await model.stream_chat_request_with_model(chat, "b") as stream:
        assert (await stream.collect()).choices[0].message == expected.choices[0].message
    assert response.model.endswith("qwen3") or "qwen3" in response.model
    assert model.max_sequence_length_with_model("b") == 64
    assert model.max_sequence_length_with_model(None) == 512
    assert model.config_with_model("b").max_model_len == 64
    ids = await model.tokenize_with_model(chat, "b")
    assert ids == await model.tokenize(chat, model_id="b")
    assert await model.detokenize_with_model(ids, "b") == await model.detokenize(ids)
    for call in (
        model.send_chat_request_with_model(chat, "c"),
        model.tokenize_with_model("x", "c"),
        model.generate_embedding_with_model("x", "c"),
        model.list_lora_adapters_with_model("c"),
        model.re_isq_model_with_model("q8_0", "c"),
    ):
        with pytest.raises(RequestError, match="'c' is not known"):
            await call


@pytest.mark.parametrize("name", NOT_DONE)
async def test_what_is_not_done_says_so(name):
    """Whatever it is given, with the way out, on a model of any kind."""
    async with await tiny_builder().build() as model:
        with pytest.raises(UnsupportedError, match=f"^{name} is not supported: .{{20}}"):
            await getattr(model, name)("x", 1, path=2)
        with pytest.raises(UnsupportedError, match=f"^{name}_with_model is not supported"):
            await getattr(model, f"{name}_with_model")("x", "a")
        with pytest.raises(UnsupportedError, match="find_file"):
            model.find_file("x")


async def test_a_model_that_chats_does_not_embed(model):
    """The error names the builder that makes one that does."""
    for call in (model.generate_embedding("x"), model.generate_embeddings(["x", "y"])):
        with pytest.raises(RequestError, match="EmbeddingModelBuilder"):
            await call


async def test_a_model_without_adapters_says_so(model):
    """Listing gives none; anything else names the builder's method."""
    assert await model.list_lora_adapters() == ()
    for call in (model.lora_adapter_status(), model.load_lora_adapter("x", "./x")):
        with pytest.raises(AdapterError, match="with_lora"):
            await call


@pytest.mark.parametrize("setting", ["tools", "enable_thinking", "reasoning_effort"])
async def test_settings_of_a_template_are_refused_for_raw_text(model, setting):
    """They would have no effect; messages take them."""
    value = {"tools": [], "enable_thinking": True, "reasoning_effort": "low"}[setting]

    with pytest.raises(RequestError, match=f"{setting} .* raw text"):
        await model.tokenize("hello", **{setting: value})


async def test_sessions_belong_to_one_model_and_outlive_its_unloading(model):
    """A request goes on where the session was, though the model was loaded anew in between."""
    first = RequestBuilder().add_message("user", "hi").with_session_id("s").set_sampler_max_len(4)
    await model.send_chat_request(first, model_id="a")
    kept = model.export_session("s", model_id="a")
    assert len(kept.messages) == 2
    assert model.list_session_ids(model_id="b") == []

    await model.unload_model("a")
    assert model.export_session("s") == kept
    again = await model.send_chat_request(first.add_message("user", "and?"))
    assert len(model.export_session("s").messages) == 5
    assert again.usage.prompt_tokens > 10
    copy = model.fork_session("s", turns=1, new_session_id="t")
    assert model.export_session(copy) == kept
    model.import_session("u", kept)
    assert model.delete_session("u")
    assert not model.delete_session("u")
    assert model.list_session_ids() == ["s", "t"]
    with pytest.raises(RequestError, match="'s' is unknown"):
        model.export_session("s", model_id="b")


async def test_who_looks_at_an_unloaded_model_is_told_so(model):
    """Looking loads nothing; asking does."""
    await model.unload_model("b")

    for look in (model.config, model.describe, model.inner, model.list_mcp_tools):
        with pytest.raises(EngineClosedError, match="'b' is unloaded"):
            look(model_id="b")
    for look in (model.stats, model.metrics, model.clear_prefix_cache):
        with pytest.raises(EngineClosedError, match="'b' is unloaded"):
            await look(model_id="b")
    assert await model.tokenize("x", model_id="b")
    assert model.config(model_id="b").max_model_len == 64


async def test_requests_that_wait_for_a_reload_can_be_cancelled(model):
    """One leaves, the other gets its answer."""
    await model.unload_model("b")
    gone = asyncio.create_task(model.chat("hi", model_id="b"))
    stays = asyncio.create_task(model.chat("hi", model_id="b"))
    await asyncio.sleep(0)
    gone.cancel()

    assert isinstance(await stays, str)
    assert gone.cancelled()


async def test_an_openai_request_names_its_model(model):
    """Under "model"; `model_id` wins, "default" is the default, an unknown one is an error."""
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}
    answers = {
        id: (await model.send_chat_request({**body, "model": id})).choices[0].message.content
        for id in ("a", "b", "default")
    }
    assert answers["default"] == answers["a"] != answers["b"]
    response = await model.send_chat_request({**body, "model": "a"}, model_id="b")
    assert response.choices[0].message.content == answers["b"]
    async with await model.stream_chat_request({**body, "model": "b", "stream": True}) as stream:
        assert (await stream.collect()).choices[0].message.content == answers["b"]
    with pytest.raises(RequestError, match=r"'gpt' is not known: there are 'a', 'b'"):
        await model.send_chat_request({**body, "model": "gpt"})
    with pytest.raises(RequestError, match="stream_chat_request"):
        await model.send_chat_request({**body, "stream": True})


async def test_raw_logits_and_completions_are_for_one_model(model):
    """Of messages as of the ids they become; a str is one user turn."""
    ids = await model.tokenize([{"role": "user", "content": "hi"}], model_id="b")
    logits, tokens = await model.send_raw_chat_request("hi", model_id="b")
    assert tokens == ids
    assert sum(len(part) for part in logits) == len(ids)
    again = await model.send_raw_chat_request_with_model(ids, "b")
    assert torch.equal(again.logits[0], logits[0])
    six = RequestBuilder().set_sampler_max_len(6)
    whole = await model.send_completion_request(ids, six, model_id="b")
    stream = await model.stream_completion_request(ids, six, model_id="b")
    assert (await stream.collect()).choices[0].text == whole.choices[0].text
    echoed = await model.send_completion_request("Hello", echo=True, model_id="b")
    assert echoed.choices[0].text.startswith("Hello")
