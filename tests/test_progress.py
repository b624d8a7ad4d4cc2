"""Progress of loads: who sees bars, what a callback is told."""

from __future__ import annotations

import io
import threading

import pytest

from mistralrs_sdk.loading import progress
from mistralrs_sdk.loading.progress import download_bar, progress_of, shows_bars


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def calls():
    return []


@pytest.fixture
def callback(calls):
    return lambda what, done, total: calls.append((what, done, total))


def test_bars_are_shown_on_a_terminal_unless_refused(monkeypatch):
    """None leaves it to the terminal; True and False decide; a callback takes the place of bars."""
    monkeypatch.setattr("sys.stderr", _Terminal())
    assert [shows_bars(p) for p in (None, True, False, print)] == [True, True, False, False]

    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert [shows_bars(p) for p in (None, True, False)] == [False, True, False]


def test_callback_hears_the_start_and_every_advance(calls, callback):
    """A callback gets (what, done, total), from 0 up."""
    with progress_of(callback, "loading x", total=10) as advance:
        advance(4)
        advance(6)

    assert calls == [("loading x", 0, 10), ("loading x", 4, 10), ("loading x", 10, 10)]


def test_bar_draws_on_stderr_only_when_asked(capsys):
    """False draws nothing; True draws the name of the work."""
    for shown in (False, True):
        with progress_of(shown, "loading x", total=10) as advance:
            advance(10)
        assert ("loading x" in capsys.readouterr().err) is shown


def test_bars_leave_no_thread_behind(callback, monkeypatch):
    """A bar that is closed leaves nothing running, not even tqdm's watching thread."""
    monkeypatch.setattr(progress._Bar, "monitor", None)  # one started before would hide it
    before = threading.active_count()

    with progress_of(True, "loading x", total=1) as advance:
        advance(1)
    with download_bar(callback)(total=1) as bar:
        bar.update(1)

    assert threading.active_count() == before


def test_download_callback_hears_what_the_bar_would_show(calls, callback, capsys):
    """huggingface_hub's bars report instead of drawing, also when their total grows."""
    bar_class = download_bar(callback)
    with bar_class(total=0, desc="Downloading bytes", name="hub", disable=True) as bar:
        bar.total = 100
        bar.update(30)
        bar.set_description("Done")
        bar.update(70)
        bar.refresh()

    assert calls == [("Downloading bytes", 30, 100), ("Done", 100, 100)]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("shown", [True, False])
def test_download_bar_obeys_the_setting_whatever_the_hub_passes(shown, capsys):
    """The user's choice wins over huggingface_hub's `disable`."""
    with download_bar(shown)(total=2, desc="Fetching", name="hub", disable=None) as bar:
        bar.update(2)

    assert ("Fetching" in capsys.readouterr().err) is shown
