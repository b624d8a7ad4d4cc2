"""Progress of long loads: bars on a terminal, a callback, or nothing."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

from mistralrs_sdk.config import Progress


class _Bar(tqdm):
    """A bar without tqdm's watching thread, which would outlive the load."""

    monitor_interval = 0


def shows_bars(progress: Progress | None) -> bool:
    """Whether bars are drawn: when asked for, or by default when stderr is a terminal."""
    return sys.stderr.isatty() if progress is None else progress is True


@contextlib.contextmanager
def progress_of(
    progress: Progress | None, what: str, *, total: int
) -> Iterator[Callable[[int], None]]:
    """Report `total` bytes of `what`; yields the function that adds to the bytes done."""
    if progress is not None and not isinstance(progress, bool):
        done = 0

        def report(count: int) -> None:
            nonlocal done
            done += count
            progress(what, done, total)

        report(0)
        yield report
        return
    with _Bar(
        total=total,
        desc=what,
        disable=not shows_bars(progress),
        leave=False,
        unit="B",
        unit_scale=True,
    ) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance


def download_bar(progress: Progress | None) -> type[Any]:
    """Return the bar class huggingface_hub shall draw with.

    With a callback its bars are not drawn: what they would show is reported.
    """
    if progress is None or isinstance(progress, bool):
        disabled = not shows_bars(progress)

        class Bar(_Bar):
            def __init__(self, *args, **kwargs) -> None:
                kwargs.pop("name", None)  # huggingface_hub's own, unknown to tqdm
                super().__init__(*args, **{**kwargs, "disable": disabled})

        return Bar

    class Reporting(_Bar):
        def __init__(self, *args, **kwargs) -> None:
            kwargs.pop("name", None)
            # a disabled bar would not count
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            progress((self.desc or "downloading").rstrip(": "), int(self.n), int(self.total or 0))
            return shown

        def display(self, *args, **kwargs) -> None:
            """Draw nothing."""

    return Reporting
