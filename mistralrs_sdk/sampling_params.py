"""How the next token is chosen: the sampling settings of a request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import attrs

from mistralrs_sdk.errors import ModelLoadError, RequestError

MAX_TOP_LOGPROBS = 20
"""The most alternatives per token a request may ask for (OpenAI's limit)."""

MAX_CHOICES = 128
"""The most answers a request may ask for (OpenAI's limit)."""

SUPPRESSED = -1e9
"""Bias of the model's `suppress_tokens`: low enough to never be drawn, still finite."""

_OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
_IN_GENERATION_CONFIG = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SHAPES_THE_DRAW = ("temperature", "top_k", "top_p", "min_p")


def _strings(value: Iterable[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise RequestError(f"{value!r} must be a list of strings: write [{value!r}]")
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{value!r:.80} must be a list of strings")
    return tuple(value)


@attrs.frozen
class StopTokens:
    """What ends a completion besides the model's own end tokens: strings, token ids, or both.

    `StopTokens.Seqs(["\\n\\n"])` and `StopTokens.Ids([42])` read as in mistral.rs.

    Raises:
        RequestError: there is none, a string is empty, or an id is no whole number of at least 0.
    """

    seqs: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    ids: tuple[int, ...] = attrs.field(default=(), converter=tuple)

    @classmethod
    def Seqs(cls, seqs: Iterable[str]) -> StopTokens:  # noqa: N802 (mistral.rs' name)
        """End at any of these strings."""
        return cls(seqs=seqs)

    @classmethod
    def Ids(cls, ids: Iterable[int]) -> StopTokens:  # noqa: N802 (mistral.rs' name)
        """End at any of these token ids."""
        return cls(ids=ids)

    def __attrs_post_init__(self) -> None:
        if not self.seqs and not self.ids:
            raise RequestError(
                "stop_toks is empty: give at least one string or id, or leave it unset"
            )
        for seq in self.seqs:
            _require_text("stop string", seq)
        for token in self.ids:
            _require_int("stop token id", token, minimum=0)


@attrs.frozen(kw_only=True)
class DrySamplingParams:
    """Penalise tokens that would continue a repetition (DRY). A multiplier of 0 turns it off.

    Raises:
        RequestError: a number is out of range, or a breaker is no text.
    """

    multiplier: float = 0.0
    base: float = 1.75
    allowed_length: int = 2
    sequence_breakers: tuple[str, ...] = attrs.field(
        default=("\n", ":", '"', "*"), converter=_strings
    )

    def __attrs_post_init__(self) -> None:
        _require_number("dry multiplier", self.multiplier, minimum=0.0)
        _require_number("dry base", self.base, minimum=1.0)
        _require_int("dry allowed_length", self.allowed_length, minimum=0)
        for breaker in self.sequence_breakers:
            _require_text("dry sequence breaker", breaker)


@attrs.frozen(kw_only=True)
class SamplingParams:
    """The sampling settings of one request. None means unset: generation_config.json decides.

    Applied in this order to float32 logits: DRY, frequency and presence penalty (generated tokens),
    repetition penalty (prompt and generated tokens), logits bias, temperature, top-k, top-p (of the
    mass top-k left), min-p, then one draw. See docs/sampling.md for ranges and off values.

    Raises:
        RequestError: a value is out of range or not a number.
    """

    temperature: float | None = None
    """0 (or below 1e-7) takes the most likely token. Unset everywhere: 1.0."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0 or -1 keeps all, 1 is greedy."""
    top_p: float | None = None
    """Keep the most likely tokens until their mass reaches this; 1 keeps all."""
    min_p: float | None = None
    """Drop tokens at most this likely relative to the most likely one; 0 keeps all."""
    top_n_logprobs: int = 0
    """Alternatives reported per token, 0 to 20."""
    return_logprobs: bool = False
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop_toks: StopTokens | None = None
    include_stop: bool = False
    """Keep the matched stop string at the end of the text."""
    ignore_eos: bool = False
    max_len: int | None = None
    """Most tokens to generate; None: until the end token or the end of the context."""
    logits_bias: Mapping[int, float] | None = attrs.field(default=None, hash=False)
    n_choices: int = 1
    dry_params: DrySamplingParams | None = None
    seed: int | None = None
    """Fixes the draws of this request whatever runs beside it; None draws a fresh seed."""

    @classmethod
    def deterministic(cls) -> SamplingParams:
        """Greedy: always the most likely token."""
        return cls(top_k=1)

    @classmethod
    def neutral(cls) -> SamplingParams:
        """Everything unset: the model's own defaults."""
        return cls()

    def __attrs_post_init__(self) -> None:
        for name, check in _OPTIONAL_CHECKS.items():
            if (value := getattr(self, name)) is not None:
                check(name, value)
        _require_int("top_n_logprobs", self.top_n_logprobs, minimum=0, maximum=MAX_TOP_LOGPROBS)
        _require_int("n_choices", self.n_choices, minimum=1, maximum=MAX_CHOICES)
        for name in ("return_logprobs", "include_stop", "ignore_eos"):
            _require_type(name, getattr(self, name), bool)

    @property
    def is_greedy(self) -> bool:
        """True when the draw cannot matter."""
        return self.top_k == 1 or (self.temperature is not None and self.temperature < 1e-7)

    def resolve(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Fill what is unset from `defaults`, a generation_config.json; then with the off values.

        `do_sample: false` means greedy unless this request sets temperature, top_k, top_p or min_p;
        `suppress_tokens` become a bias of -1e9 that a bias of this request overrides. Afterwards
        temperature, top_k (-1 becomes 0), top_p, min_p and the penalties are never None. Pass {} to
        leave the model's defaults out.

        Raises:
            ModelLoadError: generation_config.json holds a value out of range or of the wrong type.
        """
        chosen: dict[str, Any] = {name: getattr(self, name) for name in _OFF}
        if _flag(defaults, "do_sample") is False and all(
            chosen[name] is None for name in _SHAPES_THE_DRAW
        ):
            chosen["top_k"] = 1
        for name in _IN_GENERATION_CONFIG:
            preset = _preset(defaults, name)  # checked even if the request overrides it
            if chosen[name] is None:
                chosen[name] = preset
        for name, off in _OFF.items():
            if chosen[name] is None:
                chosen[name] = off
        if chosen["top_k"] == -1:
            chosen["top_k"] = 0
        bias = {**_suppressed(defaults), **(self.logits_bias or {})}
        return attrs.evolve(self, **chosen, logits_bias=bias or None)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids the model does not have. Call it before `resolve`.

        Raises:
            RequestError: a logits_bias or stop token id is `vocab_size` or more.
        """
        for name, ids in (
            ("logits_bias token id", self.logits_bias or ()),
            ("stop token id", self.stop_toks.ids if self.stop_toks else ()),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise RequestError(
                        f"{name} {token} is outside the vocabulary: use 0 to {vocab_size - 1}"
                    )


def _preset(defaults: Mapping[str, Any], name: str) -> Any:
    value = defaults.get(name)
    if name == "top_k" and isinstance(value, float) and value.is_integer():
        value = int(value)  # some tools write every number as a float
    only: dict[str, Any] = {name: value}
    try:
        return getattr(SamplingParams(**only), name)
    except RequestError as error:
        raise _file_error(str(error)) from None


def _flag(defaults: Mapping[str, Any], name: str) -> bool | None:
    value = defaults.get(name)
    if value is not None and not isinstance(value, bool):
        raise _file_error(f"{name} ({value!r}) must be true or false")
    return value


def _suppressed(defaults: Mapping[str, Any]) -> dict[int, float]:
    tokens = defaults.get("suppress_tokens")
    if tokens is None:
        return {}
    if not isinstance(tokens, list | tuple):
        raise _file_error(f"suppress_tokens ({tokens!r}) must be a list of token ids")
    try:
        for token in tokens:
            _require_int("suppress_tokens id", token, minimum=0)
    except RequestError as error:
        raise _file_error(str(error)) from None
    return dict.fromkeys(tokens, SUPPRESSED)


def _file_error(problem: str) -> ModelLoadError:
    return ModelLoadError(f"generation_config.json: {problem}; correct the file or remove the key")


def _require_int(
    name: str, value: Any, *, minimum: int | None = None, maximum: int | None = None
) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} ({value!r}) must be a whole number")
    _require_range(name, value, minimum, maximum)


def _require_number(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise RequestError(f"{name} ({value!r:.80}) must be a finite number")
    if above is not None and value <= above:
        raise RequestError(f"{name} ({value}) must be above {above}")
    _require_range(name, value, minimum, maximum)


def _require_range(name: str, value: float, minimum: float | None, maximum: float | None) -> None:
    if minimum is not None and value < minimum:
        raise RequestError(f"{name} ({value}) must be at least {minimum}")
    if maximum is not None and value > maximum:
        raise RequestError(f"{name} ({value}) must be at most {maximum}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int no float can hold
        return False


def _require_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} {value!r} must be a non-empty string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} {value!r} is not valid Unicode") from None


def _require_type(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise RequestError(f"{name} ({value!r:.80}) must be {kind.__name__}")


def _require_bias(name: str, value: Any) -> None:
    _require_type(name, value, Mapping)
    for token, bias in value.items():
        _require_int(f"{name} token id", token, minimum=0)
        _require_number(f"{name} of token {token}", bias)


_OPTIONAL_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "temperature": partial(_require_number, minimum=0.0),
    "top_k": partial(_require_int, minimum=-1),
    "top_p": partial(_require_number, minimum=0.0, maximum=1.0),
    "min_p": partial(_require_number, minimum=0.0, maximum=1.0),
    "frequency_penalty": _require_number,
    "presence_penalty": _require_number,
    "repetition_penalty": partial(_require_number, above=0.0),
    "max_len": partial(_require_int, minimum=1),
    "seed": partial(_require_int, minimum=0),
    "logits_bias": _require_bias,
    "stop_toks": partial(_require_type, kind=StopTokens),
    "dry_params": partial(_require_type, kind=DrySamplingParams),
}
"""The settings that may be unset, and what they must be otherwise."""
