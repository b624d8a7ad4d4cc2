"""Requests of the Responses API, as the chat requests they become."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mistralrs_sdk.server.errors import HttpError
from mistralrs_sdk.server.responses_api_items import input_items, messages_of, with_instructions
from mistralrs_sdk.server.responses_api_request import ResponseRequest, read_request

USER = {"role": "user", "content": "When?"}
CALL = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
RETURNED = {"type": "function_call_output", "call_id": "c1", "output": "12:00"}
THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm"}],
}
SAID = {
    "type": "message",
    "role": "assistant",
    "content": [
        {"type": "output_text", "text": "Let me "},
        {"type": "output_text", "text": "look."},
    ],
}
CALLED = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def read(**body: Any) -> ResponseRequest:
    return read_request({"input": "When?", **body}, before=[], model="m")


def turns(*items: Any) -> list[dict[str, Any]]:
    return messages_of(input_items(list(items)))


def test_a_string_is_one_turn_of_the_user():
    """And it is an item with an id, as it is stored."""
    asked = read()

    assert asked.chat["messages"] == [USER]
    (item,) = asked.items
    assert item["id"].startswith("msg_")
    assert item["content"] == [{"type": "input_text", "text": "When?"}]


def test_what_the_model_said_at_once_is_one_turn():
    """Thoughts, text and calls that follow each other belong together."""
    assert turns(USER, THOUGHT, SAID, CALL, RETURNED) == [
        USER,
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Hm",
            "tool_calls": [CALLED],
        },
        {"role": "tool", "content": "12:00", "name": "now", "tool_call_id": "c1"},
    ]


def test_new_thoughts_begin_a_new_turn():
    """What was thought after speaking is not put before it."""
    first, second = turns(SAID, THOUGHT, SAID)

    assert "reasoning_content" not in first
    assert second["reasoning_content"] == "Hm"


def test_calls_of_an_earlier_answer_can_be_answered():
    """Turns before the input count."""
    before = turns(USER, CALL)

    *_, last = messages_of([RETURNED], after=before)

    assert last == {"role": "tool", "content": "12:00", "name": "now", "tool_call_id": "c1"}
    assert before == turns(USER, CALL)


def test_instructions_and_leading_system_turns_are_one():
    """Templates know one, the first."""
    messages = turns(
        {"role": "developer", "content": "A"}, USER, {"role": "system", "content": "B"}
    )

    assert with_instructions(messages, "I") == [
        {"role": "system", "content": "I\n\nA"},
        USER,
        {"role": "system", "content": "B"},
    ]
    assert with_instructions([USER], None) == [USER]


def test_instructions_are_not_among_the_turns_that_go_on():
    """The next answer begins with its own."""
    asked = read(instructions="I")

    assert asked.messages == [USER]
    assert asked.chat["messages"][0] == {"role": "system", "content": "I"}


def test_settings_become_those_of_a_chat():
    """Every name has its counterpart."""
    schema = {"type": "object"}
    tool = {"type": "function", "name": "now", "parameters": schema, "strict": True}
    chat = read(
        max_output_tokens=5,
        temperature=0.5,
        top_logprobs=2,
        tools=[tool],
        tool_choice={"type": "function", "name": "now"},
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        reasoning={"effort": "low", "summary": "auto"},
        truncation="auto",
        top_k=3,
        user="u",
    ).chat

    assert chat == {
        "messages": [USER],
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [
            {
                "type": "function",
                "function": {"name": "now", "parameters": schema, "strict": True},
            }
        ],
        "tool_choice": {"type": "function", "name": "now"},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        },
        "reasoning_effort": "low",
        "truncate_sequence": True,
        "top_k": 3,
        "user": "u",
    }


def test_the_response_repeats_what_was_asked():
    """A client finds its settings in the answer."""
    response = read(background=True, metadata={"a": "b"}, instructions="I").response

    assert response["status"] == "queued"
    assert (response["model"], response["instructions"]) == ("m", "I")
    assert response["metadata"] == {"a": "b"}
    assert response["text"] == {"format": {"type": "text"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [RETURNED]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0]"),
        ({"instructions": ["x"]}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"background": True, "stream": True}, "stream"),
        ({"background": True, "store": False}, "background"),
        ({"stream": 1}, "stream"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "x", "defer_loading": True}]}, "defer_loading"),
        ({"tools": 0}, "tools"),
        ({"truncation": "middle"}, "truncation"),
        ({"temprature": 1}, "temprature"),
        ({"tool_dispatch_url": "http://127.0.0.1/"}, "tool_dispatch_url"),
        ({"session_id": "s"}, "session_id"),
    ],
)
def test_what_is_wrong_is_named(body, param):
    """The error has the field, in its text and for programs."""
    with pytest.raises(HttpError) as refusal:
        read(**body)

    assert refusal.value.status == 400
    assert refusal.value.param == param
    assert param in refusal.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["", "user", "function"]),
    lambda values: (
        st.lists(values, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "name", "format", "effort"]),
            values,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(read().response.keys() | {"input", "stream", "include"})),
        JSON,
        max_size=4,
    )
)
def test_any_body_is_read_or_refused(body):
    """Nothing else is raised, whatever a client sends."""
    with contextlib.suppress(HttpError):
        assert read(**body).response["object"] == "response"
