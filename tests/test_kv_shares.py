"""How models on one machine share the memory for their KV caches, from their plans alone."""

from __future__ import annotations

import pytest

from mistralrs_sdk import EngineConfig, MemoryGpuConfig, MemoryPlan, PagedAttentionMetaBuilder
from mistralrs_sdk.builders.kv_shares import share_kv_memory

GIB = 2**30


def plan_of(kv: float, *, seqs: int = 32, weights: float = 1, free: float = 16, **changes):
    """A plan in GiB; half a GiB of activations."""
    values = {
        "name": "m",
        "architecture": "LlamaForCausalLM",
        "device": "cpu",
        "dtype": "f32",
        "free_bytes": int(free * GIB),
        "num_parameters": 1,
        "weight_bytes": int(weights * GIB),
        "weights": "",
        "activation_bytes": GIB // 2,
        "reserve_bytes": GIB // 2,
        "cache": "paged",
        "kv_bytes_per_token": 1024,
        "kv_growth": 32,
        "num_blocks": 100,
        "kv_bytes": int(kv * GIB),
        "kv_reason": "",
        "max_model_len": 512,
        "max_model_len_reason": "model",
        "max_num_seqs": seqs,
        "max_num_batched_tokens": 4096,
    }
    return MemoryPlan(**values | changes)


def config_of(memory: MemoryGpuConfig | None = None) -> EngineConfig:
    paged = PagedAttentionMetaBuilder()
    if memory is not None:
        paged = paged.with_gpu_memory(memory)
    return EngineConfig(paged_attn=paged.build())


@pytest.mark.parametrize(
    ("plans", "shares"),
    [
        ([plan_of(4), plan_of(4)], [2048, 2048]),
        ([plan_of(4, seqs=24), plan_of(4, seqs=8)], [3072, 1024]),
        ([plan_of(4), plan_of(0.5)], [2048, None]),  # it could not use its share
        ([plan_of(2, free=5), plan_of(2, free=5)], [512, 512]),  # half of what two leave free
        ([plan_of(2, free=3), plan_of(2, free=3)], [1, 1]),  # nothing left: the build says so
    ],
)
def test_automatic_pools_on_a_cpu_share_what_one_would_have(plans, shares):
    """By max_num_seqs, of 4 GiB or half of what the weights leave free; never more than used."""
    sizes = share_kv_memory(plans, [EngineConfig(), config_of()])

    assert sizes == [mb and MemoryGpuConfig.BestEffortMbAmount(mb) for mb in shares]


def test_fractions_of_a_gpu_share_what_lies_beside_all_weights():
    """Two models that would take 20 GiB each, 1.5 of them not for the pool, get 17 together."""
    plans = [plan_of(18.5, device="cuda:0"), plan_of(18.5, seqs=96, device="cuda:0")]
    configs = [config_of(), config_of(MemoryGpuConfig.Utilization(0.9))]

    assert share_kv_memory(plans, configs) == [
        MemoryGpuConfig.BestEffortMbAmount(17 * 256),
        MemoryGpuConfig.BestEffortMbAmount(17 * 768),
    ]


def test_models_on_different_devices_share_nothing():
    """Each keeps what it has alone."""
    plans = [plan_of(18.5, device="cuda:0"), plan_of(18.5, device="cuda:1")]

    assert share_kv_memory(plans, [config_of(), config_of()]) == [None, None]


def test_sizes_that_were_written_down_are_kept_and_others_make_room():
    """MiB become best effort; tokens and best effort stay; an unpaged model has no pool."""
    plans = [plan_of(6), plan_of(2), plan_of(3), plan_of(9, cache="dense"), plan_of(4, free=24)]
    configs = [
        config_of(MemoryGpuConfig.MbAmount(6144)),
        config_of(MemoryGpuConfig.ContextSize(4096)),
        config_of(MemoryGpuConfig.BestEffortMbAmount(3072)),
        EngineConfig(paged_attn=None),
        EngineConfig(),
    ]

    sizes = share_kv_memory(plans, configs)

    assert sizes[:4] == [MemoryGpuConfig.BestEffortMbAmount(6144), None, None, None]
    left = 24 - 5 * 1.5 - (6 + 2 + 3)
    assert sizes[4] == MemoryGpuConfig.BestEffortMbAmount(int(left / 2 * 1024))
