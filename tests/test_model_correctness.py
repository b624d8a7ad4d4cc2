"""The same greedy tokens as Hugging Face, however the engine comes to compute them."""

from __future__ import annotations

import asyncio

import pytest

from mistralrs_sdk import ModelBuilder
from tests.model_helpers import (
    assert_idle,
    continue_ids,
    expected,
    prompt,
    tiny_builder,
    tiny_folder,
)

NAMES = ["llama_gqa93", "mistral_swa", "qwen3", "gemma3"]


@pytest.mark.parametrize("name", NAMES)
async def test_alone_and_in_a_batch(name):
    """Prompts of many lengths, one after the other and all at once, equal the oracle."""
    prompts = [prompt(length, seed=length) for length in (1, 3, 12, 37, 64)]
    oracle = [expected(name, tuple(ids), 16) for ids in prompts]
    async with await tiny_builder(name).with_prefix_cache_n(None).build() as model:
        assert [await continue_ids(model, ids, 16) for ids in prompts] == oracle
        together = await asyncio.gather(*(continue_ids(model, ids, 16) for ids in prompts))
        assert together == oracle
        await assert_idle(model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [4, 7])
async def test_in_chunks(name, budget):
    """A token budget smaller than the prompt changes nothing."""
    ids = prompt(37, seed=37)
    builder = tiny_builder(name).with_max_num_seqs(2).with_max_num_batched_tokens(budget)
    async with await builder.build() as model:
        assert await continue_ids(model, ids, 16) == expected(name, tuple(ids), 16)


@pytest.mark.parametrize("name", NAMES)
async def test_from_a_warm_prefix_cache(name):
    """The same prompt three times, alone and at once; the last token is always computed."""
    ids = prompt(64, seed=64)
    oracle = expected(name, tuple(ids), 16)
    async with await tiny_builder(name).build() as model:
        for _ in range(3):
            assert await continue_ids(model, ids, 16) == oracle
        assert (
            await asyncio.gather(*(continue_ids(model, ids, 16) for _ in range(3))) == [oracle] * 3
        )
        response = await model.send_completion_request(ids)
        assert response.usage.cached_tokens == 56
        assert response.usage.prompt_tokens == 64


@pytest.mark.parametrize("name", ["llama_gqa93", "mistral_swa"])
@pytest.mark.parametrize("cache", [None, 16])
async def test_preempted_in_a_pool_far_too_small(name, cache):
    """Sequences that lose their blocks and recompute them give the same tokens."""
    prompts = [prompt(12, seed=i) for i in range(6)]
    oracle = [expected(name, tuple(ids), 40) for ids in prompts]
    builder = tiny_builder(name, kv_tokens=96).with_max_model_len(64).with_prefix_cache_n(cache)
    async with await builder.build() as model:
        results = await asyncio.gather(*(continue_ids(model, ids, 40) for ids in prompts))
        assert results == oracle
        assert (await model.stats()).preemptions > 0
        await assert_idle(model)


async def test_a_batch_of_32():
    """Thirty-two requests at once, each with its own prompt."""
    prompts = [prompt(3 + i % 9, seed=100 + i % 8) for i in range(32)]
    oracle = [expected("llama_gqa93", tuple(ids), 12) for ids in prompts]
    async with await tiny_builder("llama_gqa93").build() as model:
        assert await asyncio.gather(*(continue_ids(model, ids, 12) for ids in prompts)) == oracle


async def test_arriving_one_after_the_other():
    """Requests that join a running batch leave it and themselves unchanged."""
    prompts = [prompt(n, seed=n) for n in (3, 12, 37, 64)]
    async with await tiny_builder("qwen3").build() as model:
        tasks = []
        for ids in prompts:
            tasks.append(asyncio.create_task(continue_ids(model, ids, 24)))
            await asyncio.sleep(0.005)
        for ids, tokens in zip(prompts, await asyncio.gather(*tasks), strict=True):
            assert tokens == expected("qwen3", tuple(ids), 24)


@pytest.mark.parametrize("name", ["mistral_swa", "gemma2"])
async def test_without_a_kv_cache(name):
    """with_no_kv_cache computes everything anew each step: slower, the same tokens."""
    prompts = [prompt(3, seed=1), prompt(37, seed=37)]
    builder = ModelBuilder(tiny_folder(name)).with_dtype("f32").with_num_threads(1)
    builder = builder.with_no_kv_cache()
    async with await builder.build() as model:
        results = await asyncio.gather(*(continue_ids(model, ids, 12) for ids in prompts))
        assert results == [expected(name, tuple(ids), 12) for ids in prompts]
        assert model.config().prefix_cache_n is None


async def test_conversations_that_share_a_system_prompt_do_not_mix():
    """Sixteen at once from one prefix equal the same ones served alone without a cache."""
    system = prompt(48, seed=5)
    prompts = [[*system, *prompt(9, seed=200 + i)] for i in range(16)]
    async with await tiny_builder("qwen3").with_prefix_cache_n(0).build() as model:
        alone = [await continue_ids(model, ids, 12) for ids in prompts]
        assert (await model.stats()).cached_blocks == 0
    async with await tiny_builder("qwen3").build() as model:
        for _ in range(2):
            together = await asyncio.gather(*(continue_ids(model, ids, 12) for ids in prompts))
            assert together == alone
        assert (await model.stats()).prefix_hits > 0


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
async def test_prompts_that_end_at_block_and_chunk_boundaries(length):
    """Every combination of prompt length and budget around the block size, cache off and on."""
    ids = prompt(length, seed=1000 + length)
    oracle = expected("mistral_swa", tuple(ids), 8)
    for budget in (1, 7, 8, 16, 17):
        builder = tiny_builder("mistral_swa").with_max_num_seqs(1)
        async with await builder.with_max_num_batched_tokens(budget).build() as model:
            for _ in range(2):
                assert await continue_ids(model, ids, 8) == oracle
