"""`ModelRequests`: the methods of `Model` that ask a model something."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar, overload

from mistralrs_sdk.answers.completions import CompletionStream
from mistralrs_sdk.answers.raw_logits import RawLogits
from mistralrs_sdk.answers.stream import ChatStream
from mistralrs_sdk.chat.embeddings import (
    EmbeddingRequestLike,
    EmbeddingResponse,
    as_embedding_request,
)
from mistralrs_sdk.chat.messages import ReasoningEffort, TextMessages
from mistralrs_sdk.chat.openai_request import model_named
from mistralrs_sdk.chat.requests import RequestBuilder, RequestLike, as_request
from mistralrs_sdk.chat.responses import ChatCompletionResponse, CompletionResponse
from mistralrs_sdk.chat.tools import Tool
from mistralrs_sdk.errors import EngineClosedError, RequestError
from mistralrs_sdk.handle.base import ModelHandle
from mistralrs_sdk.sampling_params import SamplingParams
from mistralrs_sdk.serving.structured import generate_structured
from mistralrs_sdk.tools.loop import ToolLoopStream

T = TypeVar("T")


class ModelRequests(ModelHandle):
    """Chats, completions, vectors and tokens.

    `request` of a chat is a `RequestBuilder`, `TextMessages`, one user turn as a str, a list of
    OpenAI's messages, or the dict of an OpenAI request, whose "model" counts if `model_id` is None.
    Requests may be sent at the same time; those for one model share its batches. A model that was
    unloaded is loaded again first, which is a `ModelLoadError` if it fails.
    """

    async def chat(self, text: str, *, model_id: str | None = None) -> str:
        """Answer one user turn greedily; returns the text.

        Raises:
            RequestError, UnsupportedError, QueueFullError, InferenceError, EngineDeadError,
                EngineClosedError: as `send_chat_request`.
        """
        request = TextMessages().add_message("user", text)
        response = await self.send_chat_request(request, model_id=model_id)
        return response.choices[0].message.content or ""

    async def send_chat_request(
        self, request: RequestLike, *, model_id: str | None = None
    ) -> ChatCompletionResponse:
        """Answer a chat; requests sent at the same time run in one batch.

        Cancelling the task aborts the request within one step.

        Raises:
            RequestError: the request is at fault: empty, too long, refused by the template ...
            UnsupportedError: a dict has a field that asks for what this package does not do.
            QueueFullError: as many requests wait as `with_max_queue` allows.
            InferenceError: it failed while running; `partial_response` holds what had come.
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        asked = as_request(request, streams=False)
        model = await self._chat_model(_chosen(request, model_id))
        async with await model.stream_chat(asked) as stream:
            return await stream.collect()

    async def stream_chat_request(
        self, request: RequestLike, *, model_id: str | None = None
    ) -> ChatStream | ToolLoopStream:
        """Answer a chat in chunks, one per step and choice; see `ChatStream`.

        If calls of tools are executed here, or the request is part of a session, it is a
        `ToolLoopStream`, which says between the chunks what its tools do.

        Raises:
            RequestError, UnsupportedError, QueueFullError, EngineDeadError, EngineClosedError: as
                `send_chat_request`, before anything runs. Reading raises the others.
        """
        asked = as_request(request, streams=True)
        model = await self._chat_model(_chosen(request, model_id))
        return await model.stream_chat(asked)

    @overload
    async def generate_structured(
        self, type: type[T], request: RequestLike, *, model_id: str | None = None
    ) -> T: ...
    @overload
    async def generate_structured(
        self, type: Mapping[str, Any], request: RequestLike, *, model_id: str | None = None
    ) -> Any: ...
    async def generate_structured(
        self, type: Any, request: RequestLike, *, model_id: str | None = None
    ) -> Any:
        """Answer with an instance of `type`, whose JSON schema the answer is held to.

        `type` is a pydantic model, a dataclass, an attrs class, a TypedDict, an enum, a union or
        container of these, or a JSON schema as a dict, for which the parsed JSON is returned. The
        model sees nothing of the schema: the messages should say what is wanted.

        Raises:
            RequestError: the type has no schema that can be enforced, or the request has a
                constraint of its own or asks for several answers.
            InferenceError: the answer was cut short, or the type refuses it; `partial_response`
                is the answer.
            UnsupportedError, QueueFullError, EngineDeadError, EngineClosedError: as for a chat.
        """
        send = functools.partial(self.send_chat_request, model_id=_chosen(request, model_id))
        return await generate_structured(send, type, request)

    async def send_raw_chat_request(
        self, request: RequestLike | Sequence[int], *, model_id: str | None = None
    ) -> RawLogits:
        """Return the logits at every position of a prompt, and its tokens; nothing is sampled.

        Messages become a prompt as for a chat, a str one user turn; token ids are the prompt
        themselves. It is computed anew, whole and apart from others. The logits are one tensor
        [tokens, vocab] in float32.

        Raises:
            RequestError: the prompt is at fault, or its logits would take over 2 GiB.
            UnsupportedError, QueueFullError, InferenceError, EngineDeadError, EngineClosedError:
                as for a chat.
        """
        asked = request if _are_ids(request) else as_request(request)
        model = await self._chat_model(_chosen(request, model_id))
        return await model.raw_logits(asked)

    async def send_completion_request(
        self,
        prompt: str | Sequence[int],
        request: RequestBuilder | SamplingParams | None = None,
        *,
        echo: bool = False,
        best_of: int | None = None,
        model_id: str | None = None,
    ) -> CompletionResponse:
        """Continue a raw prompt (text or token ids), greedily unless `request` says otherwise.

        `request` has settings only, no messages. With `echo` each text begins with the prompt, and
        log probabilities with those of the prompt. Of `best_of` answers the `n_choices` with the
        highest mean log probability are returned.

        Raises:
            RequestError, QueueFullError, InferenceError, EngineDeadError, EngineClosedError: as for
                a chat.
        """
        model = await self._chat_model(model_id)
        return await model.complete(prompt, request, echo=echo, best_of=best_of)

    async def stream_completion_request(
        self,
        prompt: str | Sequence[int],
        request: RequestBuilder | SamplingParams | None = None,
        *,
        echo: bool = False,
        model_id: str | None = None,
    ) -> CompletionStream:
        """The same in chunks, one per step and choice.

        Raises:
            RequestError, QueueFullError, EngineDeadError, EngineClosedError: as
                `send_completion_request`, before anything runs. Reading raises the others.
        """
        model = await self._chat_model(model_id)
        return await model.stream_completion(prompt, request, echo=echo)

    def abort(self, id: str, *, model_id: str | None = None) -> None:
        """End the request with this response id; its stream ends with finish_reason "canceled".

        An id that is not running any more is ignored.

        Raises:
            RequestError: this is no response id.
        """
        with contextlib.suppress(EngineClosedError):  # nothing runs in a model that is unloaded
            self._models.loaded(model_id).abort(id)

    async def generate_embedding(
        self, text: str | Sequence[int], *, model_id: str | None = None
    ) -> list[float]:
        """Return the vector of one text, or of its token ids: [dimensions].

        Raises:
            RequestError: it is empty or too long, or the model was not built to embed.
            InferenceError, EngineDeadError, EngineClosedError: as for a chat.
        """
        return (await self.generate_embeddings(text, model_id=model_id))[0]

    async def generate_embeddings(
        self, request: EmbeddingRequestLike, *, model_id: str | None = None
    ) -> list[list[float]]:
        """Return one vector per input, in the order of the inputs; they are computed in batches.

        `request` is an `EmbeddingRequestBuilder`, a list of texts, or a list of lists of ids. The
        result is [inputs][dimensions].

        Raises:
            RequestError: an input is empty or too long, or the model was not built to embed.
            InferenceError, EngineDeadError, EngineClosedError: as for a chat.
        """
        response = await self.send_embedding_request(request, model_id=model_id)
        return response.embeddings

    async def send_embedding_request(
        self, request: EmbeddingRequestLike, *, model_id: str | None = None
    ) -> EmbeddingResponse:
        """The same with the token count, and vectors as float32 arrays, each [dimensions].

        Raises:
            RequestError, InferenceError, EngineDeadError, EngineClosedError: as
                `generate_embeddings`.
        """
        asked = as_embedding_request(request)
        model = await self._embedder(model_id)
        return await model.embed(asked)

    async def tokenize(
        self,
        text: RequestLike,
        *,
        tools: Iterable[Tool | Mapping[str, Any]] | None = None,
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        reasoning_effort: ReasoningEffort | str | None = None,
        model_id: str | None = None,
    ) -> list[int]:
        """Return the ids of a raw text, or of messages as the chat template renders them.

        `tools`, `enable_thinking` and `reasoning_effort` are what a request would say of them;
        None leaves each as `text` has it. `add_special_tokens` concerns raw text only.

        Raises:
            RequestError: the template refuses the messages, or `text` is a str and one of these,
                which only a template can use, is given.
            UnsupportedError: as for a chat.
        """
        if isinstance(text, str):
            _refuse_for_text(
                tools=tools, enable_thinking=enable_thinking, reasoning_effort=reasoning_effort
            )
            served = await self._models.served(model_id)
            return await served.tokenize(text, add_special_tokens=add_special_tokens)
        asked = as_request(text)
        if tools is not None:
            asked = asked.set_tools(tools)
        if reasoning_effort is not None:
            asked = asked.with_reasoning_effort(reasoning_effort)
        model = await self._chat_model(_chosen(text, model_id))
        return await model.tokenize_chat(
            asked, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
        )

    async def tokenize_with_reasoning_effort(
        self,
        text: RequestLike,
        reasoning_effort: ReasoningEffort | str | None,
        *,
        tools: Iterable[Tool | Mapping[str, Any]] | None = None,
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        model_id: str | None = None,
    ) -> list[int]:
        """As `tokenize`, in mistral.rs' spelling."""
        return await self.tokenize(
            text,
            tools=tools,
            add_special_tokens=add_special_tokens,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
            reasoning_effort=reasoning_effort,
            model_id=model_id,
        )

    async def detokenize(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        model_id: str | None = None,
    ) -> str:
        """Return the text of token ids.

        Raises:
            RequestError: an id is outside the vocabulary.
        """
        served = await self._models.served(model_id)
        return await served.detokenize(ids, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        request: RequestLike,
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        model_id: str | None = None,
    ) -> tuple[str, list[int]]:
        """Return the prompt a chat request becomes, as text and as ids.

        Raises:
            RequestError: the template refuses the messages, or there is none.
            UnsupportedError: as for a chat.
            EngineClosedError: the model is unloaded.
        """
        model = self._loaded_chat_model(_chosen(request, model_id))
        return model.render_chat(
            as_request(request),
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
        )


def _chosen(request: object, model_id: str | None) -> str | None:
    """The model a request is for: `model_id`, else the one an OpenAI-shaped request names."""
    return model_named(request) if model_id is None else model_id


def _are_ids(request: object) -> TypeGuard[Sequence[int]]:
    if not isinstance(request, Sequence) or isinstance(request, str):
        return False
    return len(request) > 0 and isinstance(request[0], int)


def _refuse_for_text(**settings: Any) -> None:
    for name, value in settings.items():
        if value is not None:
            raise RequestError(
                f"{name} ({value!r:.80}) has no effect on raw text: give messages, or leave it out"
            )
