"""How kernels are called: arguments as words, wrong ones refused, and who is told of a call."""

from __future__ import annotations

import re
import struct
import threading
from pathlib import Path

import pytest
import torch

from mistralrs_sdk.kernels import elementwise, native

needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels here")
SOURCES = Path(native.__file__).parent / "src"


def softcap(x: torch.Tensor, cap: float = 2.0) -> torch.Tensor:
    return elementwise.softcap(x, cap, num_threads=1)


def test_every_exported_function_can_be_called():
    """A function that Python calls says CALLABLE; only the name of the instructions does not."""
    text = "\n".join(file.read_text() for file in SOURCES.glob("*.cpp"))

    defined = set(re.findall(r"^(?:extern \"C\" )?\w+ \*?(mistralrs_\w+)\(", text, re.MULTILINE))
    called = re.findall(r"^CALLABLE\((\w+)\)", text, re.MULTILINE)

    assert "mistralrs_tape_run" in called
    assert defined - set(called) <= {"mistralrs_instructions"}


@needs_native
def test_a_kernel_names_the_types_of_its_arguments():
    """A pointer, two whole numbers... as C++ declares them, whatever their width."""
    assert native.kernel(native.library(), "mistralrs_softcap").types == "Pqdq"
    assert native.kernel(native.library(), "mistralrs_tape_run").types == "Pq"


@needs_native
@pytest.mark.parametrize(
    "arguments",
    [(), (0, 0, 1.0), (0, 0, 1.0, 1, 1), (None, 0, 1.0, 1), (0, 0.5, 1.0, 1), ("x", 0, 1.0, 1)],
)
def test_wrong_arguments_are_refused(arguments):
    """Too few, too many, None, a fraction for a whole number: nothing is called."""
    with pytest.raises(TypeError, match="mistralrs_softcap takes Pqdq, not"):
        native.call("mistralrs_softcap", *arguments)


@needs_native
def test_a_kernel_there_is_not_is_named():
    """The error says what makes a function callable."""
    with pytest.raises(RuntimeError, match=r"has no mistralrs_nothing.*CALLABLE"):
        native.call("mistralrs_nothing")


def test_without_a_library_a_call_is_an_error(monkeypatch):
    """Callers ask `available()` first."""
    monkeypatch.setattr(native, "library", lambda: None)

    with pytest.raises(RuntimeError, match="not available"):
        native.call("mistralrs_softcap", 0, 0, 1.0, 1)


@needs_native
def test_a_listener_hears_the_calls_of_its_thread():
    """Name, words and status of each, until it stops listening; other threads are not heard."""
    heard: list[tuple[str, bytes, int]] = []
    x, other = torch.randn(3), torch.randn(3)

    with native.heard(lambda *call: heard.append(call)):
        thread = threading.Thread(target=softcap, args=(other,))
        thread.start()
        thread.join()
        softcap(x)
    softcap(x)

    words = struct.pack("Pqdq", x.data_ptr(), 3, 2.0, 1)
    assert heard == [("mistralrs_softcap", words, 0)]


@needs_native
def test_listeners_nest():
    """The inner one hears what is inside, the outer one the rest."""
    outer: list[str] = []
    inner: list[str] = []

    with native.heard(lambda name, words, status: outer.append(name)):
        with native.heard(lambda name, words, status: inner.append(name)):
            softcap(torch.ones(1))
        softcap(torch.ones(1))

    assert len(inner) == len(outer) == 1
