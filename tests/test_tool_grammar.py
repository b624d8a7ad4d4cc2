"""Grammars that hold an answer to calls: what llguidance lets a model write with them."""

from __future__ import annotations

import functools
import json

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from mistralrs_sdk.chat.answer_format import TOOL_FORMATS
from mistralrs_sdk.chat.answer_parser import AnswerParser, ReasoningTags
from mistralrs_sdk.chat.tool_grammar import tool_grammar
from mistralrs_sdk.chat.tools import Function, Tool
from mistralrs_sdk.errors import RequestError
from tests.test_template import byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "s": {"type": "string"},
        "e": {"enum": ["x", "y"]},
        "l": {"type": "array", "items": {"type": "string"}},
        "o": {"$ref": "#/$defs/O"},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {
        "O": {
            "type": "object",
            "properties": {"n": {"type": ["number", "null"]}},
            "required": ["n"],
            "additionalProperties": False,
        }
    },
}
F, G = Tool(Function("f", parameters=SCHEMA, strict=True)), Tool(Function("g"))
THINK = ReasoningTags(opens="<think>", closes="</think>")
DS_OPEN, (DS_BEGIN, DS_END, DS_CLOSE, DS_SEP) = (
    TOOL_FORMATS["deepseek"].markers[0],
    TOOL_FORMATS["deepseek"].tokens,
)
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "q"}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\nq\nr\n"
    '</parameter>\n<parameter=e>\ny\n</parameter>\n<parameter=o>\n{"n": 1}\n</parameter>\n'
    "</function>\n</tool_call>",
    "llama": '{"name": "f", "parameters": {"a": 1, "e": "x"}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    "deepseek": f'{DS_OPEN}{DS_BEGIN}function{DS_SEP}f\n```json\n{{"a": 1}}\n```{DS_END}{DS_CLOSE}',
    "deepseek_v31": f'{DS_OPEN}{DS_BEGIN}f{DS_SEP}{{"a": 1}}{DS_END}{DS_CLOSE}',
    "gemma": '<|tool_call>call:f{a:1,s:<|"|>q<|"|>,e:<|"|>y<|"|>,l:[<|"|>r<|"|>],o:{n:null}}'
    "<tool_call|>",
    "function_gemma": "<start_function_call>call:f{a:1,l:[]}<end_function_call>",
    "fenced": '```tool_call\n{"name": "f", "arguments": {"a": 1}}\n```',
}
NEWER_MISTRAL = '[TOOL_CALLS]f[ARGS]{"a": 1}'


@functools.cache
def tokenizer(*special: str) -> tuple[Tokenizer, LLTokenizer]:
    """Bytes, an end token and these added tokens."""
    made = byte_tokenizer("<eos>", *special)
    return made, LLTokenizer(made.to_str(), eos_token=made.token_to_id("<eos>"))


def own_tokens(name: str) -> tuple[str, ...]:
    """The tokens a model of this family has for its marks."""
    tool_format = TOOL_FORMATS[name]
    texts = {*tool_format.markers, *tool_format.tokens} - {"[ARGS]", "[CALL_ID]", "<function="}
    return tuple(sorted(text for text in texts if text[0] != "`"))


class Held:
    """Answers under the grammar of some tools."""

    def __init__(self, name: str, special: tuple[str, ...], *tools: Tool, **settings) -> None:
        self.tokenizer, ll_tokenizer = tokenizer(*special)
        vocabulary = {
            token.content: id for id, token in self.tokenizer.get_added_tokens_decoder().items()
        }
        text = tool_grammar(TOOL_FORMATS[name], tools or (F, G), vocabulary=vocabulary, **settings)
        grammar = LLMatcher.grammar_from_lark(text)
        assert LLMatcher.validate_grammar(grammar, ll_tokenizer) == ""
        self._matcher = LLMatcher(ll_tokenizer, grammar)

    def accepts(self, text: str) -> bool:
        """Whether a model may write this, and end there."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        matcher = self._matcher.deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def spoil(text: str) -> str:
    """The same call with another argument than its schema has."""
    for good, bad in (('"a": 1', '"b": 1'), ("<parameter=a>", "<parameter=b>"), ("a:1", "b:1")):
        text = text.replace(good, bad)
    return text


BOTH = [(name, special) for name in CALLS for special in ((), own_tokens(name))]


@pytest.mark.parametrize(("name", "special"), BOTH)
def test_a_required_call_is_all_that_can_be_written(name, special):
    """Required: no text, no other arguments; with markers as tokens and as text."""
    held = Held(name, special, required=True, once=True)

    assert held.accepts(CALLS[name])
    assert not held.accepts(spoil(CALLS[name]))
    assert not held.accepts("Hello")
    assert not held.accepts("")


@pytest.mark.parametrize(("name", "special"), BOTH)
def test_strict_tools_leave_the_answer_free_until_a_call_begins(name, special):
    """Auto: any text, and behind a marker only calls whose strict arguments fit."""
    held = Held(name, special, required=False)
    before = "" if name == "llama" else "Well,\n"

    assert held.accepts("Hello {there} [x]")
    assert held.accepts(before + CALLS[name])
    assert not held.accepts(before + spoil(CALLS[name]))


@pytest.mark.parametrize(("name", "special"), BOTH)
def test_what_the_grammar_allows_the_parser_reads(name, special):
    """Grammar and parser of a family agree on how calls are written."""
    parser = AnswerParser(TOOL_FORMATS[name], None, tools=(F, G))
    parser.feed(CALLS[name])

    delta = AnswerParser(TOOL_FORMATS[name], None, tools=(F, G)).feed(CALLS[name])
    calls = (*delta.tool_calls, *parser.finish().tool_calls)

    assert Held(name, special, required=True).accepts(CALLS[name])
    assert {call.function.name for call in calls} == {"f"}
    assert json.loads(calls[0].function.arguments)["a"] == 1


@pytest.mark.parametrize("name", CALLS)
def test_several_calls_may_be_required_and_a_named_one_is_one(name):
    """Without `once` more calls may follow."""
    more = {
        "hermes": f"{CALLS[name]}\n{CALLS[name]}",
        "qwen_xml": f"{CALLS[name]}\n{CALLS[name]}",
        "fenced": f"{CALLS[name]}\n{CALLS[name]}",
        "llama": f"{CALLS[name]}; {CALLS[name]}",
        "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, '
        '{"name": "g", "arguments": {}}]',
        "gemma": CALLS[name] * 2,
        "function_gemma": CALLS[name] * 2,
        "deepseek": CALLS[name].replace(
            DS_CLOSE, f"\n{DS_BEGIN}function{DS_SEP}g\n```json\n{{}}\n```{DS_END}{DS_CLOSE}"
        ),
        "deepseek_v31": CALLS[name].replace(DS_CLOSE, f"{DS_BEGIN}g{DS_SEP}{{}}{DS_END}{DS_CLOSE}"),
    }[name]

    assert Held(name, own_tokens(name), required=True).accepts(more)
    assert not Held(name, own_tokens(name), required=True, once=True).accepts(more)


def test_newer_mistral_models_name_the_function_before_its_arguments():
    """A vocabulary with [ARGS] decides which of Mistral's two ways is asked for."""
    held = Held("mistral", ("[TOOL_CALLS]", "[ARGS]"), required=True)

    assert held.accepts(NEWER_MISTRAL)
    assert held.accepts(NEWER_MISTRAL + "[TOOL_CALLS]g[ARGS]{}")
    assert not held.accepts(spoil(NEWER_MISTRAL))


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_a_model_may_think_before_a_required_call(special):
    """Reasoning comes first, opened by the model or by the prompt."""
    closed = Held("hermes", special, required=True, reasoning=THINK)
    opened = Held("hermes", special, required=True, reasoning=THINK, opened=True)

    assert closed.accepts(f"<think>\nhm {{}}\n</think>\n\n{CALLS['hermes']}")
    assert closed.accepts(CALLS["hermes"])
    assert opened.accepts(f"hm\n</think>\n\n{CALLS['hermes']}")
    assert not opened.accepts(CALLS["hermes"])


@pytest.mark.parametrize("name", ["hermes", "qwen_xml", "gemma"])
def test_tools_that_are_not_strict_take_any_object_when_nothing_is_required(name):
    """In a free answer only strict tools are held to their schemas."""
    loose = Tool(Function("f", parameters=SCHEMA))
    strict = Tool(Function("s", strict=True))
    other = spoil(CALLS[name])

    assert Held(name, own_tokens(name), loose, strict, required=False).accepts(other)
    assert not Held(name, own_tokens(name), loose, strict, required=True).accepts(other)


@pytest.mark.parametrize("name", ["hermes", "gemma", "qwen_xml"])
def test_a_strict_schema_that_cannot_be_enforced_is_refused(name):
    """The error names the tool and what in its schema is at fault; without strict it is let go."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}
    tool = Tool(Function("f", parameters=schema, strict=True))

    with pytest.raises(RequestError, match=r"'f' is strict.*not"):
        Held(name, (), tool, required=False)
    assert Held(name, (), Tool(Function("f", parameters=schema)), required=True)


@pytest.mark.parametrize("name", ["gemma", "qwen_xml"])
def test_a_pattern_is_refused_where_texts_are_not_json(name):
    """Formats that write texts without JSON's quotes cannot hold them to a pattern."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x+$"}}}

    with pytest.raises(RequestError, match=r"'f' is strict, but 'pattern'"):
        Held(name, (), Tool(Function("f", parameters=schema, strict=True)), required=True)
