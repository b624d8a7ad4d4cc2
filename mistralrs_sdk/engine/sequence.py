"""What the engine knows about one choice of one request while it lives."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

from mistralrs_sdk.engine.request import FinishReason, Request

if TYPE_CHECKING:  # they need torch and llguidance, which a scheduler does without
    from mistralrs_sdk.constraints.matcher import Matcher
    from mistralrs_sdk.engine.sampler import SamplerRow


LEAST_FORCED = 2
"""Known tokens that are worth a step of more than one token; single ones are drawn as usual."""


class Status(enum.Enum):
    """Where a sequence stands. Preemption takes it from PREFILL or DECODE back to WAITING."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@attrs.define(eq=False, slots=True)
class Sequence:
    """One choice of a request: its tokens and the blocks that hold their keys and values.

    Touched by the engine thread only.
    """

    id: int
    """Rises with arrival: a smaller id came first."""
    request: Request
    choice: int
    tokens: list[int]
    """Prompt and generated tokens."""
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    """Tokens whose keys and values exist."""
    arrived_at: float = 0.0
    """When it was queued, on `time.perf_counter`'s clock."""
    root: bytes = b""
    """What its prefix hashes start from: the model and the request's cache salt."""
    blocks: list[int] = attrs.field(factory=list)
    block_hashes: list[bytes] = attrs.field(factory=list)
    """Hashes of the full blocks of `tokens`, as far as they were needed."""
    num_cached_blocks: int = 0
    """Leading blocks that are registered in the prefix cache."""
    failed_admissions: int = 0
    times_overtaken: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at the first admission."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    rank: tuple[int, int] = attrs.field(init=False)
    """The order in which sequences are served: priority, then arrival."""
    scheduled_at: float | None = None
    first_token_at: float | None = None
    sampler_row: SamplerRow | None = None
    """What the sampler keeps of it from step to step."""
    matcher: Matcher | None = None
    """What its constraint lets come next, in step with `tokens`; preemption does not change it."""

    def __attrs_post_init__(self) -> None:
        self.rank = (self.request.priority, self.id)

    @classmethod
    def from_request(
        cls, sequence_id: int, request: Request, choice: int, *, arrived_at: float = 0.0
    ) -> Sequence:
        return cls(
            id=sequence_id,
            request=request,
            choice=choice,
            tokens=list(request.prompt_ids),
            arrived_at=arrived_at,
            matcher=None if request.constraint is None else request.constraint.matcher(),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id}, {self.status.value}, {self.num_computed_tokens}/{len(self)} "
            f"tokens, {len(self.blocks)} blocks)"
        )

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.tokens) - self.num_computed_tokens

    def append(self, token: int, *, max_model_len: int) -> None:
        """Take the sampled `token`, and finish if it was the last one."""
        self.tokens.append(token)
        if token in self.request.stop_ids:
            self.finish("stop")
            return
        if self.matcher is not None:
            self._follow(self.matcher, token)
            if self.status is Status.FINISHED:
                return
        longest = len(self.request.prompt_ids) + self.request.max_tokens
        if len(self.tokens) >= min(longest, max_model_len):
            self.finish("length")

    def append_forced(self, *, max_model_len: int) -> None:
        """Take the tokens that its constraint leaves no choice about; they are computed together.

        Not where something wants to see how likely, or to change how likely, each of them is.
        """
        request = self.request
        reports = request.sampling.return_logprobs or request.sampling.top_n_logprobs > 0
        if self.matcher is None or reports or request.logits_processors:
            return
        forced = self.matcher.forced()
        if len(forced) < LEAST_FORCED:
            return
        for token in forced:
            self.append(token, max_model_len=max_model_len)
            if self.status is Status.FINISHED:
                return

    def _follow(self, matcher: Matcher, token: int) -> None:
        """Move the constraint on, and finish if nothing more may come or something went wrong."""
        if not matcher.advance(token):
            self.finish("error", f"its constraint cannot go on: {matcher.error}")
        elif matcher.is_complete:
            self.tokens.append(matcher.eos_ids[0])  # the only one left: no need to compute it
            self.finish("stop")

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.error = error
