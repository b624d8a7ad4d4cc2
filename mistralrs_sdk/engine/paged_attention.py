"""What attends to a paged KV cache in an engine: chosen before loading, made after it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import attrs
import torch

from mistralrs_sdk.attention.backend import AttentionBackend, AttentionSpec
from mistralrs_sdk.attention.cpu import CpuBackend
from mistralrs_sdk.attention.flashinfer import FlashInferBackend, flashinfer_missing
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.sdpa import SdpaBackend
from mistralrs_sdk.attention.select import (
    Choice,
    CudaFacts,
    select_backend,
    select_graphs,
    select_kv_dtype,
)
from mistralrs_sdk.config import EngineConfig, ModelDType, PagedCacheType
from mistralrs_sdk.engine.memory import paged_config
from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.kernels import native
from mistralrs_sdk.kernels.attention import has_fast_halves

logger = logging.getLogger("mistralrs_sdk.engine")

KvDType = ModelDType | PagedCacheType
"""The type of stored keys and values."""

TORCH_DTYPES: dict[KvDType, torch.dtype] = {
    ModelDType.F32: torch.float32,
    ModelDType.F16: torch.float16,
    ModelDType.BF16: torch.bfloat16,
    PagedCacheType.F8E4M3: torch.float8_e4m3fn,
}


def choose_attention(
    config: EngineConfig,
    device: torch.device,
    specs: Sequence[AttentionSpec],
    origins: dict[str, str],
) -> tuple[EngineConfig, str | None, KvDType]:
    """The settings with `flashinfer` and `cuda_graphs` resolved, the backend, the type it keeps.

    The backend is the class name of what attends to a paged cache; None without one. `config` has
    its dtype resolved; where values come from is written to `origins`.

    Raises:
        ConfigError: an environment variable is neither on nor off.
        UnsupportedError: what was asked for cannot be had; every reason is named.
    """
    paged = paged_config(config)
    if paged is None:
        origins["kv_dtype"] = "the model's dtype"
        origins["flashinfer"] = "the KV cache is not paged"
        return _with_switches(config, None, device, origins), None, config.dtype
    on_cpu = device.type == "cpu"  # asking for native kernels may compile them
    choice = select_backend(
        device=device.type,
        dtype=config.dtype.value,
        native=native.reason() if on_cpu and not native.available() else None,
        specs=specs,
        cache_type=paged.cache_type.value,
        cuda=_cuda_facts(device, config),
        flashinfer=config.flashinfer,
        environ=os.environ,
    )
    _explain_flashinfer(config, choice, origins)
    if paged.cache_type is not PagedCacheType.AUTO:
        _require_flashinfer(f"cache_type ({paged.cache_type.value})", choice, "use cache_type auto")
    kv = select_kv_dtype(
        choice.name,
        config.dtype.value,
        user_dtype=origins["dtype"] == "user",
        fast_halves=choice.name == "CpuBackend" and has_fast_halves(),
        environ=os.environ,
        cache_type=paged.cache_type.value,
    )
    origins["kv_dtype"] = kv.origin
    kinds = {kind.value: kind for kind in TORCH_DTYPES}
    return _with_switches(config, choice, device, origins), choice.name, kinds[kv.dtype]


def make_backend(
    name: str | None,
    cache: PagedKVCache,
    specs: Sequence[AttentionSpec],
    *,
    config: EngineConfig,
    dtype: torch.dtype,
    origins: dict[str, str],
) -> tuple[EngineConfig, AttentionBackend]:
    """The backend of that name over `cache`, and the settings as they are with it.

    FlashInfer is tried out, since it may have to compile its kernels. If it cannot, torch attends,
    unless what was asked for needs FlashInfer.

    Raises:
        ModelLoadError: there is no memory for what FlashInfer needs.
        UnsupportedError: what was asked for needs FlashInfer, and its kernels do not work.
    """
    if name == "CpuBackend":
        return config, CpuBackend(cache)
    if name != "FlashInferBackend":
        return config, SdpaBackend(cache)
    assert config.max_model_len is not None, "resolved before"
    logger.info("FlashInfer's kernels are tried; those that are missing are compiled, in minutes")
    try:
        backend = FlashInferBackend(
            cache,
            specs,
            dtype=dtype,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
        )
        backend.try_out()
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(
            f"FlashInfer's buffers do not fit on {cache.device} beside the KV cache ({error}): "
            "make that smaller, or use with_flashinfer(False)"
        ) from error
    except Exception as error:  # compilers, drivers and launches fail in their own ways
        return _without_flashinfer(error, cache, config=config, origins=origins)
    return config, backend


def _cuda_facts(device: torch.device, config: EngineConfig) -> CudaFacts | None:
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    missing = None if config.flashinfer is False else flashinfer_missing()
    return CudaFacts(capability=capability, flashinfer=missing)


def _explain_flashinfer(config: EngineConfig, choice: Choice, origins: dict[str, str]) -> None:
    """Say who chose; refuse what was asked for and cannot be had."""
    origins["attention"] = "; not ".join(("automatic", *choice.reasons))
    if choice.name == "FlashInferBackend":
        origins["flashinfer"] = "user" if config.flashinfer else "automatic on cuda"
        return
    if config.flashinfer:
        _require_flashinfer("flashinfer (True)", choice, "leave with_flashinfer out")
    against = _obstacles(choice)
    origins["flashinfer"] = "; ".join(against) if against else "the device is cpu"
    if config.flashinfer is False:
        origins["flashinfer"] = "user"


def _require_flashinfer(what: str, choice: Choice, way_out: str) -> None:
    if choice.name == "FlashInferBackend":
        return
    against = "; ".join(_obstacles(choice)) or "the device is cpu"
    raise UnsupportedError(f"{what} needs FlashInfer, which cannot be used: {against}; {way_out}")


def _obstacles(choice: Choice) -> list[str]:
    mark = "FlashInferBackend: "
    return [reason.removeprefix(mark) for reason in choice.reasons if reason.startswith(mark)]


def _with_switches(
    config: EngineConfig, choice: Choice | None, device: torch.device, origins: dict[str, str]
) -> EngineConfig:
    """The settings with `flashinfer` and `cuda_graphs` as they will be."""
    graphs = select_graphs(
        None if choice is None else choice.name,
        device=device.type,
        ranks=config.tensor_parallel,
        cuda_graphs=config.cuda_graphs,
        environ=os.environ,
    )
    if config.cuda_graphs and not graphs.on:
        against = "; ".join((graphs.reason, *(() if choice is None else choice.reasons)))
        raise UnsupportedError(
            f"cuda_graphs (True) cannot be had: {against}; leave with_cuda_graphs out"
        )
    origins["cuda_graphs"] = "user" if config.cuda_graphs is not None else graphs.reason
    flashinfer = choice is not None and choice.name == "FlashInferBackend"
    return attrs.evolve(config, flashinfer=flashinfer, cuda_graphs=graphs.on)


def _without_flashinfer(
    error: Exception, cache: PagedKVCache, *, config: EngineConfig, origins: dict[str, str]
) -> tuple[EngineConfig, AttentionBackend]:
    why = f"its kernels do not work here ({type(error).__name__}: {error})"
    mine = {name: origins[name] == "user" for name in ("flashinfer", "cuda_graphs")}
    asked = [f"{name} (True)" for name in mine if mine[name] and getattr(config, name)]
    if cache.dtype is torch.float8_e4m3fn:
        asked.append(f"cache_type ({PagedCacheType.F8E4M3.value})")
    if asked:
        raise UnsupportedError(
            f"{' and '.join(asked)} cannot be had: FlashInfer was to attend, and {why}; leave "
            "that out, or see that a CUDA compiler or flashinfer-jit-cache is installed"
        ) from error
    logger.warning("FlashInfer is not used, and attention is slower: %s", why)
    choice = Choice(name="SdpaBackend", reasons=(f"FlashInferBackend: {why}",))
    origins["attention"] = "; not ".join(("automatic", *choice.reasons))
    origins["flashinfer"] = why
    graphs = False if mine["cuda_graphs"] else None
    config = attrs.evolve(config, cuda_graphs=graphs)
    return _with_switches(config, choice, cache.device, origins), SdpaBackend(cache)
