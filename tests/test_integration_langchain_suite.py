"""LangChain's own conformance suites, on models whose answers are written in advance."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_tests")

from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    EmbeddingsIntegrationTests,
)
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests

from mistralrs_sdk import BlockingModel, EmbeddingModelBuilder, MultiModelBuilder
from mistralrs_sdk.integrations.langchain import ChatMistralRs, MistralRsEmbeddings
from tests.embedding_models import embedding_folder
from tests.framework_models import rounds_builder
from tests.test_model_tools import pieces_tokenizer
from tests.test_withdrawn_calls import chunks_of

STANDARD = {"temperature": 0, "max_tokens": 100, "timeout": 60, "stop": []}
"""The suite's, without `max_retries` and `api_key`: there is nothing to retry, and no key."""


def call(name: str, **arguments: Any) -> tuple[str, ...]:
    """The pieces of an answer that calls a tool."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return "<tool_call>", f"\n{text}", "\n</tool_call>"


TALK = ("Hello", " you", " there", ".")
SCRIPTS = {
    "test_tool_calling": call("magic_function", input=3),
    "test_tool_calling_async": call("magic_function", input=3),
    "test_tool_calling_with_no_arguments": call("magic_function_no_args"),
    "test_bind_runnables_as_tools": call("greeting_generator", answer_style="pirate"),
    "test_agent_loop": call("get_weather", location="Lima"),
    "test_json_mode": ('{"setup": "Why?", "punchline": "So."}',),
}
"""What is said in which test, else `TALK`; where an answer is held to a schema, inside of it."""

_TOKENS = pieces_tokenizer([], ())
CLOSING = {"logit_bias": {_TOKENS.token_to_id('"'): 50, _TOKENS.token_to_id("}"): 40}}
"""Ends every string and object that a schema lets end."""

Models = Callable[[tuple[str, ...]], BlockingModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[Models]:
    """Makes a model that says these pieces, and another one behind the same handle; each once."""
    made: dict[tuple[str, ...], BlockingModel] = {}

    def model(pieces: tuple[str, ...]) -> BlockingModel:
        if pieces not in made:
            folder: Path = tmp_path_factory.mktemp("model")
            both = MultiModelBuilder()
            for name in ("a", "b"):
                both = both.add_model(rounds_builder(folder / name, list(pieces)))
            made[pieces] = BlockingModel.from_builder(both)
        return made[pieces]

    yield model
    for each in made.values():
        each.close()


class TestUnits(ChatModelUnitTests):
    """What holds before anything is asked."""

    @pytest.fixture(autouse=True)
    def some_model(self, models: Models) -> None:
        self.blocking = models(TALK)

    @property
    def chat_model_class(self) -> type[ChatMistralRs]:
        return ChatMistralRs

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": self.blocking}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return STANDARD


class TestAnswers(ChatModelIntegrationTests):
    """What holds of answers: plain, streamed, with tools, held to schemas."""

    @pytest.fixture
    def model(
        self, request: pytest.FixtureRequest, models: Models, monkeypatch: pytest.MonkeyPatch
    ) -> ChatMistralRs:
        name = request.node.originalname
        self.blocking = models(SCRIPTS.get(name, TALK))
        if name == "test_unicode_tool_call_integration":  # it requires the call
            pieces = call("unicode_customer", customer_name="你好 こんにちは")
            monkeypatch.setattr(
                self.blocking,
                "stream_chat_request",
                lambda *_, **__: (chunk for chunk in chunks_of(*pieces)),
            )
        more = dict(getattr(request, "param", {}))
        if name.startswith("test_structured_output"):
            more["model_kwargs"] = CLOSING
        return ChatMistralRs(model=self.blocking, **STANDARD, **more)

    @property
    def chat_model_class(self) -> type[ChatMistralRs]:
        return ChatMistralRs

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": self.blocking}

    @property
    def has_tool_choice(self) -> bool:
        """What must be called is not written in advance: test_integration_langchain tells of it."""
        return False

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        (_, other) = self.blocking.list_models()
        return other


class TestEmbeddingsUnits(EmbeddingsUnitTests):
    """What holds before anything is embedded."""

    @pytest.fixture(autouse=True)
    def embedder(self, blocking_embedder: BlockingModel) -> None:
        self.blocking = blocking_embedder

    @property
    def embeddings_class(self) -> type[MistralRsEmbeddings]:
        return MistralRsEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": self.blocking}


class TestEmbeddings(EmbeddingsIntegrationTests):
    """Vectors, of documents and queries, in both ways."""

    @pytest.fixture(autouse=True)
    def embedder(self, blocking_embedder: BlockingModel) -> None:
        self.blocking = blocking_embedder

    @property
    def embeddings_class(self) -> type[MistralRsEmbeddings]:
        return MistralRsEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": self.blocking}


@pytest.fixture(scope="module")
def blocking_embedder(tmp_path_factory) -> Iterator[BlockingModel]:
    folder = embedding_folder(tmp_path_factory.mktemp("embedder") / "model")
    builder = EmbeddingModelBuilder(folder).with_force_cpu().with_num_threads(1)
    with BlockingModel.from_builder(builder) as model:
        yield model
