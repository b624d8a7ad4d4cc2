"""Text completions: a raw prompt continued, whole or in chunks, with echo and best-of."""

from __future__ import annotations

import math
from typing import Self

import attrs

from mistralrs_sdk.answers.leaving import ClosedOnLeaving
from mistralrs_sdk.answers.stream import ChatStream
from mistralrs_sdk.chat.requests import RequestBuilder
from mistralrs_sdk.chat.responses import (
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    Choice,
    CompletionChoice,
    CompletionChunkChoice,
    CompletionChunkResponse,
    CompletionResponse,
    Logprobs,
    ResponseLogprob,
)
from mistralrs_sdk.errors import InferenceError, RequestError
from mistralrs_sdk.sampling_params import SamplingParams

_CHAT_ONLY = (
    "messages",
    "thinking",
    "reasoning_effort",
    "chat_template_kwargs",
    "tools",
    "tool_choice",
    "max_tool_rounds",
    "session_id",
    "tool_dispatch_url",
    "agent_approval_callback",
    "execution",
)
"""Fields of a request that a raw prompt has no use for."""


@attrs.frozen(kw_only=True)
class Echo:
    """The prompt, to stand before each text."""

    text: str
    logprobs: tuple[ResponseLogprob, ...] = ()


def completion_settings(asked: RequestBuilder | SamplingParams | None) -> RequestBuilder:
    """Return what a completion is asked with; None is greedy.

    Raises:
        RequestError: something is set that only a chat can use.
    """
    if asked is None:
        return RequestBuilder()
    if isinstance(asked, SamplingParams):
        return RequestBuilder().set_sampling(asked)
    unset = RequestBuilder()
    for name in _CHAT_ONLY:
        if getattr(asked, name) != getattr(unset, name):
            raise RequestError(
                f"{name} ({getattr(asked, name)!r:.80}) has no effect on a raw prompt: "
                "leave it out, or send a chat request"
            )
    return asked


def sampled_best_of(asked: RequestBuilder, best_of: int | None) -> RequestBuilder:
    """Return the request that makes `best_of` answers for `n_choices` of them to be returned.

    Raises:
        RequestError: `best_of` is smaller than `n_choices`, or over 128.
    """
    wanted = asked.sampling.n_choices
    if best_of is None or best_of == wanted:
        return asked
    if isinstance(best_of, bool) or not isinstance(best_of, int) or best_of < wanted:
        raise RequestError(
            f"best_of ({best_of!r}) must be a whole number, at least n_choices ({wanted})"
        )
    return asked.set_sampler_n_choices(best_of).return_logprobs(True)


class CompletionStream(ClosedOnLeaving):
    """The chunks of a text completion: `async for chunk in stream`.

    Leaving it early, as a context manager or by dropping it, aborts the request.
    """

    def __init__(
        self, stream: ChatStream, *, echo: Echo | None = None, logprobs: bool, keep: int
    ) -> None:
        """`echo` comes first in each choice; of all choices `collect` keeps the best `keep`."""
        self._stream = stream
        self._echo = echo
        self._reports_logprobs = logprobs
        self._keep = keep
        self._begun: set[int] = set()

    @property
    def id(self) -> str:
        """The response's id: `model.abort(id)` ends it from anywhere."""
        return self._stream.id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CompletionChunkResponse:
        """Return the next chunk.

        Raises:
            InferenceError: the request failed; `partial_response` holds what had come.
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        try:
            return self._chunk(await anext(self._stream))
        except InferenceError as error:
            raise self._with_partial(error) from error.__cause__

    async def collect(self) -> CompletionResponse:
        """Read to the end and return the whole completion, what was read before included.

        Raises:
            InferenceError, EngineDeadError, EngineClosedError: as iterating does.
        """
        try:
            return self._response(await self._stream.collect())
        except InferenceError as error:
            raise self._with_partial(error) from error.__cause__

    async def aclose(self) -> None:
        """Abort the request if it still runs."""
        await self._stream.aclose()

    def _chunk(self, chunk: ChatCompletionChunkResponse) -> CompletionChunkResponse:
        piece = chunk.choices[0]
        text, logprobs = piece.delta.content or "", piece.logprobs
        if self._echo is not None and piece.index not in self._begun:
            text, logprobs = _after(self._echo, text, logprobs)
        self._begun.add(piece.index)
        choice = CompletionChunkChoice(
            index=piece.index,
            text=text,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        return CompletionChunkResponse(
            id=chunk.id,
            created=chunk.created,
            model=chunk.model,
            choices=(choice,),
            usage=chunk.usage,
        )

    def _with_partial(self, error: InferenceError) -> InferenceError:
        if isinstance(error.partial_response, ChatCompletionResponse):
            error.partial_response = self._response(error.partial_response)
        return error

    def _response(self, answer: ChatCompletionResponse) -> CompletionResponse:
        chosen = answer.choices
        if len(chosen) > self._keep:
            chosen = sorted(chosen, key=_mean_logprob, reverse=True)[: self._keep]
        return CompletionResponse(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            choices=tuple(self._choice(index, choice) for index, choice in enumerate(chosen)),
            usage=answer.usage,
        )

    def _choice(self, index: int, choice: Choice) -> CompletionChoice:
        text = choice.message.content or ""
        logprobs = choice.logprobs if self._reports_logprobs else None
        if self._echo is not None:
            text, logprobs = _after(self._echo, text, logprobs)
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )


def _after(echo: Echo, text: str, logprobs: Logprobs | None) -> tuple[str, Logprobs | None]:
    if logprobs is not None:
        logprobs = Logprobs(content=(*echo.logprobs, *(logprobs.content or ())))
    return echo.text + text, logprobs


def _mean_logprob(choice: Choice) -> float:
    entries = (choice.logprobs.content if choice.logprobs else None) or ()
    if not entries:
        return -math.inf
    return sum(entry.logprob for entry in entries) / len(entries)
