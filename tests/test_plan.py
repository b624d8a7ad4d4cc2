"""`ModelBuilder.plan()`: what it says, and that `build()` does the same."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import attrs
import pytest
import torch

from mistralrs_sdk import (
    ConfigError,
    EngineConfig,
    MemoryGpuConfig,
    ModelBuilder,
    ModelLoadError,
    PagedAttentionMetaBuilder,
)
from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.device_map import MapDevice
from mistralrs_sdk.engine import build, memory, settle
from mistralrs_sdk.engine.memory import integrated_fraction, map_sizes, plan_layers, plan_memory
from mistralrs_sdk.engine.pool_size import GIB, MIB, Activations, DeviceMemory
from mistralrs_sdk.loading import loader
from mistralrs_sdk.loading.forms import choose_forms, total_bytes
from mistralrs_sdk.loading.loader import open_checkpoint, prepare_model
from tests.gguf_files import tiny
from tests.model_helpers import tiny_folder

KV_PER_TOKEN = 4 * 2 * 2 * 16 * 4  # tiny llama: layers, keys and values, KV heads, head size, f32


def builder(source: Path | None = None) -> ModelBuilder:
    base = ModelBuilder(source or tiny_folder()).with_force_cpu().with_num_threads(1)
    return base.with_dtype("f32")


def paged(memory_size: MemoryGpuConfig | None = None, block_size: int = 16):
    pool = PagedAttentionMetaBuilder().with_block_size(block_size)
    return (pool if memory_size is None else pool.with_gpu_memory(memory_size)).build()


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes of RAM seem to be free."""

    def give(size: int) -> None:
        for module in (memory, loader):
            monkeypatch.setattr(module, "available_memory", lambda: size)

    give(4 * GIB)
    return give


@pytest.fixture
def unread(monkeypatch):
    """Makes reading a tensor an error."""
    opened = build.open_checkpoint

    def refuse():
        raise AssertionError("a tensor was read")

    def open_unread(source, *, progress=None):
        checkpoint = opened(source, progress=progress)
        tensors = {n: attrs.evolve(t, load=refuse) for n, t in checkpoint.tensors.items()}
        return attrs.evolve(checkpoint, tensors=tensors)

    monkeypatch.setattr(build, "open_checkpoint", open_unread)


async def test_a_plan_says_what_a_folder_takes(free, unread):
    """Weights in the type used, keys and values of a token, blocks, context; nothing is read."""
    plan = await builder().with_paged_attn(paged(MemoryGpuConfig.ContextSize(1000))).plan()

    tensors = open_checkpoint(ModelSource(model_id=tiny_folder())).tensors.values()
    assert plan.num_parameters == sum(torch.Size(t.shape).numel() for t in tensors)
    assert plan.weight_bytes == 4 * plan.num_parameters
    assert (plan.device, plan.dtype, plan.cache) == ("cpu", "f32", "paged")
    assert plan.kv_bytes_per_token == KV_PER_TOKEN
    assert (plan.block_size, plan.num_blocks, plan.num_tokens) == (16, 63, 1008)
    assert plan.kv_bytes == (63 + 1) * 16 * KV_PER_TOKEN
    assert (plan.max_model_len, plan.max_model_len_reason) == (512, "model")
    assert (plan.free_bytes, plan.reserve_bytes) == (4 * GIB, GIB // 2)


async def test_a_plan_of_a_gguf_file_counts_the_type_it_is_loaded_in(free, unread, tmp_path):
    """Blocks of the file become floats: the file's own size does not matter."""
    half = await builder(tiny(tmp_path)).with_dtype("bf16").plan()
    full = await builder(tmp_path / "tiny.gguf").plan()

    assert (half.dtype, full.dtype) == ("bf16", "f32")
    assert full.weight_bytes == 2 * half.weight_bytes == 4 * full.num_parameters
    assert full.kv_bytes_per_token == 2 * half.kv_bytes_per_token


async def test_sequences_take_whole_blocks(free):
    """63 blocks of 16 hold 15 sequences of 50 tokens, which take 4 blocks each."""
    plan = await builder().with_paged_attn(paged(MemoryGpuConfig.ContextSize(1000))).plan()

    assert [plan.sequences_of(n) for n in (1, 16, 17, 50, 512, 513)] == [63, 63, 31, 15, 1, 0]
    with pytest.raises(ConfigError, match=r"n_tokens \(0\)"):
        plan.sequences_of(0)


SETTINGS = {
    "automatic": lambda b: b,
    "small blocks": lambda b: b.with_paged_attn(paged(block_size=8)),
    "one sequence": lambda b: b.with_max_num_seqs(1),
    "shorter": lambda b: b.with_max_model_len(100),
    "half the type": lambda b: b.with_dtype("bf16"),
    "wide steps": lambda b: b.with_max_num_seqs(512).with_max_num_batched_tokens(2**16),
    "tokens": lambda b: b.with_paged_attn(paged(MemoryGpuConfig.ContextSize(128))),
    "MiB": lambda b: b.with_paged_attn(paged(MemoryGpuConfig.MbAmount(3))),
    "fraction": lambda b: b.with_paged_attn(paged(MemoryGpuConfig.Utilization(0.1))),
    "best effort": lambda b: b.with_paged_attn(
        paged(MemoryGpuConfig.BestEffortMbAmount(2**20, min_mb=1))
    ),
    "unpaged": lambda b: b.with_paged_attn(None),
    "no cache": lambda b: b.with_no_kv_cache(),
}


@pytest.mark.parametrize("setting", SETTINGS)
async def test_the_built_model_has_what_was_planned(setting, free):
    """Blocks, context, weights and their reasons, also when memory is what limits."""
    free(700 * MIB)
    wanted = SETTINGS[setting](builder())
    plan = await wanted.plan()

    async with await wanted.build() as model:
        stats, config, shown = await model.stats(), model.config(), model.describe()

    assert stats.total_blocks == plan.num_blocks
    assert config.max_model_len == plan.max_model_len
    assert config.dtype.value == plan.dtype
    assert config.device == plan.device
    assert f"{plan.weight_bytes / MIB:.1f} MiB" in shown
    assert plan.max_model_len_reason in shown
    if plan.cache == "paged":
        assert config.paged_attn.block_size == plan.block_size
        assert config.paged_attn.gpu_memory == MemoryGpuConfig.ContextSize(plan.num_tokens)
        assert plan.kv_reason in shown
        assert f"{plan.kv_bytes_per_token} bytes" in shown


FAULTS = {
    "a pool too large": (
        lambda b: b.with_paged_attn(paged(MemoryGpuConfig.MbAmount(2**20))),
        ModelLoadError,
        r"MbAmount\(1048576\)",
    ),
    "a minimum too large": (
        lambda b: b.with_paged_attn(paged(MemoryGpuConfig.BestEffortMbAmount(2**21, min_mb=2**20))),
        ModelLoadError,
        "min_mb=1048576",
    ),
    "a pool too small": (
        lambda b: b.with_max_model_len(200).with_paged_attn(paged(MemoryGpuConfig.ContextSize(99))),
        ConfigError,
        "holds 112 tokens.*MbAmount.*Utilization.*ContextSize",
    ),
    "a context too long": (
        lambda b: b.with_max_model_len(513),
        ConfigError,
        r"max_model_len \(513\) is longer",
    ),
    "steps too large": (
        lambda b: b.with_max_num_batched_tokens(2**20).with_max_num_seqs(4096),
        ConfigError,
        "holds 0 tokens.*lower max_num_batched_tokens or max_num_seqs: a step takes",
    ),
    "a type of cache": (
        lambda b: b.with_paged_attn(
            PagedAttentionMetaBuilder().with_paged_cache_type("f8e4m3").build()
        ),
        ConfigError,
        "f8e4m3",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_plan_fails_as_the_build_does(fault, free):
    """The same error with the same words."""
    free(GIB)
    change, kind, words = FAULTS[fault]
    base = builder()
    if fault == "a type of cache":  # with a CPU it is refused earlier
        base = ModelBuilder(tiny_folder()).with_num_threads(1)
    wanted = change(base)

    with pytest.raises(kind, match=words) as planned:
        await wanted.plan()
    with pytest.raises(kind) as built:
        await wanted.build()

    assert str(built.value) == str(planned.value)


async def test_weights_that_do_not_fit_fail_the_plan(free):
    """They are refused before anything is read, as by build()."""
    free(MIB // 2)

    with pytest.raises(ModelLoadError, match="does not fit") as planned:
        await builder().plan()
    with pytest.raises(ModelLoadError) as built:
        await builder().build()

    assert str(built.value) == str(planned.value)


async def test_a_size_that_does_not_fit_fails_before_the_weights_are_read(free, unread):
    """Nobody waits for a large model to hear that its cache is too large."""
    wanted = builder().with_paged_attn(paged(MemoryGpuConfig.MbAmount(2**20)))
    checkpoint = build.open_checkpoint(wanted.source)

    with pytest.raises(ModelLoadError, match="MbAmount"):
        build.build_engine(checkpoint, wanted.config)


async def test_raising_the_batch_limits_leaves_less_for_the_cache(free):
    """Wider steps and more sequences need room that the cache then has not."""
    free(GIB)
    base = builder().with_paged_attn(paged(MemoryGpuConfig.Utilization(1.0)))
    plans = [
        await base.plan(),
        await base.with_max_num_batched_tokens(16384).plan(),
        await base.with_max_num_batched_tokens(16384).with_max_num_seqs(4096).plan(),
    ]

    activations, blocks = zip(*[(p.activation_bytes, p.num_blocks) for p in plans], strict=True)
    assert list(activations) == sorted(set(activations))
    assert list(blocks) == sorted(set(blocks), reverse=True)
    spent = activations[2] - activations[0]
    assert abs((blocks[0] - blocks[2]) * 16 * KV_PER_TOKEN - spent) <= 16 * KV_PER_TOKEN


async def test_unpaged_sequences_take_what_is_left_by_512_tokens(free):
    """No pool is set aside; each cache grows in steps as large as the context here."""
    plan = await builder().with_paged_attn(None).plan()

    left = 4 * GIB - plan.weight_bytes - GIB // 2 - plan.activation_bytes
    assert (plan.cache, plan.block_size, plan.num_blocks) == ("dense", None, 0)
    assert plan.kv_bytes == left
    assert plan.num_tokens == left // KV_PER_TOKEN
    assert plan.sequences_of(1) == plan.sequences_of(512) == left // (512 * KV_PER_TOKEN)


async def test_without_a_cache_nothing_is_kept(free):
    """No bytes per token, and only max_num_seqs limits."""
    plan = await builder().with_no_kv_cache().with_max_num_seqs(5).plan()

    assert (plan.cache, plan.kv_bytes, plan.kv_bytes_per_token) == ("none", 0, 0)
    assert (plan.num_tokens, plan.sequences_of(512), plan.sequences_of(513)) == (0, 5, 0)


async def test_a_pool_below_the_context_is_the_reason_for_a_shorter_one(free):
    """The table names the model's own context too."""
    plan = await builder().with_paged_attn(paged(MemoryGpuConfig.ContextSize(128))).plan()

    assert plan.max_model_len == 128
    assert plan.max_model_len_reason == "limited by the KV cache (the model has 512)"


async def test_a_plan_prints_as_a_table(free):
    """One row a thing: its size, and where that comes from."""
    text = str(await builder().with_paged_attn(paged(MemoryGpuConfig.ContextSize(1000))).plan())

    rows = {line.split()[0]: line for line in text.splitlines()}
    for part in ("64 blocks", "ContextSize"):
        assert part not in rows["weights"]
    assert "f32" in rows["weights"]
    assert "4096 tokens a step, 32 sequences" in rows["activations"]
    assert "512.0 MiB" in rows["reserve"]
    assert "63 blocks of 16 = 1008 tokens; ContextSize(1000)" in text
    assert f"{KV_PER_TOKEN} bytes" in text
    assert "of 512 tokens fit" in rows["sequences"]


async def test_planning_leaves_the_threads_alone(free):
    """Their number is set by build(), not by a look at what it would take."""
    threads = torch.get_num_threads()

    await builder().with_num_threads(threads + 1).plan()

    assert torch.get_num_threads() == threads


async def test_progress_of_a_plan_is_reported_on_the_event_loop(free, monkeypatch):
    """As by build(): the callback need not be safe to call from another thread."""
    opened, seen = build.open_checkpoint, []

    def reporting(source, *, progress=None):
        progress("file", 1, 2)
        return opened(source)

    def watch(*call):
        seen.append((*call, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(build, "open_checkpoint", reporting)

    await builder().with_progress(watch).plan()
    await asyncio.sleep(0)

    assert seen == [("file", 1, 2, True)]


# Several devices


def tiny_plan(config: EngineConfig, free_bytes: int):
    checkpoint = open_checkpoint(ModelSource(model_id=tiny_folder()))
    model = prepare_model(checkpoint)
    memory_there = DeviceMemory(free=free_bytes, total=free_bytes, is_cpu=False)
    forms = choose_forms(model, checkpoint, dtype=torch.bfloat16, packing="none")
    plan = plan_memory(
        model, config, name="tiny", forms=forms, dtype=torch.bfloat16, memory=memory_there
    )
    return plan, model, forms


def test_a_plan_shows_where_layers_would_go():
    """Weights and the pool are divided by layer over the devices that there are."""
    config = EngineConfig(device="cuda:0", dtype="bf16")
    plan, model, forms = tiny_plan(config, 4 * GIB)
    kv, reserve = plan.kv_bytes // 4, plan.reserve_bytes
    devices = [
        MapDevice(name="cuda:0", capacity=reserve + plan.activation_bytes + MIB + 3 * kv),
        MapDevice(name="cuda:1", capacity=reserve + plan.activation_bytes + MIB + kv),
    ]

    layers = plan_layers(model, config, plan, forms=forms, dtype=torch.bfloat16, devices=devices)
    shown = str(attrs.evolve(plan, device_map=layers))

    assert layers.placed == (("cuda:0", range(3)), ("cuda:1", range(3, 4)))
    assert "cuda:0 only; by size they would go to cuda:0: layers 0 to 2, cuda:1: layers 3" in shown


def test_where_the_logits_are_layers_compute_too():
    """The first device keeps room for both: an allocator holds the one while the other runs."""
    _, model, forms = tiny_plan(EngineConfig(device="cuda:0", dtype="bf16"), 4 * GIB)

    sizes = map_sizes(
        forms,
        model.config.num_layers,
        activations=Activations(mapped=5, non_mapped=3),
        kv_per_layer=0,
        base_reserve=0,
    )

    assert (sizes.activations_mapped, sizes.activations_non_mapped) == (5, 8)
    assert sum(sizes.layers) + sizes.non_mapped == total_bytes(forms)


def test_the_first_of_several_gpus_is_used_and_named(monkeypatch):
    """Nothing is spread unasked, and describe() says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    origins: dict[str, str] = {}

    device = settle._choose_device(EngineConfig(), origins)

    assert device == torch.device("cuda:0")
    assert origins["device"] == "first of 2 CUDA devices; holds all layers"


def test_an_integrated_gpu_counts_a_share_of_its_memory():
    """MISTRALRS_IGPU_MEMORY_FRACTION, or three quarters; what is in use stays in use."""
    assert integrated_fraction({}) == 0.75
    assert integrated_fraction({"MISTRALRS_IGPU_MEMORY_FRACTION": " 0.5 "}) == 0.5
    for text in ("a lot", "0", "1.01", "nan"):
        with pytest.raises(ConfigError, match="MISTRALRS_IGPU_MEMORY_FRACTION"):
            integrated_fraction({"MISTRALRS_IGPU_MEMORY_FRACTION": text})

    limited = DeviceMemory(free=10 * GIB, total=16 * GIB, is_cpu=False).limited_to(0.75)

    assert (limited.free, limited.total) == (6 * GIB, 12 * GIB)
