"""What `bench` works out of answers: rates, and how times are spread."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from mistralrs_sdk.cli.bench_work import Load


@attrs.frozen(kw_only=True)
class Answer:
    """One request as its client saw it; times in seconds on one clock."""

    sent: float
    times: tuple[float, ...] = ()
    """When each piece of the answer came."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    """Why it failed; what came before is kept."""


@attrs.frozen
class Spread:
    """How values are spread; all 0 without any."""

    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Percentiles are read off straight lines between the sorted values."""
        found = sorted(values)
        if not found:
            return cls()
        return cls(statistics.fmean(found), *(_percentile(found, p) for p in (50, 95, 99)))


@attrs.frozen(kw_only=True)
class SingleResult:
    """One case of the single request, over its iterations: mean and population deviation."""

    test: str
    tokens_per_second: float
    tokens_per_second_std: float
    latency: str
    """TTFT or TPOT."""
    latency_ms: float
    latency_ms_std: float


@attrs.frozen(kw_only=True)
class LoadResult:
    """What a load came to; failed requests count in `failed` only."""

    load: str
    concurrency: int | None
    request_rate: float | None
    requests: int
    failed: int
    errors: dict[str, int]
    """What the failed ones said, and how often."""
    seconds: float
    """From the first request sent to the last answer."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that came from a prefix cache, if the engine or server says so."""
    output_tokens: int
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    requests_per_second: float
    ttft_ms: Spread
    """From sending to the first piece."""
    itl_ms: Spread
    """Between two pieces of one answer, as the client saw them."""
    latency_ms: Spread
    """From sending to the last piece."""


def first_token_result(answers: Sequence[Answer], *, prompt_tokens: int) -> SingleResult:
    """Prompt tokens by the time to the first token."""
    times = [answer.times[0] - answer.sent for answer in answers]
    return _single(
        f"TTFT ({prompt_tokens} input tokens)",
        [prompt_tokens / time for time in times],
        latency="TTFT",
        seconds=times,
    )


def decode_result(answers: Sequence[Answer], *, new_tokens: int, depth: int) -> SingleResult:
    """Tokens after the first by the time they took."""
    rates = [
        (answer.new_tokens - 1) / (answer.times[-1] - answer.times[0])
        for answer in answers
        if answer.new_tokens > 1 and answer.times[-1] > answer.times[0]
    ]
    return _single(
        f"Decode ({new_tokens} tokens @ d{depth})",
        rates,
        latency="TPOT",
        seconds=[1 / rate for rate in rates],
    )


def load_result(load: Load, answers: Sequence[Answer]) -> LoadResult:
    """Add up the answers of a load."""
    done = [answer for answer in answers if answer.error is None and answer.times]
    ends = [answer.times[-1] for answer in done]
    seconds = max(ends) - min(answer.sent for answer in answers) if ends else 0.0
    prompt_tokens = sum(answer.prompt_tokens for answer in done)
    output_tokens = sum(answer.new_tokens for answer in done)
    errors = Counter(
        answer.error or "the answer was empty"
        for answer in answers
        if answer.error is not None or not answer.times
    )
    return LoadResult(
        load=load.name,
        concurrency=load.concurrency,
        request_rate=load.request_rate,
        requests=len(answers),
        failed=len(answers) - len(done),
        errors=dict(errors),
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(answer.cached_tokens for answer in done),
        output_tokens=output_tokens,
        prompt_tokens_per_second=_rate(prompt_tokens, seconds),
        output_tokens_per_second=_rate(output_tokens, seconds),
        requests_per_second=_rate(len(done), seconds),
        ttft_ms=Spread.of(1000 * (answer.times[0] - answer.sent) for answer in done),
        itl_ms=Spread.of(
            1000 * (later - earlier)
            for answer in done
            for earlier, later in zip(answer.times, answer.times[1:], strict=False)
        ),
        latency_ms=Spread.of(1000 * (answer.times[-1] - answer.sent) for answer in done),
    )


def _single(
    test: str, rates: Sequence[float], *, latency: str, seconds: Sequence[float]
) -> SingleResult:
    milliseconds = [1000 * time for time in seconds]
    return SingleResult(
        test=test,
        tokens_per_second=statistics.fmean(rates) if rates else 0.0,
        tokens_per_second_std=statistics.pstdev(rates) if rates else 0.0,
        latency=latency,
        latency_ms=statistics.fmean(milliseconds) if rates else 0.0,
        latency_ms_std=statistics.pstdev(milliseconds) if rates else 0.0,
    )


def _percentile(ordered: Sequence[float], percent: float) -> float:
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
