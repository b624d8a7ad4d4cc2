"""From an opened checkpoint and settings to an engine; runs on the engine's thread."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping

import attrs
import torch

from mistralrs_sdk.attention.backend import AttentionBackend
from mistralrs_sdk.attention.dense import DenseSdpaBackend
from mistralrs_sdk.attention.kv_cache import DenseKVCache
from mistralrs_sdk.config import (
    EngineConfig,
    MemoryGpuConfig,
    ModelSource,
    Progress,
)
from mistralrs_sdk.cpu_threads import shared_threads, use_threads
from mistralrs_sdk.distributed import ALONE, TensorParallel
from mistralrs_sdk.engine.adapters import AdapterRegistry, locator
from mistralrs_sdk.engine.block_pool import BlockPool
from mistralrs_sdk.engine.cuda_graphs import cuda_graphs
from mistralrs_sdk.engine.default_scheduler import DefaultScheduler
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.look_ahead import LookAhead
from mistralrs_sdk.engine.memory import (
    cuda_devices,
    device_memory,
    paged_config,
    plan_layers,
    release_cached,
)
from mistralrs_sdk.engine.model_runner import ModelRunner
from mistralrs_sdk.engine.paged_attention import KvDType
from mistralrs_sdk.engine.paged_pool import make_pool, with_measured_plan, without_cache
from mistralrs_sdk.engine.prompt_batch import CPU_MIXED_PROMPT_TOKENS
from mistralrs_sdk.engine.rank_place import place_of
from mistralrs_sdk.engine.scheduler import Scheduler, SchedulerConfig
from mistralrs_sdk.engine.settle import Settled, settle
from mistralrs_sdk.engine.tensor_parallel import RankLink, lead
from mistralrs_sdk.errors import AdapterError, ModelLoadError
from mistralrs_sdk.layers.lora import LoraLayers
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.forms import (
    Form,
    Packing,
    describe_forms,
    forms_as_kept,
    total_bytes,
)
from mistralrs_sdk.loading.imatrix import importance_of
from mistralrs_sdk.loading.loader import (
    load_model,
    open_checkpoint,
)
from mistralrs_sdk.loading.shards import shard_importance
from mistralrs_sdk.plan import MemoryPlan
from mistralrs_sdk.switches import switched_on

logger = logging.getLogger("mistralrs_sdk.engine")

_model_uids = itertools.count()


@attrs.frozen(kw_only=True)
class EngineInfo:
    """What was built: the settings with nothing left open, and where each came from."""

    config: EngineConfig
    origins: Mapping[str, str]
    """For settings that were resolved: where the value came from, in words."""
    architecture: str
    vocab_size: int
    num_parameters: int
    packing: Packing
    """What becomes of weights that nobody asked to quantise."""
    forms: Mapping[str, Form]
    """How each weight is kept."""
    kv_bytes_per_token: int
    kv_dtype: KvDType
    """The type keys and values are kept in."""
    num_blocks: int
    """Usable blocks of the KV pool; 0 without a KV cache."""
    attention: str
    cpu_affinity: frozenset[int] | None
    """The only CPUs the engine's threads run on; None if they are not pinned."""
    load_seconds: float

    @property
    def weight_bytes(self) -> int:
        return total_bytes(self.forms)

    @property
    def weights(self) -> str:
        """The types the matrices are kept in, and how many there are of each."""
        return describe_forms(self.forms.values())

    @property
    def max_model_len(self) -> int:
        assert self.config.max_model_len is not None, "resolved at build"
        return self.config.max_model_len


def build_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    adapters: AdapterRegistry | None = None,
    source: ModelSource | None = None,
    link: RankLink | None = None,
    ended: contextlib.ExitStack | None = None,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[Engine, EngineInfo]:
    """Load the weights and set up cache, scheduler and runner.

    `adapters` gets those that `config` names, before the weights are read; without it the model
    takes none. Call it on the thread that will step the engine: it sets the number of CPU threads,
    and the CPUs they are pinned to if that is wanted, for the calling thread and those it starts,
    and the thread's current GPU.

    If `config` asks for a tensor-parallel model, its other ranks are started or met first; those
    that are started here read the weights from `source`. They end when `ended` is closed, or with
    the engine's runner. On the other ranks `link` is what connects them.

    Raises:
        ConfigError: a setting does not suit this model or this machine.
        ModelLoadError: the weights or the KV cache do not load or do not fit.
    """
    started = time.perf_counter()
    if link is None and config.tensor_parallel > 1:
        link = lead(source, checkpoint.config, config, cancelled=cancelled)
        if ended is not None:
            ended.callback(link.close)
        try:
            engine, info = build_engine(
                checkpoint, config, link=link, progress=progress, cancelled=cancelled
            )
        except BaseException:
            link.close()
            raise
        return engine, attrs.evolve(info, load_seconds=time.perf_counter() - started)
    origins: dict[str, str] = {}
    parallel = ALONE if link is None else link.parallel
    # First of all: pins what computes from here on.
    threads = shared_threads(
        use_threads(config.num_threads), user=config.num_threads, ranks=parallel.local_size
    )
    origins["num_threads"], origins["cpu_affinity"] = threads.origin, threads.pinned_by
    # For this thread, and for threads the process starts later: torch keeps one number for those.
    torch.set_num_threads(threads.num_threads)
    config = attrs.evolve(config, num_threads=threads.num_threads, lora_runtime_config=config.lora)
    if link is not None:
        config = attrs.evolve(config, device=str(link.device))
    settled = settle(checkpoint, config, origins, parallel=parallel, adapters=adapters)
    if link is not None:
        origins["device"] = "that of rank 0"
        settled = attrs.evolve(settled, plan=link.agree(settled))
    device, dtype = settled.device, settled.dtype
    make_current(device)
    lora = None if adapters is None else _load_adapters(adapters, settled)
    importance = None
    if config.imatrix is not None:
        importance = shard_importance(importance_of(checkpoint, config.imatrix), settled.parts)
    model = load_model(
        settled.checkpoint,
        dtype=dtype,
        device=device,
        device_of=None if settled.places is None else settled.places.device_of,
        model=settled.model,
        forms=settled.forms,
        importance=importance,
        progress=progress,
        cancelled=cancelled,
    )
    if settled.places is not None:
        model.model.runs = settled.places.runs
    if link is None:
        settled = with_measured_plan(settled, model, origins)
    release_cached(device)  # what reading the weights left behind
    resolved, scheduler, backend = _choose_cache(settled, origins)
    graphs = None
    if resolved.cuda_graphs:
        seqs = resolved.max_num_seqs
        graphs = cuda_graphs(model, backend, device=device, max_num_seqs=seqs)
    runner = ModelRunner(
        model=model,
        backend=backend,
        device=device,
        block_size=settled.plan.block_size,
        lora=lora,
        graphs=graphs,
    )
    if graphs is not None and link is None:  # ranks do that together, once all are ready
        graphs.capture_ahead()
    look_ahead = None
    if link is None and runner.transfers is not None and isinstance(scheduler, Scheduler):
        look_ahead = LookAhead(scheduler, runner)
    info = EngineInfo(
        config=resolved,
        origins=origins,
        architecture=model.config.architecture,
        vocab_size=model.config.vocab_size,
        num_parameters=settled.plan.num_parameters,
        packing=settled.packing,
        forms=forms_as_kept(settled.forms, model, dtype=dtype),
        kv_bytes_per_token=settled.plan.kv_bytes_per_token,
        kv_dtype=settled.kv_dtype,
        num_blocks=scheduler.stats().total_blocks,
        attention=type(backend).__name__,
        cpu_affinity=threads.pinned,
        load_seconds=time.perf_counter() - started,
    )
    log_steps = switched_on(os.environ, "MISTRALRS_DEBUG")
    if log_steps:
        logger.setLevel(logging.DEBUG)  # the switch asks for lines that RUST_LOG=info would hide
    engine = Engine(
        scheduler,
        runner if link is None else link.ready(runner),
        look_ahead=look_ahead,
        replay_counts=runner.replay_counts,
        release_memory=functools.partial(release_cached, device),
        log_throughput=config.throughput_logging,
        log_steps=log_steps,
    )
    return engine, info


def make_current(device: torch.device) -> None:
    """Let this thread launch on `device` what is not torch's: that goes to the current GPU."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def plan_source(
    source: ModelSource, config: EngineConfig, *, progress: Progress | None = None
) -> MemoryPlan:
    """Open what `source` names and do as `plan_engine`."""
    adapters = AdapterRegistry(config.lora, locator(source, progress))
    return plan_engine(open_checkpoint(source, progress=progress), config, adapters=adapters)


def plan_engine(
    checkpoint: Checkpoint, config: EngineConfig, *, adapters: AdapterRegistry | None = None
) -> MemoryPlan:
    """What `build_engine` would take; reads no weights and leaves the threads alone.

    Raises:
        ConfigError, ModelLoadError, UnsupportedError: as `build_engine`.
    """
    parallel = ALONE
    if config.tensor_parallel > 1:
        place = place_of(os.environ, config.tensor_parallel)
        parallel = TensorParallel(place.rank, place.size, local_size=place.local_size)
    settled = settle(checkpoint, config, {}, parallel=parallel, adapters=adapters)
    one = settled.device.type != "cuda" or torch.cuda.device_count() == 1
    if one or config.device_mapping is not None:
        return settled.plan
    devices = cuda_devices(settled.device, device_memory(settled.device))
    layers = plan_layers(
        settled.model,
        settled.config,
        settled.plan,
        forms=settled.forms,
        dtype=settled.dtype,
        devices=devices,
    )
    return attrs.evolve(settled.plan, device_map=layers)


def _choose_cache(
    settled: Settled, origins: dict[str, str]
) -> tuple[EngineConfig, Scheduler | DefaultScheduler, AttentionBackend]:
    """Make the KV cache that was planned; returns the settings with nothing left open."""
    model, plan = settled.model, settled.plan
    origins["max_model_len"] = plan.max_model_len_reason
    config = attrs.evolve(settled.config, max_model_len=plan.max_model_len)
    if config.no_kv_cache:
        resolved = attrs.evolve(config, prefix_cache_n=None, paged_attn=None)
        origins["prefix_cache_n"] = "off with no_kv_cache"
        backend = without_cache(settled)
        return resolved, DefaultScheduler(_scheduler_config(resolved)), backend
    if config.paged_attn is None:
        caches = DenseKVCache(model.specs, dtype=settled.dtype, device=settled.device)
        default = DefaultScheduler(
            _scheduler_config(config),
            caches=caches,
            prefix_cache_n=config.prefix_cache_n,
            prefix_cache_tokens=plan.num_tokens // 2,  # the other half is for who runs
            model=next(_model_uids),
        )
        return config, default, DenseSdpaBackend(caches)
    paged = paged_config(config)
    assert paged is not None, "planned so"
    assert plan.block_size is not None, "planned so"
    origins["paged_attn"] = plan.kv_reason
    memory = MemoryGpuConfig.ContextSize(plan.num_tokens)
    resolved = attrs.evolve(config, paged_attn=attrs.evolve(paged, gpu_memory=memory))
    scheduler = Scheduler(
        _scheduler_config(resolved),
        BlockPool(plan.num_blocks + 1, plan.block_size),
        model=next(_model_uids),
    )
    settled = attrs.evolve(settled, config=resolved)
    resolved, backend = make_pool(settled, model, num_blocks=plan.num_blocks + 1, origins=origins)
    return resolved, scheduler, backend


def _load_adapters(adapters: AdapterRegistry, settled: Settled) -> LoraLayers | None:
    """Load what the settings name; None if the model is to take no adapters."""
    if settled.config.lora is None:
        return None
    packed = settled.packing == "native"
    layers = LoraLayers(settled.model, packed=packed, dtype=settled.dtype, device=settled.device)
    adapters.serve(layers)
    for spec in settled.config.lora_adapters:
        try:
            adapters.load(spec)
        except AdapterError as error:
            raise ModelLoadError(str(error)) from error
    return layers


def _scheduler_config(config: EngineConfig) -> SchedulerConfig:
    assert config.max_model_len is not None, "resolved before"
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        # The chunk limit protects decodes from long kernels on an accelerator; not on a CPU.
        max_prefill_chunk_tokens=(
            None if config.device == "cpu" else config.max_prefill_chunk_tokens
        ),
        max_decode_steps_before_prefill=config.max_decode_steps_before_prefill,
        max_model_len=config.max_model_len,
        prefix_caching=config.prefix_cache_n is not None,
        mixed_batches=config.mixed_batches,
        max_mixed_prompt_tokens=CPU_MIXED_PROMPT_TOKENS if config.device == "cpu" else None,
    )
