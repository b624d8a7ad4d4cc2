"""`ChatText`: the text side of one model: requests to prompts, and how its answers are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mistralrs_sdk.chat.answer_format import AnswerFormat, find_answer_format
from mistralrs_sdk.chat.answer_parser import AnswerParser
from mistralrs_sdk.chat.requests import RequestBuilder
from mistralrs_sdk.chat.template import PromptEncoder
from mistralrs_sdk.chat.template_parser import TemplateParser
from mistralrs_sdk.chat.tool_grammar import tool_grammar
from mistralrs_sdk.chat.tools import Tool
from mistralrs_sdk.constraints.constraint import Constraint
from mistralrs_sdk.errors import RequestError


@attrs.frozen(kw_only=True)
class ChatPrompt:
    """A chat request as the engine's side needs it."""

    text: str
    ids: list[int]
    constraint: Constraint | None
    """The request's own, or one that holds the answer to calls."""
    answers: AnswerFormat
    tools: tuple[Tool, ...]
    held: bool
    """Whether the constraint holds the answer to calls, as the family writes them."""
    keep: frozenset[int]
    """Special tokens whose text the parser needs to see."""

    def new_parser(self) -> AnswerParser | TemplateParser | None:
        """A parser for one answer; None if all of its text is content."""
        return self.answers.parser(self.text, self.tools, held=self.held)


class ChatText:
    """Renders and encodes chat requests, tools and all."""

    def __init__(
        self, encoder: PromptEncoder, *, response_template: Mapping[str, Any] | None = None
    ) -> None:
        self._encoder = encoder
        template = encoder.template
        self.answers = find_answer_format(
            None if template is None else template.source,
            encoder.added_tokens.keys(),
            response_template=response_template,
        )

    def render(
        self,
        asked: RequestBuilder,
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> tuple[str, list[int]]:
        """Return the prompt a request becomes, as text and as ids.

        Raises:
            RequestError: the template refuses it, or there is none.
        """
        return self._encoder.render_chat(
            asked.messages,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=asked.thinking if enable_thinking is None else enable_thinking,
            reasoning_effort=asked.reasoning_effort,
            tools=offered_tools(asked),
            extra=asked.chat_template_kwargs,
        )

    def prompt(self, asked: RequestBuilder) -> ChatPrompt:
        """Return all that follows from a request's messages and tools.

        Raises:
            RequestError: the template refuses it; its tool choice or constraint contradicts the
                rest of it; a strict tool's schema cannot be enforced.
        """
        tools = offered_tools(asked)
        text, ids = self.render(asked)
        constraint = self._constraint(asked, tools, text)
        held = constraint is not asked.constraint
        return ChatPrompt(
            text=text,
            ids=ids,
            constraint=constraint,
            answers=self.answers,
            tools=tools,
            held=held,
            keep=self._special(self.answers.tokens(tools=bool(tools), held=held)),
        )

    def holds_control_text(self, asked: RequestBuilder) -> bool:
        """Whether encoding takes a while the first time; see `PromptEncoder`."""
        return self._encoder.holds_control_text(asked.messages, offered_tools(asked))

    def _constraint(
        self, asked: RequestBuilder, tools: tuple[Tool, ...], prompt: str
    ) -> Constraint | None:
        required = asked.tool_choice.mode == "required"
        if not tools or not (required or any(tool.function.strict for tool in tools)):
            return asked.constraint
        if asked.constraint is not None:
            why = "a required tool call" if required else "strict tools"
            raise RequestError(f"a constraint cannot be combined with {why}: leave one of them out")
        grammar = tool_grammar(
            self.answers.tools,
            tools,
            vocabulary=self._encoder.added_tokens,
            required=required,
            once=required and len(tools) == 1 and asked.tool_choice.allowed is not None,
            reasoning=self.answers.reasoning,
            opened=self.answers.begins_thinking(prompt),
        )
        return Constraint.Lark(grammar)

    def _special(self, texts: frozenset[str]) -> frozenset[int]:
        tokens = self._encoder.added_tokens
        return frozenset(tokens[text] for text in texts if text in tokens)


def offered_tools(asked: RequestBuilder) -> tuple[Tool, ...]:
    """The tools the model hears of: none, all, or those the choice allows.

    Raises:
        RequestError: the choice names a tool that the request lacks, or requires one of none.
    """
    choice = asked.tool_choice
    if choice.mode == "none":
        return ()
    names = [tool.name for tool in asked.tools]
    unknown = [name for name in choice.allowed or () if name not in names]
    if unknown:
        raise RequestError(
            f"tool_choice names {unknown[0]!r}, which is not among the request's tools "
            f"({', '.join(names) or 'none'}): add it with set_tools()"
        )
    if choice.mode == "required" and not names:
        raise RequestError("tool_choice requires a call, but there are no tools: add some")
    if choice.allowed is None:
        return asked.tools
    return tuple(tool for tool in asked.tools if tool.name in choice.allowed)
