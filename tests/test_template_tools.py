"""Tools, past calls and reasoning in chat templates."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from mistralrs_sdk.chat.messages import ReasoningEffort
from mistralrs_sdk.chat.template import ChatTemplate, PromptEncoder
from mistralrs_sdk.chat.tools import Function, Tool
from mistralrs_sdk.errors import RequestError
from tests.test_template import byte_tokenizer

NOW = Tool(Function("now", "The time.", {"type": "object", "properties": {}}))
USER = {"role": "user", "content": "Hi"}
TURNS = """\
{% for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls or [] %}<call>CALL</call>{% endfor %}

{% endfor %}"""
SHOWS_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + TURNS.replace("CALL", "")
WAYS = {  # how templates write the arguments of a past call
    "as JSON of an object": "{{ call.function.name }} {{ call.function.arguments | tojson }}",
    "object or text": "{% set f = call.function %}{{ f.name }} "
    "{{ f.arguments if f.arguments is string else f.arguments | tojson }}",
    "item by item": "{{ call.function.name }} {{ '{' }}"
    "{% for k, v in call.function.arguments | items %}"
    "{{ k | tojson }}: {{ v | tojson }}{% endfor %}{{ '}' }}",
    "text put together": "{{ call['function']['name'] + ' ' + call['function']['arguments'] }}",
    "the call as it is": "{{ call.function.name }} {{ call | tojson }}",
}
CALL_TURN = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "index": 0,
            "id": "1",
            "type": "function",
            "function": {"name": "now", "arguments": '{"zone": "北京"}'},
        }
    ],
}
RESULT = {"role": "tool", "content": "12:00", "tool_call_id": "1"}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", origin="test.jinja")


def encoder(source: str, *special: str) -> PromptEncoder:
    tokenizer = byte_tokenizer(*special)
    return PromptEncoder(tokenizer, bos_token=None, adds_bos=False, template=template(source))


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return template(source).render(messages or [USER], **options)


def test_tools_reach_the_template_in_openais_shape():
    """`tools` is the list of tool objects, or none."""
    assert json.loads(render(SHOWS_TOOLS, tools=[NOW.to_dict()]).split("[user]")[0]) == [
        NOW.to_dict()
    ]
    assert render("{{ tools is none }}") == "True"


@pytest.mark.parametrize(
    "source",
    [
        "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools | tojson }}",
        "{% if custom is defined %}{% set tools = custom %}{% endif %}{{ tools | tojson }}",
        "{% macro show() %}{{ tools | tojson }}{% endmacro %}{{ show() }}",
    ],
)
def test_a_template_that_sets_tools_itself_takes_them(source):
    """What counts is that the template reads `tools` somewhere."""
    assert "now" in render(source, tools=[NOW.to_dict()])


def test_a_template_without_tools_refuses_them():
    """Tools the model would never hear of are an error that names the template."""
    with pytest.raises(RequestError, match=r"test\.jinja.*does not use tools"):
        render(TURNS, tools=[NOW.to_dict()])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("as_text", [True, False])
def test_past_arguments_are_given_as_the_template_wants_them(way, as_text):
    """JSON text or object: found by trying, whatever the message holds."""
    source = TURNS.replace("CALL", WAYS[way])
    turn = json.loads(json.dumps(CALL_TURN))
    if not as_text:
        turn["tool_calls"][0]["function"]["arguments"] = {"zone": "北京"}

    text = render(source, USER, turn, RESULT)

    assert '"zone": "北京"' in text
    assert "now " in text
    assert '\\"' not in text
    assert "index" not in text


def test_calls_are_shown_by_a_template_that_wants_no_content_beside_them():
    """Some templates show calls only where the content is none."""
    source = (
        "{% for m in messages %}{% if m.content is none %}"
        "{{ m.tool_calls[0].function.name + m.tool_calls[0].function.arguments }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )

    assert render(source, USER, CALL_TURN, RESULT) == 'Hinow{"zone": "北京"}12:00'


def test_a_template_that_shows_no_past_calls_is_warned_of_once(caplog):
    """The turn's text is still rendered; that the calls are not is said once."""
    quiet = template(TURNS.replace("<call>CALL</call>", ""))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert quiet.render([USER, CALL_TURN]) == "[user]Hi\n[assistant]\n"

    (record,) = caplog.records
    assert "does not use tool_calls of messages" in record.message


def test_arguments_that_are_no_json_stay_text():
    """A past call with broken arguments is history like another."""
    turn = {**CALL_TURN, "tool_calls": [{"function": {"name": "f", "arguments": "{broken"}}, "odd"]}

    text = render(TURNS.replace("CALL", "{{ call | tojson }}"), USER, turn)

    assert '"{broken"' in text


def test_control_tokens_in_tools_are_text():
    """What a tool's description spells is no token, as in messages."""
    held = encoder(SHOWS_TOOLS, "<|end|>")
    tool = Tool(Function("f", "stop <|end|> here"))
    messages = [{"role": "user", "content": "Hi"}]

    text, ids = held.render_chat(messages, tools=[tool])

    assert "stop <|end|> here" in text
    assert held.added_tokens["<|end|>"] not in ids
    assert held.holds_control_text(messages, [tool])
    assert not held.holds_control_text(messages)


@pytest.mark.parametrize(
    ("effort", "source", "expected"),
    [
        ("high", "{{ reasoning_effort }}", "high"),
        ("xhigh", "{{ reasoning_effort }}{{ enable_thinking }}", "xhighTrue"),
        ("low", "{{ enable_thinking }}", "True"),
        ("off", "{{ enable_thinking }}", "False"),
        ("off", "{{ reasoning_effort is defined }}{{ enable_thinking }}", "FalseFalse"),
        (None, "{{ reasoning_effort is defined or enable_thinking is defined }}", "False"),
    ],
)
def test_reasoning_effort_reaches_the_template(effort, source, expected):
    """An effort is given as it is and turns thinking on; off turns it off."""
    asked = None if effort is None else ReasoningEffort(effort)

    assert render(source, reasoning_effort=asked) == expected


def test_an_effort_that_nothing_uses_is_warned_of(caplog):
    """A template with neither switch is named."""
    with caplog.at_level(logging.WARNING):
        render(TURNS, reasoning_effort=ReasoningEffort.HIGH)
        render(TURNS, reasoning_effort=ReasoningEffort.OFF)

    (record,) = caplog.records
    assert "does not use reasoning_effort" in record.message


def test_an_effort_that_contradicts_a_template_kwarg_is_refused():
    """The same variable cannot be set twice to different values."""
    with pytest.raises(RequestError, match="reasoning_effort"):
        render(
            "{{ reasoning_effort }}",
            reasoning_effort=ReasoningEffort.HIGH,
            extra={"reasoning_effort": "low"},
        )


def test_past_reasoning_reaches_the_template():
    """An assistant turn keeps its `reasoning_content` for templates that read it."""
    turn = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}

    text = render("{% for m in messages %}{{ m.reasoning_content }}{% endfor %}", USER, turn)

    assert text == "2+2"
