"""The bridge: an engine on its own thread, streams of outputs on an event loop.

The only file that knows both. Commands go in through one queue; each step's outputs come back
through one `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import queue
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import attrs

from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.request import Request, RequestOutput
from mistralrs_sdk.errors import (
    EngineClosedError,
    EngineDeadError,
    InferenceError,
    MistralRsError,
    QueueFullError,
    RequestError,
)

logger = logging.getLogger("mistralrs_sdk.engine")

MAX_PENDING_REQUESTS = 10_000
"""Requests a model holds, waiting and running; further ones wait for a place."""

T = TypeVar("T")


@attrs.frozen
class _Add:
    request: Request


@attrs.frozen
class _Abort:
    request_id: int
    choice: int | None


@attrs.frozen(eq=False)
class _Call:
    function: Callable[[Engine], Any]
    future: asyncio.Future[Any]


@attrs.frozen
class _Shutdown:
    pass


class RequestStream:
    """The outputs of one request, in order, one list per wake-up.

    Never blocks the engine: what a slow reader has not taken yet is handed over merged, one output
    per choice.
    """

    def __init__(self, thread: EngineThread, request: Request) -> None:
        self._thread = thread
        self._request = request
        self._pending: list[RequestOutput] = []
        self._error: MistralRsError | None = None
        self._reader: asyncio.Future[None] | None = None
        """What `take` waits for; an `asyncio.Event` would cost each step 20 us more."""
        self._open_choices = request.sampling.n_choices

    @property
    def num_choices(self) -> int:
        return self._request.sampling.n_choices

    @property
    def finished(self) -> bool:
        """Whether every choice has ended and everything was taken."""
        return self._open_choices == 0 and not self._pending

    async def take(self) -> list[RequestOutput]:
        """Wait for news; empty once every choice has ended.

        Raises:
            EngineDeadError: the engine stopped.
            EngineClosedError: the model was closed.
            RuntimeError: another task is waiting here.
        """
        while not self._pending:
            if not self._open_choices:
                return []
            if self._error is not None:
                raise _again(self._error)
            if self._reader is not None:
                raise RuntimeError(
                    "two tasks read one stream: let one read it and share what comes"
                )
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        outputs, self._pending = self._pending, []
        return outputs if len(outputs) == 1 else _merge(outputs)

    def abort_choice(self, choice: int) -> None:
        """Tell the engine that no more of this choice is wanted."""
        if self._open_choices:
            self._thread.abort(self._request.id, choice)

    def close(self) -> None:
        """Abort what still runs; nothing comes after this."""
        if self._thread.forget(self._request.id):
            self._open_choices = 0
            self._pending.clear()
            self._wake()

    def _push(self, output: RequestOutput) -> None:
        self._pending.append(output)
        self._open_choices -= output.finish_reason is not None
        self._wake()

    def _fail(self, error: MistralRsError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _again(error: MistralRsError) -> MistralRsError:
    """A fresh copy to raise: one object raised in many tasks would mix their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


def _merge(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Join the outputs of each choice, in the order the choices first appear."""
    by_choice: dict[int, list[RequestOutput]] = {}
    for output in outputs:
        by_choice.setdefault(output.choice, []).append(output)
    return [
        parts[0]
        if len(parts) == 1
        else attrs.evolve(
            parts[-1],
            token_ids=tuple(itertools.chain.from_iterable(p.token_ids for p in parts)),
            logprobs=tuple(itertools.chain.from_iterable(p.logprobs for p in parts)),
        )
        for parts in by_choice.values()
    ]


class EngineThread:
    """Owns the engine and the thread it lives on. All methods are for the event loop's side."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        max_pending: int = MAX_PENDING_REQUESTS,
        max_open: int | None = None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`max_pending` requests are taken, further ones wait; beyond `max_open` choices, counted
        over all requests that have not ended, further ones are refused. `at_end` is called on the
        thread when the engine has ended, however it did."""
        self._make_engine: Callable[[], Engine] | None = make_engine
        self._at_end = at_end
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Call | _Shutdown] = queue.SimpleQueue()
        self._streams: dict[int, RequestStream] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._places = anyio.Semaphore(max_pending)
        self._max_open = max_open
        self.num_refused = 0
        """Choices that found the queue full."""
        self._ended: MistralRsError | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mistralrs-engine", daemon=True)

    async def start(self) -> None:
        """Build the engine on its thread.

        Raises:
            Exception: whatever building raised.
        """
        self._loop = asyncio.get_running_loop()
        self._built: asyncio.Future[None] = self._loop.create_future()
        _running.add(self)
        self._thread.start()
        try:
            await self._built
        except BaseException:
            self.stop()  # if we were cancelled, the thread ends when it has finished loading
            raise

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called: who is still loading may give up. Any thread may ask."""
        return self._stopping.is_set()

    async def submit(self, request: Request) -> RequestStream:
        """Hand a request to the engine, waiting for a place if too many are pending.

        Raises:
            EngineDeadError: the engine stopped.
            EngineClosedError: the model was closed.
            QueueFullError: `max_open` choices are waiting or running.
            RequestError: called from another event loop than the model was built in.
        """
        self._check_usable()
        self._check_queue(request)
        await self._places.acquire()
        try:  # again: others may have come while this one waited
            self._check_usable()
            self._check_queue(request)
        except MistralRsError:
            self._places.release()
            raise
        stream = self._streams[request.id] = RequestStream(self, request)
        self._inbox.put(_Add(request))
        return stream

    def abort(self, request_id: int, choice: int | None = None) -> None:
        """End a request as canceled; its stream sees that. Unknown ids are ignored."""
        self._inbox.put(_Abort(request_id, choice))

    def forget(self, request_id: int) -> bool:
        """Abort a request nobody listens to any more; False if it had ended."""
        if self._streams.pop(request_id, None) is None:
            return False
        self._places.release()
        self._inbox.put(_Abort(request_id, None))
        return True

    def forget_soon(self, request_id: int) -> None:
        """Like `forget`, from any thread (the garbage collector's)."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: everything has ended
            self._loop.call_soon_threadsafe(self.forget, request_id)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function(engine)` on the engine's thread, between two steps."""
        self._check_usable()
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(future)
        self._inbox.put(_Call(function, future))
        try:
            return await future
        finally:
            self._calls.discard(future)

    def stop(self) -> None:
        """Make the engine stop after its current step; open streams then fail. Any thread may."""
        self._stopping.set()
        self._inbox.put(_Shutdown())

    def join(self, timeout: float) -> None:
        """Wait for the thread to end, at most `timeout` seconds."""
        self._thread.join(timeout)

    async def aclose(self) -> None:
        """Stop the engine and wait for its thread to end."""
        self.stop()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.join)

    def _check_usable(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RequestError(
                "this model was built in another event loop: build it in the loop that uses it, "
                "or use BlockingModel, which any thread may call"
            )
        if self._ended is not None:
            raise _again(self._ended)

    def _check_queue(self, request: Request) -> None:
        if self._max_open is None or not self._streams:
            return
        open_choices = sum(stream.num_choices for stream in self._streams.values())
        if open_choices + request.sampling.n_choices > self._max_open:
            self.num_refused += request.sampling.n_choices
            raise QueueFullError(
                f"{open_choices} answers are running or waiting and {self._max_open} are allowed "
                "(max_num_seqs and max_queue together): try again later, or raise with_max_queue"
            )

    # Event loop side, called by the engine's thread

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            stream._push(output)
            if not stream._open_choices:
                del self._streams[output.request_id]
                self._places.release()

    def _refuse(self, request_id: int, error: MistralRsError) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._places.release()
            stream._fail(error)

    def _end(self, error: MistralRsError) -> None:
        self._ended = error
        for stream in self._streams.values():
            stream._fail(error)
            self._places.release()
        self._streams.clear()
        for future in self._calls:
            _resolve(future, error=_again(error))

    # Engine side

    def _run(self) -> None:
        assert self._make_engine is not None, "a thread runs once"
        try:
            engine = self._make_engine()
        except BaseException as error:
            self._post(_resolve, self._built, None, error)
            return
        finally:
            self._make_engine = None  # it holds the checkpoint
        self._post(_resolve, self._built)
        end: MistralRsError
        try:
            self._serve(engine)
            end = EngineClosedError("the model was closed; build it again to use it")
        except BaseException as error:
            logger.critical("the engine stopped", exc_info=error)
            end = EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}")
            end.__cause__ = error
            # The error is kept, and its frames (this one too) would keep the model and its cache.
            traceback.clear_frames(error.__traceback__)
        del engine
        self._post(self._end, end)
        self._at_end()

    def _serve(self, engine: Engine) -> None:
        inbox = self._inbox  # not self: the engine would keep its thread alive
        engine.is_wanted = lambda: not inbox.empty()
        while True:
            match self._next_command(block=not engine.has_work):
                case None:
                    if outputs := engine.step():
                        self._post(self._dispatch, outputs)
                case _Add(request):
                    self._add(engine, request)
                case _Abort(request_id, choice):
                    if outputs := engine.abort(request_id, choice):
                        self._post(self._dispatch, outputs)
                case _Call(function, future):
                    try:
                        self._post(_resolve, future, function(engine))
                    except Exception as error:
                        self._post(_resolve, future, None, error)
                case _Shutdown():
                    return

    def _next_command(self, *, block: bool) -> _Add | _Abort | _Call | _Shutdown | None:
        if not block and self._inbox.empty():  # nobody else takes anything out
            return None
        return self._inbox.get()

    def _add(self, engine: Engine, request: Request) -> None:
        try:
            engine.add(request)
        except Exception as error:
            logger.exception("request %d cannot be queued", request.id)
            refusal = InferenceError(f"the request failed: {type(error).__name__}: {error}")
            self._post(self._refuse, request.id, refusal)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        """Run `callback` on the event loop; a loop that was closed means shutdown."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._inbox.put(_Shutdown())


_running: weakref.WeakSet[EngineThread] = weakref.WeakSet()
EXIT_TIMEOUT_S = 30.0


@atexit.register
def _stop_all() -> None:
    """Stop every engine before the interpreter goes: a thread inside torch would abort it."""
    threads = [thread for thread in _running if thread.is_alive]
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(EXIT_TIMEOUT_S)


def _resolve(
    future: asyncio.Future[Any], value: Any = None, error: BaseException | None = None
) -> None:
    if future.done():  # whoever waited has gone
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
