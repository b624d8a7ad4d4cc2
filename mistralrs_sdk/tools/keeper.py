"""The process that starts one which runs the model's code, bounds it and ends it.

It keeps every descendant, however detached, and ends them all when its input ends (also because
whoever started it is gone), when the first one exits, or when there are too many. It runs with
`python -I -S`, so only the standard library is here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

from mistralrs_sdk.tools.confinement import landlock_version, leave_network, restrict_files

CANNOT_START = 126
"""The exit code if the program did not start; the reason is on its standard error."""
COUNT_SECONDS = 0.05
"""How often processes are counted."""
PATIENCE = 5.0
"""Seconds to end processes that were killed; what hangs in the kernel is then left to it."""

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_MIB = 2**20


def main() -> None:
    """Do what the line of JSON on standard input says; the exit code is the program's.

    A program that a signal ended gives 128 and the signal's number, as in a shell.
    """
    order = json.loads(sys.stdin.buffer.readline())
    _prctl(_SET_CHILD_SUBREAPER, 1)
    keeper = os.getpid()
    first = os.fork()
    if first == 0:
        _become(order, keeper)
    for fd in order["pass_fds"]:
        os.close(fd)
    os._exit(_keep(first, order["max_procs"]))


def probe() -> None:
    """Print as JSON what cannot be confined here: the reasons, each with its name."""
    gaps = {}
    with _noting(gaps, "network"):
        leave_network(loopback=True)
    with _noting(gaps, "files"):
        restrict_files(["/"], ["/"])
        version = landlock_version()
        if version < 3:
            gaps["truncating"] = f"Landlock {version} lets other files be cut, 3 does not"
        if version < 6:
            gaps["signals"] = f"Landlock {version} lets them pass, 6 does not"
    print(json.dumps(gaps))


def processes_below(pid: int) -> list[int]:
    """The children of a process, their children, and so on; those that ended unseen, too."""
    found: list[int] = []
    todo = [pid]
    while todo:
        children = _children(todo.pop())
        found += children
        todo += children
    return found


# Inside


def _become(order: dict[str, Any], keeper: int) -> None:
    """Turn into the program; never returns."""
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(order["directory"])
        for fd in order["pass_fds"]:
            os.set_inheritable(fd, True)
        _limit(order)
        if order["network"] != "full":
            leave_network(loopback=order["network"] == "loopback")
        if order["read"] is not None:
            restrict_files(order["read"], order["write"])
        _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)  # last: other rights would undo it
        if os.getppid() != keeper:
            os._exit(CANNOT_START)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Python ignores them, and it is inherited
        os.execve(order["command"][0], order["command"], order["environment"])
    except (OSError, ValueError) as error:  # the latter: its text holds a zero byte, or is none
        print(f"cannot run {order['command'][0]}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(CANNOT_START)


def _limit(order: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: order["max_memory_mb"] * _MIB,
        resource.RLIMIT_CPU: order["max_cpu_secs"],
        resource.RLIMIT_NOFILE: order["max_open_fds"],
        resource.RLIMIT_FSIZE: order["max_file_sz_mb"] * _MIB,
        resource.RLIMIT_NPROC: _tasks_of(os.getuid()) + order["max_procs"],
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _keep(first: int, max_procs: int) -> int:
    """Wait until it is to end; returns the exit code."""
    status: int | None = None
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while status is None:
        ready, _, _ = select.select([sys.stdin.buffer, woken], [], [], COUNT_SECONDS)
        if sys.stdin.buffer in ready:
            break  # nothing more is ever sent
        if woken in ready:
            os.read(woken, 4096)
        status = _reap(first)
        if status is None and len(processes_below(os.getpid())) > max_procs:
            with contextlib.suppress(OSError):
                os.write(2, f"\nended: it had more than {max_procs} processes\n".encode())
            break
    _end_all(first)
    if status is None:
        return 128 + signal.SIGKILL
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _reap(first: int) -> int | None:
    """Take leave of what has ended; returns how the first one did, if it did."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == first:
                found = status
    return found


def _end_all(first: int) -> None:
    """Kill every descendant. What a dying one leaves behind becomes a child of this process."""
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(first, signal.SIGKILL)  # at once: none of them can fork in between
    while time.monotonic() < deadline:
        found = processes_below(os.getpid())
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass  # it has ended meanwhile, or has another owner and /proc hides it
    return found


def _tasks_of(uid: int) -> int:
    """Threads of all processes of a user, which is what the kernel counts."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


@contextlib.contextmanager
def _noting(gaps: dict[str, str], name: str) -> Any:
    try:
        yield
    except OSError as error:
        gaps[name] = str(error)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
