"""Measure what LoRA adapters cost in decode steps: none, one for all, several mixed.

    python benchmarks/lora.py [MODEL] [--threads N] [--rank R] [--adapters N]

Random adapters of every linear layer; single steps of the real engine on this machine's CPU, the
cases in turn. Prints tokens per second and the ratio to the base model.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence

import attrs
import torch

from mistralrs_sdk import MemoryGpuConfig, ModelBuilder, PagedAttentionMetaBuilder, SamplingParams
from mistralrs_sdk.cli.model_flags import model_place
from mistralrs_sdk.engine.adapters import AdapterLease, ResidentAdapter
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.request import Request
from mistralrs_sdk.engine.scheduler import Scheduled
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from mistralrs_sdk.engine.sequence import Status
from mistralrs_sdk.layers.lora import LoraLayers, LoraPair
from mistralrs_sdk.machine import default_num_threads

SEQUENCES = (8, 32)
CONTEXT = 128
"""Tokens behind each sequence."""
GREEDY = SamplingParams(top_k=1).resolve({})


@attrs.frozen
class Result:
    """One number of sequences with one choice of adapters."""

    sequences: int
    case: str
    tokens_per_second: float
    ratio: float
    """To the base model's tokens per second."""


def make_adapter(layers: LoraLayers, number: int, *, rank: int) -> ResidentAdapter:
    """A random adapter of every linear layer."""
    generator = torch.Generator().manual_seed(number)
    pairs = {
        name: LoraPair(
            a=torch.randn(rank, target.in_features, generator=generator) * 0.01,
            b=torch.randn(target.out_features, rank, generator=generator) * 0.01,
            scale=1.0,
        )
        for name, target in layers.targets.items()
    }
    size = layers.num_bytes(dict.fromkeys(pairs, rank))
    return ResidentAdapter(
        generation=f"{number:064x}", weights=layers.make(pairs), rank=rank, bytes=size
    )


def make_step(
    engine: Engine, count: int, adapters: Sequence[ResidentAdapter | None]
) -> list[Scheduled]:
    """A decode step of `count` sequences, which have these adapters in turn."""
    pool = engine.scheduler.pool
    step = []
    for number in range(count):
        adapter = adapters[number % len(adapters)]
        request = Request(
            id=number,
            prompt_ids=tuple(random.Random(number).choices(range(10, 1000), k=CONTEXT + 1)),
            sampling=GREEDY,
            max_tokens=1,
            adapter=None if adapter is None else AdapterLease(adapter.generation, adapter),
        )
        sequence = EngineSequence.from_request(number, request, 0)
        sequence.blocks = pool.allocate(pool.blocks_for(CONTEXT + 1))
        sequence.num_computed_tokens = CONTEXT
        sequence.status = Status.DECODE
        step.append(Scheduled(sequence, 1))
    return step


def measure(engine: Engine, *, rank: int, num_adapters: int, runs: int) -> list[Result]:
    """Median seconds of a step for each case, the cases of one size in turn."""
    layers = engine.runner.lora
    adapters = [make_adapter(layers, number, rank=rank) for number in range(num_adapters)]
    cases: dict[str, Sequence[ResidentAdapter | None]] = {
        "base model only": [None],
        "one adapter for all": adapters[:1],
        f"{num_adapters} adapters mixed": adapters,
        f"base and {num_adapters} adapters": [None, *adapters],
    }
    results = []
    for count in SEQUENCES:
        steps = {case: make_step(engine, count, chosen) for case, chosen in cases.items()}
        times: dict[str, list[float]] = {case: [] for case in cases}
        for _ in range(runs + 2):  # the first ones record the base model's tape
            for case, step in steps.items():
                started = time.perf_counter()
                engine.runner.run(step)
                times[case].append(time.perf_counter() - started)
        for step in steps.values():
            for item in step:
                engine.scheduler.pool.release(item.sequence.blocks)
        seconds = {case: statistics.median(own[2:]) for case, own in times.items()}
        base = next(iter(seconds.values()))
        results += [Result(count, case, count / s, base / s) for case, s in seconds.items()]
    return results


async def main_async(path: str, *, threads: int, rank: int, num_adapters: int, runs: int) -> None:
    """Build the model, measure, print."""
    paged = PagedAttentionMetaBuilder().with_gpu_memory(MemoryGpuConfig.ContextSize(64 * 1024))
    builder = ModelBuilder(path).with_force_cpu().with_num_threads(threads).with_lora()
    async with await builder.with_paged_attn(paged.build()).build() as model:
        # not public: single steps are the engine's business
        results = await model.inner().thread.call(
            lambda engine: measure(engine, rank=rank, num_adapters=num_adapters, runs=runs)
        )
    print(f"{path}, {threads} threads, rank {rank} on every linear layer")
    for result in results:
        print(
            f"{result.sequences:>4} sequences  {result.case:<22} "
            f"{result.tokens_per_second:>8.1f} tokens/s  {result.ratio:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="demo", help="GGUF file, folder or demo")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    asyncio.run(
        main_async(
            model_place(args.model),
            threads=args.threads,
            rank=args.rank,
            num_adapters=args.adapters,
            runs=args.runs,
        )
    )


if __name__ == "__main__":
    main()
