"""Answers of the Responses API: chunks of a chat become items, and events that tell of them."""

from __future__ import annotations

import time
from typing import Any, Literal

from mistralrs_sdk import (
    ChatCompletionChunkResponse,
    QueueFullError,
    RequestError,
    ToolCallResponse,
    Usage,
)
from mistralrs_sdk.server.errors import as_http_error
from mistralrs_sdk.server.translation import Event, call_arguments, new_id

_Kind = Literal["message", "reasoning", "function_call"]


class ResponseAnswer:
    """One response as it comes; whole, streamed and background answers are made by it alike.

    `response` is the response so far: the items that are complete, and why it ended. Each method
    returns the events it makes, in order, for who streams them.
    """

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self.usage: Usage | None = None
        self.error: Exception | None = None
        """Why it failed."""
        self.characters = 0
        """How much it holds, roughly."""
        self._number = 0
        self._kind: _Kind | None = None
        self._item_id = ""
        self._num_items = 0
        """Those that were begun and ended; some may not have been kept."""
        self._call: ToolCallResponse | None = None
        """Whose item is open, or the last one was."""
        self._call_items: dict[int, dict[str, Any]] = {}
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._held: list[dict[str, Any]] = []
        """Of tokens whose text has not come yet: it may be a part of a call as well."""
        self._finish_reason: str | None = None

    @property
    def reasoning(self) -> str:
        """All that was thought so far."""
        return "".join(self._thoughts)

    def start(self) -> list[Event]:
        """Tell that it runs."""
        self.response["status"] = "in_progress"
        return [self._told("response.created"), self._told("response.in_progress")]

    def add(self, chunk: ChatCompletionChunkResponse) -> list[Event]:
        """Take what one step of the model added."""
        events: list[Event] = []
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            delta = choice.delta
            events += self._withdraw(choice.withdrawn_tool_calls)
            self.characters += len(delta.reasoning_content or "") + len(delta.content or "")
            held = _token_logprobs(choice.logprobs)
            self.characters += sum(300 + 300 * len(each["top_logprobs"]) for each in held)
            self._held += held
            if delta.reasoning_content:
                events += self._open("reasoning")
                self._thoughts.append(delta.reasoning_content)
                events.append(self._grow("response.reasoning_text.delta", delta.reasoning_content))
            if delta.content:
                events += self._open("message")
                self._logprobs += self._held
                events.append(
                    self._grow("response.output_text.delta", delta.content, logprobs=self._held)
                )
            for call in delta.tool_calls or ():
                self.characters += len(call.function.arguments)
                events += self._grow_call(call)
            if delta.reasoning_content or delta.content or delta.tool_calls:
                self._held = []
            self._finish_reason = choice.finish_reason or self._finish_reason
        return events

    def finish(self, *, reasoning_tokens: int) -> list[Event]:
        """End it as the last chunk says."""
        reason = self._finish_reason
        said = any(item["type"] != "reasoning" for item in self.response["output"])
        events: list[Event] = []
        if reason == "stop" and not said and self._kind != "message":
            events += self._open("message")  # clients expect one, be it empty
        events += self._close("completed" if reason in ("stop", "tool_calls") else "incomplete")
        self.response["usage"] = _usage(self.usage, reasoning_tokens)
        if reason == "length":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
            return [*events, self._ended("incomplete", "response.incomplete")]
        if reason == "canceled":
            return [*events, self._ended("cancelled", "response.incomplete")]
        return [*events, self._ended("completed", "response.completed")]

    def fail(self, exc: Exception) -> list[Event]:
        """End it with an error."""
        self.error = exc
        self._close("incomplete")
        error = as_http_error(exc)
        code = "server_error"
        if isinstance(exc, RequestError):
            code = "invalid_prompt"
        elif isinstance(exc, QueueFullError):
            code = "rate_limit_exceeded"
        elif error.status == 504 and error.code is not None:
            code = error.code
        self.response["error"] = {"code": code, "message": error.message}
        return [self._ended("failed", "response.failed")]

    def cancel(self) -> None:
        """End it because somebody wants no more of it."""
        self._close("incomplete")
        self._ended("cancelled", "response.incomplete")

    def _open(self, kind: _Kind) -> list[Event]:
        if self._kind == kind:
            return []
        events = self._close("completed")
        self._kind = kind
        self._item_id = new_id("msg" if kind == "message" else "rs")
        part = _part(kind, "", [])
        return [
            *events,
            self._event("response.output_item.added", item=self._item("in_progress", [])),
            self._event("response.content_part.added", **self._here(), part=part),
        ]

    def _grow(self, type: str, delta: str, **more: Any) -> Event:
        self._texts.append(delta)
        return self._event(type, **self._here(), delta=delta, **more)

    def _close(self, status: str) -> list[Event]:
        kind = self._kind
        if kind is None:
            return []
        full = "".join(self._texts)
        if kind == "function_call":
            return self._close_call(full)
        part = _part(kind, full, self._logprobs)
        item = self._item(status, [part])
        more = {"logprobs": self._logprobs} if kind == "message" else {}
        done = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
        events = [
            self._event(done, **self._here(), text=full, **more),
            self._event("response.content_part.done", **self._here(), part=part),
            self._event("response.output_item.done", item=item),
        ]
        self.response["output"].append(item)
        self._end_item()
        return events

    def _grow_call(self, call: ToolCallResponse) -> list[Event]:
        events: list[Event] = []
        if not call.continues:
            events += self._close("completed")
            self._kind, self._call, self._item_id = "function_call", call, new_id("fc")
            item = self._call_item(call, "in_progress", "")
            events.append(self._event("response.output_item.added", item=item))
        arguments = call.function.arguments
        self._texts.append(arguments)
        grown = "response.function_call_arguments.delta"
        return [*events, self._event(grown, item_id=self._item_id, delta=arguments)]

    def _close_call(self, arguments: str) -> list[Event]:
        call = self._call
        assert call is not None, "a call is open"
        if call_arguments(arguments) is None:  # left in the middle, or none: not to be executed
            return [self._drop_call(call)]
        done = self._call_item(call, "completed", arguments)
        whole = {"name": call.function.name, "arguments": arguments}
        events = [
            self._event("response.function_call_arguments.done", item_id=self._item_id, **whole),
            self._event("response.output_item.done", item=done),
        ]
        self.response["output"].append(done)
        self._call_items[call.index] = done
        self._end_item()
        return events

    def _call_item(self, call: ToolCallResponse, status: str, arguments: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "function_call",
            "status": status,
            "call_id": call.id,
            "name": call.function.name,
            "arguments": arguments,
        }

    def _withdraw(self, indices: tuple[int, ...]) -> list[Event]:
        """End and forget the items of calls that are none; their text comes as a message."""
        events: list[Event] = []
        call = self._call
        if self._kind == "function_call" and call is not None and call.index in indices:
            events.append(self._drop_call(call))
        for index in indices:
            item = self._call_items.pop(index, None)
            if item is not None:
                self.response["output"].remove(item)
        return events

    def _drop_call(self, call: ToolCallResponse) -> Event:
        """End the item of a call that is open, without keeping it."""
        item = self._call_item(call, "incomplete", "".join(self._texts))
        event = self._event("response.output_item.done", item=item)
        self._end_item()
        return event

    def _end_item(self) -> None:
        self._kind, self._texts, self._logprobs = None, [], []
        self._num_items += 1

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        item = {"id": self._item_id, "type": self._kind, "status": status, "content": content}
        return {**item, **({"role": "assistant"} if self._kind == "message" else {"summary": []})}

    def _here(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "content_index": 0}

    def _event(self, type: str, **fields: Any) -> Event:
        event = {"output_index": self._num_items, **fields}
        return {"type": type, "sequence_number": self._next_number(), **event}

    def _ended(self, status: str, type: str) -> Event:
        self.response["status"] = status
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        return self._told(type)

    def _told(self, type: str) -> Event:
        response = {**self.response, "output": list(self.response["output"])}
        return {"type": type, "sequence_number": self._next_number(), "response": response}

    def _next_number(self) -> int:
        self._number += 1
        return self._number - 1


def _part(kind: _Kind, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _token_logprobs(logprobs: Any) -> list[dict[str, Any]]:
    """Entries of a chunk as this API has them: bytes are never null, ids are left out."""
    if logprobs is None:
        return []
    entries = [entry.to_dict() for entry in logprobs.content or ()]
    return [
        {**_entry(entry), "top_logprobs": [_entry(top) for top in entry["top_logprobs"]]}
        for entry in entries
    ]


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "token": entry["token"],
        "bytes": entry["bytes"] or [],
        "logprob": entry["logprob"],
    }


def _usage(usage: Usage | None, reasoning_tokens: int) -> dict[str, Any] | None:
    if usage is None:
        return None
    cached = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": min(reasoning_tokens, usage.completion_tokens)
        },
        "total_tokens": usage.total_tokens,
    }
