"""How large the KV pool becomes, on a CPU and on a GPU, and what is refused."""

from __future__ import annotations

import logging

import pytest

from mistralrs_sdk.config import MemoryGpuConfig
from mistralrs_sdk.engine.pool_size import (
    AUTO_CPU_BYTES,
    GIB,
    DeviceMemory,
    PoolSize,
    choose_pool_size,
)
from mistralrs_sdk.errors import ConfigError, ModelLoadError

MIB = 2**20
BLOCK = 16
PER_TOKEN = 1024
KNOB_NAMES = ("MbAmount", "Utilization", "ContextSize")


def cpu(free: int) -> DeviceMemory:
    return DeviceMemory(free=free, total=64 * GIB, is_cpu=True)


def choose(memory: DeviceMemory, wanted: MemoryGpuConfig | None = None, **changes) -> PoolSize:
    """A model with a context of 2000 tokens of 1 KiB, 4 sequences, blocks of 16."""
    settings = {
        "block_size": BLOCK,
        "bytes_per_token": PER_TOKEN,
        "max_num_seqs": 4,
        "model_context": 2000,
        "max_model_len": None,
    }
    return choose_pool_size(wanted=wanted, memory=memory, **(settings | changes))


def test_reserve_is_two_percent_and_at_least_512_mib():
    """Activations and others keep a share of what is free."""
    assert cpu(GIB).reserve == 512 * MIB
    assert cpu(100 * GIB).reserve == 2 * GIB


def test_auto_on_a_cpu_holds_what_the_sequences_can_use():
    """All max_num_seqs sequences at their longest, plus the null block; not more."""
    size = choose(cpu(16 * GIB))

    assert size.num_blocks == 4 * 125 + 1  # 2000 tokens are 125 blocks
    assert size.max_model_len == 2000
    assert "max_num_seqs" in size.reason


def test_auto_on_a_cpu_counts_the_length_that_was_asked_for():
    """A shorter max_model_len makes a smaller pool; its last block may be part empty."""
    size = choose(cpu(16 * GIB), max_model_len=100)

    assert (size.num_blocks, size.max_model_len) == (4 * 7 + 1, 100)


def test_auto_on_a_cpu_takes_at_most_4_gib():
    """However much RAM is free, and however much the sequences could use."""
    size = choose(cpu(64 * GIB), model_context=10**6, max_num_seqs=100)

    assert size.num_blocks - 1 == AUTO_CPU_BYTES // (BLOCK * PER_TOKEN)


def test_auto_on_a_cpu_takes_at_most_half_of_the_free_ram():
    """The other half is left to the rest of the machine."""
    size = choose(cpu(2 * GIB), model_context=10**6, max_num_seqs=100)

    assert size.num_blocks - 1 == GIB // (BLOCK * PER_TOKEN)


def test_auto_on_a_gpu_fills_it_to_nine_tenths():
    """What is in use already, the weights included, counts towards the 0.9."""
    memory = DeviceMemory(free=60 * GIB, total=80 * GIB, is_cpu=False)

    size = choose(memory)

    assert size.num_blocks - 1 == int(80 * GIB * 0.9 - 20 * GIB) // (BLOCK * PER_TOKEN)
    assert size.reason == "Utilization(0.9)"


def test_utilization_on_a_gpu_is_of_the_whole_card():
    """0.5 of a card of 80 GiB with 20 in use leaves 20 for the pool."""
    memory = DeviceMemory(free=60 * GIB, total=80 * GIB, is_cpu=False)

    size = choose(memory, MemoryGpuConfig.Utilization(0.5))

    assert size.num_blocks - 1 == 20 * GIB // (BLOCK * PER_TOKEN)
    assert size.reason == "Utilization(0.5)"


def test_utilization_on_a_cpu_is_of_the_free_ram():
    """RAM others use is not counted against the fraction."""
    size = choose(cpu(16 * GIB), MemoryGpuConfig.Utilization(0.25))

    assert size.num_blocks - 1 == 4 * GIB // (BLOCK * PER_TOKEN)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_utilization_shrinks_to_leave_the_reserve(is_cpu):
    """A fraction is a wish: the reserve stays free even at 1.0."""
    memory = DeviceMemory(free=8 * GIB, total=8 * GIB, is_cpu=is_cpu)

    size = choose(memory, MemoryGpuConfig.Utilization(1.0))

    assert size.num_blocks - 1 == (8 * GIB - 512 * MIB) // (BLOCK * PER_TOKEN)


def test_megabytes_are_taken_as_they_are():
    """MbAmount(n) is n MiB of blocks, besides the null block."""
    size = choose(cpu(16 * GIB), MemoryGpuConfig.MbAmount(100))

    assert size.num_blocks == 100 * MIB // (BLOCK * PER_TOKEN) + 1
    assert size.reason == "MbAmount(100)"


def test_tokens_are_rounded_up_to_whole_blocks():
    """ContextSize(n) has room for n tokens."""
    size = choose(cpu(16 * GIB), MemoryGpuConfig.ContextSize(2001))

    assert size.num_blocks == 126 + 1
    assert size.reason == "ContextSize(2001)"


@pytest.mark.parametrize(
    "wanted", [MemoryGpuConfig.MbAmount(1024), MemoryGpuConfig.ContextSize(2**20)]
)
def test_a_size_that_does_not_fit_is_refused_with_both_numbers(wanted):
    """1 GiB does not go into 1 GiB free, of which 512 MiB are reserved."""
    with pytest.raises(ModelLoadError) as caught:
        choose(cpu(GIB), wanted)

    for part in (wanted.kind[:3], "1.00 GiB", "0.50 GiB", *KNOB_NAMES):
        assert part.lower() in str(caught.value).lower()


def test_a_pool_below_the_context_limits_it_with_a_warning(caplog):
    """8 blocks of 16 under a context of 512: 128 tokens, and the warning names the three knobs."""
    with caplog.at_level(logging.WARNING):
        size = choose(cpu(16 * GIB), MemoryGpuConfig.ContextSize(128), model_context=512)

    assert (size.num_blocks, size.max_model_len) == (9, 128)
    (record,) = caplog.records
    for part in ("128", "512", *KNOB_NAMES):
        assert part in record.getMessage()


def test_a_pool_below_the_length_the_user_asked_for_is_refused():
    """An asked max_model_len is a promise: no silent cut."""
    with pytest.raises(ConfigError) as caught:
        choose(cpu(16 * GIB), MemoryGpuConfig.ContextSize(128), max_model_len=512)

    for part in ("128", "512", "with_max_model_len", *KNOB_NAMES):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("memory", "wanted"),
    [
        (cpu(0), None),
        (DeviceMemory(free=0, total=8 * GIB, is_cpu=False), None),
        (
            DeviceMemory(free=4 * GIB, total=80 * GIB, is_cpu=False),
            MemoryGpuConfig.Utilization(0.1),
        ),
    ],
)
def test_no_room_for_a_single_block_is_refused(memory, wanted):
    """Nothing is free, or the weights alone exceed the fraction: the knobs are named."""
    with pytest.raises(ConfigError) as caught:
        choose(memory, wanted)

    for part in ("holds 0 tokens", *KNOB_NAMES):
        assert part in str(caught.value)


def test_a_pool_of_exactly_the_context_serves_it(caplog):
    """No warning at the boundary."""
    size = choose(cpu(16 * GIB), MemoryGpuConfig.ContextSize(2000))

    assert (size.num_blocks, size.max_model_len, caplog.records) == (126, 2000, [])
