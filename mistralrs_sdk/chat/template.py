"""Chat messages to the model's prompt: the Jinja template, and the ids of what it renders."""

from __future__ import annotations

import datetime
import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
from tokenizers import Tokenizer

from mistralrs_sdk.chat.messages import Message, ReasoningEffort
from mistralrs_sdk.chat.template_language import RefusedError, environment, require_known_names
from mistralrs_sdk.chat.tool_history import CallShape, find_call_shape
from mistralrs_sdk.chat.tools import Tool
from mistralrs_sdk.errors import ModelLoadError, RequestError

logger = logging.getLogger(__name__)

_RESERVED = frozenset({"messages", "add_generation_prompt", "tools"})
_MOST_WARNINGS = 100
_FIRST_STAND_IN = 0x10F000  # private use, plane 16: no font or text uses it


class ChatTemplate:
    """A compiled chat template. It runs sandboxed and may be rendered from several threads.

    Templates see messages, add_generation_prompt, bos_token, eos_token, unk_token, tools (or None),
    date_string ("26 Jul 2024", today), enable_thinking and reasoning_effort if they were chosen,
    and what `extra` holds; and the functions raise_exception, strftime_now and tojson as Hugging
    Face defines them. Arguments of past tool calls are given as the object or as JSON text,
    whichever the template shows properly.

    Raises:
        ModelLoadError: a syntax error, or a filter or test that does not exist.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        unk_token: str | None = None,
        origin: str,
    ) -> None:
        self.source = source
        self.origin = origin
        """Where it came from, in words, for messages."""
        language = environment()
        try:
            tree = language.parse(source)
            require_known_names(tree, language)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
            """The names the template asks for."""
            names = tree.find_all(jinja2.nodes.Name)
            self.takes_tools = any(n.name == "tools" and n.ctx == "load" for n in names)
            """Whether the template does anything with tools."""
            self._template = language.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"the chat template ({origin}) is broken at line {error.lineno}: {error.message}; "
                "give a corrected one with with_chat_template()"
            ) from error
        self._tokens = {
            "bos_token": bos_token or "",
            "eos_token": eos_token or "",
            "unk_token": unk_token or "",
        }
        self._warned: set[str] = set()

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        reasoning_effort: ReasoningEffort | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Write the messages as one prompt. `tools` are OpenAI's tool objects.

        An effort of off turns thinking off; any other turns it on and is itself given to the
        template.

        Raises:
            RequestError: no messages, the template refuses them (with its own words) or cannot
                be run on them, takes no tools, or `extra` contradicts another argument.
        """
        if not messages:
            raise RequestError("the request has no messages: add one with add_message()")
        if tools and not self.takes_tools:
            raise RequestError(
                f"the chat template ({self.origin}) does not use tools, so the model would not "
                "hear of them: give a template that does with with_chat_template(), or describe "
                "them in a message"
            )
        variables = self._variables(enable_thinking, reasoning_effort, extra or {})
        try:
            return self._template.render(
                messages=self._with_calls(messages),
                add_generation_prompt=add_generation_prompt,
                tools=[dict(tool) for tool in tools] or None,
                **variables,
            )
        except RefusedError as refusal:
            raise RequestError(
                f"the chat template ({self.origin}) refused the messages: {refusal}"
            ) from refusal
        except Exception as error:  # a template is a program: it may fail in any way
            raise RequestError(
                f"the chat template ({self.origin}) cannot be rendered with these messages: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _with_calls(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        if not any(message.get("tool_calls") for message in messages):
            return [dict(message) for message in messages]
        if self._call_shape is None:
            self._warn_once("tool_calls", "tool_calls of messages")
        return (self._call_shape or CallShape()).apply(messages)

    @functools.cached_property
    def _call_shape(self) -> CallShape | None:
        """How past calls are to be given; None if the template shows none."""

        def render(messages: list[dict[str, Any]]) -> str | None:
            try:
                return self._template.render(
                    messages=messages, add_generation_prompt=False, tools=None, **self._tokens
                )
            except Exception:  # a template is a program: it may fail in any way
                return None

        return find_call_shape(render)

    def _variables(
        self,
        enable_thinking: bool | None,
        effort: ReasoningEffort | None,
        extra: Mapping[str, Any],
    ) -> dict[str, Any]:
        reserved = sorted(_RESERVED & extra.keys())
        if reserved:
            raise RequestError(
                f"chat template kwarg {reserved[0]!r} is set by the request itself: leave it out"
            )
        asked: dict[str, Any] = {}
        if enable_thinking is not None:
            asked["enable_thinking"] = enable_thinking
        elif effort is not None and "enable_thinking" not in extra:
            thinks = effort is not ReasoningEffort.OFF
            if not thinks or "enable_thinking" in self.variables:
                asked["enable_thinking"] = thinks
        # a template that only turns thinking on and off has heard all it can take
        if effort not in (None, ReasoningEffort.OFF) and (
            "reasoning_effort" in self.variables or "enable_thinking" not in self.variables
        ):
            asked["reasoning_effort"] = str(effort)
        for name, value in asked.items():
            if extra.get(name, value) != value:
                raise RequestError(
                    f"{name} ({value}) contradicts the chat template kwarg "
                    f"{name}={extra[name]!r}: set one of them"
                )
        chosen = {**extra, **asked}
        self._warn_unused(chosen)
        today = datetime.date.today().strftime("%d %b %Y")
        return {**self._tokens, "date_string": today, **chosen}

    def _warn_unused(self, chosen: Mapping[str, Any]) -> None:
        for name, value in chosen.items():
            # not thinking is what a template without the switch does anyway
            moot = name == "enable_thinking" and not value
            if name not in self.variables and not moot:
                self._warn_once(name, name)

    def _warn_once(self, key: str, what: str) -> None:
        if key in self._warned or len(self._warned) >= _MOST_WARNINGS:
            return
        self._warned.add(key)
        logger.warning("the chat template (%s) does not use %s: no effect", self.origin, what)


class PromptEncoder:
    """Prompts to ids: exactly one BOS, and no control tokens from what users write.

    Raises:
        ModelLoadError: the tokenizer should add a BOS that it does not have.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        bos_token: str | None,
        adds_bos: bool,
        template: ChatTemplate | None,
    ) -> None:
        # a tokenizer.json made for training may cut or fill up what it encodes
        if tokenizer.truncation is not None:
            tokenizer.no_truncation()
        if tokenizer.padding is not None:
            tokenizer.no_padding()
        self.template = template
        self._tokenizer = tokenizer
        self._bos = tokenizer.token_to_id(bos_token) if bos_token else None
        self._bos_to_add = self._bos if adds_bos else None
        if adds_bos and self._bos_to_add is None:
            raise ModelLoadError(f"bos_token ({bos_token!r}) is not in the tokenizer's vocabulary")
        self.added_tokens = {
            token.content: id for id, token in tokenizer.get_added_tokens_decoder().items()
        }
        """The ids of tokens that were added to the vocabulary, special or not, by their text."""
        self._warned_bos = False
        self._control = _control_literals(tokenizer)
        sizes: dict[str, set[int]] = {}
        for literal in sorted(self._control):
            sizes.setdefault(literal[0], set()).add(len(literal))
        self._control_sizes = sizes
        self._control_firsts = re.compile("|".join(map(re.escape, sizes)) or "(?!)")
        self._stand_ins = {first: chr(_FIRST_STAND_IN + i) for i, first in enumerate(sizes)}

    def encode_text(self, text: str) -> list[int]:
        """Encode a raw prompt: literals of special tokens count as the tokens they name.

        A BOS literal at the start takes the place of the one the tokenizer adds (a warning, once).

        Raises:
            RequestError: the text is not valid Unicode.
        """
        bos = self._bos_to_add
        ids = _encode(self._tokenizer, text, add_special_tokens=bos is not None)
        if bos is not None and ids[:2] == [bos, bos]:
            self._warn_bos()
            return ids[1:]
        return self._with_bos(ids)

    def encode_plain(self, text: str) -> list[int]:
        """Encode a text as it stands, without adding a BOS.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        return _encode(self._tokenizer, text, add_special_tokens=False)

    def keep_end(self, ids: Sequence[int], count: int) -> list[int]:
        """Cut a prompt to its last `count` ids; a BOS in front stays in front."""
        if len(ids) <= count:
            return list(ids)
        if ids[0] == self._bos and count > 1:
            return [ids[0], *ids[1 - count :]]
        return list(ids[-count:])

    def holds_control_text(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> bool:
        """Whether one spells a control token: shielding it takes a while the first time."""
        texts = [*messages, *(tool.to_dict() for tool in tools)]
        return self._shield(texts) != texts

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        reasoning_effort: ReasoningEffort | None = None,
        tools: Sequence[Tool] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """Return what the template makes of the messages and tools, as text and as ids.

        The ids get a BOS in front if the tokenizer adds one and the template did not write it.
        Literals of control tokens inside messages and tools are encoded as plain text.

        Raises:
            RequestError: the model has no template, or the template refuses the messages or has
                no place for tools.
        """
        if self.template is None:
            raise RequestError(
                "the model has no chat template: give one with with_chat_template(), or send the "
                "prompt as a text completion"
            )
        plain = [*map(dict, messages)], [tool.to_dict() for tool in tools]
        shielded = self._shield(plain)
        text = self.template.render(
            shielded[0],
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
            reasoning_effort=reasoning_effort,
            tools=shielded[1],
            extra=extra,
        )
        if shielded == plain:
            ids = _encode(self._tokenizer, text, add_special_tokens=False)
        else:
            self._refuse_stand_ins([*plain[0], *plain[1]])
            ids = _encode(self._shield_tokenizer, text, add_special_tokens=False)
            text = text.translate({ord(new): old for old, new in self._stand_ins.items()})
        return text, self._with_bos(ids)

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self._bos_to_add
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _warn_bos(self) -> None:
        if not self._warned_bos:
            self._warned_bos = True
            logger.warning(
                "the prompt begins with the BOS token that the tokenizer adds itself: "
                "one is kept; leave it out of the text"
            )

    def _shield(self, value: Any) -> Any:
        """Give control literals in user text another first character, so that they do not match."""
        if isinstance(value, str):
            return self._control_firsts.sub(self._shield_first, value)
        if isinstance(value, Mapping):
            return {self._shield(key): self._shield(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._shield(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self._shield(item) for item in value)
        return value

    def _shield_first(self, match: re.Match[str]) -> str:
        first, start = match[0], match.start()
        for size in self._control_sizes[first]:
            if match.string[start : start + size] in self._control:
                return self._stand_ins[first]
        return first

    def _refuse_stand_ins(self, messages: list[dict[str, Any]]) -> None:
        written = json.dumps(messages, ensure_ascii=False, default=str)
        for stand_in in self._stand_ins.values():
            if stand_in in written:
                raise RequestError(
                    f"the messages hold a control token's literal and also U+{ord(stand_in):X}, "
                    "which stands for it while encoding: remove one of them"
                )

    @functools.cached_property
    def _shield_tokenizer(self) -> Tokenizer:
        """A copy that reads the stand-ins as the characters they stand for.

        Control tokens are looked for before the normaliser runs, so the literals it restores are
        text. Built when first needed: it costs as much memory as the tokenizer itself.
        """
        description = json.loads(self._tokenizer.to_str())
        for token in description["added_tokens"]:
            token["normalized"] = token["normalized"] and not token["special"]
        restore = [
            {"type": "Replace", "pattern": {"String": new}, "content": old}
            for old, new in self._stand_ins.items()
        ]
        own = [description["normalizer"]] if description["normalizer"] else []
        description["normalizer"] = {"type": "Sequence", "normalizers": [*restore, *own]}
        return Tokenizer.from_str(json.dumps(description))


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is not valid Unicode: lone surrogate at character {error.start}"
        ) from error
    # `encode` would hold the interpreter while it works; this one does not
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _control_literals(tokenizer: Tokenizer) -> frozenset[str]:
    added = tokenizer.get_added_tokens_decoder().values()
    return frozenset(token.content for token in added if token.special and token.content)
