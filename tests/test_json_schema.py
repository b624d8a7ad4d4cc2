"""Which JSON schemas are taken, and how those that cannot be enforced are refused."""

from __future__ import annotations

import json
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mistralrs_sdk.constraints.compiled import CompiledConstraint, compile_constraint
from mistralrs_sdk.constraints.constraint import Constraint
from mistralrs_sdk.constraints.vocabulary import Vocabulary
from mistralrs_sdk.errors import RequestError
from tests.tiny_models import write_tokenizer


@cache
def tokenizer() -> Tokenizer:
    folder = Path(tempfile.mkdtemp(prefix="tokenizer-"))
    write_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer(), size=512, eos_ids=[2])


def compiled(schema: Any) -> CompiledConstraint:
    return compile_constraint(Constraint.JsonSchema(schema), vocabulary())


def accepts(schema: Any, text: str) -> bool:
    """Whether the text is a whole answer under the schema."""
    matcher = compiled(schema).matcher()
    return all(matcher.advance(t) for t in tokenizer().encode(text).ids) and matcher.is_accepting


def refusal(schema: Any) -> str:
    with pytest.raises(RequestError) as caught:
        compiled(schema)
    return str(caught.value)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {}}, "#/not:"),
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems:"),
        ({"type": "array", "contains": {"type": "string"}}, "#/contains:"),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, "#/if:"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "#/dependentRequired:"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "#/propertyNames:"),
        ({"type": "object", "unevaluatedProperties": False}, "#/unevaluatedProperties:"),
        ({"nullable": True, "type": "string"}, "#/nullable:"),
        ({"minlength": 3}, "#/minlength:"),
        ({"type": "string", "contentEncoding": "base64"}, "#/contentEncoding:"),
        ({"type": "object", "x-guidance": {"lenient": True}}, "#/x-guidance:"),
        ({"properties": {"a/b~": {"not": {}}}}, "#/properties/a~1b~0/not:"),
        ({"items": {"anyOf": [{}, {"format": "unknown"}]}}, "#/items/anyOf/1/format:"),
        ({"type": "integer", "format": "int32"}, "#/format:"),
        ({"enum": [1, {"a": [2**60]}]}, "#/enum:"),
        ({"type": "object", "minProperties": 2}, "#/minProperties:"),
        ({"type": "string", "pattern": "[[:alpha:]]"}, "#/pattern:"),
        ({"patternProperties": {"[a--b]": {}}}, "#/patternProperties:"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "#/$schema:"),
        ({"properties": {"a": {"$id": "http://a.b/c"}}}, "#/properties/a/$id:"),
        ({"additionalItems": False}, "#/additionalItems:"),
        ({"properties": {"a": 3}}, "#/properties/a:"),
        ({"anyOf": {}}, "#/anyOf:"),
    ],
)
def test_what_llguidance_would_pass_over_is_refused_by_its_place(schema, place):
    """A keyword, format or value that would be ignored or weakened is named with its pointer."""
    assert f"the JSON schema's {place}" in refusal(schema)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$defs": {"x": {"items": {"pattern": "a\\q"}}}, "$ref": "#/$defs/x"}, "#/$defs/x/items/"),
        ({"properties": {"a": {"type": "foo"}}}, "#/properties/a/type:"),
        ({"properties": {"a": {"pattern": "(?=a)b"}}}, "#/properties/a/pattern:"),
        (
            {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
            "#/properties/a/oneOf:",
        ),
        (
            {
                "type": "array",
                "items": {"type": "integer", "minimum": 5, "maximum": 3},
                "minItems": 1,
            },
            "#/items/m",
        ),
        ({"type": "string", "minLength": "3"}, "#/minLength:"),
        ({"patternProperties": {"^a": {}, "b$": {}}}, "#/patternProperties:"),
        ({"type": "object", "required": ["z"], "additionalProperties": False}, "#/required:"),
        ({"type": "integer", "const": "a"}, "#/const:"),
    ],
)
def test_what_llguidance_refuses_is_found_in_the_schema(schema, place):
    """The innermost schema at fault is named, and the keyword without which it would do."""
    assert f"the JSON schema's {place}" in refusal(schema)


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        ("#/$defs/x", "points to nothing"),
        ("http://example.com/x.json", "is not a JSON pointer"),
        ("#anchor", "is not a JSON pointer"),
        (3, "is not a JSON pointer"),
    ],
)
def test_references_out_of_the_schema_are_refused(ref, reason):
    """A `$ref` means a place in the same document; nothing is fetched."""
    assert re.search(rf"#/items/\$ref: .*{reason}", refusal({"items": {"$ref": ref}}))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]},
    ],
)
def test_a_schema_that_always_contains_itself_is_refused(schema):
    """No finite answer could fit it."""
    assert "$ref: what it refers to never ends" in refusal(schema)


def test_a_schema_that_may_contain_itself_is_taken():
    """Recursion with a way out is enforced at every depth."""
    node = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }

    assert accepts(node, '{"next": {"next": null}}')
    assert not accepts(node, '{"next": {"next": 3}}')


def test_unused_definitions_are_not_looked_at():
    """What no reference reaches cannot weaken anything."""
    assert accepts({"$defs": {"x": {"not": {}}}, "type": "integer"}, "3")


def test_notes_for_readers_are_allowed():
    """Titles, examples, defaults and extensions say nothing about values."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/a",
        "title": "A",
        "description": "a number",
        "examples": [{"not": 1}],
        "default": 3,
        "deprecated": True,
        "x-origin": "here",
        "discriminator": {"propertyName": "kind"},
        "uniqueItems": False,
        "type": "integer",
    }

    assert accepts(schema, "3")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("2024-02-29", True),
        ("2023-02-29", False),
        ("1900-02-29", False),
        ("2000-02-29", True),
        ("2023-04-31", False),
        ("0000-01-01", False),
        ("9999-12-31", True),
    ],
)
def test_dates_are_those_of_the_calendar(text, right):
    """`format: date` knows leap years, beside a pattern too."""
    assert accepts({"type": "string", "format": "date"}, f'"{text}"') is right
    both = {"type": "string", "format": "date", "pattern": "^2"}
    assert accepts(both, f'"{text}"') is (right and text.startswith("2"))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("2024-02-29T23:59:59Z", True),
        ("2024-02-29T23:59:59.123456+05:30", True),
        ("2024-02-29T23:59:60Z", False),
        ("2023-02-29T00:00:00Z", False),
        ("2024-02-29T00:00:00", False),
    ],
)
def test_times_are_those_a_clock_shows(text, right):
    """`format: date-time` is what Python's datetime can read, with a time zone."""
    assert accepts({"type": "string", "format": "date-time"}, f'"{text}"') is right


def test_blanks_cannot_go_on_for_ever():
    """Between two tokens stand one space, or a line break with its indentation, or nothing."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    for text in ('{"a":1}', '{ "a" : 1 }', '{\n  "a": 1\n}'):
        assert accepts(schema, text)
    for text in ('{  "a":1}', '{\n\n"a":1}', '{"a":1} ', '{"a":1}\n'):
        assert not accepts(schema, text)


def test_letters_of_all_scripts_stay_as_they_are():
    """Values of an enum are written in UTF-8, not as escapes."""
    assert accepts({"enum": ["東京", "Zürich"]}, '"東京"')
    assert not accepts({"enum": ["東京", "Zürich"]}, r'"\u6771\u4eac"')


def test_large_schemas_are_taken():
    """Thousands of values, long strings and wide ranges are enforced, not refused."""
    assert accepts({"enum": [f"word {i}" for i in range(5000)]}, '"word 4999"')
    assert accepts({"type": "string", "maxLength": 100_000}, '"abc"')
    assert not accepts({"type": "integer", "minimum": -5, "maximum": 10**9}, "1000000001")


def test_a_schema_no_value_fits_is_refused():
    """`false` has no answer; `true` takes any."""
    assert "no value fits" in refusal(False)
    assert accepts(True, '{"a":[1,null]}')


def _sorted(value: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(value.items()))


_names = st.sampled_from(["a", "b", "c"])
_leaves = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "boolean"},
        {"type": ["string", "null"]},
        {"enum": ["x", 1, None]},
        {"const": "y"},
        {"type": "integer", "minimum": 0, "maximum": 20},
        {"type": "string", "pattern": "^[ab]+$", "maxLength": 3},
        {"type": "string", "format": "date"},
    ]
)
_schemas = st.recursive(
    _leaves,
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
        | st.builds(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:1],
                "additionalProperties": False,
            },
            st.dictionaries(_names, inner, min_size=1, max_size=3),
        )
    ),
    max_leaves=6,
)
_values = st.recursive(
    st.sampled_from([None, True, 0, 5, 21, "x", "y", "ab", "abab", "2024-02-29", ""]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3).map(_sorted)
    ),
    max_leaves=5,
)


def _in_order(schema: Any) -> Any:
    if isinstance(schema, dict):
        schema = {key: _in_order(value) for key, value in schema.items()}
        if "properties" in schema:
            schema["properties"] = _sorted(schema["properties"])
    return [_in_order(item) for item in schema] if isinstance(schema, list) else schema


_checker = jsonschema.FormatChecker(["date"])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(_schemas, _values)
def test_the_grammar_agrees_with_a_validator(schema, value):
    """What is accepted are exactly the valid values, with properties in the schema's order."""
    schema = _in_order(schema)
    valid = jsonschema.Draft202012Validator(schema, format_checker=_checker).is_valid(value)

    assert accepts(schema, json.dumps(value)) is valid


@settings(max_examples=100, deadline=None, derandomize=True)
@given(_schemas, st.lists(_names, max_size=3), st.sampled_from(["not", "contains", "foo"]))
def test_a_bad_keyword_is_found_wherever_it_is(schema, steps, keyword):
    """Under any surroundings the pointer leads to the schema with the keyword."""
    bad: Any = {keyword: {}, **schema}
    for name in steps:
        bad = {"type": "object", "properties": {name: bad, "other": schema}}
    pointer = "".join(f"/properties/{name}" for name in reversed(steps))

    assert f"#{pointer}/{keyword}:" in refusal(bad)
