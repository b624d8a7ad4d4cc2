"""Tensor parallelism as users see it: the tokens of one process, from several."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mistralrs_sdk import ConfigError, EngineMetrics, ModelBuilder, serve_rank
from mistralrs_sdk.engine import rank_meeting
from mistralrs_sdk.engine.cuda_graphs import NOT_DECODE
from tests.checkpoint_files import config_for, write_folder
from tests.gpu_engine import gpu_engine
from tests.model_helpers import continue_ids, prompt, tiny_builder, tiny_folder
from tests.packed_models import gguf_of

ROOT = Path(__file__).parent.parent
FAMILIES = (
    "llama_bias",
    "llama_tied",
    "mistral_swa",
    "qwen2_swa",
    "qwen3_bias",
    "gemma2",
    "gemma3",
)
BLOCKS = ("Q6_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q8_0", "Q4_K")
"""Of embedding, head, and the matrices of each layer: attn_output's halves end within K blocks."""


class Rank:
    """Another process, which serves rank 1 of one model after the other."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tensor_parallel_rank"],
            cwd=ROOT,
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def serve(self, builder: ModelBuilder, *, where: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(where + pickle.dumps(builder).hex() + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def torchrun() -> Iterator[Rank]:
    """This process as rank 0 of two, as torchrun sets them up, and the other one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    place |= {"LOCAL_WORLD_SIZE": "2"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_meeting, "_meetings", itertools.count())
        for name, value in {**place, "RANK": "0", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        other = Rank({**place, "RANK": "1", "LOCAL_RANK": "1"})
        try:
            yield other
        finally:
            other.end()


async def tokens_of(builder: ModelBuilder, ids: list[int]) -> list[int]:
    async with await builder.build() as model:
        return await continue_ids(model, ids, 12)


async def tokens_of_two(builder: ModelBuilder, other: Rank, ids: list[int]) -> list[int]:
    both = builder.with_tensor_parallel(2)
    other.serve(both)
    tokens = await tokens_of(both, ids)
    assert other.answer() == "done"
    return tokens


@pytest.mark.parametrize("name", FAMILIES)
async def test_two_processes_give_the_tokens_of_one(name, torchrun):
    """Greedy tokens of each family are equal whether one process computes them or two."""
    builder, ids = tiny_builder(name, kv_tokens=512), prompt(40)

    assert await tokens_of_two(builder, torchrun, ids) == await tokens_of(builder, ids)


async def test_fewer_key_heads_than_ranks_are_held_by_several(tmp_path, torchrun):
    """Two ranks have the only head of keys and values, each with its own half of the queries."""
    folder = write_folder(tmp_path, config_for("qwen2", num_key_value_heads=1))
    builder = ModelBuilder(folder).with_force_cpu().with_num_threads(1).with_dtype("f32")

    assert await tokens_of_two(builder, torchrun, prompt(20)) == await tokens_of(
        builder, prompt(20)
    )


async def test_blocks_of_a_gguf_are_divided_as_they_are(tmp_path, torchrun):
    """Quantised blocks stay blocks on every rank, and the tokens are those of one process."""
    path = gguf_of(tmp_path / "model.gguf", *BLOCKS, vocab=300)
    builder = ModelBuilder(path).with_force_cpu().with_num_threads(1)
    ids = [3 + 7 * i % 250 for i in range(20)]

    assert await tokens_of_two(builder, torchrun, ids) == await tokens_of(builder, ids)


async def test_each_rank_quantises_its_share(torchrun):
    """In-situ quantisation of halves gives the tokens of quantised wholes."""
    builder = tiny_builder("llama", kv_tokens=512).with_isq("q8_0")

    assert await tokens_of_two(builder, torchrun, prompt(20)) == await tokens_of(
        builder, prompt(20)
    )


async def test_a_model_without_a_cache_is_divided_too(torchrun):
    """Every token is computed again in every step, on both ranks."""
    plain = ModelBuilder(tiny_folder("llama")).with_force_cpu().with_num_threads(1)
    plain = plain.with_dtype("f32").with_no_kv_cache()

    assert await tokens_of_two(plain, torchrun, prompt(20)) == await tokens_of(plain, prompt(20))


async def test_prompts_longer_than_a_step_are_computed_in_parts(torchrun):
    """Steps whose scores nobody wants are computed by both ranks, too."""
    builder = tiny_builder("llama", kv_tokens=512).with_max_num_batched_tokens(32)

    assert await tokens_of_two(builder, torchrun, prompt(75)) == await tokens_of(
        builder, prompt(75)
    )


@pytest.mark.parametrize("name", ["llama_tied", "mistral_swa"])
async def test_ranks_replay_their_graphs_together(name, torchrun):
    """Prompts in chunks, then as many sequences as there are left: the tokens of one process."""
    builder = tiny_builder(name, kv_tokens=512).with_max_num_seqs(6)
    prompts = [prompt(n, seed=n) for n in (40, 3, 17, 25, 9)]
    lengths = [12, 20, 7, 12, 15]

    async def tokens(asked: ModelBuilder) -> tuple[list[list[int]], EngineMetrics]:
        async with await asked.with_max_num_batched_tokens(24).build() as model:
            both = zip(prompts, lengths, strict=True)
            found = await asyncio.gather(*(continue_ids(model, ids, n) for ids, n in both))
            return found, await model.metrics()

    both = builder.with_tensor_parallel(2).with_cuda_graphs()
    torchrun.serve(both.with_max_num_batched_tokens(24), where="gpu ")
    with gpu_engine() as played:
        found, metrics = await tokens(both)

    assert torchrun.answer() == "replayed"
    assert found == (await tokens(builder))[0]
    assert [graphs.together for graphs in played.graphs] == [True]
    assert set(metrics.steps_eager) == {NOT_DECODE}
    assert metrics.steps_replayed > 5


async def test_ranks_that_are_not_as_many_as_asked_for_are_refused(torchrun):
    """The message names both numbers."""
    with pytest.raises(ConfigError, match="tensor_parallel is 4 and WORLD_SIZE is 2"):
        await tiny_builder("llama").with_tensor_parallel(4).build()


async def test_build_is_for_rank_0(torchrun, monkeypatch):
    """On other ranks it names the function to call instead, which does nothing on rank 0."""
    builder = tiny_builder("llama").with_tensor_parallel(2)
    assert not serve_rank(builder)
    assert not serve_rank(tiny_builder("llama"))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"this process is rank 1 of 2: call .*serve_rank"):
        await builder.build()
