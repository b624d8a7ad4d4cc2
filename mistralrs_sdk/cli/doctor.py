"""`mistralrs-sdk doctor`: what of this machine is used, what is not, and what would help."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from mistralrs_sdk import __version__
from mistralrs_sdk.cli import doctor_checks
from mistralrs_sdk.cli.doctor_checks import Finding

_SECONDS = 300
"""A first run compiles the kernels."""

_STYLES = {"ok": "green", "note": "blue", "warning": "yellow", "failure": "bold red"}


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the program."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine: kernels, GPU, hub, cache",
        description="Look at the machine, torch, the compiler, the kernels in use, GPUs, the hub "
        "and its cache; run a tiny model and compare it with torch alone. The exit code is 1 if "
        "something is broken.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Check and print; the exit code is 1 if a finding is a failure."""
    findings = list(examine(os.environ))
    if args.json:
        found = [attrs.asdict(finding) for finding in findings]
        print(json.dumps({"version": __version__, "checks": found}, indent=2))
    else:
        _show(findings)
    return 1 if any(finding.status == "failure" for finding in findings) else 0


def examine(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Every finding, from the machine up."""
    with ThreadPoolExecutor() as pool:
        used, reference = (pool.submit(_self_check, mode) for mode in ("used", "reference"))
        yield from doctor_checks.machine(read=_read)
        yield doctor_checks.compiler(environ)
        yield from doctor_checks.engine(used.result(), reference.result())
    yield from doctor_checks.hub(environ)
    yield doctor_checks.extras()
    yield from doctor_checks.variables(environ)


def _self_check(mode: str) -> dict[str, Any]:
    """What the check printed, or {"failed": why}."""
    command = [sys.executable, "-m", "mistralrs_sdk.cli.self_check", mode]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"failed": str(error)}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = done.stderr.strip().splitlines()[-1:] or [f"it ended with status {done.returncode}"]
    return {"failed": last[0]}


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        line = Text(f"{finding.status:<8}", style=_STYLES[finding.status])
        line.append(f" {finding.name:<{width}}  {finding.detail}", style="not bold default")
        console.print(line)
        if finding.suggestion is not None:
            console.print(Text(f"{'':{width + 9}}  -> {finding.suggestion}"))


def _read(file: str) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            return opened.read()
    except OSError:
        return ""
