"""How many CPU threads the engine computes with, and which CPUs they are pinned to."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping

import attrs

from mistralrs_sdk.config import MAX_THREADS
from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.machine import (
    ReadText,
    allowed_cpus,
    cpu_quota,
    physical_cores,
    read_text,
    within_quota,
)
from mistralrs_sdk.switches import switched_on

logger = logging.getLogger("mistralrs_sdk.engine")

MASK = "CANDLE_CPU_MASK"
AFFINITY = "CANDLE_CPU_AFFINITY"
COUNTS = ("CANDLE_NUM_THREADS", "RAYON_NUM_THREADS")
"""The variables that give a number of threads, the stronger first."""

_MAX_CPU = 65_535
"""No kernel numbers its CPUs higher; a slip of the finger must not fill the memory."""
_CANNOT_PIN = "this system has no way to pin threads to CPUs"
_ALL_ALIKE = "the CPUs this process may use do not differ in capacity"


@attrs.frozen(kw_only=True)
class CpuThreads:
    """The threads the engine computes with."""

    num_threads: int
    origin: str
    """Where the number comes from, in words."""
    pinned: frozenset[int] | None = None
    """The only CPUs these threads run on; None leaves the choice to the system."""
    pinned_by: str = ""
    """What asked for that."""
    warnings: tuple[str, ...] = ()
    """What the user asked for and does not get, or should not have asked for."""


def use_threads(user: int | None) -> CpuThreads:
    """Choose for this process, log the warnings, and pin the calling thread if that is wanted.

    Threads that the calling thread starts from now on are pinned with it, so call this before its
    first parallel computation; all other threads stay as they are. The number of threads is for
    the caller to set.

    Raises:
        ConfigError: as `choose_threads`, or the system does not let the thread be pinned.
    """
    threads = choose_threads(
        os.environ,
        user=user,
        allowed=allowed_cpus(),
        read=read_text,
        can_pin=hasattr(os, "sched_setaffinity"),
    )
    for warning in threads.warnings:
        logger.warning("%s", warning)
    if threads.pinned is not None:
        try:
            os.sched_setaffinity(0, threads.pinned)
        except OSError as error:
            raise ConfigError(
                f"{threads.pinned_by} asks for the CPUs {format_cpulist(threads.pinned)}, and the "
                f"system does not let this process choose ({error}): unset it"
            ) from error
    return threads


def shared_threads(threads: CpuThreads, *, user: int | None, ranks: int) -> CpuThreads:
    """Divide threads that were counted, not asked for, over the ranks of one machine."""
    if ranks == 1 or user is not None or any(os.environ.get(name, "").strip() for name in COUNTS):
        return threads
    count = max(threads.num_threads // ranks, 1)
    origin = f"{threads.origin}, divided over {ranks} ranks"
    return attrs.evolve(threads, num_threads=count, origin=origin)


def choose_threads(
    environ: Mapping[str, str],
    *,
    user: int | None = None,
    allowed: Collection[int],
    read: ReadText,
    can_pin: bool = True,
) -> CpuThreads:
    """Decide the number of threads and the CPUs they are pinned to.

    The number is the first of: `user`, CANDLE_NUM_THREADS, RAYON_NUM_THREADS, the size of
    CANDLE_CPU_MASK, the high-capacity cores where cores differ, the physical cores. The last three
    stay within the `allowed` CPUs and the cgroup's quota; a number that was asked for is taken as
    it is. Threads are pinned to CANDLE_CPU_MASK, or with CANDLE_CPU_AFFINITY to the high-capacity
    CPUs; the number does not change that. `read` gives the system's files. A variable that is
    blank counts as unset.

    Raises:
        ConfigError: a variable has a value it cannot have, or no CPU of the mask is allowed.
    """
    warnings: list[str] = []
    counts = {name: _count(environ, name) for name in COUNTS}
    mask = _mask(environ, allowed=allowed, can_pin=can_pin, warnings=warnings)
    strong = high_capacity_cpus(allowed, read=read)
    quota = cpu_quota(read=read)

    pinned, pinned_by = mask, MASK if mask is not None else ""
    if mask is None and switched_on(environ, AFFINITY):
        if can_pin and strong is not None:
            pinned, pinned_by = strong, AFFINITY
        else:
            why = _ALL_ALIKE if can_pin else _CANNOT_PIN
            warnings.append(f"{AFFINITY} ({environ[AFFINITY]}) has no effect: {why}")

    asked = {"num_threads": user, **counts}
    given = next(((name, count) for name, count in asked.items() if count is not None), None)
    if given is not None:
        name, number = given
        origin = "user" if name == "num_threads" else name
        warnings.extend(_too_many(name, number, cpus=pinned or allowed, quota=quota))
    else:
        number, origin = _default_number(mask, strong, allowed=allowed, quota=quota, read=read)
    return CpuThreads(
        num_threads=number,
        origin=origin,
        pinned=pinned,
        pinned_by=pinned_by,
        warnings=tuple(warnings),
    )


def high_capacity_cpus(cpus: Collection[int], *, read: ReadText) -> frozenset[int] | None:
    """Those of `cpus` with at least nine tenths of the greatest capacity; None if that is all.

    None too where the system does not tell the capacity of each. The rule is candle's.
    """
    capacity = {}
    for cpu in cpus:
        text = (read(f"/sys/devices/system/cpu/cpu{cpu}/cpu_capacity") or "").strip()
        if not _is_number(text):
            return None
        capacity[cpu] = int(text)
    greatest = max(capacity.values(), default=0)
    strong = frozenset(cpu for cpu, value in capacity.items() if 10 * value >= 9 * greatest)
    return strong if len(strong) < len(capacity) else None


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Read `a` and `a-b` separated by commas; the CPUs sorted, each once.

    Blanks around a part and empty parts are skipped.

    Raises:
        ValueError: it is something else, or names no CPU; the message says what is wrong.
    """
    cpus: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        if ":" in part:
            raise ValueError(f"{part!r} has a stride, which is not supported: list the CPUs")
        first, dash, last = part.partition("-")
        bounds = (first, last if dash else first)
        if not all(map(_is_number, bounds)):
            raise ValueError(f"{part!r} is neither a CPU number nor a range")
        low, high = map(int, bounds)
        if low > high:
            raise ValueError(f"{part!r} ends before it starts")
        if high > _MAX_CPU:
            raise ValueError(f"{part!r} goes beyond {_MAX_CPU}")
        cpus.update(range(low, high + 1))
    if not cpus:
        raise ValueError("it names no CPU")
    return tuple(sorted(cpus))


def format_cpulist(cpus: Collection[int]) -> str:
    """The shortest list that `parse_cpulist` reads as `cpus`: 0-3,8."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)


def _count(environ: Mapping[str, str], name: str) -> int | None:
    """The number of threads a variable gives; None if it is not set."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not _is_number(text) or not 1 <= int(text) <= MAX_THREADS:
        raise ConfigError(
            f"{name} ({environ[name]!r}) must be a whole number from 1 to {MAX_THREADS}; "
            "unset it for the automatic choice"
        )
    return int(text)


def _mask(
    environ: Mapping[str, str], *, allowed: Collection[int], can_pin: bool, warnings: list[str]
) -> frozenset[int] | None:
    """The allowed CPUs of the mask; None if there is no mask or it can have no effect."""
    text = environ.get(MASK, "").strip()
    if not text:
        return None
    try:
        wanted = frozenset(parse_cpulist(text))
    except ValueError as error:
        raise ConfigError(
            f"{MASK} ({environ[MASK]!r}): {error}; it must be CPU numbers and ranges separated by "
            "commas, such as 5-9,15"
        ) from None
    if not can_pin:
        warnings.append(f"{MASK} ({text}) has no effect: {_CANNOT_PIN}")
        return None
    usable = wanted.intersection(allowed)
    if not usable:
        raise ConfigError(
            f"{MASK} ({text}) names no CPU this process may use: it may use "
            f"{format_cpulist(allowed)}; choose among those or unset the variable"
        )
    if usable < wanted:
        warnings.append(
            f"{MASK} ({text}): this process may use the CPUs {format_cpulist(allowed)} only; left "
            f"out: {format_cpulist(wanted - usable)}"
        )
    return usable


def _default_number(
    mask: Collection[int] | None,
    strong: Collection[int] | None,
    *,
    allowed: Collection[int],
    quota: float | None,
    read: ReadText,
) -> tuple[int, str]:
    """The number of threads nobody asked for, and where it comes from."""
    if mask is not None:
        number, origin = len(mask), f"size of {MASK}"
    elif strong is not None:
        number, origin = physical_cores(strong, read=read), "high-capacity cores of this process"
    else:
        number, origin = physical_cores(allowed, read=read), "physical cores of this process"
    granted = within_quota(number, quota)
    if granted < number:
        origin += ", limited by the CPU quota of the cgroup"
    return min(granted, MAX_THREADS), origin


def _too_many(name: str, number: int, *, cpus: Collection[int], quota: float | None) -> list[str]:
    """The warning that threads will wait for each other, if they will."""
    if number > len(cpus):
        room = f"the CPUs they may run on ({format_cpulist(cpus)})"
    elif quota is not None and number > quota:
        room = f"the {quota:g} CPUs that the cgroup grants"
    else:
        return []
    return [f"{name} ({number}) is more than {room}: threads will wait for each other"]


def _is_number(text: str) -> bool:
    """Whether `int` reads it as what it looks like: ASCII digits, and not so many that it fails."""
    return text.isascii() and text.isdigit() and len(text) <= 18
