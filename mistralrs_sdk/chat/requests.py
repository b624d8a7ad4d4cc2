"""`RequestBuilder`: chat messages with every setting of a request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from mistralrs_sdk.chat.execution_options import ExecutionMethods, ExecutionOptions
from mistralrs_sdk.chat.messages import (
    Content,
    Message,
    ReasoningEffort,
    TextMessageRole,
    TextMessages,
    flag,
    from_openai,
    reasoning_effort,
    require_one_wish,
    text_message,
)
from mistralrs_sdk.chat.refused import RefusedSettings
from mistralrs_sdk.chat.tool_events import (
    AgentPermission,
    ApprovalCallback,
    require_permission,
)
from mistralrs_sdk.chat.tools import Tool, ToolCallResponse, ToolChoice
from mistralrs_sdk.constraints.constraint import Constraint
from mistralrs_sdk.errors import RequestError
from mistralrs_sdk.sampling_params import DrySamplingParams, SamplingParams, StopTokens

LogitsProcessor = Callable[[Any, Sequence[int]], Any]
"""Gets a row of logits [vocab] in float32 and the ids so far, and returns the logits to use."""

_ACCEPTED = (
    "a str (one user turn), TextMessages, RequestBuilder, a list of message dicts or "
    'an OpenAI-shaped dict {"messages": [...], ...}'
)


@attrs.frozen
class RequestBuilder(ExecutionMethods, RefusedSettings):
    """Turns with every setting of a request. Every method returns a new value.

    Without a sampler choice the answer is greedy. The first of temperature, top-k, top-p and min-p
    that is set switches to sampling; what stays unset then comes from the model's own defaults.

    Raises:
        RequestError: from each method, at once: a value is out of range or of the wrong type.
    """

    messages: tuple[Message, ...] = attrs.field(default=(), hash=False)
    thinking: bool | None = None
    """Passed to the template as `enable_thinking`; None leaves it to the template."""
    reasoning_effort: ReasoningEffort | None = None
    """Passed to the template; None leaves it to the template."""
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
    tools: tuple[Tool, ...] = ()
    """What the model may call."""
    tool_choice: ToolChoice = ToolChoice.AUTO
    constraint: Constraint | None = None
    """What the answer must match."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    max_tool_rounds: int | None = None
    """Rounds of calls that are executed here before the answer must come; None: 256."""
    session_id: str | None = None
    """The session whose turns come before these; None: none."""
    tool_dispatch_url: str | None = None
    """Where calls of tools that nothing here executes are sent; None: they end the answer."""
    agent_permission: AgentPermission = AgentPermission.AUTO
    """Whether calls are executed at once, after asking, or not at all."""
    agent_approval_callback: ApprovalCallback | None = None
    """Who is asked."""
    execution: ExecutionOptions = attrs.field(factory=ExecutionOptions)
    """What of the model's code and commands is run here."""
    left_to_caller: frozenset[str] = frozenset()
    """Names of tools whose calls end the answer, whatever would execute them here."""

    def __attrs_post_init__(self) -> None:
        require_one_wish(self.thinking, self.reasoning_effort)

    @classmethod
    def from_messages(cls, messages: TextMessages) -> RequestBuilder:
        """Start from text turns, keeping what they say about thinking."""
        return cls(
            messages=messages.messages,
            thinking=messages.thinking,
            reasoning_effort=messages.reasoning_effort,
        )

    @property
    def sampling_params(self) -> SamplingParams:
        """The settings in effect: `top_k` is 1 if no sampler choice was made."""
        return self.sampling if self.samples else attrs.evolve(self.sampling, top_k=1)

    def add_message(self, role: TextMessageRole | str, text: Content) -> RequestBuilder:
        """Append one turn; text parts are joined without a separator.

        Raises:
            RequestError: the role is empty, or the content is not text.
        """
        return attrs.evolve(self, messages=(*self.messages, text_message(role, text)))

    def add_message_with_tool_call(
        self, role: TextMessageRole | str, text: Content, tool_calls: Iterable[ToolCallResponse]
    ) -> RequestBuilder:
        """Append a turn in which the model called tools; `text` is what it said beside that."""
        calls = [call.to_dict() for call in tool_calls]
        return attrs.evolve(
            self, messages=(*self.messages, {**text_message(role, text), "tool_calls": calls})
        )

    def add_tool_message(self, content: Content, tool_call_id: str) -> RequestBuilder:
        """Append what a tool returned for the call with this id."""
        _require_type("tool_call_id", tool_call_id, str)
        turn = {**text_message(TextMessageRole.TOOL, content), "tool_call_id": tool_call_id}
        return attrs.evolve(self, messages=(*self.messages, turn))

    def enable_thinking(self, enable: bool) -> RequestBuilder:
        """Ask for (or against) reasoning before the answer, if the template knows the switch."""
        return attrs.evolve(self, thinking=flag("enable_thinking", enable))

    def with_reasoning_effort(self, effort: ReasoningEffort | str) -> RequestBuilder:
        """Ask for this much reasoning: off, low, medium, high or xhigh.

        Raises:
            RequestError: it is none of these, or contradicts `enable_thinking`.
        """
        return attrs.evolve(self, reasoning_effort=reasoning_effort(effort))

    def set_tools(self, tools: Iterable[Tool | Mapping[str, Any]]) -> RequestBuilder:
        """Offer these tools (`Tool`, or OpenAI's dict) instead of those before. Default: none.

        Raises:
            RequestError: one is malformed, or two have the same name.
        """
        offered = tuple(t if isinstance(t, Tool) else Tool.from_dict(t) for t in tools)
        names = [tool.name for tool in offered]
        for name in names:
            if names.count(name) > 1:
                raise RequestError(f"two tools are called {name!r}: rename one")
        return attrs.evolve(self, tools=offered)

    def set_tool_choice(self, choice: ToolChoice) -> RequestBuilder:
        """Say which tools may or must be called. Default: the model decides."""
        _require_type("tool_choice", choice, ToolChoice)
        return attrs.evolve(self, tool_choice=choice)

    def with_max_tool_rounds(self, rounds: int) -> RequestBuilder:
        """Execute calls here, for at most this many rounds. Default 256; 0 executes none."""
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0:
            raise RequestError(f"max_tool_rounds ({rounds!r}) must be a whole number, 0 or more")
        return attrs.evolve(self, max_tool_rounds=rounds)

    def with_session_id(self, session_id: str | None) -> RequestBuilder:
        """Go on with this session's turns, and leave these and the answer in it. Default: none."""
        if session_id is not None and (not isinstance(session_id, str) or not session_id):
            raise RequestError(f"session_id ({session_id!r}) must be a non-empty str, or None")
        return attrs.evolve(self, session_id=session_id)

    def with_tool_dispatch_url(self, url: str | None) -> RequestBuilder:
        """Send calls of tools that nothing here executes to this URL. Default: they end the answer.

        It gets a POST of `{"name": ..., "arguments": {...}}` and answers with the text, a JSON
        string or `{"content": ...}`.
        """
        valid = isinstance(url, str) and url.startswith(("http://", "https://"))
        if url is not None and not valid:
            raise RequestError(f"tool_dispatch_url ({url!r}) must start with http:// or https://")
        return attrs.evolve(self, tool_dispatch_url=url)

    def with_agent_permission(self, permission: AgentPermission | str) -> RequestBuilder:
        """Execute calls here at once (auto, the default), after asking (ask), or refuse all (deny).

        With ask, `with_agent_approval_callback` says who is asked.
        """
        return attrs.evolve(self, agent_permission=require_permission(permission))

    def with_agent_approval_callback(self, callback: ApprovalCallback) -> RequestBuilder:
        """Ask this function before each call that is executed here, one by one. Default: nobody.

        It gets an `AgentToolApproval` and returns an `AgentToolApprovalDecision` or a bool. A plain
        function runs on a worker thread. If it raises, the call is denied.
        """
        if not callable(callback):
            raise RequestError(f"approval callback ({callback!r}) must be callable")
        return attrs.evolve(
            self, agent_approval_callback=callback, agent_permission=AgentPermission.ASK
        )

    def with_agent_approval_async_callback(self, callback: ApprovalCallback) -> RequestBuilder:
        """As `with_agent_approval_callback`, which takes coroutine functions too."""
        return self.with_agent_approval_callback(callback)

    def set_constraint(self, constraint: Constraint | None) -> RequestBuilder:
        """Hold the answer to a regex, JSON schema or grammar; None lifts that."""
        if constraint is not None:
            _require_type("constraint", constraint, Constraint)
        return attrs.evolve(self, constraint=constraint)

    def add_logits_processor(self, processor: LogitsProcessor) -> RequestBuilder:
        """Change the logits after penalties and bias, before the temperature.

        `processor(logits, ids)` gets one row [vocab] in float32 and the ids so far, prompt first,
        and returns the row to use. It runs on the engine's thread: while it works, nothing else
        does. If it raises, its request fails and no other.
        """
        if not callable(processor):
            raise RequestError(f"logits processor ({processor!r}) must be callable")
        return attrs.evolve(self, logits_processors=(*self.logits_processors, processor))

    def with_chat_template_kwargs(self, **kwargs: Any) -> RequestBuilder:
        """Add variables for the chat template; a later value replaces an earlier one."""
        return attrs.evolve(self, chat_template_kwargs={**self.chat_template_kwargs, **kwargs})

    def with_truncate_sequence(self, truncate: bool) -> RequestBuilder:
        """Drop the start of a too long prompt (True), or refuse it (False, the default)."""
        return attrs.evolve(self, truncate_sequence=flag("truncate_sequence", truncate))

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
        """Fail with `DeadlineError` (and what there is) after these seconds. Default: never."""
        valid = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not valid or not 0 < seconds < math.inf:
            raise RequestError(f"deadline ({seconds!r}) must be a number of seconds above 0")
        return attrs.evolve(self, deadline=float(seconds))

    def with_cache_salt(self, salt: str | None) -> RequestBuilder:
        """Share cached prefixes only with requests of this salt (of a tenant). Default: none."""
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise RequestError(f"cache_salt ({salt!r}) must be a non-empty str, or None")
        return attrs.evolve(self, cache_salt=salt)

    def with_prefix_cache(self, use: bool) -> RequestBuilder:
        """Use cached prefixes and leave some (True, the default), or compute everything anew."""
        return attrs.evolve(self, prefix_cache=flag("prefix_cache", use))

    def set_sampling(self, params: SamplingParams) -> RequestBuilder:
        """Replace every sampling setting; what `params` leaves unset, the model's defaults fill."""
        _require_type("sampling", params, SamplingParams)
        return attrs.evolve(self, sampling=params, samples=True)

    def set_deterministic_sampler(self) -> RequestBuilder:
        """Go back to greedy: forget temperature, top-k, top-p and min-p; keep the rest."""
        greedy = attrs.evolve(self.sampling, temperature=None, top_k=None, top_p=None, min_p=None)
        return attrs.evolve(self, sampling=greedy, samples=False)

    def set_sampler_temperature(self, temperature: float) -> RequestBuilder:
        """Sample at this temperature; 0 takes the most likely token. Default: greedy."""
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
        """Report this many alternatives per token, 0 (the default) to 20."""
        return self._with(top_n_logprobs=top_n_logprobs)

    def set_sampler_frequency_penalty(self, frequency_penalty: float) -> RequestBuilder:
        """Lower a generated token's logit by this for each time it occurred; 0 is off."""
        return self._with(frequency_penalty=frequency_penalty)

    def set_sampler_presence_penalty(self, presence_penalty: float) -> RequestBuilder:
        """Lower a generated token's logit by this once it occurred; 0 is off."""
        return self._with(presence_penalty=presence_penalty)

    def set_sampler_repetition_penalty(self, repetition_penalty: float) -> RequestBuilder:
        """Divide (positive) or multiply (negative) the logits of tokens seen; 1 is off."""
        return self._with(repetition_penalty=repetition_penalty)

    def set_sampler_stop_toks(self, stop_toks: StopTokens) -> RequestBuilder:
        """End at these strings or ids, and at the model's own end tokens. Default: only there."""
        _require_type("stop_toks", stop_toks, StopTokens)
        return self._with(stop_toks=stop_toks)

    def set_sampler_max_len(self, max_len: int) -> RequestBuilder:
        """Generate at most this many tokens. Default: until its end, or that of the context."""
        return self._with(max_len=max_len)

    def set_sampler_ignore_eos(self, ignore_eos: bool) -> RequestBuilder:
        """Go on past the model's end tokens, up to a stop or the length. Default: end at them."""
        return self._with(ignore_eos=flag("ignore_eos", ignore_eos))

    def set_sampler_logits_bias(self, logits_bias: Mapping[int, float]) -> RequestBuilder:
        """Add these numbers to the logits of these token ids. Default: none."""
        _require_type("logits_bias", logits_bias, Mapping)
        return self._with(logits_bias=dict(logits_bias))

    def set_sampler_n_choices(self, n_choices: int) -> RequestBuilder:
        """Answer this many times. Default 1."""
        return self._with(n_choices=n_choices)

    def set_sampler_dry_params(self, dry_params: DrySamplingParams) -> RequestBuilder:
        """Penalise tokens that would continue a repetition. Default: off."""
        _require_type("dry_params", dry_params, DrySamplingParams)
        return self._with(dry_params=dry_params)

    def set_sampler_seed(self, seed: int) -> RequestBuilder:
        """Fix the draws of this request, whatever runs beside it. Default: a fresh seed."""
        return self._with(seed=seed)

    def return_logprobs(self, enable: bool) -> RequestBuilder:
        """Report the log probability of every generated token."""
        return self._with(return_logprobs=flag("return_logprobs", enable))

    def _with(self, **settings: Any) -> RequestBuilder:
        return attrs.evolve(self, sampling=attrs.evolve(self.sampling, **settings))

    def _sampled(self, **settings: Any) -> RequestBuilder:
        return attrs.evolve(self._with(**settings), samples=True)


RequestLike = RequestBuilder | TextMessages | str | Sequence[dict[str, Any]] | Mapping[str, Any]
"""What a chat request may be: a builder, messages, one user turn, message dicts, OpenAI's body."""


def as_request(source: object, *, streams: bool | None = None) -> RequestBuilder:
    """Turn what a user may pass into a request.

    `streams` says what the method does that it was passed to, for "stream" of an OpenAI-shaped
    request; None looks the other way.

    Raises:
        RequestError: it is none of the accepted types, a message in it is not a text turn, or it
            says "stream" to a method that does not.
    """
    if isinstance(source, RequestBuilder):
        return source
    if isinstance(source, TextMessages):
        return RequestBuilder.from_messages(source)
    if isinstance(source, str):
        return RequestBuilder().add_message(TextMessageRole.USER, source)
    if isinstance(source, Sequence) and not isinstance(source, bytes | bytearray):
        return RequestBuilder(messages=tuple(from_openai(message) for message in source))
    if isinstance(source, Mapping) and "messages" in source:
        # Not at the top: it fills a RequestBuilder.
        from mistralrs_sdk.chat.openai_request import from_openai_request, require_stream

        if streams is not None:
            require_stream(source, streams=streams)
        return from_openai_request(source)
    raise RequestError(f"a request cannot be made from {type(source).__name__}: give {_ACCEPTED}")


def _require_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise RequestError(f"{name} ({value!r}) must be {kind.__name__}")
