"""transformers' `response_template`: which parts an answer has and how they are written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import attrs

from mistralrs_sdk.chat.response_contents import CONTENTS, PLACE, read_content, transformed

Role = Literal["content", "reasoning", "calls", "other"]
"""Where a part goes; others have no place in an answer and are left out."""

_ROLES: Mapping[str, Role] = {
    "content": "content",
    "reasoning_content": "reasoning",
    "reasoning": "reasoning",
    "thinking": "reasoning",
    "tool_calls": "calls",
}


@attrs.frozen(kw_only=True, eq=False)
class Anchor:
    """What a part begins or ends with: one of some texts, or a pattern."""

    pattern: Any
    """Compiled by `regex`, which can tell that a match has only begun."""
    literals: tuple[str, ...] | None

    def find(self, text: str, start: int, *, closed: bool) -> tuple[Any, int]:
        """The first match from `start` on, or None; and from where on more text may change it.

        What is looked for is the same however the text comes in pieces.
        """
        if closed:
            return self.pattern.search(text, start), len(text)
        match = self.pattern.search(text, start, partial=True)
        if match is None:
            return None, len(text)
        if match.partial or self._may_change(match, text):
            return None, self._first_begun(text, start, match.start())
        unsure = self._first_begun(text, start, match.start())
        return (match, len(text)) if unsure == match.start() else (None, unsure)

    def _first_begun(self, text: str, start: int, end: int) -> int:
        """Where a match begins that more text may complete, before `end`; else `end`.

        A search for what has only begun ends at a whole match, be it behind it.
        """
        if self.literals is not None:
            start = max(start, end - len(self.literals[0]))
        begun = (
            place
            for place in range(start, end)
            if self.pattern.match(text, place, partial=True) is not None
        )
        return next(begun, end)

    def _may_change(self, match: Any, text: str) -> bool:
        at_end = match.end() == len(text)
        if self.literals is not None:
            return at_end and any(
                longer != match[0] and longer.startswith(match[0]) for longer in self.literals
            )
        if at_end:
            return True
        # such as $, which matches before a last line feed: the same must be found in a longer text
        later = self.pattern.match(text + "\0", match.start())
        return later is None or (later.span(), later.groups()) != (match.span(), match.groups())


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """One field of the template."""

    name: str
    role: Role
    opens: Anchor | None
    """None: what stands in no other part."""
    closes: Anchor | None
    notation: str
    arguments: Mapping[str, Any]
    join: str
    """What comes between two of it."""
    transform: Any
    transform_each: bool

    @property
    def strips(self) -> bool:
        """Whether whitespace around its text is left out."""
        return bool(self.arguments.get("strip", True))

    def value(self, body: str, captures: Mapping[str, str]) -> Any:
        """What its text says.

        Raises:
            ValueError: it is not written as the template says.
        """
        value = read_content(self.notation, body, self.arguments)
        if self.transform is None:
            return value
        if not self.transform_each:
            return transformed(self.transform, {**captures, "content": value})
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise ValueError(f"{body!r:.80} is no list of objects")
        return [transformed(self.transform, {**captures, **item}) for item in value]


@attrs.frozen(kw_only=True, eq=False)
class ResponseTemplate:
    """The parts of an answer."""

    parts: tuple[Part, ...]
    start: Anchor | None
    """What an answer begins with, at the end of its prompt."""
    texts: tuple[str, ...]
    """All that is written in it about answers, patterns without their backslashes."""

    @property
    def rest(self) -> Part | None:
        """The part that what stands in no other belongs to."""
        return next((part for part in self.parts if part.opens is None), None)

    def part(self, role: Role) -> Part | None:
        """The first part that goes there."""
        return next((part for part in self.parts if part.role == role), None)

    def begun(self, prompt: str) -> str:
        """What the prompt has of the answer already; nothing if it shows no beginning."""
        matches = [] if self.start is None else list(self.start.pattern.finditer(prompt))
        return prompt[matches[-1].end() :] if matches else ""

    def tokens(self, vocabulary: Collection[str]) -> frozenset[str]:
        """Which of these tokens it looks for."""
        return frozenset(token for token in vocabulary if any(token in text for text in self.texts))


def read_response_template(spec: Mapping[str, Any]) -> ResponseTemplate:
    """Read a template as transformers 5 defines it.

    Raises:
        ValueError: it is none, or of another version; the message says why.
    """
    if spec.get("version", 1) != 1:
        raise ValueError(f"its version is {spec['version']!r} and 1 is known")
    fields = spec.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise ValueError("it has no fields")
    parts = tuple(_part(name, field) for name, field in fields.items())
    without = [part.name for part in parts if part.opens is None]
    if len(without) > 1:
        raise ValueError(f"only one field may have no open, not {', '.join(without)}")
    texts = tuple(_strings(fields))
    return ResponseTemplate(
        parts=parts,
        start=_anchor("start_anchor", spec, "start_anchor", "start_anchor_pattern"),
        texts=(*texts, *(text.replace("\\", "") for text in texts)),
    )


def _part(name: str, field: Any) -> Part:
    if not isinstance(field, Mapping):
        raise ValueError(f"field {name} is {field!r:.40} and no object")
    notation, join = field.get("content", "text"), field.get("join") or ""
    if notation not in CONTENTS:
        raise ValueError(f"content {notation!r} of field {name} is none of {', '.join(CONTENTS)}")
    transform = field.get("transform")
    for text in _strings(transform):
        if PLACE.search(text) and not PLACE.fullmatch(text):
            raise ValueError(f"transform {text!r} of field {name} mixes a place with other text")
    return Part(
        name=name,
        role=_ROLES.get(name, "other"),
        opens=_anchor(name, field, "open", "open_pattern"),
        closes=_anchor(name, field, "close", "close_pattern"),
        notation=notation,
        arguments=field.get("content_args") or {},
        join=str(join),
        transform=transform,
        transform_each=bool(field.get("transform_each", False)),
    )


def _anchor(name: str, spec: Mapping[str, Any], literal: str, pattern: str) -> Anchor | None:
    import regex

    if literal in spec and pattern in spec:
        raise ValueError(f"{name} has both {literal} and {pattern}")
    if literal in spec:
        given = spec[literal]
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(_is_text(text) for text in texts):
            raise ValueError(f"{literal} of {name} is {given!r:.40} and no text or list of texts")
        longest_first = sorted(dict.fromkeys(texts), key=len, reverse=True)
        source = "|".join(map(regex.escape, longest_first))
        return Anchor(pattern=regex.compile(source), literals=tuple(longest_first))
    if pattern not in spec:
        return None
    try:
        return Anchor(pattern=regex.compile(spec[pattern], regex.DOTALL), literals=None)
    except (regex.error, TypeError) as error:
        raise ValueError(f"{pattern} of {name} is no pattern: {error}") from None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _strings(value: Any) -> Iterator[str]:
    """Every text in a nested value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(item)
