"""Answers read as transformers' response templates say, whatever pieces they come in."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from mistralrs_sdk.chat.answer_format import TOOL_FORMATS, find_answer_format
from mistralrs_sdk.chat.answer_parser import AnswerParser
from mistralrs_sdk.chat.response_template import read_response_template
from mistralrs_sdk.chat.template_parser import TemplateParser
from mistralrs_sdk.chat.tools import Function, Tool
from tests.answer_helpers import cut, read_all

Spec = dict[str, Any]

CHANNELS: Spec = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {
            "open": "<|channel|>analysis<|message|>",
            "close": ["<|end|>", "<|return|>"],
            "repeats": True,
            "join": "\n",
        },
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>[\w-]+)"
            r"\s*(?:<\|constrain\|>json)?<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {
            "open": ["<|channel|>final<|message|>", "<|channel|>commentary<|message|>"],
            "close_pattern": r"<\|(?:end|return)\|>",
        },
    },
}
"""As models write that part their answers into channels."""

TAGS: Spec = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open_pattern": r"<think(?:ing)?>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|$)"},
    },
}


def calls_field(content: str, **more: Any) -> Spec:
    """A template whose calls stand between tags in this notation."""
    shape = {"type": "function", "function": {"name": "{content.n}", "arguments": "{content.a}"}}
    field = {
        "open": "<c>",
        "close": "</c>",
        "content": content,
        "transform": shape,
        "repeats": True,
    }
    return {
        "start_anchor": "A:",
        "fields": {"tool_calls": {**field, "repeats": True, **more}, "content": {}},
    }


LISTED = {
    "transform_each": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
}
NOTATIONS = {
    "json": (
        calls_field("json", content_args={"unquoted_keys": True, "string_delims": [["<<", ">>"]]}),
        'ok <c>{n: "f", a: {x: <<a "b", c: d>>, y: [1, "z: 2"]}}</c>',
    ),
    "kv-lines": (
        calls_field(
            "kv-lines",
            content_args={"kv_sep": "=", "value_parser": {"name": "json", "args": {}}},
        ),
        '<c>\nn = "f"\na = {"x": 1}\n\n</c>',
    ),
    "python-call-list": (
        calls_field("python-call-list", **LISTED),
        "<c>[f(x=1, y=['a', True]), g()]</c>",
    ),
    "list": (
        calls_field("json", **LISTED),
        '<c>[{"name": "f", "arguments": {"x": "1"}}, {"name": "g", "arguments": {}}]</c>',
    ),
}

TOOLS = (
    Tool(Function("f", parameters={"type": "object", "properties": {"x": {"type": "integer"}}})),
    Tool(Function("get-time", parameters={"type": "object", "properties": {}})),
)

HARMONY = [
    "<|channel|>analysis<|message|> think  hard <|end|><|start|>assistant"
    "<|channel|>final<|message|>It is 4.\n\nYes. <|return|>",
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>",
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"x": 1, "y": "<|end|>"}<|call|>',
    "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.get-time<|message|>{}",
    "<|channel|>final<|message|>not ended <|en",
    "plain text in no channel",
    "<|channel|>analysis<|message|>never ended",
]
TAGGED = [
    "<think>\nhm\n</think>\n\nFour.<|im_end|>",
    "<thinking>hm</think>Four. ",
    "Look.\n<call>\n<function=f>\n<parameter=x>\n7\n</parameter>\n</function>\n</call>",
    "<call><function=f></function></call>\n<call><function=get-time></function> </call>",
    "a <think b <call> c",
]
ANSWERS = [
    *((CHANNELS, text) for text in HARMONY),
    *((TAGS, text) for text in TAGGED),
    *NOTATIONS.values(),
]


def read(
    spec: Spec, pieces: Iterable[str], *, prompt: str = "", tools: tuple[Tool, ...] = TOOLS
) -> tuple[str, str, list[tuple[int, str, str]], bool]:
    """Content, reasoning, (index, name, arguments) of each call, and whether one is unparsed."""
    parser = TemplateParser(read_response_template(spec), prompt=prompt, tools=tools)
    return read_all(parser, pieces)


@pytest.mark.parametrize(("spec", "text"), ANSWERS)
def test_answers_are_read_as_transformers_reads_them(spec, text):
    """Content, reasoning, and calls with arguments in the types of the tools' schemas."""
    tools = [tool.to_dict() for tool in TOOLS]
    message = parse_response(text, spec, prefix="", tools=tools)
    content, reasoning, calls, unparsed = read(spec, [text])

    assert content == message.get("content", "")
    assert reasoning == message.get("reasoning_content", "")
    expected = message.get("tool_calls", [])
    expected = [call for item in expected for call in (item if isinstance(item, list) else [item])]
    functions = [call.get("function", call) for call in expected]
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [
        (function["name"], function["arguments"]) for function in functions
    ]
    assert not unparsed


@pytest.mark.parametrize(("spec", "text"), ANSWERS)
def test_any_division_of_an_answer_gives_the_same(spec, text):
    """Pieces of 1, 2, 3 and 7 characters and random ones find what the whole text gives."""
    whole = read(spec, [text])
    chance = random.Random(text)

    for size in (1, 2, 3, 7):
        assert read(spec, cut(text, range(size, len(text), size))) == whole
    for _ in range(50):
        places = [chance.randrange(len(text) + 1) for _ in range(chance.randrange(8))]
        assert read(spec, cut(text, places)) == whole


FRAGMENTS = [
    *("<|channel|>", "analysis", "final", "commentary", "<|message|>", "<|end|>", "<|return|>"),
    *("<|call|>", " to=functions.f", '{"x": 1}', "{", "<think>", "</think>", "<call>", "</call>"),
    *("<function=f>", "</function>", "<parameter=x>1</parameter>", "<|im_end|>", " ", "\n", "x"),
]


@given(
    spec=st.sampled_from([CHANNELS, TAGS]),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    places=st.lists(st.integers(0, 200), max_size=8),
)
def test_any_division_of_any_text_gives_the_same(spec, fragments, places):
    """Streamed and whole results are equal for texts made of the templates' own parts."""
    text = "".join(fragments)

    assert read(spec, cut(text, places)) == read(spec, [text])


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("<|im_start|>user\n<think><|im_start|>assistant\n", "Hi", ("Hi", "")),
        ("<|im_start|>assistant\n<think>\n", "hm</think>Hi", ("Hi", "hm")),
        ("<|im_start|>assistant\n<think>\nso: ", "hm</think>Hi", ("Hi", "hm")),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hi", ("Hi", "")),
        ("<|im_start|>assistant\n<thi", "nk>hm</think>", ("", "hm")),
        ("<|im_start|>assistant\nSure <", "b>", ("b>", "")),
        ("<think> without any beginning", "Hi", ("Hi", "")),
    ],
)
def test_the_prompt_may_have_begun_the_answer(prompt, text, expected):
    """What the prompt says is no part of the answer, but says in which part it goes on."""
    for pieces in ([text], list(text)):
        assert read(TAGS, pieces, prompt=prompt)[:2] == expected


def test_calls_that_are_none_are_content_with_a_flag():
    """Word for word, marks included; and other calls are found."""
    bad = "<|channel|>commentary to=functions.f<|message|>{oh<|call|>"
    good = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"

    for pieces in ([bad + good], list(bad + good)):
        assert read(CHANNELS, pieces) == (bad, "", [(0, "f", "{}")], True)


def test_python_calls_take_the_words_of_both_languages():
    """True and true, None and null; anything else than calls is content."""
    spec = {
        "fields": {
            "tool_calls": {"open": "<c>", "close": "</c>", "content": "python-call-list"},
            "content": {},
        }
    }
    text = '<c>[f(x=1, y={"a": [true, None]}), g.h(z="")]</c>'

    assert read(spec, [text])[2] == [
        (0, "f", '{"x": 1, "y": {"a": [true, null]}}'),
        (1, "g.h", '{"z": ""}'),
    ]
    for bad in ("<c>f(x=1)</c>", "<c>[f(1)]</c>", "<c>[f(**x)]</c>", "<c>[f(x=y)]</c>", "<c>[</c>"):
        assert read(spec, [bad]) == (bad, "", [], True)


def test_without_tools_their_part_is_text():
    """Calls are looked for only where the request offers tools."""
    text = "<call><function=f></function></call>"

    assert read(TAGS, [text], tools=()) == (text, "", [], False)


def test_text_is_given_as_soon_as_it_is_sure():
    """Only what may be a mark is held back."""
    parser = TemplateParser(read_response_template(CHANNELS))
    parts = ("<|channel|>final<|message|>", "Hi", " there", "<|e", "x", "<|end|>")

    given = [parser.feed(part).content for part in parts]

    assert given == ["", "Hi", " there", "", "<|ex", ""]


# Which template is followed


def test_channels_are_followed_and_their_tokens_kept():
    """Marks that are special tokens must be seen, those of the template's patterns too."""
    vocabulary = ("<|channel|>", "<|message|>", "<|call|>", "<|constrain|>", "<|other|>")
    found = find_answer_format("{{ '</think>' }}", vocabulary, response_template=CHANNELS)

    assert isinstance(found.parser("", ()), TemplateParser)
    assert found.tokens(tools=True) == frozenset(vocabulary[:4])
    assert found.reasons[1] == "reasoning as the response template says"


def test_where_a_grammar_holds_calls_they_are_read_as_it_writes_them():
    """The grammar is made of the family's format."""
    found = find_answer_format("", (), response_template=CHANNELS)

    assert isinstance(found.parser("", TOOLS, held=True), AnswerParser)
    assert "<tool_call>" in found.tokens(tools=True, held=True)


GEMMA: Spec = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"name": "{name}", "arguments": "{content}"},
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}


def test_a_template_that_only_says_what_a_family_does_is_read_by_the_familys_reader():
    """It gives arguments as they come, and keeps whitespace."""
    found = find_answer_format("", (), response_template=GEMMA)

    assert found.template is None
    assert found.tools is TOOL_FORMATS["gemma"]
    assert isinstance(found.parser("", ()), AnswerParser)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"version": 2, "fields": {"content": {}}}, "version is 2"),
        ({"fields": {}}, "no fields"),
        ({"fields": {"content": {"open": "a", "open_pattern": "b"}}}, "both open and open_pattern"),
        ({"fields": {"content": {"open_pattern": "("}}}, "is no pattern"),
        ({"fields": {"content": {"open": []}}}, "no text or list of texts"),
        ({"fields": {"content": {"content": "yaml"}}}, "is none of"),
        ({"fields": {"content": {}, "other": {}}}, "only one field"),
        ({"fields": {"content": {"transform": "x {content}"}}}, "mixes a place"),
        ({"fields": {"content": "text"}}, "no object"),
    ],
)
def test_a_template_that_is_none_is_said_and_not_followed(spec, why, caplog):
    """The signs of the chat template decide then."""
    with caplog.at_level(logging.WARNING, "mistralrs_sdk"):
        found = find_answer_format("[TOOL_CALLS]", (), response_template=spec)

    assert found.template is None
    assert found.tools.name == "mistral"
    (record,) = caplog.records
    assert why in record.message
