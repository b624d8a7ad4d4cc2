"""`mistralrs-sdk bench`: how fast a model answers, here or behind a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mistralrs_sdk import ConfigError
from mistralrs_sdk.cli import bench_report
from mistralrs_sdk.cli.bench_http import Address, HttpClient
from mistralrs_sdk.cli.bench_numbers import LoadResult, SingleResult
from mistralrs_sdk.cli.bench_runs import Tick, run_load, run_single
from mistralrs_sdk.cli.bench_targets import InProcess, OverHttp, Target
from mistralrs_sdk.cli.bench_work import (
    MIX,
    Load,
    TokenIds,
    make_jobs,
    mix_lengths,
    read_lengths,
    repeated,
)
from mistralrs_sdk.cli.model_flags import add_model_flags, builder_from

_MAX_SEQS = 32
_FOR_SINGLE = ("depth", "iterations")
_FOR_LOADS = ("requests", "traffic_seed", "plot")
_MAKES_LOADS = ("concurrency", "request_rate", "dataset", "shared_prefix")


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the program."""
    parser = commands.add_parser(
        "bench",
        help="measure how fast a model answers, here or behind a server",
        description="Measure one request at a time, or with --concurrency, --request-rate, "
        "--dataset or --shared-prefix many at once. Answers are greedy and run to the wanted "
        "length, end tokens or not. With --http the same work goes to any server with OpenAI's "
        "API, and -m is the name it knows the model by.",
    )
    add_model_flags(parser, max_seqs=_MAX_SEQS)
    work = parser.add_argument_group("work")
    add = work.add_argument
    add("--prompt-len", type=_numbers(0), metavar="N[,N]", help="tokens in (512; 0 skips TTFT)")
    add("--gen-len", type=int, metavar="N", help="tokens out (128; below 2 skips decode)")
    add("--warmup", type=int, default=1, metavar="N", help="runs not counted, per case (1)")
    single = parser.add_argument_group("one request at a time")
    single.add_argument("--depth", type=_numbers(1), metavar="N[,N]", help="tokens in, decode (4)")
    single.add_argument("--iterations", type=int, metavar="N", help="runs per case (3)")
    many = parser.add_argument_group("many requests")
    add = many.add_argument
    add("--concurrency", type=_numbers(1), metavar="N[,N]", help="clients at once (8)")
    add("--request-rate", type=_rates, metavar="R[,R]", help="requests a second, Poisson")
    add("--requests", type=int, metavar="N", help="how many (4 a client, 16 at least, or the file)")
    add(
        "--dataset",
        metavar="FILE",
        help='lengths from a JSONL of {"prompt_tokens": 300, "output_tokens": 80}, or "mix"',
    )
    add("--shared-prefix", type=int, metavar="N", help="tokens that stand before every prompt")
    add("--traffic-seed", type=int, metavar="N", help="draws the mix, the prompts, arrivals (0)")
    parser.add_argument("--adapter", metavar="ALIAS", help="answer with this adapter (see --lora)")
    http = parser.add_argument_group("a server instead of a model here")
    add = http.add_argument
    add("--http", metavar="URL", help="server with OpenAI's API, such as http://127.0.0.1:1234")
    add("--http-api", choices=("completions", "chat"), help="endpoint (completions, of token ids)")
    add("--api-key-env", metavar="NAME", help="variable that holds the key to send")
    add("--vocab-size", type=int, metavar="N", help="ids to draw from (3048)")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask it not to end early, which not every server knows (on)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the loads (extra docs)")
    parser.set_defaults(command=bench)


def bench(args: argparse.Namespace) -> int:
    """Measure and print; the exit code is 1 if a request failed."""
    many = any(getattr(args, name) is not None for name in _MAKES_LOADS)
    _check(args, many=many)
    if args.plot is not None:
        bench_report.require_matplotlib()
    work = _loads if many else _single
    with _progress() as progress:
        results = asyncio.run(_measure(args, work, many=many, progress=progress))
    heading = f"{args.model_id}{f' at {args.http}' if args.http else ''}"
    if args.adapter:
        heading += f", adapter {args.adapter}"
    if args.json:
        about = {"model": args.model_id, "http": args.http, "adapter": args.adapter}
        print(bench_report.as_json(results, **about))
    elif many:
        bench_report.print_loads(results, heading=heading)
    else:
        runs = 3 if args.iterations is None else args.iterations
        bench_report.print_single(results, heading=f"{heading}, {runs} iterations")
    if args.plot is not None:
        bench_report.plot_loads(results, args.plot, heading=heading)
    return _report_failures(results) if many else 0


Progress = Callable[[str, int], Tick]
"""Starts a bar of so many requests; what it gives is called after each."""


async def _measure(
    args: argparse.Namespace,
    work: Callable[[argparse.Namespace, Target, int | None, Progress], Any],
    *,
    many: bool,
    progress: Progress,
) -> list[Any]:
    if args.http is not None:
        client = HttpClient(Address.parse(args.http), headers=_key(args.api_key_env))
        ids = TokenIds() if args.vocab_size is None else TokenIds.below(args.vocab_size)
        target = OverHttp(
            client,
            name=args.model_id,
            ids=ids,
            api=args.http_api or "completions",
            ignore_eos=args.ignore_eos is not False,
        )
        try:
            return await work(args, target, None, progress)
        finally:
            await client.aclose()
    builder = builder_from(args)
    if not many:  # as mistral.rs does: one sequence, and nothing remembered
        builder = builder.with_max_num_seqs(1).with_prefix_cache_n(0)
    async with await builder.build() as model:
        target = await InProcess.of(model, name=args.model_id, adapter=args.adapter)
        return await work(args, target, model.max_sequence_length(), progress)


async def _single(
    args: argparse.Namespace, target: Target, limit: int | None, progress: Progress
) -> list[SingleResult]:
    prompts = (512,) if args.prompt_len is None else args.prompt_len
    depths = (4,) if args.depth is None else args.depth
    new_tokens = 128 if args.gen_len is None else args.gen_len
    cases = [(length, 1) for length in prompts if length]
    if new_tokens >= 2:
        cases += [(depth, new_tokens) for depth in depths]
    if not cases:
        raise ConfigError(
            "--prompt-len 0 and --gen-len below 2 leave nothing to measure: raise one of them"
        )
    _check_lengths(cases, limit)
    iterations = 3 if args.iterations is None else args.iterations
    tick = progress("one at a time", len(cases) * (args.warmup + iterations))
    return await run_single(
        target, cases, iterations=iterations, warmup=args.warmup, salt=_salt(args), tick=tick
    )


async def _loads(
    args: argparse.Namespace, target: Target, limit: int | None, progress: Progress
) -> list[LoadResult]:
    loads = [Load(concurrency=n) for n in args.concurrency or ()]
    loads += [Load(request_rate=rate) for rate in args.request_rate or ()]
    seed, prefix = args.traffic_seed or 0, args.shared_prefix or 0
    drawn = (seed + _salt(args)) * 1_000_003
    results = []
    for number, load in enumerate(loads or [Load(concurrency=8)]):
        lengths = _lengths(args, load, seed=seed)
        _check_lengths([(prefix + prompt, new) for prompt, new in lengths], limit)
        # other prompts for each load, or the later ones would find theirs in the prefix cache
        jobs = make_jobs(lengths, target.ids, shared_prefix=prefix, seed=drawn + 2 * number)
        warm = make_jobs(
            repeated(lengths, args.warmup * (load.concurrency or 1)),
            target.ids,
            seed=drawn + 2 * number + 1,
        )
        tick = progress(load.name, len(jobs))
        results.append(await run_load(target, load, jobs, warmup=warm, seed=seed, tick=tick))
    return results


def _salt(args: argparse.Namespace) -> int:
    """What makes prompts differ from those of the last time: a server may have them in its cache.

    Lengths and arrivals do not change with it. With --traffic-seed nothing does.
    """
    if args.http is None or args.traffic_seed is not None:
        return 0
    return random.SystemRandom().randrange(1, 2048)


def _lengths(args: argparse.Namespace, load: Load, *, seed: int) -> list[tuple[int, int]]:
    """(prompt, output) lengths of a load's requests."""
    count = args.requests or max(16, 4 * (load.concurrency or 0))
    if args.dataset == MIX:
        return mix_lengths(count, seed=seed)
    if args.dataset is not None:
        found = read_lengths(Path(args.dataset))
        return repeated(found, args.requests or len(found))
    prompts = (512,) if args.prompt_len is None else args.prompt_len
    new_tokens = 128 if args.gen_len is None else args.gen_len
    return repeated([(length, new_tokens) for length in prompts], count)


def _check(args: argparse.Namespace, *, many: bool) -> None:
    """Refuse what is out of range, and flags that would change nothing."""
    for name, least in {
        "gen_len": 0,
        "warmup": 0,
        "iterations": 1,
        "requests": 1,
        "shared_prefix": 0,
        "vocab_size": 2,
    }.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"{_flag(name)} ({value}) must be at least {least}")
    for name in _FOR_SINGLE if many else _FOR_LOADS:
        if getattr(args, name) is not None:
            other = "one request at a time" if many else "many requests (--concurrency 1,8)"
            raise ConfigError(f"{_flag(name)} is for {other}: leave it out")
    for name in ("prompt_len", "gen_len"):
        if args.dataset is not None and getattr(args, name) is not None:
            raise ConfigError(
                f"{_flag(name)} and --dataset contradict: both say how long requests are"
            )
    if many and args.dataset is None and (0 in (args.prompt_len or ()) or args.gen_len == 0):
        raise ConfigError("--prompt-len and --gen-len must be at least 1 where many requests run")
    if args.http is None:
        for name in ("http_api", "api_key_env", "vocab_size", "ignore_eos"):
            if getattr(args, name) is not None:
                raise ConfigError(f"{_flag(name)} is for --http: leave it out")
        return
    if args.adapter is not None:
        raise ConfigError("--adapter and --http contradict: name the adapter with -m")
    for name, unset in _model_defaults().items():
        if getattr(args, name) != unset:
            raise ConfigError(
                f"--http measures a server, which has its own settings: leave out what sets {name}"
            )


def _model_defaults() -> dict[str, Any]:
    """The flags of a model as they are when nobody sets them."""
    parser = argparse.ArgumentParser(add_help=False)
    add_model_flags(parser, max_seqs=_MAX_SEQS)
    values = vars(parser.parse_args(["-m", "x"]))
    return {name: value for name, value in values.items() if name != "model_id"}


def _check_lengths(cases: Sequence[tuple[int, int]], limit: int | None) -> None:
    for prompt, new in cases:
        if limit is not None and prompt + new > limit:
            raise ConfigError(
                f"a prompt of {prompt} and {new} new tokens are longer than the model takes "
                f"({limit}): make --prompt-len, --gen-len, --depth or --shared-prefix smaller"
            )


def _key(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"--api-key-env {variable}: the variable is not set")
    return {"Authorization": f"Bearer {key}"}


def _report_failures(results: Sequence[LoadResult]) -> int:
    for found in results:
        for message, count in found.errors.items():
            print(f"{found.load}: {count} failed: {message}", file=sys.stderr)
    return 1 if any(found.failed for found in results) else 0


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """Bars on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda what, total: lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def start(what: str, total: int) -> Tick:
            task = bars.add_task(what, total=total)
            return lambda: bars.advance(task)

        yield start


def _numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    """Reads `1,8,32`."""

    def numbers(text: str) -> tuple[int, ...]:
        found = tuple(int(part) for part in text.split(","))
        if min(found) < least:
            raise argparse.ArgumentTypeError(f"{text}: each must be at least {least}")
        return found

    return numbers


def _rates(text: str) -> tuple[float, ...]:
    found = tuple(float(part) for part in text.split(","))
    if not all(0 < rate < float("inf") for rate in found):
        raise argparse.ArgumentTypeError(f"{text}: each must be above 0")
    return found


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
