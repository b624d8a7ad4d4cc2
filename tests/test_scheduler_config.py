"""Every limit of the settings reaches the scheduler, as the device wants it."""

from __future__ import annotations

import attrs
import pytest

from mistralrs_sdk.config import EngineConfig
from mistralrs_sdk.engine.build import _scheduler_config

SETTINGS = EngineConfig(
    max_num_seqs=3,
    max_num_batched_tokens=77,
    max_prefill_chunk_tokens=33,
    max_decode_steps_before_prefill=5,
    max_model_len=123,
    prefix_cache_n=4,
    mixed_batches=False,
)


@pytest.mark.parametrize(("device", "chunk", "budget"), [("cpu", None, 77), ("cuda", 33, 33)])
def test_limits_reach_the_scheduler(device, chunk, budget):
    """All as they were set; the chunk limit changes nothing about scheduling on a CPU."""
    config = _scheduler_config(attrs.evolve(SETTINGS, device=device))
    assert config.max_num_seqs == 3
    assert config.max_num_batched_tokens == 77
    assert config.max_prefill_chunk_tokens == chunk
    assert config.prefill_token_budget == budget
    assert config.max_decode_steps_before_prefill == 5
    assert config.max_model_len == 123
    assert config.prefix_caching is True
    assert config.mixed_batches is False


def test_no_prefixes_and_mixed_batches_reach_the_scheduler():
    """The other value of both switches."""
    config = _scheduler_config(
        attrs.evolve(SETTINGS, device="cpu", prefix_cache_n=None, mixed_batches=True)
    )
    assert config.prefix_caching is False
    assert config.mixed_batches is True
