"""What the text of a part of an answer means, in the notations a response template may name."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mistralrs_sdk.chat.incoming_text import parse_json

Arguments = Mapping[str, Any]


def read_content(kind: str, text: str, arguments: Arguments) -> Any:
    """Return the value of a text in the notation `kind`.

    Raises:
        ValueError: it is not written so.
    """
    return CONTENTS[kind](text, arguments)


def transformed(shape: Any, values: Mapping[str, Any]) -> Any:
    """Return `shape` with each text "{name}" or "{name.key}" replaced by that value.

    Raises:
        ValueError: there is no such value.
    """
    if isinstance(shape, Mapping):
        return {key: transformed(item, values) for key, item in shape.items()}
    if isinstance(shape, list):
        return [transformed(item, values) for item in shape]
    place = PLACE.fullmatch(shape) if isinstance(shape, str) else None
    if place is None:
        return shape
    value: Any = values
    for key in place[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"there is no {place[1]} in what was read")
        value = value[key]
    return value


PLACE = re.compile(r"\{(\w+(?:\.\w+)*)\}")
"""What a transform writes for a value."""


def _text(text: str, arguments: Arguments) -> str:
    return text.strip() if arguments.get("strip", True) else text


def _int(text: str, arguments: Arguments) -> int:
    return int(_text(text, arguments))


def _float(text: str, arguments: Arguments) -> float:
    return float(_text(text, arguments))


def _bool(text: str, arguments: Arguments) -> bool:
    return _text(text, arguments).lower() in ("true", "1")


def _json(text: str, arguments: Arguments) -> Any:
    """JSON, also with strings between marks of their own and with keys that have no quotes."""
    marks = [(str(a), str(b)) for a, b in arguments.get("string_delims", ())]
    quoted = [f"{re.escape(a)}(.*?){re.escape(b)}" for a, b in marks]
    key = r"(?<=[{,])(\s*)(\w+)(\s*:)" if arguments.get("unquoted_keys", False) else "(?!)()()()"
    pattern = "|".join([*quoted, r'"(?:\\.|[^"\\])*"', key])

    def respell(match: re.Match[str]) -> str:
        groups = match.groups()
        inside = next((group for group in groups[: len(quoted)] if group is not None), None)
        if inside is not None:
            return json.dumps(inside)
        before, name, behind = groups[-3:]
        return match[0] if name is None else f'{before}"{name}"{behind}'

    plain = re.sub(pattern, respell, text, flags=re.DOTALL)
    value = parse_json(plain)
    if value is None and plain.strip() != "null":
        if arguments.get("allow_non_json", False):
            return _text(text, arguments)
        raise ValueError(f"{text!r:.80} is no JSON")
    return value


def _tags(text: str, arguments: Arguments) -> dict[str, Any]:
    """Keys and values between tags."""
    pattern = arguments.get("tag_pattern")
    if not isinstance(pattern, str):
        raise ValueError("xml-inline needs a tag_pattern")
    import regex

    found: dict[str, list[Any]] = {}
    for match in regex.finditer(pattern, text, flags=regex.DOTALL):
        groups = match.groupdict()
        if groups.get("key") is None:
            raise ValueError(f"tag_pattern {pattern!r} has no group called key")
        value = _inner(groups.get("value") or "", arguments.get("value_parser"))
        found.setdefault(groups["key"], []).append(value)
    many = arguments.get("merge_duplicates", False)
    return {
        key: values if many and len(values) > 1 else values[-1] for key, values in found.items()
    }


def _lines(text: str, arguments: Arguments) -> dict[str, Any]:
    """A key and a value in each line."""
    between = arguments.get("kv_sep", ":")
    found: dict[str, Any] = {}
    for line in text.split(arguments.get("line_sep", "\n")):
        key, separator, value = _text(line, arguments).partition(between)
        if separator:
            value = _text(value, arguments)
            found[_text(key, arguments)] = _inner(value, arguments.get("value_parser"))
    return found


def _inner(text: str, reader: Any) -> Any:
    if reader is None:
        return text
    return read_content(reader.get("name", "text"), text, reader.get("args", {}))


_WORDS = {"true": True, "false": False, "null": None}


def _python_calls(text: str, arguments: Arguments) -> list[dict[str, Any]]:
    """`[f(a=1), g()]`; values are Python's or JSON's."""
    del arguments
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r:.80} is no list of calls: {error}") from None
    if not isinstance(tree, ast.List):
        raise ValueError(f"{text!r:.80} is no list of calls")
    return [_python_call(node) for node in tree.elts]


def _python_call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError(f"{ast.unparse(node)!r:.80} is no call with named arguments")
    given: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError(f"{ast.unparse(node)!r:.80} has an argument without a name")
        given[keyword.arg] = ast.literal_eval(_WithWords().visit(keyword.value))
    return {"name": ast.unparse(node.func), "arguments": given}


class _WithWords(ast.NodeTransformer):
    """Takes JSON's words for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


CONTENTS: Mapping[str, Callable[[str, Arguments], Any]] = {
    "text": _text,
    "int": _int,
    "float": _float,
    "bool": _bool,
    "json": _json,
    "xml-inline": _tags,
    "kv-lines": _lines,
    "python-call-list": _python_calls,
}
"""The notations by name."""
