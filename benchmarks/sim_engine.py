"""The scheduler simulator's engine: the real scheduler and pool, a model that is only a formula."""

from __future__ import annotations

import math
import time
from collections import Counter

import attrs
from sim_traffic import Arrivals, Traffic

from mistralrs_sdk.engine.block_pool import BlockPool
from mistralrs_sdk.engine.scheduler import Scheduler, SchedulerConfig
from mistralrs_sdk.engine.sequence import Sequence, Status

TOKEN = -1
"""What the model always says; prompts differ, so that answers need not."""

MAX_IDLE_PASSES = 1000
"""Passes in a row that may compute nothing while somebody waits."""


@attrs.frozen(kw_only=True)
class StepCost:
    """Seconds of a step as a sum: itself, its prompt tokens, its decodes, the keys it reads."""

    step: float
    prompt_token: float
    decode: float
    context_token: float


@attrs.frozen(kw_only=True)
class Settings:
    """The knobs. `kv_tokens` is the size of the KV cache."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 4096
    max_prefill_chunk_tokens: int | None = 512
    max_decode_steps_before_prefill: int = 8
    kv_tokens: int = 65_536
    prefix_caching: bool = True
    mixed_batches: bool = True
    max_mixed_prompt_tokens: int | None = None

    def make_scheduler(self, *, longest: int, block_size: int = 32) -> Scheduler:
        limits = attrs.asdict(self)
        pool = BlockPool(limits.pop("kv_tokens") // block_size + 1, block_size)
        return Scheduler(SchedulerConfig(max_model_len=longest, **limits), pool)


class Spread:
    """How a value in seconds is distributed, to within two percent."""

    STEPS_PER_E = 50

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = 0
        self.largest = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[round(math.log(max(value, 1e-6)) * self.STEPS_PER_E)] += times
        self.count += times
        self.largest = max(self.largest, value)

    def percentile(self, percent: float) -> float:
        """The value that `percent` of the values do not exceed; 0 without any."""
        rank = self.count * percent / 100
        seen = 0
        for step, count in sorted(self._counts.items()):
            seen += count
            if seen >= rank:
                return min(self.largest, math.exp(step / self.STEPS_PER_E))
        return self.largest


@attrs.define
class Result:
    """What happened. Times are virtual, except `wall_seconds`."""

    first_token: Spread = attrs.field(factory=Spread)
    """From arrival to the first token."""
    urgent_first_token: Spread = attrs.field(factory=Spread)
    """The same, of requests with a higher priority only."""
    inter_token: Spread = attrs.field(factory=Spread)
    wait: Spread = attrs.field(factory=Spread)
    """From arrival until something of the request is computed."""
    seconds: float = 0.0
    passes: int = 0
    answered: int = 0
    canceled: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    """Of all requests, whether computed or found in the cache."""
    output_tokens: int = 0
    preemptions: int = 0
    prefix_hit_rate: float = 0.0
    wall_seconds: float = 0.0

    @property
    def output_rate(self) -> float:
        """Generated tokens per second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0


def simulate(settings: Settings, cost: StepCost, traffic: Traffic, *, seed: int = 0) -> Result:
    """Run the traffic to its end in virtual time.

    Raises:
        RuntimeError: the scheduler computes nothing although somebody waits.
    """
    started = time.perf_counter()
    scheduler = settings.make_scheduler(longest=traffic.longest)
    arrivals = Arrivals(traffic, seed=seed)
    result = Result()
    newest_at: dict[int, float] = {}  # of each sequence with tokens, when its newest came
    now, idle = 0.0, 0
    while True:
        _let_in(scheduler, arrivals, result, newest_at, now=now)
        if not scheduler.has_work:
            next_at = arrivals.next_at
            if next_at is None:
                break
            now = next_at
            continue
        output = scheduler.schedule()
        result.passes += 1
        result.rejected += len(output.rejected)
        idle = 0 if output.scheduled or output.rejected else idle + 1
        if idle > MAX_IDLE_PASSES:
            raise RuntimeError(f"nothing was computed in {idle} passes, though somebody waits")
        prompt_tokens = decodes = context = 0
        tokens: list[int | None] = []
        for item in output.scheduled:
            sequence = item.sequence
            context += sequence.num_computed_tokens + item.num_tokens
            if sequence.status is Status.DECODE:
                decodes += 1
                tokens.append(TOKEN)
            else:
                prompt_tokens += item.num_tokens
                tokens.append(TOKEN if item.samples else None)
                if sequence.scheduled_at is None:
                    sequence.scheduled_at = now
                    result.wait.add(now - sequence.arrived_at)
        before = now
        now += (
            cost.step
            + cost.prompt_token * prompt_tokens
            + cost.decode * decodes
            + cost.context_token * context
        )
        scheduler.update(output, tokens)
        steady = 0  # tokens whose predecessors came in the step before: most of them
        for item, token in zip(output.scheduled, tokens, strict=True):
            if token is None:
                continue
            sequence = item.sequence
            last = newest_at.get(sequence.id)
            if last == before:
                steady += 1
            elif last is not None:
                result.inter_token.add(now - last)
            else:
                _record_first(result, sequence, now=now)
            newest_at[sequence.id] = now
            result.output_tokens += 1
            if sequence.status is Status.FINISHED:
                result.answered += 1
                del newest_at[sequence.id]
                arrivals.answered(sequence, now)
        if steady:
            result.inter_token.add(now - before, steady)
    stats = scheduler.stats()
    result.seconds = now
    result.preemptions = stats.preemptions
    result.prefix_hit_rate = stats.prefix_hits / max(1, stats.prefix_lookups)
    result.wall_seconds = time.perf_counter() - started
    return result


def _let_in(
    scheduler: Scheduler,
    arrivals: Arrivals,
    result: Result,
    newest_at: dict[int, float],
    *,
    now: float,
) -> None:
    asked, given_up = arrivals.until(now)
    for sequence in asked:
        result.prompt_tokens += len(sequence)
        scheduler.add(sequence)
    for sequence in given_up:
        scheduler.end([sequence], "canceled")
        newest_at.pop(sequence.id, None)
        result.canceled += 1


def _record_first(result: Result, sequence: Sequence, *, now: float) -> None:
    sequence.first_token_at = now
    seconds = now - sequence.arrived_at
    result.first_token.add(seconds)
    if sequence.request.priority < 0:
        result.urgent_first_token.add(seconds)
