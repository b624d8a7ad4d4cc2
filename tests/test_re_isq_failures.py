"""`re_isq_model` where it is refused or fails: nothing is changed, or the error says how much."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch

from mistralrs_sdk import ConfigError, EngineClosedError, Model, ModelLoadError, UnsupportedError
from mistralrs_sdk.engine import requantise
from mistralrs_sdk.kernels import native
from tests.model_helpers import assert_idle, continue_ids, tiny_folder
from tests.test_re_isq import IDS, Q4, Q8, assert_like, builder, stop_at_step, weights_of

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels here")


async def assert_refused(model: Model, isq, error: type[Exception], match: str) -> str:
    """Nothing was changed, and nobody who runs was disturbed."""
    before, described = await weights_of(model), model.describe()
    with pytest.raises(error, match=match) as caught:
        await model.re_isq_model(isq)
    after = await weights_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.describe() == described
    assert (await model.stats()).preemptions == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("isq", "error", "match"),
    [
        ("q9", ConfigError, "'q9'"),
        (7, ConfigError, "7"),
        (None, ConfigError, "None"),
        ("afq4", UnsupportedError, "use q4k"),
    ],
)
async def test_types_that_cannot_be_had_are_refused(isq, error, match):
    """As by with_isq."""
    async with await builder().build() as model:
        await assert_refused(model, isq, error, match)


async def test_without_native_kernels_it_is_refused(monkeypatch):
    """With the reason that there are none."""
    async with await builder().build() as model:
        monkeypatch.setattr(native, "available", lambda: False)
        monkeypatch.setattr(native, "reason", lambda: "no compiler")
        await assert_refused(model, Q8, UnsupportedError, "native kernels.*no compiler")


async def test_on_another_device_it_is_refused():
    """Nothing there computes with quantised weights."""
    async with await builder().build() as model:
        engine = await model.inner().thread.call(lambda engine: engine)
        engine.runner.device = torch.device("mps")
        await assert_refused(model, Q8, UnsupportedError, "mps.*with_force_cpu")
        engine.runner.device = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
async def test_in_another_dtype_than_float32_it_is_refused(dtype):
    """That is what products with quantised weights take and give."""
    async with await builder().with_dtype(dtype).build() as model:
        await assert_refused(model, Q8, UnsupportedError, f"dtype is {dtype}.*with_dtype")


@pytest.mark.parametrize(("old", "new"), [(Q4, Q8), (Q8, Q4)])
async def test_what_does_not_fit_is_refused(old, new, monkeypatch):
    """Needed is what the model grows by, and besides no more than its largest weight takes."""
    values = 4 * (128 * 64 + 64 * 64 + 3 * 128 * 64)  # in four layers; the ends are Q8_0 in both
    sizes = {Q4: 18, Q8: 34}  # bytes of 32 values
    growth = values * (sizes[new] - sizes[old]) // 32
    largest = 128 * 64 * 4 + 3 * 2 * 128 * 64 * sizes[new] // 32  # read, blocks, copy, result
    async with await builder().with_isq(old).build() as model:
        monkeypatch.setattr(requantise, "free_memory", lambda device: max(growth, 0))
        message = await assert_refused(model, new, ModelLoadError, "does not fit")
        assert "the model is unchanged" in message

        monkeypatch.setattr(requantise, "free_memory", lambda device: max(growth, 0) + largest)
        size = model.inner().info.weight_bytes
        await model.re_isq_model(new)
        assert model.inner().info.weight_bytes - size == growth


async def test_progress_must_be_a_switch_or_a_function():
    """Anything else would be ignored."""
    async with await builder().build() as model:
        with pytest.raises(ConfigError, match="progress"):
            await model.re_isq_model(Q8, progress="yes")  # type: ignore[arg-type]


@pytest.fixture
def copy(tmp_path) -> Path:
    """A checkpoint that a test may spoil."""
    return shutil.copytree(tiny_folder(), tmp_path / "model")


async def test_files_that_are_gone_are_named(copy):
    """The model goes on as it is, and does it once they are back."""
    file = copy / "model.safetensors"
    async with await builder(copy).build() as model:
        file.rename(copy / "away")
        await assert_refused(model, Q8, ModelLoadError, "model.safetensors cannot be read again")
        (copy / "away").rename(file)
        await model.re_isq_model(Q8)
        assert model.config().isq is Q8


async def test_files_that_have_changed_are_named(copy):
    """Other weights would be mixed with those that are there."""
    file = copy / "model.safetensors"
    async with await builder(copy).build() as model:
        os.utime(file, (0, 0))
        await assert_refused(model, Q8, ModelLoadError, "model.safetensors has changed")


async def test_a_model_built_by_a_relative_path_finds_its_files(copy, monkeypatch, tmp_path):
    """Wherever the process works later."""
    monkeypatch.chdir(tmp_path)
    async with await builder(Path("model")).build() as model:
        monkeypatch.chdir("/")
        await model.re_isq_model(Q8)
        assert model.config().isq is Q8


def fail_at(number: int, error: Exception, monkeypatch) -> list[str]:
    """Let reading one weight fail, once; returns the names of those that were read before."""
    read: list[str] = []
    fill = requantise.fill

    def failing(fresh, name, form, **settings) -> None:
        if len(read) == number:
            monkeypatch.setattr(requantise, "fill", fill)
            raise error
        read.append(name)
        fill(fresh, name, form, **settings)

    monkeypatch.setattr(requantise, "fill", failing)
    return read


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ModelLoadError("w cannot be quantised"), "w cannot be quantised"),
        (OSError("the disk is gone"), "OSError: the disk is gone"),
        (MemoryError(), "memory ran out"),
    ],
)
async def test_a_failure_in_the_middle_leaves_each_weight_old_or_new(error, cause, monkeypatch):
    """The error says how far it came, and so does describe(); the model answers."""
    async with await builder().with_isq(Q4).build() as model:
        old = await weights_of(model)
        read = fail_at(3, error, monkeypatch)

        with pytest.raises(ModelLoadError) as caught:
            await model.re_isq_model(Q8)

        assert caught.value.__cause__ is error
        total = len(old) - 2  # embedding and head had the type already
        for part in (f"stopped after 3 of {total} weights", cause, "call it again"):
            assert part in str(caught.value)
        new = await weights_of(model)
        changed = [f"{name}.weight" for name in new if not torch.equal(new[name], old[name])]
        assert sorted(changed) == sorted(read)
        assert model.config().isq is Q4
        assert f"re_isq_model(q8_0) stopped after 3 of {total} weights" in model.describe()
        assert re.fullmatch(r"Q[48]_0 x\d+, Q[48]_0 x\d+", model.inner().info.weights)
        assert len(await continue_ids(model, IDS, 12)) == 12


@pytest.mark.parametrize("isq", [Q4, Q8])
async def test_after_a_failure_another_call_makes_all_alike(isq, monkeypatch):
    """Forward to the new type, or back to the old one."""
    async with await builder().with_isq(Q4).build() as model:
        fail_at(3, OSError("the disk is gone"), monkeypatch)
        with pytest.raises(ModelLoadError):
            await model.re_isq_model(Q8)
        await model.re_isq_model(isq)
        await assert_like(model, builder().with_isq(isq))


async def test_streams_outlive_a_failure(monkeypatch):
    """They go on with the weights that are there."""
    async with await builder().build() as model:
        reached = await stop_at_step(model, 5)
        running = asyncio.create_task(continue_ids(model, IDS, 40))
        await reached.wait()
        fail_at(3, OSError("the disk is gone"), monkeypatch)
        with pytest.raises(ModelLoadError):
            await model.re_isq_model(Q8)
        assert len(await running) == 40
        await assert_idle(model)


async def test_cancelling_who_waits_does_not_stop_it(monkeypatch):
    """Else the model would be left with two types."""
    async with await builder().build() as model:
        gate = threading.Event()
        fill = requantise.fill
        monkeypatch.setattr(
            requantise, "fill", lambda *args, **more: (gate.wait(), fill(*args, **more))
        )
        waiting = asyncio.create_task(model.re_isq_model(Q8))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
        await assert_like(model, builder().with_isq(Q8))


async def test_after_closing_it_is_refused():
    """As every other call."""
    async with await builder().build() as model:
        pass
    with pytest.raises(EngineClosedError):
        await model.re_isq_model(Q8)


async def test_closing_stops_it_before_the_next_weight(monkeypatch):
    """Nobody waits for weights that nobody will use."""
    model = await builder().build()
    loop, started, gate = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    fill, count = requantise.fill, 0

    def slow(*args, **settings) -> None:
        nonlocal count
        count += 1
        loop.call_soon_threadsafe(started.set)
        gate.wait()
        fill(*args, **settings)

    monkeypatch.setattr(requantise, "fill", slow)
    running = asyncio.create_task(model.re_isq_model(Q8))
    queued = asyncio.create_task(model.re_isq_model(Q4))
    await started.wait()
    closing = asyncio.create_task(model.aclose())
    while not model.inner().thread.stopping:
        await asyncio.sleep(0)
    gate.set()
    await closing
    with pytest.raises(EngineClosedError, match="closed while"):
        await running
    with pytest.raises(EngineClosedError):
        await queued
    assert count == 1
