"""`IncomingText`: a text that still comes, read by code that waits where it cannot decide yet."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any, NoReturn, Protocol, TypeVar

T = TypeVar("T")

Waiting = Generator[None, None, T]
"""A reading that yields whenever it needs more text, and in the end returns a `T`."""

_OUTSIDE = re.compile(r'[{}\[\]"]')
_INSIDE = re.compile(r'["\\]')
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[\w.-]*")


class Watch(Protocol):
    """What looks at a text while it is read."""

    def see(self, text: str) -> None:
        """Look at what comes next."""
        ...


class IncomingText:
    """What has come, and how far it was read.

    Each method decides by the text alone, never by the pieces it came in: where the text so far
    could go on in two ways, it waits. So whatever is read is the same for every division of the
    text. A method that finds something else than it looks for returns None (or False) and moves
    nothing.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.closed = False

    def forget(self) -> None:
        """Drop what was read; places in the text count from here."""
        self.text, self.pos = self.text[self.pos :], 0

    def space(self) -> Waiting[None]:
        """Move past whitespace."""
        while True:
            self.pos = _end(_SPACE, self.text, self.pos)
            if self.pos < len(self.text) or self.closed:
                return
            yield

    def literal(self, *words: str) -> Waiting[str | None]:
        """Move past one of these words and return it; none may begin with another."""
        while True:
            rest = self.text[self.pos : self.pos + max(map(len, words))]
            for word in words:
                if rest.startswith(word):
                    self.pos += len(word)
                    return word
            if self.closed or not any(word.startswith(rest) for word in words):
                return None
            yield

    def until(self, *words: str) -> Waiting[str | None]:
        """Return the text before the first of these words, and move past the word."""
        pattern = re.compile("|".join(map(re.escape, words)))
        longest = max(map(len, words))
        start = self.pos
        while True:
            found = pattern.search(self.text, start)
            if found is not None:
                before, self.pos = self.text[self.pos : found.start()], found.end()
                return before
            if self.closed:
                return None
            start = max(start, len(self.text) - longest + 1)
            yield

    def name(self) -> Waiting[str | None]:
        """Move past a function's name: letters, digits, `_`, `-` and `.`."""
        end = self.pos
        while True:
            end = _end(_NAME, self.text, end)
            if end < len(self.text) or self.closed:
                found, self.pos = self.text[self.pos : end], end
                return found or None
            yield

    def json(self, watch: Watch | None = None) -> Waiting[Any]:
        """Move past a JSON object or list and return its value; None if there is none.

        Line feeds inside strings are taken as they are, as models write them. A `watch` sees the
        text as it comes, whatever it turns out to be.
        """
        start = seen = self.pos
        if (yield from self.literal("{", "[")) is None:
            return None
        depth, quoted = 1, False
        end = self.pos
        while depth:
            step = (_INSIDE if quoted else _OUTSIDE).search(self.text, end)
            if step is None or (step[0] == "\\" and step.end() == len(self.text)):
                end = len(self.text) if step is None else step.start()
                if watch is not None:
                    watch.see(self.text[seen:end])
                    seen = end
                if self.closed:
                    self.pos = start
                    return None
                yield
                continue
            end = step.end() + (step[0] == "\\")
            if step[0] == '"':
                quoted = not quoted
            elif step[0] != "\\":
                depth += 1 if step[0] in "{[" else -1
        if watch is not None:
            watch.see(self.text[seen:end])
        value = parse_json(self.text[start:end])
        self.pos = start if value is None else end
        return value


def parse_json(text: str) -> Any:
    """The value of a JSON text, None if it is none (or null)."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def dump_json(value: Any) -> str:
    """JSON in one line; characters stay as they are where that is valid UTF-8."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, written as an escape
        return json.dumps(value)
    return text


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{digits} is too large")
    return value


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    assert found is not None  # these patterns match nothing, too
    return found.end()
