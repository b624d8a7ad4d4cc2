"""Answers of Anthropic's Messages API: chunks of a chat become blocks, and events about them."""

from __future__ import annotations

from typing import Any, Literal

from mistralrs_sdk import ChatCompletionChunkResponse, ToolCallResponse, Usage
from mistralrs_sdk.server.errors import HttpError
from mistralrs_sdk.server.translation import Event, call_arguments, new_id

_Kind = Literal["text", "thinking", "tool_use"]


class MessageAnswer:
    """One message as it comes; whole and streamed answers are made by it alike.

    `message` is the message so far: the blocks that are complete, and why it ended. Each method
    returns the events it makes, in order, for who streams them.
    """

    def __init__(self, *, model: str, max_tokens: int | None) -> None:
        self.message: dict[str, Any] = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        self._max_tokens = max_tokens
        self._kind: _Kind | None = None
        self._texts: list[str] = []
        self._num_blocks = 0
        """Those that were begun and ended; some may not have been kept."""
        self._call: ToolCallResponse | None = None
        """Whose block is open, or the last one was."""
        self._call_blocks: dict[int, dict[str, Any]] = {}
        self._thoughts: list[str] = []
        self._usage: Usage | None = None
        self._finish_reason: str | None = None
        self._stopped_by: str | int | None = None

    @property
    def thinking(self) -> str:
        """All that was thought so far."""
        return "".join(self._thoughts)

    def start(self) -> list[Event]:
        """Tell that it begins; tokens are counted in the end."""
        return [{"type": "message_start", "message": {**self.message, "content": []}}]

    def add(self, chunk: ChatCompletionChunkResponse) -> list[Event]:
        """Take what one step of the model added."""
        events: list[Event] = []
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            delta = choice.delta
            events += self._withdraw(choice.withdrawn_tool_calls)
            if delta.reasoning_content:
                self._thoughts.append(delta.reasoning_content)
                events += self._grow("thinking", delta.reasoning_content)
            if delta.content:
                events += self._grow("text", delta.content)
            for call in delta.tool_calls or ():
                events += self._grow_call(call)
            if choice.finish_reason is not None:
                self._finish_reason = choice.finish_reason
                self._stopped_by = choice.stop_reason
        return events

    def finish(self, *, thinking_tokens: int) -> list[Event]:
        """End it as the last chunk says.

        Raises:
            HttpError: it was ended by somebody else than the client.
        """
        if self._finish_reason == "canceled":
            raise HttpError(500, "the answer was ended by the server", code="canceled")
        events = self._close()
        if self._usage is not None:
            self.message["usage"] = _usage(self._usage, thinking_tokens)
        self.message["stop_reason"] = reason = self._stop_reason()
        if reason == "stop_sequence":
            self.message["stop_sequence"] = self._stopped_by
        delta = {key: self.message[key] for key in ("stop_reason", "stop_sequence")}
        return [
            *events,
            {"type": "message_delta", "delta": delta, "usage": self.message["usage"]},
            {"type": "message_stop"},
        ]

    def _stop_reason(self) -> str:
        match self._finish_reason:
            case "tool_calls":
                return "tool_use"
            case "length":
                used = 0 if self._usage is None else self._usage.completion_tokens
                full = self._max_tokens is None or used < self._max_tokens
                return "model_context_window_exceeded" if full else "max_tokens"
            case _:
                return "stop_sequence" if isinstance(self._stopped_by, str) else "end_turn"

    def _grow(self, kind: _Kind, delta: str) -> list[Event]:
        events: list[Event] = []
        if self._kind != kind:
            events += self._close()
            self._kind = kind
            events.append(self._event("content_block_start", content_block=_block(kind, "")))
        self._texts.append(delta)
        grown = {"type": f"{kind}_delta", kind: delta}
        return [*events, self._event("content_block_delta", delta=grown)]

    def _grow_call(self, call: ToolCallResponse) -> list[Event]:
        events: list[Event] = []
        if not call.continues:
            events += self._close()
            self._kind, self._call = "tool_use", call
            block = _call_block(call, {})
            events.append(self._event("content_block_start", content_block=block))
        self._texts.append(call.function.arguments)
        grown = {"type": "input_json_delta", "partial_json": call.function.arguments}
        return [*events, self._event("content_block_delta", delta=grown)]

    def _withdraw(self, indices: tuple[int, ...]) -> list[Event]:
        """End and forget the blocks of calls that are none; their text comes as text."""
        events: list[Event] = []
        if self._kind == "tool_use" and self._call is not None and self._call.index in indices:
            events.append(self._end_block())
        for index in indices:
            block = self._call_blocks.pop(index, None)
            if block is not None:
                self.message["content"].remove(block)
        return events

    def _close(self) -> list[Event]:
        """End the block that is open, and keep it unless it is a call whose arguments are none."""
        if self._kind is None:
            return []
        full = "".join(self._texts)
        if self._kind == "tool_use" and self._call is not None:
            arguments = call_arguments(full)
            if arguments is None:  # it will be withdrawn
                return [self._end_block()]
            block = _call_block(self._call, arguments)
            self._call_blocks[self._call.index] = block
        else:
            block = _block(self._kind, full)
            kept = self.message["content"]
            if kept and kept[-1]["type"] == self._kind == "text":  # a call between was none
                block = _block("text", kept.pop()["text"] + full)
        self.message["content"].append(block)
        return [self._end_block()]

    def _end_block(self) -> Event:
        event = self._event("content_block_stop")
        self._kind, self._texts = None, []
        self._num_blocks += 1
        return event

    def _event(self, type: str, **fields: Any) -> Event:
        return {"type": type, "index": self._num_blocks, **fields}


def _call_block(call: ToolCallResponse, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.function.name, "input": arguments}


def _block(kind: _Kind, content: str) -> dict[str, Any]:
    block = {"type": kind, kind: content}
    # thinking may be sent back as it is: there is nothing that would have to be verified
    return {**block, "signature": ""} if kind == "thinking" else block


def _usage(usage: Usage, thinking_tokens: int) -> dict[str, Any]:
    """The counts; as in this API, input that was cached is not among the input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": min(thinking_tokens, usage.completion_tokens)},
    }
