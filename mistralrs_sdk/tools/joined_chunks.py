"""`JoinedChunks`: the chunks of several rounds as those of one answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs

from mistralrs_sdk.chat.responses import (
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    ChunkChoice,
    Delta,
)
from mistralrs_sdk.chat.tool_progress import AgenticToolCallProgress
from mistralrs_sdk.tools.rounds import CallFilter

StreamItem = ChatCompletionChunkResponse | AgenticToolCallProgress
"""What a stream gives: chunks of answers, and between them what tools do."""


class JoinedChunks:
    """What is ready to be read, and what must wait for the end of its round."""

    def __init__(self, id: str, *, is_hidden: Callable[[str], bool]) -> None:
        """`id` is that of all chunks; calls of hidden tools are not shown."""
        self.ready: deque[StreamItem] = deque()
        self._id = id
        self._calls = CallFilter(is_hidden)
        self._last: ChatCompletionChunkResponse | None = None
        """The round's last chunk, which may be the answer's."""
        self._has_begun = False

    def begin_round(self, is_hidden: Callable[[str], bool]) -> None:
        """What comes now belongs to the next round."""
        self._calls = CallFilter(is_hidden)
        self._last = None

    def show(self, chunk: ChatCompletionChunkResponse) -> None:
        """Pass a chunk on, without what only the end can tell and without hidden calls."""
        choice = chunk.choices[0]
        choice = attrs.evolve(
            choice,
            delta=attrs.evolve(choice.delta, tool_calls=self._calls.shown(choice.delta.tool_calls)),
            withdrawn_tool_calls=self._calls.withdrawn(choice.withdrawn_tool_calls),
        )
        chunk = attrs.evolve(chunk, id=self._id, choices=(choice,), usage=None)
        if choice.finish_reason is not None:
            self._last = chunk
        elif _says_something(chunk):
            self._give(chunk)

    def show_hidden(self, response: ChatCompletionResponse) -> None:
        """Show the calls of a round that were kept back to be executed and are not."""
        rest = self._calls.rest(response.choices[0].message.tool_calls)
        if rest is not None and self._last is not None:
            choice = self._last.choices[0]
            delta = attrs.evolve(choice.delta, tool_calls=(choice.delta.tool_calls or ()) + rest)
            self._last = attrs.evolve(self._last, choices=(attrs.evolve(choice, delta=delta),))

    def show_last(self) -> None:
        """Pass on what the round's last chunk says, as more will follow; keep its end."""
        if self._last is None:
            return
        if _says_something(self._last):
            choice = attrs.evolve(self._last.choices[0], finish_reason=None, stop_reason=None)
            self._give(attrs.evolve(self._last, choices=(choice,)))
        self._last = attrs.evolve(self._last, choices=(ChunkChoice(index=0, delta=Delta()),))

    def end(self, answer: ChatCompletionResponse) -> None:
        """Pass on the last chunk, with how the whole answer ended and what it used."""
        if self._last is None:
            return
        choice = attrs.evolve(
            self._last.choices[0],
            finish_reason=answer.choices[0].finish_reason,
            stop_reason=answer.choices[0].stop_reason,
        )
        self._give(
            attrs.evolve(
                self._last, choices=(choice,), usage=answer.usage, session_id=answer.session_id
            )
        )

    def _give(self, chunk: ChatCompletionChunkResponse) -> None:
        """Make it ready; as all rounds are one message, only the first chunk says who speaks."""
        choice = chunk.choices[0]
        delta = attrs.evolve(choice.delta, role=None if self._has_begun else "assistant")
        self.ready.append(attrs.evolve(chunk, choices=(attrs.evolve(choice, delta=delta),)))
        self._has_begun = True


def _says_something(chunk: ChatCompletionChunkResponse) -> bool:
    """Whether a reader loses anything without this chunk."""
    choice = chunk.choices[0]
    delta = choice.delta
    said = delta.content or delta.reasoning_content or delta.tool_calls
    return bool(said or choice.withdrawn_tool_calls or choice.logprobs)
