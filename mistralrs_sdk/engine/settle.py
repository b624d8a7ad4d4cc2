"""What is decided before weights are read: device, dtype, the form of the weights, sizes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import attrs
import torch

from mistralrs_sdk.config import EngineConfig, ModelDType
from mistralrs_sdk.distributed import ALONE, TensorParallel
from mistralrs_sdk.engine.adapters import AdapterRegistry
from mistralrs_sdk.engine.layer_places import LayerPlaces, place_layers, refuse_crowded
from mistralrs_sdk.engine.memory import device_memory, plan_memory, require_room_for_adapters
from mistralrs_sdk.engine.paged_attention import TORCH_DTYPES, KvDType, choose_attention
from mistralrs_sdk.engine.pool_size import DeviceMemory
from mistralrs_sdk.engine.prompt_batch import CPU_MIXED_PROMPT_TOKENS
from mistralrs_sdk.engine.quantising import (
    asked_target,
    packing_of,
    refuse_places,
    warn_of_expanded,
)
from mistralrs_sdk.errors import ConfigError, UnsupportedError
from mistralrs_sdk.layers.lora import LoraLayers
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.forms import (
    Form,
    Packing,
    choose_forms,
)
from mistralrs_sdk.loading.loader import bytes_to_load, check_weights_fit, prepare_model
from mistralrs_sdk.loading.shards import refuse_split_blocks, shard_checkpoint, whole_target
from mistralrs_sdk.models.decoder import CausalLM
from mistralrs_sdk.models.parallel import Part, parts_of, share_on_meta
from mistralrs_sdk.plan import MemoryPlan
from mistralrs_sdk.quant.isq import refuse_unused

logger = logging.getLogger("mistralrs_sdk.engine")


@attrs.frozen(kw_only=True, eq=False)
class Settled:
    """What is known before the weights are read."""

    config: EngineConfig
    """With device, dtype, flashinfer and cuda_graphs resolved."""
    device: torch.device
    dtype: torch.dtype
    checkpoint: Checkpoint
    """What is read: of a tensor-parallel model the parts of this rank."""
    parts: Mapping[str, Part]
    """Those parts, of the tensors that are not read whole."""
    model: CausalLM
    """Its parameters are on "meta"."""
    packing: Packing
    forms: Mapping[str, Form]
    paged_backend: str | None
    """Class name of the backend that attends to a paged cache; None without one."""
    kv_dtype: KvDType
    plan: MemoryPlan
    places: LayerPlaces | None = None
    """Where the layers go if several devices hold them."""


def settle(
    checkpoint: Checkpoint,
    config: EngineConfig,
    origins: dict[str, str],
    *,
    parallel: TensorParallel = ALONE,
    adapters: AdapterRegistry | None = None,
) -> Settled:
    """Choose device, dtype and sizes: the one way for `build_engine` and `plan_engine`.

    They are those of one rank, whose place is `parallel`, of a tensor-parallel model. `adapters`
    finds the LoRA adapters that `config` names.

    Raises:
        ConfigError, ModelLoadError, UnsupportedError: as `build_engine`.
    """
    device = _choose_device(config, origins)
    if config.no_kv_cache or config.paged_attn is None:
        _explain_unpaged(config, origins)
    elif device.type == "cpu":
        _explain_chunk_limit(config, origins)
    kind = _choose_dtype(config, device, origins)
    dtype = TORCH_DTYPES[kind]
    config = attrs.evolve(config, device=str(device), dtype=kind)
    model = prepare_model(checkpoint)
    target = asked_target(config, device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    parts: Mapping[str, Part] = {}
    packing = packing_of(checkpoint, config, device, origins)
    if parallel.size > 1:
        parts, target = parts_of(model, parallel), whole_target(target, checkpoint)
        refuse_split_blocks(checkpoint, parts, parallel, packing=packing, target=target)
        checkpoint, model = shard_checkpoint(checkpoint, parts), share_on_meta(model, parallel)
    forms = choose_forms(model, checkpoint, dtype=dtype, packing=packing, target=target)
    if config.topology is not None:
        matrices = [part for form in forms.values() if form.is_matrix for part in form.parts]
        refuse_unused(config.topology, [part.removesuffix(".weight") for part in matrices])
    warn_of_expanded(forms, checkpoint.tensors, device)
    memory = _memory_of(device, parallel)
    if config.device_mapping is None:
        check_weights_fit(checkpoint, forms, device=device)
    config, paged_backend, kv_dtype = choose_attention(config, device, model.specs, origins)
    places = None
    if config.device_mapping is not None:
        places = place_layers(
            model,
            config,
            forms=forms,
            dtype=dtype,
            kv_dtype=TORCH_DTYPES[kv_dtype],
            device=device,
            devices=_devices_like(device),
            memory_of=device_memory,
        )
        if places is not None:
            refuse_places(forms, places.device_of)
        config = _with_places(config, places, checkpoint, forms, device=device, origins=origins)
    adapter_bytes = 0
    if adapters is not None and config.lora_adapters:
        layers = LoraLayers(model, packed=packing == "native", dtype=dtype, device=device)
        adapter_bytes = adapters.measure(config.lora_adapters, layers)
    plan = plan_memory(
        model,
        config,
        name=checkpoint.name,
        forms=forms,
        dtype=dtype,
        kv_dtype=TORCH_DTYPES[kv_dtype],
        adapter_bytes=adapter_bytes,
        memory=memory,
        shares=() if places is None else places.shares,
    )
    plan = attrs.evolve(plan, num_parameters=num_parameters)
    if places is not None:
        plan = attrs.evolve(plan, device_map=places.device_map(), is_mapped=True)
    require_room_for_adapters(plan)
    return Settled(
        config=config,
        device=device,
        dtype=dtype,
        checkpoint=checkpoint,
        parts=parts,
        model=model,
        packing=packing,
        forms=forms,
        paged_backend=paged_backend,
        kv_dtype=kv_dtype,
        plan=plan,
        places=places,
    )


def _memory_of(device: torch.device, parallel: TensorParallel) -> DeviceMemory:
    """What the device has for this rank: ranks on the CPUs of one machine share its memory."""
    memory = device_memory(device)
    if device.type != "cpu":
        return memory
    ranks = parallel.local_size
    return attrs.evolve(memory, free=memory.free // ranks, total=memory.total // ranks)


def _devices_like(device: torch.device) -> list[torch.device]:
    """All devices of this kind."""
    if device.type != "cuda":
        return [device]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _with_places(
    config: EngineConfig,
    places: LayerPlaces | None,
    checkpoint: Checkpoint,
    forms: Mapping[str, Form],
    *,
    device: torch.device,
    origins: dict[str, str],
) -> EngineConfig:
    """The settings with the layers where they are; refuses what does not go with several devices.

    Raises:
        ModelLoadError: the weights do not fit where they are mapped to.
        UnsupportedError: CUDA graphs were asked for.
    """
    if places is None:
        check_weights_fit(checkpoint, forms, device=device)
        origins["device_mapping"] = f"the model fits on {device}, which holds all layers"
        return config
    refuse_crowded(
        places, forms, needed=functools.partial(bytes_to_load, checkpoint, device=device)
    )
    origins["device_mapping"] = str(places.device_map())
    if config.cuda_graphs:
        if origins["cuda_graphs"] == "user":
            raise UnsupportedError(
                f"cuda_graphs (True) cannot be had: the layers are on several devices "
                f"({places.device_map()}); leave with_cuda_graphs or with_device_mapping out"
            )
        origins["cuda_graphs"] = "the layers are on several devices"
    return attrs.evolve(config, cuda_graphs=False)


def _choose_device(config: EngineConfig, origins: dict[str, str]) -> torch.device:
    first = None if config.device_mapping is None else config.device_mapping.first_device
    if config.device is None and first is not None:
        config = attrs.evolve(config, device=first)
    if config.device is None:
        origins["device"] = "best device of this machine"
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            if count > 1:
                origins["device"] = f"first of {count} CUDA devices; holds all layers"
                if config.device_mapping is not None:
                    origins["device"] = f"first of {count} CUDA devices"
                return torch.device("cuda", 0)
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
    if device.type == "cuda" and device.index is None and config.device_mapping is not None:
        device = torch.device("cuda", 0)  # the name that a map knows it by
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device ({config.device!r}) is not available: use with_device('cpu')")
    return device


def _explain_unpaged(config: EngineConfig, origins: dict[str, str]) -> None:
    """Without paging, prompts run whole and lengths decide who computes when."""
    for name in ("max_prefill_chunk_tokens", "max_decode_steps_before_prefill", "mixed_batches"):
        origins[name] = "no effect without paging"
        value = getattr(config, name)
        if value != getattr(EngineConfig(), name):
            logger.warning("%s (%s) has no effect without a paged KV cache", name, value)


def _explain_chunk_limit(config: EngineConfig, origins: dict[str, str]) -> None:
    """The chunk limit keeps kernels on an accelerator short; CPU scheduling does not use it."""
    origins["max_prefill_chunk_tokens"] = "no effect on a CPU"
    if config.mixed_batches:
        limit = min(CPU_MIXED_PROMPT_TOKENS, config.max_num_batched_tokens)
        origins["mixed_batches"] = f"at most {limit} prompt tokens beside running answers on a CPU"
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
