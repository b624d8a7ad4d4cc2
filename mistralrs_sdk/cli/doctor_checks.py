"""What `doctor` looks at, one function for each part of the machine; each gives findings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

COMPILERS = ("g++", "clang++", "c++")
GIB = 2**30
HUB_SECONDS = 3.0
"""How long the hub may take to answer."""

_FEATURES = ("avx2", "f16c", "fma", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
_ARM_FEATURES = ("asimd", "asimddp", "fphp", "i8mm", "sve")
_EXTRAS = {
    "server": ("starlette", "uvicorn", "prometheus_client"),
    "mcp": ("mcp",),
    "docs": ("matplotlib",),
}
_LOW_DISK = 10 * GIB
_EXACT = 1e-4
_ROUNDED = 0.02
_QUANTISED = 0.1


@attrs.frozen(kw_only=True)
class Finding:
    """What one check found, and what helps."""

    name: str
    status: Literal["ok", "note", "warning", "failure"]
    detail: str
    suggestion: str | None = None


def machine(*, read: Callable[[str], str]) -> Iterator[Finding]:
    """The system, its CPU and what of it this process may use; `read` gives a file's text or ""."""
    yield Finding(
        name="system",
        status="ok",
        detail=f"{platform.system()} {platform.release()} {platform.machine()}, "
        f"Python {platform.python_version()}",
    )
    info = read("/proc/cpuinfo")
    fields = {
        name.strip(): value.strip()
        for name, _, value in (
            line.partition(":") for line in info.partition("\n\n")[0].split("\n")
        )
    }
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    known = [name for name in (*_FEATURES, *_ARM_FEATURES) if name in flags]
    model = fields.get("model name") or platform.processor() or platform.machine()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    slow = "flags" in fields and not {"avx2", "fma", "f16c"} <= set(flags)
    yield Finding(
        name="cpu",
        status="warning" if slow else "ok",
        detail=f"{model}, {allowed} of {os.cpu_count()} CPUs allowed; "
        f"{', '.join(known) or 'no vector instructions known here'}",
        suggestion="without AVX2, FMA and F16C a CPU is slow with any weights: use another machine"
        if slow
        else None,
    )


def compiler(environ: Mapping[str, str]) -> Finding:
    """The C++ compiler that the native kernels need."""
    wanted = environ.get("CXX", "").strip()
    for name in (wanted,) if wanted else COMPILERS:
        place = shutil.which(name, path=environ.get("PATH", ""))
        if place is None:
            continue
        try:
            said = subprocess.run(
                [place, "--version"], capture_output=True, text=True, timeout=10, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError) as error:
            return Finding(
                name="compiler",
                status="failure",
                detail=f"{place} does not run: {error}",
                suggestion="set CXX to another compiler",
            )
        return Finding(
            name="compiler", status="ok", detail=f"{place}: {said.partition(chr(10))[0]}"
        )
    return Finding(
        name="compiler",
        status="warning",
        detail=f"none ({f'CXX={wanted}' if wanted else ', '.join(COMPILERS)} not found)",
        suggestion="install one (on Debian: apt install g++): a CPU is several times faster with "
        "native kernels",
    )


def engine(used: Mapping[str, Any], reference: Mapping[str, Any]) -> Iterator[Finding]:
    """What a tiny model used here, and whether its results are those of torch alone.

    Both are what a `self_check` printed, or {"failed": why}.
    """
    if "failed" in used:
        yield Finding(
            name="self-check",
            status="failure",
            detail=f"a tiny model cannot be run: {used['failed']}",
            suggestion="if torch cannot be imported, install it anew (pytorch.org has the command "
            "for your machine); if MISTRALRS_NATIVE_KERNELS=off helps, delete the kernels in "
            "~/.cache/mistralrs_sdk",
        )
        return
    yield from _torch(used["torch"])
    yield from _kernels(used["settings"])
    yield Finding(name="memory", status="ok", detail=f"{_gib(used['free_bytes'])} free for models")
    if "failed" in reference:
        yield Finding(
            name="self-check",
            status="warning",
            detail=f"there is nothing to compare with: {reference['failed']}",
            suggestion="run doctor again when the machine is less busy",
        )
        return
    yield _compared(used, reference["exact"])


def gpu(seen: Mapping[str, Any], *, has_driver: bool) -> Iterator[Finding]:
    """The accelerators that torch sees; `has_driver` says whether NVIDIA's driver is here."""
    for index, device in enumerate(seen["devices"]):
        yield Finding(
            name=f"cuda:{index}",
            status="ok",
            detail=f"{device['name']}, compute {device['compute']}, {_gib(device['free_bytes'])} "
            f"of {_gib(device['total_bytes'])} free",
        )
    if seen["devices"]:
        yield _flashinfer()
    elif has_driver:
        built = f"CUDA {seen['cuda']}" if seen["cuda"] else "the CPU only"
        yield Finding(
            name="gpu",
            status="warning",
            detail=f"NVIDIA's driver is here, but torch ({seen['version']}, built for {built}) "
            "sees no GPU",
            suggestion="install a CUDA build of torch that suits the driver (pytorch.org), or see "
            "what CUDA_VISIBLE_DEVICES hides",
        )
    elif seen["mps"]:
        yield Finding(name="gpu", status="ok", detail="Apple's, through mps")
    else:
        yield Finding(name="gpu", status="note", detail="none: models run on the CPU")


def hub(
    environ: Mapping[str, str], *, open_url: Callable[..., Any] = urllib.request.urlopen
) -> Iterator[Finding]:
    """The hub, its cache and the room there."""
    from huggingface_hub import constants, get_token, is_offline_mode

    if is_offline_mode():
        yield Finding(
            name="hub",
            status="note",
            detail="not asked: HF_HUB_OFFLINE is set, so models come from the cache alone",
        )
    else:
        yield _reachable(constants.ENDPOINT, open_url)
    yield Finding(
        name="hub token",
        status="note",
        detail="there is one" if get_token() else "none: models that need a login are refused",
    )
    yield from cache_folder(Path(environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE))


def cache_folder(folder: Path) -> Iterator[Finding]:
    """Whether a folder for downloads can be written, and how much fits."""
    place = folder
    while not place.exists():
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place):
            pass
    except OSError as error:
        yield Finding(
            name="hub cache",
            status="failure",
            detail=f"{folder} cannot be written: {error}",
            suggestion="set HF_HUB_CACHE to a folder that can, or use --hf-cache",
        )
    else:
        yield Finding(name="hub cache", status="ok", detail=f"{folder} can be written")
    free = shutil.disk_usage(place).free
    low = free < _LOW_DISK
    yield Finding(
        name="disk",
        status="warning" if low else "ok",
        detail=f"{_gib(free)} free for downloads",
        suggestion="remove models with mistralrs-sdk cache delete" if low else None,
    )


def extras() -> Finding:
    """Which optional parts are installed."""
    missing = []
    for extra, packages in _EXTRAS.items():
        if not all(_version(package) for package in packages):
            missing.append(extra)
    have = [extra for extra in _EXTRAS if extra not in missing]
    return Finding(
        name="extras",
        status="note" if missing else "ok",
        detail=f"{', '.join(have) or 'none'} installed"
        + (f", {', '.join(missing)} not" if missing else ""),
        suggestion=f"pip install 'mistralrs_sdk[{','.join(missing)}]' if wanted"
        if missing
        else None,
    )


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that change how this package runs."""
    found = [
        name for name in sorted(environ) if name.startswith(("MISTRALRS_", "CANDLE_", "RAYON_"))
    ]
    if found:
        secret = ("KEY", "TOKEN", "SECRET")
        shown = ", ".join(
            f"{name}={'...' if any(word in name for word in secret) else environ[name]}"
            for name in found
        )
        yield Finding(
            name="environment",
            status="note",
            detail=shown,
            suggestion="docs/environment.md says what each does",
        )


def _torch(seen: Mapping[str, Any]) -> Iterator[Finding]:
    built = f"for CUDA {seen['cuda']}" if seen["cuda"] else "without CUDA"
    yield Finding(name="torch", status="ok", detail=f"{seen['version']}, {built}")
    yield from gpu(seen, has_driver=shutil.which("nvidia-smi") is not None)


def _kernels(settings: Mapping[str, list[str]]) -> Iterator[Finding]:
    device, device_why = settings["device"]
    attention, why = settings["attention"]
    slow = device == "cpu" and attention != "CpuBackend"
    yield Finding(
        name="kernels",
        status="warning" if slow else "ok",
        detail=f"on {device} ({device_why}): {attention} ({why}), weights {settings['weights'][1]}",
        suggestion="the native kernels are missing for the reason given: without them a CPU is "
        "several times slower"
        if slow
        else None,
    )
    threads, origin = settings["num_threads"]
    yield Finding(name="threads", status="ok", detail=f"{threads} ({origin})")


def _compared(used: Mapping[str, Any], truth: list[float]) -> Finding:
    """Differences as a part of the largest logit, against what rounding explains."""
    limits = {"exact": _EXACT, "used": _ROUNDED, "quantised": _QUANTISED}
    size = max(abs(value) for value in truth)
    worst = {
        name: max(abs(a - b) for a, b in zip(used[name], truth, strict=True)) / size
        for name in limits
        if name in used
    }
    wrong = [name for name, error in worst.items() if not error <= limits[name]]
    shown = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    return Finding(
        name="self-check",
        status="failure" if wrong else "ok",
        detail=f"a tiny model differs from torch alone by: {shown}",
        suggestion=f"{' and '.join(wrong)} must not differ by more than rounding: set "
        "MISTRALRS_NATIVE_KERNELS=off, and please report this"
        if wrong
        else None,
    )


def _flashinfer() -> Finding:
    version = _version("flashinfer-python")
    detail = f"{version} installed" if version else "not installed"
    return Finding(
        name="flashinfer",
        status="note",
        detail=f"{detail}; what attends is under kernels, and the self-check compares it",
    )


def _reachable(endpoint: str, open_url: Callable[..., Any]) -> Finding:
    asked = urllib.request.Request(endpoint, method="HEAD")
    try:
        open_url(asked, timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError as answer:  # it answers, whatever it thinks of the question
        answer.close()
    except (OSError, ValueError) as error:
        return Finding(
            name="hub",
            status="warning",
            detail=f"{endpoint} does not answer: {error}",
            suggestion="models in the cache and on disk work without it; HF_HUB_OFFLINE=1 stops "
            "asking, HF_ENDPOINT names a mirror",
        )
    return Finding(name="hub", status="ok", detail=f"{endpoint} answers")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
