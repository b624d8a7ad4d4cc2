"""Ranks that a model starts: what they share, and that none outlives what it belongs to."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio
import pytest

from mistralrs_sdk import (
    ConfigError,
    EngineDeadError,
    MemoryGpuConfig,
    Model,
    ModelBuilder,
    ModelLoadError,
    PagedAttentionMetaBuilder,
    UnsupportedError,
)
from mistralrs_sdk.engine import rank_processes
from tests.checkpoint_files import config_for, write_folder
from tests.model_helpers import (
    assert_idle,
    continue_ids,
    endless,
    is_running,
    prompt,
)

ROOT = Path(__file__).parent.parent


@functools.cache
def folder() -> Path:
    """A checkpoint with four heads, written without a library that takes long to import."""
    return write_folder(Path(tempfile.mkdtemp(prefix="ranks-")), config_for("qwen2"))


def builder(kv_tokens: int = 1024) -> ModelBuilder:
    paged = PagedAttentionMetaBuilder().with_block_size(8)
    paged = paged.with_gpu_memory(MemoryGpuConfig.ContextSize(kv_tokens)).build()
    plain = ModelBuilder(folder()).with_force_cpu().with_num_threads(1).with_dtype("f32")
    return plain.with_paged_attn(paged)


def two_ranks() -> ModelBuilder:
    return builder().with_tensor_parallel(2)


async def pids_of(model: Model) -> tuple[int, ...]:
    return await model.inner().thread.call(lambda engine: engine.runner.pids)


def assert_gone(pids, within: float = 5.0) -> None:
    deadline = time.monotonic() + within
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"of {pids} some are still running"
        time.sleep(0.02)


async def test_a_model_of_two_ranks_serves_and_leaves_no_process():
    """Requests at once, one left early, the cache idle afterwards, and no rank after closing."""
    ids = prompt(30)
    async with await builder().build() as model:
        expected = [await continue_ids(model, ids[: 10 + i], 8) for i in range(4)]
    async with await two_ranks().build() as model:
        pids = await pids_of(model)
        async with await model.stream_chat_request(endless()) as left:
            await anext(aiter(left))
            found = await asyncio.gather(*(continue_ids(model, ids[: 10 + i], 8) for i in range(4)))
        await assert_idle(model)
        with pytest.raises(UnsupportedError, match=r"re_isq_model .* tensor_parallel \(2\)"):
            await model.re_isq_model("q8_0")
        assert "tensor_parallel" in model.describe()

    assert found == expected
    assert len(pids) == 1
    assert_gone(pids)


async def test_a_rank_that_dies_fails_every_request_with_its_last_words():
    """Within five seconds each stream ends with an error that shows what the rank wrote."""
    async with await two_ranks().build() as model:
        (pid,) = await pids_of(model)
        streams = [await model.stream_chat_request(endless(text)) for text in ("a", "b")]
        for stream in streams:
            await anext(aiter(stream))
        os.kill(pid, signal.SIGABRT)  # faulthandler writes where it was

        async def end(stream) -> str:
            with pytest.raises(EngineDeadError) as caught:
                async for _ in stream:
                    pass
            return str(caught.value)

        with anyio.fail_after(5):
            words = await asyncio.gather(*(end(stream) for stream in streams))
        for word in words:
            assert "rank 1 of 2 was ended by signal 6" in word
            assert "Fatal Python error: Aborted" in word
        with pytest.raises(EngineDeadError, match="rank 1 of 2"):
            await continue_ids(model, prompt(5), 1)


CRASHING = """
import asyncio
from tests.test_tensor_parallel_ends import endless, pids_of, two_ranks

async def main():
    model = await two_ranks().build()
    stream = await model.stream_chat_request(endless())
    await anext(aiter(stream))
    print(*await pids_of(model), flush=True)
    async for _ in stream:
        pass
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_no_rank_outlives_a_rank_0_that_was_killed():
    """However rank 0 ends, in the middle of a step too, the others end after it."""
    crashing = subprocess.Popen(
        [sys.executable, "-c", CRASHING],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert crashing.stdout is not None
    with crashing.stdout as output:
        pids = [int(pid) for pid in output.readline().split()]
        crashing.kill()
        crashing.wait()
    assert len(pids) == 1

    assert_gone(pids)


async def test_heads_that_do_not_divide_are_refused_before_anything_starts(tmp_path, monkeypatch):
    """Nine heads over two ranks: both numbers are named, and no rank is started for that."""
    started = []
    monkeypatch.setattr(
        rank_processes.RankProcess, "__init__", lambda _, task: started.append(task)
    )
    nine = ModelBuilder(write_folder(tmp_path)).with_force_cpu().with_tensor_parallel(2)
    with pytest.raises(ConfigError, match=r"tensor_parallel \(2\) .* 9 attention heads"):
        await nine.build()

    assert not started


async def test_a_rank_that_cannot_load_says_why(tmp_path, monkeypatch):
    """The error of another rank is the error of `build()`."""
    here = write_folder(tmp_path / "model", config_for("qwen2"))
    start = rank_processes.RankProcess.__init__

    def without_files(self, task):
        for file in here.glob("*.safetensors"):
            file.unlink()
        start(self, task)

    monkeypatch.setattr(rank_processes.RankProcess, "__init__", without_files)
    gone = ModelBuilder(here).with_force_cpu().with_num_threads(1).with_tensor_parallel(2)
    with pytest.raises(ModelLoadError, match=r"rank 1 of 2 could not load .*model\.safetensors"):
        await gone.build()


async def test_a_plan_is_that_of_one_rank():
    """Half of the weights and of the bytes per token, in half of the machine's memory."""
    whole, half = await builder().plan(), await two_ranks().plan()

    assert half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert half.weight_bytes < 0.6 * whole.weight_bytes
    assert half.num_parameters == whole.num_parameters
    assert half.free_bytes < 0.75 * whole.free_bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b.with_paged_attn(None), r"paged_attn \(None\)"),
        (lambda b: b.with_lora(), "LoRA adapters"),
        (lambda b: b.with_device("mps"), r'device \("mps"\)'),
    ],
)
def test_what_ranks_do_not_do_together_is_refused_by_name(change, words):
    """Each contradiction is refused where it is written."""
    with pytest.raises(ConfigError, match=rf"tensor_parallel \(2\) and {words} do not go together"):
        change(ModelBuilder("x").with_tensor_parallel(2))


@pytest.mark.parametrize("ranks", [0, -1, 257, 1.5, True, "2"])
def test_a_number_of_ranks_is_checked_at_once(ranks):
    """Whole numbers from 1 to 256."""
    with pytest.raises(ConfigError, match=r"with_tensor_parallel\(.*tensor_parallel \("):
        ModelBuilder("x").with_tensor_parallel(ranks)
