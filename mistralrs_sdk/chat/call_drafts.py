"""Calls that are given while they are being written, before it is sure that they are calls."""

from __future__ import annotations

import json
from collections.abc import Callable

import attrs

from mistralrs_sdk.chat.incoming_text import dump_json, parse_json
from mistralrs_sdk.chat.tools import CalledFunction

_ARGUMENT_KEYS = ("arguments", "parameters", "args")


@attrs.define(eq=False)
class CallDraft:
    """A call that has a name, and of its arguments what has come."""

    name: str
    pieces: list[str] = attrs.field(factory=list)

    @property
    def arguments(self) -> str:
        """Their JSON text, as the model wrote it."""
        return "".join(self.pieces)

    def says(self, call: CalledFunction) -> bool:
        """Whether it has become this call."""
        value = parse_json(self.arguments)
        return self.name == call.name and value is not None and dump_json(value) == call.arguments


class CallDrafts:
    """The calls that have begun in one block; `grow(draft, piece)` hears of each piece."""

    def __init__(self, grow: Callable[[CallDraft, str], None]) -> None:
        self.begun: list[CallDraft] = []
        self._grow = grow
        self._may_begin = True

    def call(self) -> CallWatch:
        """For the JSON of a call, or of a list of calls."""
        return CallWatch(self, None)

    def arguments(self, name: str) -> CallWatch:
        """For the JSON of this function's arguments."""
        return CallWatch(self, name)

    def begin(self, name: str) -> CallDraft | None:
        """Begin one, if no call before it stays without: their order is that of the text."""
        if not self._may_begin or not name:
            return None
        draft = CallDraft(name)
        self.begun.append(draft)
        return draft

    def grow(self, draft: CallDraft, piece: str) -> None:
        """Add to one."""
        draft.pieces.append(piece)
        self._grow(draft, piece)

    def end_without(self) -> None:
        """A call ended of which nothing was given: it is given whole, and so are later ones."""
        self._may_begin = False


class CallWatch:
    """Looks at JSON as it comes, and begins drafts where a call has its name and its arguments.

    It takes valid JSON for granted: whoever reads the whole finds out whether it was.
    """

    def __init__(self, drafts: CallDrafts, name: str | None) -> None:
        self._drafts = drafts
        self._fixed_name = name
        self._name = name
        self._depth = 0
        self._level = 0
        """How deep the members of a call are."""
        self._quoted = self._escaped = False
        self._word: list[str] = []
        """The string being read, of those at that level."""
        self._string: str | None = None
        """The last whole one."""
        self._key: str | None = None
        self._draft: CallDraft | None = None
        self._is_open = False
        self._piece: list[str] = []

    def see(self, text: str) -> None:
        """Look at what comes next."""
        for char in text:
            if self._quoted:
                self._inside(char)
            else:
                self._outside(char)
        self._flush()

    def _inside(self, char: str) -> None:
        """A character of a string."""
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._quoted = False
            self._end_string()
        if self._is_open:  # line feeds and the like are taken, but are no JSON
            self._piece.append(char if char >= " " else json.dumps(char)[1:-1])
        elif self._quoted and self._depth == self._level:
            self._word.append(char)

    def _outside(self, char: str) -> None:
        if char in "{[":
            self._depth += 1
            self._opened(char)
        if self._is_open:
            self._piece.append(char)
        if char == '"':
            self._quoted = True
            self._word.clear()
        elif char in "}]":
            self._depth -= 1
            self._closed()
        elif self._depth == self._level:
            if char == ":":
                self._key = self._string
            elif char == ",":
                self._key = None

    def _opened(self, char: str) -> None:
        if self._depth == 1:
            if self._fixed_name is not None:
                self._begin(char)
            else:
                self._level = 1 if char == "{" else 2
        elif self._depth == self._level + 1 and self._key in _ARGUMENT_KEYS:
            self._begin(char)

    def _begin(self, char: str) -> None:
        if char == "{" and self._name is not None and self._draft is None:
            self._draft = self._drafts.begin(self._name)
            self._is_open = self._draft is not None

    def _closed(self) -> None:
        if self._is_open and self._depth == self._level:
            self._flush()
            self._is_open = False
        if self._depth == max(self._level - 1, 0):  # the call itself has ended
            if self._draft is None:
                self._drafts.end_without()
            self._draft, self._name, self._key = None, self._fixed_name, None

    def _end_string(self) -> None:
        if self._depth != self._level or self._is_open:
            return
        string = parse_json(f'"{"".join(self._word)}"')
        self._string = string if isinstance(string, str) else None
        if self._key == "name":
            self._name = self._string

    def _flush(self) -> None:
        if self._draft is not None and self._piece:
            self._drafts.grow(self._draft, "".join(self._piece))
        self._piece.clear()
