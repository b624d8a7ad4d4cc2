"""Processes for the ranks that this one starts: their start, their output and their end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections import deque

import attrs

from mistralrs_sdk.config import EngineConfig, ModelSource
from mistralrs_sdk.engine.rank_place import RankPlace

logger = logging.getLogger("mistralrs_sdk.engine")

_TAIL_LINES = 40
_FATAL = "Fatal Python error"
"""What faulthandler begins with; the stacks of all threads that follow may be longer than that."""
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mistralrs_sdk.engine.worker import main; main()"
)


@attrs.frozen(kw_only=True)
class RankTask:
    """What a started rank is told at its beginning."""

    place: RankPlace
    source: ModelSource
    config: EngineConfig
    connection: int | None = None
    """Number of the open file that is its socket to rank 0."""
    store: str | None = None
    """Path of the file the ranks of one machine meet in."""
    meeting: int | None = None
    """Number of the meeting, for a rank without these two."""


def start_neighbours(
    place: RankPlace, source: ModelSource, config: EngineConfig, *, meeting: int
) -> list[RankProcess]:
    """Start the ranks that `place` starts, which come to the meeting by themselves."""
    return [
        RankProcess(RankTask(place=place.of(rank), source=source, config=config, meeting=meeting))
        for rank in place.starts
    ]


class RankProcess:
    """A rank in a fresh interpreter on this machine.

    Like multiprocessing's "spawn", but the program's own main module is not imported there, so a
    script needs no guard. It ends by itself when this process has gone, however that happened.
    """

    def __init__(self, task: RankTask) -> None:
        """Start it on a task, which is pickled to its standard input: it may hold a token."""
        self.rank = task.place.rank
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._fatal: str | None = None
        passed = () if task.connection is None else (task.connection,)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=passed,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is for this process, which then ends the ranks
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        assert self._process.stdin is not None, "a pipe"
        # A rank that ended at once closes its input; whoever waits for it will see that.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(pickle.dumps(task))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def last_words(self, timeout: float) -> str:
        """How it ended and the last lines it wrote; waits for its end for so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self._reading.join(timeout if self.has_ended else 0.0)
        code = self._process.returncode
        how = "is still running" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was ended by signal {-code}"
        lines = list(self._lines)
        if self._fatal is not None and self._fatal not in lines:
            lines = [self._fatal, "...", *lines]
        said = "\n".join(["its last output was:", *lines]) if lines else "it wrote nothing"
        return f"{how}; {said}"

    def end(self, timeout: float) -> None:
        """Wait for it to end by itself for so many seconds, then kill it."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            logger.warning("rank %d does not end by itself: it is killed", self.rank)
            self._process.kill()
            self._process.wait()
        self._reading.join(timeout)

    def _read(self) -> None:
        output = self._process.stdout
        assert output is not None, "a pipe"
        with output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip()
                self._lines.append(line)
                if line.startswith(_FATAL):
                    self._fatal = line
                logger.info("rank %d: %s", self.rank, line)
