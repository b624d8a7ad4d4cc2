"""Which of the known ways of calling tools and of thinking a model's answers follow, and why."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from mistralrs_sdk.chat.answer_parser import AnswerParser, ReasoningTags
from mistralrs_sdk.chat.response_template import ResponseTemplate, read_response_template
from mistralrs_sdk.chat.template_parser import TemplateParser
from mistralrs_sdk.chat.tool_formats import (
    DEEPSEEK,
    DEEPSEEK_V31,
    FENCED,
    HERMES,
    LLAMA,
    MISTRAL,
    QWEN_XML,
    ToolFormat,
)
from mistralrs_sdk.chat.tool_formats_gemma import FUNCTION_GEMMA, GEMMA
from mistralrs_sdk.chat.tools import Tool

TOOL_FORMATS = {
    tool_format.name: tool_format
    for tool_format in (
        GEMMA,
        FUNCTION_GEMMA,
        DEEPSEEK,
        DEEPSEEK_V31,
        MISTRAL,
        QWEN_XML,
        HERMES,
        LLAMA,
        FENCED,
    )
}
"""The formats by name, those with the most telling signs first."""

_SIGNS = {
    "gemma": "<|tool_call>",
    "function_gemma": "<start_function_call>",
    "deepseek": DEEPSEEK.markers[0],
    "mistral": "[TOOL_CALLS]",
    "qwen_xml": "<function=",
    "hermes": "<tool_call>",
    "llama": "<|python_tag|>",
    "fenced": "```tool_c",
}
_REASONING = (
    ReasoningTags(opens="<|channel>thought", closes="<channel|>"),
    ReasoningTags(opens="<think>", closes="</think>"),
    ReasoningTags(opens="[THINK]", closes="[/THINK]"),
    ReasoningTags(opens="<seed:think>", closes="</seed:think>"),
)

_TOKEN = re.compile(r"<[^<>]+>")

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class AnswerFormat:
    """How a model's answers are to be read."""

    tools: ToolFormat
    reasoning: ReasoningTags | None
    reasons: tuple[str, ...]
    """Why these, in words."""
    template: ResponseTemplate | None = None
    """What says more than a format and tags can: it is followed instead, where calls are free."""
    template_tokens: frozenset[str] = frozenset()
    """The tokens that it looks for."""

    def tokens(self, *, tools: bool, held: bool = False) -> frozenset[str]:
        """Texts that may be special tokens and must not be left out of what is parsed."""
        if self.template is not None and not held:
            return self.template_tokens
        calls = (*self.tools.markers, *self.tools.tokens) if tools else ()
        tags = self.reasoning
        # a tag may be a token and a word: <|channel> and "thought"
        thinking = () if tags is None else (tags.opens, tags.closes, *_TOKEN.findall(tags.opens))
        return frozenset((*calls, *thinking))

    def parser(
        self, prompt: str, tools: tuple[Tool, ...], *, held: bool = False
    ) -> AnswerParser | TemplateParser | None:
        """A parser for one answer to this prompt; None if there is nothing to look for.

        `held` says that a grammar made of the format holds the answer to it.
        """
        if self.template is not None and not held:
            return TemplateParser(self.template, prompt=prompt, tools=tools)
        if not tools and self.reasoning is None:
            return None
        return AnswerParser(
            self.tools if tools else None,
            self.reasoning,
            tools=tools,
            opened=self.begins_thinking(prompt),
        )

    def begins_thinking(self, prompt: str) -> bool:
        """Whether the prompt ends inside a reasoning block."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.opens)


def find_answer_format(
    template: str | None,
    vocabulary: Collection[str],
    *,
    response_template: Mapping[str, Any] | None = None,
) -> AnswerFormat:
    """Choose by the template, by transformers' `response_template` and by the added tokens.

    `vocabulary` holds the texts of the tokenizer's added tokens. What the template writes counts
    more than what the vocabulary knows. Without any sign calls are read as Hermes wrote them,
    which most models know.
    """
    declared_text = json.dumps(response_template or {}, ensure_ascii=False)
    sources = {
        "the response template": declared_text + declared_text.replace("\\", ""),  # of patterns
        "the chat template": template or "",
        "the vocabulary": "\n".join(sorted(vocabulary)),
    }
    found, why = _first(_SIGNS, sources)
    is_declared = why == "the response template"
    if found is None:
        tools, why = HERMES, "nothing shows how tools are called: as in Hermes"
        if template and '"parameters": ' in template:
            tools, why = LLAMA, 'llama calls: the chat template shows {"name": ..., "parameters"}'
    else:
        tools = TOOL_FORMATS[found]
        if tools is DEEPSEEK and template and "```json" not in template:
            tools = DEEPSEEK_V31
        why = f"{tools.name} calls: {_SIGNS[found]} is in {why}"
    tags, where = _first({tags: tags.closes for tags in _REASONING}, sources)
    thinking = "no reasoning" if tags is None else f"reasoning: {tags.closes} is in {where}"
    declared = _declared_tags(response_template)
    if declared is not None:
        tags, thinking = declared, "reasoning as the response template says"
    followed = _template(response_template, knows_calls=is_declared)
    if followed is None:
        return AnswerFormat(tools=tools, reasoning=tags, reasons=(why, thinking))
    as_it_says = "as the response template says"
    return AnswerFormat(
        tools=tools,
        reasoning=tags,
        reasons=(
            f"calls {as_it_says}; where they are required or strict, {why}",
            f"reasoning {as_it_says}",
        ),
        template=followed,
        template_tokens=followed.tokens(vocabulary),
    )


def _template(spec: Mapping[str, Any] | None, *, knows_calls: bool) -> ResponseTemplate | None:
    """The template, if there is one and it says more than a family's format and reasoning tags."""
    if spec is None:
        return None
    try:
        template = read_response_template(spec)
    except (ValueError, ImportError) as error:
        logger.warning("the tokenizer's response_template is not followed: %s", error)
        return None
    rest, thoughts = template.rest, template.part("reasoning")
    plain_rest = rest is not None and rest.role == "content"
    plain_calls = knows_calls or template.part("calls") is None
    tagged = thoughts is None or _declared_tags(spec) is not None
    return None if plain_rest and plain_calls and tagged else template


def _first(signs: Mapping[Any, str], sources: Mapping[str, str]) -> tuple[Any, str]:
    """What has its sign in a source, and which; earlier sources and signs win."""
    for where, text in sources.items():
        for found, sign in signs.items():
            if sign in text:
                return found, where
    return None, ""


def _declared_tags(response_template: Mapping[str, Any] | None) -> ReasoningTags | None:
    """The reasoning tags a response template gives as plain texts."""
    fields = (response_template or {}).get("fields")
    field = fields.get("reasoning_content") if isinstance(fields, Mapping) else None
    if not isinstance(field, Mapping):
        return None
    opens, closes = field.get("open"), field.get("close")
    if not isinstance(opens, str) or not isinstance(closes, str) or not opens or not closes:
        return None
    return ReasoningTags(opens=opens.strip(), closes=closes.strip())
