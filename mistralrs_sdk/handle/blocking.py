"""`BlockingModel`: the same model for code without an event loop, or inside one it must not use."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from mistralrs_sdk.chat.requests import RequestBuilder, RequestLike
from mistralrs_sdk.chat.responses import CompletionChunkResponse
from mistralrs_sdk.errors import EngineClosedError
from mistralrs_sdk.handle.model import Model
from mistralrs_sdk.sampling_params import SamplingParams
from mistralrs_sdk.tools.loop import StreamItem

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Buildable(Protocol):
    """A builder of a `Model`."""

    async def build(self) -> Model:
        """Load the model."""
        ...


class _Stream(Protocol[T_co]):
    """What comes piece by piece."""

    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> T_co: ...
    async def aclose(self) -> None: ...


class _Blocking:
    """A model and the loop it lives in."""

    def __init__(self, model: Model, loop: _LoopThread) -> None:
        self._model = model
        self._loop = loop


def _waits(
    method: Callable[Concatenate[Model, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Blocking, P], T]:
    """The method as one that waits for its result; types and docstring are the method's own."""

    @functools.wraps(method)
    def call(self: _Blocking, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(method(self._model, *args, **kwargs))

    return call


def _calls(method: Callable[Concatenate[Model, P], T]) -> Callable[Concatenate[_Blocking, P], T]:
    """The same for a method that does not wait: called in the loop that the model belongs to."""

    @functools.wraps(method)
    def call(self: _Blocking, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._loop.stopped:  # what is known of a closed model stays known
            return method(self._model, *args, **kwargs)

        async def in_loop() -> T:
            return method(self._model, *args, **kwargs)

        return self._loop.run(in_loop())

    return call


class BlockingModel(_Blocking):
    """A `Model` with plain methods, for scripts, notebooks and threads.

    It keeps an event loop of its own on a thread, so it also works where a loop already runs
    (which it then blocks, as any blocking call would). May be used from several threads, not from
    coroutines in its own loop: a tool callback that uses it must be a plain function. A script that
    ends without `close()` ends all the same. Its methods are those of `Model`, which documents
    them; streams are iterators here.
    """

    @classmethod
    def from_builder(cls, builder: Buildable) -> Self:
        """Load the model of any builder.

        Raises:
            ModelLoadError, ConfigError: as the builder's `build()`.
        """
        loop = _LoopThread()
        try:
            return cls(loop.run(builder.build()), loop)
        except BaseException:
            loop.stop()
            raise

    from_auto_builder = from_builder

    def stream_chat_request(
        self, request: RequestLike, *, model_id: str | None = None
    ) -> Iterator[StreamItem]:
        """Answer a chat in chunks; closing or dropping the iterator aborts the request.

        If calls of tools are executed here, what they do comes between the chunks.

        Raises:
            RequestError: as `Model`, before anything runs.
        """
        answer = self._model.stream_chat_request(request, model_id=model_id)
        return self._items(self._loop.run(answer))

    def stream_chat_request_with_model(
        self, request: RequestLike, model_id: str | None
    ) -> Iterator[StreamItem]:
        """As `stream_chat_request`."""
        return self.stream_chat_request(request, model_id=model_id)

    def stream_completion_request(
        self,
        prompt: str | Sequence[int],
        request: RequestBuilder | SamplingParams | None = None,
        *,
        echo: bool = False,
        model_id: str | None = None,
    ) -> Iterator[CompletionChunkResponse]:
        """Continue a raw prompt in chunks; closing or dropping the iterator aborts the request.

        Raises:
            RequestError: as `Model`, before anything runs.
        """
        answer = self._model.stream_completion_request(
            prompt, request, echo=echo, model_id=model_id
        )
        return self._items(self._loop.run(answer))

    def _items(self, stream: _Stream[T]) -> Iterator[T]:
        try:
            while (item := self._loop.run(_next_item(stream))) is not None:
                yield item
        finally:
            self._loop.start(stream.aclose())  # not waited for: the interpreter may be ending

    # Asking

    chat = _waits(Model.chat)
    send_chat_request = _waits(Model.send_chat_request)
    send_chat_request_with_model = _waits(Model.send_chat_request_with_model)
    send_raw_chat_request = _waits(Model.send_raw_chat_request)
    send_raw_chat_request_with_model = _waits(Model.send_raw_chat_request_with_model)
    generate_structured = _waits(Model.generate_structured)
    generate_structured_with_model = _waits(Model.generate_structured_with_model)
    send_completion_request = _waits(Model.send_completion_request)
    send_embedding_request = _waits(Model.send_embedding_request)
    generate_embedding = _waits(Model.generate_embedding)
    generate_embedding_with_model = _waits(Model.generate_embedding_with_model)
    generate_embeddings = _waits(Model.generate_embeddings)
    generate_embeddings_with_model = _waits(Model.generate_embeddings_with_model)
    abort = _calls(Model.abort)
    tokenize = _waits(Model.tokenize)
    tokenize_with_model = _waits(Model.tokenize_with_model)
    tokenize_with_reasoning_effort = _waits(Model.tokenize_with_reasoning_effort)
    tokenize_with_reasoning_effort_and_model = _waits(
        Model.tokenize_with_reasoning_effort_and_model
    )
    detokenize = _waits(Model.detokenize)
    detokenize_with_model = _waits(Model.detokenize_with_model)
    render_chat = _calls(Model.render_chat)

    # Looking and changing

    config = _calls(Model.config)
    config_with_model = _calls(Model.config_with_model)
    max_sequence_length = _calls(Model.max_sequence_length)
    max_sequence_length_with_model = _calls(Model.max_sequence_length_with_model)
    describe = _calls(Model.describe)
    stats = _waits(Model.stats)
    metrics = _waits(Model.metrics)
    clear_prefix_cache = _waits(Model.clear_prefix_cache)
    re_isq_model = _waits(Model.re_isq_model)
    re_isq_model_with_model = _waits(Model.re_isq_model_with_model)

    # Adapters

    load_lora_adapter = _waits(Model.load_lora_adapter)
    load_lora_adapter_with_model = _waits(Model.load_lora_adapter_with_model)
    load_lora_adapter_with_policy = _waits(Model.load_lora_adapter_with_policy)
    load_lora_adapter_with_model_and_policy = _waits(Model.load_lora_adapter_with_model_and_policy)
    unload_lora_adapter = _waits(Model.unload_lora_adapter)
    unload_lora_adapter_with_model = _waits(Model.unload_lora_adapter_with_model)
    unload_lora_adapter_if_generation = _waits(Model.unload_lora_adapter_if_generation)
    unload_lora_adapter_with_model_if_generation = _waits(
        Model.unload_lora_adapter_with_model_if_generation
    )
    list_lora_adapters = _waits(Model.list_lora_adapters)
    list_lora_adapters_with_model = _waits(Model.list_lora_adapters_with_model)
    lora_adapter_status = _waits(Model.lora_adapter_status)
    lora_adapter_status_with_model = _waits(Model.lora_adapter_status_with_model)

    # Sessions and tools

    export_session = _calls(Model.export_session)
    import_session = _calls(Model.import_session)
    delete_session = _calls(Model.delete_session)
    fork_session = _calls(Model.fork_session)
    list_session_ids = _calls(Model.list_session_ids)
    list_mcp_tools = _calls(Model.list_mcp_tools)

    # Several models

    list_models = _calls(Model.list_models)
    list_models_with_status = _calls(Model.list_models_with_status)
    is_model_loaded = _calls(Model.is_model_loaded)
    get_default_model_id = _calls(Model.get_default_model_id)
    set_default_model_id = _calls(Model.set_default_model_id)
    add_model = _waits(Model.add_model)
    remove_model = _waits(Model.remove_model)
    unload_model = _waits(Model.unload_model)
    reload_model = _waits(Model.reload_model)

    # What mistral.rs does and this package does not: each says so

    generate_image = _waits(Model.generate_image)
    generate_image_with_model = _waits(Model.generate_image_with_model)
    generate_speech = _waits(Model.generate_speech)
    generate_speech_with_model = _waits(Model.generate_speech_with_model)
    begin_calibration = _waits(Model.begin_calibration)
    begin_calibration_with_model = _waits(Model.begin_calibration_with_model)
    calibration_status = _waits(Model.calibration_status)
    calibration_status_with_model = _waits(Model.calibration_status_with_model)
    apply_calibration = _waits(Model.apply_calibration)
    apply_calibration_with_model = _waits(Model.apply_calibration_with_model)
    find_file = _calls(Model.find_file)

    # Ending

    def inner(self) -> Model:
        """Return the asynchronous model; it belongs to this object's event loop."""
        return self._model

    def close(self) -> None:
        """Stop the engines and free the models; open requests fail.

        A second call does nothing; one beside the first waits for it.
        """
        self._loop.check_outside()
        with self._loop.ending:
            if not self._loop.stopped:
                try:
                    self._loop.run(self._model.aclose())
                finally:
                    self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        loop = getattr(self, "_loop", None)  # missing if __init__ never ran
        if loop is not None:
            loop.stop(wait=False)

    def __repr__(self) -> str:
        return f"<BlockingModel of {self._model!r}>"


class _LoopThread:
    """An event loop on a daemon thread: a process that forgot to close it ends all the same."""

    def __init__(self) -> None:
        self.stopped = False
        self.ending = threading.Lock()
        """Held while the model is closed."""
        self._starting = threading.Lock()
        """Held while work is handed over, or no more is taken: nothing slips in between."""
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(
            target=_run_loop, args=(self._loop, self._end), name="mistralrs-blocking", daemon=True
        )
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there and wait; whatever interrupts the wait cancels it.

        Raises:
            EngineClosedError: the loop has stopped.
            RuntimeError: called in the loop itself.
        """
        try:
            self.check_outside()
        except RuntimeError:
            coroutine.close()
            raise
        future = self.start(coroutine)
        if future is None:
            raise EngineClosedError(_CLOSED)
        try:
            return future.result()
        except BaseException as error:
            future.cancel()
            if isinstance(error, CancelledError) and self.stopped:
                raise EngineClosedError(_CLOSED) from None
            raise

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T] | None:
        """Run it there without waiting; None if the loop has stopped."""
        with self._starting:
            if not self.stopped:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        return None

    def stop(self, *, wait: bool = True) -> None:
        """Cancel what runs there and end the loop. Harmless when repeated."""
        with self._starting:
            if not self.stopped:
                self.stopped = True
                self._loop.call_soon_threadsafe(self._end.set)
        if wait:
            self._thread.join()

    def check_outside(self) -> None:
        """Refuse to wait in the loop for the loop.

        Raises:
            RuntimeError: this is its thread.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a BlockingModel was called in its own event loop and would wait for itself for "
                "ever: make the callback a plain function, or await the methods of inner()"
            )


_CLOSED = "the model was closed; build it again to use it"
_GRACE = 1.0
"""Seconds that cancelled tasks have before the loop goes without them."""


def _run_loop(loop: asyncio.AbstractEventLoop, end: asyncio.Event) -> None:
    """Serve until `end`, then leave nobody waiting for what will not come."""

    async def serve() -> None:
        await end.wait()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_GRACE)
        await asyncio.sleep(0)  # what they told other threads is on its way

    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(serve())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _next_item(stream: _Stream[T]) -> T | None:
    return await anext(stream, None)
