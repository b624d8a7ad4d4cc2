"""Answers written in advance, in place of a model, for what runs rounds of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from mistralrs_sdk import CalledFunction, RequestBuilder, ToolCallResponse
from mistralrs_sdk.chat.responses import (
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    Choice,
    ChunkChoice,
    Delta,
    ResponseMessage,
    Usage,
)


@attrs.frozen
class Say:
    """One answer: its text, its calls as (name, arguments), and why it ends."""

    text: str = ""
    calls: Sequence[tuple[str, str]] = ()
    finish_reason: str | None = None
    error: BaseException | None = None
    """Raised after the text."""
    waits: asyncio.Event | None = None
    """Waited for before the text."""


class ScriptedStream:
    """What a `ChatStream` offers, over a `Say`; each character of the text is a chunk."""

    def __init__(self, say: Say, id: str) -> None:
        self.id = id
        self.closed = False
        self._say = say
        self._calls = tuple(
            ToolCallResponse(index=n, id=f"{id}-call-{n}", function=CalledFunction(*call))
            for n, call in enumerate(say.calls)
        )
        self._chunks = self._make()

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> ChatCompletionChunkResponse:
        return await anext(self._chunks)

    async def collect(self) -> ChatCompletionResponse:
        async for _ in self._chunks:
            pass
        return self.response()

    async def aclose(self) -> None:
        self.closed = True

    async def __aenter__(self) -> ScriptedStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def response(self) -> ChatCompletionResponse:
        message = ResponseMessage(content=self._say.text, tool_calls=self._calls or None)
        reason = "canceled" if self.closed else self._reason
        choice = Choice(index=0, message=message, finish_reason=reason)
        return ChatCompletionResponse(
            id=self.id, choices=(choice,), created=0, model="scripted", usage=self._usage
        )

    @property
    def _reason(self) -> str:
        return self._say.finish_reason or ("tool_calls" if self._calls else "stop")

    @property
    def _usage(self) -> Usage:
        return Usage.measure(
            prompt_tokens=10, completion_tokens=5, prompt_time=1.0, completion_time=0.5
        )

    async def _make(self):
        if self._say.waits is not None:
            await self._say.waits.wait()
        for char in self._say.text:
            yield self._chunk(Delta(content=char))
        if self._say.error is not None:
            raise self._say.error
        for call in self._calls:
            yield self._chunk(Delta(tool_calls=(call,)))
        yield self._chunk(Delta(content=""), finish_reason=self._reason, usage=self._usage)

    def _chunk(
        self, delta: Delta, *, finish_reason: str | None = None, usage: Usage | None = None
    ) -> ChatCompletionChunkResponse:
        choice = ChunkChoice(index=0, delta=delta, finish_reason=finish_reason)
        return ChatCompletionChunkResponse(
            id=self.id, choices=(choice,), created=0, model="scripted", usage=usage
        )


class Rounds:
    """A `stream_round` that answers from a script and keeps what it was asked."""

    def __init__(self, *script: Say | Callable[[RequestBuilder], Say]) -> None:
        self._script = list(script)
        self.asked: list[RequestBuilder] = []
        self.streams: list[Any] = []

    async def __call__(self, asked: RequestBuilder) -> Any:
        self.asked.append(asked)
        say = self._script[len(self.asked) - 1]
        stream = ScriptedStream(say(asked) if callable(say) else say, f"chat-{len(self.asked)}")
        self.streams.append(stream)
        return stream
