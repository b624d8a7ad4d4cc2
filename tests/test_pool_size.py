"""How large the KV pool becomes, on a CPU and on a GPU, and what is refused."""

from __future__ import annotations

import logging

import attrs
import pytest

from mistralrs_sdk.config import MemoryGpuConfig
from mistralrs_sdk.engine.pool_size import (
    AUTO_CPU_BYTES,
    GIB,
    MIB,
    DeviceMemory,
    PoolPlace,
    PoolSize,
    choose_pool_size,
    estimate_activations,
)
from mistralrs_sdk.errors import ConfigError, ModelLoadError
from mistralrs_sdk.models.config import ModelConfig, RopeConfig

BLOCK = 16
PER_TOKEN = 1024
KNOB_NAMES = ("MbAmount", "Utilization", "ContextSize")


def cpu(free: int) -> DeviceMemory:
    return DeviceMemory(free=free, total=64 * GIB, is_cpu=True)


def choose(memory: DeviceMemory, wanted: MemoryGpuConfig | None = None, **changes) -> PoolSize:
    """A model with a context of 2000 tokens of 1 KiB, 4 sequences, blocks of 16."""
    place = PoolPlace(
        name="here",
        bytes_per_token=PER_TOKEN,
        activation_bytes=changes.pop("activation_bytes", 0),
        memory=memory,
    )
    return choose_over([place], wanted, **changes)


def choose_over(
    places: list[PoolPlace], wanted: MemoryGpuConfig | None = None, **changes
) -> PoolSize:
    settings = {
        "block_size": BLOCK,
        "max_num_seqs": 4,
        "model_context": 2000,
        "max_model_len": None,
    }
    return choose_pool_size(wanted=wanted, places=places, **(settings | changes))


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


def test_a_best_effort_takes_its_target_where_there_is_room():
    """Like MbAmount as long as the memory is there."""
    size = choose(cpu(16 * GIB), MemoryGpuConfig.BestEffortMbAmount(100))

    assert size == attrs.evolve(
        choose(cpu(16 * GIB), MemoryGpuConfig.MbAmount(100)), reason="BestEffortMbAmount(100)"
    )


def test_a_best_effort_shrinks_to_what_is_safe():
    """Of 2 GiB, 512 MiB are reserved and 100 MiB are for computation."""
    wanted = MemoryGpuConfig.BestEffortMbAmount(4096, min_mb=1436)

    size = choose(cpu(2 * GIB), wanted, activation_bytes=100 * MIB)

    assert size.num_blocks - 1 == (2048 - 512 - 100) * MIB // (BLOCK * PER_TOKEN)
    assert size.reason == "BestEffortMbAmount(4096, min_mb=1436)"


def test_a_best_effort_below_its_minimum_is_refused_with_both_numbers():
    """One MiB more than what is safe."""
    wanted = MemoryGpuConfig.BestEffortMbAmount(4096, min_mb=1537)

    with pytest.raises(ModelLoadError) as caught:
        choose(cpu(2 * GIB), wanted)

    for part in ("min_mb=1537", "needs 1.50 GiB", "only 1.50 GiB are safely free", *KNOB_NAMES):
        assert part in str(caught.value)


@pytest.mark.parametrize("maker", ["BestEffortMbAmount", "MbAmount", "Utilization"])
def test_a_memory_setting_shows_how_it_was_made(maker):
    """Its repr can be typed in; its text is what messages show."""
    amount = 1 if maker == "Utilization" else 10
    setting = getattr(MemoryGpuConfig, maker)(amount)

    assert repr(setting) == f"MemoryGpuConfig.{maker}({amount})"
    assert str(setting) == f"{maker}({amount})"


@pytest.mark.parametrize(("target", "least"), [(0, None), (1.5, None), (10, 0), (10, 11)])
def test_a_best_effort_checks_its_numbers(target, least):
    """Whole numbers of at least 1, the minimum not above the target."""
    with pytest.raises(ConfigError, match="BestEffortMbAmount"):
        MemoryGpuConfig.BestEffortMbAmount(target, min_mb=least)


def test_only_a_best_effort_has_a_minimum():
    """A plain amount is its own minimum."""
    with pytest.raises(ConfigError, match="MbAmount takes no minimum"):
        MemoryGpuConfig("mb", 10, 5)


@pytest.mark.parametrize(
    ("memory", "wanted", "share"),
    [
        (cpu(2 * GIB), None, 2),
        (cpu(2 * GIB), MemoryGpuConfig.Utilization(0.5), 1),
        (DeviceMemory(free=2 * GIB, total=2 * GIB, is_cpu=False), None, 1),
    ],
)
def test_room_for_computation_comes_out_of_the_cache(memory, wanted, share):
    """Sizes that follow the memory shrink by what a step computes; of half the RAM, by half."""
    limits = {"model_context": 10**5, "max_num_seqs": 100}
    roomy = choose(memory, wanted, **limits)

    tight = choose(memory, wanted, activation_bytes=64 * MIB, **limits)

    fewer = 64 * MIB // share // (BLOCK * PER_TOKEN)
    assert abs(roomy.num_blocks - tight.num_blocks - fewer) <= 1


def test_an_asked_size_must_leave_room_for_computation():
    """1500 MiB fit beside the reserve of 512; with 100 MiB for computation they do not."""
    wanted = MemoryGpuConfig.MbAmount(1500)
    choose(cpu(2 * GIB), wanted)

    with pytest.raises(ModelLoadError, match=r"0\.10 GiB for computation.*max_num_batched_tokens"):
        choose(cpu(2 * GIB), wanted, activation_bytes=100 * MIB)


def small_model(**changes) -> ModelConfig:
    settings = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "activation": "silu",
        "ropes": (RopeConfig(theta=1e4),) * 2,
        "windows": (None, None),
        "attention_scale": 0.25,
    }
    return ModelConfig(**(settings | changes))


def activations(model: ModelConfig | None = None, **changes):
    limits = {
        "itemsize": 2,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "max_model_len": 2048,
    }
    return estimate_activations(model or small_model(), **(limits | changes))


def test_activations_are_hidden_states_the_wider_half_of_a_layer_and_logits():
    """Every term for a model whose MLP is wider than its attention."""
    size = activations(small_model(intermediate_size=2048))

    residual = 1024 * 64 * (2 * 2 + 2 * 4) + 1024 * 2 * 16 * 2
    assert size.mapped == residual + 4 * 1024 * 2048 * 2
    assert size.non_mapped == 2 * 8 * 1000 * 4
    assert size.total == size.mapped + size.non_mapped


def test_attention_counts_where_it_is_wider():
    """Projections, the keys and values a tile reads, and the tile: scores if they are capped."""
    narrow = small_model(intermediate_size=1)
    residual = 1024 * 64 * (2 * 2 + 2 * 4) + 1024 * 2 * 16 * 2
    projections, keys = 1024 * 24 * 16 * 2, 2 * 2048 * 2 * 16 * 2

    plain, capped = (
        activations(attrs.evolve(narrow, attn_softcap=cap)).mapped for cap in (None, 50.0)
    )

    assert plain == residual + projections + keys + 512 * 2048 * 4
    assert capped == residual + projections + keys + 512 * 2048 * 4 * 3 * 4


def test_a_window_limits_what_a_tile_reads():
    """Layers that all look back 100 tokens read 612 for a tile, not the whole context."""
    narrow = small_model(intermediate_size=1)

    full = activations(narrow).mapped
    windowed = activations(attrs.evolve(narrow, windows=(100, 100))).mapped

    assert full - windowed == (2048 - 612) * (2 * 2 * 16 * 2 + 512 * 4)


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens"])
def test_each_limit_raises_the_estimate(limit):
    """More sequences and more tokens a step both need more room."""
    sizes = [activations(**{limit: n}).total for n in (8, 16, 1024, 2048)]

    assert sizes == sorted(set(sizes))


def test_a_step_is_never_larger_than_what_the_sequences_can_hold():
    """One sequence of 100 tokens makes no step of 1024."""
    assert activations(max_num_seqs=1, max_model_len=100) == activations(
        max_num_seqs=1, max_model_len=100, max_num_batched_tokens=100
    )


# Several devices


def gpu_place(name: str, free: int, share: int) -> PoolPlace:
    """A quarter of the layers for each `share`, on a card of 8 GiB."""
    return PoolPlace(
        name=name,
        bytes_per_token=PER_TOKEN * share // 4,
        activation_bytes=100 * MIB,
        memory=DeviceMemory(free=free, total=8 * GIB, is_cpu=False),
    )


def test_the_device_with_least_room_for_its_layers_decides():
    """Three quarters of the layers in 4 GiB against one quarter in 2; the device is named."""
    places = [gpu_place("cuda:0", 4 * GIB, 3), gpu_place("cuda:1", 2 * GIB, 1)]

    size = choose_over(places, MemoryGpuConfig.Utilization(1.0))

    block = BLOCK * PER_TOKEN * 3 // 4
    assert size.num_blocks - 1 == (4 * GIB - 512 * MIB - 100 * MIB) // block
    assert size.reason == "Utilization(1.0) on cuda:0"
    assert choose_over(places[:1], MemoryGpuConfig.Utilization(1.0)).reason == "Utilization(1.0)"


def test_an_amount_is_of_the_whole_pool():
    """400 MiB are 300 and 100; 4000 are refused for the device that lacks its part."""
    places = [gpu_place("cuda:0", 4 * GIB, 3), gpu_place("cuda:1", GIB, 1)]

    size = choose_over(places, MemoryGpuConfig.MbAmount(400))

    assert size.num_blocks - 1 == 400 * MIB // (BLOCK * PER_TOKEN)
    with pytest.raises(ModelLoadError, match=r"MbAmount\(4000\).*0.98 GiB on cuda:1 but only 0.40"):
        choose_over(places, MemoryGpuConfig.MbAmount(4000))


def test_what_others_took_is_said_where_nothing_is_left():
    """A second model on a card that the first one fills."""
    with pytest.raises(ConfigError, match=r"7.50 of 8.00 GiB are taken.*a size each"):
        choose_over([gpu_place("cuda:0", GIB // 2, 4)])
