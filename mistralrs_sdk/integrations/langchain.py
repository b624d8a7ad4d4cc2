"""`ChatMistralRs` and `MistralRsEmbeddings`: loaded models in LangChain; needs `langchain`."""

from __future__ import annotations

import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from operator import itemgetter
from typing import Any, Literal

try:
    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
    )
    from langchain_core.embeddings import Embeddings
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.language_models.base import LangSmithParams
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.language_models.model_profile import ModelProfile
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
    from langchain_core.output_parsers.openai_tools import (
        JsonOutputKeyToolsParser,
        PydanticToolsParser,
    )
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
    from langchain_core.tools import BaseTool
    from langchain_core.utils.function_calling import (
        convert_to_json_schema,
        convert_to_openai_tool,
    )
    from langchain_core.utils.pydantic import is_basemodel_subclass
    from pydantic import ConfigDict, Field
except ModuleNotFoundError as missing:
    raise ImportError(
        f"Models for LangChain need {missing.name}: pip install 'mistralrs_sdk[langchain]'"
    ) from missing

from mistralrs_sdk import BlockingModel, EmbeddingRequestBuilder, Model
from mistralrs_sdk.integrations.chunks import (
    AnyModel,
    Chunk,
    WholeCalls,
    as_chunk,
    open_chunks,
    require_one_answer,
)
from mistralrs_sdk.integrations.langchain_messages import (
    as_generation,
    as_result,
    openai_messages,
)

_OWN = ("temperature", "top_p", "top_k", "max_tokens", "seed")
_NEEDS_BLOCKING = (
    "invoke, stream and batch wait in the thread that calls them, and a Model answers in its event "
    "loop: use ainvoke, astream and abatch, or give a BlockingModel, which does both"
)


class ChatMistralRs(BaseChatModel):
    """A loaded model as a chat model: `ChatMistralRs(model=BlockingModel.from_builder(builder))`.

    With a `BlockingModel` it answers in plain code, on threads and in any event loop. With a
    `Model` only the asynchronous methods work, in the event loop it was built in, and cost no
    threads. It is not closed here.

    Whatever else an OpenAI-shaped request may hold (`min_p`, `adapter`, `grammar` ...) is given in
    `model_kwargs`, or with a call: `chat.invoke(messages, min_p=0.1)`. Unknown keys are refused.

    Raises, from requests:
        ValueError: an answer that is held to a schema should call tools too.
        RuntimeError: a method that waits is called, and there is no `BlockingModel`.
        MistralRsError: what `Model.stream_chat_request` raises, as it is.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: AnyModel = Field(exclude=True, repr=False)
    """What answers."""
    model_id: str | None = None
    """Which of the models that it holds; None: its default."""
    temperature: float | None = None
    """0 takes the most likely tokens; None: the model's default, else 1."""
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] | None = None
    """What ends an answer, if a call does not say."""
    timeout: float | None = None
    """Seconds from sending after which an answer fails with `DeadlineError`."""
    streaming: bool = False
    """Whether `invoke` makes its answer of the pieces of `stream`, which callbacks then see."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "mistralrs"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {"model": self._name(None), **self._settings(None)}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        return {**params, "ls_model_name": self._name(kwargs.get("model"))}

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            text_outputs=True,
            tool_calling=True,
            tool_choice=True,
            structured_output=False,  # not beside tools: agents then use a tool for the output
        )
        if self.model.is_model_loaded(self.model_id):
            profile["max_input_tokens"] = self.model.max_sequence_length(model_id=self.model_id)
        return profile

    def bind_tools(
        self,
        tools: Sequence[Mapping[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Mapping[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return this model with tools to call.

        `tool_choice` is "auto", "none", "any" (or "required", True: one must be called), the name
        of the one that must be, or OpenAI's dict. With `strict` the arguments are held to the
        tools' schemas wherever they are called; those that must be called always are.
        """
        offered = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        if tool_choice in ("any", True):
            tool_choice = "required"
        elif isinstance(tool_choice, str) and tool_choice not in ("auto", "none", "required"):
            tool_choice = {"type": "function", "function": {"name": tool_choice}}
        if tool_choice:
            kwargs["tool_choice"] = tool_choice
        return self.bind(tools=offered, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return this model with its answers parsed into `schema`.

        "json_schema" holds the answer to it, "function_calling" the arguments of a call that must
        be made, "json_mode" to JSON of any shape. With `strict` there is nothing in it beside the
        properties of the schema, and all of these. Only the tool shows the model its schema: with
        the others, say in the messages what is wanted.

        Raises:
            ValueError: there is no such method, or an unknown argument.
        """
        if kwargs:
            raise ValueError(f"with_structured_output does not take {', '.join(kwargs)}")
        # only BaseModels have parsers of their own; their types are invariant there
        a_model: Any = (
            schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
        )
        shown = {"kwargs": {"method": method}, "schema": schema}
        parser: Runnable[Any, Any]
        if method == "function_calling":
            name = convert_to_openai_tool(schema)["function"]["name"]
            model = self.bind_tools(
                [schema], tool_choice=name, strict=strict, ls_structured_output_format=shown
            )
            if a_model is not None:
                parser = PydanticToolsParser(tools=[a_model], first_tool_only=True)
            else:
                parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        else:
            form = _answer_format(schema, method, strict)
            model = self.bind(response_format=form, ls_structured_output_format=shown)
            parser = JsonOutputParser()
            if a_model is not None:
                parser = PydanticOutputParser(pydantic_object=a_model)
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(
            parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
        )
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks(
            [failed], exception_key="parsing_error"
        )

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's own ids of a text.

        Raises:
            RuntimeError: there is no `BlockingModel`.
        """
        return _blocking(self.model).tokenize(
            text, add_special_tokens=False, model_id=self.model_id
        )

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Return how many tokens the prompt has that these messages become."""
        asked: dict[str, Any] = {"messages": openai_messages(messages)}
        if tools:
            asked["tools"] = [convert_to_openai_tool(tool) for tool in tools]
        return len(self.model.render_chat(asked, model_id=self.model_id)[1])

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        asked, model_id = self._request(messages, stop, kwargs)
        with contextlib.closing(_waited_for(self.model, asked, model_id)) as chunks:
            return as_result(list(chunks))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        asked, model_id = self._request(messages, stop, kwargs)
        with contextlib.closing(_waited_for(self.model, asked, model_id)) as chunks:
            yield from map(as_generation, chunks)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        asked, model_id = self._request(messages, stop, kwargs)
        async with contextlib.aclosing(_awaited(self.model, asked, model_id)) as chunks:
            return as_result([chunk async for chunk in chunks])

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        asked, model_id = self._request(messages, stop, kwargs)
        async with contextlib.aclosing(_awaited(self.model, asked, model_id)) as chunks:
            async for chunk in chunks:
                yield as_generation(chunk)

    def _name(self, override: Any) -> str:
        if isinstance(override, str):
            return override
        return self.model_id or self.model.get_default_model_id()

    def _settings(self, stop: list[str] | None) -> dict[str, Any]:
        own: dict[str, Any] = {key: getattr(self, key) for key in _OWN}
        own["stop"] = self.stop if stop is None else stop
        own["deadline"] = self.timeout
        return {**self.model_kwargs, **{k: value for k, value in own.items() if value is not None}}

    def _request(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str | None]:
        """The same as an OpenAI-shaped request, and the model it is for."""
        asked = {**self._settings(stop), **kwargs, "messages": openai_messages(messages)}
        asked.pop("stream", None)
        if "timeout" in asked:
            asked["deadline"] = asked.pop("timeout")
        if asked.get("max_completion_tokens") is not None:
            asked.pop("max_tokens", None)
        form = (asked.get("response_format") or {}).get("type", "text")
        if form != "text" and asked.get("tools") and asked.get("tool_choice") != "none":
            raise ValueError(
                f"response_format ({form!r}) contradicts tools: an answer that is held to a schema "
                "cannot call one. Offer the schema as a tool too, and bind_tools(..., "
                'tool_choice="any")'
            )
        require_one_answer(asked)
        return asked, asked.pop("model", self.model_id)


class MistralRsEmbeddings(Embeddings):
    """A loaded embedding model: `MistralRsEmbeddings(BlockingModel.from_builder(builder))`.

    `model` is as for `ChatMistralRs`, built with `EmbeddingModelBuilder`. `query_prompt` and
    `document_prompt` name the model's own instructions to put before queries and documents; None is
    its default.

    Raises:
        RuntimeError: a method that waits is called, and there is no `BlockingModel`.
        MistralRsError: what `Model.send_embedding_request` raises, as it is.
    """

    def __init__(
        self,
        model: AnyModel,
        *,
        model_id: str | None = None,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
    ) -> None:
        self.model = model
        self.model_id = model_id
        self.query_prompt = query_prompt
        self.document_prompt = document_prompt

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return one vector per text, in their order: [texts][dimensions]."""
        if not texts:
            return []
        model = _blocking(self.model)
        asked = _embedding(texts, self.document_prompt)
        return model.send_embedding_request(asked, model_id=self.model_id).embeddings

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query: [dimensions]."""
        model = _blocking(self.model)
        asked = _embedding([text], self.query_prompt)
        return model.send_embedding_request(asked, model_id=self.model_id).embeddings[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """The same, without waiting in this thread."""
        if not isinstance(self.model, Model) or not texts:
            return await super().aembed_documents(texts)
        asked = _embedding(texts, self.document_prompt)
        response = await self.model.send_embedding_request(asked, model_id=self.model_id)
        return response.embeddings

    async def aembed_query(self, text: str) -> list[float]:
        """The same, without waiting in this thread."""
        if not isinstance(self.model, Model):
            return await super().aembed_query(text)
        asked = _embedding([text], self.query_prompt)
        response = await self.model.send_embedding_request(asked, model_id=self.model_id)
        return response.embeddings[0]


def _answer_format(
    schema: dict[str, Any] | type, method: str, strict: bool | None
) -> dict[str, Any]:
    if method == "json_mode":
        return {"type": "json_object"}
    if method != "json_schema":
        raise ValueError(
            f'method ({method!r}) must be "json_schema", "function_calling" or "json_mode"'
        )
    held_to = convert_to_json_schema(schema, strict=strict)
    named = {"name": held_to.get("title", "output"), "schema": held_to}
    return {"type": "json_schema", "json_schema": named}


def _embedding(texts: Sequence[str], prompt: str | None) -> EmbeddingRequestBuilder:
    return EmbeddingRequestBuilder().add_prompts(texts).with_prompt_name(prompt)


def _blocking(model: AnyModel) -> BlockingModel:
    if isinstance(model, Model):
        raise RuntimeError(_NEEDS_BLOCKING)
    return model


def _waited_for(
    model: AnyModel, asked: Mapping[str, Any], model_id: str | None
) -> Generator[Chunk]:
    calls = WholeCalls()
    stream: Any = _blocking(model).stream_chat_request(asked, model_id=model_id)
    with contextlib.closing(stream) as items:
        for item in items:
            chunk = as_chunk(item)
            if chunk is not None and (shown := calls.shown(chunk)) is not None:
                yield shown


async def _awaited(
    model: AnyModel, asked: Mapping[str, Any], model_id: str | None
) -> AsyncGenerator[Chunk]:
    calls = WholeCalls()
    async with await open_chunks(model, asked, model_id) as chunks:
        async for chunk in chunks:
            if (shown := calls.shown(chunk)) is not None:
                yield shown
