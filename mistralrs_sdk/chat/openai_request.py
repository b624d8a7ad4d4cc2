"""Requests as the dict of OpenAI's chat completions, with mistral.rs' own keys beside OpenAI's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mistralrs_sdk.chat.messages import ReasoningEffort, TextMessageRole, flag, from_openai
from mistralrs_sdk.chat.requests import RequestBuilder
from mistralrs_sdk.chat.tools import ToolChoice
from mistralrs_sdk.constraints.constraint import Constraint
from mistralrs_sdk.errors import RequestError, UnsupportedError
from mistralrs_sdk.sampling_params import DrySamplingParams, SamplingParams, StopTokens

logger = logging.getLogger("mistralrs_sdk.chat")

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "ignore_eos": "ignore_eos",
    "n": "n_choices",
    "top_logprobs": "top_n_logprobs",
    "logprobs": "return_logprobs",
}
"""Keys that are settings of the sampler, and what they are called there."""

_SETTERS: Mapping[str, Callable[[RequestBuilder, Any], RequestBuilder]] = {
    "tools": lambda asked, value: asked.set_tools(_listed("tools", value)),
    "tool_choice": lambda asked, value: asked.set_tool_choice(ToolChoice.from_dict(value)),
    "enable_thinking": RequestBuilder.enable_thinking,
    "reasoning_effort": lambda asked, value: asked.with_reasoning_effort(_effort(value)),
    "chat_template_kwargs": lambda asked, value: asked.with_chat_template_kwargs(
        **{str(name): each for name, each in _mapping("chat_template_kwargs", value).items()}
    ),
    "truncate_sequence": RequestBuilder.with_truncate_sequence,
    "adapter": RequestBuilder.set_adapter,
    "session_id": RequestBuilder.with_session_id,
    "max_tool_rounds": RequestBuilder.with_max_tool_rounds,
    "tool_dispatch_url": RequestBuilder.with_tool_dispatch_url,
    "agent_permission": RequestBuilder.with_agent_permission,
    "agent_approval_callback": RequestBuilder.with_agent_approval_callback,
    "enable_code_execution": RequestBuilder.with_code_execution,
    "code_execution_permission": RequestBuilder.with_code_execution_permission,
    "enable_shell": RequestBuilder.with_shell_execution,
    "priority": RequestBuilder.with_priority,
    "deadline": RequestBuilder.with_deadline,
    "cache_salt": RequestBuilder.with_cache_salt,
}
"""Keys that one setter of a request takes."""

_READ_HERE = (
    "messages",
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "logit_bias",
    "response_format",
    "grammar",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_sequence_breakers",
    "parallel_tool_calls",
    "modalities",
)

_BOOKKEEPING = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
)
"""What a service keeps of a request, or takes as a hint; nothing here does."""

_REFUSED = {
    "audio": "models here read and write text only",
    "files": "tools here produce no files",
    "function_call": 'write "tool_choice"',
    "functions": 'write "tools"',
    "input_files": "put their text into a message",
    "prediction": "nothing is speculated",
    "shell_skills": "a request's text may name no folders; RequestBuilder.with_shell_skill does",
    "web_search_options": "nothing here searches the web; offer your own search as a tool",
}

_EFFORTS = {"none": ReasoningEffort.OFF, "minimal": ReasoningEffort.LOW}
"""OpenAI's names that this package's `ReasoningEffort` lacks."""

_mentioned: set[str] = set()


def from_openai_request(request: Mapping[str, Any]) -> RequestBuilder:
    """Read the body of an OpenAI chat completion request; null means unset.

    As there, the answer is sampled: an unset temperature is the model's default, else 1. Use
    `"temperature": 0` for the most likely answer. "model" is for `model_named`; "stream" is for the
    method, see `as_request`. What a service would keep (user, metadata ...) is logged once.

    Raises:
        RequestError: a key is unknown, a value is out of range, or two contradict.
        UnsupportedError: it asks for something this package does not do.
    """
    given = {key: value for key, value in request.items() if value is not None}
    _check_keys(given)
    asked = RequestBuilder(messages=_messages(given.get("messages"))).set_sampling(_sampling(given))
    for key, setter in _SETTERS.items():
        if key in given:
            asked = setter(asked, given[key])
    constraint = _constraint(given)
    return asked if constraint is None else asked.set_constraint(constraint)


def model_named(request: object) -> str | None:
    """Return the model an OpenAI-shaped request names under "model"; None for any other request.

    Raises:
        RequestError: the name is no str.
    """
    name = request.get("model") if isinstance(request, Mapping) else None
    if name is not None and (not isinstance(name, str) or not name):
        raise RequestError(f'"model" ({name!r}) must be the id of a model, or left out')
    return name


def require_stream(request: Mapping[str, Any], *, streams: bool) -> None:
    """Refuse a request whose "stream" is not what the method does that it was given to.

    Raises:
        RequestError: it says the opposite, or is no bool.
    """
    wanted = request.get("stream")
    if wanted is not None and flag("stream", wanted) is not streams:
        method = "stream_chat_request" if wanted else "send_chat_request"
        raise RequestError(f'"stream" is {wanted}: give the request to {method}, or leave it out')


def _check_keys(given: Mapping[str, Any]) -> None:
    known = {*_SAMPLING, *_SETTERS, *_READ_HERE, *_BOOKKEEPING, *_REFUSED}
    unknown = sorted(str(key) for key in given.keys() - known)
    if unknown:
        raise RequestError(
            f"unknown in an OpenAI-shaped request: {', '.join(map(repr, unknown))}; known are "
            f"{', '.join(sorted(known - _REFUSED.keys()))}"
        )
    for key, why in _REFUSED.items():
        if given.get(key) not in (None, False, [], {}):
            raise UnsupportedError(f"{key!r} is not supported: {why}")
    if given.get("parallel_tool_calls", True) is not True:
        raise UnsupportedError(
            '"parallel_tool_calls": False is not supported: name one tool in "tool_choice", '
            "or use the first call only"
        )
    if given.get("modalities", ["text"]) != ["text"]:
        raise UnsupportedError(f'"modalities" ({given["modalities"]!r}) must be ["text"]')
    for key in _BOOKKEEPING:
        if key in given and key not in _mentioned:
            _mentioned.add(key)
            logger.warning("%r of an OpenAI-shaped request has no effect here", key)


def _messages(messages: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(messages, str):
        return (from_openai({"role": TextMessageRole.USER, "content": messages}),)
    return tuple(from_openai(message) for message in _listed("messages", messages))


def _sampling(given: Mapping[str, Any]) -> SamplingParams:
    settings = {name: given[key] for key, name in _SAMPLING.items() if key in given}
    if settings.get("return_logprobs") is False and settings.get("top_n_logprobs"):
        raise RequestError(
            f'"top_logprobs" ({given["top_logprobs"]}) contradicts "logprobs": False; drop one'
        )
    return SamplingParams(
        **settings,
        max_len=_longest(given),
        stop_toks=_stops(given.get("stop")),
        logits_bias=_bias(given.get("logit_bias")),
        dry_params=_dry(given),
    )


def _longest(given: Mapping[str, Any]) -> int | None:
    limits = [given[key] for key in ("max_tokens", "max_completion_tokens") if key in given]
    if len(limits) > 1 and limits[0] != limits[1]:
        raise RequestError(
            f'"max_tokens" ({given["max_tokens"]}) and "max_completion_tokens" '
            f"({given['max_completion_tokens']}) are two names of one limit: give one"
        )
    return limits[0] if limits else None


def _stops(stop: Any) -> StopTokens | None:
    if isinstance(stop, str):
        stop = [stop]
    return StopTokens.Seqs(_listed("stop", stop)) if stop else None


def _bias(bias: Any) -> dict[int, float] | None:
    """OpenAI's JSON has token ids as strings."""
    if bias is None:
        return None
    found: dict[Any, float] = {}
    for token, value in _mapping("logit_bias", bias).items():
        if isinstance(token, str) and token.isdecimal() and len(token) < 20:  # else it is no id
            token = int(token)
        found[token] = value
    return found


def _dry(given: Mapping[str, Any]) -> DrySamplingParams | None:
    details = {
        key.removeprefix("dry_"): value
        for key, value in given.items()
        if key.startswith("dry_") and key != "dry_multiplier"
    }
    if "dry_multiplier" in given:
        return DrySamplingParams(multiplier=given["dry_multiplier"], **details)
    if details:
        raise RequestError(
            f'"dry_{next(iter(details))}" has no effect without "dry_multiplier": set that as well'
        )
    return None


def _effort(value: Any) -> Any:
    return _EFFORTS.get(value, value) if isinstance(value, str) else value


def _constraint(given: Mapping[str, Any]) -> Constraint | None:
    answer = _answer_format(given.get("response_format"))
    grammar = _grammar(given.get("grammar"))
    if answer is not None and grammar is not None:
        raise RequestError('"response_format" and "grammar" both constrain the answer: give one')
    return grammar if answer is None else answer


def _answer_format(asked: Any) -> Constraint | None:
    if asked is None:
        return None
    kind = _mapping("response_format", asked).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint.JsonSchema({"type": "object"})
    named = asked.get("json_schema")
    if kind == "json_schema" and isinstance(named, Mapping) and "schema" in named:
        return Constraint.JsonSchema(named["schema"])  # held to, strict or not
    raise RequestError(
        f'"response_format" ({asked!r:.120}) must be {{"type": "text"}}, {{"type": "json_object"}} '
        'or {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
    )


def _grammar(asked: Any) -> Constraint | None:
    if asked is None:
        return None
    grammar = _mapping("grammar", asked)
    kind = grammar.get("type")
    if not isinstance(kind, str) or kind not in _GRAMMARS or "value" not in grammar:
        raise RequestError(
            f'"grammar" ({asked!r:.120}) must be {{"type": ..., "value": ...}} with the type '
            f"{', '.join(_GRAMMARS)}"
        )
    return _GRAMMARS[kind](grammar["value"])


_GRAMMARS: Mapping[Any, Callable[[Any], Constraint]] = {
    "regex": Constraint.Regex,
    "json_schema": Constraint.JsonSchema,
    "lark": Constraint.Lark,
    "llguidance": Constraint.Llguidance,
}


def _listed(key: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise RequestError(f'"{key}" ({value!r:.80}) must be a list')
    return value


def _mapping(key: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f'"{key}" ({value!r:.80}) must be a dict')
    return value
