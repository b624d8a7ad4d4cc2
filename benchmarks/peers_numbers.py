"""From arrival times to numbers: rates, latencies, parts of the limit, ratios to the peers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from peers_work import Answer, Load

OURS = "ours"

_BYTES = {"f32": 4.0, "f16": 2.0, "q8": 34 / 32, "q4": 18 / 32}
"""Bytes a weight, scales included."""


@attrs.frozen(kw_only=True)
class Weights:
    """What a step has to read and multiply."""

    layer_params: int
    head_params: int
    num_bytes: int
    """In the model's file; the embedding counts only if the head uses it."""


Run = Mapping[str, float]
"""What one contender did in one round of one load, by the name of the number."""
Runs = Mapping[str, Sequence[Run]]
"""The rounds of one load by contender."""


def measure_run(load: Load, answers: Sequence[Answer]) -> dict[str, float]:
    """The numbers of one run: "rate" in tokens per second, "seconds", and latencies in seconds.

    The rate counts prompt tokens in prefill. In decode it counts the tokens that came while all
    requests were decoding, otherwise all new tokens over the whole time.
    """
    began = min(answer.sent for answer in answers)
    ended = max(answer.arrivals[-1] for answer in answers)
    first = [answer.arrivals[0] - answer.sent for answer in answers]
    gaps = [
        later - sooner
        for answer in answers
        for sooner, later in zip(answer.arrivals, answer.arrivals[1:], strict=False)
    ]
    found = {
        "seconds": ended - began,
        "ttft_p50": percentile(first, 50),
        "ttft_p99": percentile(first, 99),
    }
    if gaps:
        found |= {"itl_p50": percentile(gaps, 50), "itl_p99": percentile(gaps, 99)}
    if load.kind == "prefill":
        return found | {"rate": len(load.asks[0].prompt_ids) / (ended - began)}
    if load.kind == "decode":
        return found | {"rate": decode_rate(answers)}
    return found | {"rate": sum(answer.tokens for answer in answers) / (ended - began)}


def decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second from the last first token to the first last one."""
    started = max(answer.arrivals[0] for answer in answers)
    ended = min(answer.arrivals[-1] for answer in answers)
    count = 0.0
    for answer in answers:
        pieces = sum(started < time <= ended for time in answer.arrivals)
        count += pieces * answer.tokens / len(answer.arrivals)  # a piece may hold several tokens
    return count / (ended - started) if ended > started else float("nan")


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that at least `percent` of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]


def limit_rate(
    load: Load, weights: Weights, limits: Mapping[str, float], *, stored: str
) -> float | None:
    """The most tokens per second that memory and arithmetic allow; None where steps vary.

    `stored` says how the weights are kept: "gguf" as in the file, "f32", "f16", "q8", "q4". With
    those of 8 bits and less the products may be of int8.
    """
    if load.kind not in ("prefill", "decode"):
        return None
    operations = limits["f32"] if stored in ("f32", "f16") else limits["int8"] or limits["f32"]
    tokens = len(load.asks[0].prompt_ids) if load.kind == "prefill" else len(load.asks)
    logits = 1 if load.kind == "prefill" else tokens
    arithmetic = 2 * (weights.layer_params * tokens + weights.head_params * logits) / operations
    return tokens / max(stored_bytes(weights, stored) / limits["read"], arithmetic)


def stored_bytes(weights: Weights, stored: str) -> float:
    """Bytes of all weights; the head of 4-bit ones has 8 bits."""
    if stored == "gguf":
        return weights.num_bytes
    head = _BYTES["q8" if stored == "q4" else stored]
    return weights.layer_params * _BYTES[stored] + weights.head_params * head


def medians(runs: Sequence[Run]) -> dict[str, float]:
    """The median of each number over the rounds."""
    names = {name for run in runs for name in run}
    return {name: statistics.median(run[name] for run in runs if name in run) for name in names}


def best_of(
    runs: Runs, *, among: str = "", peers: bool = False, number: str = "rate"
) -> str | None:
    """Who has the best median: of those whose name starts with `among`, of peers only if asked.

    The highest rate is the best, and the lowest of everything else.
    """
    found = {
        name: medians(rounds)[number]
        for name, rounds in runs.items()
        if rounds
        and name.startswith(among)
        and not (peers and name.startswith(OURS))
        and all(number in run for run in rounds)
    }
    if not found:
        return None
    return max(found, key=lambda name: found[name] if number == "rate" else -found[name])


def ratio(runs: Runs, one: str, other: str, *, number: str = "rate") -> float:
    """The median over the rounds that both ran of one's number by the other's."""
    pairs = zip(runs[one], runs[other], strict=False)
    return statistics.median(mine[number] / theirs[number] for mine, theirs in pairs)


def summary(runs: Runs, load: Load, weights: Weights, result: Mapping[str, Any]) -> list[list[str]]:
    """A row per contender that ran, under `peers_report.HEADER`."""
    best = best_of(runs, peers=True)
    rows = []
    for name, rounds in runs.items():
        if not rounds:
            continue
        middle, rates = medians(rounds), [run["rate"] for run in rounds]
        limit = limit_rate(load, weights, result["limits"], stored=result["stored"][name])
        rows.append(
            [
                name,
                f"{middle['rate']:.1f}",
                f"{min(rates):.1f} to {max(rates):.1f}",
                f"{ratio(runs, name, best):.2f}" if best else "",
                *(_latency(middle, key) for key in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")),
                f"{middle['rate'] / limit:.0%}" if limit else "",
                f"{middle['others']:.2f}",
                str(len(rounds)),
            ]
        )
    return rows


def _latency(middle: Run, name: str) -> str:
    return f"{1000 * middle[name]:.0f}" if name in middle else ""
