"""What a model's event loop is spared, and what must run on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

from mistralrs_sdk.config import Progress

T = TypeVar("T")


async def off_loop_if(long: bool, function: Callable[[], T]) -> T:
    """Run it here, or on a worker thread if it would hold up the event loop."""
    return await anyio.to_thread.run_sync(function) if long else function()


def on_loop(progress: Progress | None, loop: asyncio.AbstractEventLoop) -> Progress | None:
    """Make a progress callback run on the event loop, whatever thread reports."""
    if progress is None or isinstance(progress, bool):
        return progress

    def report(what: str, done: int, total: int) -> None:
        loop.call_soon_threadsafe(progress, what, done, total)

    return report
