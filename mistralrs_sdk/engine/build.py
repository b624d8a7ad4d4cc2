"""From an opened checkpoint and settings to an engine; runs on the engine's thread."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping

import attrs
import torch

from mistralrs_sdk.attention.kv_cache import PagedKVCache, bytes_per_token
from mistralrs_sdk.attention.sdpa import SdpaBackend, UncachedSdpaBackend
from mistralrs_sdk.config import (
    EngineConfig,
    MemoryGpuConfig,
    ModelDType,
    PagedAttentionConfig,
    PagedCacheType,
    Progress,
)
from mistralrs_sdk.cpu_threads import switched_on, use_threads
from mistralrs_sdk.engine.block_pool import BlockPool
from mistralrs_sdk.engine.default_scheduler import DefaultScheduler
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.model_runner import ModelRunner
from mistralrs_sdk.engine.pool_size import DeviceMemory, choose_pool_size
from mistralrs_sdk.engine.prefix_cache import root_hash
from mistralrs_sdk.engine.scheduler import Scheduler, SchedulerConfig
from mistralrs_sdk.errors import ConfigError, UnsupportedError
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.loader import load_model
from mistralrs_sdk.machine import available_memory, physical_memory
from mistralrs_sdk.models.decoder import CausalLM

logger = logging.getLogger("mistralrs_sdk.engine")

_TORCH_DTYPES = {
    ModelDType.F32: torch.float32,
    ModelDType.F16: torch.float16,
    ModelDType.BF16: torch.bfloat16,
}
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
    weight_bytes: int
    kv_bytes_per_token: int
    num_blocks: int
    """Usable blocks of the KV pool; 0 without a KV cache."""
    attention: str
    cpu_affinity: frozenset[int] | None
    """The only CPUs the engine's threads run on; None if they are not pinned."""
    load_seconds: float

    @property
    def max_model_len(self) -> int:
        assert self.config.max_model_len is not None, "resolved at build"
        return self.config.max_model_len


def build_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[Engine, EngineInfo]:
    """Load the weights and set up cache, scheduler and runner.

    Call it on the thread that will step the engine: it sets the number of CPU threads, and the
    CPUs they are pinned to if that is wanted, for the calling thread and those it starts.

    Raises:
        ConfigError: a setting does not suit this model or this machine.
        ModelLoadError: the weights or the KV cache do not load or do not fit.
    """
    started = time.perf_counter()
    origins: dict[str, str] = {}
    threads = use_threads(config.num_threads)  # first of all: pins what computes from here on
    origins["num_threads"], origins["cpu_affinity"] = threads.origin, threads.pinned_by
    # For this thread, and for threads the process starts later: torch keeps one number for those.
    torch.set_num_threads(threads.num_threads)
    device = _choose_device(config, origins)
    if device.type == "cpu":
        _explain_chunk_limit(config, origins)
    dtype = _choose_dtype(config, device, origins)
    model = load_model(
        checkpoint,
        dtype=_TORCH_DTYPES[dtype],
        device=device,
        progress=progress,
        cancelled=cancelled,
    )
    parameters = list(model.parameters())
    resolved, scheduler, backend = _choose_cache(
        model,
        attrs.evolve(config, device=str(device), dtype=dtype, num_threads=threads.num_threads),
        origins,
    )
    paged = resolved.paged_attn
    runner = ModelRunner(
        model=model,
        backend=backend,
        device=device,
        block_size=paged.block_size if paged else None,
    )
    info = EngineInfo(
        config=resolved,
        origins=origins,
        architecture=model.config.architecture,
        vocab_size=model.config.vocab_size,
        num_parameters=sum(p.numel() for p in parameters),
        weight_bytes=sum(p.numel() * p.itemsize for p in parameters),
        kv_bytes_per_token=bytes_per_token(model.specs, _TORCH_DTYPES[dtype]),
        num_blocks=scheduler.stats().total_blocks,
        attention=type(backend).__name__,
        cpu_affinity=threads.pinned,
        load_seconds=time.perf_counter() - started,
    )
    log_steps = switched_on(os.environ, "MISTRALRS_DEBUG")
    if log_steps:
        logger.setLevel(logging.DEBUG)  # the switch asks for lines that RUST_LOG=info would hide
    engine = Engine(
        scheduler, runner, log_throughput=config.throughput_logging, log_steps=log_steps
    )
    return engine, info


def _choose_device(config: EngineConfig, origins: dict[str, str]) -> torch.device:
    if config.device is None:
        origins["device"] = "best device of this machine"
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    origins["device"] = "user"
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device ({config.device!r}) needs CUDA; torch {torch.__version__} does not find it: "
            'use with_device("cpu") or install a CUDA build of torch'
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device ({config.device!r}): this machine has {torch.cuda.device_count()} CUDA devices"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device ({config.device!r}) is not available: use with_device('cpu')")
    return device


def _explain_chunk_limit(config: EngineConfig, origins: dict[str, str]) -> None:
    """The chunk limit keeps kernels on an accelerator short; CPU scheduling does not use it."""
    origins["max_prefill_chunk_tokens"] = "no effect on a CPU"
    if config.max_prefill_chunk_tokens != EngineConfig().max_prefill_chunk_tokens:
        logger.warning(
            "max_prefill_chunk_tokens (%d) has no effect on a CPU: to split prompts there, "
            "lower max_num_batched_tokens (%d)",
            config.max_prefill_chunk_tokens,
            config.max_num_batched_tokens,
        )


def _choose_dtype(
    config: EngineConfig, device: torch.device, origins: dict[str, str]
) -> ModelDType:
    if config.dtype is not ModelDType.AUTO:
        origins["dtype"] = "user"
        return config.dtype
    origins["dtype"] = f"automatic on {device.type}"
    if device.type == "cpu":
        return ModelDType.F32
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return ModelDType.BF16
    return ModelDType.F16


def _choose_cache(
    model: CausalLM, config: EngineConfig, origins: dict[str, str]
) -> tuple[EngineConfig, Scheduler | DefaultScheduler, SdpaBackend | UncachedSdpaBackend]:
    """Resolve context and KV cache; returns the settings with nothing left open."""
    context = model.config.max_position_embeddings
    origins["max_model_len"] = "user" if config.max_model_len is not None else "model"
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(
            f"max_model_len ({config.max_model_len}) is longer than the model's context ({context})"
        )
    if config.no_kv_cache:
        resolved = attrs.evolve(
            config,
            max_model_len=config.max_model_len or context,
            prefix_cache_n=None,
            paged_attn=None,
        )
        origins["prefix_cache_n"] = "off with no_kv_cache"
        origins["max_decode_steps_before_prefill"] = "no effect with no_kv_cache"
        return resolved, DefaultScheduler(_scheduler_config(resolved)), UncachedSdpaBackend()
    paged = PagedAttentionConfig() if config.paged_attn == "auto" else config.paged_attn
    if paged.cache_type is not PagedCacheType.AUTO:
        raise UnsupportedError(
            f"cache_type ({paged.cache_type.value}) needs the FlashInfer backend on a CUDA device; "
            "use PagedCacheType.AUTO"
        )
    assert config.device is not None, "resolved before"
    dtype, device = _TORCH_DTYPES[config.dtype], torch.device(config.device)
    size = choose_pool_size(
        wanted=paged.gpu_memory,
        block_size=paged.block_size,
        bytes_per_token=bytes_per_token(model.specs, dtype),
        max_num_seqs=config.max_num_seqs,
        model_context=context,
        max_model_len=config.max_model_len,
        memory=_device_memory(device),
    )
    if size.max_model_len < context and config.max_model_len is None:
        origins["max_model_len"] = f"limited by the KV cache (the model has {context})"
    origins["paged_attn"] = size.reason
    cache = PagedKVCache(
        model.specs,
        num_blocks=size.num_blocks,
        block_size=paged.block_size,
        dtype=dtype,
        device=device,
    )
    tokens = (size.num_blocks - 1) * paged.block_size
    resolved = attrs.evolve(
        config,
        max_model_len=size.max_model_len,
        paged_attn=attrs.evolve(paged, gpu_memory=MemoryGpuConfig.ContextSize(tokens)),
    )
    scheduler = Scheduler(
        _scheduler_config(resolved),
        BlockPool(size.num_blocks, paged.block_size),
        root=root_hash(model=next(_model_uids)),
    )
    return resolved, scheduler, SdpaBackend(cache)


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
    )


def _device_memory(device: torch.device) -> DeviceMemory:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(free=free, total=total, is_cpu=False)
    return DeviceMemory(free=available_memory(), total=physical_memory(), is_cpu=True)
