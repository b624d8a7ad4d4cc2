"""What this process may use of the machine: cores and memory, within affinity and cgroups."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath

ReadText = Callable[[str], str | None]
"""Gives the text of a file, or None if it cannot be read."""

_CGROUP = "/sys/fs/cgroup"
_OUT_OF_MEMORY = ("out of memory", "allocate memory", "enough memory", "ALLOC_FAILED")
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


def read_text(path: str) -> str | None:
    """The text of a file, None if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; torch's CPU allocator has no type for it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    said = str(error)  # "memory" alone is in "illegal memory access", which ends a GPU's work
    return isinstance(error, RuntimeError) and any(words in said for words in _OUT_OF_MEMORY)


def allowed_cpus() -> Collection[int]:
    """The logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def physical_memory() -> int:
    """Bytes of RAM in the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def physical_cores(cpus: Collection[int], *, read: ReadText = read_text) -> int:
    """How many cores these logical CPUs are: two hyperthreads of a core share its arithmetic units.

    Where the system does not tell which CPUs are siblings, each counts as a core.
    """
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return len({read(topology.format(cpu)) or cpu for cpu in cpus})


def cpu_quota(*, read: ReadText = read_text) -> float | None:
    """CPUs worth of time that the tightest of this process's cgroups grants; None for no limit."""
    return min(_cpu_quotas(read), default=None)


def default_num_threads(
    *, cpus: Callable[[], Collection[int]] = allowed_cpus, read: ReadText = read_text
) -> int:
    """The physical cores that affinity allows, at most the cgroup's CPU quota; at least 1."""
    return within_quota(physical_cores(cpus(), read=read), cpu_quota(read=read))


def within_quota(threads: int, quota: float | None) -> int:
    """At most `quota` threads, at least 1.

    A fractional quota is rounded down: one thread too many is throttled, and the others wait.
    """
    return max(1, threads if quota is None else min(threads, int(quota)))


def available_memory(
    *, read: ReadText = read_text, total: Callable[[], int] = physical_memory
) -> int:
    """Bytes this process can still take: the machine's free memory, at most what its cgroups leave.

    File cache that the kernel can drop counts as free. Where the system does not say what is free
    (macOS), half of the RAM is taken to be.
    """
    meminfo = _fields(read("/proc/meminfo"), separator=":")
    free = meminfo["MemAvailable"] * 1024 if "MemAvailable" in meminfo else total() // 2
    return max(0, min([free, *_cgroup_rooms(read)]))


def _cpu_quotas(read: ReadText) -> Iterator[float]:
    """CPUs worth of time each enclosing cgroup grants, for those that limit it."""
    for folder in _cgroup_folders(read, controller=None):
        quota, _, period = (read(f"{folder}/cpu.max") or "").partition(" ")
        if quota.isdigit() and period.strip().isdigit() and int(period):
            yield int(quota) / int(period)
    for folder in _cgroup_folders(read, controller="cpu"):
        quota = (read(f"{folder}/cpu.cfs_quota_us") or "").strip()
        period = (read(f"{folder}/cpu.cfs_period_us") or "").strip()
        if quota.isdigit() and period.isdigit() and int(period):  # -1 is no limit
            yield int(quota) / int(period)


def _cgroup_rooms(read: ReadText) -> Iterator[int]:
    """Bytes each enclosing cgroup has left, for those that limit memory."""
    files = (
        (None, "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for controller, limit_file, usage_file, droppable in files:
        for folder in _cgroup_folders(read, controller=controller):
            limit = (read(f"{folder}/{limit_file}") or "").strip()
            usage = (read(f"{folder}/{usage_file}") or "").strip()
            if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED:
                cache = _fields(read(f"{folder}/memory.stat")).get(droppable, 0)
                yield int(limit) - int(usage) + cache


def _cgroup_folders(read: ReadText, *, controller: str | None) -> Iterator[str]:
    """Folders of this process's cgroup and its ancestors; `controller` None for cgroup v2.

    Inside a container the path may be the host's and not exist here; the root then still counts.
    """
    root = _CGROUP if controller is None else f"{_CGROUP}/{controller}"
    path = PurePosixPath("/")
    for line in (read("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if (number == "0" and controller is None and not controllers) or (
            controller is not None and controller in controllers.split(",")
        ):
            path = PurePosixPath(place)
    for step in (path, *path.parents):
        yield root + str(step).rstrip("/")


def _fields(text: str | None, *, separator: str | None = None) -> dict[str, int]:
    """`name value` lines as a dict; lines whose value is no number are left out."""
    found = {}
    for line in (text or "").splitlines():
        name, *values = line.split(separator, 1)
        number = values[0].split()[0] if values and values[0].split() else ""
        if number.isdigit():
            found[name] = int(number)
    return found
