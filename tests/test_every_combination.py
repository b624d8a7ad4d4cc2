"""Greedy tokens equal Hugging Face's under every combination of cache, chunk and pool."""

from __future__ import annotations

import asyncio

import attrs
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

NAME = "mistral_swa"
SHARED = prompt(24, seed=9)
PROMPTS = [prompt(5, seed=1), [*SHARED, *prompt(7, seed=2)], [*SHARED, *prompt(3, seed=3)], SHARED]
COUNT = 16
CONTEXT = 56


def builder_for(cache: str, *, pool: str) -> ModelBuilder:
    """A builder whose pool holds everything, or little more than one sequence."""
    if cache == "paged":
        builder = tiny_builder(NAME, kv_tokens=2048 if pool == "ample" else CONTEXT + 8)
    else:
        builder = ModelBuilder(tiny_folder(NAME)).with_force_cpu().with_num_threads(1)
        builder = builder.with_dtype("f32")
        builder = builder.with_no_kv_cache() if cache == "none" else builder.with_paged_attn(None)
    return builder.with_max_model_len(CONTEXT).with_max_num_seqs(4 if pool == "ample" else 3)


@pytest.mark.parametrize("prefix_cache", [16, None], ids=["prefix", "no-prefix"])
@pytest.mark.parametrize("pool", ["ample", "starving"])
@pytest.mark.parametrize("chunk", [4, 7, 512])
@pytest.mark.parametrize("cache", ["paged", "unpaged", "none"])
async def test_the_same_tokens(cache, chunk, pool, prefix_cache):
    """Four requests at once, twice: the second round may find prefixes of the first."""
    oracle = [expected(NAME, tuple(ids), COUNT) for ids in PROMPTS]
    builder = builder_for(cache, pool=pool).with_prefix_cache_n(prefix_cache)
    async with await builder.with_max_num_batched_tokens(max(chunk, 4)).build() as model:
        for _ in range(2):
            results = await asyncio.gather(*(continue_ids(model, ids, COUNT) for ids in PROMPTS))
            assert results == oracle
        await assert_idle(model)


@pytest.mark.parametrize("prefix_cache", [16, None], ids=["prefix", "no-prefix"])
@pytest.mark.parametrize("pool", ["ample", "starving"])
@pytest.mark.parametrize("chunk", [1, 7, 512])
async def test_the_same_tokens_under_the_chunk_limit(chunk, pool, prefix_cache):
    """The quantum that accelerators schedule by, set here by hand: a CPU does not use it."""
    oracle = [expected(NAME, tuple(ids), COUNT) for ids in PROMPTS]
    builder = builder_for("paged", pool=pool).with_prefix_cache_n(prefix_cache)

    def limit_chunks(engine) -> None:
        scheduler = engine.scheduler
        scheduler.config = attrs.evolve(scheduler.config, max_prefill_chunk_tokens=chunk)

    async with await builder.build() as model:
        await model.inner().thread.call(limit_chunks)
        for _ in range(2):
            results = await asyncio.gather(*(continue_ids(model, ids, COUNT) for ids in PROMPTS))
            assert results == oracle
        await assert_idle(model)


@pytest.mark.parametrize("prefix_cache", [16, None], ids=["prefix", "no-prefix"])
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "pure"])
async def test_the_same_tokens_one_prompt_token_at_a_time(mixed, prefix_cache):
    """A budget of one token, with and without mixed batches."""
    builder = tiny_builder(NAME).with_max_model_len(CONTEXT).with_max_num_seqs(1)
    builder = builder.with_max_num_batched_tokens(1).with_mixed_batches(mixed)
    async with await builder.with_prefix_cache_n(prefix_cache).build() as model:
        for ids in (PROMPTS[1], PROMPTS[1], PROMPTS[2]):
            assert await continue_ids(model, ids, 8) == expected(NAME, tuple(ids), COUNT)[:8]
