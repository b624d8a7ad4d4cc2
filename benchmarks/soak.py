"""Random requests, cancels and tiny KV pools for minutes; every text is compared with a known one.

    python benchmarks/soak.py [--minutes 10] [--seed 0] [--packed]

The answers come from Hugging Face in float64 (`soak_cases.py`); with `--packed` the models run as
they do by default, and answers come from each request asked alone (`soak_packed.py`). Exit code 1
and a list of what went wrong if a text, finish reason or token count differs, a block or thread
leaks, or something hangs.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import os
import random
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import torch
from soak_cases import TinyModel, make_tiny_model
from soak_packed import make_packed_model, packed
from soak_requests import ENDS, NEEDS_CHAT, Run, Tally, live_requests, send

from mistralrs_sdk import (
    EngineClosedError,
    MemoryGpuConfig,
    ModelBuilder,
    PagedAttentionMetaBuilder,
)

MODELS = ("llama", "qwen3", "mistral_swa", "llama_bias", "qwen3_bias")
POOLS = (192, 512, 96, None, 320)
"""Tokens of the KV pool; None lets the package choose."""
PATIENCE_S = 60.0
"""A request that takes longer hangs."""
MAX_GROWTH_MIB = 64.0
"""RSS may grow by this much after every model has run once."""


async def client(run: Run, rng: random.Random, until: float) -> None:
    """Send requests one after the other, with random pauses, until the time is over."""
    chats = [case for case in run.cases if case.text is not None]
    while time.monotonic() < until:
        await asyncio.sleep(rng.expovariate(20.0))
        (kind,) = rng.choices(list(ENDS), [weight for weight, _ in ENDS.values()])
        case = rng.choice(chats if kind in NEEDS_CHAT else run.cases)
        run.tally.counts[kind] += 1
        run.tally.counts["with an adapter"] += case.adapter is not None
        run.tally.counts["with a constraint"] += case.constraint is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                await ENDS[kind][1](run, case, rng)
        except EngineClosedError:
            if time.monotonic() < until:
                run.tally.fail(f"{kind}: the model was closed too early")
            run.tally.counts["cut off by aclose"] += 1
        except TimeoutError:
            run.tally.fail(f"{kind}: no end within {PATIENCE_S} s of {case}")
        except Exception as error:
            run.tally.fail(f"{kind}: {type(error).__name__}: {error} of {case}")


async def alone(run: Run) -> None:
    """Each case by itself, in a roomy pool: the right answer without any neighbour."""
    for case in run.cases:
        await send(run, case)


async def check_idle(run: Run) -> None:
    """Once nobody asks any more, nothing may run, wait or own blocks."""
    gc.collect()
    deadline = time.monotonic() + 5
    while True:
        stats = await run.model.stats()
        held = (stats.running, stats.waiting, stats.used_blocks)
        if held == (0, 0, 0):
            break
        if time.monotonic() > deadline:
            run.tally.fail(f"idle, but running, waiting, used blocks are {held}")
            break
        await asyncio.sleep(0.01)


async def note_stats(run: Run) -> None:
    """Add what this engine did to the tally."""
    stats = await run.model.stats()
    run.tally.counts["preemptions"] += stats.preemptions
    run.tally.counts["prefix hits"] += stats.prefix_hits
    run.tally.counts["computed tokens"] += stats.computed_tokens


async def check_pool(run: Run, until: float, *, num_clients: int) -> None:
    """Verify the block pool between steps while the traffic runs, and that nobody is forgotten."""
    while time.monotonic() < until:
        live = await live_requests(run)
        if len(live) > num_clients:
            run.tally.fail(f"{num_clients} clients, but {len(live)} requests are in the engine")
        run.tally.counts["pool checks"] += 1
        await asyncio.sleep(0.1)


def exact(tiny: TinyModel, threads: int) -> ModelBuilder:
    """In float32 throughout: by itself a CPU rounds weights, inputs, keys and values."""
    return ModelBuilder(tiny.folder).with_dtype("f32").with_num_threads(threads)


async def make_exact_model(
    name: str, folder: Path, *, num_cases: int, rng: random.Random, threads: int
) -> TinyModel:
    """As `make_tiny_model`, with torch's threads."""
    return make_tiny_model(name, folder, num_cases=num_cases, rng=rng)


@attrs.frozen
class Mode:
    """How models compute, and who knows their answers."""

    plain: Callable[[TinyModel, int], ModelBuilder]
    """A model on this many threads with its default settings."""
    make: Callable[..., Awaitable[TinyModel]]
    unpaged: bool
    """Whether an engine without paging gives the same answers to the token."""


EXACT = Mode(exact, make_exact_model, unpaged=True)
PACKED = Mode(packed, make_packed_model, unpaged=False)  # forced tokens come only with paging


def configure(
    mode: Mode, tiny: TinyModel, rng: random.Random, *, pool: int | None, threads: int
) -> ModelBuilder:
    """A random configuration; a pool makes requests fight for its blocks."""
    seqs = rng.choice((2, 4, 8, 16, 32) if pool is None else (4, 8, 16, 32))
    builder = (
        mode.plain(tiny, threads)
        .with_max_num_seqs(seqs)
        .with_max_decode_steps_before_prefill(rng.choice((1, 2, 8)))
        .with_max_num_batched_tokens(max(seqs, rng.choice((8, 24, 64, 4096))))
        .with_prefix_cache_n(rng.choice((0, 16, 16)))
        .with_mixed_batches(rng.random() < 0.8)
    )
    if pool is None:
        no_cache = rng.random() < 0.3 and mode.unpaged
        return builder.with_no_kv_cache() if no_cache else builder
    paged = PagedAttentionMetaBuilder().with_block_size(8)
    return builder.with_paged_attn(paged.with_gpu_memory(MemoryGpuConfig.ContextSize(pool)).build())


async def soak_one(
    tiny: TinyModel, builder: ModelBuilder, tally: Tally, *, rng: random.Random, seconds: float
) -> None:
    """Run one configuration; every third time it is closed in the middle of the traffic."""
    closes_early = rng.random() < 1 / 3
    async with await builder.build() as model:
        context = model.max_sequence_length()
        cases = tuple(case for case in tiny.cases if case.fits(context))
        run = Run(model, tiny, cases, tally)
        until = time.monotonic() + seconds
        tasks = [
            asyncio.create_task(client(run, random.Random(rng.random()), until))
            for _ in range(rng.choice((4, 12, 40)))
        ]
        await check_pool(run, until, num_clients=len(tasks))
        if not closes_early:
            await asyncio.gather(*tasks)
            await check_idle(run)
        await note_stats(run)
    await asyncio.gather(*tasks)
    gc.collect()
    if engines := [t.name for t in threading.enumerate() if t.name.startswith("mistralrs")]:
        tally.fail(f"threads live on after aclose: {engines}")


def rss_mib() -> float:
    """Resident memory now, or where the system does not say (macOS), the most there was."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def num_threads() -> int:
    """Threads of this process, native ones included where the system counts them."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def watch_for_stray_errors(tally: Tally) -> None:
    """Count what nobody catches: errors in callbacks, forgotten tasks and finalizers."""
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: tally.fail(f"on the event loop: {context}")
    )
    sys.unraisablehook = lambda info: tally.fail(f"unraisable: {info.exc_value!r} in {info.object}")
    threading.excepthook = lambda info: tally.fail(f"in a thread: {info.exc_value!r}")


async def soak(
    mode: Mode, folder: Path, *, minutes: float, seed: int, threads: int, cases: int
) -> Tally:
    """Run configuration after configuration until the time is over."""
    rng, tally = random.Random(seed), Tally()
    watch_for_stray_errors(tally)
    started, end = time.monotonic(), time.monotonic() + minutes * 60
    tiny: dict[str, TinyModel] = {}
    settled, at_start = None, rss_mib()
    number = 0
    while number == 0 or end - time.monotonic() > 5:
        name, pool = MODELS[number % len(MODELS)], POOLS[(number * 3 + number // 5) % len(POOLS)]
        faulthandler.dump_traceback_later(600, exit=True)  # the watchdog, should the loop hang
        if name not in tiny:
            tiny[name] = await mode.make(
                name, folder / name, num_cases=cases, rng=rng, threads=threads
            )
            async with await mode.plain(tiny[name], threads).build() as m:
                run = Run(m, tiny[name], tiny[name].cases, tally)
                await alone(run)
                await check_idle(run)
                await note_stats(run)
            gc.collect()
            gc.freeze()  # or every later collection walks through torch and transformers
        before = Counter(tally.counts)
        seconds = max(1.0, min(rng.uniform(20, 40), end - time.monotonic()))
        faulthandler.dump_traceback_later(seconds + 2 * PATIENCE_S, exit=True)
        builder = configure(mode, tiny[name], rng, pool=pool, threads=threads)
        await soak_one(tiny[name], builder, tally, rng=rng, seconds=seconds)
        number += 1
        settled = rss_mib() if number == len(MODELS) else settled
        news = tally.counts - before
        asked = sum(news[kind] for kind in ENDS)
        print(
            f"{time.monotonic() - started:5.0f} s  {asked:5} requests, "
            f"{news['preemptions']:5} preemptions, {news['prefix hits']:5} prefix hits, "
            f"{news['with an adapter']:4} adapters, {len(tally.failures)} wrong, "
            f"RSS {rss_mib():.0f} MiB, {num_threads()} threads  "
            f"{str(builder).replace(str(folder), '')}",
            flush=True,
        )
    faulthandler.cancel_dump_traceback_later()
    print(f"RSS {at_start:.0f} MiB at the start, {rss_mib():.0f} at the end")
    if settled is None:
        print(f"memory growth is not judged: fewer than {len(MODELS)} configurations ran")
    elif (growth := rss_mib() - settled) > MAX_GROWTH_MIB:
        tally.fail(f"RSS grew by {growth:.0f} MiB after every model had run once")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the engine")
    parser.add_argument("--cases", type=int, default=60, help="different requests per model")
    parser.add_argument("--packed", action="store_true", help="weights and cache as by default")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        tally = asyncio.run(
            soak(
                PACKED if args.packed else EXACT,
                Path(folder),
                minutes=args.minutes,
                seed=args.seed,
                threads=args.threads,
                cases=args.cases,
            )
        )
    asked = sum(tally.counts[kind] for kind in ENDS)
    print(f"{asked} requests: {dict(sorted(tally.counts.items()))}")
    print(f"{len(tally.failures)} wrong")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
