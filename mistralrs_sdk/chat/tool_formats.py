"""The ways families of models write tool calls, and the reader of each."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from mistralrs_sdk.chat.call_drafts import CallDrafts
from mistralrs_sdk.chat.incoming_text import IncomingText, Waiting, dump_json, parse_json
from mistralrs_sdk.chat.tools import CalledFunction, Tool

Calls = list[CalledFunction] | None
"""The calls of a block; None if it is no such block after all."""

Schemas = Mapping[str, Mapping[str, Any]]
"""By tool name: the JSON schemas of its parameters, by their names."""


@attrs.frozen(kw_only=True)
class ToolFormat:
    """How one family writes calls.

    `read(text, marker, schemas, drafts)` begins right after the marker and ends right after the
    block; what it lets `drafts` see is given before the block ends.
    """

    name: str
    markers: tuple[str, ...]
    """What a block of calls begins with; none begins with, or ends as, another begins."""
    read: Callable[[IncomingText, str, Schemas, CallDrafts], Waiting[Calls]]
    tokens: tuple[str, ...] = ()
    """What else of the format may be special tokens, whose text must not be left out."""
    soft: frozenset[str] = frozenset()
    """Markers that ordinary text has too: no call behind them is no surprise."""
    bare: bool = False
    """Whether an answer may begin with a call that no marker announces."""
    short_ids: bool = False
    """Whether the template wants ids of nine letters and digits."""


def parameter_schemas(tools: tuple[Tool, ...]) -> Schemas:
    """The schemas of each tool's parameters, for formats that do not write types."""
    return {tool.name: (tool.function.parameters or {}).get("properties", {}) for tool in tools}


def call_from(value: Any) -> CalledFunction | None:
    """The call a JSON object describes: a name, and an object of arguments, under usual keys."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):
        return call_from(inner)
    name = value.get("name", inner)
    given = [value[key] for key in ("arguments", "parameters", "args") if key in value]
    return named_call(name, given[0] if given else {})


def named_call(name: Any, arguments: Any) -> CalledFunction | None:
    """A call with these arguments: an object, or its JSON text."""
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return CalledFunction(name, dump_json(arguments))


def calls_from_list(value: Any) -> Calls:
    """The calls of a JSON list, or of one object; None unless all are calls."""
    calls = [call_from(item) for item in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if calls and all(calls) else None


def call_from_python(source: str) -> Calls:
    """The calls of a Python expression: `f(a=1)`, `tool.call(a=1)` or a list of such."""
    try:
        tree = ast.parse(source.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        calls = [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return [call for call in calls if call is not None] if calls and all(calls) else None


def _python_call(node: ast.expr) -> CalledFunction | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    name = ast.unparse(node.func)
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    if None in arguments or not name.replace(".", "_").isidentifier():
        return None
    try:
        return CalledFunction(name.removesuffix(".call"), dump_json(arguments))
    except TypeError:  # bytes, sets, complex numbers
        return None


def _tool_call_tag(
    text: IncomingText, marker: str, schemas: Schemas, drafts: CallDrafts
) -> Waiting[Calls]:
    """`<tool_call>` around JSON (Qwen, Hermes) or around function tags (Qwen3-Coder, Qwen3.5)."""
    if marker == "<tool_call>":
        yield from text.space()
        if (yield from text.literal("<function=")) is None:
            call = call_from((yield from text.json(drafts.call())))
            yield from text.space()
            closed = yield from text.literal("</tool_call>")
            return None if call is None or closed is None else [call]
    call = yield from _function_tag(text, schemas)
    if call is not None and marker == "<tool_call>":
        yield from text.space()
        if (yield from text.literal("</tool_call>")) is None:
            return None
    return None if call is None else [call]


def _function_tag(text: IncomingText, schemas: Schemas) -> Waiting[CalledFunction | None]:
    name = yield from text.until(">")
    if name is None or not name.strip() or "\n" in name:
        return None
    known = schemas.get(name.strip(), {})
    arguments: dict[str, Any] = {}
    while True:
        yield from text.space()
        tag = yield from text.literal("<parameter=", "</function>")
        if tag is None:
            return None
        if tag == "</function>":
            return named_call(name.strip(), arguments)
        key = yield from text.until(">")
        value = yield from text.until("</parameter>")
        if key is None or value is None:
            return None
        arguments[key.strip()] = typed(value, known.get(key.strip()))


def typed(value: str, schema: Any) -> Any:
    """What a parameter written without quotes means: text if its schema says so, else JSON."""
    value = value.removeprefix("\n").removesuffix("\n")
    kinds, listed = _kinds(schema)
    if value in listed or kinds == {"string"}:
        return value
    word = value.strip()
    read = parse_json({"True": "true", "False": "false"}.get(word, word))
    if read is None and word not in ("null", "None"):
        return value
    return value if "string" in kinds and _kind(read) not in kinds else read


def typed_argument(value: str, schema: Any, *, unquoted: bool) -> Any:
    """What a text means as an argument; a quoted one is taken for something else only if it must.

    `unquoted` says that the notation writes everything without quotes.
    """
    kinds, _ = _kinds(schema)
    if unquoted or (kinds and "string" not in kinds):
        return typed(value, schema)
    return value


def _kinds(schema: Any) -> tuple[set[str], list[Any]]:
    """The types a schema allows by name, empty if it names none, and the values it lists."""
    if not isinstance(schema, Mapping):
        return set(), []
    kinds, listed = schema.get("type", []), list(schema.get("enum", []))
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        inner, values = _kinds(part)
        found |= inner
        listed += values
    return found | ({"number"} if "integer" in found else set()), listed


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", dict: "object"}
    return "null" if value is None else names.get(type(value), "array")


def _llama(text: IncomingText, marker: str, schemas: Schemas, drafts: CallDrafts) -> Waiting[Calls]:
    """`<|python_tag|>`, or nothing, and JSON objects with `;` between; or a Python call."""
    del schemas
    yield from text.space()
    calls = calls_from_list((yield from text.json(drafts.call())))
    if calls is None:
        if marker:
            while not text.closed:  # such a call has no end mark
                yield
            calls = call_from_python(text.text[text.pos :])
            text.pos = len(text.text) if calls else text.pos
        return calls
    while True:
        end = text.pos
        yield from text.space()
        yield from text.literal(";")
        yield from text.space()
        more = calls_from_list((yield from text.json(drafts.call())))
        if more is None:
            text.pos = end
            return calls
        calls += more


def _mistral(
    text: IncomingText, marker: str, schemas: Schemas, drafts: CallDrafts
) -> Waiting[Calls]:
    """`[TOOL_CALLS]` and a JSON list, or a name, `[ARGS]` and a JSON object."""
    del marker, schemas
    yield from text.space()
    name = yield from text.name()
    if name is None:
        return calls_from_list((yield from text.json(drafts.call())))
    if (yield from text.literal("[CALL_ID]")) is not None:
        yield from text.name()
    yield from text.literal("[ARGS]")
    yield from text.space()
    call = named_call(name, (yield from text.json(drafts.arguments(name))))
    return None if call is None else [call]


def _deepseek(
    text: IncomingText, marker: str, schemas: Schemas, drafts: CallDrafts
) -> Waiting[Calls]:
    """DeepSeek's block of calls: a type, a name and fenced JSON, or (V3.1) a name and JSON."""
    del marker, schemas
    calls: list[CalledFunction] = []
    while True:
        end = text.pos
        yield from text.space()
        if (yield from text.literal(_CALL_BEGIN)) is None:
            if (yield from text.literal(_CALLS_END)) is None:
                text.pos = end  # cut off behind a whole call
            return calls or None
        name = yield from text.until(_SEPARATOR)
        if name is None:
            return None
        arguments = yield from text.json(drafts.arguments(name.strip()))
        if arguments is None:
            name = yield from text.until("```json")
            yield from text.space()
            arguments = yield from text.json(drafts.arguments((name or "").strip()))
            yield from text.space()
            if (yield from text.literal("```")) is None:
                return None
        call = named_call((name or "").strip(), arguments)
        yield from text.space()
        if call is None or (yield from text.literal(_CALL_END)) is None:
            return None
        calls.append(call)


def _fenced(
    text: IncomingText, marker: str, schemas: Schemas, drafts: CallDrafts
) -> Waiting[Calls]:
    """A fenced block that holds a call as JSON, or (tool_code) as Python."""
    del schemas, drafts
    body = yield from text.until("\n```")
    if body is None:
        return None
    calls = calls_from_list(parse_json(body))
    return calls if calls or marker != "```tool_code" else call_from_python(body)


def _deepseek_token(words: str) -> str:
    """DeepSeek's tokens use bars and spaces of their own."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


_CALLS_BEGIN = _deepseek_token("tool calls begin")
_CALL_BEGIN = _deepseek_token("tool call begin")
_CALL_END = _deepseek_token("tool call end")
_CALLS_END = _deepseek_token("tool calls end")
_SEPARATOR = _deepseek_token("tool sep")

HERMES = ToolFormat(
    name="hermes",
    markers=("<tool_call>", "<function="),
    read=_tool_call_tag,
    tokens=("</tool_call>",),
)
QWEN_XML = attrs.evolve(HERMES, name="qwen_xml")
LLAMA = ToolFormat(name="llama", markers=("<|python_tag|>",), read=_llama, bare=True)
MISTRAL = ToolFormat(
    name="mistral",
    markers=("[TOOL_CALLS]",),
    read=_mistral,
    tokens=("[ARGS]", "[CALL_ID]"),
    short_ids=True,
)
DEEPSEEK = ToolFormat(
    name="deepseek",
    markers=(_CALLS_BEGIN,),
    read=_deepseek,
    tokens=(_CALL_BEGIN, _CALL_END, _CALLS_END, _SEPARATOR),
)
DEEPSEEK_V31 = attrs.evolve(DEEPSEEK, name="deepseek_v31")
FENCED = ToolFormat(
    name="fenced",
    markers=("```tool_call", "```tool_code", "```json"),
    read=_fenced,
    soft=frozenset({"```json"}),
)
