"""Calls given in pieces while they are written, and withdrawn if they turn out to be none."""

from __future__ import annotations

import json

import pytest

from mistralrs_sdk.chat.answer_format import TOOL_FORMATS
from mistralrs_sdk.chat.answer_parser import AnswerDelta, AnswerParser
from mistralrs_sdk.chat.tools import joined_calls

DEEPSEEK = TOOL_FORMATS["deepseek_v31"]
DS_OPEN, (DS_BEGIN, DS_END, DS_CLOSE, DS_SEP) = DEEPSEEK.markers[0], DEEPSEEK.tokens

CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "xyz", "b": [1, 2]}}\n</tool_call>',
    "llama": '{"name": "f", "parameters": {"a": "xyz", "b": [1, 2]}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "xyz", "b": [1, 2]}',
    "deepseek_v31": f'{DS_OPEN}{DS_BEGIN}f{DS_SEP}{{"a": "xyz", "b": [1, 2]}}{DS_END}{DS_CLOSE}',
}


def deltas(name: str, *pieces: str) -> list[AnswerDelta]:
    parser = AnswerParser(TOOL_FORMATS[name], None)
    return [*map(parser.feed, pieces), parser.finish()]


@pytest.mark.parametrize("name", CALLS)
def test_arguments_come_as_they_are_written(name):
    """The first piece has the name and a new id; all pieces together are the arguments."""
    pieces = [piece for delta in deltas(name, *CALLS[name]) for piece in delta.tool_calls]

    assert len(pieces) > 10
    assert [piece.continues for piece in pieces] == [False] + [True] * (len(pieces) - 1)
    assert {(piece.index, piece.id, piece.function.name) for piece in pieces} == {
        (0, pieces[0].id, "f")
    }
    (call,) = joined_calls(pieces)
    assert call.function.arguments == '{"a": "xyz", "b": [1, 2]}'


def test_what_continues_a_call_is_only_that_in_a_delta():
    """Clients join all texts of one index, so ids and names must not come again."""
    feeds = ('<tool_call>{"name": "f", "arguments": {"a"', ": 1}}</tool_call>")
    first, second, _ = (delta.tool_calls for delta in deltas("hermes", *feeds))

    assert first[0].to_dict() == {
        "index": 0,
        "id": first[0].id,
        "type": "function",
        "function": {"name": "f", "arguments": '{"a"'},
    }
    assert second[0].to_dict() == {"index": 0, "function": {"arguments": ": 1}"}}


@pytest.mark.parametrize(
    ("name", "begun", "rest"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', ", x}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "}} and more"),
        ("llama", '{"name": "f", "parameters": {"a": 1', ""),
        ("llama", '{"id": 1, "name": "f", "parameters": {"a": 1', ""),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1', " oh"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1', "}}, 7]"),
    ],
)
def test_a_call_that_turns_out_to_be_none_is_withdrawn(name, begun, rest):
    """Its text is then the content, word for word, with the flag, as if nothing had been given."""
    first, *later = deltas(name, begun, rest)

    assert [piece.function.arguments for piece in first.tool_calls] == ['{"a": 1']
    assert not first.unparsed
    assert "".join(delta.content for delta in later) == begun + rest
    assert [index for delta in later for index in delta.withdrawn] == [0]
    assert any(delta.unparsed for delta in later)
    whole = deltas(name, begun + rest)
    assert sum(whole[1:], whole[0]) == AnswerDelta(content=begun + rest, unparsed=True)


def test_all_calls_of_a_list_stand_or_fall_together():
    """The first is whole, yet its list is no list of calls: both are withdrawn."""
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}, 7]'
    *parts, last, _ = deltas("mistral", text[:-1], text[-1])

    assert [piece.function.name for delta in parts for piece in delta.tool_calls] == ["f", "g"]
    assert last.withdrawn == (0, 1)
    assert last.content == text


def test_later_calls_take_no_index_of_a_withdrawn_one():
    """Who joins by index must not mix two calls."""
    bad, good = '{"name": "f", "arguments": {]', '{"name": "g"}'
    given = deltas("hermes", *f"<tool_call>{bad}</tool_call><tool_call>{good}</tool_call>")

    pieces = [piece for delta in given for piece in delta.tool_calls]
    assert [i for delta in given for i in delta.withdrawn] == [0]
    assert [(call.index, call.function.name) for call in joined_calls(pieces, [0])] == [(1, "g")]


@pytest.mark.parametrize(
    "call",
    [
        '{"arguments": {"a": 1}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}',
    ],
)
def test_a_call_that_is_written_another_way_comes_whole(call):
    """Before the name is known, or inside a string, nothing can be given."""
    *before, last, _ = deltas("hermes", *f"<tool_call>{call}</tool_call>")

    assert not any(before)
    assert last.tool_calls[0].function.name == "f"
    assert json.loads(last.tool_calls[0].function.arguments) == {"a": 1}


def test_calls_after_one_that_comes_whole_come_whole_too():
    """Their order is that of the text."""
    calls = '[{"arguments": {}, "name": "f"}, {"name": "g", "arguments": {"a": 1}}]'
    given = deltas("mistral", *f"[TOOL_CALLS]{calls}")

    found = [call for delta in given for call in delta.tool_calls]
    assert [(c.index, c.function.name, c.continues) for c in found] == [
        (0, "f", False),
        (1, "g", False),
    ]


def test_a_call_with_two_kinds_of_arguments_is_what_the_whole_says():
    """What began is withdrawn for what counts."""
    text = '<tool_call>{"name": "f", "parameters": {"a": 1}, "arguments": {"b": 2}}</tool_call>'
    given = deltas("hermes", *text)

    withdrawn = [i for delta in given for i in delta.withdrawn]
    pieces = [piece for delta in given for piece in delta.tool_calls]
    (call,) = joined_calls(pieces, withdrawn)
    assert (call.index, call.function.arguments) == (1, '{"b": 2}')
    assert not any(delta.unparsed or delta.content for delta in given)


def test_line_feeds_in_strings_are_valid_json_in_the_pieces_too():
    """Models write them as they are; between values they may stay."""
    text = '<tool_call>{"name": "f", "arguments": {\n"a": "x\n\ty"}}</tool_call>'
    (call,) = joined_calls(p for delta in deltas("hermes", *text) for p in delta.tool_calls)

    assert call.function.arguments == '{\n"a": "x\\n\\ty"}'
    assert json.loads(call.function.arguments) == {"a": "x\n\ty"}
