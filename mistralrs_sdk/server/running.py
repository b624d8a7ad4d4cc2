"""How a process runs the app with uvicorn: its event loop, its parser, its garbage collection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette

from mistralrs_sdk import ConfigError
from mistralrs_sdk.server.settings import ServerSettings

T = TypeVar("T")


def run_server(serving: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that builds models and serves them, for a process that does nothing else.

    It runs on uvloop where that is installed. asyncio lets go of the interpreter's lock in each
    write to a socket, and then waits for the engine's thread to give it back; uvloop does not.
    What exists by now, torch above all, is left out of later garbage collections: walking through
    it stops every stream. Models come later, so an unloaded one is still collected.
    """
    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(serving)
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def listening_on(host: str, port: int) -> Iterator[socket.socket]:
    """A socket bound to the place before a model is loaded; who connects too early is refused.

    Raises:
        ConfigError: the place cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio looks for this protocol before it turns Nagle's algorithm off, without which the
    # first chunk waits 40 ms for the client's system to confirm the head
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} cannot be used: {error}; choose another with --port"
            ) from error
        yield place


def uvicorn_config(app: Starlette, settings: ServerSettings) -> uvicorn.Config:
    """Return uvicorn's settings; the host and port are those of the socket it is given."""
    return uvicorn.Config(
        app,
        # httptools is faster, but drops the body of a request that offers HTTP/2, as Java's client
        # does, and bounds no header
        http="h11",
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=round(settings.drain_seconds),
        server_header=False,
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop
