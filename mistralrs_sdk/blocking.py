"""`BlockingModel`: the same model for code without an event loop, or inside one it must not use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self, TypeVar

from mistralrs_sdk.chat.requests import RequestLike
from mistralrs_sdk.chat.responses import (
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    CompletionResponse,
)
from mistralrs_sdk.config import Progress
from mistralrs_sdk.errors import EngineClosedError
from mistralrs_sdk.isq import Isq
from mistralrs_sdk.model import Model
from mistralrs_sdk.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mistralrs_sdk.builder import ModelBuilder
    from mistralrs_sdk.engine.metrics import EngineMetrics
    from mistralrs_sdk.stream import ChatStream

T = TypeVar("T")


class BlockingModel:
    """A `Model` with plain methods, for scripts, notebooks and threads.

    It keeps an event loop of its own on a thread, so it also works where a loop already runs
    (which it then blocks, as any blocking call would). May be used from several threads. A script
    that ends without `close()` ends all the same.
    """

    def __init__(self, model: Model, loop: _LoopThread) -> None:
        self._model = model
        self._loop = loop

    @classmethod
    def from_builder(cls, builder: ModelBuilder) -> Self:
        """Load the model.

        Raises:
            ModelLoadError, ConfigError: as `ModelBuilder.build`.
        """
        loop = _LoopThread()
        try:
            return cls(loop.run(builder.build()), loop)
        except BaseException:
            loop.stop()
            raise

    def chat(self, text: str) -> str:
        """Answer one user turn greedily; returns the text."""
        return self._loop.run(self._model.chat(text))

    def send_chat_request(self, request: RequestLike) -> ChatCompletionResponse:
        """Answer a chat.

        Raises:
            RequestError, InferenceError, EngineDeadError, EngineClosedError: as `Model`.
        """
        return self._loop.run(self._model.send_chat_request(request))

    def stream_chat_request(self, request: RequestLike) -> Iterator[ChatCompletionChunkResponse]:
        """Answer a chat in chunks; closing or dropping the iterator aborts the request.

        Raises:
            RequestError: as `Model`, before anything runs.
        """
        return self._chunks(self._loop.run(self._model.stream_chat_request(request)))

    def _chunks(self, stream: ChatStream) -> Iterator[ChatCompletionChunkResponse]:
        try:
            while (chunk := self._loop.run(_next_chunk(stream))) is not None:
                yield chunk
        finally:
            self._loop.start(stream.aclose())  # not waited for: the interpreter may be ending

    def send_completion_request(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None
    ) -> CompletionResponse:
        """Continue a raw prompt (text or token ids), greedily unless `sampling` says otherwise.

        Raises:
            RequestError, InferenceError, EngineDeadError, EngineClosedError: as `Model`.
        """
        return self._loop.run(self._model.send_completion_request(prompt, sampling))

    def tokenize(self, text: RequestLike, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a raw text, or of messages as the chat template renders them."""
        return self._loop.run(self._model.tokenize(text, add_special_tokens=add_special_tokens))

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self._loop.run(self._model.detokenize(ids, skip_special_tokens=skip_special_tokens))

    def max_sequence_length(self) -> int:
        """Return the longest prompt plus completion, in tokens."""
        return self._model.max_sequence_length()

    def metrics(self) -> EngineMetrics:
        """Return what runs right now and what was counted since the model was loaded."""
        return self._loop.run(self._model.metrics())

    def describe(self) -> str:
        """Return every resolved setting and where it came from."""
        return self._model.describe()

    def re_isq_model(self, isq: Isq | str | int, *, progress: Progress = False) -> None:
        """Quantise the weights of the running model to another type.

        Raises:
            ConfigError, ModelLoadError, EngineDeadError, EngineClosedError: as `Model`.
        """
        self._loop.run(self._model.re_isq_model(isq, progress=progress))

    def inner(self) -> Model:
        """Return the asynchronous model; it belongs to this object's event loop."""
        return self._model

    def close(self) -> None:
        """Stop the engine and free the model; open requests fail. A second call does nothing."""
        if not self._loop.stopped:
            self._loop.run(self._model.aclose())
            self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<BlockingModel of {self._model!r}>"


class _LoopThread:
    """An event loop on a daemon thread: a process that forgot to close it ends all the same."""

    def __init__(self) -> None:
        self.stopped = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="mistralrs-blocking", daemon=True
        )
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there and wait; whatever interrupts the wait cancels it."""
        future = self.start(coroutine)
        if future is None:
            raise EngineClosedError("the model was closed; build it again to use it")
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T] | None:
        """Run it there without waiting; None if the loop has stopped."""
        if self.stopped:
            coroutine.close()
            return None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        self.stopped = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next_chunk(stream: ChatStream) -> ChatCompletionChunkResponse | None:
    return await anext(stream, None)
