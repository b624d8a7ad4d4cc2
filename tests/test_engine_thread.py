"""The bridge between the engine's thread and the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import anyio
import attrs
import pytest

from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.engine_thread import EngineThread, RequestStream
from mistralrs_sdk.errors import EngineClosedError, EngineDeadError, InferenceError, RequestError
from tests.engine_helpers import (
    FakeRunner,
    expected_tokens,
    make_request,
    make_scheduler,
)


@attrs.define
class SlowRunner(FakeRunner):
    """A fake model whose steps take time, so that tests can act between them."""

    step_s: float = 0.002

    def run(self, scheduled):
        time.sleep(self.step_s)
        return FakeRunner.run(self, scheduled)


def make_engine(runner=None, **limits) -> Engine:
    limits = {"num_blocks": 4000, **limits}
    return Engine(make_scheduler(**limits), runner or FakeRunner())


async def started(runner=None, *, max_pending: int = 100, **limits) -> EngineThread:
    thread = EngineThread(lambda: make_engine(runner, **limits), max_pending=max_pending)
    await thread.start()
    return thread


async def collect(stream: RequestStream) -> list[int]:
    tokens = []
    while outputs := await stream.take():
        for output in outputs:
            tokens += output.token_ids
    return tokens


async def idle(thread: EngineThread) -> None:
    """Wait until the engine has nothing left, and check that nothing is held."""
    with anyio.fail_after(10):
        while (stats := await thread.call(lambda e: e.scheduler.stats())).running + stats.waiting:
            await asyncio.sleep(0.002)
    assert stats.used_blocks == 0
    assert thread._streams == {}


async def test_many_requests_get_their_own_tokens_in_order():
    """Fifty streams at once, each with the tokens of its own prompt."""
    thread = await started()
    requests = [make_request(5, max_tokens=i + 1) for i in range(50)]
    streams = [await thread.submit(request) for request in requests]
    results = await asyncio.gather(*map(collect, streams))
    for request, tokens in zip(requests, results, strict=True):
        assert tokens == expected_tokens(request.prompt_ids, request.max_tokens)
    await idle(thread)
    await thread.aclose()
    assert not thread.is_alive


async def test_a_closed_stream_frees_its_blocks_within_one_step():
    """close() aborts; the engine is idle right after."""
    thread = await started(SlowRunner())
    stream = await thread.submit(make_request(5, max_tokens=10_000))
    await stream.take()
    stream.close()
    await idle(thread)
    assert await stream.take() == []
    await thread.aclose()


async def test_a_reader_that_waits_is_woken_when_another_task_closes_the_stream():
    """take() ends instead of waiting for ever."""
    thread = await started(SlowRunner(step_s=0.2))
    stream = await thread.submit(make_request(5, max_tokens=10_000))
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0.01)
    stream.close()
    assert await asyncio.wait_for(reader, 10) == []
    await thread.aclose()


async def test_a_stream_has_one_reader():
    """A second one is refused while the first waits; that one gets what comes."""
    thread = await started(SlowRunner(step_s=0.2))
    stream = await thread.submit(make_request(5, max_tokens=1))
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0.01)
    with pytest.raises(RuntimeError, match="two tasks read one stream"):
        await stream.take()
    assert len(await asyncio.wait_for(reader, 10)) == 1
    await thread.aclose()


async def test_a_reader_that_gave_up_misses_nothing():
    """What comes after a cancelled take() is there for the next one."""
    thread = await started(SlowRunner(step_s=0.05))
    request = make_request(5, max_tokens=3)
    stream = await thread.submit(request)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.take(), 0.01)
    assert await collect(stream) == expected_tokens(request.prompt_ids, 3)
    await thread.aclose()


async def test_a_slow_reader_gets_everything_merged_and_stalls_nobody():
    """Outputs that pile up are handed over as one; others go on meanwhile."""
    thread = await started()
    slow_request, fast_request = make_request(5, max_tokens=300), make_request(5, max_tokens=300)
    slow = await thread.submit(slow_request)
    fast = await thread.submit(fast_request)
    assert await collect(fast) == expected_tokens(fast_request.prompt_ids, 300)
    await idle(thread)
    (merged,) = await slow.take()
    assert list(merged.token_ids) == expected_tokens(slow_request.prompt_ids, 300)
    assert merged.finish_reason == "length"
    assert await slow.take() == []
    await thread.aclose()


async def test_a_crash_fails_every_stream_and_every_later_call():
    """Open streams, later requests and calls get EngineDeadError with the cause chained."""
    all_there = threading.Event()
    runner = FakeRunner(fail_when=lambda n: all_there.wait(10))
    thread = await started(runner, max_num_seqs=1)
    streams = [await thread.submit(make_request(5)) for _ in range(8)]
    all_there.set()
    outcomes = await asyncio.gather(*map(collect, streams), return_exceptions=True)
    dead = [o for o in outcomes if isinstance(o, EngineDeadError)]
    assert dead
    assert all(isinstance(error.__cause__, RuntimeError) for error in dead)
    with pytest.raises(EngineDeadError, match="the kernel died"):
        await thread.submit(make_request(5))
    with pytest.raises(EngineDeadError):
        await thread.call(lambda engine: None)
    await thread.aclose()
    assert not thread.is_alive


async def test_closing_ends_open_streams_with_a_typed_error():
    """aclose during a generation: EngineClosedError for who reads, thread joined."""
    thread = await started(SlowRunner())
    stream = await thread.submit(make_request(5, max_tokens=10_000))
    await stream.take()
    await thread.aclose()
    with pytest.raises(EngineClosedError):
        await collect(stream)
    with pytest.raises(EngineClosedError):
        await thread.submit(make_request(5))
    assert not thread.is_alive
    await thread.aclose()


async def test_an_error_while_building_reaches_the_caller():
    """start() raises what building raised; the thread ends."""

    def broken() -> Engine:
        raise ValueError("no such model")

    thread = EngineThread(broken)
    with pytest.raises(ValueError, match="no such model"):
        await thread.start()
    with anyio.fail_after(10):
        while thread.is_alive:
            await asyncio.sleep(0.001)


async def test_a_cancelled_build_leaves_no_thread():
    """Cancelled while loading, the thread ends as soon as it has loaded."""

    def slow() -> Engine:
        time.sleep(0.05)
        return make_engine()

    thread = EngineThread(slow)
    with anyio.move_on_after(0.01) as scope:
        await thread.start()
    assert scope.cancelled_caught
    with anyio.fail_after(10):
        while thread.is_alive:
            await asyncio.sleep(0.001)


async def test_requests_beyond_the_limit_wait_for_a_place():
    """max_pending bounds what the engine holds; waiting can be cancelled and costs no place."""
    thread = await started(SlowRunner(), max_pending=1)
    first = await thread.submit(make_request(5, max_tokens=10_000))
    with anyio.move_on_after(0.02) as scope:
        await thread.submit(make_request(5))
    assert scope.cancelled_caught
    first.close()
    request = make_request(5, max_tokens=2)
    assert await collect(await thread.submit(request)) == expected_tokens(request.prompt_ids, 2)
    await thread.aclose()


async def test_abort_from_elsewhere_ends_the_stream_as_canceled():
    """The reader sees finish_reason "canceled"; unknown ids are ignored."""
    thread = await started(SlowRunner())
    request = make_request(5, max_tokens=10_000)
    stream = await thread.submit(request)
    await stream.take()
    thread.abort(request.id)
    thread.abort(987_654)
    reasons = [output.finish_reason for output in await stream.take()]
    while outputs := await stream.take():
        reasons += [output.finish_reason for output in outputs]
    assert reasons[-1] == "canceled"
    await idle(thread)
    await thread.aclose()


async def test_a_request_can_be_forgotten_from_any_thread():
    """The garbage collector may run anywhere."""
    thread = await started(SlowRunner())
    request = make_request(5, max_tokens=10_000)
    await thread.submit(request)
    other = threading.Thread(target=thread.forget_soon, args=(request.id,))
    other.start()
    other.join()
    await asyncio.sleep(0)
    await idle(thread)
    await thread.aclose()


async def test_a_model_of_another_loop_is_refused():
    """Submitting from a foreign loop is an error that names the way out."""
    thread = await started()

    def elsewhere() -> None:
        with pytest.raises(RequestError, match="BlockingModel"):
            asyncio.run(_submit(thread))

    await anyio.to_thread.run_sync(elsewhere)
    await thread.aclose()


async def _submit(thread: EngineThread) -> None:
    await thread.submit(make_request(5))


def test_a_loop_that_closes_without_aclose_stops_the_engine():
    """The engine notices with its next message and ends its thread."""
    holder: list[EngineThread] = []

    async def leave() -> None:
        holder.append(await started(SlowRunner()))
        await holder[0].submit(make_request(5, max_tokens=10_000))

    asyncio.run(leave())
    deadline = time.monotonic() + 10
    while holder[0].is_alive and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not holder[0].is_alive


async def test_threads_and_streams_do_not_pile_up():
    """After many requests and cancels nothing but the one thread is left."""
    before = threading.active_count()
    thread = await started(SlowRunner(step_s=0.0005))
    for i in range(60):
        stream = await thread.submit(make_request(5, max_tokens=50))
        await stream.take()
        if i % 3:
            stream.close()
        else:
            await collect(stream)
    await idle(thread)
    await thread.aclose()
    gc.collect()
    assert threading.active_count() <= before + 1  # anyio keeps a worker thread for a while


async def test_a_request_that_cannot_be_queued_fails_alone(monkeypatch):
    """An error while adding is that request's InferenceError; the engine goes on."""
    thread = await started()
    bad, good = make_request(5), make_request(5, max_tokens=3)
    add = Engine.add

    def picky(self, request):
        if request is bad:
            raise TypeError("odd request")
        add(self, request)

    monkeypatch.setattr(Engine, "add", picky)
    with pytest.raises(InferenceError, match="odd request"):
        await collect(await thread.submit(bad))
    assert await collect(await thread.submit(good)) == expected_tokens(good.prompt_ids, 3)
    await idle(thread)
    await thread.aclose()
