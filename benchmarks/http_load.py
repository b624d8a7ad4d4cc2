"""The HTTP server under load: streaming clients that stay, leave or talk nonsense; and its price.

    python benchmarks/http_load.py [--seconds 60] [--clients 200]         # does it hold up?
    python benchmarks/http_load.py --overhead [--model demo] [--rounds 5]  # what does HTTP cost?

Under load a tiny random model is served in this process, and the clients live in another one
(`http_load_clients.py`). Exit code 1 and a list of what went wrong if a text differs from the
unloaded run, a status is not what it should be, blocks or tasks are left over, memory grows, or
the event loop was late: its p99 must stay under 50 ms.

With --overhead the same work runs by turns in process and over HTTP, from a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import uvicorn
from soak import rss_mib

from mistralrs_sdk import Model, ModelBuilder
from mistralrs_sdk.cli.bench_numbers import LoadResult, Spread
from mistralrs_sdk.cli.bench_runs import run_load
from mistralrs_sdk.cli.bench_targets import InProcess
from mistralrs_sdk.cli.bench_work import Load, make_jobs, repeated
from mistralrs_sdk.cli.model_flags import model_place
from mistralrs_sdk.server import ServerSettings, create_app
from mistralrs_sdk.server.running import listening_on, run_server, uvicorn_config

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = Path(__file__).with_name("http_load_clients.py")
TICK_S = 0.005
MAX_LAG_MS = 50.0
MAX_GROWTH_MIB = 32.0
IDLE_S = 5.0
MAX_COST = 0.10
MAX_FIRST_MS = 3.0
_IDLE = """
import json, sys, time
import attrs
from mistralrs_sdk.cli.bench_numbers import Spread
lags, until = [], time.monotonic() + float(sys.argv[1])
while (now := time.monotonic()) < until:
    time.sleep(0.005)
    lags.append(1000 * (time.monotonic() - now - 0.005))
print(json.dumps(attrs.asdict(Spread.of(lags))))
"""


@attrs.define
class Watch:
    """What is noted about this process while it serves."""

    lags: list[float] = attrs.field(factory=list)
    busy: list[float] = attrs.field(factory=list)
    failures: list[str] = attrs.field(factory=list)

    async def lag(self) -> None:
        """Note how late the event loop comes back, and how long it computed until then. In ms."""
        while True:  # the loop's own clock stands still in each of uvloop's rounds
            due, used = time.monotonic() + TICK_S, time.thread_time()
            await asyncio.sleep(TICK_S)
            self.lags.append(1000 * (time.monotonic() - due))
            self.busy.append(1000 * (time.thread_time() - used))

    async def idle_lag(self, seconds: float) -> Spread:
        """How late a process is that does nothing else: what the machine itself costs."""
        return Spread(**json.loads(await output_of([sys.executable, "-c", _IDLE, str(seconds)])))

    def on_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Errors that nobody catches are failures."""
        self.failures.append(f"on the event loop: {context.get('exception') or context}")


@contextlib.asynccontextmanager
async def serving(model: Model) -> AsyncIterator[int]:
    """Serve the model on loopback in this loop; gives the port."""
    settings = ServerSettings(access_log=None, drain_seconds=5.0)
    server = uvicorn.Server(uvicorn_config(create_app(model, settings=settings), settings))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    with listening_on("127.0.0.1", 0) as place:
        task = asyncio.create_task(server.serve([place]))
        while not server.started:
            await asyncio.sleep(0.01)
            if task.done():
                task.result()
        try:
            yield place.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def run_clients(port: int, *, clients: int, seconds: float, seed: int) -> dict[str, Any]:
    """Run the clients' process; its report as it printed it."""
    command = [sys.executable, str(CLIENTS), str(port), str(clients), str(seconds), str(seed)]
    return json.loads(await output_of(command))


async def output_of(command: list[str]) -> str:
    """What a process prints.

    Raises: RuntimeError with its last words if it fails.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {err.decode()[-2000:] or out.decode()}")
    return out.decode()


async def hold_up(place: Path, *, clients: int, seconds: float, seed: int) -> int:
    """Serve a model under load, and judge how it held up; the exit code."""
    watch = Watch()
    asyncio.get_running_loop().set_exception_handler(watch.on_loop)
    builder = ModelBuilder(place).with_force_cpu().with_dtype("f32")
    async with await builder.with_num_threads(1).build() as model, serving(model) as port:
        # what a server does the first time costs memory that is not lost
        await run_clients(port, clients=clients, seconds=min(5.0, seconds), seed=seed + 1)
        await settle(model, watch)
        tasks, memory = len(asyncio.all_tasks()), rss_mib()
        ticking = asyncio.create_task(watch.lag())
        report, idle = await asyncio.gather(
            run_clients(port, clients=clients, seconds=seconds, seed=seed),
            watch.idle_lag(seconds),
        )
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        await settle(model, watch)
        left = len(asyncio.all_tasks()) - tasks
        growth = rss_mib() - memory
        metrics = await model.metrics()
    watch.failures += report["failures"]
    if left > 0:
        watch.failures.append(f"{left} tasks are left over")
    if growth > MAX_GROWTH_MIB:
        watch.failures.append(f"memory grew by {growth:.0f} MiB")
    lag = Spread.of(watch.lags)
    if lag.p99 > MAX_LAG_MS:
        watch.failures.append(f"the event loop was late by {lag.p99:.0f} ms at p99")
    print(f"{clients} clients for {seconds:g} s: {report['counts']}")
    print(f"statuses: {report['statuses']}")
    print(f"engine: {metrics.tokens_processed} tokens, ended {metrics.completed}")
    kind = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    print(
        f"event loop ({kind}) late by p50 {lag.p50:.1f}, p99 {lag.p99:.1f}, "
        f"most {max(watch.lags):.1f} ms (one that only sleeps: {idle.p50:.1f}, {idle.p99:.1f})"
    )
    busy = Spread.of(watch.busy)
    print(f"it computed for p50 {busy.p50:.1f}, p99 {busy.p99:.1f}, most {max(watch.busy):.1f} ms")
    print(f"{left} tasks left; memory {growth:+.1f} MiB")
    for failure in watch.failures[:20]:
        print(f"WRONG: {failure}")
    print(f"{len(watch.failures)} wrong")
    return 1 if watch.failures else 0


async def settle(model: Model, watch: Watch) -> None:
    """Wait until nothing runs, waits or owns blocks; that it does not end is a failure."""
    loop = asyncio.get_running_loop()
    until = loop.time() + IDLE_S
    while True:
        stats = await model.stats()
        held = (stats.running, stats.waiting, stats.used_blocks)
        if held == (0, 0, 0):
            break
        if loop.time() > until:
            watch.failures.append(f"idle, but running, waiting, used blocks are {held}")
            break
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)  # connections that were cut are forgotten
    gc.collect()


def tiny_model(folder: Path) -> Path:
    """A random checkpoint of the tests, in `folder`."""
    sys.path.insert(0, str(ROOT))
    from tests.tiny_models import tiny_checkpoint

    return tiny_checkpoint("llama", folder)


async def overhead(place: Path | str, *, rounds: int, threads: int | None, tokens: int) -> int:
    """Compare rates and times to the first token in process and over HTTP; the exit code."""
    builder = ModelBuilder(place).with_max_num_seqs(32)
    if threads is not None:
        builder = builder.with_num_threads(threads)
    pairs: dict[int, list[tuple[LoadResult, dict[str, Any]]]] = {1: [], 8: []}
    async with await builder.build() as model, serving(model) as port:
        target = await InProcess.of(model, name="model")
        vocab = target.ids.first + target.ids.count
        for number in range(rounds + 1):  # the first one warms up
            for clients, found in pairs.items():
                seed = 10 * number + clients
                lengths = repeated([(tokens, tokens)], 4 * clients)
                jobs = make_jobs(lengths, target.ids, seed=seed)
                here = await run_load(target, Load(concurrency=clients), jobs, warmup=jobs[:1])
                there = await over_http(
                    port, clients=clients, count=len(jobs), tokens=tokens, vocab=vocab, seed=seed
                )
                if number:
                    found.append((here, there))
    cost = 1 - statistics.median(
        there["output_tokens_per_second"] / here.output_tokens_per_second
        for here, there in pairs[8]
    )
    first = statistics.median(
        there["ttft_ms"]["p50"] - here.ttft_ms.p50 for here, there in pairs[1]
    )
    for clients, found in pairs.items():
        for here, there in found:
            print(
                f"{clients} at once: {here.output_tokens_per_second:7.1f} tokens/s in process, "
                f"{there['output_tokens_per_second']:7.1f} over HTTP; first token after "
                f"{here.ttft_ms.p50:.1f} and {there['ttft_ms']['p50']:.1f} ms"
            )
    print(f"HTTP costs {cost:.1%} of the rate at 8 at once (at most {MAX_COST:.0%} is wanted)")
    print(f"and {first:+.1f} ms to the first token of one (at most {MAX_FIRST_MS:g} are wanted)")
    return 0 if cost <= MAX_COST and first <= MAX_FIRST_MS else 1


async def over_http(
    port: int, *, clients: int, count: int, tokens: int, vocab: int, seed: int
) -> dict[str, Any]:
    """The load that `mistralrs-sdk bench --http` measures, from a process of its own."""
    flags = f"--concurrency {clients} --requests {count} --prompt-len {tokens} --gen-len {tokens}"
    # other prompts than in process, which are in the prefix cache by now
    flags += f" --vocab-size {vocab} --traffic-seed {seed + 1_000} --json"
    start = "import sys; from mistralrs_sdk.cli import main; sys.exit(main())"
    where = ["bench", "-m", "default", "--http", f"http://127.0.0.1:{port}"]
    command = [sys.executable, "-c", start, *where, *flags.split()]
    (load,) = json.loads(await output_of(command))["loads"]
    return load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overhead", action="store_true", help="measure what HTTP costs instead")
    parser.add_argument("--model", default="demo", help="for --overhead; tiny is a random one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="in and out, for --overhead")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine, for --overhead")
    args = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # nonsense is expected here
    with tempfile.TemporaryDirectory() as folder:
        tiny = not args.overhead or args.model == "tiny"
        place = tiny_model(Path(folder)) if tiny else model_place(args.model)
        if args.overhead:
            work = overhead(place, rounds=args.rounds, threads=args.threads, tokens=args.tokens)
        else:
            work = hold_up(Path(place), clients=args.clients, seconds=args.seconds, seed=args.seed)
        return run_server(work)


if __name__ == "__main__":
    sys.exit(main())
