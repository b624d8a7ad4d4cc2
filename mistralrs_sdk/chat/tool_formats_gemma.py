"""Calls as Gemma writes them: `call:name{key:value}` with strings between tokens of their own."""

from __future__ import annotations

import functools
import re
from typing import Any

from mistralrs_sdk.chat.call_drafts import CallDrafts
from mistralrs_sdk.chat.incoming_text import IncomingText, Waiting, parse_json
from mistralrs_sdk.chat.tool_formats import Calls, Schemas, ToolFormat, named_call


def gemma_format(name: str, *, opens: str, closes: str, quote: str) -> ToolFormat:
    """The format with these three tokens around a call and around a string."""
    return ToolFormat(
        name=name,
        markers=(opens,),
        read=functools.partial(_read, closes=closes, quote=quote),
        tokens=(closes, quote),
    )


def _read(
    text: IncomingText,
    marker: str,
    schemas: Schemas,
    drafts: CallDrafts,
    *,
    closes: str,
    quote: str,
) -> Waiting[Calls]:
    del marker, schemas, drafts
    if (yield from text.literal("call:")) is None:
        return None
    name = yield from text.name()
    start = text.pos
    quoted = False
    while True:  # the closing token does not count inside a string
        piece = yield from text.until(quote) if quoted else text.until(quote, closes)
        if piece is None:
            return None
        if not quoted and text.text.endswith(closes, start, text.pos):
            break
        quoted = not quoted
    body = text.text[start : text.pos - len(closes)].strip()
    try:
        arguments, end = _value(body, 0, quote)
    except (_NotAValueError, RecursionError):
        return None
    call = named_call(name, arguments) if end == len(body) else None
    return None if call is None else [call]


class _NotAValueError(Exception):
    """The text is no value in this notation."""


_BARE = re.compile(r"[^,{}\[\]:]*")
_SPACE = re.compile(r"\s*")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def _value(text: str, pos: int, quote: str) -> tuple[Any, int]:
    """The value that begins at `pos`, and where it ends."""
    pos = _skip(text, pos)
    if text.startswith(quote, pos):
        start = pos + len(quote)
        end = text.find(quote, start)
        if end < 0:
            raise _NotAValueError
        return text[start:end], end + len(quote)
    if text.startswith("{", pos):
        return _mapping(text, pos + 1, quote)
    if text.startswith("[", pos):
        return _list(text, pos + 1, quote)
    found = _JSON_STRING.match(text, pos) or _BARE.match(text, pos)
    word = found[0].strip() if found else ""
    if not found or not word:
        raise _NotAValueError
    value = parse_json(word)
    return (word if value is None and word != "null" else value), found.end()


def _mapping(text: str, pos: int, quote: str) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    while True:
        pos = _skip(text, pos)
        if text.startswith("}", pos):
            return values, pos + 1
        key, pos = _value(text, pos, quote)
        pos = _skip(text, pos)
        if not text.startswith(":", pos):
            raise _NotAValueError
        values[str(key)], pos = _value(text, pos + 1, quote)
        pos = _comma(text, pos, "}")


def _list(text: str, pos: int, quote: str) -> tuple[list[Any], int]:
    values: list[Any] = []
    while True:
        pos = _skip(text, pos)
        if text.startswith("]", pos):
            return values, pos + 1
        value, pos = _value(text, pos, quote)
        values.append(value)
        pos = _comma(text, pos, "]")


def _comma(text: str, pos: int, closing: str) -> int:
    """Past a comma; or at the closing bracket."""
    pos = _skip(text, pos)
    if text.startswith(",", pos):
        return pos + 1
    if not text.startswith(closing, pos):
        raise _NotAValueError
    return pos


def _skip(text: str, pos: int) -> int:
    found = _SPACE.match(text, pos)
    return found.end() if found else pos


GEMMA = gemma_format("gemma", opens="<|tool_call>", closes="<tool_call|>", quote='<|"|>')
FUNCTION_GEMMA = gemma_format(
    "function_gemma",
    opens="<start_function_call>",
    closes="<end_function_call>",
    quote="<escape>",
)
