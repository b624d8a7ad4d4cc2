"""Memory on a GPU, as a CPU can drive it: measured steps, what is kept, loading, running out."""

from __future__ import annotations

import gc
import types
import weakref

import attrs
import pytest
import torch
from torch import Tensor

from mistralrs_sdk import ConfigError, EngineConfig, InferenceError, ModelLoadError
from mistralrs_sdk.attention.flashinfer import LEAST_WORKSPACE, PLAN_BYTES
from mistralrs_sdk.attention.sdpa import SdpaBackend
from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.engine import build, kept_memory, memory, paged_pool
from mistralrs_sdk.engine.cuda_graphs import CAPTURE_BYTES, capturing
from mistralrs_sdk.engine.engine import MAX_FAILED_STEPS, Engine
from mistralrs_sdk.engine.kept_memory import WRAPPER_BYTES
from mistralrs_sdk.engine.measured_memory import CudaMeter, largest_step, measure_largest_step
from mistralrs_sdk.engine.memory import device_memory, plan_memory, require_room_for_adapters
from mistralrs_sdk.engine.model_runner import ModelRunner
from mistralrs_sdk.engine.pool_size import GIB, MIB, DeviceMemory
from mistralrs_sdk.engine.request import SampledToken
from mistralrs_sdk.loading import loader
from mistralrs_sdk.loading.forms import choose_forms, total_bytes
from mistralrs_sdk.loading.loader import load_model, open_checkpoint, prepare_model
from mistralrs_sdk.machine import is_out_of_memory
from tests.engine_helpers import (
    expected_tokens,
    make_request,
    make_scheduler,
    next_token,
    run_to_end,
    tokens_of,
)
from tests.model_helpers import continue_ids, expected, prompt, tiny_builder, tiny_folder

CUDA = torch.device("cuda")
CPU = torch.device("cpu")


# Running out of memory while serving


@attrs.define
class CrowdedRunner:
    """Has memory for steps of at most `most` tokens."""

    most: int
    error: Exception = attrs.field(factory=lambda: torch.OutOfMemoryError("CUDA out of memory"))
    held: list[weakref.ref] = attrs.field(factory=list)

    def run(self, scheduled):
        if sum(item.num_tokens for item in scheduled) > self.most:
            activations = torch.empty(8)
            self.held.append(weakref.ref(activations))
            raise self.error
        return [
            SampledToken(next_token(item.sequence.tokens)) if item.samples else None
            for item in scheduled
        ]


def crowded(runner, **options) -> Engine:
    return Engine(make_scheduler(max_num_seqs=1), runner, **options)


def test_steps_that_run_out_of_memory_never_end_the_engine():
    """Each ends its own sequences, however many in a row; what fits is answered as ever."""
    engine = crowded(CrowdedRunner(most=10))
    large = [make_request(20) for _ in range(2 * MAX_FAILED_STEPS)]
    small = make_request(4, max_tokens=6)
    for request in [*large, small]:
        engine.add(request)

    outputs = run_to_end(engine)

    errors = [output.error for output in outputs if output.finish_reason == "error"]
    assert len(errors) == len(large)
    for words in ("memory ran out", "20 tokens of 1 sequences", "max_num_batched_tokens"):
        assert all(words in error for error in errors)
    assert tokens_of(outputs, small) == expected_tokens(small.prompt_ids, 6)
    assert engine.scheduler.stats().used_blocks == 0


def test_memory_is_given_back_once_the_step_holds_none():
    """What the failed step computed is gone before the device's cache is emptied."""
    runner = CrowdedRunner(most=10)
    alive: list[bool] = []

    def release() -> None:
        gc.collect()
        alive.append(runner.held[-1]() is not None)

    engine = crowded(runner, release_memory=release)
    engine.add(make_request(20))
    run_to_end(engine)

    assert alive == [False]


def test_running_out_of_memory_neither_counts_nor_forgives():
    """Between two steps that fail otherwise it is as if it had not happened."""
    runner = CrowdedRunner(most=-1)
    engine = crowded(runner)
    errors = [RuntimeError("the kernel died"), MemoryError(), RuntimeError("the kernel died")]
    for error in [*errors, MemoryError()]:
        runner.error = error
        engine.add(make_request(4))
        run_to_end(engine)

    runner.error = RuntimeError("the kernel died")
    engine.add(make_request(4))
    with pytest.raises(RuntimeError, match="the kernel died"):
        engine.step()


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("a tensor in another memory format"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_an_illegal_access_is_not_called_a_lack_of_memory(error, is_it):
    """After it the GPU computes nothing more, and the engine must not go on."""
    assert is_out_of_memory(error) is is_it


async def test_a_request_that_memory_ran_out_for_says_what_to_lower(monkeypatch):
    """An `InferenceError` with the settings; the next request is answered."""
    run = ModelRunner.run

    def crowded_run(self, scheduled):
        if sum(item.num_tokens for item in scheduled) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, scheduled)

    monkeypatch.setattr(ModelRunner, "run", crowded_run)
    async with await tiny_builder().build() as model:
        for _ in range(MAX_FAILED_STEPS + 1):
            with pytest.raises(InferenceError, match=r"memory ran out.*max_num_batched_tokens"):
                await continue_ids(model, prompt(50), 4)
        found = await continue_ids(model, prompt(20), 4)

    assert found == expected("llama", tuple(prompt(20)), 4)


# The largest step


def test_the_largest_step_has_every_sequence_and_as_many_tokens_as_may_be():
    """A prompt that ends at the longest length, and decodes that share the pool's tokens."""
    step = largest_step(
        max_num_seqs=4,
        max_num_batched_tokens=103,
        max_model_len=2000,
        num_tokens=800,
        block_size=16,
    )

    assert [item.num_tokens for item in step] == [100, 1, 1, 1]
    assert [len(item.sequence) for item in step] == [2000, 200, 200, 200]
    assert all(item.samples for item in step)
    assert {block for item in step for block in item.sequence.blocks} == {0}
    assert [len(item.sequence.blocks) for item in step] == [125, 13, 13, 13]


def test_prompts_that_are_shorter_than_a_step_share_it():
    """Where the context is short, several run whole, and no more than there are places."""

    def lengths(**limits) -> list[int]:
        step = largest_step(max_model_len=40, num_tokens=80, block_size=8, **limits)
        return [item.num_tokens for item in step]

    assert lengths(max_num_seqs=4, max_num_batched_tokens=93) == [40, 40, 10, 1]
    assert lengths(max_num_seqs=2, max_num_batched_tokens=1000) == [40, 40]
    assert lengths(max_num_seqs=8, max_num_batched_tokens=8) == [1] * 8


@attrs.define
class FakeMeter:
    """Says what it is told, and when it was started."""

    bytes: int
    log: list[str]

    def start(self) -> None:
        self.log.append("start")

    def peak(self) -> int:
        self.log.append("peak")
        return self.bytes


SMALL = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "max_model_len": 16,
    "num_tokens": 32,
    "block_size": 8,
}


def test_what_is_set_up_at_first_use_is_not_measured():
    """The step runs once before the meters start."""
    log: list[str] = []
    meters = {CPU: FakeMeter(100, log), CUDA: FakeMeter(200, log)}

    def run(scheduled):
        log.append("step")
        return []

    taken = measure_largest_step(run, meters, device=CPU, **SMALL)

    assert taken == {CPU: 100, CUDA: 200}
    assert log == ["step", "start", "start", "step", "peak", "peak"]


def test_a_step_that_does_not_fit_is_a_load_error_with_the_limits():
    """Its size is named; other errors keep their names."""

    def crowded(scheduled):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ModelLoadError, match=r"step of 8 tokens of 2 sequences.*max_num_seqs"):
        measure_largest_step(crowded, {}, device=CPU, **SMALL)

    def broken(scheduled):
        raise RuntimeError("the kernel died")

    with pytest.raises(RuntimeError, match="the kernel died"):
        measure_largest_step(broken, {}, device=CPU, **SMALL)


def test_a_meter_counts_from_what_is_there(monkeypatch):
    """torch's peak, reset at the start; the stream is waited for before each look."""
    calls: list[str] = []
    said = {"memory_allocated": 1000, "max_memory_allocated": 1700}
    for name, value in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    stream = types.SimpleNamespace(synchronize=lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    meter = CudaMeter(CUDA)
    meter.start()

    assert meter.peak() == 700
    assert calls == ["wait", "reset", "wait"]


# The plan with what was measured


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The engine measures its steps; returns what the device says is free, and what a step takes.

    Attention is torch's, over pages, as on a GPU without FlashInfer.
    """
    facts = types.SimpleNamespace(free=2 * GIB, step=300 * MIB, log=[])
    monkeypatch.setattr(
        paged_pool,
        "meters_of",
        lambda settled: {settled.device: FakeMeter(facts.step, facts.log)},
    )
    gpu = lambda device: DeviceMemory(free=facts.free, total=4 * GIB, is_cpu=False)  # noqa: E731
    monkeypatch.setattr(paged_pool, "device_memory", gpu)
    return facts


async def test_a_measured_step_takes_the_place_of_the_estimate(as_on_a_gpu):
    """The pool gets nine tenths less what is taken, 2 of 4 GiB, and less the step."""
    as_on_a_gpu.free = 2 * GIB
    async with await tiny_builder().build() as model:
        found = await continue_ids(model, prompt(20), 6)
        stats = await model.stats()

    assert as_on_a_gpu.log == ["start", "peak"]
    per_block = 8 * 4 * 2 * 2 * 16 * 4
    pool = int(4 * GIB * 0.9) - 2 * GIB - 300 * MIB
    assert stats.total_blocks == min(pool, 2 * GIB - GIB // 2 - 300 * MIB) // per_block
    assert found == expected("llama", tuple(prompt(20)), 6)


def test_the_plan_that_was_measured_says_so(as_on_a_gpu):
    """What was free before loading stays; computation and pool are the new ones."""
    checkpoint = open_checkpoint(ModelSource(model_id=tiny_folder()))
    config = EngineConfig(device="cpu", dtype="f32", num_threads=1)
    settled = build.settle(checkpoint, config, {})
    model = load_model(settled.checkpoint, dtype=settled.dtype, device=CPU, model=settled.model)

    plan = paged_pool.with_measured_plan(settled, model, {"max_model_len": ""}).plan

    assert (plan.activation_bytes, plan.activations_measured) == (300 * MIB, True)
    assert plan.free_bytes == settled.plan.free_bytes
    assert plan.num_parameters == settled.plan.num_parameters
    assert "measured: 4096 tokens a step" in str(plan)
    assert "estimate: 4096 tokens a step" in str(settled.plan)


async def test_what_another_took_meanwhile_is_not_there(as_on_a_gpu):
    """A second model sees what the first has left, and says who has the rest."""
    as_on_a_gpu.free = 400 * MIB
    with pytest.raises(ConfigError, match=r"3.61 of 4.00 GiB are taken.*a size each"):
        await tiny_builder().build()


async def test_nothing_is_measured_on_a_cpu():
    """There an estimate, and half of the RAM, are what counts."""
    checkpoint = open_checkpoint(ModelSource(model_id=tiny_folder()))
    settled = build.settle(checkpoint, EngineConfig(device="cpu", dtype="f32"), {})

    assert paged_pool.meters_of(settled) == {}
    assert paged_pool.with_measured_plan(settled, settled.model, {}) is settled
    on_gpu = attrs.evolve(settled, device=CUDA)
    assert paged_pool.meters_of(on_gpu) == {CUDA: CudaMeter(CUDA)}
    assert paged_pool.meters_of(attrs.evolve(on_gpu, paged_backend=None)) == {}


def test_the_real_pass_needs_the_null_block_alone():
    """A step of the real runner over a cache of one block, longer than that block."""
    checkpoint = open_checkpoint(ModelSource(model_id=tiny_folder()))
    settled = build.settle(checkpoint, EngineConfig(device="cpu", dtype="f32"), {})
    model = load_model(checkpoint, dtype=torch.float32, device=CPU)
    settled = attrs.evolve(settled, paged_backend="SdpaBackend")
    _, backend = paged_pool.make_pool(settled, model, num_blocks=1, origins={})
    assert isinstance(backend, SdpaBackend)
    runner = ModelRunner(model=model, backend=backend, device=CPU, block_size=32)
    step = largest_step(
        max_num_seqs=3,
        max_num_batched_tokens=70,
        max_model_len=300,
        num_tokens=600,
        block_size=32,
    )

    drawn = runner.run(step)

    assert [token is not None and token.error is None for token in drawn] == [True] * 3


# What is kept beside the pool


@pytest.fixture
def hopper(monkeypatch):
    """A GPU with 132 processors of compute capability 9."""
    properties = types.SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def planned(name: str = "llama", *, free: int = 8 * GIB, adapters: int = 0, **settings):
    checkpoint = open_checkpoint(ModelSource(model_id=tiny_folder(name)))
    model = prepare_model(checkpoint)
    forms = choose_forms(model, checkpoint, dtype=torch.bfloat16, packing="none")
    config = EngineConfig(**{"device": "cuda", "dtype": "bf16", "max_num_seqs": 10} | settings)
    return plan_memory(
        model,
        config,
        name="tiny",
        forms=forms,
        dtype=torch.bfloat16,
        adapter_bytes=adapters,
        memory=DeviceMemory(free=free, total=free, is_cpu=False),
    )


@pytest.mark.usefixtures("hopper")
def test_flashinfers_workspace_and_wrappers_are_in_the_plan():
    """One workspace, and two wrappers for each distinct spec: Gemma has two."""
    without = planned("gemma2")
    plan = planned("gemma2", flashinfer=True)

    assert without.attention_bytes == 0
    assert plan.attention_bytes == LEAST_WORKSPACE + 4 * WRAPPER_BYTES
    assert plan.kv_bytes_per_token * 32 * (without.num_blocks - plan.num_blocks) == (
        pytest.approx(plan.attention_bytes, abs=32 * plan.kv_bytes_per_token)
    )
    assert "FlashInfer" in str(plan)
    assert "FlashInfer" not in str(without)


@pytest.mark.usefixtures("hopper")
def test_graphs_are_in_the_plan():
    """Plans and tables of each bucket, and what captured steps return."""
    eager = planned(flashinfer=True)
    plan = planned(flashinfer=True, cuda_graphs=True)

    rows = [1, 2, 3, 4, 5, 6, 7, 8, 10]
    tables = sum(4 * (size * 16 + 2 * size + 1) for size in rows)
    assert plan.attention_bytes - eager.attention_bytes == len(rows) * PLAN_BYTES + tables
    assert 0 == eager.graph_bytes < sum(rows) * 512 * 4 < plan.graph_bytes < CAPTURE_BYTES
    assert plan.num_blocks < eager.num_blocks
    assert "CUDA graphs" in str(plan)


@pytest.mark.usefixtures("hopper")
def test_what_is_kept_leaves_less_room_for_sizes_and_adapters():
    """It counts wherever memory is divided."""
    sized = {"flashinfer": True, "max_model_len": 64}
    plan = planned(**sized)
    assert plan.taken_bytes == (plan.weight_bytes + plan.activation_bytes + plan.attention_bytes)
    room = 8 * GIB - plan.taken_bytes - plan.kv_bytes
    require_room_for_adapters(attrs.evolve(plan, adapter_bytes=room))
    with pytest.raises(ModelLoadError, match="adapters"):
        require_room_for_adapters(attrs.evolve(plan, adapter_bytes=room + 1))


def test_nothing_is_kept_without_a_gpu():
    """On a CPU the reference of FlashInfer has no plans."""
    model = prepare_model(open_checkpoint(ModelSource(model_id=tiny_folder())))
    config = EngineConfig(device="cpu", flashinfer=True)

    kept = kept_memory.kept_memory(
        model.config,
        model.specs,
        config,
        dtype=torch.float32,
        block_size=32,
        max_model_len=64,
        device=CPU,
    )

    assert kept.total == 0


# What is free


def test_memory_that_torch_keeps_counts_as_free(monkeypatch):
    """It is given back first, and not while somebody captures a graph."""
    calls: list[str] = []

    def empty() -> None:
        assert capturing.locked()
        calls.append("empty")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (calls.append("ask"), 7 * GIB, 8 * GIB)[1:]
    )
    properties = types.SimpleNamespace(is_integrated=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    assert device_memory(CUDA) == DeviceMemory(free=7 * GIB, total=8 * GIB, is_cpu=False)
    assert calls == ["empty", "ask"]
    memory.release_cached(CPU)
    assert calls == ["empty", "ask"]


# Loading


def test_the_host_holds_one_tensor_while_weights_go_to_a_device(tmp_path):
    """Of all the weights, the largest is the most that is there at once; the device gets all."""
    checkpoint = open_checkpoint(ModelSource(model_id=tiny_folder("qwen3")))
    now = peak = 0

    def forget(size: int) -> None:
        nonlocal now
        now -= size

    def watched(source):
        def load() -> Tensor:
            nonlocal now, peak
            tensor = source.load().clone()
            now += tensor.nbytes
            peak = max(peak, now)
            weakref.finalize(tensor, forget, tensor.nbytes)
            return tensor

        return attrs.evolve(source, load=load)

    tensors = {name: watched(source) for name, source in checkpoint.tensors.items()}
    model = load_model(
        attrs.evolve(checkpoint, tensors=tensors),
        dtype=torch.bfloat16,
        device=torch.device("meta"),  # it keeps nothing on the host
    )

    largest = max(torch.Size(source.shape).numel() for source in checkpoint.tensors.values())
    assert peak == 4 * largest
    assert now == 0
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_gpu_needs_no_room_for_a_tensor_that_the_host_reads(monkeypatch):
    """Weights that fill it to the byte are loaded; on a CPU the largest counts twice."""
    checkpoint = open_checkpoint(ModelSource(model_id=tiny_folder()))
    forms = choose_forms(
        prepare_model(checkpoint), checkpoint, dtype=torch.bfloat16, packing="none"
    )
    size = total_bytes(forms)
    monkeypatch.setattr(loader, "free_memory", lambda device: size)

    loader.check_weights_fit(checkpoint, forms, device=CUDA)
    with pytest.raises(ModelLoadError, match="does not fit"):
        loader.check_weights_fit(checkpoint, forms, device=CPU)
    monkeypatch.setattr(loader, "free_memory", lambda device: size - 1)
    with pytest.raises(ModelLoadError, match="free on cuda"):
        loader.check_weights_fit(checkpoint, forms, device=CUDA)


def test_each_weight_goes_to_the_device_it_is_mapped_to():
    """By the layer in its name."""
    checkpoint = open_checkpoint(ModelSource(model_id=tiny_folder()))

    def device_of(name: str) -> torch.device:
        return torch.device("meta" if ".layers.2." in name else "cpu")

    model = load_model(checkpoint, dtype=torch.float32, device=CPU, device_of=device_of)

    apart = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert apart == {name for name, _ in model.named_parameters() if ".layers.2." in name}
    assert apart
