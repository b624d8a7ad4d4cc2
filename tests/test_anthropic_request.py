"""Requests of the Messages API, as the chat requests they become."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mistralrs_sdk.server.anthropic_request import MessagesRequest, read_request
from mistralrs_sdk.server.errors import HttpError
from tests.test_responses_request import JSON

USER = {"role": "user", "content": "When?"}
USE = {"type": "tool_use", "id": "t1", "name": "now", "input": {"zone": "UTC"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "12:00"}
CALLING = {"role": "assistant", "content": [USE]}


def read(**body: Any) -> MessagesRequest:
    return read_request({"max_tokens": 9, "messages": [USER], **body})


def turns(*messages: Any) -> list[dict[str, Any]]:
    return read(messages=list(messages)).chat["messages"]


def texts(*said: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in said]


def test_blocks_of_an_answer_are_one_turn():
    """Thinking, text and calls each have their place; results follow as turns of the tool."""
    thinking = {"type": "thinking", "thinking": "Hm", "signature": ""}
    answer = {"role": "assistant", "content": [thinking, *texts("Let me ", "look."), USE]}
    results = {"role": "user", "content": [RESULT, *texts("So?")]}

    assert turns(USER, answer, results) == [
        USER,
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Hm",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "now", "arguments": '{"zone": "UTC"}'},
                }
            ],
        },
        {"role": "tool", "content": "12:00", "name": "now", "tool_call_id": "t1"},
        {"role": "user", "content": "So?"},
    ]


def test_turns_of_one_role_become_one():
    """As this API promises, so that templates that want them to alternate can read them."""
    assert turns(USER, USER, {"role": "assistant", "content": "A"}, USER) == [
        {"role": "user", "content": "When?\n\nWhen?"},
        {"role": "assistant", "content": "A"},
        USER,
    ]


def test_failed_results_say_so():
    """Templates have no other way to tell."""
    failed = {
        "role": "user",
        "content": [{**RESULT, "content": texts("no clock"), "is_error": True}],
    }

    assert turns(USER, CALLING, failed)[-1]["content"] == "Error: no clock"


def test_system_text_is_the_first_turn():
    """A string or blocks, which are joined."""
    chat = read(system=texts("Be ", "brief.")).chat

    assert chat["messages"] == [{"role": "system", "content": "Be brief."}, USER]


def test_settings_become_those_of_a_chat():
    """Every name has its counterpart."""
    schema = {"type": "object"}
    chat = read(
        stop_sequences=["x"],
        temperature=0.5,
        top_k=3,
        tools=[{"name": "now", "description": "d", "input_schema": schema, "cache_control": {}}],
        tool_choice={"type": "tool", "name": "now"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
        max_tokens=2000,
        seed=1,
    ).chat

    assert chat == {
        "messages": [USER],
        "max_completion_tokens": 2000,
        "stop": ["x"],
        "temperature": 0.5,
        "top_k": 3,
        "tools": [
            {
                "type": "function",
                "function": {"name": "now", "description": "d", "parameters": schema},
            }
        ],
        "tool_choice": {"type": "function", "name": "now"},
        "enable_thinking": True,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        },
        "seed": 1,
    }


@pytest.mark.parametrize(
    ("given", "wanted"), [("auto", "auto"), ("none", "none"), ("any", "required")]
)
def test_choices_of_tools_have_other_names(given, wanted):
    """The meaning is the same."""
    assert read(tool_choice={"type": given}).chat["tool_choice"] == wanted


@pytest.mark.parametrize(
    ("thinking", "wanted"),
    [({"type": "disabled"}, {"enable_thinking": False}), ({"type": "adaptive"}, {}), (None, {})],
)
def test_thinking_is_a_switch_of_the_template(thinking, wanted):
    """What is left open stays with the template."""
    chat = read(thinking=thinking).chat

    assert {key: chat[key] for key in chat if "thinking" in key} == wanted


def test_counting_needs_no_limit():
    """Nothing is written then."""
    assert "max_completion_tokens" not in read_request({"messages": [USER]}, counts_only=True).chat


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [RESULT]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "It"}]}, "messages[1]"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [{"name": "now"}]}, "tools[0].input_schema"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"speed": "fast"}, "speed"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"mesages": 7}, "mesages"),
    ],
)
def test_what_is_wrong_is_named(body, param):
    """The error has the field, in its text and for programs."""
    with pytest.raises(HttpError) as refusal:
        read(**body)

    assert refusal.value.status == 400
    assert refusal.value.param == param
    assert param in refusal.value.message


KEYS = ("messages", "max_tokens", "system", "tools", "tool_choice", "thinking", "output_config")


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*KEYS, "stop_sequences", "stream"]), JSON, max_size=4))
def test_any_body_is_read_or_refused(body):
    """Nothing else is raised, whatever a client sends."""
    with contextlib.suppress(HttpError):
        assert read(**body).chat["messages"]
