"""`ModelNames`: mistral.rs' names for calls to one of several models, beside `model_id=`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

from mistralrs_sdk.answers.raw_logits import RawLogits
from mistralrs_sdk.answers.stream import ChatStream
from mistralrs_sdk.chat.embeddings import EmbeddingRequestLike
from mistralrs_sdk.chat.messages import ReasoningEffort
from mistralrs_sdk.chat.requests import RequestLike
from mistralrs_sdk.chat.responses import ChatCompletionResponse
from mistralrs_sdk.chat.tools import Tool
from mistralrs_sdk.config import EngineConfig, Progress
from mistralrs_sdk.handle.requests import ModelRequests
from mistralrs_sdk.handle.state import ModelState
from mistralrs_sdk.isq import Isq
from mistralrs_sdk.tools.loop import ToolLoopStream

T = TypeVar("T")


class ModelNames(ModelRequests, ModelState):
    """`<name>_with_model(..., model_id)` is `<name>(..., model_id=model_id)`; None: the default."""

    async def send_chat_request_with_model(
        self, request: RequestLike, model_id: str | None
    ) -> ChatCompletionResponse:
        """As `send_chat_request`."""
        return await self.send_chat_request(request, model_id=model_id)

    async def stream_chat_request_with_model(
        self, request: RequestLike, model_id: str | None
    ) -> ChatStream | ToolLoopStream:
        """As `stream_chat_request`."""
        return await self.stream_chat_request(request, model_id=model_id)

    async def send_raw_chat_request_with_model(
        self, request: RequestLike | Sequence[int], model_id: str | None
    ) -> RawLogits:
        """As `send_raw_chat_request`."""
        return await self.send_raw_chat_request(request, model_id=model_id)

    @overload
    async def generate_structured_with_model(
        self, type: type[T], request: RequestLike, model_id: str | None
    ) -> T: ...
    @overload
    async def generate_structured_with_model(
        self, type: Mapping[str, Any], request: RequestLike, model_id: str | None
    ) -> Any: ...
    async def generate_structured_with_model(
        self, type: Any, request: RequestLike, model_id: str | None
    ) -> Any:
        """As `generate_structured`."""
        return await self.generate_structured(type, request, model_id=model_id)

    async def generate_embedding_with_model(
        self, text: str | Sequence[int], model_id: str | None
    ) -> list[float]:
        """As `generate_embedding`."""
        return await self.generate_embedding(text, model_id=model_id)

    async def generate_embeddings_with_model(
        self, request: EmbeddingRequestLike, model_id: str | None
    ) -> list[list[float]]:
        """As `generate_embeddings`."""
        return await self.generate_embeddings(request, model_id=model_id)

    async def tokenize_with_model(
        self,
        text: RequestLike,
        model_id: str | None,
        *,
        tools: Iterable[Tool | Mapping[str, Any]] | None = None,
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        """As `tokenize`."""
        return await self.tokenize(
            text,
            tools=tools,
            add_special_tokens=add_special_tokens,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
            model_id=model_id,
        )

    async def tokenize_with_reasoning_effort_and_model(
        self,
        text: RequestLike,
        reasoning_effort: ReasoningEffort | str | None,
        model_id: str | None,
        *,
        tools: Iterable[Tool | Mapping[str, Any]] | None = None,
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        """As `tokenize`."""
        return await self.tokenize(
            text,
            tools=tools,
            add_special_tokens=add_special_tokens,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
            reasoning_effort=reasoning_effort,
            model_id=model_id,
        )

    async def detokenize_with_model(
        self, ids: Sequence[int], model_id: str | None, *, skip_special_tokens: bool = True
    ) -> str:
        """As `detokenize`."""
        return await self.detokenize(
            ids, skip_special_tokens=skip_special_tokens, model_id=model_id
        )

    def config_with_model(self, model_id: str | None) -> EngineConfig:
        """As `config`."""
        return self.config(model_id=model_id)

    def max_sequence_length_with_model(self, model_id: str | None) -> int:
        """As `max_sequence_length`."""
        return self.max_sequence_length(model_id=model_id)

    async def re_isq_model_with_model(
        self, isq: Isq | str | int, model_id: str | None, *, progress: Progress = False
    ) -> None:
        """As `re_isq_model`."""
        await self.re_isq_model(isq, progress=progress, model_id=model_id)
