"""What comes back: chat and text completions, whole or in chunks, and what they used."""

from __future__ import annotations

import math
from typing import Any

import attrs

from mistralrs_sdk.chat.tool_events import AgenticToolCallRecord
from mistralrs_sdk.chat.tools import ToolCallResponse
from mistralrs_sdk.engine.request import LOWEST_LOGPROB


@attrs.frozen(kw_only=True)
class Usage:
    """Tokens, seconds and tokens per second of one request; `measure` derives the rates."""

    completion_tokens: int
    prompt_tokens: int
    total_tokens: int
    avg_tok_per_sec: float
    avg_prompt_tok_per_sec: float
    avg_compl_tok_per_sec: float
    total_time_sec: float
    """Prompt and completion time together; waiting in the queue is not in it."""
    total_prompt_time_sec: float
    total_completion_time_sec: float
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""

    @classmethod
    def measure(
        cls,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int = 0,
        prompt_time: float,
        completion_time: float,
    ) -> Usage:
        """Add up and divide: each rate is tokens by their own seconds, 0 when those are 0."""
        total_tokens = prompt_tokens + completion_tokens
        total_time = prompt_time + completion_time
        return cls(
            completion_tokens=completion_tokens,
            prompt_tokens=prompt_tokens,
            total_tokens=total_tokens,
            avg_tok_per_sec=_rate(total_tokens, total_time),
            avg_prompt_tok_per_sec=_rate(prompt_tokens, prompt_time),
            avg_compl_tok_per_sec=_rate(completion_tokens, completion_time),
            total_time_sec=total_time,
            total_prompt_time_sec=prompt_time,
            total_completion_time_sec=completion_time,
            cached_tokens=cached_tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's usage object, with mistral.rs' times and rates beside it."""
        data = attrs.asdict(self)
        data["prompt_tokens_details"] = {"cached_tokens": data.pop("cached_tokens")}
        return data


@attrs.frozen(kw_only=True)
class TopLogprob:
    """One alternative at a position, with its natural log probability."""

    token: str
    token_id: int
    logprob: float
    bytes: bytes | None = None

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's entry of `top_logprobs`, with the token id beside it."""
        return {
            "token": self.token,
            "token_id": self.token_id,
            "logprob": _json_logprob(self.logprob),
            "bytes": None if self.bytes is None else list(self.bytes),
        }


@attrs.frozen(kw_only=True)
class ResponseLogprob:
    """One generated token with its natural log probability."""

    token: str
    logprob: float
    """NaN for the first token of an echoed prompt: nothing comes before it. Null in JSON."""
    bytes: bytes | None = None
    """The token's raw bytes: a character may be spread over several tokens."""
    top_logprobs: tuple[TopLogprob, ...] = attrs.field(default=(), converter=tuple)

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's entry of `logprobs.content`."""
        return {
            "token": self.token,
            "logprob": _json_logprob(self.logprob),
            "bytes": None if self.bytes is None else list(self.bytes),
            "top_logprobs": [top.to_dict() for top in self.top_logprobs],
        }


@attrs.frozen(kw_only=True)
class Logprobs:
    """Natural log probabilities of a choice, one entry per token."""

    content: tuple[ResponseLogprob, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(tuple)
    )

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's `logprobs` of a chat choice."""
        content = self.content
        return {"content": None if content is None else [entry.to_dict() for entry in content]}


@attrs.frozen(kw_only=True)
class ResponseMessage:
    """The answer of one choice."""

    content: str | None = None
    role: str = "assistant"
    tool_calls: tuple[ToolCallResponse, ...] | None = None
    reasoning_content: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's message; an empty content is null, the other fields are left out if unset."""
        return {"role": self.role, "content": self.content, **_extras(self)}


@attrs.frozen(kw_only=True)
class Choice:
    """One of the answers to a request."""

    finish_reason: str
    """stop, tool_calls, length, canceled or error."""
    index: int
    message: ResponseMessage
    logprobs: Logprobs | None = None
    stop_reason: str | int | None = None
    """The stop string or stop id that matched; None if the model ended by itself."""
    unparsed_tool_call: bool = False
    """Whether the content holds what began like a tool call and could not be read as one."""

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's choice; `stop_reason` and `unparsed_tool_call` only where there is one."""
        return {
            "index": self.index,
            "message": self.message.to_dict(),
            "logprobs": None if self.logprobs is None else self.logprobs.to_dict(),
            "finish_reason": self.finish_reason,
            **_given(
                stop_reason=self.stop_reason, unparsed_tool_call=self.unparsed_tool_call or None
            ),
        }


@attrs.frozen(kw_only=True)
class ChatCompletionResponse:
    """The whole answer to a chat request."""

    id: str
    choices: tuple[Choice, ...] = attrs.field(converter=tuple)
    created: int
    """Seconds since the epoch."""
    model: str
    system_fingerprint: str = "local"
    object: str = "chat.completion"
    usage: Usage
    agentic_tool_calls: tuple[AgenticToolCallRecord, ...] | None = None
    """The calls that were executed here; None if none could be."""
    session_id: str | None = None
    """The session that holds this answer now."""
    adapter_generation: str | None = None
    """The weights of the LoRA adapter that answered; None for the base model."""

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's `chat.completion` as plain JSON data."""
        calls = self.agentic_tool_calls
        return {
            **_envelope(self),
            "usage": self.usage.to_dict(),
            **_given(
                agentic_tool_calls=None if calls is None else [call.to_dict() for call in calls],
                session_id=self.session_id,
                adapter_generation=self.adapter_generation,
            ),
        }


@attrs.frozen(kw_only=True)
class Delta:
    """What a chunk adds to the message."""

    content: str | None = None
    role: str | None = "assistant"
    """In the first chunk of a choice; None in later ones."""
    tool_calls: tuple[ToolCallResponse, ...] | None = None
    """Calls, or pieces of them: those of one index join their arguments."""
    reasoning_content: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's delta: only what is set."""
        return {**_given(role=self.role, content=self.content), **_extras(self)}


@attrs.frozen(kw_only=True)
class ChunkChoice:
    """What a chunk adds to one choice."""

    finish_reason: str | None = None
    """Set on the choice's last chunk."""
    index: int
    delta: Delta
    logprobs: Logprobs | None = None
    """The chunk's tokens; there may be several, or none while text is held back."""
    stop_reason: str | int | None = None
    unparsed_tool_call: bool = False
    """Whether the chunk's content begins what looked like a tool call and is none."""
    withdrawn_tool_calls: tuple[int, ...] = ()
    """Indices of calls that began in earlier chunks and are none: drop what came of them."""

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's chunk choice; `finish_reason` is null until the end."""
        return {
            "index": self.index,
            "delta": self.delta.to_dict(),
            "logprobs": None if self.logprobs is None else self.logprobs.to_dict(),
            "finish_reason": self.finish_reason,
            **_given(
                stop_reason=self.stop_reason,
                unparsed_tool_call=self.unparsed_tool_call or None,
                withdrawn_tool_calls=list(self.withdrawn_tool_calls) or None,
            ),
        }


@attrs.frozen(kw_only=True)
class ChatCompletionChunkResponse:
    """One piece of a streamed chat answer."""

    id: str
    choices: tuple[ChunkChoice, ...] = attrs.field(converter=tuple)
    created: int
    model: str
    system_fingerprint: str = "local"
    object: str = "chat.completion.chunk"
    usage: Usage | None = None
    """On the last chunk only."""
    session_id: str | None = None
    """On the last chunk only: the session that holds this answer now."""
    adapter_generation: str | None = None
    """The weights of the LoRA adapter that answers; None for the base model."""

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's `chat.completion.chunk` as plain JSON data."""
        return {
            **_envelope(self),
            **({} if self.usage is None else {"usage": self.usage.to_dict()}),
            **_given(session_id=self.session_id, adapter_generation=self.adapter_generation),
        }


@attrs.frozen(kw_only=True)
class CompletionChoice:
    """One continuation of a text prompt."""

    finish_reason: str
    index: int
    text: str
    logprobs: Logprobs | None = None
    stop_reason: str | int | None = None

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's text choice; its `logprobs` are parallel lists."""
        return _text_choice(self)


@attrs.frozen(kw_only=True)
class CompletionChunkChoice:
    """What a chunk adds to one continuation."""

    finish_reason: str | None = None
    """Set on the choice's last chunk."""
    index: int
    text: str
    logprobs: Logprobs | None = None
    """The chunk's tokens; there may be several, or none while text is held back."""
    stop_reason: str | int | None = None

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's text choice; `text_offset` counts from the start of the chunk's tokens."""
        return _text_choice(self)


@attrs.frozen(kw_only=True)
class CompletionChunkResponse:
    """One piece of a streamed text completion."""

    id: str
    choices: tuple[CompletionChunkChoice, ...] = attrs.field(converter=tuple)
    created: int
    model: str
    system_fingerprint: str = "local"
    object: str = "text_completion"
    usage: Usage | None = None
    """On the last chunk only."""

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's `text_completion` chunk as plain JSON data."""
        return {
            **_envelope(self),
            **({} if self.usage is None else {"usage": self.usage.to_dict()}),
        }


@attrs.frozen(kw_only=True)
class CompletionResponse:
    """The whole answer to a text completion."""

    id: str
    choices: tuple[CompletionChoice, ...] = attrs.field(converter=tuple)
    created: int
    model: str
    system_fingerprint: str = "local"
    object: str = "text_completion"
    usage: Usage

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's `text_completion` as plain JSON data."""
        return {**_envelope(self), "usage": self.usage.to_dict()}


def _envelope(
    response: ChatCompletionResponse
    | ChatCompletionChunkResponse
    | CompletionResponse
    | CompletionChunkResponse,
) -> dict[str, Any]:
    return {
        "id": response.id,
        "object": response.object,
        "created": response.created,
        "model": response.model,
        "system_fingerprint": response.system_fingerprint,
        "choices": [choice.to_dict() for choice in response.choices],
    }


def _text_choice(choice: CompletionChoice | CompletionChunkChoice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None if choice.logprobs is None else _parallel_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
        **_given(stop_reason=choice.stop_reason),
    }


def _extras(message: ResponseMessage | Delta) -> dict[str, Any]:
    calls = message.tool_calls
    return _given(
        tool_calls=None if calls is None else [call.to_dict() for call in calls],
        reasoning_content=message.reasoning_content,
    )


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _parallel_logprobs(logprobs: Logprobs) -> dict[str, Any]:
    entries = logprobs.content or ()
    offsets, offset = [], 0
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [_json_logprob(entry.logprob) for entry in entries],
        "top_logprobs": [
            None
            if math.isnan(entry.logprob)
            else {top.token: _json_logprob(top.logprob) for top in entry.top_logprobs}
            for entry in entries
        ],
        "text_offset": offsets,
    }


def _json_logprob(logprob: float) -> float | None:
    return None if math.isnan(logprob) else max(logprob, LOWEST_LOGPROB)


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
