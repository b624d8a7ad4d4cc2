"""Answers parted into reasoning, content and tool calls, whatever pieces they come in."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mistralrs_sdk.chat.answer_format import TOOL_FORMATS
from mistralrs_sdk.chat.answer_parser import AnswerParser, ReasoningTags
from mistralrs_sdk.chat.detokenizer import Detokenizer
from mistralrs_sdk.chat.tools import Function, Tool
from tests.answer_helpers import cut, read_all
from tests.test_template import byte_tokenizer

THINK = ReasoningTags(opens="<think>", closes="</think>")
DEEPSEEK = TOOL_FORMATS["deepseek"]
DS_OPEN, (DS_BEGIN, DS_END, DS_CLOSE, DS_SEP) = DEEPSEEK.markers[0], DEEPSEEK.tokens

Parsed = tuple[str, str, list[tuple[int, str, Any]], bool]


def parse(name: str | None, pieces: Iterable[str], **settings: Any) -> Parsed:
    """Content, reasoning, (index, name, arguments) of each call, and whether one is unparsed."""
    content, reasoning, calls, unparsed = read(name, pieces, **settings)
    return content, reasoning, [(i, f, json.loads(a)) for i, f, a in calls], unparsed


def read(
    name: str | None, pieces: Iterable[str], *, tools: tuple[Tool, ...] = (), opened: bool = False
) -> tuple[str, str, list[tuple[int, str, str]], bool]:
    """The same with the text of the arguments, to the character."""
    parser = AnswerParser(
        None if name is None else TOOL_FORMATS[name], THINK, tools=tools, opened=opened
    )
    return read_all(parser, pieces)


CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": {"b": ["x", 1]}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=f>\n<parameter=a>\n"
    '{"b": ["x", 1]}\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=g>\n</function>\n</tool_call>",
    "llama": '{"name": "f", "parameters": {"a": {"b": ["x", 1]}}}; {"name": "g", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": {"b": ["x", 1]}}, "id": "123456789"},'
    ' {"name": "g", "arguments": {}}]',
    "deepseek": f'{DS_OPEN}{DS_BEGIN}function{DS_SEP}f\n```json\n{{"a": {{"b": ["x", 1]}}}}\n```'
    f"{DS_END}\n{DS_BEGIN}function{DS_SEP}g\n```json\n{{}}\n```{DS_END}{DS_CLOSE}",
    "deepseek_v31": f'{DS_OPEN}{DS_BEGIN}f{DS_SEP}{{"a": {{"b": ["x", 1]}}}}{DS_END}'
    f"{DS_BEGIN}g{DS_SEP}{{}}{DS_END}{DS_CLOSE}",
    "gemma": '<|tool_call>call:f{a:{b:[<|"|>x<|"|>,1]}}<tool_call|>'
    "<|tool_call>call:g{}<tool_call|>",
    "function_gemma": "<start_function_call>call:f{a:{b:[<escape>x<escape>,1]}}"
    "<end_function_call><start_function_call>call:g{}<end_function_call>",
    "fenced": '```tool_code\nf(a={"b": ["x", 1]})\n```\n```tool_call\n{"name": "g"}\n```',
}
"""The same two calls in every format."""

OTHERS = {
    "hermes": [
        '<tool_call>{"name": "f", "arguments": {"cmd":"echo {a,b"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\" }"}}</tool_call>',
        'Sure.\n\n<tool_call>{"name": "f", "arguments": {"城": {"b": "北京"}}}</tool_call>',
        'Wait <tool_call>\n{"name": "f", "arguments": {"a": 1',
        "text <tool_c",
        '<tool_call>{"name": 5}</tool_call><tool_call>{"name": "g"}</tool_call> after',
        '<tool_call>{"name": "f", "arguments": {"a": 1}} oh <tool_call>{"name": "g"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "id": "7", "name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        '<tool_call>{"name": "f", "parameters": {"a": 1}, "arguments": {"b":\n 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1, "a": [true , 2.50e1]}}</tool_call>',
        "<think>\nlet me <tool_call> see\n</think>\n\nHi  there \n",
        "<think>never closed <tool_call>{}</tool_call>",
        "a </think> b <",
    ],
    "llama": [
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        '<|python_tag|>search.call(query="a b")',
        "<|python_tag|>print(1)",
        '{"answer": 42} is the answer',
        '{"name": "f", "parameters": {"a": ',
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {"b": ',
        ' \n{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}} \n',
    ],
    "mistral": [
        'ok [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": []}',
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}',
        "[TOOL_CALLS] and more",
        "[TOOL_CALLS][]",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": 5}] hm',
        '[TOOL_CALLS][{"arguments": {}, "name": "f"}, {"name": "g", "arguments": {"a": 1}}]',
    ],
    "deepseek": [f"x {DS_OPEN}{DS_BEGIN}f{DS_SEP}{{}}{DS_END} cut", f"{DS_OPEN}{DS_BEGIN}f"],
    "gemma": ['<|tool_call>call:f{a:<|"|>x<tool_call|>}<|"|>}<tool_call|>', "<|tool_call>call:f{a"],
    "fenced": [
        '```json\n{"x": 1}\n```',
        '```json\n{"name": "f"}\n```\n',
        "```tool_code\nf(x)\n```",
    ],
    "qwen_xml": [
        "<function=f>\n<parameter=a>\none\ntwo\n</parameter>\n</function>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>",
    ],
}
TEXTS = [
    (name, text)
    for name, texts in [*((n, [t]) for n, t in CALLS.items()), *OTHERS.items()]
    for text in texts
]


@pytest.mark.parametrize("name", CALLS)
def test_each_family_writes_the_same_calls(name):
    """Two calls with nested and with no arguments come out the same from every format."""
    content, reasoning, calls, unparsed = parse(name, ["Hi\n" * (name != "llama") + CALLS[name]])

    assert calls == [(0, "f", {"a": {"b": ["x", 1]}}), (1, "g", {})]
    assert content == "Hi" * (name != "llama")
    assert (reasoning, unparsed) == ("", False)


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_any_division_of_an_answer_gives_the_same(name, text):
    """Pieces of 1, 2, 3 and 7 characters and random ones find what the whole text gives."""
    whole = read(name, [text])
    chance = random.Random(text)

    for size in (1, 2, 3, 7):
        assert read(name, cut(text, range(size, len(text), size))) == whole
    for _ in range(200):
        places = [chance.randrange(len(text) + 1) for _ in range(chance.randrange(8))]
        assert read(name, cut(text, places)) == whole


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_markers_that_are_special_tokens_change_nothing(name, text):
    """Special tokens reach the parser as text, in whatever portions of tokens they come."""
    tool_format = TOOL_FORMATS[name]
    marks = {*tool_format.markers, *tool_format.tokens, "<think>", "</think>"}
    tokenizer = byte_tokenizer(*sorted(marks))
    keep = frozenset(tokenizer.token_to_id(mark) for mark in marks)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    chance = random.Random(text)

    for size in (1, 2, 3, chance.randrange(4, 30)):
        detokenizer = Detokenizer(tokenizer, keep=keep)
        pieces = [detokenizer.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert parse(name, [*pieces, detokenizer.finish()]) == parse(name, [text])


FRAGMENTS = sorted(
    {marker for fmt in TOOL_FORMATS.values() for marker in (*fmt.markers, *fmt.tokens)}
    | {"<think>", "</think>", "call:", "f", '{"name": "f", "arguments": ', '{"a": 1}', "{}", "{"}
    | {"}", "[", "]", '"', "\\", ";", "\n", " ", "x", "```", ":", ",", "<parameter=a>"}
    | {"</parameter>", "</function>", ">", "北"}
)


@given(
    name=st.sampled_from(sorted(TOOL_FORMATS)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    places=st.lists(st.integers(0, 400), max_size=10),
    opened=st.booleans(),
)
@example(name="hermes", fragments=["<tool_call>", "{", "<tool_call>"], places=[3], opened=False)
def test_any_division_of_any_text_gives_the_same(name, fragments, places, opened):
    """Streamed and whole results are equal for texts made of the formats' own parts."""
    text = "".join(fragments)

    assert read(name, cut(text, places), opened=opened) == read(name, [text], opened=opened)


@given(text=st.text(st.sampled_from("ab \n<{["), max_size=30), places=st.lists(st.integers(0, 40)))
def test_text_without_calls_is_kept_to_the_character(text, places):
    """What holds no call and no tag is the content, whitespace and all."""
    assert parse("hermes", cut(text, places)) == (text, "", [], False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'Wait <tool_call>\n{"name": "f", "arguments": {"a": 1'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call> ok'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 5000 + "]" * 5000 + "</tool_call>"),
        ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>"),
        ("llama", '{"name": "f", "parameters": {"a": '),
        ("llama", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] and more"),
        ("deepseek", f"{DS_OPEN}{DS_BEGIN}f"),
        ("gemma", "<|tool_call>call:f{a"),
        ("gemma", "<|tool_call>call:f{a:}<tool_call|>"),
        ("fenced", "```tool_code\nf(x)\n```"),
    ],
)
def test_what_looks_like_a_call_and_is_none_is_content_with_a_flag(name, text):
    """Cut off or malformed call text is returned word for word, and said to be unparsed."""
    assert parse(name, [text]) == (text, "", [], True)


def test_a_call_after_a_malformed_one_is_found():
    """What follows the marker of a call that fails is looked at again."""
    text = '<tool_call>{"name": 5}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'

    assert parse("hermes", [text]) == (text.split("\n")[0], "", [(0, "g", {})], True)


def test_a_begun_marker_at_the_end_is_text():
    """`<tool_c` and then nothing is content, and looks like no call."""
    assert parse("hermes", ["text <tool", "_c"]) == ("text <tool_c", "", [], False)


def test_ordinary_json_is_content():
    """JSON that describes no call is an answer like another, and carries no flag."""
    assert parse("llama", ['{"a": 1} is it']) == ('{"a": 1} is it', "", [], False)
    assert parse("fenced", ["```json\n{}\n```"]) == ("```json\n{}\n```", "", [], False)


def test_a_marker_inside_a_string_ends_nothing():
    """Closing markers and braces inside arguments are characters of them."""
    text = '<tool_call>{"name": "f", "arguments": {"a": "{</tool_call>\\""}}</tool_call>'

    assert parse("hermes", [text])[2] == [(0, "f", {"a": '{</tool_call>"'})]

    text = '<|tool_call>call:f{a:<|"|>x<tool_call|>}<|"|>}<tool_call|>'
    assert parse("gemma", [text])[2] == [(0, "f", {"a": "x<tool_call|>}"})]


def test_text_is_given_as_soon_as_it_is_sure():
    """Only what may be markup is held back: whitespace and the beginning of a marker."""
    parser = AnswerParser(TOOL_FORMATS["hermes"], THINK)

    given = [parser.feed(piece).content for piece in ("Hi", " there", "\n", "<", "b>", " <too")]

    assert given == ["Hi", " there", "", "", "\n<b>", ""]
    assert parser.finish().content == " <too"


def test_a_call_whose_arguments_are_no_json_is_given_when_it_is_complete():
    """It comes whole, in the piece that completes it, with an id of its own."""
    parser = AnswerParser(TOOL_FORMATS["hermes"], None)

    assert not parser.feed("<tool_call><function=f><parameter=a>1</parameter></function></tool_cal")
    (first,) = parser.feed("l> ").tool_calls
    (second,) = parser.feed('<tool_call>{"name": "f"}</tool_call>').tool_calls

    assert (first.index, second.index) == (0, 1)
    assert first.id != second.id
    assert first.to_dict()["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_mistral_calls_have_ids_of_nine_characters():
    """Mistral's templates refuse other ids."""
    parser = AnswerParser(TOOL_FORMATS["mistral"], None)

    (call,) = parser.feed('[TOOL_CALLS][{"name": "f", "arguments": {}}]').tool_calls

    assert len(call.id) == 9
    assert call.id.isalnum()


def test_reasoning_is_parted_from_content():
    """The tags and the whitespace beside them are neither reasoning nor content."""
    text = "<think>\nIt is 4.\n\nYes.\n</think>\n\nFour.\n"

    assert parse(None, [text]) == ("Four.\n", "It is 4.\n\nYes.", [], False)


def test_reasoning_that_the_prompt_opened_has_no_opening_tag():
    """After a prompt that ends with the tag, the answer begins with reasoning."""
    assert parse(None, ["hm\n</think>\n\nHi"], opened=True) == ("Hi", "hm", [], False)
    assert parse(None, ["<think>\nhm\n</think>\nHi"], opened=True) == ("Hi", "hm", [], False)


def test_an_unclosed_reasoning_block_never_becomes_content():
    """An answer cut off while thinking has no content and no calls."""
    text = '<think>hm <tool_call>{"name": "f"}</tool_call> '

    assert parse("hermes", [text])[0] == ""
    assert parse("hermes", [text])[2] == []
    assert parse("hermes", ["hm </thin"], opened=True) == ("", "hm </thin", [], False)


def test_parameters_without_quotes_are_read_by_the_tools_schema():
    """A text parameter stays text whatever it looks like; others are JSON, or Python's words."""
    properties = {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "size": {"type": "integer"},
        "on": {"type": "boolean"},
        "kind": {"enum": ["1", "2"]},
    }
    tools = (Tool(Function("f", parameters={"type": "object", "properties": properties})),)
    values = {"text": "12", "maybe": "null", "size": "12", "on": "True", "kind": "1", "new": "[1]"}
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())

    calls = parse("qwen_xml", [f"<function=f>\n{body}</function>"], tools=tools)[2]

    expected = {"text": "12", "maybe": None, "size": 12, "on": True, "kind": "1", "new": [1]}
    assert calls == [(0, "f", expected)]


def test_line_feeds_and_half_surrogates_in_arguments_give_valid_json():
    """Raw line feeds are taken as such; what is no valid Unicode stays escaped."""
    text = '<tool_call>{"name": "f", "arguments": {"a": "x\ny", "b": "\\ud800"}}</tool_call>'
    parser = AnswerParser(TOOL_FORMATS["hermes"], None)

    (call,) = parser.feed(text).tool_calls

    assert call.function.arguments.encode()
    assert json.loads(call.function.arguments) == {"a": "x\ny", "b": "\ud800"}
