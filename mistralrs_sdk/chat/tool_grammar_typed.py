"""Grammars of calls that are no JSON: each parameter is written by its own type."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from mistralrs_sdk.chat.grammar_text import GrammarText
from mistralrs_sdk.chat.tool_formats import ToolFormat
from mistralrs_sdk.chat.tools import Tool
from mistralrs_sdk.errors import RequestError

Schema = Mapping[str, Any]

_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$schema", "$comment"}
)
_DEFINITIONS = ("$defs", "definitions")
_MOST_LEVELS = 12
_SCALARS = frozenset({"integer", "number", "boolean", "null"})


def xml_calls(
    grammar: GrammarText, tools: tuple[Tool, ...], tool_format: ToolFormat, once: bool
) -> str:
    """Qwen's function tags: a parameter's value stands between tags, text without quotes."""
    del once, tool_format
    calls = []
    for tool in tools:
        typed = _TypedTool.of(grammar, tool)
        if typed.parameters is None:
            name = grammar.rule(r"/[^>\n]+/", terminal=True)
            body = f'("<parameter=" {name} ">\\n" {grammar.until("</parameter>")} "\\n")*'
        else:
            body = " ".join(
                f"({grammar.literal(f'<parameter={name}>' + _LINE)} {_xml_value(typed, schema)} "
                f'"\\n"){"" if needed else "?"}'
                for name, schema, needed in typed.parameters
            )
        head = grammar.literal(f"\n<function={tool.name}>\n")
        calls.append(f'{head} {body} "</function>\\n"')
    return f"{grammar.rule(' | '.join(calls))} {grammar.literal('</tool_call>')}"


def gemma_calls(
    grammar: GrammarText, tools: tuple[Tool, ...], tool_format: ToolFormat, once: bool
) -> str:
    """Gemma's `call:name{key:value}`, strings between tokens of their own."""
    del once
    closes, quote = tool_format.tokens
    calls = []
    for tool in tools:
        typed = _TypedTool.of(grammar, tool)
        if typed.parameters is None:
            body = _any_gemma_mapping(grammar, quote)
        else:
            body = _gemma_mapping(typed, typed.parameters, quote, 0)
        calls.append(f"{grammar.literal(f'call:{tool.name}')} {body}")
    return f"{grammar.rule(' | '.join(calls))} {grammar.literal(closes)}"


Parameters = list[tuple[str, Schema, bool]]
"""Name, schema and whether it is required, in the schema's order."""


@attrs.frozen(kw_only=True)
class _TypedTool:
    """A tool whose parameters are written one by one."""

    grammar: GrammarText
    tool: Tool
    root: Schema
    parameters: Parameters | None
    """None: any parameters."""

    @classmethod
    def of(cls, grammar: GrammarText, tool: Tool) -> _TypedTool:
        root = grammar.held_schema(tool)
        if root is None:
            return cls(grammar=grammar, tool=tool, root={}, parameters=None)
        typed = cls(grammar=grammar, tool=tool, root=root, parameters=None)
        return attrs.evolve(typed, parameters=typed.properties(root))

    def properties(self, schema: Schema) -> Parameters | None:
        """The properties of an object's schema; None if it says more than that of them."""
        plain = {"type", "properties", "required", "additionalProperties"}
        required = set(schema.get("required", ()))
        named: Schema = schema.get("properties", {})
        if not self.says_only(schema, plain) or not required <= named.keys():
            return None
        return [(name, inner, name in required) for name, inner in named.items()]

    def says_only(self, schema: Schema, keywords: set[str]) -> bool:
        """Whether the schema has no other keyword; a strict tool is refused if it has.

        Raises:
            RequestError: as said.
        """
        others = sorted(schema.keys() - keywords - _NOTES - {*_DEFINITIONS})
        if others and self.tool.function.strict:
            raise RequestError(
                f"tool {self.tool.name!r} is strict, but {others[0]!r} in its schema cannot be "
                "enforced in the way this model writes calls: leave it out, or strict"
            )
        return not others

    def resolved(self, schema: Any) -> Schema:
        """The schema, or what its `$ref` points at; {} accepts anything."""
        for _ in range(_MOST_LEVELS):
            if not isinstance(schema, Mapping):
                return {}
            if "$ref" not in schema:
                return schema
            target: Any = self.root
            for part in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
                target = target.get(part) if isinstance(target, Mapping) and part else target
            schema = target
        return {}

    def json(self, schema: Schema) -> str:
        """JSON by a schema that may refer to the whole one's definitions."""
        defined = {key: self.root[key] for key in _DEFINITIONS if key in self.root}
        return self.grammar.json({**defined, **schema})


def _xml_value(typed: _TypedTool, schema: Any) -> str:
    """A value and the tag behind it."""
    grammar, inner = typed.grammar, typed.resolved(schema)
    listed = inner.get("enum", [inner["const"]] if "const" in inner else [])
    if listed and all(isinstance(value, str) for value in listed):
        words = " | ".join(grammar.literal(value) for value in listed)
        return f'({words}) "\\n</parameter>"'
    branches = list(_branches(typed, inner))
    for branch in branches:
        if branch.get("type") == "string":
            typed.says_only(branch, {"type"})
    if not inner or any(branch.get("type") == "string" for branch in branches):
        return grammar.until("</parameter>")
    return f'{typed.json(inner)} "\\n</parameter>"'


def _branches(typed: _TypedTool, schema: Schema) -> Iterator[Schema]:
    """The schema as alternatives of one type each, as far as it is written as such."""
    alternatives = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    for alternative in alternatives:
        yield typed.resolved(alternative)
    kinds = schema.get("type")
    if isinstance(kinds, list):
        yield from ({**schema, "type": kind} for kind in kinds)
    elif not alternatives:
        yield schema


def _gemma_value(typed: _TypedTool, schema: Any, quote: str, level: int) -> str:
    grammar, inner = typed.grammar, typed.resolved(schema)
    if level > _MOST_LEVELS or not inner:
        return _any_gemma_value(grammar, quote)
    listed = inner.get("enum", [inner["const"]] if "const" in inner else [])
    if listed and all(isinstance(value, str | int | float | None) for value in listed):
        return grammar.rule(" | ".join(_gemma_word(grammar, value, quote) for value in listed))
    branches = list(_branches(typed, inner))
    if branches != [inner]:
        values = [_gemma_value(typed, branch, quote, level + 1) for branch in branches]
        return grammar.rule(" | ".join(values))
    kind = inner.get("type")
    if kind in _SCALARS:
        return typed.json(inner)
    if kind == "string":
        typed.says_only(inner, {"type"})
        return f"{grammar.literal(quote)} {grammar.until(quote)}"
    if kind == "array" and typed.says_only(inner, {"type", "items"}):
        value = _gemma_value(typed, inner.get("items", {}), quote, level + 1)
        return grammar.rule(f'"[" ({value} ("," {value})*)? "]"')
    named = typed.properties(inner) if kind == "object" else None
    if named:
        return _gemma_mapping(typed, named, quote, level)
    return _any_gemma_value(grammar, quote)


def _gemma_mapping(typed: _TypedTool, parameters: Parameters, quote: str, level: int) -> str:
    """Members in the schema's order; built from the last one, with and without one before it."""
    grammar = typed.grammar
    first = later = ""
    for name, schema, needed in reversed(parameters):
        value = _gemma_value(typed, schema, quote, level + 1)
        pair = f"{grammar.literal(f'{name}:')} {value} {later}"
        first = grammar.rule(pair if needed else f"{pair} | {first or _NOTHING}")
        later = grammar.rule(f'"," {pair}' if needed else f'"," {pair} | {later or _NOTHING}')
    return f'"{{" {first} "}}"'


def _any_gemma_value(grammar: GrammarText, quote: str) -> str:
    string = f"{grammar.literal(quote)} {grammar.until(quote)}"
    scalar = grammar.json({"type": ["number", "boolean", "null"]})
    return grammar.recursive(
        lambda value: (
            f'{string} | {scalar} | "[" ({value} ("," {value})*)? "]" '
            f"| {_any_members(grammar, value)}"
        )
    )


def _any_gemma_mapping(grammar: GrammarText, quote: str) -> str:
    return _any_members(grammar, _any_gemma_value(grammar, quote))


def _any_members(grammar: GrammarText, value: str) -> str:
    key = grammar.rule(r"/[A-Za-z_]\w*/", terminal=True)
    return f'"{{" ({key} ":" {value} ("," {key} ":" {value})*)? "}}"'


def _gemma_word(grammar: GrammarText, value: Any, quote: str) -> str:
    if not isinstance(value, str):
        return grammar.literal(json.dumps(value))
    return " ".join(grammar.literal(part) for part in (quote, value, quote) if part)


_LINE = "\n"
_NOTHING = '""'
