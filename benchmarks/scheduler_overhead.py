"""Microseconds a scheduling pass costs: schedule() and update(), without any model.

    python benchmarks/scheduler_overhead.py [--passes 10000]

64 and 256 running sequences, pools of a thousand and a million blocks, an empty queue and one of
100,000. Prompts are short, answers have 60 to 91 tokens, and whoever ends is replaced, so passes of
every kind are in it while nearly all places stay taken. The targets are 150 and 600 microseconds at
the median; a large pool must cost nothing, a long queue at most a tenth.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time

from mistralrs_sdk.engine.block_pool import BlockPool
from mistralrs_sdk.engine.request import Request
from mistralrs_sdk.engine.scheduler import Scheduler, SchedulerConfig
from mistralrs_sdk.engine.sequence import Sequence, Status
from mistralrs_sdk.sampling_params import SamplingParams

GREEDY = SamplingParams(top_k=1).resolve({})
TARGET_US = {64: 150, 256: 600}
BLOCK_SIZE = 32
TOKEN = 7


def make_sequence(number: int) -> Sequence:
    """A sequence like no other, that fits three blocks to its end."""
    start = number * 64
    request = Request(
        id=number,
        prompt_ids=tuple(range(start, start + 1 + number % 4)),
        sampling=GREEDY,
        max_tokens=60 + number * 7 % 32,
    )
    return Sequence.from_request(number, request, 0)


def measure(*, running: int, blocks: int, waiting: int, passes: int) -> tuple[list[float], float]:
    """Seconds of each pass once everything has started, and how many ran on average."""
    config = SchedulerConfig(
        max_num_seqs=running,
        max_num_batched_tokens=4096,
        max_prefill_chunk_tokens=512,
        max_decode_steps_before_prefill=8,
        max_model_len=4096,
    )
    scheduler = Scheduler(config, BlockPool(blocks + 1, BLOCK_SIZE))
    numbers = itertools.count()
    for _ in range(running + waiting):
        scheduler.add(make_sequence(next(numbers)))
    gc.collect()
    gc.freeze()  # what waits is not ours to walk through; a server's heap is larger still
    times, rows = [], 0
    warmup = 1000
    for _ in range(passes + warmup):
        started = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter() - started
        tokens = [TOKEN if item.samples else None for item in output.scheduled]
        started = time.perf_counter()
        scheduler.update(output, tokens)
        times.append(scheduled + time.perf_counter() - started)
        rows += len(scheduler.running)
        for item in output.scheduled:
            if item.sequence.status is Status.FINISHED:
                scheduler.add(make_sequence(next(numbers)))
    gc.unfreeze()
    return times[warmup:], rows / len(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--passes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=1, help="the best median of this many counts")
    args = parser.parse_args()
    print(f"microseconds a pass, {args.passes} passes")
    print(
        f"{'places':>7} {'running':>7} {'blocks':>8} {'waiting':>8} {'median':>7} {'p99':>7} target"
    )
    for places, target in TARGET_US.items():
        for blocks, waiting in itertools.product((1000, 1_000_000), (0, 100_000)):
            rounds = [
                measure(running=places, blocks=blocks, waiting=waiting, passes=args.passes)
                for _ in range(args.rounds)
            ]
            times, running = min(rounds, key=lambda found: statistics.median(found[0]))
            median, p99 = (1e6 * statistics.quantiles(times, n=100)[at] for at in (49, 98))
            print(
                f"{places:7d} {running:7.1f} {blocks:8d} {waiting:8d} {median:7.1f} {p99:7.1f} "
                f"{target:6d} {'' if median <= target else 'MISSED'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
