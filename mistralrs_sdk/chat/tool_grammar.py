"""Grammars that hold an answer to tool calls, in the way its model writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from mistralrs_sdk.chat.answer_parser import ReasoningTags
from mistralrs_sdk.chat.grammar_text import ANY_TEXT, GrammarText
from mistralrs_sdk.chat.tool_formats import ToolFormat
from mistralrs_sdk.chat.tool_grammar_typed import gemma_calls, xml_calls
from mistralrs_sdk.chat.tools import Tool


def tool_grammar(
    tool_format: ToolFormat,
    tools: tuple[Tool, ...],
    *,
    vocabulary: Mapping[str, int],
    required: bool,
    once: bool = False,
    reasoning: ReasoningTags | None = None,
    opened: bool = False,
) -> str:
    """A Lark grammar (llguidance's variant) for an answer that calls some of these tools.

    With `required` the answer is nothing but calls (`once`: exactly one) behind its reasoning, all
    with arguments by their schemas. Without, it is free text with calls in it, and the arguments
    of tools that are strict follow their schemas. `vocabulary` gives the ids of added tokens:
    a marker that is one is written as one. `opened`: the prompt ends inside a reasoning block.

    Raises:
        RequestError: the format cannot hold a schema that must be held.
    """
    grammar = GrammarText(vocabulary, all_strict=required)
    thoughts = _thoughts(grammar, reasoning, opened)
    build, between = _BLOCKS[tool_format.name]
    block = build(grammar, tools, tool_format, once)
    word = tool_format.markers[0]
    marker = grammar.literal(word)
    if required:
        if tool_format.bare:
            return grammar.text(f"{thoughts}{block}")
        more = "" if once or between is None else f" ({between} {marker} {block})*"
        return grammar.text(f"{thoughts}{marker} {block}{more}")
    if tool_format.bare:
        # an answer that begins with a brace is a call: nothing else tells one from text
        free = grammar.rule(r"/(\s*[^{\s](.|\n)*)?/", terminal=True)
        return grammar.text(f"{thoughts}({free} ({marker} {block})? | {block})")
    if word in vocabulary:
        free = grammar.rule(ANY_TEXT, terminal=True)
        return grammar.text(f"{thoughts}{free} ({marker} {block} {free})*")
    without = rf"{ANY_TEXT} & ~/(.|\n)*{_escaped(word)}(.|\n)*/"
    plain = grammar.rule(without, terminal=True)
    return grammar.text(f"{thoughts}({grammar.until(word)} {block})* {plain}")


def _thoughts(grammar: GrammarText, tags: ReasoningTags | None, opened: bool) -> str:
    """The reasoning before the rest, with a space behind it; the model may leave it out."""
    if tags is None:
        return ""
    if tags.closes in grammar.vocabulary:
        text = grammar.rule(ANY_TEXT, terminal=True)
        closed = f"{text} {grammar.literal(tags.closes)}"
    else:
        closed = grammar.until(tags.closes)
    space = grammar.rule(r"/\s*/", terminal=True)
    if opened:
        return f"{closed} {space} "
    return f"({grammar.literal(tags.opens)} {closed} {space})? "


Block = Callable[[GrammarText, tuple[Tool, ...], ToolFormat, bool], str]
"""Writes what follows the marker of a block; the flag says that it holds one call only."""


def _json_calls(key: str, before: str, between: str, after: str) -> Block:
    """Calls as JSON objects with the arguments under `key`, in a list with these signs."""

    def build(grammar: GrammarText, tools: tuple[Tool, ...], fmt: ToolFormat, once: bool) -> str:
        del fmt
        objects = []
        for tool in tools:
            head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
            objects.append(f'{grammar.literal(head)} {grammar.arguments(tool)} "}}"')
        call = grammar.rule(" | ".join(objects))
        more = "" if once or not between else f" ({grammar.literal(between)} {call})*"
        parts = [grammar.literal(before), call + more, *map(grammar.literal, after.split(_CUT))]
        return " ".join(part for part in parts if part != '""')

    return build


def _mistral_calls(
    grammar: GrammarText, tools: tuple[Tool, ...], tool_format: ToolFormat, once: bool
) -> str:
    if "[ARGS]" not in grammar.vocabulary:
        return _MISTRAL_LIST(grammar, tools, tool_format, once)
    middle = grammar.literal("[ARGS]")
    calls = [f"{grammar.literal(tool.name)} {middle} {grammar.arguments(tool)}" for tool in tools]
    call = grammar.rule(" | ".join(calls))
    return call if once else f"{call} ({grammar.literal(tool_format.markers[0])} {call})*"


def _deepseek_calls(*, fenced: bool) -> Block:
    def build(grammar: GrammarText, tools: tuple[Tool, ...], fmt: ToolFormat, once: bool) -> str:
        begin, end, all_end, separator = map(grammar.literal, fmt.tokens)
        calls = []
        for tool in tools:
            if fenced:
                lines = grammar.literal(f"{tool.name}\n```json\n")
                call = f'"function" {separator} {lines} {grammar.arguments(tool)} "\\n```"'
            else:
                call = f"{grammar.literal(tool.name)} {separator} {grammar.arguments(tool)}"
            calls.append(f"{begin} {call} {end}")
        call = grammar.rule(" | ".join(calls))
        between = '"\\n" ' if fenced else ""
        return f"{call}{'' if once else f' ({between}{call})*'} {all_end}"

    return build


def _escaped(word: str) -> str:
    """The word as a part of a regular expression between slashes."""
    return "".join(f"\\{char}" if char in r"\./[]{}()*+?^$|&~" else char for char in word)


_CUT = "\0"  # between a text and a token in what stands behind calls
_MISTRAL_LIST = _json_calls("arguments", "[", ", ", "]")
_BLOCKS: Mapping[str, tuple[Block, str | None]] = {
    "hermes": (_json_calls("arguments", "\n", "", f"\n{_CUT}</tool_call>"), '"\\n"'),
    "qwen_xml": (xml_calls, '"\\n"'),
    "llama": (_json_calls("parameters", "", "; ", ""), None),
    "mistral": (_mistral_calls, None),
    "deepseek": (_deepseek_calls(fenced=True), None),
    "deepseek_v31": (_deepseek_calls(fenced=False), None),
    "gemma": (gemma_calls, '""'),
    "function_gemma": (gemma_calls, '""'),
    "fenced": (_json_calls("arguments", "\n", "", "\n```"), '"\\n"'),
}
"""What follows a family's marker, and what stands between two blocks; None: all are in one."""
