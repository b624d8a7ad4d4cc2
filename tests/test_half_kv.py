"""Keys and values in float16: the same text however it is computed, and half the memory."""

from __future__ import annotations

import asyncio

import pytest

from mistralrs_sdk import (
    ConfigError,
    MemoryGpuConfig,
    ModelBuilder,
    PagedAttentionMetaBuilder,
)
from mistralrs_sdk.attention.select import KV_SWITCH
from mistralrs_sdk.kernels import native
from mistralrs_sdk.kernels.attention import has_fast_halves
from tests.model_helpers import assert_idle, continue_ids, prompt, tiny_builder

pytestmark = pytest.mark.skipif(
    not native.available() or not has_fast_halves(), reason="no native float16 here"
)

NAMES = ["llama_gqa93", "mistral_swa", "qwen3", "gemma2"]
PROMPTS = [prompt(length, seed=length) for length in (1, 3, 12, 37)]
COUNT = 24


@pytest.fixture(autouse=True)
def unswitched(monkeypatch):
    monkeypatch.delenv(KV_SWITCH, raising=False)


def builder(name: str = "llama", *, kv_tokens: int | None = None) -> ModelBuilder:
    return tiny_builder(name, kv_tokens=kv_tokens).with_dtype("auto")


def shown(text: str, name: str) -> str:
    """The row of a table."""
    return next(line for line in text.splitlines() if line.startswith(name))


async def alone(name: str) -> list[list[int]]:
    """The text of each prompt, computed whole and one after the other."""
    async with await builder(name).with_prefix_cache_n(None).build() as model:
        assert "f16" in shown(model.describe(), "KV per token")
        return [await continue_ids(model, ids, COUNT) for ids in PROMPTS]


@pytest.mark.parametrize("name", NAMES)
async def test_text_does_not_depend_on_batches_chunks_or_preemption(name):
    """Alone, all at once, in chunks of 5, from a warm prefix cache, and in a pool too small."""
    oracle = await alone(name)
    chunked = builder(name).with_max_num_seqs(4).with_max_num_batched_tokens(5)
    small = builder(name, kv_tokens=72).with_max_model_len(64)
    for variant in (builder(name), chunked, small):
        async with await variant.build() as model:
            for _ in range(2):
                texts = await asyncio.gather(*(continue_ids(model, ids, COUNT) for ids in PROMPTS))
                assert texts == oracle
            preemptions = (await model.stats()).preemptions
            assert preemptions > 0 if variant is small else preemptions == 0
            await assert_idle(model)


async def test_a_token_takes_half_and_plan_and_build_say_so(monkeypatch):
    """What is planned, allocated and described is the type that is used; f32 comes back with the
    switch, and with a dtype of the user's."""
    half = builder(kv_tokens=256)
    plans = [await half.plan(), await half.with_dtype("f32").plan()]
    async with await half.build() as model:
        rows = shown(model.describe(), "KV per token"), shown(model.describe(), "KV cache")
        caches = await model.inner().thread.call(lambda engine: engine.runner.backend._layers)
    monkeypatch.setenv(KV_SWITCH, "1")
    plans.append(await half.plan())

    assert [plan.kv_bytes_per_token for plan in plans] == [512, 1024, 1024]
    assert [plan.kv_bytes for plan in plans] == [33 * 8 * 512, 33 * 8 * 1024, 33 * 8 * 1024]
    assert sum(x.nbytes for cache in caches for x in (cache.k, cache.v)) == 33 * 8 * 512
    assert "512 bytes in f16" in rows[0]
    assert f"{256 * 512 / 2**20:.1f} MiB" in rows[1]


async def test_half_the_size_holds_twice_the_tokens():
    """A pool given in MiB, with the default type and in float32."""
    pool = PagedAttentionMetaBuilder().with_gpu_memory(MemoryGpuConfig.MbAmount(4)).build()
    base = builder().with_paged_attn(pool)
    half, full = await base.plan(), await base.with_dtype("f32").plan()

    assert half.num_tokens == pytest.approx(2 * full.num_tokens, abs=64)


async def test_a_wrong_word_in_the_switch_fails_the_build(monkeypatch):
    """The error names the variable and what stood there."""
    monkeypatch.setenv(KV_SWITCH, "perhaps")
    with pytest.raises(ConfigError, match=r"MISTRALRS_CPU_KV_F32 \('perhaps'\)"):
        await builder().build()
