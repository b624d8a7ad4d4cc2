"""Messages and answers as LangChain has them; `langchain` is the way in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    convert_to_openai_messages,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from mistralrs_sdk import Usage
from mistralrs_sdk.integrations.chunks import Chunk, joined


def openai_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return LangChain's messages as OpenAI's, with the thoughts of earlier answers."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        thoughts = ""
        if isinstance(message, AIMessage):
            thoughts = "".join(
                block.get("reasoning", "")
                for block in message.content_blocks
                if block["type"] == "reasoning"
            )
            message = _without_blocks_of_other_keys(message)
        turn, *rest = convert_to_openai_messages([message])
        turns += [{**turn, "reasoning_content": thoughts} if thoughts else turn, *rest]
    return turns


def _without_blocks_of_other_keys(message: AIMessage) -> AIMessage:
    """The message, whose content (`output_version="v1"`) may repeat thoughts and calls."""
    if isinstance(message.content, str):
        return message
    told = ("reasoning", "tool_call", "tool_call_chunk", "invalid_tool_call")
    kept = [
        block
        for block in message.content
        if isinstance(block, str) or block.get("type") not in told
    ]
    return message.model_copy(update={"content": kept})


def as_result(chunks: Sequence[Chunk]) -> ChatResult:
    """Return a whole answer of which these chunks came."""
    return generate_from_stream(iter([as_generation(joined(chunks))]))


def as_generation(chunk: Chunk) -> ChatGenerationChunk:
    """Return a piece of an answer; thoughts are under "reasoning_content", as elsewhere."""
    choice = chunk.choices[0]
    delta = choice.delta
    calls = [
        tool_call_chunk(
            name=call.function.name, args=call.function.arguments, id=call.id, index=call.index
        )
        for call in delta.tool_calls or ()
    ]
    info: dict[str, Any] = {}
    if choice.logprobs is not None:
        info["logprobs"] = choice.logprobs.to_dict()
    if choice.unparsed_tool_call:
        info["unparsed_tool_call"] = True
    if choice.finish_reason is not None:
        info["finish_reason"] = choice.finish_reason
        info["model_name"] = chunk.model
        info["model_provider"] = "mistralrs"
    thoughts = delta.reasoning_content
    message = AIMessageChunk(
        content=delta.content or "",
        additional_kwargs={"reasoning_content": thoughts} if thoughts else {},
        tool_call_chunks=calls,
        usage_metadata=None if chunk.usage is None else _usage(chunk.usage),
        id=chunk.id,
        chunk_position="last" if choice.finish_reason is not None else None,
    )
    return ChatGenerationChunk(message=message, generation_info=info or None)


def _usage(usage: Usage) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )
