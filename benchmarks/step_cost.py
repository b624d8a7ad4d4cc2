"""Fit what a step of a model costs: seconds = a + b prompt tokens + c decodes + d context tokens.

    python benchmarks/step_cost.py [MODEL] [--threads N]

Runs single steps of the real engine on this machine's CPU and prints the four numbers as a
`StepCost` for `sim_engine.py`, with how far the fit is off.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time

import torch

from mistralrs_sdk import MemoryGpuConfig, ModelBuilder, PagedAttentionMetaBuilder, SamplingParams
from mistralrs_sdk.cli.model_flags import model_place
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.request import Request
from mistralrs_sdk.engine.scheduler import Scheduled
from mistralrs_sdk.engine.sequence import Sequence, Status
from mistralrs_sdk.machine import default_num_threads

STEPS = (
    *((prompt, 0, 0) for prompt in (16, 64, 128, 256, 512)),
    *((0, rows, context) for rows in (1, 4, 8, 16, 32) for context in (32, 256, 512)),
    *((128, rows, 256) for rows in (8, 32)),
)
"""Prompt tokens, decodes, tokens that each of those has behind it."""

GREEDY = SamplingParams(top_k=1).resolve({})


def make_sequence(number: int, *, length: int, computed: int, engine: Engine) -> Sequence:
    """A sequence with `computed` of its `length` random tokens in the cache, or so it says."""
    ids = tuple(random.Random(number).choices(range(10, 1000), k=length))
    sequence = Sequence.from_request(
        number, Request(id=number, prompt_ids=ids, sampling=GREEDY, max_tokens=1), 0
    )
    pool = engine.scheduler.pool
    sequence.blocks = pool.allocate(pool.blocks_for(length))
    sequence.num_computed_tokens = computed
    sequence.status = Status.DECODE if computed else Status.PREFILL
    return sequence


def measure(engine: Engine, prompt: int, rows: int, context: int, *, runs: int) -> float:
    """Median seconds of a step."""
    decodes = [
        make_sequence(i, length=context + 1, computed=context, engine=engine) for i in range(rows)
    ]
    prompts = [make_sequence(rows, length=prompt, computed=0, engine=engine)] if prompt else []
    step = [Scheduled(s, 1) for s in decodes] + [Scheduled(s, prompt) for s in prompts]
    times = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        engine.runner.run(step)
        times.append(time.perf_counter() - started)
    for sequence in (*decodes, *prompts):
        engine.scheduler.pool.release(sequence.blocks)
    return statistics.median(times[1:])


def fit(engine: Engine, *, runs: int) -> tuple[list[float], float]:
    """The four numbers, and the median relative error."""
    seconds = torch.tensor([measure(engine, *step, runs=runs) for step in STEPS])
    sizes = torch.tensor(
        [[1.0, prompt, rows, prompt + rows * (context + 1)] for prompt, rows, context in STEPS]
    )
    # Relative errors count: a step of 30 ms matters as much as one of a second.
    weighted = sizes / seconds[:, None]
    solution = torch.linalg.lstsq(weighted, torch.ones(len(STEPS), 1)).solution[:, 0]
    error = ((sizes @ solution - seconds).abs() / seconds).median().item()
    return solution.clamp(min=0).tolist(), error


async def main_async(path: str, *, threads: int, runs: int) -> None:
    paged = PagedAttentionMetaBuilder().with_gpu_memory(MemoryGpuConfig.ContextSize(32 * 1024))
    builder = ModelBuilder(path).with_force_cpu().with_num_threads(threads)
    async with await builder.with_paged_attn(paged.build()).build() as model:
        # not public: single steps are the engine's business
        (a, b, c, d), error = await model.inner().thread.call(lambda engine: fit(engine, runs=runs))
    print(f"StepCost(step={a:.3g}, prompt_token={b:.3g}, decode={c:.3g}, context_token={d:.3g})")
    print(f"{path}, {threads} threads; the fit is off by {error:.0%} at the median step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="demo", help="GGUF file, folder or demo")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    asyncio.run(main_async(model_place(args.model), threads=args.threads, runs=args.runs))


if __name__ == "__main__":
    main()
