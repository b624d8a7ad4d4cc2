"""What translating another API's requests into chat requests takes: ids, texts, refusals."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Any

from mistralrs_sdk import Model
from mistralrs_sdk.server.errors import HttpError
from mistralrs_sdk.server.sse import event

Event = dict[str, Any]
"""What is sent while an answer is made; its "type" says what it is."""

EXTENSIONS = (
    "adapter",
    "cache_salt",
    "chat_template_kwargs",
    "deadline",
    "dry_allowed_length",
    "dry_base",
    "dry_multiplier",
    "dry_sequence_breakers",
    "enable_thinking",
    "frequency_penalty",
    "grammar",
    "ignore_eos",
    "logit_bias",
    "max_tool_rounds",
    "min_p",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "top_k",
)
"""Keys of mistral.rs' chat requests that every API takes as they are."""


def new_id(prefix: str) -> str:
    """Return an id nobody can guess."""
    return f"{prefix}_{secrets.token_hex(12)}"


def invalid(param: str, message: str) -> HttpError:
    """Return the error for a field that is wrong; the message goes on after the field's name."""
    return HttpError(400, f'"{param}" {message}', param=param)


def unsupported(param: str, why: str) -> HttpError:
    """Return the error for a field that asks for what this server does not do."""
    return HttpError(400, f'"{param}" is not supported: {why}', param=param, code="unsupported")


def check_keys(
    body: Mapping[str, Any], *, known: Collection[str], refused: Mapping[str, str]
) -> dict[str, Any]:
    """Return what a body sets; null is unset. `refused` says why for keys nothing here does.

    Raises:
        HttpError: a key is refused, or unknown.
    """
    given = {key: value for key, value in body.items() if value is not None}
    for key, why in refused.items():
        if given.pop(key, None) not in (None, False, [], {}):
            raise unsupported(key, why)
    unknown = sorted(given.keys() - set(known))
    if unknown:
        raise invalid(unknown[0], f"is unknown here; known are {', '.join(sorted(known))}")
    return given


def mapping(param: str, value: Any) -> Mapping[str, Any]:
    """Return a value that must be an object.

    Raises:
        HttpError: it is none.
    """
    if not isinstance(value, Mapping):
        raise invalid(param, f"({value!r:.80}) must be an object")
    return value


def listed(param: str, value: Any) -> list[Any]:
    """Return a value that must be a list.

    Raises:
        HttpError: it is none.
    """
    if not isinstance(value, list):
        raise invalid(param, f"({value!r:.80}) must be a list")
    return value


def text(param: str, value: Any) -> str:
    """Return a value that must be a string.

    Raises:
        HttpError: it is none.
    """
    if not isinstance(value, str):
        raise invalid(param, f"({value!r:.80}) must be a string")
    return value


def whole(param: str, value: Any) -> int:
    """Return a value that must be a whole number of at least 1.

    Raises:
        HttpError: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise invalid(param, f"({value!r:.80}) must be a whole number of at least 1")
    return value


def switch(param: str, value: Any) -> bool:
    """Return a value that must be true or false.

    Raises:
        HttpError: it is neither.
    """
    if not isinstance(value, bool):
        raise invalid(param, f"({value!r:.80}) must be true or false")
    return value


def joined_text(param: str, content: Any, *, kinds: Mapping[str, str]) -> str:
    """Return the text of a content: a string, or parts, which are joined without a separator.

    `kinds` names the types of parts that hold text, and the key of each that does.

    Raises:
        HttpError: it is neither, or a part is no text.
    """
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, part in enumerate(listed(param, content)):
        where = f"{param}[{place}]"
        kind = mapping(where, part).get("type")
        if not isinstance(kind, str) or kind not in kinds:
            raise unsupported(
                where, f"a part of type {kind!r} is no text, and models here read text"
            )
        texts.append(text(f"{where}.{kinds[kind]}", part.get(kinds[kind])))
    return "".join(texts)


def call_arguments(words: str) -> dict[str, Any] | None:
    """Return the arguments of a call whose text this is; None: it is no whole JSON object."""
    try:
        found = json.loads(words)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


async def count_tokens(model: Model, words: str, *, model_id: str | None) -> int:
    """Return how many tokens a text is: nearly how many a model took to write it."""
    if not words:
        return 0
    return len(await model.tokenize(words, add_special_tokens=False, model_id=model_id))


async def to_the_end(events: AsyncGenerator[Event, None]) -> None:
    """Let an answer be made that nobody watches."""
    async with contextlib.aclosing(events):
        async for _ in events:
            pass


async def named_events(events: AsyncGenerator[Event, None]) -> AsyncGenerator[str, None]:
    """Server-sent events, each under the name of its type."""
    async with contextlib.aclosing(events):
        async for each in events:
            yield event(each, name=each["type"])
