"""Time to first token of a prompt whose start is cached, as a part of the first one's.

    python benchmarks/prefix_ttft.py [MODEL] [--prefix 512] [--runs 5]

Each run takes a fresh random prefix. The first prompt is the prefix and a few tokens, the second
the same prefix and other tokens, the third repeats the second exactly. The target: the second takes
at most a fifth of the first's time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import torch

from mistralrs_sdk import Model, ModelBuilder, SamplingParams
from mistralrs_sdk.cli.model_flags import model_place
from mistralrs_sdk.machine import default_num_threads

NAMES = ("first", "same prefix", "exact repeat")
TAIL = 30
TARGET = 0.2


async def first_token_seconds(model: Model, prompt: list[int]) -> float:
    """Ask for one token and wait for it."""
    started = time.perf_counter()
    await model.send_completion_request(prompt, SamplingParams(top_k=1, max_len=1, ignore_eos=True))
    return time.perf_counter() - started


async def benchmark(path: str, *, prefix_tokens: int, runs: int, threads: int) -> bool:
    """Measure and print; returns whether the target was met."""
    torch.manual_seed(0)
    builder = ModelBuilder(path).with_force_cpu().with_num_threads(threads)
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    async with await builder.build() as model:
        for _ in range(runs + 1):  # the first of them warms up
            ids = torch.randint(10, 500, (prefix_tokens + 2 * TAIL,)).tolist()
            prefix, tails = ids[:prefix_tokens], (ids[-2 * TAIL : -TAIL], ids[-TAIL:])
            prompts = (prefix + tails[0], prefix + tails[1], prefix + tails[1])
            for name, prompt in zip(NAMES, prompts, strict=True):
                seconds[name].append(await first_token_seconds(model, prompt))
        metrics = await model.metrics()
    first = statistics.median(seconds["first"][1:])
    print(
        f"{path}, {threads} threads: prompts of {prefix_tokens} + {TAIL} tokens, "
        f"medians of {runs} runs"
    )
    for name in NAMES:
        median = statistics.median(seconds[name][1:])
        print(f"{name:12} {1000 * median:8.0f} ms to the first token, {median / first:6.1%}")
    print(
        f"{metrics.prefix_hits} of {metrics.prefix_lookups} found a prefix, "
        f"{metrics.prefix_tokens_reused} tokens reused"
    )
    met = statistics.median(seconds["same prefix"][1:]) <= TARGET * first
    print(f"target {TARGET:.0%}: {'met' if met else 'MISSED'}")
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="demo", help="GGUF file, folder or demo")
    parser.add_argument("--prefix", type=int, default=512, help="tokens that prompts share")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=default_num_threads())
    args = parser.parse_args()
    place = model_place(args.model)
    met = asyncio.run(
        benchmark(place, prefix_tokens=args.prefix, runs=args.runs, threads=args.threads)
    )
    raise SystemExit(not met)


if __name__ == "__main__":
    main()
