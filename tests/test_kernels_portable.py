"""The kernels' sources compile for other processors and by other compilers, without a warning.

Three targets are tried each time; `make cross` tries all of them, optimised, and runs the kernels
on an emulated ARM processor.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mistralrs_sdk.kernels import native

SOURCES = sorted(Path(native.__file__).with_name("src").glob("*.cpp"))
DRIVER = Path(__file__).with_name("kernel_threads.cpp")
EMULATOR = "qemu-aarch64"
CROSS = "aarch64-linux-gnu-g++"
AVX512 = ("icelake-server", "sapphirerapids")
QUICK = [("g++", "x86-64"), ("g++", "x86-64-v3"), (CROSS, "armv8.2-a+dotprod")]
MORE = [
    *(("g++", march) for march in AVX512),
    *(("clang++", march) for march in ("x86-64", "x86-64-v3", *AVX512)),
    (CROSS, "armv8-a"),
    *(("clang++", march) for march in ("armv8-a", "armv8.2-a+dotprod")),
]
ALL = os.environ.get("KERNEL_TEST_TARGETS") == "all"


def find(compiler: str) -> str | None:
    """The compiler, also under a name with its version, as Debian installs clang."""
    versions = ("", *(f"-{number}" for number in range(30, 13, -1)))
    return next(filter(None, (shutil.which(compiler + version) for version in versions)), None)


def flags_for(compiler: str, march: str) -> list[str]:
    """Those of the library, but for another processor and with warnings."""
    flags = [flag for flag in native.FLAGS if flag not in ("-O3", "-march=native", "-shared", "-w")]
    flags += [f"-march={march}", "-O2" if ALL else "-O0", "-Wall", "-Wextra", "-Werror"]
    if compiler == "clang++" and march.startswith("armv"):
        flags.append("--target=aarch64-linux-gnu")
    if compiler == "g++" and march in AVX512:
        # GCC 12's AVX-512 header begins with vectors that are not set, and says so itself
        flags += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    return flags


def read_outputs(file: Path) -> list[np.ndarray]:
    """What `kernel_threads.cpp` writes: how many values, and these, again and again."""
    values, outputs = np.fromfile(file), []
    while len(values):
        end = 1 + int(values[0])
        outputs.append(values[1:end])
        values = values[end:]
    return outputs


@pytest.mark.parametrize(("compiler", "march"), QUICK + MORE if ALL else QUICK)
def test_the_sources_compile_for(compiler: str, march: str):
    """Every file, with warnings as errors."""
    found = find(compiler)
    if found is None:
        pytest.skip(f"{compiler} is not installed")
    words = [found, *flags_for(compiler, march), "-c", "-o", os.devnull]

    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(subprocess.run, [*words, str(file)], capture_output=True, text=True)
            for file in SOURCES
        ]
    complaints = [run.result().stderr for run in runs if run.result().returncode]

    assert not complaints, "\n".join(complaints)[:4000]


@pytest.mark.skipif(not ALL, reason="it takes a minute: make cross")
@pytest.mark.timeout(600)
def test_an_arm_processor_computes_the_same(tmp_path: Path):
    """Every kernel gives there what it gives here, up to the rounding of sums."""
    for name in ("g++", CROSS, EMULATOR):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
    here = ["g++", *flags_for("g++", "native")]
    there = [CROSS, *flags_for(CROSS, "armv8.2-a+dotprod"), "-static"]
    results = []
    for compiler, start in ((here, []), (there, [EMULATOR, "-cpu", "max"])):
        program, output = tmp_path / "program", tmp_path / "output"
        # warnings are another test's, and static libraries have some
        words = [*compiler, "-w", *map(str, (*SOURCES, DRIVER)), "-o", str(program)]
        subprocess.run(words, check=True)
        subprocess.run([*start, str(program), str(output)], check=True)
        results.append(read_outputs(output))

    for ours, theirs in zip(*results, strict=True):
        assert np.isfinite(ours).all()
        assert np.abs(ours).max() > 0
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=3e-6 * np.abs(ours).max())
