"""Leaving early, failing, closing: nobody else notices and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import subprocess
import sys
import threading
import weakref

import anyio
import pytest

from mistralrs_sdk import (
    BlockingModel,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    InferenceError,
    MemoryGpuConfig,
    ModelBuilder,
    ModelLoadError,
    PagedAttentionMetaBuilder,
    RequestError,
)
from tests.model_helpers import (
    assert_idle,
    continue_ids,
    endless,
    expected,
    greedy,
    prompt,
    resident_bytes,
    tiny_builder,
    tiny_folder,
)

IDS = prompt(9)


@pytest.fixture
async def model():
    async with await tiny_builder().build() as model:
        yield model
        await assert_idle(model)


async def undisturbed(model) -> asyncio.Task:
    """A bystander whose text must not change."""
    return asyncio.create_task(continue_ids(model, IDS, 48))


async def test_breaking_out_of_a_stream_aborts_the_request(model):
    """Leaving the context manager early frees the blocks; the bystander's tokens are the same."""
    bystander = await undisturbed(model)
    for _ in range(10):
        async with await model.stream_chat_request(endless()) as stream:
            async for _chunk in stream:
                break
    assert await bystander == expected("llama", tuple(IDS), 48)


async def test_a_dropped_stream_aborts_the_request(model):
    """A stream that is forgotten without aclose is aborted when it is collected."""
    stream = await model.stream_chat_request(endless())
    await anext(stream)
    del stream
    gc.collect()
    await assert_idle(model)


async def test_cancelling_a_task_inside_anext_aborts_the_request(model):
    """Cancelling who waits for the next chunk, or for the whole answer."""
    for call in (model.send_chat_request, model.chat):
        task = asyncio.create_task(call(endless() if call == model.send_chat_request else "hi"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await assert_idle(model)


async def test_a_timeout_aborts_the_request(model):
    """wait_for leaves nothing running."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(model.send_chat_request(endless()), 0.01)
    await assert_idle(model)


async def test_abort_by_id_ends_the_stream_as_canceled(model):
    """From any task; the iterator ends with what had come."""
    stream = await model.stream_chat_request(endless())
    await anext(stream)
    model.abort(stream.id)
    with anyio.fail_after(10):
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "canceled"
    assert chunks[-1].usage is not None
    model.abort(stream.id)
    with pytest.raises(RequestError, match="no response id"):
        model.abort("nonsense")


async def test_two_hundred_cancels_leave_nothing_behind(model):
    """Every way of leaving, many times: no tasks, no threads, no blocks pile up."""
    threads = threading.active_count()
    for i in range(200):
        stream = await model.stream_chat_request(endless(f"request {i}"))
        if i % 4 == 0:
            await anext(stream)
        if i % 4 == 1:
            model.abort(stream.id)
        if i % 4 == 2:
            task = asyncio.create_task(stream.collect())
            await asyncio.sleep(0)
            task.cancel()
        await stream.aclose()
        del stream
    await assert_idle(model)
    assert threading.active_count() <= threads
    assert len(asyncio.all_tasks()) <= 2


async def test_a_cancelled_waiting_request_frees_its_place():
    """max_num_seqs 1: who waits can leave; the others run in order."""
    async with await tiny_builder().with_max_num_seqs(1).build() as model:
        running = await model.stream_chat_request(endless())
        await anext(running)
        waiting = await model.stream_chat_request(endless())
        await waiting.aclose()
        last = asyncio.create_task(continue_ids(model, IDS, 8))
        await running.aclose()
        assert await last == expected("llama", tuple(IDS), 8)
        await assert_idle(model)


async def test_one_failing_step_ends_its_requests_and_no_others(model, monkeypatch):
    """Who was in the step gets InferenceError with the partial answer; later requests run."""
    engine = await model.inner().thread.call(lambda engine: engine)
    run, steps = engine.runner.run, 0

    def broken(scheduled):
        nonlocal steps
        steps += 1
        if steps == 5:
            raise RuntimeError("injected")
        return run(scheduled)

    monkeypatch.setattr(type(engine.runner), "run", lambda self, scheduled: broken(scheduled))
    with pytest.raises(InferenceError, match="injected") as caught:
        await model.send_chat_request(endless().set_sampler_max_len(40))
    partial = caught.value.partial_response
    assert partial.choices[0].finish_reason == "error"
    assert partial.usage.completion_tokens == 4
    assert await continue_ids(model, IDS, 8) == expected("llama", tuple(IDS), 8)


async def test_an_engine_that_keeps_failing_dies_with_its_cause(monkeypatch):
    """Every pending and later request gets EngineDeadError within a second; aclose still works."""
    async with await tiny_builder().with_max_num_seqs(1).build() as model:
        engine = await model.inner().thread.call(lambda engine: engine)

        def broken(self, scheduled):
            raise RuntimeError("injected")

        monkeypatch.setattr(type(engine.runner), "run", broken)
        with anyio.fail_after(10):
            outcomes = await asyncio.gather(
                *(model.send_chat_request(endless()) for _ in range(6)), return_exceptions=True
            )
        assert {type(o) for o in outcomes} == {InferenceError, EngineDeadError}
        with pytest.raises(EngineDeadError, match="injected") as caught:
            await model.chat("hi")
        assert isinstance(caught.value.__cause__, RuntimeError)


async def test_closing_during_a_generation(monkeypatch):
    """Open streams fail with EngineClosedError, later calls too; the thread is gone."""
    model = await tiny_builder().build()
    stream = await model.stream_chat_request(endless())
    await anext(stream)
    await model.aclose()
    with pytest.raises(EngineClosedError):
        await stream.collect()
    with pytest.raises(EngineClosedError, match="build it again"):
        await model.chat("hi")
    await model.aclose()
    assert not any(t.name == "mistralrs-engine" for t in threading.enumerate())
    assert "closed" in repr(model)


async def test_a_model_that_is_never_closed_warns_and_stops():
    """Dropping it is a ResourceWarning; its thread ends."""
    model = await tiny_builder().build()
    holder = [model]
    del model
    with pytest.warns(ResourceWarning, match="never closed"):
        holder.clear()
    with anyio.fail_after(10):
        while any(t.name == "mistralrs-engine" for t in threading.enumerate()):
            await asyncio.sleep(0.005)


async def test_two_models_in_one_process_do_not_mix():
    """Different architectures side by side, in one loop."""
    async with await tiny_builder("llama").build() as a, await tiny_builder("qwen3").build() as b:
        results = await asyncio.gather(
            *(continue_ids(m, IDS, 12) for m in (a, b, a, b, a, b, a, b))
        )
    assert results[::2] == [expected("llama", tuple(IDS), 12)] * 4
    assert results[1::2] == [expected("qwen3", tuple(IDS), 12)] * 4


async def test_ten_cycles_leave_memory_and_threads_flat():
    """Load, run, close ten times: resident memory does not grow, no thread is left."""
    sizes = []
    threads = threading.active_count()
    for _ in range(10):
        async with await tiny_builder().build() as model:
            await continue_ids(model, IDS, 4)
        gc.collect()
        sizes.append(resident_bytes())
    # One reading may be high without a leak: the lowest of the last against the highest before.
    assert min(sizes[-3:]) < 1.05 * max(sizes[2:5])
    assert threading.active_count() <= threads + 1


async def test_a_failed_build_leaves_no_thread():
    """Five broken checkpoints in a row: typed errors, nothing running."""
    for _ in range(5):
        with pytest.raises(ModelLoadError):
            await ModelBuilder("./no/such/folder").build()
    assert not any(t.name == "mistralrs-engine" for t in threading.enumerate())


async def test_a_pool_too_small_for_the_asked_context_is_refused_at_build():
    """The error names the setting, its value and the knobs."""
    builder = tiny_builder(kv_tokens=64).with_max_model_len(256)
    with pytest.raises(
        ConfigError, match=r"64 tokens.*256(.|\n)*MbAmount.*Utilization.*ContextSize"
    ):
        await builder.build()


async def test_a_pool_smaller_than_the_models_context_shortens_it(caplog):
    """Not asked for a length, the context is what the pool holds, with a warning."""
    async with await tiny_builder(kv_tokens=64).build() as model:
        assert model.max_sequence_length() == 64
        assert "limited to 64" in caplog.text
        assert "limited by the KV cache" in model.describe()


async def test_describe_shows_every_setting_and_its_origin():
    """Names, values and origins: user, model, default or the machine."""
    builder = tiny_builder().with_dtype("auto").with_max_num_seqs(5)
    async with await builder.build() as model:
        lines = {line.split("  ")[0]: line for line in model.describe().splitlines()}
    assert re.search(r"\b5 +user$", lines["max_num_seqs"])
    assert lines["max_num_batched_tokens"].endswith("default")
    assert re.search(r"\bf32 +automatic on cpu\b", lines["dtype"])
    assert "512" in lines["max_model_len"]
    assert "user" in lines["device"]


async def test_a_failing_progress_callback_does_not_stop_the_load():
    """It is called on the event loop, with what is loaded and how far it is."""
    seen = []
    async with await tiny_builder().with_progress(lambda *step: seen.append(step)).build():
        await asyncio.sleep(0)
    assert seen[0][1] == 0
    assert seen[-1][1] == seen[-1][2] > 0


def test_the_blocking_model_works_without_a_loop():
    """Plain calls, streaming, closing twice."""
    with BlockingModel.from_builder(tiny_builder()) as model:
        request = endless().set_sampler_max_len(8)
        whole = model.send_chat_request(request)
        chunks = list(model.stream_chat_request(request))
        pieces = [chunk.choices[0].delta.content for chunk in chunks]
        assert "".join(pieces) == whole.choices[0].message.content
        assert model.detokenize(model.tokenize("abc")).endswith("abc")
        for chunk in model.stream_chat_request(endless()):
            assert chunk.id
            break
    model.close()
    assert not any(t.name == "mistralrs-engine" for t in threading.enumerate())


async def test_the_blocking_model_works_inside_a_running_loop():
    """As in a notebook: it has its own loop on its own thread."""
    with BlockingModel.from_builder(tiny_builder()) as model:
        assert isinstance(model.chat("hi"), str)


def test_a_blocking_model_that_cannot_be_built_leaves_no_thread():
    """The error passes through and the loop's thread ends."""
    with pytest.raises(ModelLoadError):
        BlockingModel.from_builder(ModelBuilder("./no/such/folder"))


async def test_max_len_beyond_the_context_is_cut_to_it():
    """A request may ask for more than fits; it ends with the context."""
    async with await tiny_builder().with_max_model_len(32).build() as model:
        response = await model.send_completion_request(IDS, greedy(1000))
        assert response.usage.total_tokens == 32


async def test_a_dtype_is_obeyed():
    """with_dtype says what the weights and the KV cache are."""
    folder = tiny_folder()
    for dtype, size in (("bf16", 2), ("f16", 2), ("f32", 4)):
        builder = ModelBuilder(folder).with_force_cpu().with_num_threads(1).with_dtype(dtype)
        async with await builder.build() as model:
            assert model.inner().info.weight_bytes == size * model.inner().info.num_parameters
            assert (
                await model.send_completion_request(IDS, greedy(3))
            ).usage.completion_tokens == 3


async def test_a_memory_size_that_is_not_there_is_refused():
    """Asking for more RAM than the machine has fails at build, with both numbers."""
    paged = PagedAttentionMetaBuilder().with_gpu_memory(MemoryGpuConfig.MbAmount(10**9)).build()
    with pytest.raises(ModelLoadError, match="GiB"):
        await ModelBuilder(tiny_folder()).with_paged_attn(paged).build()


async def test_a_chunk_limit_on_a_cpu_warns_that_it_has_no_effect(caplog):
    """Set to another value than the default it is not silently ignored; describe() says so too."""
    async with await tiny_builder().with_max_prefill_chunk_tokens(64).build() as model:
        assert "max_prefill_chunk_tokens (64) has no effect on a CPU" in caplog.text
        assert "no effect on a CPU" in model.describe()


async def test_an_answer_that_ends_in_an_error_keeps_all_that_came_before(monkeypatch):
    """Tokens that were computed but not read yet are in partial_response too."""
    async with await tiny_builder().build() as model:
        engine = await model.inner().thread.call(lambda engine: engine)
        run, steps = engine.runner.run, []

        def broken(self, scheduled):
            steps.append(1)
            if len(steps) == 9:
                raise RuntimeError("injected")
            return run(scheduled)

        stream = await model.stream_chat_request(endless())
        await anext(stream)
        monkeypatch.setattr(type(engine.runner), "run", broken)
        await assert_idle(model)
        with pytest.raises(InferenceError) as caught:
            await stream.collect()
        assert caught.value.partial_response.usage.completion_tokens >= 9


async def test_collecting_after_aclose_says_canceled():
    """What was read is returned; the finish reason is canceled, not error."""
    async with await tiny_builder().build() as model:
        stream = await model.stream_chat_request(endless())
        await anext(stream)
        await stream.aclose()
        assert (await stream.collect()).choices[0].finish_reason == "canceled"


async def test_nothing_of_the_checkpoint_stays_open_after_loading():
    """The files' tensors are let go once the weights are read."""
    async with await tiny_builder().build() as model:
        assert model.inner()._checkpoint.tensors == {}
        assert model.inner().thread._make_engine is None


async def test_a_dead_engine_lets_the_model_go(monkeypatch):
    """The chained cause keeps no frame that holds the weights."""
    # pytest keeps the tracebacks that are logged
    monkeypatch.setattr(logging.getLogger("mistralrs_sdk.engine"), "disabled", True)
    model = await tiny_builder().with_max_num_seqs(1).build()
    runner = weakref.ref((await model.inner().thread.call(lambda engine: engine)).runner)

    def broken(self, scheduled):
        raise RuntimeError("injected")

    monkeypatch.setattr(type(runner()), "run", broken)
    calls = (model.send_chat_request(endless()) for _ in range(4))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(outcome, EngineDeadError) for outcome in outcomes)
    del outcomes, calls
    await model.aclose()
    gc.collect()
    assert runner() is None


def test_closing_a_blocking_model_with_an_open_stream_ends():
    """The open iterator does not hold close() up; it then raises EngineClosedError."""
    model = BlockingModel.from_builder(tiny_builder())
    chunks = model.stream_chat_request(endless())
    next(chunks)
    model.close()
    with pytest.raises(EngineClosedError):
        next(chunks)
    with pytest.raises(EngineClosedError, match="build it again"):
        model.chat("hi")


@pytest.mark.parametrize(
    "script",
    [
        "m = BlockingModel.from_builder(b); m.chat('hi')",
        "m = BlockingModel.from_builder(b); it = m.stream_chat_request(r); next(it)",
        "m = BlockingModel.from_builder(b); raise SystemExit(3)",
        "loop = asyncio.new_event_loop(); m = loop.run_until_complete(b.build());"
        "s = loop.run_until_complete(m.stream_chat_request(r));"
        "loop.run_until_complete(s.__anext__())",
    ],
)
def test_a_script_that_forgets_to_close_ends_all_the_same(script):
    """No hang and no abort: the engine stops before the interpreter goes."""
    code = (
        "import asyncio\n"
        "from mistralrs_sdk import *\n"
        f"b = ModelBuilder({str(tiny_folder())!r}).with_force_cpu().with_num_threads(1)\n"
        "r = RequestBuilder().add_message('user', 'x').set_sampler_ignore_eos(True)\n" + script
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == (3 if "SystemExit" in script else 0), done.stderr.decode()
