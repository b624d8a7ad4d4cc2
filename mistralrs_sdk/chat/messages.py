"""What a user asks: chat messages, and the request built around them."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from mistralrs_sdk.errors import RequestError
from mistralrs_sdk.sampling_params import DrySamplingParams, SamplingParams, StopTokens

Message = Mapping[str, Any]
"""One OpenAI-shaped turn: {"role": ..., "content": ...} and what else its template reads."""

Content = str | Iterable[Mapping[str, Any]] | None
"""Text, or a list of `{"type": "text", "text": ...}` parts, or nothing."""

_ACCEPTED = "a str (one user turn), TextMessages, RequestBuilder or a list of message dicts"


class TextMessageRole(enum.StrEnum):
    """Who speaks in a turn; any other role is given as a plain str."""

    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"
    TOOL = "tool"


@attrs.frozen
class TextMessages:
    """Text turns, answered greedily. Every method returns a new value and leaves this one alone.

    `TextMessages().add_message(TextMessageRole.USER, "Hi")`
    """

    messages: tuple[Message, ...] = attrs.field(default=(), hash=False)
    thinking: bool | None = None
    """Passed to the template as `enable_thinking`; None leaves it to the template."""

    def add_message(self, role: TextMessageRole | str, text: Content) -> TextMessages:
        """Append one turn; text parts are joined without a separator.

        Raises:
            RequestError: the role is empty, or the content is not text.
        """
        return attrs.evolve(self, messages=(*self.messages, _message(role, text)))

    def enable_thinking(self, enable: bool) -> TextMessages:
        """Ask for (or against) reasoning before the answer, if the template knows the switch."""
        return attrs.evolve(self, thinking=_flag("enable_thinking", enable))

    def clear(self) -> TextMessages:
        """Drop the turns, keep the rest."""
        return attrs.evolve(self, messages=())


@attrs.frozen
class RequestBuilder:
    """Turns with every setting of a request. Every method returns a new value.

    Without a sampler choice the answer is greedy. The first of temperature, top-k, top-p and min-p
    that is set switches to sampling; what stays unset then comes from the model's own defaults.
    """

    messages: tuple[Message, ...] = attrs.field(default=(), hash=False)
    thinking: bool | None = None
    """Passed to the template as `enable_thinking`; None leaves it to the template."""
    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    """The settings as given; `sampling_params` is what they come to."""
    samples: bool = False
    """False: greedy, whatever the model's defaults say."""
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict, hash=False)
    truncate_sequence: bool = False
    """Drop the start of a prompt that is too long, instead of refusing it."""
    adapter: str | None = None
    """The LoRA adapter to answer with; None is the base model."""
    priority: int = 0
    """Smaller is admitted first; first come first served within one priority."""
    deadline: float | None = None
    """Seconds from sending after which the request fails, wherever it is; None: never."""
    cache_salt: str | None = None
    """Prefixes are shared only with requests of the same salt; None is a salt of its own."""
    prefix_cache: bool = True
    """Whether cached prefixes are used and left for others."""

    @classmethod
    def from_messages(cls, messages: TextMessages) -> RequestBuilder:
        """Start from text turns, keeping their thinking switch."""
        return cls(messages=messages.messages, thinking=messages.thinking)

    @property
    def sampling_params(self) -> SamplingParams:
        """The settings in effect: `top_k` is 1 if no sampler choice was made."""
        return self.sampling if self.samples else attrs.evolve(self.sampling, top_k=1)

    def add_message(self, role: TextMessageRole | str, text: Content) -> RequestBuilder:
        """Append one turn; text parts are joined without a separator.

        Raises:
            RequestError: the role is empty, or the content is not text.
        """
        return attrs.evolve(self, messages=(*self.messages, _message(role, text)))

    def enable_thinking(self, enable: bool) -> RequestBuilder:
        """Ask for (or against) reasoning before the answer, if the template knows the switch."""
        return attrs.evolve(self, thinking=_flag("enable_thinking", enable))

    def with_chat_template_kwargs(self, **kwargs: Any) -> RequestBuilder:
        """Add variables for the chat template; a later value replaces an earlier one."""
        return attrs.evolve(self, chat_template_kwargs={**self.chat_template_kwargs, **kwargs})

    def with_truncate_sequence(self, truncate: bool) -> RequestBuilder:
        """Drop the start of a too long prompt (True), or refuse it (False, the default)."""
        return attrs.evolve(self, truncate_sequence=_flag("truncate_sequence", truncate))

    def set_adapter(self, adapter: str | None) -> RequestBuilder:
        """Answer with this adapter; None is the base model.

        Sending the request is a RequestError if the model has no adapter of that name.
        """
        if adapter is not None and (not isinstance(adapter, str) or not adapter):
            raise RequestError(f"adapter {adapter!r} must be the name of a loaded adapter, or None")
        return attrs.evolve(self, adapter=adapter)

    def with_priority(self, priority: int) -> RequestBuilder:
        """Be admitted before waiting requests of a larger priority. Default 0; may be negative."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority ({priority!r}) must be a whole number")
        return attrs.evolve(self, priority=priority)

    def with_deadline(self, seconds: float) -> RequestBuilder:
        """Fail with `InferenceError` (and what there is) if it has not ended after `seconds`."""
        valid = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not valid or not 0 < seconds < math.inf:
            raise RequestError(f"deadline ({seconds!r}) must be a number of seconds above 0")
        return attrs.evolve(self, deadline=float(seconds))

    def with_cache_salt(self, salt: str | None) -> RequestBuilder:
        """Share cached prefixes only with requests of the same salt, one per tenant for example."""
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise RequestError(f"cache_salt ({salt!r}) must be a non-empty str, or None")
        return attrs.evolve(self, cache_salt=salt)

    def with_prefix_cache(self, use: bool) -> RequestBuilder:
        """Use cached prefixes and leave some (True, the default), or compute everything anew."""
        return attrs.evolve(self, prefix_cache=_flag("prefix_cache", use))

    def set_sampling(self, params: SamplingParams) -> RequestBuilder:
        """Replace every sampling setting; what `params` leaves unset, the model's defaults fill."""
        _require_type("sampling", params, SamplingParams)
        return attrs.evolve(self, sampling=params, samples=True)

    def set_deterministic_sampler(self) -> RequestBuilder:
        """Go back to greedy: forget temperature, top-k, top-p and min-p; keep the rest."""
        greedy = attrs.evolve(self.sampling, temperature=None, top_k=None, top_p=None, min_p=None)
        return attrs.evolve(self, sampling=greedy, samples=False)

    def set_sampler_temperature(self, temperature: float) -> RequestBuilder:
        """Sample at this temperature; 0 takes the most likely token."""
        return self._sampled(temperature=temperature)

    def set_sampler_topk(self, top_k: int) -> RequestBuilder:
        """Sample from the k most likely tokens; 0 or -1 takes all, 1 is greedy."""
        return self._sampled(top_k=top_k)

    def set_sampler_topp(self, top_p: float) -> RequestBuilder:
        """Sample from the most likely tokens that hold this mass; 1 takes all."""
        return self._sampled(top_p=top_p)

    def set_sampler_minp(self, min_p: float) -> RequestBuilder:
        """Sample from tokens more likely than this part of the likeliest; 0 takes all."""
        return self._sampled(min_p=min_p)

    def set_sampler_topn_logprobs(self, top_n_logprobs: int) -> RequestBuilder:
        """Report this many alternatives per token, 0 to 20."""
        return self._with(top_n_logprobs=top_n_logprobs)

    def set_sampler_frequency_penalty(self, frequency_penalty: float) -> RequestBuilder:
        """Lower a generated token's logit by this for each time it occurred."""
        return self._with(frequency_penalty=frequency_penalty)

    def set_sampler_presence_penalty(self, presence_penalty: float) -> RequestBuilder:
        """Lower a generated token's logit by this once it occurred."""
        return self._with(presence_penalty=presence_penalty)

    def set_sampler_repetition_penalty(self, repetition_penalty: float) -> RequestBuilder:
        """Divide (positive) or multiply (negative) the logits of tokens seen; 1 is off."""
        return self._with(repetition_penalty=repetition_penalty)

    def set_sampler_stop_toks(self, stop_toks: StopTokens) -> RequestBuilder:
        """End the answer at these strings or ids, besides the model's own end tokens."""
        _require_type("stop_toks", stop_toks, StopTokens)
        return self._with(stop_toks=stop_toks)

    def set_sampler_max_len(self, max_len: int) -> RequestBuilder:
        """Generate at most this many tokens."""
        return self._with(max_len=max_len)

    def set_sampler_ignore_eos(self, ignore_eos: bool) -> RequestBuilder:
        """Go on past the model's end tokens; explicit stops and the length still end the answer."""
        return self._with(ignore_eos=_flag("ignore_eos", ignore_eos))

    def set_sampler_logits_bias(self, logits_bias: Mapping[int, float]) -> RequestBuilder:
        """Add these numbers to the logits of these token ids."""
        _require_type("logits_bias", logits_bias, Mapping)
        return self._with(logits_bias=dict(logits_bias))

    def set_sampler_n_choices(self, n_choices: int) -> RequestBuilder:
        """Answer this many times."""
        return self._with(n_choices=n_choices)

    def set_sampler_dry_params(self, dry_params: DrySamplingParams) -> RequestBuilder:
        """Penalise tokens that would continue a repetition."""
        _require_type("dry_params", dry_params, DrySamplingParams)
        return self._with(dry_params=dry_params)

    def set_sampler_seed(self, seed: int) -> RequestBuilder:
        """Fix the draws of this request, whatever runs beside it."""
        return self._with(seed=seed)

    def return_logprobs(self, enable: bool) -> RequestBuilder:
        """Report the log probability of every generated token."""
        return self._with(return_logprobs=_flag("return_logprobs", enable))

    def _with(self, **settings: Any) -> RequestBuilder:
        return attrs.evolve(self, sampling=attrs.evolve(self.sampling, **settings))

    def _sampled(self, **settings: Any) -> RequestBuilder:
        return attrs.evolve(self._with(**settings), samples=True)


def as_request(source: object) -> RequestBuilder:
    """Turn what a user may pass into a request.

    Raises:
        RequestError: it is none of the accepted types, or a message in it is not a text turn.
    """
    if isinstance(source, RequestBuilder):
        return source
    if isinstance(source, TextMessages):
        return RequestBuilder.from_messages(source)
    if isinstance(source, str):
        return RequestBuilder().add_message(TextMessageRole.USER, source)
    if isinstance(source, Sequence) and not isinstance(source, bytes | bytearray):
        return RequestBuilder(messages=tuple(_from_openai(message) for message in source))
    raise RequestError(f"a request cannot be made from {type(source).__name__}: give {_ACCEPTED}")


def _from_openai(message: object) -> Message:
    if not isinstance(message, Mapping) or "role" not in message:
        raise RequestError(f'message {message!r} must be a dict with "role" and "content"')
    # other keys (name, tool_calls, tool_call_id ...) are the template's business
    return {**message, **_message(message["role"], message.get("content"))}


def _message(role: object, content: Content) -> dict[str, Any]:
    if not isinstance(role, str) or not role:
        raise RequestError(f"role {role!r} must be a TextMessageRole or a non-empty str")
    return {"role": str(role), "content": _flatten(content)}


def _flatten(content: Any) -> str:
    """The text of a content; templates that join strings cannot read lists or None."""
    if content is None:
        return ""
    if isinstance(content, str):
        return str(content)
    if isinstance(content, Mapping) or not isinstance(content, Iterable):
        raise RequestError(
            f"content of type {type(content).__name__} must be a str or a list of text parts"
        )
    return "".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part, Mapping):
        raise RequestError(
            f'content part {kind!r} is not supported: give {{"type": "text", "text": ...}} parts'
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f'text part {part!r} must have a str under "text"')
    return part["text"]


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} ({value!r}) must be True or False")
    return value


def _require_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise RequestError(f"{name} ({value!r}) must be {kind.__name__}")
