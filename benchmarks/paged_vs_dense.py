"""Tokens per second of the paged engine next to the unpaged one, on the same requests.

    python benchmarks/paged_vs_dense.py [MODEL] [--runs 3] [--load "32 at once"]

1, 8 and 32 requests at once, 48 new tokens each; all prompts of 64 tokens, or of 16 to 110 tokens,
each of another length. The rate counts the new tokens and the whole time. Both engines take turns
on the same prompts in one process; no prompt repeats and the prefix caches are off. With equal
lengths the unpaged engine is one batch; with mixed ones its lengths wait for each other, which is
what paging is for.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import attrs
import torch

from mistralrs_sdk import Model, ModelBuilder, SamplingParams
from mistralrs_sdk.cli.model_flags import model_place
from mistralrs_sdk.machine import default_num_threads

NEW_TOKENS = 48


@attrs.frozen(kw_only=True)
class Load:
    """Requests that are sent at once: how many, and how long their prompts are."""

    name: str
    lengths: tuple[int, ...]


LOADS = tuple(
    load
    for count in (1, 8, 32)
    for load in (
        Load(name=f"{count} at once, equal", lengths=(64,) * count),
        Load(name=f"{count} at once, mixed", lengths=tuple(range(16, 16 + 3 * count, 3))),
    )[: 1 if count == 1 else 2]
)


async def seconds(model: Model, prompts: list[list[int]]) -> float:
    """Send all prompts at once and wait for every answer."""
    sampling = SamplingParams(top_k=1, max_len=NEW_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    await asyncio.gather(*(model.send_completion_request(p, sampling) for p in prompts))
    return time.perf_counter() - started


async def benchmark(path: str, *, runs: int, threads: int, only: str) -> None:
    """Measure the loads with both engines and print medians."""
    torch.manual_seed(0)
    builder = ModelBuilder(path).with_num_threads(threads).with_force_cpu().with_dtype("f32")
    builder = builder.with_max_num_seqs(32).with_prefix_cache_n(None)
    async with await builder.build() as paged, await builder.with_paged_attn(None).build() as dense:
        print(f"{path}, {threads} threads, float32, medians of {runs} runs")
        for model in (paged, dense):  # warms up
            await seconds(model, [list(range(100, 164))])
        for load in (load for load in LOADS if only in load.name):
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(runs):
                prompts = [torch.randint(10, 30_000, (n,)).tolist() for n in load.lengths]
                for model, spent in zip((paged, dense), times, strict=True):
                    spent.append(await seconds(model, prompts))
            medians = [statistics.median(spent) for spent in times]
            rates = [len(load.lengths) * NEW_TOKENS / median for median in medians]
            print(
                f"{load.name:20} paged {rates[0]:7.1f} tokens/s, unpaged {rates[1]:7.1f}, "
                f"unpaged / paged {rates[1] / rates[0]:.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="demo", help="GGUF file, folder or demo")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--load", default="", help="only loads with this in their name")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    args = parser.parse_args()
    asyncio.run(
        benchmark(model_place(args.model), runs=args.runs, threads=args.threads, only=args.load)
    )


if __name__ == "__main__":
    main()
