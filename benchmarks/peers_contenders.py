"""Who takes part in `peers.py`, what each needs, and with which weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

LLAMA_CPP = 'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python'
MISTRALRS = "pip install mistralrs"
CONVERTERS = "pip install gguf accelerate"


@attrs.frozen(kw_only=True)
class Contender:
    """A way to serve the model."""

    name: str
    module: str
    form: str
    """Which of the files it reads; see `peers_files.prepare`."""
    stored: str
    """How it keeps the weights; see `peers_numbers.limit_rate`."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    needs: str | None = None
    """The package that must be there."""
    install: str = ""

    def missing(self) -> str | None:
        """Why it cannot take part, None if it can."""
        if self.needs is None or importlib.util.find_spec(self.needs):
            return None
        return f"{self.needs} is not installed: {self.install}"

    def arguments(self, place: Path, threads: int) -> dict[str, Any]:
        """What its module's `start` takes; mistral.rs takes its threads from the environment."""
        given = {"place": str(place), **self.options}
        return given if self.module == "peers_mistralrs" else given | {"threads": threads}


def _ours(name: str, form: str, stored: str, **options: Any) -> Contender:
    return Contender(
        name=f"ours {name}", module="peers_ours", form=form, stored=stored, options=options
    )


def _llama_cpp(form: str, stored: str) -> Contender:
    return Contender(
        name=f"llama.cpp {form}",
        module="peers_llama_cpp",
        form=form,
        stored=stored,
        needs="llama_cpp",
        install=LLAMA_CPP,
    )


def _mistralrs(name: str, form: str, stored: str, **options: Any) -> Contender:
    return Contender(
        name=f"mistral.rs {name}",
        module="peers_mistralrs",
        form=form,
        stored=stored,
        options=options,
        needs="mistralrs",
        install=MISTRALRS,
    )


def _transformers(name: str, **options: Any) -> Contender:
    return Contender(
        name=f"transformers {name}",
        module="peers_transformers",
        form="folder",
        stored="f32",
        options=options,
        needs="transformers",
        install="pip install transformers",
    )


CONTENDERS = (
    _ours("gguf", "gguf", "gguf"),
    _ours("f16", "folder", "f16"),
    _ours("isq 4", "folder", "q4", isq="q4_0"),
    _ours("isq 8", "folder", "q8", isq="q8_0"),
    _llama_cpp("gguf", "gguf"),
    _llama_cpp("Q4_0", "q4"),
    _llama_cpp("Q8_0", "q8"),
    _llama_cpp("F16", "f16"),
    _mistralrs("gguf", "gguf", "gguf"),
    _mistralrs("f32", "folder", "f32"),
    _mistralrs("isq 8", "folder", "q8", isq="Q8_0"),
    _transformers("static"),
    _transformers("continuous", continuous=True),
)
"""Names start with whose they are; "gguf" is the file as it is stored."""


def choose(only: Sequence[str]) -> list[Contender]:
    """The contenders whose names start with any of `only`; all if it is empty.

    Raises:
        ValueError: one of `only` is nobody's name.
    """
    for wanted in only:
        if not any(contender.name.startswith(wanted) for contender in CONTENDERS):
            names = ", ".join(contender.name for contender in CONTENDERS)
            raise ValueError(f"{wanted!r} is no contender: take the start of any of {names}")
    return [c for c in CONTENDERS if not only or c.name.startswith(tuple(only))]
