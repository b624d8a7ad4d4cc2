"""`BlockingModel`: the same model for code without an event loop, or inside one it must not use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import anyio.from_thread

from mistralrs_sdk.chat.responses import ChatCompletionChunkResponse, ChatCompletionResponse
from mistralrs_sdk.model import Model, RequestLike

if TYPE_CHECKING:
    from mistralrs_sdk.builder import ModelBuilder
    from mistralrs_sdk.stream import ChatStream


class BlockingModel:
    """A `Model` with plain methods, for scripts, notebooks and threads.

    It keeps an event loop of its own on a thread, so it also works where a loop already runs
    (which it then blocks, as any blocking call would). May be used from several threads.
    """

    def __init__(
        self, model: Model, portal: anyio.from_thread.BlockingPortal, stack: ExitStack
    ) -> None:
        self._model = model
        self._portal = portal
        self._stack = stack

    @classmethod
    def from_builder(cls, builder: ModelBuilder) -> Self:
        """Load the model.

        Raises:
            ModelLoadError, ConfigError: as `ModelBuilder.build`.
        """
        with ExitStack() as stack:
            portal = stack.enter_context(anyio.from_thread.start_blocking_portal())
            model = portal.call(builder.build)
            stack.callback(portal.call, model.aclose)
            return cls(model, portal, stack.pop_all())

    def chat(self, text: str) -> str:
        """Answer one user turn greedily; returns the text."""
        return self._portal.call(self._model.chat, text)

    def send_chat_request(self, request: RequestLike) -> ChatCompletionResponse:
        """Answer a chat.

        Raises:
            RequestError, InferenceError, EngineDeadError, EngineClosedError: as `Model`.
        """
        return self._portal.call(self._model.send_chat_request, request)

    def stream_chat_request(self, request: RequestLike) -> Iterator[ChatCompletionChunkResponse]:
        """Answer a chat in chunks; closing or dropping the iterator aborts the request.

        Raises:
            RequestError: as `Model`, before anything runs.
        """
        return self._chunks(self._portal.call(self._model.stream_chat_request, request))

    def _chunks(self, stream: ChatStream) -> Iterator[ChatCompletionChunkResponse]:
        with self._portal.wrap_async_context_manager(stream) as chunks:
            while True:
                try:
                    chunk = self._portal.call(chunks.__anext__)
                except StopAsyncIteration:
                    return
                yield chunk

    def tokenize(self, text: RequestLike) -> list[int]:
        """Return the ids of a raw text, or of messages as the chat template renders them."""
        return self._portal.call(self._model.tokenize, text)

    def detokenize(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        return self._portal.call(self._model.detokenize, ids)

    def describe(self) -> str:
        """Return every resolved setting and where it came from."""
        return self._model.describe()

    def inner(self) -> Model:
        """Return the asynchronous model; it belongs to this object's event loop."""
        return self._model

    def close(self) -> None:
        """Stop the engine and free the model; a second call does nothing."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<BlockingModel of {self._model!r}>"
