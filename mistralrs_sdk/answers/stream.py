"""What `stream_chat_request` gives: chunks of an answer, as they come."""

from __future__ import annotations

from collections import deque
from typing import Self

import attrs

from mistralrs_sdk.answers.generation import ChoiceDelta, Generation
from mistralrs_sdk.answers.leaving import ClosedOnLeaving
from mistralrs_sdk.chat.incoming_text import parse_json
from mistralrs_sdk.chat.responses import (
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    Choice,
    ChunkChoice,
    Delta,
    Logprobs,
    ResponseLogprob,
    ResponseMessage,
)
from mistralrs_sdk.chat.tools import ToolCallResponse, joined_calls
from mistralrs_sdk.errors import InferenceError


@attrs.define
class _Answer:
    """One choice as far as it has come."""

    texts: list[str] = attrs.field(factory=list)
    thoughts: list[str] = attrs.field(factory=list)
    call_pieces: list[ToolCallResponse] = attrs.field(factory=list)
    withdrawn: set[int] = attrs.field(factory=set)
    unparsed_tool_call: bool = False
    logprobs: list[ResponseLogprob] = attrs.field(factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.texts.append(delta.text)
        self.thoughts.append(delta.reasoning)
        self.call_pieces += delta.tool_calls
        self.withdrawn.update(delta.withdrawn_tool_calls)
        self.unparsed_tool_call |= delta.unparsed_tool_call
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    def message(self) -> ResponseMessage:
        content, reasoning = "".join(self.texts), "".join(self.thoughts)
        calls = self._calls()
        return ResponseMessage(
            content=None if calls and not content else content,
            tool_calls=calls or None,
            reasoning_content=reasoning or None,
        )

    def _calls(self) -> tuple[ToolCallResponse, ...]:
        calls = joined_calls(self.call_pieces, self.withdrawn)
        if self.finish_reason is None:  # left before its end, maybe in the middle of a call
            calls = tuple(call for call in calls if parse_json(call.function.arguments) is not None)
        return tuple(attrs.evolve(call, index=place) for place, call in enumerate(calls))


class ChatStream(ClosedOnLeaving):
    """The chunks of one answer: `async for chunk in stream`.

    Use it as a context manager (`async with await model.stream_chat_request(...) as stream`), so
    that leaving early aborts the request at once; a stream that is dropped aborts it too. Each
    chunk holds what one step added to one choice; the last one carries the usage.
    """

    def __init__(
        self, generation: Generation, *, id: str, created: int, model: str, logprobs: bool
    ) -> None:
        self.id = id
        """The response's id: `model.abort(id)` ends it from anywhere."""
        self._generation = generation
        self._created = created
        self._model = model
        self._reports_logprobs = logprobs
        self._closed_early = False
        self._waiting: deque[ChoiceDelta] = deque()
        self._answers: dict[int, _Answer] = {}
        self._begun: set[int] = set()
        """Choices of which a chunk was read: the first one says who speaks, as in OpenAI's API."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChatCompletionChunkResponse:
        """Return the next chunk.

        Raises:
            InferenceError: the request failed; `partial_response` holds what had come.
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        if not self._waiting:
            self._waiting += await self._take()
        if not self._waiting:
            raise StopAsyncIteration
        delta = self._waiting.popleft()
        last = self._generation.finished and not self._waiting
        role = None if delta.index in self._begun else "assistant"
        self._begun.add(delta.index)
        return ChatCompletionChunkResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=(
                ChunkChoice(
                    index=delta.index,
                    delta=_message_delta(delta, role),
                    logprobs=self._logprobs(delta.logprobs),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                    unparsed_tool_call=delta.unparsed_tool_call,
                    withdrawn_tool_calls=delta.withdrawn_tool_calls,
                ),
            ),
            usage=self._generation.usage if last else None,
            adapter_generation=self._generation.adapter_generation,
        )

    async def collect(self) -> ChatCompletionResponse:
        """Read to the end and return the whole answer, what was read before included.

        Raises:
            InferenceError, EngineDeadError, EngineClosedError: as iterating does.
        """
        while await self._take():
            pass
        self._waiting.clear()
        return self._response()

    async def aclose(self) -> None:
        """Abort the request if it still runs."""
        self._closed_early = not self._generation.finished
        self._waiting.clear()
        self._generation.close()

    async def _take(self) -> list[ChoiceDelta]:
        try:
            deltas = await self._generation.take()
        except InferenceError as error:
            error.partial_response = self._response()
            raise
        for delta in deltas:
            answer = self._answers.get(delta.index)
            if answer is None:
                answer = self._answers[delta.index] = _Answer()
            answer.add(delta)
        return deltas

    def _response(self) -> ChatCompletionResponse:
        unfinished = "canceled" if self._closed_early else "error"
        return ChatCompletionResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=tuple(
                Choice(
                    index=index,
                    message=answer.message(),
                    logprobs=self._logprobs(answer.logprobs),
                    finish_reason=answer.finish_reason or unfinished,
                    stop_reason=answer.stop_reason,
                    unparsed_tool_call=answer.unparsed_tool_call,
                )
                for index, answer in sorted(self._answers.items())
            ),
            usage=self._generation.usage,
            adapter_generation=self._generation.adapter_generation,
        )

    def _logprobs(
        self, entries: tuple[ResponseLogprob, ...] | list[ResponseLogprob]
    ) -> Logprobs | None:
        return Logprobs(content=tuple(entries)) if self._reports_logprobs else None


def _message_delta(delta: ChoiceDelta, role: str | None) -> Delta:
    beside = delta.reasoning or delta.tool_calls
    return Delta(
        role=role,
        content=None if beside and not delta.text else delta.text,
        tool_calls=delta.tool_calls or None,
        reasoning_content=delta.reasoning or None,
    )
