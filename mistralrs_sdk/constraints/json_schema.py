"""JSON schemas as they can be enforced: what would be weakened is refused, by its place."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import attrs

from mistralrs_sdk.errors import RequestError

DIALECTS = (
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
)
"""What `$schema` may be."""
FORMATS = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
)  # fmt: skip
"""What `format` may be."""

_NOTES = frozenset(
    (
        "$anchor", "$comment", "$id", "$schema", "default", "deprecated", "description",
        "discriminator", "example", "examples", "externalDocs", "readOnly", "title", "writeOnly",
        "xml",
    )
)  # fmt: skip
_ASSERTIONS = frozenset(
    (
        "$defs", "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const",
        "definitions", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "items",
        "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength",
        "minProperties", "minimum", "multipleOf", "oneOf", "pattern", "patternProperties",
        "prefixItems", "properties", "required", "type", "uniqueItems",
    )
)  # fmt: skip
_ONE_SCHEMA = ("additionalItems", "additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("patternProperties", "properties")
_NUMBERS = ("const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
_EXACT = 2**53  # beyond it two integers can be one floating point number

_CLASS_OPERATORS = re.compile(r"\[|&&|--|~~")
_CLASS = re.compile(r"\\.|\[\^?\]?((?:\\.|[^\]\\])*)\]", re.DOTALL)

_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_YEAR = r"(?:000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
_FOURTHS = r"(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|(?:\d\d{_FOURTHS}|{_FOURTHS}00)-02-29)"
)
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Formats of which llguidance knows no leap years, or takes what no clock shows."""


@attrs.frozen
class Place:
    """A schema inside a schema, and the JSON pointer to it."""

    pointer: str
    schema: Any

    def refusal(self, keyword: str | None, why: str) -> RequestError:
        where = f"the JSON schema's {self.pointer}"
        return RequestError(f"{where}: {why}" if keyword is None else f"{where}/{keyword}: {why}")


def enforceable(schema: Any) -> Any:
    """Return the schema in terms that llguidance enforces to the letter.

    Raises:
        RequestError: something in it cannot be enforced; it names the JSON pointer and the keyword.
    """
    if isinstance(schema, bool):
        return schema
    schema = copy.deepcopy(schema)
    reached = list(places(schema))
    for place in reached:
        _check(place, schema)
    _require_an_end(reached, schema)
    for place in reached:
        _rewrite(place.schema)
    return schema


def places(root: Any) -> Iterator[Place]:
    """Walk through all schemas in `root` that it uses, each once, parents first."""
    seen: set[int] = set()
    open_places = [Place("#", root)]
    while open_places:
        place = open_places.pop()
        schema = place.schema
        if isinstance(schema, bool) or id(schema) in seen:
            continue
        if not isinstance(schema, dict):
            raise place.refusal(
                None, f"{schema!r:.60} is no schema: it must be an object or a bool"
            )
        seen.add(id(schema))
        yield place
        inside = list(_children(place))
        if "$ref" in schema:
            inside.append(_target(place, root))
        open_places += reversed(inside)


def _children(place: Place) -> Iterator[Place]:
    schema = place.schema
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            for i, value in enumerate(schema[key]):
                yield Place(f"{place.pointer}/{key}/{i}", value)
        elif key in schema and key != "items":
            raise place.refusal(key, f"{schema[key]!r:.60} must be a list of schemas")
    for key in _ONE_SCHEMA:
        if key in schema and not isinstance(schema[key], list):
            yield Place(f"{place.pointer}/{key}", schema[key])
    for key in _NAMED:
        named = schema.get(key, {})
        if not isinstance(named, dict):
            raise place.refusal(key, f"{named!r:.60} must be an object of schemas")
        for name, value in named.items():
            yield Place(f"{place.pointer}/{key}/{_escape(name)}", value)


def _target(place: Place, root: Any) -> Place:
    """The schema a `$ref` means."""
    ref = place.schema["$ref"]
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise place.refusal(
            "$ref", f"{ref!r:.80} is not a JSON pointer into this schema ('#/$defs/...')"
        )
    found: Any = root
    for step in unquote(ref[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            raise place.refusal("$ref", f"{ref!r:.80} points to nothing: there is no {name!r}")
    return Place(ref, found)


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _check(place: Place, root: Any) -> None:
    """Refuse what llguidance passes over without a word, or knows nothing of."""
    schema = place.schema
    for key in schema:
        if key not in _ASSERTIONS and key not in _NOTES and not _is_extension(key):
            raise place.refusal(key, f"the keyword {key!r} cannot be enforced: leave it out")
    if schema.get("uniqueItems", False) is not False:
        raise place.refusal("uniqueItems", "the keyword 'uniqueItems' cannot be enforced")
    if schema is not root and not schema.keys().isdisjoint(("$id", "$schema")):
        key = "$id" if "$id" in schema else "$schema"
        raise place.refusal(key, f"{key!r} may stand only at the top of the schema")
    dialect = schema.get("$schema", DIALECTS[0])
    if not isinstance(dialect, str) or dialect.removesuffix("#") not in DIALECTS:
        raise place.refusal("$schema", f"{dialect!r:.80} must be one of {', '.join(DIALECTS)}")
    if "prefixItems" in schema and root.get("$schema", DIALECTS[0]) != DIALECTS[0]:
        raise place.refusal("prefixItems", f"{root['$schema']} has no such keyword")
    if "additionalItems" in schema and not isinstance(schema.get("items"), list):
        raise place.refusal("additionalItems", "it says nothing without a list of items")
    if "format" in schema and schema["format"] not in FORMATS:
        raise place.refusal(
            "format", f"{schema['format']!r:.60} cannot be enforced; {', '.join(FORMATS)} can"
        )
    for key in _NUMBERS:
        if key in schema and (number := _inexact(schema[key])) is not None:
            raise place.refusal(key, f"{number} is beyond 2**53 and would be rounded")
    if "pattern" in schema:
        _check_pattern(place, "pattern", schema["pattern"])
    for pattern in schema.get("patternProperties", ()):
        _check_pattern(place, "patternProperties", pattern)
    _check_num_properties(place)


def _is_extension(key: str) -> bool:
    return key.startswith("x-") and key != "x-guidance"  # which would change how all is read


def _inexact(value: Any) -> int | None:
    """The first integer in a value that floating point numbers would round."""
    if isinstance(value, int) and abs(value) > _EXACT:
        return value
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return next((n for item in value if (n := _inexact(item)) is not None), None)
    return None


def _check_pattern(place: Place, keyword: str, pattern: Any) -> None:
    """Refuse classes that the regexes of JSON Schema and of llguidance read differently."""
    if not isinstance(pattern, str):
        raise place.refusal(keyword, f"{pattern!r:.60} must be a str")
    for match in _CLASS.finditer(pattern):
        inside = re.sub(r"\\.", "", match.group(1) or "", flags=re.DOTALL)
        if operator := _CLASS_OPERATORS.search(inside):
            raise place.refusal(
                keyword,
                f"{operator.group()!r} inside a class of {pattern!r:.80} has two meanings: "
                "escape it with a backslash",
            )


def _check_num_properties(place: Place) -> None:
    """Refuse a minProperties that one name written twice could meet."""
    schema = place.schema
    least = schema.get("minProperties", 0)
    required = schema.get("required", ())
    named = len(required) if isinstance(required, list) else 0
    open_ended = schema.get("additionalProperties", True) or schema.get("patternProperties")
    if isinstance(least, int) and least > named + 1 and open_ended:
        raise place.refusal(
            "minProperties",
            f"{least} cannot be enforced beside names that are open: a name may come twice; "
            "list the names in 'properties' and 'required'",
        )


def _require_an_end(reached: list[Place], root: Any) -> None:
    """Refuse a schema that refers to itself wherever an answer could end."""
    ending: set[int] = set()
    left = reached
    while True:
        known = len(ending)
        # There and back: a long chain of references is then known after two rounds.
        left = left[::-1]
        ending.update(id(p.schema) for p in left if _ends(p, root, ending))
        left = [p for p in left if id(p.schema) not in ending]
        if len(ending) == known:
            break
    if id(root) not in ending:
        endless = (p for p in reached if "$ref" in p.schema and id(p.schema) not in ending)
        place = next(endless, reached[0])
        raise place.refusal("$ref", "what it refers to never ends: it always contains itself")


def _ends(place: Place, root: Any, ending: set[int]) -> bool:
    """Whether some finite value fits the schema, as far as is known."""
    schema = place.schema

    def fits(inner: Any) -> bool:
        return isinstance(inner, bool) or id(inner) in ending

    if "$ref" in schema and not fits(_target(place, root).schema):
        return False
    if not all(fits(part) for part in schema.get("allOf", ())):
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any(fits(part) for part in schema[key]):
            return False
    kinds = schema.get("type")
    kinds = {kinds} if isinstance(kinds, str) else set(kinds or ("null",))
    if not kinds <= {"array", "object"} or "const" in schema or "enum" in schema:
        return True
    return ("object" in kinds and _object_ends(schema, fits)) or (
        "array" in kinds and _array_ends(schema, fits)
    )


def _object_ends(schema: dict[str, Any], fits: Any) -> bool:
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    required = schema.get("required", ())
    names = required if isinstance(required, list) else ()
    return all(fits(properties.get(name, rest)) for name in names)


def _array_ends(schema: dict[str, Any], fits: Any) -> bool:
    items = schema.get("items", True)
    first = items if isinstance(items, list) else schema.get("prefixItems", [])
    rest = schema.get("additionalItems", True) if isinstance(items, list) else items
    least = schema.get("minItems", 0)
    if not isinstance(least, int):
        return True  # llguidance refuses it
    return all(map(fits, first[:least])) and (least <= len(first) or fits(rest))


def _rewrite(schema: dict[str, Any]) -> None:
    schema.pop("uniqueItems", None)  # False, which llguidance does not take
    if (pattern := _PATTERNS.get(schema.get("format", ""))) is not None:
        del schema["format"]
        if "pattern" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]
        else:
            schema["pattern"] = pattern
