"""`ChildProcess`: a program with everything it starts, bounded, and ended without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from mistralrs_sdk.tools.execution_config import NetworkMode, SandboxPolicy

MAX_OUTPUT = 16_384
"""Bytes that are kept of each of standard output and standard error: the first and last half."""
END_GRACE = 6.0
"""Seconds the keeper has to end everything, before it is ended itself."""

SYSTEM_READ = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt", "/nix/store"),
    *("/proc", "/sys/devices/system/cpu", "/sys/fs/cgroup"),
)
"""What programs need to start and to look around; a confined one may read it."""
SYSTEM_WRITE = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
"""What a confined program may write besides its own folder."""

_PIPE_BYTES = 2**16
_ROOT = Path(__file__).parents[2]
_KEEPER = (
    f"import sys; sys.path.append({str(_ROOT)!r}); "
    "from mistralrs_sdk.tools.keeper import {0}; {0}()"
)


class LimitedOutput:
    """The first and the last bytes of what a pipe gives, as it comes."""

    def __init__(self, fd: int, limit: int = MAX_OUTPUT) -> None:
        self._fd: int | None = fd
        self._half = limit // 2
        self._start = bytearray()
        self._end = bytearray()
        self._left_out = 0
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def take(self) -> str:
        """What came since the last time."""
        self._drain()
        text = self._start.decode(errors="replace")
        if self._left_out:
            text += f"\n[{self._left_out} bytes left out]\n"
        text += self._end.decode(errors="replace")
        self._start.clear()
        self._end.clear()
        self._left_out = 0
        return text

    def close(self) -> None:
        """Read what is there, and no more."""
        self._drain()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _drain(self) -> None:
        for _ in range(64):  # a flood may go on
            if not self._read():
                break

    def _read(self) -> bool:
        """Read once; returns whether there may be more."""
        if self._fd is None:
            return False
        try:
            data = os.read(self._fd, _PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
            return False
        room = self._half - len(self._start)
        self._start += data[:room]
        self._end += data[room:] if room < len(data) else b""
        if (excess := len(self._end) - self._half) > 0:
            self._left_out += excess
            del self._end[:excess]
        return True


class ChildProcess:
    """A program that runs for the model; `aclose()` must follow, whatever happens."""

    def __init__(
        self, keeper: asyncio.subprocess.Process, output: LimitedOutput, errors: LimitedOutput
    ) -> None:
        self._keeper = keeper
        self.output = output
        self.errors = errors

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        directory: Path,
        policy: SandboxPolicy | None,
        also_read: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
    ) -> Self:
        """Start a program, given by its path; what fails in that is in its standard error.

        `policy` None has the default limits and confines nothing. `pass_fds` stay open in it.
        """
        order = {
            "command": list(command),
            "directory": str(directory),
            "pass_fds": list(pass_fds),
            **_bounds(policy, directory, [*also_read, *_homes_of(command[0])]),
        }
        with contextlib.ExitStack() as undo:
            pipes = [os.pipe(), os.pipe()]
            for read_end, write_end in pipes:
                undo.callback(os.close, read_end)
                undo.callback(os.close, write_end)
            keeper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _KEEPER.format("main")),
                stdin=subprocess.PIPE,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                env=_environment(directory, ()),
                pass_fds=tuple(pass_fds),
                start_new_session=True,  # Ctrl-C in the terminal is not for it
            )
            undo.pop_all()
        for _, write_end in pipes:
            os.close(write_end)
        process = cls(keeper, LimitedOutput(pipes[0][0]), LimitedOutput(pipes[1][0]))
        assert keeper.stdin is not None
        keeper.stdin.write(json.dumps(order).encode() + b"\n")
        return process

    @property
    def has_ended(self) -> bool:
        """Whether it and all it has started are gone."""
        return self._keeper.returncode is not None

    async def wait(self) -> int:
        """Wait until it has ended, and what it had started; returns its exit code.

        What a signal ended gives 128 and the signal's number.
        """
        return await self._keeper.wait()

    async def aclose(self) -> None:
        """End it with everything it has started. Harmless when repeated."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        ending = asyncio.ensure_future(self._keeper.wait())
        try:
            await asyncio.wait([ending], timeout=END_GRACE)
        finally:
            if not ending.done():
                with contextlib.suppress(ProcessLookupError):
                    self._keeper.kill()  # what it keeps dies with it
            self.output.close()
            self.errors.close()


@functools.cache
def unconfined(network: NetworkMode) -> Mapping[str, str]:
    """What this machine cannot confine as asked, and the reasons; asks by trying, once."""
    command = [sys.executable, "-I", "-S", "-c", _KEEPER.format("probe")]
    tried = subprocess.run(command, capture_output=True, check=False, timeout=60)
    try:
        gaps: dict[str, str] = json.loads(tried.stdout)
    except json.JSONDecodeError:
        gaps = {"files": tried.stderr.decode(errors="replace").strip()[-200:]}
    if network is NetworkMode.FULL:
        gaps.pop("network", None)
    return gaps


# Inside


def _bounds(
    policy: SandboxPolicy | None, directory: Path, also_read: Sequence[str]
) -> dict[str, object]:
    limits = policy or SandboxPolicy(network=NetworkMode.FULL)
    gaps = {} if policy is None else unconfined(limits.network)
    confines = policy is not None and "files" not in gaps
    return {
        "max_memory_mb": limits.max_memory_mb,
        "max_cpu_secs": limits.max_cpu_secs,
        "max_procs": limits.max_procs,
        "max_open_fds": limits.max_open_fds,
        "max_file_sz_mb": limits.max_file_sz_mb,
        "network": "full" if "network" in gaps else limits.network.value,
        "read": [*SYSTEM_READ, *also_read, *limits.extra_fs_read] if confines else None,
        "write": [*SYSTEM_WRITE, str(directory), *limits.extra_fs_write],
        "environment": _environment(directory, limits.extra_env),
    }


def _environment(directory: Path, extra: Sequence[str]) -> dict[str, str]:
    """Little: what is in this process' environment may be a secret."""
    kept = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")
    found = {name: os.environ[name] for name in kept if name in os.environ}
    found |= {"HOME": str(directory), "TMPDIR": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    for each in extra:
        name, given, value = each.partition("=")
        if given:
            found[name] = value
        elif name in os.environ:
            found[name] = os.environ[name]
    return found


def _homes_of(program: str) -> list[str]:
    """Where a program and its libraries lie: the folder above that of the program."""
    paths = {program, os.path.realpath(program)}
    homes = {os.path.dirname(os.path.dirname(path)) for path in paths}
    own = Path.home()  # a program in ~/bin is no reason to show all of it
    return sorted(h for h in homes if len(Path(h).parts) > 2 and not own.is_relative_to(h))
