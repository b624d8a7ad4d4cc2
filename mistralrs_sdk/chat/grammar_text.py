"""`GrammarText`: writes a grammar in llguidance's variant of Lark, rule by rule."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from mistralrs_sdk.chat.tools import Tool
from mistralrs_sdk.constraints.json_schema import enforceable
from mistralrs_sdk.errors import RequestError

ANY_TEXT = r"/(.|\n)*/"
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class GrammarText:
    """The rules so far. Every method returns an expression to use in other rules."""

    def __init__(self, vocabulary: Mapping[str, int], *, all_strict: bool) -> None:
        """`vocabulary` gives the ids of added tokens; `all_strict` holds every tool's schema."""
        self.vocabulary = vocabulary
        self._all_strict = all_strict
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def text(self, start: str) -> str:
        """The whole grammar, beginning with `start`."""
        rules = [f"{name}: {body}" for name, body in self._rules.items()]
        return "\n".join([f"start: {start}", *rules, ""])

    def literal(self, text: str) -> str:
        """These characters, or the added token of that name."""
        if text in self.vocabulary:
            return f"<[{self.vocabulary[text]}]>"
        return json.dumps(text, ensure_ascii=False)

    def rule(self, body: str, *, terminal: bool = False, options: str = "") -> str:
        """A rule of its own; a terminal is a regular expression. The same body is written once."""
        known = f"{options} {body}"
        if known not in self._names:
            name = f"{'TEXT' if terminal else 'rule'}_{len(self._rules)}"
            self._names[known] = name
            self._rules[f"{name}{options}"] = body
        return self._names[known]

    def recursive(self, body: Callable[[str], str]) -> str:
        """A rule that refers to itself: `body` gets its name. Written once for each body."""
        known = f"recursive {body('SELF')}"
        if known not in self._names:
            self._names[known] = name = f"rule_{len(self._rules)}"
            self._rules[name] = ""
            self._rules[name] = body(name)
        return self._names[known]

    def until(self, text: str) -> str:
        """Any text up to the first `text`, and that."""
        if text in self.vocabulary:
            return f"{self.rule(ANY_TEXT, terminal=True)} {self.literal(text)}"
        return self.rule(ANY_TEXT, options=f"[suffix={json.dumps(text, ensure_ascii=False)}]")

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """JSON that this schema accepts."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def arguments(self, tool: Tool) -> str:
        """The JSON object of a tool's arguments."""
        return self.json(self.held_schema(tool) or {"type": "object"})

    def is_held(self, tool: Tool) -> bool:
        """Whether the tool's arguments follow its schema, or are any object."""
        return tool.function.strict or self._all_strict

    def held_schema(self, tool: Tool) -> Mapping[str, Any] | None:
        """The schema that arguments of this tool are held to; None: to that of any object.

        Raises:
            RequestError: the tool is strict and its schema cannot be enforced.
        """
        if not self.is_held(tool):
            return None
        schema = {"type": "object", **(tool.function.parameters or NO_ARGUMENTS)}
        try:
            return enforceable(schema)
        except RequestError as error:
            if not tool.function.strict:
                return None  # nothing was promised for it
            raise RequestError(
                f"tool {tool.name!r} is strict, which cannot be kept: {error}"
            ) from error
