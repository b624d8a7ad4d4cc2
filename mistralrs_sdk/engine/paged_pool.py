"""The KV pool of a loaded model: its plan with what a GPU really has, then what attends to it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence

import attrs
import torch

from mistralrs_sdk.attention.backend import AttentionBackend
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.mapped import MappedBackend, MappedPart
from mistralrs_sdk.attention.sdpa import UncachedSdpaBackend
from mistralrs_sdk.config import EngineConfig
from mistralrs_sdk.engine.measured_memory import CudaMeter, PeakMeter, measure_largest_step
from mistralrs_sdk.engine.memory import Measured, device_memory, most_tokens, plan_memory
from mistralrs_sdk.engine.model_runner import ModelRunner
from mistralrs_sdk.engine.paged_attention import TORCH_DTYPES, make_backend
from mistralrs_sdk.engine.pool_size import KNOBS
from mistralrs_sdk.engine.settle import Settled
from mistralrs_sdk.errors import ModelLoadError
from mistralrs_sdk.models.decoder import CausalLM

logger = logging.getLogger("mistralrs_sdk.engine")


def make_pool(
    settled: Settled, model: CausalLM, *, num_blocks: int, origins: dict[str, str]
) -> tuple[EngineConfig, AttentionBackend]:
    """Allocate `num_blocks`, the null block included, and what attends to them.

    Returns the settings as they are then; where they come from is written to `origins`.

    Raises:
        ModelLoadError: the memory that was planned is no longer there.
        UnsupportedError: what was asked for needs FlashInfer, and its kernels do not work.
    """
    plan = settled.plan
    assert plan.block_size is not None, "planned with pages"
    config = attrs.evolve(settled.config, max_model_len=plan.max_model_len)
    parts = []
    for device, layers in _layers_by_device(settled, model).items():
        specs = [model.specs[layer] for layer in layers]
        try:
            cache = PagedKVCache(
                specs,
                num_blocks=num_blocks,
                block_size=plan.block_size,
                dtype=TORCH_DTYPES[settled.kv_dtype],
                device=device,
            )
        except (torch.OutOfMemoryError, OSError) as error:  # OSError: of mmap
            raise ModelLoadError(
                f"the KV cache ({plan.kv_reason}) takes {plan.kv_bytes / 2**30:.2f} GiB, which was "
                f"planned and is no longer free on {device} ({error}); lower it with {KNOBS}"
            ) from error
        name = settled.paged_backend if device.type == settled.device.type else None
        config, backend = make_backend(
            name, cache, specs, config=config, dtype=settled.dtype, origins=origins
        )
        parts.append(MappedPart(device=device, layers=layers, backend=backend))
    return config, parts[0].backend if settled.places is None else MappedBackend(parts)


def without_cache(settled: Settled) -> AttentionBackend:
    """What attends where nothing is kept."""
    if settled.places is None:
        return UncachedSdpaBackend()
    return MappedBackend(
        [
            MappedPart(device=share.device, layers=share.layers, backend=UncachedSdpaBackend())
            for share in settled.places.shares
        ]
    )


def _layers_by_device(settled: Settled, model: CausalLM) -> Mapping[torch.device, Sequence[int]]:
    """A device with several runs of layers has one cache, and one backend with its workspace."""
    if settled.places is None:
        return {settled.device: range(len(model.specs))}
    return {share.device: share.layers for share in settled.places.shares}


def with_measured_plan(settled: Settled, model: CausalLM, origins: dict[str, str]) -> Settled:
    """On a GPU, plan again from what the largest step takes and what is free by now.

    `model` is loaded. Elsewhere, and without paging, nothing changes. If FlashInfer turns out not
    to work here, the settings say so.

    Raises:
        ConfigError, ModelLoadError, UnsupportedError: as `settle` and `make_pool`.
    """
    meters = meters_of(settled)
    if not meters:
        return settled
    config, taken = _measure(settled, model, meters, origins)
    if config.flashinfer != settled.config.flashinfer:
        settled = attrs.evolve(settled, paged_backend="SdpaBackend")
    own = settled.config.max_model_len
    settled = attrs.evolve(settled, config=attrs.evolve(config, max_model_len=own))
    gc.collect()  # what attended to the small cache is gone, and not counted as taken
    before = settled.plan
    plan = plan_memory(
        model,
        settled.config,
        name=before.name,
        forms=settled.forms,
        dtype=settled.dtype,
        kv_dtype=TORCH_DTYPES[settled.kv_dtype],
        adapter_bytes=before.adapter_bytes,
        memory=device_memory(settled.device),
        shares=() if settled.places is None else settled.places.shares,
        measured={
            device: Measured(activation_bytes=size, left=device_memory(device))
            for device, size in taken.items()
        },
    )
    logger.info(
        "the largest step takes %.0f MiB beside the weights (%.0f were estimated)",
        plan.activation_bytes / 2**20,
        before.activation_bytes / 2**20,
    )
    plan = attrs.evolve(
        plan,
        free_bytes=before.free_bytes,
        num_parameters=before.num_parameters,
        device_map=before.device_map,
        is_mapped=before.is_mapped,
    )
    return attrs.evolve(settled, plan=plan)


def meters_of(settled: Settled) -> Mapping[torch.device, PeakMeter]:
    """What measures the GPUs that keep keys and values in pages."""
    if settled.paged_backend is None:
        return {}
    devices = [settled.device]
    if settled.places is not None:
        devices = [share.device for share in settled.places.shares]
    return {device: CudaMeter(device) for device in devices if device.type == "cuda"}


def _measure(
    settled: Settled,
    model: CausalLM,
    meters: Mapping[torch.device, PeakMeter],
    origins: dict[str, str],
) -> tuple[EngineConfig, dict[torch.device, int]]:
    """The settings as they are with what attends here, and what a step takes on each device."""
    plan = settled.plan
    assert plan.block_size is not None, "planned with pages"
    config, backend = make_pool(settled, model, num_blocks=1, origins=origins)
    runner = ModelRunner(
        model=model, backend=backend, device=settled.device, block_size=plan.block_size
    )
    taken = measure_largest_step(
        runner.run,
        meters,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=most_tokens(config, plan.max_model_len),
        max_model_len=plan.max_model_len,
        num_tokens=plan.num_tokens,
        block_size=plan.block_size,
        device=settled.device,
    )
    return config, taken
