"""How the native kernels are compiled, cached and loaded, and what happens where they cannot be."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.kernels import matmul, native
from mistralrs_sdk.switches import read_switch


def has_compiler() -> bool:
    try:
        native.find_compiler(os.environ)
    except native.NativeError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """The environment of a process that has not asked for the kernels, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.delenv(native.MORE_FLAGS, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    native.outcome.cache_clear()
    yield monkeypatch
    native.outcome.cache_clear()


def write_compiler(folder: Path, script: str) -> str:
    """A program that calls itself a compiler and otherwise does `script`."""
    file = folder / "compiler"
    file.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1; exit; fi\n{script}\n')
    file.chmod(0o755)
    return str(file)


@needs_compiler
def test_two_processes_compile_at_once(tmp_path: Path):
    """Both get the whole library, one file is left, and there is one OpenMP runtime in each."""
    code = (
        "from mistralrs_sdk.kernels import native\n"
        "library = native.load(native.build(sources='matmul.cpp'))\n"
        "print(library.mistralrs_instructions() != b'', len(native._openmp_runtimes()) <= 1)"
    )
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE)
        for _ in range(2)
    ]

    answers = [process.communicate(timeout=100)[0] for process in both]

    assert answers == [b"True True\n"] * 2
    files = [file.name for file in tmp_path.rglob("*") if file.is_file()]
    assert files == ["kernels.so"]


@needs_compiler
def test_the_compiled_library_is_used_again(tmp_path: Path):
    """The cache is keyed by what the result depends on: same flags, same file; others, another."""
    quick = ["-std=c++17", "-O0", "-shared", "-fPIC", "-w"]
    only = "matmul.cpp"
    first = native.build(quick, sources=only, folder=tmp_path)
    written = first.stat().st_mtime_ns

    again = native.build(quick, sources=only, folder=tmp_path)
    other = native.build([*quick, "-DKERNELS"], sources=only, folder=tmp_path)

    assert again == first
    assert again.stat().st_mtime_ns == written
    assert other != first


def test_without_a_compiler_torch_does_the_work(
    fresh: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """No compiler is one warning that says how to get one, and the products still work."""
    fresh.setenv("PATH", str(tmp_path))

    with caplog.at_level(logging.WARNING):
        assert not native.available()
        assert not native.available()

    assert "no C++ compiler" in native.reason()
    assert "apt install g++" in native.reason()
    assert len(caplog.records) == 1
    weight = torch.randn(3, 5).half()
    x = torch.randn(2, 5)
    packed = matmul.pack(weight, "F16", (3, 5))
    assert torch.equal(matmul.linear(x, packed), x @ weight.float().T)
    assert torch.equal(matmul.embedding_rows(packed, torch.tensor([2])), weight[2:].float())


def test_the_words_of_a_failing_compiler_are_kept(fresh: pytest.MonkeyPatch, tmp_path: Path):
    """What the compiler complains about is in the reason, and no half-built file stays."""
    fresh.setenv("CXX", write_compiler(tmp_path, "echo 'fopenmp is unknown' >&2; exit 3"))

    assert not native.available()

    assert "status 3 (fopenmp is unknown)" in native.reason()
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == []


def test_flags_from_the_environment_come_last(fresh: pytest.MonkeyPatch, tmp_path: Path):
    """So they win over the library's own; split as by a shell, and named where compiling fails."""
    fresh.setenv("CXX", write_compiler(tmp_path, 'echo "$*" >&2; exit 1'))
    fresh.setenv(native.MORE_FLAGS, "-O1 '-DNAME=a b'")

    assert not native.available()

    before, _, after = native.reason().partition(" -w -O1 -DNAME=a b -c ")
    assert "-march=native" in before
    assert f"{native.MORE_FLAGS} added -O1 '-DNAME=a b': unset it" in after


def test_flags_with_an_open_quote_are_refused(fresh: pytest.MonkeyPatch):
    """A setting is never guessed at."""
    fresh.setenv(native.MORE_FLAGS, "-DNAME='a")

    with pytest.raises(ConfigError, match=r"MISTRALRS_KERNEL_CXXFLAGS .* close each quote"):
        native.available()


def test_a_compiler_that_builds_nonsense_is_named(fresh: pytest.MonkeyPatch, tmp_path: Path):
    """A file that cannot be loaded is a reason, not an error."""
    fresh.setenv("CXX", write_compiler(tmp_path, 'for last; do :; done; echo no > "$last"'))

    assert not native.available()

    assert "cannot be loaded" in native.reason()


def test_a_compiler_that_is_not_there_is_named(fresh: pytest.MonkeyPatch):
    """CXX is obeyed: nothing else is tried in its place."""
    fresh.setenv("CXX", "no-such-compiler")

    assert not native.available()

    assert "CXX (no-such-compiler) not found" in native.reason()


def test_a_cache_that_cannot_be_written_is_a_reason(fresh: pytest.MonkeyPatch, tmp_path: Path):
    """The reason names the variable that moves the cache."""
    (tmp_path / "file").touch()
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    fresh.setenv("CXX", write_compiler(tmp_path, "exit 0"))

    assert not native.available()

    assert "XDG_CACHE_HOME" in native.reason()


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF", " off "])
def test_the_switch_turns_the_kernels_off(fresh: pytest.MonkeyPatch, text: str):
    """Switched off is a reason without a warning, and nothing is compiled."""
    fresh.setenv(native.SWITCH, text)

    assert not native.available()

    assert native.reason() == f"switched off by {native.SWITCH}={text}"


@pytest.mark.parametrize("text", ["", " ", "1", "true", "Yes", "ON"])
def test_the_switch_is_on_by_default(text: str):
    """Blank counts as unset."""
    assert read_switch({"SWITCH": text}, "SWITCH", default=True, unset="the default")
    assert read_switch({}, "SWITCH", default=True, unset="the default")


def test_another_word_at_the_switch_is_refused(fresh: pytest.MonkeyPatch):
    """A setting is never ignored."""
    fresh.setenv(native.SWITCH, "maybe")

    with pytest.raises(ConfigError, match=r"MISTRALRS_NATIVE_KERNELS \('maybe'\) must be one of"):
        native.available()
