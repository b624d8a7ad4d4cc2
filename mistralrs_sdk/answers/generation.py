"""One request while it runs, on the event loop's side: token ids in, pieces of text out."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from tokenizers import Tokenizer

from mistralrs_sdk.chat.answer_parser import AnswerDelta, AnswerParser
from mistralrs_sdk.chat.chat_text import ChatPrompt
from mistralrs_sdk.chat.detokenizer import Detokenizer
from mistralrs_sdk.chat.responses import ResponseLogprob, Usage
from mistralrs_sdk.chat.template_parser import TemplateParser
from mistralrs_sdk.chat.token_logprobs import response_logprobs
from mistralrs_sdk.chat.tools import ToolCallResponse
from mistralrs_sdk.engine.engine_thread import EngineThread, RequestStream
from mistralrs_sdk.engine.request import DEADLINE_PASSED, Request, RequestOutput
from mistralrs_sdk.errors import DeadlineError, InferenceError


@attrs.frozen(kw_only=True)
class ChoiceDelta:
    """What one step added to one choice."""

    index: int
    text: str
    """Content: what is neither reasoning nor a call."""
    reasoning: str = ""
    tool_calls: tuple[ToolCallResponse, ...] = ()
    withdrawn_tool_calls: tuple[int, ...] = ()
    """Indices of calls of earlier deltas that are none."""
    unparsed_tool_call: bool = False
    """Whether the text holds what began like a call and is none."""
    logprobs: tuple[ResponseLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string, or the stop id the request named, that ended the choice."""


@attrs.define
class _Choice:
    detokenizer: Detokenizer
    parser: AnswerParser | TemplateParser | None
    num_tokens: int = 0
    finished: bool = False
    prompt_time: float = 0.0
    completion_time: float = 0.0


class Generation:
    """The running request: pieces of text per choice, and at the end what it used.

    Dropped before its end, in whatever way, it aborts the request.
    """

    def __init__(
        self,
        thread: EngineThread,
        stream: RequestStream,
        request: Request,
        tokenizer: Tokenizer,
        *,
        chat: ChatPrompt | None = None,
    ) -> None:
        """`chat` says how answers are read; without it all text is content."""
        self._thread = thread
        self._stream = stream
        self._request = request
        self._tokenizer = tokenizer
        stop = request.sampling.stop_toks
        self._stop_seqs = stop.seqs if stop else ()
        self._named_stop_ids = frozenset(stop.ids if stop else ())
        self._cached_tokens = 0
        self._failure: InferenceError | None = None
        self._choices = [
            _Choice(
                Detokenizer(
                    tokenizer,
                    stop_seqs=self._stop_seqs,
                    include_stop=request.sampling.include_stop,
                    keep=frozenset() if chat is None else chat.keep,
                ),
                None if chat is None else chat.new_parser(),
            )
            for _ in range(request.sampling.n_choices)
        ]
        self._num_open = len(self._choices)

    @property
    def finished(self) -> bool:
        return not self._num_open

    @property
    def adapter_generation(self) -> str | None:
        """The weights of the adapter that answers; None for the base model."""
        adapter = self._request.adapter
        return None if adapter is None else adapter.generation

    @property
    def usage(self) -> Usage:
        """Tokens and times so far; the prompt counts once, whatever the number of choices."""
        return Usage.measure(
            prompt_tokens=len(self._request.prompt_ids),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=self._cached_tokens,
            prompt_time=max(choice.prompt_time for choice in self._choices),
            completion_time=max(choice.completion_time for choice in self._choices),
        )

    async def take(self) -> list[ChoiceDelta]:
        """Wait for the next step's deltas; empty when every choice has ended.

        Raises:
            InferenceError: the request failed; all that came before was returned.
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        while not self.finished:
            if self._failure is not None:
                self.close()
                raise self._failure
            outputs = await self._stream.take()
            if not outputs:  # closed
                return []
            deltas = [delta for output in outputs if (delta := self._absorb(output)) is not None]
            if self.finished:
                self.close()
            if deltas:
                return deltas
        return []

    def close(self) -> None:
        """Abort what still runs."""
        self._stream.close()

    def __del__(self) -> None:
        if not self.finished:
            self._thread.forget_soon(self._request.id)

    def _absorb(self, output: RequestOutput) -> ChoiceDelta | None:
        choice = self._choices[output.choice]
        if choice.finished:
            return None  # what the engine did before it heard of the stop string
        finish_reason: str | None = output.finish_reason
        if finish_reason == "error":
            self._failure = failure_of(output)
            finish_reason = None  # the error is raised once everything before it was taken
        if output.choice == 0:
            self._cached_tokens = output.cached_tokens
        choice.prompt_time = output.prompt_time
        choice.completion_time = output.completion_time
        ended_by_id = output.finish_reason == "stop"
        ids = output.token_ids[:-1] if ended_by_id else output.token_ids
        text, taken = self._feed(choice, ids)
        choice.num_tokens += taken
        stop_reason: str | int | None = None
        if choice.detokenizer.stopped is None and finish_reason is not None:
            text += choice.detokenizer.finish()
            if ended_by_id:
                # an answer that a constraint completes with its last token has no room for an end
                choice.num_tokens = min(choice.num_tokens + 1, self._request.max_tokens)
                if output.token_ids[-1] in self._named_stop_ids:
                    stop_reason = output.token_ids[-1]
        if choice.detokenizer.stopped is not None:
            stop_reason = choice.detokenizer.stopped
            if finish_reason is None:
                self._stream.abort_choice(output.choice)
            finish_reason = "stop"
        if finish_reason is not None:
            choice.finished = True
            self._num_open -= 1
        delta = _parse(choice, text, last=finish_reason is not None or self._failure is not None)
        if finish_reason == "stop" and choice.parser is not None and choice.parser.has_calls:
            finish_reason = "tool_calls"
        logprobs = response_logprobs(self._tokenizer, output.logprobs[:taken])
        if not (delta or logprobs or finish_reason):
            return None
        return ChoiceDelta(
            index=output.choice,
            text=delta.content,
            reasoning=delta.reasoning,
            tool_calls=delta.tool_calls,
            withdrawn_tool_calls=delta.withdrawn,
            unparsed_tool_call=delta.unparsed,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _feed(self, choice: _Choice, ids: Sequence[int]) -> tuple[str, int]:
        """Return the new text, and after how many tokens a stop string ended it (or all)."""
        if not self._stop_seqs:
            return choice.detokenizer.feed(ids), len(ids)
        text = ""
        for taken, token in enumerate(ids, start=1):
            text += choice.detokenizer.feed([token])
            if choice.detokenizer.stopped is not None:
                return text, taken
        return text, len(ids)


def failure_of(output: RequestOutput) -> InferenceError:
    """The error for an output that says why its request failed."""
    kind = DeadlineError if output.error == DEADLINE_PASSED else InferenceError
    return kind(f"the request failed: {output.error}")


def _parse(choice: _Choice, text: str, *, last: bool) -> AnswerDelta:
    if choice.parser is None:
        return AnswerDelta(content=text)
    delta = choice.parser.feed(text)
    if last:
        delta += choice.parser.finish()
    return delta
