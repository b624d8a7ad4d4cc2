"""What a `Runner` is asked: the requests of the `mistralrs` package."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from mistralrs_sdk.chat.execution_options import ShellOptions, ShellSkillMount
from mistralrs_sdk.chat.messages import Message, ReasoningEffort
from mistralrs_sdk.chat.requests import RequestBuilder, as_request
from mistralrs_sdk.chat.tool_events import AgentPermission, ApprovalCallback
from mistralrs_sdk.chat.tools import Tool, ToolChoice
from mistralrs_sdk.constraints.constraint import Constraint
from mistralrs_sdk.errors import RequestError
from mistralrs_sdk.sampling_params import DrySamplingParams, SamplingParams, StopTokens
from mistralrs_sdk.unsupported import unsupported

_GRAMMARS = {
    "regex": Constraint.Regex,
    "lark": Constraint.Lark,
    "json_schema": Constraint.JsonSchema,
    "llguidance": Constraint.Llguidance,
}


@attrs.frozen(kw_only=True)
class _SampledRequest:
    """How the next token is chosen; what is None comes from the model's defaults, else is off."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop_seqs: str | Sequence[str] | None = None
    n_choices: int = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: Sequence[str] | None = None
    ignore_eos: bool = False
    grammar: str | None = None
    """What the answer must match, in the language `grammar_type` says."""
    grammar_type: str | None = None
    """regex, lark, json_schema or llguidance."""

    truncate_sequence: bool = False
    """Drop the start of a prompt that is too long, instead of refusing it."""
    adapter: str | None = None
    """The LoRA adapter to answer with, by its alias or generation; None is the base model."""

    def __attrs_post_init__(self) -> None:
        self.builder()

    def builder(self) -> RequestBuilder:
        """The settings in this package's words.

        Raises:
            RequestError: one is wrong.
        """
        return (
            self._start()
            .set_sampling(self.sampling_params())
            .with_truncate_sequence(self.truncate_sequence)
            .set_adapter(self.adapter)
            .set_constraint(self.constraint())
        )

    def _start(self) -> RequestBuilder:
        return RequestBuilder()

    def constraint(self) -> Constraint | None:
        """What `grammar` says, in this package's words.

        Raises:
            RequestError: it is none in the language `grammar_type`, or one of the two is missing.
        """
        if (self.grammar is None) != (self.grammar_type is None):
            raise RequestError(
                f"grammar ({self.grammar!r:.40}) and grammar_type ({self.grammar_type!r}) go "
                "together: set both, or none"
            )
        if self.grammar is None:
            return None
        make = _GRAMMARS.get(str(self.grammar_type))
        if make is None:
            raise RequestError(
                f"grammar_type {self.grammar_type!r} is unknown: use {', '.join(_GRAMMARS)}"
            )
        return make(self.grammar)

    def sampling_params(self) -> SamplingParams:
        """The sampling settings in this package's words.

        Raises:
            RequestError: one is out of range.
        """
        stops = [self.stop_seqs] if isinstance(self.stop_seqs, str) else self.stop_seqs
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            stop_toks=StopTokens.Seqs(stops) if stops else None,
            ignore_eos=self.ignore_eos,
            max_len=self.max_tokens,
            logits_bias=self.logit_bias,
            n_choices=self.n_choices,
            dry_params=self._dry_params(),
        )

    def _dry_params(self) -> DrySamplingParams | None:
        details = {
            "base": self.dry_base,
            "allowed_length": self.dry_allowed_length,
            "sequence_breakers": self.dry_sequence_breakers,
        }
        given = {name: value for name, value in details.items() if value is not None}
        if self.dry_multiplier is not None:
            return DrySamplingParams(multiplier=self.dry_multiplier, **given)
        if given:
            raise RequestError(
                f"dry_{next(iter(given))} has no effect without dry_multiplier: set that as well"
            )
        return None


@attrs.frozen
class ChatCompletionRequest(_SampledRequest):
    """A chat for `Runner.send_chat_completion_request`: `ChatCompletionRequest("Hi", stream=True)`.

    Raises:
        RequestError: a value is out of range.
        UnsupportedError: a field asks for something this package does not do.
    """

    messages: str | Sequence[Message]
    """OpenAI-shaped turns, or the text of one user turn."""
    model: str = "default"
    """The loaded model's id, or "default"."""
    logprobs: bool = attrs.field(default=False, kw_only=True)
    """Report the log probability of every generated token."""
    top_logprobs: int | None = attrs.field(default=None, kw_only=True)
    """Alternatives per token, 0 to 20; also turns `logprobs` on. Default 1 with `logprobs`."""
    stream: bool = attrs.field(default=False, kw_only=True)
    enable_thinking: bool | None = attrs.field(default=None, kw_only=True)
    """Passed to the chat template; None leaves it to the template."""
    reasoning_effort: ReasoningEffort | str | None = attrs.field(default=None, kw_only=True)
    """off (or none), low, medium, high or xhigh; passed to the chat template."""
    tool_schemas: Sequence[str | Mapping[str, Any] | Tool] | None = attrs.field(
        default=None, kw_only=True
    )
    """Tools the model may call: each the JSON of OpenAI's tool object, or that object."""
    tool_choice: ToolChoice | str | Mapping[str, Any] | None = attrs.field(
        default=None, kw_only=True
    )
    """A `ToolChoice`, or what OpenAI has for one; None: the model decides."""
    max_tool_rounds: int | None = attrs.field(default=None, kw_only=True)
    """Rounds of calls that are executed here before the answer must come; None: 256."""
    tool_dispatch_url: str | None = attrs.field(default=None, kw_only=True)
    """Where calls of tools without a callback are sent; None: they end the answer."""
    agent_permission: AgentPermission | str | None = attrs.field(default=None, kw_only=True)
    """Auto, Ask or Deny; None is Ask if there is somebody to ask, else Auto."""
    agent_approval_callback: ApprovalCallback | None = attrs.field(default=None, kw_only=True)
    """Gets an `AgentToolApproval`; returns a bool or an `AgentToolApprovalDecision`."""
    session_id: str | None = attrs.field(default=None, kw_only=True)
    """The session whose turns come before these; None: none."""
    enable_code_execution: bool = attrs.field(default=False, kw_only=True)
    """Let the model run Python; the `Runner` needs a `code_execution_config`."""
    code_execution_permission: AgentPermission | str | None = attrs.field(
        default=None, kw_only=True
    )
    """Auto, Ask or Deny for code, beside `agent_permission`: the stricter one counts."""
    enable_shell: bool = attrs.field(default=False, kw_only=True)
    """Let the model run shell commands; the `Runner` needs a `shell_config`."""
    shell_skills: Sequence[ShellSkillMount] = attrs.field(default=(), kw_only=True)
    """Folders for the commands; they let commands run, too."""
    web_search_options: Any = unsupported()
    files: Any = unsupported()
    input_files: Any = unsupported()

    def builder(self) -> RequestBuilder:
        """The messages and settings in this package's words.

        Raises:
            RequestError: one is wrong.
        """
        asked = super().builder().with_session_id(self.session_id)
        asked = asked.with_tool_dispatch_url(self.tool_dispatch_url)
        if self.enable_thinking is not None:
            asked = asked.enable_thinking(self.enable_thinking)
        if self.reasoning_effort is not None:
            asked = asked.with_reasoning_effort(_effort(self.reasoning_effort))
        if self.tool_schemas:
            asked = asked.set_tools(map(_tool, self.tool_schemas))
        if self.tool_choice is not None:
            asked = asked.set_tool_choice(_tool_choice(self.tool_choice))
        if self.max_tool_rounds is not None:
            asked = asked.with_max_tool_rounds(self.max_tool_rounds)
        if self.agent_approval_callback is not None:
            asked = asked.with_agent_approval_callback(self.agent_approval_callback)
        if self.agent_permission is not None:
            asked = asked.with_agent_permission(self.agent_permission)
        if self.code_execution_permission is not None:
            asked = asked.with_code_execution_permission(self.code_execution_permission)
        asked = asked.with_code_execution(self.enable_code_execution)
        asked = asked.with_shell_execution(self.enable_shell)
        if self.shell_skills:
            asked = asked.with_shell_options(ShellOptions(skills=self.shell_skills))
        return asked

    def _start(self) -> RequestBuilder:
        return as_request(self.messages)

    def sampling_params(self) -> SamplingParams:
        """The sampling settings in this package's words.

        Raises:
            RequestError: one is out of range.
        """
        alternatives = self.top_logprobs
        if alternatives is None:
            alternatives = 1 if self.logprobs else 0
        return attrs.evolve(
            super().sampling_params(), return_logprobs=self.logprobs, top_n_logprobs=alternatives
        )


@attrs.frozen
class CompletionRequest(_SampledRequest):
    """A raw prompt for `Runner.send_completion_request`: `CompletionRequest("Once", top_k=1)`.

    Raises:
        RequestError: a value is out of range.
        UnsupportedError: a field asks for something this package does not do.
    """

    prompt: str
    model: str = "default"
    """The loaded model's id, or "default"."""
    echo_prompt: bool = attrs.field(default=False, kw_only=True)
    """Put the prompt before each text."""
    best_of: int = attrs.field(default=1, kw_only=True)
    """Of this many answers the `n_choices` likeliest are returned; 1: no more are made."""
    suffix: Any = unsupported()
    tool_schemas: Any = unsupported()
    tool_choice: Any = unsupported()

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not isinstance(self.prompt, str):
            raise RequestError(f"prompt ({self.prompt!r:.80}) must be a str")
        if self.best_of != 1 and self.best_of < self.n_choices:
            raise RequestError(
                f"best_of ({self.best_of}) must be at least n_choices ({self.n_choices})"
            )


def _effort(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    return ReasoningEffort.OFF if text == "none" else text


def _tool(schema: Any) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except json.JSONDecodeError as error:
        raise RequestError(f"tool_schemas: {schema!r:.80} is no JSON: {error}") from None


def _tool_choice(value: Any) -> ToolChoice:
    """Read what `ToolChoice.from_dict` does, and the names of the package's two choices."""
    names = {"Auto": ToolChoice.AUTO, "None": ToolChoice.NONE, "NoTools": ToolChoice.NONE}
    return (
        names[value] if isinstance(value, str) and value in names else ToolChoice.from_dict(value)
    )
