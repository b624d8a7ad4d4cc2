"""`TemplateParser`: parts an answer's text as a response template says, as it comes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import attrs

from mistralrs_sdk.chat.answer_parser import AnswerDelta
from mistralrs_sdk.chat.response_template import Anchor, Part, ResponseTemplate
from mistralrs_sdk.chat.tool_formats import (
    Calls,
    Schemas,
    calls_from_list,
    parameter_schemas,
    typed_argument,
)
from mistralrs_sdk.chat.tools import Tool, ToolCallResponse


class TemplateParser:
    """Reads answers in parts that begin and end with texts or patterns, such as channels.

    Fed all at once or in any pieces, it finds the same. Parts of one kind are joined; calls come
    whole, as only the end of a part shows what it says. A part that holds no calls although it
    should is content, word for word. Without tools their part is text like any other.
    """

    def __init__(
        self, template: ResponseTemplate, *, prompt: str = "", tools: tuple[Tool, ...] = ()
    ) -> None:
        """`prompt` may have begun the answer."""
        self.has_calls = False
        self._parts = [part for part in template.parts if tools or part.role != "calls"]
        self._rest = template.rest if template.rest in self._parts else None
        self._schemas: Schemas = parameter_schemas(tools)
        self._text = template.begun(prompt)
        self._own = len(self._text)
        """Where the text of the model begins."""
        self._pos = 0
        self._closed = False
        self._part = self._rest
        self._is_open = False
        self._start = self._body = 0
        """Where the open part began, mark included, and where its text did."""
        self._captures: dict[str, str] = {}
        self._texts = {part.name: _PartText(part) for part in self._parts}
        self._delta = AnswerDelta()
        self._num_calls = 0
        self._advance()
        self._delta = AnswerDelta()  # what the prompt says is no part of the answer

    def feed(self, text: str) -> AnswerDelta:
        """Add text; return what is now certain."""
        self._text += text
        if text:
            self._advance()
        return self._taken()

    def finish(self) -> AnswerDelta:
        """Return what was held back because it could have become something else."""
        self._closed = True
        self._advance()
        return self._taken()

    def _taken(self) -> AnswerDelta:
        delta, self._delta = self._delta, AnswerDelta()
        return delta

    def _advance(self) -> None:
        while (found := self._next_mark()) is not None:
            part, match = found
            self._take(match.start())
            self._pos = match.end()
            if part is None:
                self._end(match.start(), match)
            else:
                self._end(match.start(), None)
                self._begin(part, match)
        if self._closed:
            self._end(self._pos, None)

    def _next_mark(self) -> tuple[Part | None, Any] | None:
        """The next part that opens, or None for the end of the open one, with its match.

        Before there is one, what certainly comes before it is taken.
        """
        inside = self._part is not self._rest
        watched: list[tuple[Part | None, Anchor]] = []
        if not inside:
            watched += [(part, part.opens) for part in self._parts if part.opens is not None]
        if self._part is not None and self._part.closes is not None:
            watched.append((None, self._part.closes))
        found: list[tuple[int, int, Part | None, Any]] = []
        sure = len(self._text)
        for part, anchor in watched:
            match, unsure = anchor.find(self._text, self._pos, closed=self._closed)
            if match is not None and match.end() == self._pos and not self._is_open:
                # an end without any text before it ends nothing
                match, unsure = anchor.find(self._text, self._pos + 1, closed=self._closed)
            sure = min(sure, unsure)
            if match is not None:
                found.append((match.start(), -match.end(), part, match))
        start, _, part, match = min(found, key=lambda each: each[:2], default=(sure, 0, None, None))
        if start < sure:
            return part, match
        self._take(sure)
        return None

    def _take(self, end: int) -> None:
        """Give the text up to `end` to the open part."""
        if end <= self._pos:
            return
        part, start = self._part, self._pos
        self._is_open, self._pos = True, end
        if part is None or part.role not in ("content", "reasoning"):
            return
        own, text = min(max(start, self._own), end), self._texts[part.name]
        if own > start:
            text.add(self._text[start:own])
            text.held = ""  # the whitespace is the prompt's
        self._say(part, text.add(self._text[own:end]))

    def _say(self, part: Part, text: str) -> None:
        if part.role == "content":
            self._delta += AnswerDelta(content=text)
        else:
            self._delta += AnswerDelta(reasoning=text)

    def _begin(self, part: Part, match: Any) -> None:
        self._part, self._is_open = part, True
        self._start, self._body = match.span()
        self._captures = _named(match)

    def _end(self, end: int, match: Any) -> None:
        """End the open part, whose text goes to `end`, with its mark if it has one."""
        part = self._part
        if self._is_open and part is not None:
            if part.role == "calls":
                captures = {**self._captures, **_named(match)}
                self._add(part, self._text[self._body : end], captures)
            self._texts[part.name].end()
        self._part, self._is_open, self._captures = self._rest, False, {}
        self._start = self._body = self._pos

    def _add(self, part: Part, body: str, captures: Mapping[str, str]) -> None:
        calls = self._read(part, body, captures)
        if calls is None:
            text = self._text[max(self._start, self._own) : self._pos]
            self._delta += AnswerDelta(content=text, unparsed=True)
            return
        self.has_calls = True
        for call in calls:
            made = ToolCallResponse(
                index=self._num_calls, id=f"call_{secrets.token_hex(12)}", function=call
            )
            self._num_calls += 1
            self._delta += AnswerDelta(tool_calls=(made,))

    def _read(self, part: Part, body: str, captures: Mapping[str, str]) -> Calls:
        try:
            value = part.value(body, captures)
        except ValueError:
            return None
        unquoted = part.notation in ("xml-inline", "kv-lines")
        values = value if isinstance(value, list) else [value]
        return calls_from_list([self._typed(item, unquoted=unquoted) for item in values])

    def _typed(self, value: Any, *, unquoted: bool) -> Any:
        """A call with its arguments in the types that the tool's schema wants."""
        inner = value.get("function") if isinstance(value, dict) else None
        call = inner if isinstance(inner, dict) else value
        given = call.get("arguments") if isinstance(call, dict) else None
        if not isinstance(given, dict):
            return value
        known = self._schemas.get(str(call.get("name")), {})
        arguments = {
            key: typed_argument(argument, known[key], unquoted=unquoted)
            if isinstance(argument, str) and key in known
            else argument
            for key, argument in given.items()
        }
        return {**call, "arguments": arguments}


@attrs.define
class _PartText:
    """The text of a part, without the whitespace around it unless that counts."""

    part: Part
    begun: bool = False
    held: str = ""
    has_said: bool = False

    def add(self, text: str) -> str:
        """Return what is certain of it now."""
        if self.part.strips and not self.begun:
            text = text.lstrip()
        if not text:
            return ""
        text = self.held + text
        if self.part.strips:
            sure = len(text.rstrip())
            text, self.held = text[:sure], text[sure:]
        if not self.begun and self.has_said:
            text = self.part.join + text
        self.begun = self.has_said = True
        return text

    def end(self) -> None:
        """The next text is that of another part of this kind."""
        self.begun, self.held = False, ""


def _named(match: Any) -> dict[str, str]:
    """What the named groups of a match hold."""
    if match is None:
        return {}
    return {name: text for name, text in match.groupdict().items() if text is not None}
