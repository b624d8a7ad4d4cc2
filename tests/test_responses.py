"""The shapes of answers, and the arithmetic of their usage."""

from __future__ import annotations

import json
import math

import pytest

from mistralrs_sdk.chat.responses import (
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    Choice,
    ChunkChoice,
    CompletionChoice,
    CompletionResponse,
    Delta,
    Logprobs,
    ResponseLogprob,
    ResponseMessage,
    TopLogprob,
    Usage,
)
from mistralrs_sdk.chat.tools import CalledFunction, ToolCallResponse

USAGE = Usage.measure(
    prompt_tokens=10, completion_tokens=6, cached_tokens=4, prompt_time=0.5, completion_time=1.5
)
LOGPROBS = Logprobs(
    content=[
        ResponseLogprob(
            token="�",
            logprob=-0.5,
            bytes=b"\xf0\x9f",
            top_logprobs=[TopLogprob(token="a", token_id=7, logprob=-math.inf, bytes=b"a")],
        ),
        ResponseLogprob(token="bc", logprob=-1.0),
    ]
)


def chat_response(choice: Choice) -> ChatCompletionResponse:
    return ChatCompletionResponse(id="1", choices=[choice], created=5, model="m", usage=USAGE)


def test_rates_divide_tokens_by_their_own_time():
    """Prompt and completion are measured apart; the total time is their sum."""
    assert (USAGE.total_tokens, USAGE.total_time_sec) == (16, 2.0)
    assert USAGE.avg_prompt_tok_per_sec == 20.0
    assert USAGE.avg_compl_tok_per_sec == 4.0
    assert USAGE.avg_tok_per_sec == 8.0


def test_rates_are_zero_without_time():
    """No time, no rate: nothing is divided by zero."""
    usage = Usage.measure(prompt_tokens=3, completion_tokens=0, prompt_time=0, completion_time=0)

    assert usage.avg_tok_per_sec == 0.0
    assert usage.avg_prompt_tok_per_sec == 0.0
    assert usage.avg_compl_tok_per_sec == 0.0


def test_usage_reports_cached_tokens_the_openai_way():
    """The prefix cache's share is a detail of the prompt tokens."""
    data = USAGE.to_dict()

    assert data["prompt_tokens_details"] == {"cached_tokens": 4}
    assert "cached_tokens" not in data
    assert (data["prompt_tokens"], data["completion_tokens"], data["total_tokens"]) == (10, 6, 16)


def test_chat_response_is_an_openai_chat_completion():
    """Keys that OpenAI always sends are there, unset extras are not."""
    choice = Choice(finish_reason="stop", index=0, message=ResponseMessage(content="Hi"))

    assert chat_response(choice).to_dict() == {
        "id": "1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "system_fingerprint": "local",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE.to_dict(),
    }


def test_matched_stop_is_reported():
    """A choice that a stop string ended says which one."""
    choice = Choice(
        finish_reason="stop", index=0, message=ResponseMessage(content=""), stop_reason="\n"
    )

    assert choice.to_dict()["stop_reason"] == "\n"


def test_message_without_content_is_null():
    """A message that only calls tools or only reasons has a null content."""
    call = ToolCallResponse(index=0, id="1", function=CalledFunction("now", "{}"))
    message = ResponseMessage(tool_calls=(call,), reasoning_content="hm")

    assert message.to_dict() == {
        "role": "assistant",
        "content": None,
        "tool_calls": [call.to_dict()],
        "reasoning_content": "hm",
    }


def test_chunk_has_usage_only_at_the_end():
    """Until the last chunk there is no usage and the finish reason is null."""
    first = ChatCompletionChunkResponse(
        id="1", choices=[ChunkChoice(index=0, delta=Delta(content="H"))], created=5, model="m"
    ).to_dict()
    last = ChatCompletionChunkResponse(
        id="1",
        choices=[ChunkChoice(index=0, delta=Delta(role=None), finish_reason="length")],
        created=5,
        model="m",
        usage=USAGE,
    ).to_dict()

    assert first["object"] == "chat.completion.chunk"
    assert "usage" not in first
    assert first["choices"][0]["finish_reason"] is None
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "H"}
    assert last["usage"] == USAGE.to_dict()
    assert last["choices"][0]["delta"] == {}


def test_logprobs_carry_raw_bytes():
    """A token that holds part of a character shows its bytes."""
    entry = LOGPROBS.to_dict()["content"][0]

    assert entry["bytes"] == [0xF0, 0x9F]
    assert entry["top_logprobs"][0]["token_id"] == 7


def test_every_response_is_valid_json():
    """Also an impossible token's log probability, which JSON cannot write as minus infinity."""
    choice = Choice(
        finish_reason="stop", index=0, message=ResponseMessage(content="x"), logprobs=LOGPROBS
    )

    text = json.dumps(chat_response(choice).to_dict(), allow_nan=False)

    assert "-9999.0" in text


def test_text_completion_has_parallel_logprobs():
    """The older completion format lists tokens, log probabilities and offsets side by side."""
    choice = CompletionChoice(finish_reason="length", index=0, text="�bc", logprobs=LOGPROBS)
    response = CompletionResponse(id="1", choices=[choice], created=5, model="m", usage=USAGE)

    data = response.to_dict()

    assert data["object"] == "text_completion"
    assert data["choices"][0]["logprobs"] == {
        "tokens": ["�", "bc"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"a": -9999.0}, {}],
        "text_offset": [0, 1],
    }


def test_responses_are_values():
    """Answers cannot be changed and compare by content."""
    message = ResponseMessage(content="Hi")

    assert message == ResponseMessage(content="Hi")
    with pytest.raises(AttributeError):
        message.content = "Ho"  # pyright: ignore
