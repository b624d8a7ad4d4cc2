"""Reading answers piece by piece in tests of their parsers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from mistralrs_sdk.chat.answer_parser import AnswerParser
from mistralrs_sdk.chat.template_parser import TemplateParser
from mistralrs_sdk.chat.tools import joined_calls


def read_all(
    parser: AnswerParser | TemplateParser, pieces: Iterable[str]
) -> tuple[str, str, list[tuple[int, str, str]], bool]:
    """Content, reasoning, (index, name, arguments) of each call, and whether one is unparsed."""
    deltas = [*map(parser.feed, pieces), parser.finish()]
    withdrawn = [index for delta in deltas for index in delta.withdrawn]
    calls = joined_calls([call for delta in deltas for call in delta.tool_calls], withdrawn)
    assert len({call.id for call in calls}) == len(calls)
    assert parser.has_calls == bool(calls)
    return (
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        [(call.index, call.function.name, call.function.arguments) for call in calls],
        any(delta.unparsed for delta in deltas),
    )


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text in pieces."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]
