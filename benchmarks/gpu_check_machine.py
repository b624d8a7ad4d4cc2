"""What the device does at best, measured in the same run as all that is compared with it."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import platform
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
from gpu_check_report import Book
from torch import Tensor

TRIES = 10
LIBRARIES = ("mistralrs_sdk", "torch", "transformers", "flashinfer-python", "triton")


@attrs.frozen(kw_only=True)
class Limits:
    """Of one device, per second."""

    read: float
    """Bytes."""
    multiply: float
    """Operations in products of bfloat16 matrices; a multiply-add is two."""


def check_machine(book: Book, *, device: torch.device, tiny: bool) -> None:
    """Report what this runs on, and its limits."""
    with book.check("versions") as check:
        check.say(f"{describe(device)}; {versions()}")
    with book.check("limits") as check:
        limits = measure_limits(device, tiny=tiny)
        check.say(
            f"reads {limits.read / 1e9:.0f} GB/s, multiplies {limits.multiply / 1e12:.2f} TFLOP/s "
            "in bfloat16",
            read=limits.read,
            multiply=limits.multiply,
        )


def describe(device: torch.device) -> str:
    """The device in words."""
    if device.type != "cuda":
        return f"{platform.processor() or platform.machine()}, a CPU: STAND-INS for all of a GPU"
    facts = torch.cuda.get_device_properties(device)
    return (
        f"{facts.name}, compute capability {facts.major}.{facts.minor}, "
        f"{facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    )


def versions() -> str:
    """Of what takes part."""
    found = [f"Python {platform.python_version()}"]
    for name in LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} from its folder" if name == "mistralrs_sdk" else f"no {name}")
    return ", ".join(found)


def measure_limits(device: torch.device, *, tiny: bool) -> Limits:
    """Read a large tensor or copy it, whichever is faster, and multiply large matrices."""
    size, rows = (2**22, 256) if tiny else (2**30, 8192)
    read = _read_seconds(torch.rand(size, device=device), device)
    matrix = torch.rand(rows, rows, device=device).bfloat16()
    multiply = best_seconds(functools.partial(torch.mm, matrix, matrix), device)
    del matrix
    give_back(device)
    return Limits(read=4 * size / read, multiply=2 * rows**3 / multiply)


def best_seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Of several tries, on the device's own clock where it has one."""
    function()
    return min(_seconds(function, device) for _ in range(TRIES))


def synchronize(device: torch.device) -> None:
    """Wait for all that the device has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_back(device: torch.device) -> None:
    """Let others have the memory that torch keeps for later: models look at what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _read_seconds(data: Tensor, device: torch.device) -> float:
    copy = torch.empty_like(data)
    copied = best_seconds(lambda: copy.copy_(data), device)
    return min(best_seconds(data.sum, device), copied / 2)


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000
