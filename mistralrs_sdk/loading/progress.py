"""Progress of long loads: bars on a terminal, a callback, or nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from tqdm import tqdm

from mistralrs_sdk.config import Progress


def shows_bars(progress: Progress | None) -> bool:
    """Whether bars are drawn: when asked for, or by default when stderr is a terminal."""
    return sys.stderr.isatty() if progress is None else progress is True


@contextlib.contextmanager
def progress_of(
    progress: Progress | None, what: str, *, total: int
) -> Iterator[Callable[[int], None]]:
    """Report `total` units of `what`; yields the function that adds to the units done."""
    if progress is not None and not isinstance(progress, bool):
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress(what, done, total)

        progress(what, 0, total)
        yield advance
        return
    with tqdm(total=total, desc=what, disable=not shows_bars(progress), leave=False) as bar:
        yield lambda count: bar.update(count) and None


def download_bar(progress: Progress | None) -> type[tqdm]:
    """Return the bar class huggingface_hub shall draw with."""
    if progress is not None and not isinstance(progress, bool):
        report = progress

        class Reporting(tqdm):
            def __init__(self, *args, **kwargs) -> None:
                kwargs["disable"] = False
                kwargs["file"] = _Nowhere()
                kwargs.pop("name", None)
                super().__init__(*args, **kwargs)

            def update(self, n: float | None = 1) -> bool | None:
                shown = super().update(n)
                report(str(self.desc or "downloading"), int(self.n), int(self.total or 0))
                return shown

        return Reporting

    disabled = not shows_bars(progress)

    class Bar(tqdm):
        def __init__(self, *args, **kwargs) -> None:
            kwargs["disable"] = disabled
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs)

    return Bar


class _Nowhere:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
