"""What goes into the engine and what comes out: requests, drawn tokens, outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from mistralrs_sdk.sampling_params import SamplingParams

if TYPE_CHECKING:  # they need torch and llguidance, which a scheduler does without
    from mistralrs_sdk.constraints.compiled import CompiledConstraint
    from mistralrs_sdk.engine.adapters import AdapterLease

LOWEST_LOGPROB = -9999.0
"""Reported in place of a log probability below it: JSON has no minus infinity (as OpenAI does)."""

DEADLINE_PASSED = "its deadline passed"
"""The error of what did not end within its `deadline`."""

FinishReason = Literal["stop", "length", "canceled", "error"]


@attrs.frozen(kw_only=True)
class Request:
    """One user's ask, as the engine sees it: ids and resolved settings."""

    id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    """Resolved: temperature, top_k, top_p, min_p and the penalties are numbers, never None."""
    max_tokens: int
    """Most tokens to generate per choice; at least 1, and within the context."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end a choice; they count as generated."""
    seed: int = 0
    priority: int = 0
    """Smaller comes first; first come first served within one priority."""
    deadline: float | None = None
    """When the request fails if it has not ended, on `time.perf_counter`'s clock."""
    cache_salt: str | None = None
    """Prefixes are shared only between requests with the same salt."""
    adapter: AdapterLease | None = None
    """The adapter it is answered with; None for the base model."""
    use_prefix_cache: bool = True
    """Whether it looks for, and leaves, cached prefixes."""
    raw_logits: bool = False
    """The logits at every prompt position are wanted: its prompt runs whole and alone.

    Nothing is drawn: `max_tokens` must be 1 and `stop_ids` empty, so that it ends with its prompt.
    """
    unsplittable: tuple[tuple[int, int], ...] = ()
    """Spans [first, last) of the prompt that one forward must compute together, in order."""
    dry_breakers: frozenset[int] = frozenset()
    """Ids that end a repetition for DRY (`SamplingParams.dry_params`), already tokenised."""
    constraint: CompiledConstraint | None = None
    """What each choice must match; it ends where nothing could be added."""
    logits_processors: tuple[Callable[[Any, Sequence[int]], Any], ...] = ()
    """Each gets a row of logits and the ids so far, and returns the row to use."""


@attrs.frozen(kw_only=True)
class TokenLogprobs:
    """Log probabilities at one generated token: natural log-softmax of the model's raw logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely ids and their log probabilities, best first."""


@attrs.frozen
class SampledToken:
    """The choice for one row, or why there is none."""

    token_id: int
    """-1 with an error; means nothing with `prompt_logits`."""
    logprobs: TokenLogprobs | None = attrs.field(default=None, kw_only=True)
    error: str | None = attrs.field(default=None, kw_only=True)
    prompt_logits: Any = attrs.field(default=None, kw_only=True, eq=False, repr=False)
    """Of a request for raw logits, in place of a token: [prompt, vocab], float32, on the CPU."""


@attrs.frozen(kw_only=True)
class RequestOutput:
    """New tokens of one choice of one request."""

    request_id: int
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token if the request asked for them."""
    finish_reason: FinishReason | None = None
    """Set on the choice's last output. With "stop" the last token id is the one that ended it."""
    error: str | None = None
    """Set with finish_reason "error": why. `DEADLINE_PASSED` is that reason and no other."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    prompt_time: float = 0.0
    """Seconds from being scheduled first to the first token."""
    completion_time: float = 0.0
    """Seconds from the first token to the newest."""
    prompt_logits: Any = attrs.field(default=None, eq=False, repr=False)
    """What a request for raw logits gets: a tensor [prompt, vocab], float32, on the CPU."""
