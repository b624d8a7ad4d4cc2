"""Check on a GPU, in one command and in minutes, what the tests can only check on a CPU.

    python benchmarks/gpu_check.py [--json FILE] [--wheels FOLDER] [--budget 460] [--only STAGE...]
    python benchmarks/gpu_check.py --device cpu --tiny

Needs no network: the checkpoints are random and made on the device. FlashInfer is compared with
torch's attention, graphs with what runs without them, and thousands of requests in storms with each
of them alone; then speeds are measured, as parts of limits measured in the same run, and beside
transformers' continuous batching. Each stage is a process of its own, so that one that fails,
crashes or hangs stops no other. Prints a table; exit code 1 if a check or a target failed.

With --wheels, the wheels in that folder are installed into a temporary folder first, without
their dependencies, for this run alone. On a CPU everything that needs a GPU has stand-ins: that
tests this script and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STAGES = {
    "machine": 30,
    "exact": 90,
    "graphs": 140,
    "kernels": 80,
    "8B": 100,
    "1.7B": 80,
    "peer": 80,
    "quantised": 100,
    "shapes": 140,
}
"""In order, and the seconds each may take: whatever is slower is stopped and has failed."""
BUDGET = 460
"""Seconds for all of them; what has not begun by then is left out."""
LEAST_SECONDS = 10
WHOLE = "whole stage"
ROOM = 24 * 2**30
"""Bytes that all checkpoints take at most."""


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.wheels is not None:
        install(args.wheels)
    sys.path.append(str(ROOT))  # where the package is not installed
    os.environ["PYTHONPATH"] = os.pathsep.join([*_python_path(), str(ROOT)])
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.stage is not None:
        run_stage(args.stage, args.results, args)
        return 0
    # ended from outside it removes its checkpoints too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=args.work or roomy()) as folder:
        args.work, args.results = folder, Path(folder) / "findings.jsonl"
        return check_all(args)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes")
    parser.add_argument("--json", type=Path, help="write the findings into this file")
    parser.add_argument("--wheels", type=Path, help="install the wheels in this folder first")
    parser.add_argument("--work", help="folder for the checkpoints (22 GB); deleted afterwards")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for everything")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--together", action="store_true", help="all stages in one process")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu needs --tiny: nothing larger is of use on a CPU")
    return args


def check_all(args: argparse.Namespace) -> int:
    """Run the stages and report; 1 if something failed."""
    import attrs
    from gpu_check_report import Finding, add_finding, read_findings, summary, table

    started = time.time()
    for stage in args.only:
        left = started + args.budget - time.time()
        if left < LEAST_SECONDS:
            text = f"the {args.budget:.0f} s of --budget are over"
            add_finding(
                args.results, Finding(stage=stage, name=WHOLE, verdict="left out", text=text)
            )
            continue
        args.until = time.time() + min(STAGES[stage], left)
        if args.together:
            run_stage(stage, args.results, args)
        else:
            run_apart(stage, args)
    findings = read_findings(args.results)
    seconds = time.time() - started
    print(f"\n{table(findings)}\n\n{summary(findings)}, in {seconds:.0f} s")
    if args.json is not None:
        whole = {
            "date": date.today().isoformat(),
            "device": args.device,
            "seconds": seconds,
            "findings": [attrs.asdict(finding) for finding in findings],
        }
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return int(any(finding.verdict == "failed" for finding in findings))


def run_apart(stage: str, args: argparse.Namespace) -> None:
    """Run a stage in a process of its own."""
    command = [sys.executable, __file__, "--stage", stage, "--device", args.device]
    command += ["--results", str(args.results), "--work", args.work, "--until", str(args.until)]
    command += ["--tiny"] * args.tiny
    run_process(command, stage, args.results, seconds=args.until - time.time())


def run_process(command: Sequence[str], stage: str, results: Path, *, seconds: float) -> None:
    """Run what makes the checks of a stage; if it ends badly, the check it was at has failed.

    Unless only the budget stopped it: then that check is left out.
    """
    from gpu_check_report import Finding, add_finding, unfinished

    process, verdict = subprocess.Popen(command, start_new_session=True), "failed"
    try:
        code = process.wait(timeout=seconds)
        how = f"the process ended with exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        how = f"it was stopped after {seconds:.0f} s"
        if seconds < STAGES[stage] - 1:
            verdict = "left out"
    finally:
        _end(process)
    if how is not None:
        name = unfinished(results, stage) or WHOLE
        add_finding(results, Finding(stage=stage, name=name, verdict=verdict, text=how))


def run_stage(stage: str, results: Path, args: argparse.Namespace) -> None:
    """Run a stage here."""
    import torch
    from gpu_check_report import Book

    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    book = Book(results, stage=stage, until=args.until)
    if device.type == "cuda" and not torch.cuda.is_available():
        with book.check(WHOLE):
            raise RuntimeError(f"torch {torch.__version__} finds no CUDA device")
        return
    playing = _part("stand_ins").stand_ins() if device.type == "cpu" else nullcontext()
    with playing, book.check(WHOLE):
        _stages(book, Path(args.work), device=device, tiny=args.tiny, stage=stage)


def _stages(book: Any, work: Path, *, device: Any, tiny: bool, stage: str) -> None:
    size = "TINY" if tiny else "FULL"
    if stage == "machine":
        _part("machine").check_machine(book, device=device, tiny=tiny)
    elif stage in ("kernels", "shapes"):
        kernels = _part("kernels")
        kernels.check_kernels(
            book,
            kernels.CASES if stage == "kernels" else kernels.MORE_CASES,
            device=device,
            graphs=_graphs(device),
            tiny=tiny,
        )
    elif stage in ("exact", "graphs"):
        tokens = _part("tokens")
        check = tokens.check_exact if stage == "exact" else tokens.check_graphs
        asyncio.run(check(book, work, device=device, counts=getattr(tokens, size)))
    elif stage == "quantised":
        quantised, speed = _part("quantised"), _part("speed")
        asyncio.run(
            quantised.check_quantised(
                book,
                work,
                device=device,
                shape=_shape("SMALL", tiny),
                loads=getattr(speed, size),
                graphs=_graphs(device),
                tiny=tiny,
            )
        )
    elif stage == "peer":
        peer = _part("peer")
        asyncio.run(
            peer.check_peer(
                book, work, device=device, shape=_shape("SMALL", tiny), requests=getattr(peer, size)
            )
        )
    else:
        speed = _part("speed")
        small = stage == "1.7B"
        asyncio.run(
            speed.check_speed(
                book,
                work,
                device=device,
                shape=_shape("SMALL" if small else "LARGE", tiny),
                loads=getattr(speed, size),
                variants=small,
            )
        )


def _graphs(device: Any) -> Callable[[], Any]:
    """What makes graphs on that device."""
    from mistralrs_sdk.engine.cuda_graphs import CudaGraphs

    return _part("stand_ins").make_graphs if device.type == "cpu" else lambda: CudaGraphs(device)


def _shape(name: str, tiny: bool) -> Any:
    return getattr(_part("models"), f"TINY_{name}" if tiny else name)


def _part(name: str) -> Any:
    """A part of this script; most import torch, which the process that starts the others is not to
    do: it would hold memory of the GPU."""
    return importlib.import_module(f"gpu_check_{name}")


def install(wheels: Path) -> None:
    """Install the wheels into a temporary folder and start anew with it, without --wheels."""
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        sys.exit(f"--wheels {wheels}: there are no wheels in that folder")
    with tempfile.TemporaryDirectory(prefix="gpu-check-site-") as site:
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", site]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *found], check=True)
        path = os.pathsep.join([site, *_python_path()])
        rest = _without_wheels(sys.argv[1:])
        done = subprocess.run(
            [sys.executable, __file__, *rest], env=os.environ | {"PYTHONPATH": path}
        )
    sys.exit(done.returncode)


def roomy() -> str | None:
    """A folder in memory if it has room for all checkpoints: reading a disk takes minutes."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 2 * ROOM
    return str(shared) if roomy else None


def _without_wheels(arguments: Sequence[str]) -> list[str]:
    rest, skip = [], False
    for argument in arguments:
        if skip or argument.startswith("--wheels="):
            skip = False
        elif argument == "--wheels":
            skip = True
        else:
            rest.append(argument)
    return rest


def _python_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def _end(process: subprocess.Popen) -> None:
    """End a process and those it has started, whatever they do."""
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
