"""`re_isq_model`: a running model's weights in another type, and nothing of the old ones left."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from mistralrs_sdk import (
    BlockingModel,
    ConfigError,
    IsqBits,
    IsqType,
    Model,
    ModelBuilder,
    PagedAttentionMetaBuilder,
    RequestError,
    Runner,
    Which,
)
from mistralrs_sdk.engine import requantise
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.kernels import native
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.linear import Linear
from tests import checkpoint_files, gguf_files
from tests.engine_helpers import (
    FakeRunner,
    expected_tokens,
    make_request,
    make_scheduler,
    run_to_end,
    tokens_of,
)
from tests.model_helpers import (
    assert_idle,
    continue_ids,
    greedy,
    prompt,
    resident_bytes,
    tiny_folder,
)
from tests.test_default_scheduler import make_engine, unpaged
from tests.test_imatrix import write_gguf as write_imatrix

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels here")

Q4, Q8 = IsqType.Q4_0, IsqType.Q8_0
IDS = [3 + 7 * i % 26 for i in range(21)]


def builder(source: Path | None = None, *, cache: str = "paged") -> ModelBuilder:
    """As a CPU keeps weights by itself, packed."""
    made = ModelBuilder(source or tiny_folder()).with_force_cpu().with_num_threads(1)
    if cache == "paged":
        return made.with_paged_attn(PagedAttentionMetaBuilder().with_block_size(8).build())
    return made.with_paged_attn(None) if cache == "dense" else made.with_no_kv_cache()


async def weights_of(model: Model) -> dict[str, Tensor]:
    """Every matrix as it is multiplied by."""

    def read(engine: Engine) -> dict[str, Tensor]:
        return {
            name: module.method.to_dense(module).clone()
            for name, module in engine.runner.model.named_modules()
            if isinstance(module, (Linear, Embedding))
        }

    return await model.inner().thread.call(read)


async def assert_like(model: Model, other: ModelBuilder) -> None:
    """The same weights, and the same said of them, as of a model that is built so."""
    async with await other.build() as built:
        ours, theirs = await weights_of(model), await weights_of(built)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
        assert model.config() == built.config()
        assert model.inner().info.weights == built.inner().info.weights
        assert model.inner().info.weight_bytes == built.inner().info.weight_bytes
        assert await continue_ids(model, IDS, 12) == await continue_ids(built, IDS, 12)


# The weights


@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_bias", "llama_gqa93"])
async def test_the_model_is_as_if_it_had_been_built_with_the_type(name):
    """With a tied head, with biases, and where rows are no whole blocks."""
    plain = builder(tiny_folder(name))
    async with await plain.build() as model:
        await model.re_isq_model(Q8)
        await assert_like(model, plain.with_isq(Q8))


async def test_a_model_in_the_users_dtype_is_requantised_too():
    """What is not multiplied by stays in that dtype."""
    plain = builder().with_dtype("f32")
    async with await plain.build() as model:
        await model.re_isq_model(Q8)
        await assert_like(model, plain.with_isq(Q8))


async def test_more_bits_bring_back_quality():
    """From 4 to 8 bits: the files are read, not the weights that were rounded before."""
    async with await builder().with_isq(Q4).build() as model:
        await model.re_isq_model("Q8_0")
        await assert_like(model, builder().with_isq(Q8))


async def test_bits_are_read_as_with_auto_isq():
    """A number means the type that it means when building."""
    async with await builder().build() as model:
        await model.re_isq_model(8)
        assert model.config().isq is IsqBits.EIGHT
        assert "8" in next(row for row in model.describe().splitlines() if row.startswith("isq"))
        await assert_like(model, builder().with_auto_isq(8))


async def test_a_gguf_file_is_requantised(tmp_path):
    """From what it stores; blocks that have the type already are taken as they are."""
    up, down = (f"blk.0.ffn_{name}.weight" for name in ("up", "down"))
    path = gguf_files.write_gguf(
        tmp_path / "tiny.gguf",
        "llama",
        gguf_files.metadata_for("llama"),
        gguf_files.tensors_for("llama"),
        types={up: GGMLQuantizationType.Q4_0, down: GGMLQuantizationType.Q8_0},
    )
    async with await builder(path).build() as model:
        for isq in (Q4, Q8):
            await model.re_isq_model(isq)
            await assert_like(model, builder(path).with_isq(isq))


async def test_an_importance_matrix_is_used_again_where_the_type_uses_one(tmp_path, monkeypatch):
    """With q8_0 it has no effect, and with the K type it has the same as at first."""
    for size in ("HIDDEN", "MLP"):
        monkeypatch.setattr(checkpoint_files, size, 256)
    config = checkpoint_files.config_for("llama", num_attention_heads=4, num_key_value_heads=2)
    folder = checkpoint_files.write_folder(tmp_path / "model", config)
    strengths = np.linspace(0.1, 9, 256, dtype=np.float32).reshape(1, -1)
    sums = {"in_sum2": strengths, "counts": np.ones((1, 1), dtype=np.float32)}
    matrix = write_imatrix(
        tmp_path / "imatrix.gguf", {f"blk.0.ffn_up.weight.{k}": v for k, v in sums.items()}
    )
    weighted = builder(folder).with_isq(IsqType.Q4K).with_imatrix(matrix)
    async with await weighted.build() as model:
        await model.re_isq_model(Q8)
        assert model.config().imatrix is None
        assert "not used by this type" in model.describe()
        await assert_like(model, builder(folder).with_isq(Q8))

        await model.re_isq_model(IsqType.Q4K)
        await assert_like(model, weighted)


async def test_one_old_weight_at_most_is_held_besides_the_new_ones(monkeypatch):
    """Each is gone before the next one but one is read."""
    async with await builder().build() as model:
        engine = await model.inner().thread.call(lambda engine: engine)
        old = {
            f"{name}.weight": weakref.ref(module)
            for name, module in engine.runner.model.named_modules()
            if isinstance(module, (Linear, Embedding))
        }
        read: list[str] = []
        fill = requantise.fill

        def watched(fresh, name, form, **settings) -> None:
            assert [n for n in read if old[n]() is not None] == []
            read.append(name)
            fill(fresh, name, form, **settings)

        monkeypatch.setattr(requantise, "fill", watched)
        await model.re_isq_model(Q8)

        assert sorted(read) == sorted(old)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads Linux's /proc")
async def test_memory_of_the_old_weights_goes_back_to_the_system(tmp_path, monkeypatch):
    """From 16 bits to 4, resident memory shrinks by most of what the weights shrink by."""
    for size in ("HIDDEN", "MLP"):
        monkeypatch.setattr(checkpoint_files, size, 1152)
    folder = checkpoint_files.write_folder(tmp_path)
    async with await builder(folder).build() as model:
        size, resident = model.inner().info.weight_bytes, resident_bytes()
        await model.re_isq_model(Q4)
        shrunk = size - model.inner().info.weight_bytes
        assert shrunk > 2**24
        assert resident - resident_bytes() > 0.6 * shrunk


async def test_the_type_that_is_there_changes_nothing():
    """Not even running sequences are disturbed."""
    async with await builder().with_isq(Q8).build() as model:
        stream = await model.stream_chat_request("hello")
        await anext(stream)

        await model.re_isq_model(Q8)

        assert (await model.stats()).preemptions == 0
        await stream.aclose()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads Linux's /proc")
async def test_the_files_are_not_kept_open(tmp_path):
    """A mapped file would count as the process's memory."""
    path = gguf_files.tiny(tmp_path)
    async with await builder(path).build() as model:
        await model.re_isq_model(Q8)
        with open("/proc/self/maps") as maps:  # noqa: ASYNC230 (made up by the kernel)
            assert str(path) not in maps.read()


# Running requests


@pytest.mark.parametrize("cache", ["paged", "dense", "none"])
async def test_streams_go_on_with_the_new_weights(cache, monkeypatch):
    """Each continues what it has said as a model that always had the new weights would."""
    prompts = [prompt(length, seed=length) for length in (5, 21, 40)]
    async with await builder(cache=cache).build() as model:
        old = [await continue_ids(model, ids, 32) for ids in prompts]
        await model.clear_prefix_cache()
        kept = await _note_progress(model, monkeypatch)
        reached = await stop_at_step(model, 9)
        running = [asyncio.create_task(continue_ids(model, ids, 32)) for ids in prompts]
        await reached.wait()
        await model.re_isq_model(Q8)
        said = await asyncio.gather(*running)
        await assert_idle(model)
    async with await builder(cache=cache).with_isq(Q8).build() as built:
        for ids, tokens, before in zip(prompts, said, old, strict=True):
            count = kept[tuple(ids)]
            assert 0 < count < 32
            assert tokens[:count] == before[:count]
            rest = await continue_ids(built, ids + tokens[:count], 32 - count)
            assert tokens[count:] == rest
    assert said != old


async def stop_at_step(model: Model, number: int) -> asyncio.Event:
    """Set when the engine is in that step, which it leaves when it has been sent something."""
    loop, reached, steps = asyncio.get_running_loop(), asyncio.Event(), 0
    engine = await model.inner().thread.call(lambda engine: engine)
    run = engine._run

    def watched(scheduled):
        nonlocal steps
        steps += 1
        if steps == number:
            loop.call_soon_threadsafe(reached.set)
            while model.inner().thread._inbox.empty():
                time.sleep(0.001)
        return run(scheduled)

    engine._run = watched
    return reached


async def _note_progress(model: Model, monkeypatch) -> dict[tuple[int, ...], int]:
    """How many tokens each prompt had got when the first weight was replaced."""
    engine = await model.inner().thread.call(lambda engine: engine)
    kept: dict[tuple[int, ...], int] = {}
    fill = requantise.fill

    def noted(*args, **settings) -> None:
        if not kept:
            scheduler = engine.scheduler
            for sequence in (*scheduler.running, *scheduler.waiting):
                kept[sequence.request.prompt_ids] = sequence.num_generated
        fill(*args, **settings)

    monkeypatch.setattr(requantise, "fill", noted)
    return kept


@pytest.mark.parametrize("cache", ["paged", "dense"])
async def test_prefixes_of_the_old_weights_are_not_found(cache):
    """What was cached is gone; what comes later is cached again."""
    async with await builder(cache=cache).with_prefix_cache_n(4).build() as model:

        async def cached() -> int:
            response = await model.send_completion_request(IDS, greedy(4))
            return response.usage.cached_tokens

        assert [await cached(), await cached() > 0] == [0, True]
        await model.re_isq_model(Q8)
        assert (await model.stats()).cached_blocks == 0
        assert [await cached(), await cached() > 0] == [0, True]


async def test_calls_at_the_same_time_run_one_after_the_other():
    """In the order they came: the last one's type stays."""
    async with await builder().build() as model:
        await asyncio.gather(*(model.re_isq_model(isq) for isq in (Q8, Q4, Q8, "q5_0")))
        await assert_like(model, builder().with_isq("q5_0"))


@pytest.mark.parametrize("num_blocks", [100, 8])
def test_the_paged_scheduler_forgets_everything_and_loses_nobody(num_blocks):
    """After any step: whoever ran is queued in its order without blocks, and ends as it would."""
    for moment in range(1, 12):
        engine = Engine(make_scheduler(num_blocks=num_blocks), FakeRunner())
        requests = [make_request(length, max_tokens=9) for length in (9, 3, 6)]
        for request in requests:
            engine.add(request)
        outputs = [output for _ in range(moment) for output in engine.step()]

        engine.scheduler.forget_kv()

        engine.scheduler.check()
        stats = engine.scheduler.stats()
        assert (stats.running, stats.used_blocks, stats.cached_blocks) == (0, 0, 0)
        ids = [sequence.id for sequence in engine.scheduler.waiting]
        assert ids == sorted(ids)
        outputs += run_to_end(engine)
        for request in requests:
            assert tokens_of(outputs, request) == expected_tokens(request.prompt_ids, 9)


def test_the_unpaged_scheduler_forgets_everything_and_loses_nobody():
    """After any step: nobody owns a cache, and everybody ends as it would."""
    for moment in range(1, 12):
        scheduler = unpaged(prefix_cache_n=4)
        engine = make_engine(scheduler)
        requests = [make_request(length, max_tokens=9) for length in (9, 3, 6, 3)]
        for request in requests:
            engine.add(request)
        outputs = [output for _ in range(moment) for output in engine.step()]

        scheduler.forget_kv()

        scheduler.check()
        assert not scheduler._caches.owners
        outputs += run_to_end(engine)
        for request in requests:
            assert tokens_of(outputs, request) == expected_tokens(request.prompt_ids, 9)


# Progress, and the other surfaces


async def test_progress_counts_the_bytes_of_what_is_requantised():
    """From nothing to all, on the event loop."""
    thread, seen = threading.get_ident(), []

    def report(what: str, done: int, total: int) -> None:
        assert threading.get_ident() == thread
        seen.append((what, done, total))

    async with await builder().build() as model:
        await model.re_isq_model(Q8, progress=report)
        name = tiny_folder().name
        assert {what for what, _, _ in seen} == {f"requantising {name}"}
        done = [count for _, count, _ in seen]
        assert done == sorted(done)
        assert (done[0], done[-1]) == (0, seen[0][2])
        assert 0 < seen[0][2] < model.inner().info.weight_bytes


async def test_no_bar_is_drawn_by_default(capfd):
    """Unlike loading, this may happen in a server that runs."""
    async with await builder().build() as model:
        capfd.readouterr()
        await model.re_isq_model(Q8)
        assert capfd.readouterr().err == ""
        await model.re_isq_model(Q4, progress=True)
        assert "requantising" in capfd.readouterr().err


def test_a_blocking_model_and_a_runner_do_the_same():
    """`send_re_isq` takes text and the name of the model, and raises what goes wrong."""
    with BlockingModel.from_builder(builder()) as model:
        model.re_isq_model(Q8)
        assert model.inner().config().isq is Q8
        with pytest.raises(ConfigError, match="'q9'"):
            model.re_isq_model("q9")
    which = Which.Plain(model_id=str(tiny_folder()))
    with Runner(which=which, cpu=True, num_threads=1, pa_ctxt_len=512) as runner:
        runner.send_re_isq("Q8_0", model_id="default")
        assert runner.inner().inner().config().isq is Q8
        with pytest.raises(RequestError, match="model 'other' is not known"):
            runner.send_re_isq("Q4_0", model_id="other")
        with pytest.raises(ConfigError, match="'q9'"):
            runner.send_re_isq("q9")
