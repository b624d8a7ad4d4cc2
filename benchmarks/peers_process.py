"""The processes of `peers.py`: each contender in one of its own, asked one load at a time."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from load_time import memory_mib
from peers_work import read_work

from mistralrs_sdk.machine import read_text

START_SECONDS = 600


class ContenderError(Exception):
    """A contender cannot start or cannot do a load; the message says why in a line."""


class Worker:
    """A process in which a contender is loaded; it idles while others are asked."""

    def __init__(
        self, *, module: str, arguments: Mapping[str, Any], work: Path, log: Path, threads: int
    ) -> None:
        self._args = (module, dict(arguments), work, log, threads)
        self.memory = 0.0
        """MiB resident once it was loaded."""
        self._start()

    def restart(self) -> None:
        """Load it anew: after a failure it may be in any state.

        Raises:
            ContenderError: it cannot start.
        """
        self.close()
        self._start()

    def ask(self, round: int, load: str, *, timeout: float) -> tuple[Any, float]:
        """Run a load of a round; returns its answers, and the CPUs that others kept busy.

        Raises:
            ContenderError: it failed, died or took longer than `timeout` seconds.
        """
        began, others = time.perf_counter(), self._others()
        self._connection.send((round, load))
        answers = self._receive(timeout=timeout)
        return answers, (self._others() - others) / (time.perf_counter() - began)

    def close(self) -> None:
        """End the process, with force if it does not end by itself."""
        self._connection.close()
        for end in (lambda: None, self._process.terminate, self._process.kill):
            end()
            self._process.join(5)
            if not self._process.is_alive():
                return

    def _start(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        # not forked: two contenders must not share a loaded OpenMP
        process = multiprocessing.get_context("spawn").Process
        self._process = process(target=serve, args=(theirs, *self._args), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.memory = self._receive(timeout=START_SECONDS)
        except ContenderError:
            self.close()
            raise

    def _others(self) -> float:
        """CPU seconds that all processes but this one have used so far; 0 if the system is mute."""
        everybody = (read_text("/proc/stat") or "").partition("\n")[0].split()
        own = (read_text(f"/proc/{self._process.pid}/stat") or "").rpartition(")")[2].split()
        if not everybody or not own:
            return 0.0
        user, nice, system = map(int, everybody[1:4])
        return (user + nice + system - int(own[11]) - int(own[12])) / os.sysconf("SC_CLK_TCK")

    def _receive(self, *, timeout: float) -> Any:
        if not self._connection.poll(timeout):
            raise ContenderError(f"gave no answer within {timeout:.0f} s")
        try:
            kind, value = self._connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise ContenderError(f"died with exit code {code}") from None
        if kind == "error":
            raise ContenderError(value)
        return value


def serve(
    connection: Connection,
    module: str,
    arguments: dict[str, Any],
    work: Path,
    log: Path,
    threads: int,
) -> None:
    """Load a contender and answer what is asked, until the other side closes."""
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    rounds = read_work(work)

    def attempt(function: Any, *args: Any, **options: Any) -> bool:
        try:
            connection.send(("value", function(*args, **options)))
        except Exception as error:
            traceback.print_exc()
            reason = str(error).strip().partition("\n")[0]
            connection.send(("error", f"{type(error).__name__}: {reason}"))
            return False
        finally:
            sys.stdout.flush()
        return True

    answer: Any = None

    def load() -> float:
        nonlocal answer
        answer = importlib.import_module(module).start(**arguments)
        return memory_mib()["rss"]

    if not attempt(load):
        return
    while True:
        try:
            round, name = connection.recv()
        except EOFError:
            return
        attempt(lambda round=round, name=name: answer(rounds[round][name]))
