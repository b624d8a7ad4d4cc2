"""The library of native kernels: compiled for this CPU at first use, kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import attrs
import torch

from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.machine import read_text
from mistralrs_sdk.switches import read_switch

logger = logging.getLogger("mistralrs_sdk.kernels")

SWITCH = "MISTRALRS_NATIVE_KERNELS"
MORE_FLAGS = "MISTRALRS_KERNEL_CXXFLAGS"
COMPILERS = ("g++", "clang++", "c++")
"""Tried in this order where CXX names none."""
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-ffp-contract=off",  # the same rounding in every loop: a row must not depend on its neighbours
    "-shared",
    "-fPIC",
    "-w",
)

_SOURCES = Path(__file__).parent / "src"
_COMPILE_SECONDS = 300
_listeners: dict[int, Callable[[str, bytes, int], None]] = {}
"""By thread."""
_RATHER = "a CPU computes in torch, several times slower, and weights take more memory"


class NativeError(Exception):
    """The library cannot be built or loaded; the message says why and what helps."""


@attrs.frozen(kw_only=True)
class Outcome:
    """The library, or the reason for not having it."""

    library: ctypes.CDLL | None
    reason: str
    """Which instructions it uses, or why it is missing, in words."""


def available() -> bool:
    """Whether the native kernels can be used; the first call compiles or loads them."""
    return outcome().library is not None


def reason() -> str:
    """What the kernels were compiled for, or why there are none, for `describe()`."""
    return outcome().reason


def library() -> ctypes.CDLL | None:
    """The loaded library, None if there is none."""
    return outcome().library


def call(name: str, *arguments: float) -> int:
    """Call the kernel `name` of the library and return its status, 0 if it has none.

    A pointer is an address, a null pointer 0. Kernels are called in no other way, so that a thread
    that is `heard` can be told of all its calls.

    Raises: TypeError if the arguments are not what the kernel takes; RuntimeError if there is no
    library.
    """
    found = kernel(library(), name)
    try:
        words = found.words(*arguments)
    except struct.error as error:
        raise TypeError(f"{name} takes {found.types}, not {arguments}: {error}") from error
    status = found.run(words)
    if _listeners and (listener := _listeners.get(threading.get_ident())) is not None:
        listener(name, words, status)
    return status


@contextmanager
def heard(listener: Callable[[str, bytes, int], None]) -> Iterator[None]:
    """Tell `listener` of each call this thread makes inside: name, arguments as words, status."""
    thread = threading.get_ident()
    before = _listeners.get(thread)
    _listeners[thread] = listener
    try:
        yield
    finally:
        if before is None:
            del _listeners[thread]
        else:
            _listeners[thread] = before


@attrs.frozen(kw_only=True)
class Kernel:
    """One function of the library, called with its arguments as 64-bit words (`src/words.h`)."""

    types: str
    """A letter for each argument: P for a pointer, q for a whole number, d for a real one."""
    address: int
    words: Callable[..., bytes]
    """Turns arguments into words."""
    run: Callable[[bytes], int]


@functools.cache
def kernel(found: ctypes.CDLL | None, name: str) -> Kernel:
    """The function `name` of a library.

    Raises: RuntimeError without a library, or if it has no such function.
    """
    if found is None:
        raise RuntimeError("the native kernels are not available here: check available() first")
    try:
        types, run = getattr(found, f"{name}_types"), getattr(found, f"{name}_words")
    except AttributeError as error:
        raise RuntimeError(
            f"the kernel library has no {name}: a C++ file must define it and say CALLABLE({name})"
        ) from error
    types.restype = ctypes.c_char_p
    run.argtypes, run.restype = [ctypes.c_char_p], ctypes.c_int64
    letters = types().decode()
    return Kernel(
        types=letters,
        address=ctypes.cast(run, ctypes.c_void_p).value or 0,
        words=struct.Struct(letters).pack,
        run=run,
    )


@functools.cache
def outcome() -> Outcome:
    """Build and load the library once per process; a failure is one warning, and no error.

    Raises: ConfigError if MISTRALRS_NATIVE_KERNELS is neither on nor off, or
    MISTRALRS_KERNEL_CXXFLAGS has an open quote.
    """
    wanted = "the native kernels where there is a compiler"
    if not read_switch(os.environ, SWITCH, default=True, unset=wanted):
        return Outcome(library=None, reason=f"switched off by {SWITCH}={os.environ[SWITCH]}")
    more = more_flags(os.environ)
    try:
        found = load(build((*FLAGS, *more)))
    except NativeError as error:
        if more:
            error = NativeError(f"{error}; {MORE_FLAGS} added {shlex.join(more)}: unset it")
        logger.warning("No native kernels: %s. Without them %s.", error, _RATHER)
        return Outcome(library=None, reason=str(error))
    return Outcome(library=found, reason=found.mistralrs_instructions().decode())


def build(
    flags: Sequence[str] = FLAGS, *, sources: str = "*.cpp", folder: Path | None = None
) -> Path:
    """Compile the library unless the cache has it, and return its file.

    `sources` is a pattern of file names. `folder` (default: the user's cache) gets one folder per
    source text, flags, compiler and CPU. Files are compiled side by side. Two processes may build
    at once: each does so in a folder of its own, then renames.

    Raises: NativeError without a compiler, if it fails, or if the cache cannot be written.
    """
    compiler = find_compiler(os.environ)
    files = sorted(_SOURCES.glob(sources))
    place = (folder or cache_folder(os.environ)) / _key(compiler, flags, files=files)
    target = place / "kernels.so"
    if target.is_file():
        return target
    try:
        place.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(dir=place)
    except OSError as error:
        raise NativeError(
            f"the folder for the compiled kernels cannot be written ({error}): set XDG_CACHE_HOME "
            "to one that can"
        ) from error
    logger.info("Compiling the native kernels into %s", target)
    with work as part, ThreadPoolExecutor() as pool:
        objects = [f"{part}/{file.stem}.o" for file in files]
        commands = [
            [compiler, *flags, "-c", str(file), "-o", name]
            for file, name in zip(files, objects, strict=True)
        ]
        list(pool.map(_run, commands))
        _run([compiler, *flags, *objects, "-o", f"{part}/kernels.so"])
        Path(part, "kernels.so").replace(target)
    return target


def load(file: Path) -> ctypes.CDLL:
    """Load a built library.

    torch was imported above, so that the library's OpenMP symbols bind to the runtime torch brings.

    Raises: NativeError if it cannot be loaded, or brings a second OpenMP runtime into the process:
    two thread pools that fight for the cores make everything slower.
    """
    before = _openmp_runtimes()
    try:
        found = ctypes.CDLL(str(file))
        found.mistralrs_instructions.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise NativeError(
            f"{file} cannot be loaded ({error}): delete it to build it anew"
        ) from error
    added = _openmp_runtimes() - before
    if before and added:
        raise NativeError(
            f"the compiler's OpenMP runtime ({', '.join(sorted(added))}) is not the one of torch "
            f"{torch.__version__} ({', '.join(sorted(before))}): set CXX to a compiler that uses "
            "the same, such as g++"
        )
    return found


def find_compiler(environ: Mapping[str, str]) -> str:
    """The C++ compiler: what CXX names, else the first of COMPILERS on the PATH.

    Raises: NativeError if there is none.
    """
    wanted = environ.get("CXX", "").strip()
    path = environ.get("PATH", "")
    for name in (wanted,) if wanted else COMPILERS:
        found = shutil.which(name, path=path)
        if found is not None:
            return found
    tried = f"CXX ({wanted})" if wanted else ", ".join(COMPILERS)
    raise NativeError(
        f"no C++ compiler ({tried} not found): install one (on Debian: apt install g++) or set CXX"
    )


def more_flags(environ: Mapping[str, str]) -> list[str]:
    """What MISTRALRS_KERNEL_CXXFLAGS adds behind FLAGS, split as a shell would.

    Raises: ConfigError for a quote that is not closed.
    """
    text = environ.get(MORE_FLAGS, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"{MORE_FLAGS} ({text!r}) cannot be split into flags ({error}): close each quote"
        ) from error


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where compiled kernels are kept: under XDG_CACHE_HOME, else under ~/.cache."""
    root = environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(root) if root else Path("~/.cache").expanduser()) / "mistralrs_sdk" / "kernels"


def _key(compiler: str, flags: Sequence[str], *, files: Sequence[Path]) -> str:
    """A name for what the result of compiling depends on."""
    parts = [_run([compiler, "--version"]), *flags, platform.machine(), _cpu()]
    for file in (*files, *sorted(_SOURCES.glob("*.h"))):
        parts += [file.name, file.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _cpu() -> str:
    """Model and features of the CPU: `-march=native` depends on them."""
    first = (read_text("/proc/cpuinfo") or "").partition("\n\n")[0]
    wanted = ("model", "model name", "flags", "Features", "CPU part")
    lines = [line for line in first.splitlines() if line.partition(":")[0].strip() in wanted]
    return "\n".join(lines) or platform.processor()


def _run(command: Sequence[str]) -> str:
    """What a compiler prints; NativeError with its last words if it fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"the compiler {command[0]} does not run ({error}): set CXX") from error
    if done.returncode:
        words = done.stderr.strip()[-500:] or "it says nothing"
        raise NativeError(
            f"the compiler {command[0]} failed with status {done.returncode} ({words}): set CXX to "
            "one that knows C++17 and OpenMP"
        )
    return done.stdout


def _openmp_runtimes() -> set[str]:
    """Names of the OpenMP libraries in this process; empty where the system does not tell."""
    lines = (read_text("/proc/self/maps") or "").splitlines()
    files = {line.split(maxsplit=5)[5] for line in lines if line.count("/") and ".so" in line}
    names = ("libgomp", "libiomp5", "libomp")
    return {file for file in files if os.path.basename(file).startswith(names)}
