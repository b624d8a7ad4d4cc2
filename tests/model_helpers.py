"""Tiny checkpoints and small drivers shared by the tests of `Model`."""

from __future__ import annotations

import asyncio
import functools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio

from mistralrs_sdk import (
    MemoryGpuConfig,
    Model,
    ModelBuilder,
    PagedAttentionMetaBuilder,
    RequestBuilder,
    SamplingParams,
)
from tests.tiny_models import hf_greedy, tiny_checkpoint


@functools.cache
def tiny_folder(name: str = "llama") -> Path:
    """A tiny checkpoint on disk, made once per test process."""
    return tiny_checkpoint(name, Path(tempfile.mkdtemp(prefix=f"tiny-{name}-")))


def tiny_builder(name: str = "llama", *, kv_tokens: int | None = None) -> ModelBuilder:
    """A builder for a tiny checkpoint; blocks of 8 tokens, the pool in tokens if given.

    In float32 throughout, like the oracle: by itself a CPU rounds weights, keys and values.
    """
    paged = PagedAttentionMetaBuilder().with_block_size(8)
    if kv_tokens is not None:
        paged = paged.with_gpu_memory(MemoryGpuConfig.ContextSize(kv_tokens))
    builder = ModelBuilder(tiny_folder(name)).with_force_cpu().with_num_threads(1)
    return builder.with_dtype("f32").with_paged_attn(paged.build())


def prompt(length: int, seed: int = 0) -> list[int]:
    """Distinct reproducible ids, none of them special."""
    return random.Random(seed).sample(range(3, 512), length)


@functools.cache
def expected(name: str, ids: tuple[int, ...], count: int) -> list[int]:
    """The oracle: Hugging Face's greedy continuation in float32."""
    return hf_greedy(tiny_folder(name), ids, count)


def greedy(max_len: int, **settings) -> SamplingParams:
    """Greedy for exactly `max_len` tokens, with log probabilities so that ids can be read."""
    return SamplingParams(
        top_k=1,
        max_len=max_len,
        ignore_eos=True,
        return_logprobs=True,
        top_n_logprobs=1,
        **settings,
    )


async def continue_ids(model: Model, ids: Sequence[int], max_len: int) -> list[int]:
    """The greedy continuation as ids."""
    response = await model.send_completion_request(ids, greedy(max_len))
    return generated_ids(response)


def generated_ids(response) -> list[int]:
    """The ids of a greedy response: the top alternative of every token."""
    entries = response.choices[0].logprobs.content
    return [entry.top_logprobs[0].token_id for entry in entries]


def endless(text: str = "hello") -> RequestBuilder:
    """A request that runs until the context ends."""
    return RequestBuilder().add_message("user", text).set_sampler_ignore_eos(True)


async def assert_idle(model: Model) -> None:
    """Nothing runs, waits or holds blocks, soon after."""
    with anyio.fail_after(10):
        while True:
            stats = await model.stats()
            if not stats.running and not stats.waiting:
                break
            await asyncio.sleep(0.002)
    assert stats.used_blocks == 0


def resident_bytes() -> int:
    """Memory this process really holds."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def is_running(pid: int) -> bool:
    """Whether a process is there, and more than an entry that nobody has read."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
