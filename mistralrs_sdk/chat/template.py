"""Chat messages to the model's prompt: the Jinja template, and the ids of what it renders."""

from __future__ import annotations

import datetime
import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from mistralrs_sdk.chat.messages import Message
from mistralrs_sdk.errors import ModelLoadError, RequestError

logger = logging.getLogger(__name__)

_RESERVED = frozenset({"messages", "add_generation_prompt", "tools"})
_MOST_WARNINGS = 100
_FIRST_STAND_IN = 0x10F000  # private use, plane 16: no font or text uses it


class ChatTemplate:
    """A compiled chat template. It runs sandboxed and may be rendered from several threads.

    Templates see messages, add_generation_prompt, bos_token, eos_token, unk_token, tools (None),
    date_string ("26 Jul 2024", today), enable_thinking if it was chosen, and what `extra` holds;
    and the functions raise_exception, strftime_now and tojson as Hugging Face defines them.

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
        environment = _environment()
        try:
            tree = environment.parse(source)
            _require_known_names(tree, environment)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
            """The names the template asks for."""
            self._template = environment.from_string(tree)
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
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Write the messages as one prompt.

        Raises:
            RequestError: no messages, the template refuses them (with its own words) or cannot
                be run on them, or `extra` contradicts another argument.
        """
        if not messages:
            raise RequestError("the request has no messages: add one with add_message()")
        variables = self._variables(enable_thinking, extra or {})
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                **variables,
            )
        except _RefusedError as refusal:
            raise RequestError(
                f"the chat template ({self.origin}) refused the messages: {refusal}"
            ) from refusal
        except Exception as error:  # a template is a program: it may fail in any way
            raise RequestError(
                f"the chat template ({self.origin}) cannot be rendered with these messages: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _variables(self, enable_thinking: bool | None, extra: Mapping[str, Any]) -> dict[str, Any]:
        reserved = sorted(_RESERVED & extra.keys())
        if reserved:
            raise RequestError(
                f"chat template kwarg {reserved[0]!r} is set by the request itself: leave it out"
            )
        chosen = dict(extra)
        if enable_thinking is not None:
            if chosen.get("enable_thinking", enable_thinking) != enable_thinking:
                raise RequestError(
                    f"enable_thinking({enable_thinking}) contradicts the chat template kwarg "
                    f"enable_thinking={chosen['enable_thinking']!r}: set one of them"
                )
            chosen["enable_thinking"] = enable_thinking
        self._warn_unused(chosen)
        today = datetime.date.today().strftime("%d %b %Y")
        return {**self._tokens, "date_string": today, **chosen}

    def _warn_unused(self, chosen: Mapping[str, Any]) -> None:
        for name, value in chosen.items():
            # not thinking is what a template without the switch does anyway
            moot = name == "enable_thinking" and not value
            known = name in self.variables or name in self._warned
            if known or moot or len(self._warned) >= _MOST_WARNINGS:
                continue
            self._warned.add(name)
            logger.warning("the chat template (%s) does not use %s: no effect", self.origin, name)


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

    def holds_control_text(self, messages: Sequence[Message]) -> bool:
        """Whether a message spells a control token: shielding it takes a while the first time."""
        return self._shield(list(messages)) != list(messages)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Render the messages and encode the result; see `render_chat`."""
        return self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
            extra=extra,
        )[1]

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """Return what the template makes of the messages, as text and as ids.

        The ids get a BOS in front if the tokenizer adds one and the template did not write it.
        Literals of control tokens inside the messages are encoded as plain text.

        Raises:
            RequestError: the model has no template, or the template refuses the messages.
        """
        if self.template is None:
            raise RequestError(
                "the model has no chat template: give one with with_chat_template(), or send the "
                "prompt as a text completion"
            )
        plain = [dict(message) for message in messages]
        shielded = self._shield(plain)
        text = self.template.render(
            shielded,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
            extra=extra,
        )
        if shielded == plain:
            ids = _encode(self._tokenizer, text, add_special_tokens=False)
        else:
            self._refuse_stand_ins(plain)
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
    return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def _control_literals(tokenizer: Tokenizer) -> frozenset[str]:
    added = tokenizer.get_added_tokens_decoder().values()
    return frozenset(token.content for token in added if token.special and token.content)


class _RefusedError(jinja2.TemplateError):
    """The template called raise_exception."""


class _GenerationTag(jinja2.ext.Extension):
    """Accept `{% generation %}`, which marks what to train on, and print what it encloses."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _require_known_names(
    tree: jinja2.nodes.Template, environment: jinja2.sandbox.SandboxedEnvironment
) -> None:
    """Find unknown filters and tests now; Jinja itself looks into branches only when they run."""
    kinds: tuple[tuple[str, type[Any], Mapping[str, Callable[..., Any]]], ...] = (
        ("filter", jinja2.nodes.Filter, environment.filters),
        ("test", jinja2.nodes.Test, environment.tests),
    )
    for kind, node_type, known in kinds:
        for node in tree.find_all(node_type):
            if node.name not in known:
                raise jinja2.TemplateSyntaxError(f"there is no {kind} {node.name!r}", node.lineno)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
