"""`Model` without paging: the same greedy tokens as Hugging Face, prefixes kept whole."""

from __future__ import annotations

import asyncio
import logging

import pytest

from mistralrs_sdk import Model, ModelBuilder, StopTokens
from mistralrs_sdk.engine.engine import Engine
from tests.model_helpers import (
    assert_idle,
    continue_ids,
    endless,
    expected,
    greedy,
    prompt,
    tiny_folder,
)

NAMES = ["llama_gqa93", "mistral_swa", "gemma2"]
LENGTHS = (1, 3, 12, 37, 64, 12, 40, 3)


def unpaged(name: str = "llama_gqa93") -> ModelBuilder:
    builder = ModelBuilder(tiny_folder(name)).with_force_cpu().with_num_threads(1)
    builder = builder.with_dtype("f32")
    return builder.with_paged_attn(None)


async def assert_nothing_left(model: Model) -> None:
    """Nothing runs, and no sequence has a cache."""
    await assert_idle(model)

    def left(engine: Engine) -> int:
        engine.scheduler.check()
        return engine.scheduler._caches.num_bytes

    assert await model.inner().thread.call(left) == 0


@pytest.mark.parametrize("name", NAMES)
async def test_alone_and_eight_at_once(name):
    """Prompts of many lengths, one after the other and all at once, equal the oracle."""
    prompts = [prompt(length, seed=i) for i, length in enumerate(LENGTHS)]
    oracle = [expected(name, tuple(ids), 16) for ids in prompts]
    async with await unpaged(name).with_prefix_cache_n(None).build() as model:
        assert [await continue_ids(model, ids, 16) for ids in prompts] == oracle
        together = await asyncio.gather(*(continue_ids(model, ids, 16) for ids in prompts))
        assert together == oracle
        stats = await model.stats()
        assert (stats.total_blocks, stats.prefix_hits, stats.prefix_lookups) == (0, 0, 0)
        await assert_nothing_left(model)


@pytest.mark.parametrize("limits", [(1, 4096), (3, 4096), (8, 40)])
async def test_with_few_places_and_small_budgets(limits):
    """Limits change who computes when, not what."""
    name, (seqs, budget) = "mistral_swa", limits
    prompts = [prompt(length, seed=i) for i, length in enumerate(LENGTHS)]
    oracle = [expected(name, tuple(ids), 16) for ids in prompts]
    builder = unpaged(name).with_max_num_seqs(seqs).with_max_num_batched_tokens(budget)
    async with await builder.build() as model:
        assert await asyncio.gather(*(continue_ids(model, ids, 16) for ids in prompts)) == oracle


@pytest.mark.parametrize("name", NAMES)
async def test_arriving_one_after_the_other(name):
    """Requests that join leave those that run, and themselves, unchanged."""
    prompts = [prompt(length, seed=length) for length in (3, 12, 37, 64)]
    async with await unpaged(name).build() as model:
        tasks = []
        for ids in prompts:
            tasks.append(asyncio.create_task(continue_ids(model, ids, 24)))
            await asyncio.sleep(0.01)
        for ids, tokens in zip(prompts, await asyncio.gather(*tasks), strict=True):
            assert tokens == expected(name, tuple(ids), 24)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kept", [None, 2])
async def test_repeated_prompts(name, kept):
    """Cache on and off give the same tokens; a repeat computes one token of its prompt."""
    ids = prompt(64, seed=64)
    oracle = expected(name, tuple(ids), 16)
    async with await unpaged(name).with_prefix_cache_n(kept).build() as model:
        for turn in range(3):
            assert await continue_ids(model, ids, 16) == oracle
            assert (await model.stats()).prefix_hits == (turn if kept else 0)
        at_once = await asyncio.gather(*(continue_ids(model, ids, 16) for _ in range(3)))
        assert at_once == [oracle] * 3
        response = await model.send_completion_request(ids)
        assert response.usage.cached_tokens == (63 if kept else 0)
        await model.clear_prefix_cache()
        response = await model.send_completion_request(ids)
        assert response.usage.cached_tokens == 0
        await assert_nothing_left(model)


@pytest.mark.parametrize("name", NAMES)
async def test_conversations_that_share_a_prefix_do_not_mix(name):
    """Trimmed clones of one cache: eight at once equal the same ones without a cache."""
    system = prompt(48, seed=5)
    prompts = [[*system, *prompt(3 + i % 4, seed=200 + i)] for i in range(8)]
    oracle = [expected(name, tuple(ids), 12) for ids in prompts]
    async with await unpaged(name).with_prefix_cache_n(3).build() as model:
        await continue_ids(model, system, 1)
        for _ in range(2):
            together = await asyncio.gather(*(continue_ids(model, ids, 12) for ids in prompts))
            assert together == oracle
        assert (await model.stats()).prefix_hits == 16


async def test_a_second_turn_reuses_the_first_ones_answer():
    """The whole cache is kept, generated tokens too; what is reused is counted in the usage."""
    ids = prompt(20, seed=20)
    async with await unpaged("mistral_swa").build() as model:
        answer = await continue_ids(model, ids, 30)
        longer = [*ids, *answer, 7, 8, 9]
        assert await continue_ids(model, longer, 10) == expected("mistral_swa", tuple(longer), 10)
        response = await model.send_completion_request(longer)
        assert response.usage.cached_tokens == len(longer) - 1


async def test_a_stop_string_keeps_the_prefix():
    """Such a choice is ended from outside, and its cache serves the next turn."""
    ids = prompt(20, seed=20)
    async with await unpaged().build() as model:
        tokens = await continue_ids(model, ids, 8)
        await model.clear_prefix_cache()
        text = (await model.send_completion_request(ids, greedy(8))).choices[0].text
        await model.clear_prefix_cache()
        params = greedy(64, stop_toks=StopTokens.Seqs([text[2:5]]))
        response = await model.send_completion_request(ids, params)
        assert response.choices[0].finish_reason == "stop"
        again = await model.send_completion_request([*ids, *tokens[:1]])
        assert again.usage.cached_tokens >= len(ids)


@pytest.mark.parametrize("kept", [None, 16])
async def test_aborts_in_the_middle(kept):
    """Streams that are left while others run: their memory is free, the others are right."""
    ids = prompt(12, seed=12)
    async with await unpaged().with_prefix_cache_n(kept).build() as model:
        streams = [await model.stream_chat_request(endless(f"hello {i}")) for i in range(4)]
        for stream in streams:
            await anext(aiter(stream))
        others = [asyncio.create_task(continue_ids(model, ids, 40)) for _ in range(3)]
        for stream in streams:
            await anext(aiter(stream))
            await stream.aclose()
        oracle = expected("llama_gqa93", tuple(ids), 40)
        assert await asyncio.gather(*others) == [oracle] * 3
        await assert_nothing_left(model)


@pytest.mark.parametrize("name", NAMES)
async def test_without_a_kv_cache(name):
    """with_no_kv_cache: other lengths wait their turn here too, and every token is the oracle's."""
    prompts = [prompt(length, seed=i) for i, length in enumerate(LENGTHS)]
    builder = ModelBuilder(tiny_folder(name)).with_force_cpu().with_num_threads(1)
    builder = builder.with_dtype("f32")
    async with await builder.with_no_kv_cache().build() as model:
        together = await asyncio.gather(*(continue_ids(model, ids, 8) for ids in prompts))
        assert together == [expected(name, tuple(ids), 8) for ids in prompts]
        assert model.config().prefix_cache_n is None


async def test_describe_names_the_dense_cache():
    """No blocks, the backend's name, and which settings have no effect."""
    async with await unpaged().build() as model:
        text = model.describe()
        assert "dense, per sequence, grown by 512 tokens" in text
        assert "DenseSdpaBackend" in text
        assert text.count("no effect without paging") == 3
        assert model.config().paged_attn is None
        assert model.inner().info.num_blocks == 0


async def test_a_setting_without_effect_is_said_so(caplog):
    """Limits that only the paged scheduler has are warned about when they are set."""
    builder = unpaged().with_max_decode_steps_before_prefill(3).with_mixed_batches(False)
    with caplog.at_level(logging.WARNING, logger="mistralrs_sdk"):
        async with await builder.build():
            pass
    for text in ("max_decode_steps_before_prefill (3)", "mixed_batches (False)"):
        assert f"{text} has no effect without a paged KV cache" in caplog.text
    assert "max_prefill_chunk_tokens" not in caplog.text
