"""Engines that keep keys and values in float8, with FlashInfer's wrappers and graphs in torch.

The oracle is Hugging Face's model in float32, whose keys and values are rounded before it attends.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mistralrs_sdk import MemoryGpuConfig, ModelBuilder, PagedAttentionMetaBuilder
from tests.gpu_engine import Played, gpu_engine
from tests.model_helpers import assert_idle, continue_ids, expected, prompt, tiny_folder
from tests.tiny_models import hf_greedy, tiny_model, write_tokenizer

F8 = torch.float8_e4m3fn
SEEDS = {"llama": 0, "mistral_swa": 6, "qwen3": 8}
"""Of prompts whose answers are no close calls: one key that rounds the other way changes none."""


@pytest.fixture
def gpu() -> Iterator[Played]:
    with gpu_engine() as played:
        yield played


def builder(
    name: str = "llama",
    *,
    kv_tokens: int = 1024,
    cache_type: str = "f8e4m3",
    folder: Path | None = None,
) -> ModelBuilder:
    paged = PagedAttentionMetaBuilder().with_block_size(8).with_paged_cache_type(cache_type)
    paged = paged.with_gpu_memory(MemoryGpuConfig.ContextSize(kv_tokens)).build()
    plain = ModelBuilder(folder or tiny_folder(name)).with_num_threads(1).with_dtype("f32")
    return plain.with_paged_attn(paged).with_max_num_seqs(4)


def rounded(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(F8).float()


def rounded_greedy(model: Any, ids: Sequence[int], count: int) -> list[int]:
    """Hugging Face's greedy continuation over rounded keys and values, one whole forward each."""
    family = sys.modules[type(model).__module__]
    attend = family.eager_attention_forward

    def attend_rounded(
        module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **more: Any
    ) -> Any:
        return attend(module, q, rounded(k), rounded(v), *args, **more)

    with mock.patch.object(family, "eager_attention_forward", attend_rounded):
        return hf_greedy(model, ids, count)


def prompts_of(seed: int) -> list[list[int]]:
    shared = prompt(30, seed=seed)
    behind = [[*shared, *prompt(n, seed=n + seed)] for n in (3, 17, 9)]
    return [*behind, prompt(50, seed=5 + seed)]


@pytest.mark.parametrize(("name", "seed"), SEEDS.items())
async def test_answers_are_those_of_rounded_keys_and_values(name, seed, gpu):
    """One at a time, and at once: in chunks, behind a shared prefix, in a pool too small for all,
    decodes replayed from graphs."""
    prompts = prompts_of(seed)
    async with await builder(name).build() as model:
        alone = [await continue_ids(model, ids, 22) for ids in prompts]
    small = builder(name, kv_tokens=160).with_max_num_batched_tokens(24)
    async with await small.build() as model:
        together = await asyncio.gather(*(continue_ids(model, ids, 22) for ids in prompts))
        stats = await model.stats()
        await assert_idle(model)

    wanted = [rounded_greedy(tiny_model(name), ids, 22) for ids in prompts]
    assert alone == together == wanted
    assert wanted[0] != expected(name, tuple(prompts[0]), 22), "rounding shows"
    assert stats.preemptions
    assert stats.prefix_hits
    assert all(graphs.stats.replayed for graphs in gpu.graphs)
    types = {wrapper.options["kv_data_type"] for wrapper in gpu.reference.wrappers}
    assert types == {F8}


async def test_a_prefix_is_read_as_it_was_kept(gpu):
    """An answer behind blocks of an earlier request is the one that computed them."""
    ids = prompts_of(0)[1]
    async with await builder().build() as model:
        first = await continue_ids(model, ids, 22)
        computed = (await model.stats()).computed_tokens
        again = await continue_ids(model, ids, 22)
        stats = await model.stats()

    assert first == again == rounded_greedy(tiny_model("llama"), ids, 22)
    assert stats.prefix_hits == 1
    assert stats.computed_tokens - computed < 22 + 8


async def test_keys_and_values_beyond_float8_are_its_greatest_number(gpu, tmp_path):
    """An engine whose values pass 448 answers as if they ended there, and nothing becomes NaN."""
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(300)
            layer.self_attn.o_proj.weight.div_(300)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    ids = prompt(40, seed=3)
    async with await builder(folder=tmp_path).build() as served:
        found = await continue_ids(served, ids, 8)

    wanted, unclamped = rounded_greedy(model, ids, 8), hf_greedy(model, ids, 8)
    assert found == wanted != unclamped


async def test_plans_have_half_of_the_bytes(gpu):
    """Of a token and of a pool of as many tokens; a pool of as many bytes holds twice as many."""
    half = builder().with_dtype("f16")
    whole = builder(cache_type="auto").with_dtype("f16")
    eight, sixteen = await half.plan(), await whole.plan()

    assert 2 * eight.kv_bytes_per_token == sixteen.kv_bytes_per_token
    assert 2 * eight.kv_bytes == sixteen.kv_bytes
    assert eight.num_blocks == sixteen.num_blocks

    def of_one_mib(cache_type: str) -> ModelBuilder:
        paged = PagedAttentionMetaBuilder().with_block_size(8).with_paged_cache_type(cache_type)
        paged = paged.with_gpu_memory(MemoryGpuConfig.MbAmount(1)).build()
        return half.with_paged_attn(paged)

    eight, sixteen = await of_one_mib("f8e4m3").plan(), await of_one_mib("auto").plan()
    assert eight.num_blocks == 2 * sixteen.num_blocks
    async with await half.build() as model:
        caches = await model.inner().thread.call(lambda engine: engine.runner.backend._cache)
        shown = model.describe()
    assert {store.dtype for store in (*caches.k, *caches.v)} == {F8}
    assert f"{eight.kv_bytes_per_token} bytes in f8e4m3" in shown
