"""`open_chunks`: an answer as it comes, from a `Model` or a `BlockingModel`, for the frameworks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import anyio.to_thread
import attrs

from mistralrs_sdk import (
    AgenticToolCallProgress,
    BlockingModel,
    CalledFunction,
    ChatCompletionChunkResponse,
    Delta,
    InferenceError,
    Logprobs,
    Model,
    RequestError,
    ToolCallResponse,
)

AnyModel = Model | BlockingModel
"""What a framework's model is made of; closing it is left to whoever built it."""

Chunk = ChatCompletionChunkResponse


async def open_chunks(model: AnyModel, request: Mapping[str, Any], model_id: str | None) -> Chunks:
    """Send an OpenAI-shaped request for one answer, and return its chunks.

    A `Model` answers in the event loop it was built in, a `BlockingModel` in any.

    Raises:
        RequestError, UnsupportedError, QueueFullError, EngineDeadError, EngineClosedError: as
            `Model.stream_chat_request`; several answers are asked for, which nobody would read.
    """
    require_one_answer(request)
    if isinstance(model, Model):
        return Chunks(await model.stream_chat_request(request, model_id=model_id))
    iterator = await anyio.to_thread.run_sync(
        lambda: model.stream_chat_request(request, model_id=model_id), abandon_on_cancel=True
    )
    return Chunks(_OnThreads(iterator))


def require_one_answer(request: Mapping[str, Any]) -> None:
    """Refuse a request for several answers.

    Raises:
        RequestError: it is one.
    """
    if request.get("n", 1) not in (None, 1):
        raise RequestError(f"n ({request['n']!r}) must be 1 here: send the request several times")


def as_chunk(item: object) -> Chunk | None:
    """A piece of the answer; None for news of tools that the model itself executes.

    Raises:
        InferenceError: `model.abort` ended the answer: it must not be taken for a whole one.
    """
    if isinstance(item, AgenticToolCallProgress):
        return None
    assert isinstance(item, ChatCompletionChunkResponse), "a stream holds nothing else"
    if item.choices[0].finish_reason == "canceled":
        raise InferenceError("the answer was aborted before its end")
    return item


class Chunks:
    """The chunks of one answer. Leaving its `async with`, or `aclose`, frees the request."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._closed:
            item = await anext(self._stream)
            if not self._closed and (chunk := as_chunk(item)) is not None:
                return chunk
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort what still runs; a task that reads meets the end."""
        self._closed = True
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class _OnThreads:
    """The iterator of a `BlockingModel`, each item waited for on a worker thread."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator: Any = iterator
        self._closed = False

    async def __anext__(self) -> Any:
        item = await anyio.to_thread.run_sync(self._next, abandon_on_cancel=True)
        if item is None:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        self._closed = True
        self._close()

    def _next(self) -> Any:
        item = next(self._iterator, None)
        if self._closed:  # while this thread waited: nobody else could close what it was in
            self._close()
        return item

    def _close(self) -> None:
        with contextlib.suppress(ValueError):  # it runs on the other thread, which will close it
            self._iterator.close()


class WholeCalls:
    """Keeps calls back until the answer ends: what began like one may turn out to be none."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[ToolCallResponse]] = {}

    def shown(self, chunk: Chunk) -> Chunk | None:
        """The chunk without calls, or the last one with all of them; None if it says nothing."""
        choice = chunk.choices[0]
        for piece in choice.delta.tool_calls or ():
            self._pieces.setdefault(piece.index, []).append(piece)
        for index in choice.withdrawn_tool_calls:
            self._pieces.pop(index, None)
        calls = None if choice.finish_reason is None else self._whole()
        delta = attrs.evolve(choice.delta, content=choice.delta.content or None, tool_calls=calls)
        choice = attrs.evolve(choice, delta=delta, withdrawn_tool_calls=())
        if not (
            delta.content or delta.reasoning_content or choice.logprobs or choice.finish_reason
        ):
            return None
        return attrs.evolve(chunk, choices=(choice,))

    def _whole(self) -> tuple[ToolCallResponse, ...] | None:
        return (
            tuple(
                ToolCallResponse(
                    index=place,
                    id=pieces[0].id,
                    function=CalledFunction(
                        pieces[0].function.name,
                        "".join(piece.function.arguments for piece in pieces),
                    ),
                )
                for place, pieces in enumerate(self._pieces.values())
            )
            or None
        )


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """A whole answer, of which `WholeCalls` has shown these chunks, as one chunk."""
    last = chunks[-1]
    choices = [chunk.choices[0] for chunk in chunks]
    delta = Delta(
        content="".join(choice.delta.content or "" for choice in choices),
        reasoning_content="".join(choice.delta.reasoning_content or "" for choice in choices),
        tool_calls=choices[-1].delta.tool_calls,
    )
    logprobs = [entry for c in choices if c.logprobs for entry in c.logprobs.content or ()]
    choice = attrs.evolve(
        choices[-1],
        delta=delta,
        logprobs=Logprobs(content=logprobs) if logprobs else None,
        unparsed_tool_call=any(choice.unparsed_tool_call for choice in choices),
    )
    return attrs.evolve(last, choices=(choice,))
