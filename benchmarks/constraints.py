"""What constraints add to a step, and what tokens known in advance take away from an answer.

    python benchmarks/constraints.py [MODEL] [--requests 8] [--runs 5]

Requests with one JSON schema run together, seeded at temperature 1. In each step the time spent on
masks, and on following the drawn tokens, is set against the step's. The target: at most a fifth.
Runs with forced tokens alternate with runs without, on one engine.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from mistralrs_sdk import Constraint, Model, ModelBuilder, RequestBuilder
from mistralrs_sdk.cli.model_flags import model_place
from mistralrs_sdk.engine import sampler, sequence
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.machine import default_num_threads

TARGET = 0.2
MAX_TOKENS = 160
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email_address": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "postal_address": {
            "type": "object",
            "properties": {
                "street_and_number": {"type": "string", "maxLength": 40},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street_and_number", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email_address", "tags", "postal_address"],
    "additionalProperties": False,
}


@attrs.define
class Steps:
    """Seconds of each step with all rows, and of the constraints' part in it."""

    rows: int
    whole: list[float] = attrs.field(factory=list)
    masks: list[float] = attrs.field(factory=list)
    following: list[float] = attrs.field(factory=list)


@contextmanager
def watched(steps: Steps) -> Iterator[None]:
    """Time the engine's steps and what constraints do in them."""
    spent = {"masks": 0.0, "following": 0.0, "rows": 0.0}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()  # of one thread: what else runs here does not count
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.thread_time() - started
                spent["rows"] += name == "following"

        return call

    def step(engine: Engine) -> Any:
        spent.update(masks=0.0, following=0.0, rows=0.0)
        started = time.perf_counter()
        outputs = original(engine)
        if spent["rows"] == steps.rows:
            steps.whole.append(time.perf_counter() - started)
            steps.masks.append(spent["masks"])
            steps.following.append(spent["following"])
        return outputs

    original = Engine.step
    change_rows, append = sampler.change_rows, sequence.Sequence.append_forced
    Engine.step = step  # type: ignore[method-assign]
    sampler.change_rows = timed("masks", change_rows)
    sequence.Sequence.append_forced = timed("following", append)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine.step = original  # type: ignore[method-assign]
        sampler.change_rows = change_rows
        sequence.Sequence.append_forced = append  # type: ignore[method-assign]


async def answers(model: Model, *, requests: int) -> tuple[float, int]:
    """Ask for all of them at once; returns the seconds, and the tokens they came to."""
    asked = (
        RequestBuilder()
        .add_message("user", "Invent a person. Answer in JSON.")
        .set_constraint(Constraint.JsonSchema(SCHEMA))
        .set_sampler_temperature(1.0)
        .set_sampler_max_len(MAX_TOKENS)
    )
    started = time.perf_counter()
    responses = await asyncio.gather(
        *[model.send_chat_request(asked.set_sampler_seed(seed)) for seed in range(requests)]
    )
    tokens = sum(response.usage.completion_tokens for response in responses)
    return time.perf_counter() - started, tokens


async def benchmark(path: str, *, requests: int, runs: int, threads: int) -> bool:
    """Measure and print; returns whether the target was met."""
    steps = Steps(requests)
    rates: dict[str, list[float]] = {"drawn": [], "forced": []}
    drawn: dict[str, int] = {}
    least = sequence.LEAST_FORCED
    builder = ModelBuilder(path).with_force_cpu().with_num_threads(threads)
    async with await builder.build() as model:
        await answers(model, requests=requests)  # warms up
        for _ in range(runs):
            for name in rates:
                sequence.LEAST_FORCED = least if name == "forced" else MAX_TOKENS
                before = (await model.metrics()).tokens_generated
                with watched(steps):
                    seconds, tokens = await answers(model, requests=requests)
                rates[name].append(tokens / seconds)
                drawn[name] = (await model.metrics()).tokens_generated - before
                drawn[f"{name} of"] = tokens
    sequence.LEAST_FORCED = least
    whole = statistics.median(steps.whole)
    masks, following = statistics.median(steps.masks), statistics.median(steps.following)
    shares = [
        (m + f) / w for w, m, f in zip(steps.whole, steps.masks, steps.following, strict=True)
    ]
    share = statistics.median(shares)
    worst = statistics.quantiles(shares, n=20)[-1]
    print(f"{path}, {threads} threads, {requests} requests, {len(steps.whole)} steps with all")
    print(f"step      {1e3 * whole:7.2f} ms")
    print(f"masks     {1e3 * masks:7.2f} ms")
    print(f"following {1e3 * following:7.2f} ms")
    print(f"share     {share:7.1%} at the median, {worst:.1%} at the 95th percentile")
    for name, values in rates.items():
        part = f"{drawn[name]} of {drawn[f'{name} of']} tokens drawn"
        print(f"{name:9} {statistics.median(values):7.1f} tokens/s, {part}")
    print(f"target {TARGET:.0%}: {'met' if share <= TARGET else 'MISSED'}")
    return share <= TARGET


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="demo", help="GGUF file, folder or demo")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=default_num_threads())
    args = parser.parse_args()
    place = model_place(args.model)
    met = asyncio.run(
        benchmark(place, requests=args.requests, runs=args.runs, threads=args.threads)
    )
    raise SystemExit(not met)


if __name__ == "__main__":
    main()
