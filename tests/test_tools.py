"""Tools, tool choices and calls as values and in OpenAI's shapes."""

from __future__ import annotations

import pytest

from mistralrs_sdk.chat.tools import CalledFunction, Function, Tool, ToolCallResponse, ToolChoice
from mistralrs_sdk.errors import RequestError

NOW = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("data", "choice"),
    [
        ("none", ToolChoice.NONE),
        ("auto", ToolChoice.AUTO),
        ("required", ToolChoice.REQUIRED),
        (NOW, ToolChoice.named("now")),
        ({"type": "function", "name": "now"}, ToolChoice.named("now")),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}},
            ToolChoice.allowed_tools(["now"], "required"),
        ),
        ({"type": "allowed_tools", "tools": [NOW, NOW]}, ToolChoice.allowed_tools(["now"] * 2)),
        (ToolChoice.named("now"), ToolChoice.named("now")),
    ],
)
def test_openai_tool_choices_are_read(data, choice):
    """Words, named functions and allowed tools, as chat completions or responses write them."""
    assert ToolChoice.from_dict(data) == choice


@pytest.mark.parametrize(
    "data",
    [
        "always",
        None,
        {},
        {"type": "function"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NOW]}},
        {"type": "allowed_tools", "allowed_tools": {"tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "web_search"}]}},
        {"type": "allowed_tools", "allowed_tools": "now"},
        ["auto"],
    ],
)
def test_other_tool_choices_are_refused(data):
    """What is no tool choice is named, with what there is."""
    with pytest.raises(RequestError, match="tool_choice"):
        ToolChoice.from_dict(data)


def test_a_tool_survives_openais_shape():
    """to_dict and from_dict are each other's inverse, strict included."""
    schema = {"type": "object", "properties": {"zone": {"type": "string"}}}
    tool = Tool(Function("now", "The time.", schema, strict=True))

    assert Tool.from_dict(tool.to_dict()) == tool


def test_a_call_survives_openais_shape():
    """A call of an answer can be kept as JSON and read again."""
    call = ToolCallResponse(index=2, id="call_1", function=CalledFunction("now", "{}"))

    assert ToolCallResponse.from_dict(call.to_dict()) == call


@pytest.mark.parametrize(
    "data",
    [None, {}, {"id": "1"}, {"id": "1", "function": {"name": "f"}}, {"function": {"name": "f"}}],
)
def test_other_calls_are_refused(data):
    """A call without id, name or arguments is named."""
    with pytest.raises(RequestError, match="tool call"):
        ToolCallResponse.from_dict(data)


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, None, "né"])
def test_a_bad_tool_name_is_refused(name):
    """Names are up to 64 letters, digits, underscores and hyphens."""
    with pytest.raises(RequestError, match="tool name"):
        Function(name)
