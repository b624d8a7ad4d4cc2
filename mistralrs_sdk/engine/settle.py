"""What is decided before weights are read: device, dtype, the form of the weights, sizes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import attrs
import torch

from mistralrs_sdk.attention.select import select_backend, select_kv_dtype
from mistralrs_sdk.config import EngineConfig, ModelDType
from mistralrs_sdk.engine.memory import device_memory, paged_config, plan_memory
from mistralrs_sdk.errors import ConfigError, UnsupportedError
from mistralrs_sdk.kernels import native
from mistralrs_sdk.kernels.attention import has_fast_halves
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.forms import (
    Form,
    Packing,
    Target,
    choose_forms,
    choose_packing,
    quantise_target,
)
from mistralrs_sdk.loading.loader import check_weights_fit, prepare_model
from mistralrs_sdk.models.decoder import CausalLM
from mistralrs_sdk.plan import MemoryPlan
from mistralrs_sdk.quant import half
from mistralrs_sdk.quant.isq import refuse_unused

logger = logging.getLogger("mistralrs_sdk.engine")

TORCH_DTYPES = {
    ModelDType.F32: torch.float32,
    ModelDType.F16: torch.float16,
    ModelDType.BF16: torch.bfloat16,
}


@attrs.frozen(kw_only=True, eq=False)
class Settled:
    """What is known before the weights are read."""

    config: EngineConfig
    """With device and dtype resolved."""
    device: torch.device
    dtype: torch.dtype
    model: CausalLM
    """Its parameters are on "meta"."""
    packing: Packing
    forms: Mapping[str, Form]
    paged_backend: str | None
    """Class name of the backend that attends to a paged cache; None without one."""
    kv_dtype: ModelDType
    plan: MemoryPlan


def settle(checkpoint: Checkpoint, config: EngineConfig, origins: dict[str, str]) -> Settled:
    """Choose device, dtype and sizes: the one way for `build_engine` and `plan_engine`."""
    device = _choose_device(config, origins)
    if config.no_kv_cache or config.paged_attn is None:
        _explain_unpaged(config, origins)
    elif device.type == "cpu":
        _explain_chunk_limit(config, origins)
    kind = _choose_dtype(config, device, origins)
    dtype = TORCH_DTYPES[kind]
    config = attrs.evolve(config, device=str(device), dtype=kind)
    model = prepare_model(checkpoint)
    packing = _choose_packing(device, origins)
    forms = choose_forms(
        model,
        checkpoint,
        dtype=dtype,
        packing=packing,
        target=_quantise_target(config, device),
    )
    if config.topology is not None:
        matrices = [part for form in forms.values() if form.is_matrix for part in form.parts]
        refuse_unused(config.topology, [part.removesuffix(".weight") for part in matrices])
    check_weights_fit(checkpoint, forms, device=device)
    paged_backend, kv_dtype = _choose_attention(config, device, origins)
    plan = plan_memory(
        model,
        config,
        name=checkpoint.name,
        forms=forms,
        dtype=dtype,
        kv_dtype=TORCH_DTYPES[kv_dtype],
        memory=device_memory(device),
    )
    return Settled(
        config=config,
        device=device,
        dtype=dtype,
        model=model,
        packing=packing,
        forms=forms,
        paged_backend=paged_backend,
        kv_dtype=kv_dtype,
        plan=plan,
    )


def refuse_quantising(asked: str, *, device: torch.device, dtype: ModelDType) -> None:
    """Refuse what `asked` names unless quantised weights can be computed with.

    Raises:
        UnsupportedError: they cannot, on this device, in this dtype or without native kernels.
    """
    if device.type != "cpu":
        raise UnsupportedError(
            f"{asked}: quantised weights are computed with on a CPU only, and the device is "
            f"{device}; leave it out, or use with_force_cpu()"
        )
    if dtype is not ModelDType.F32:
        raise UnsupportedError(
            f"{asked}: products with quantised weights are float32, and dtype is "
            f'{dtype.value}; leave dtype out, or use with_dtype("f32")'
        )
    if not native.available():
        raise UnsupportedError(
            f"{asked}: quantised weights need the native kernels, and there are none: "
            f"{native.reason()}"
        )


def _choose_device(config: EngineConfig, origins: dict[str, str]) -> torch.device:
    if config.device is None:
        origins["device"] = "best device of this machine"
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            if count > 1:
                origins["device"] = f"first of {count} CUDA devices; holds all layers"
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


def _choose_packing(device: torch.device, origins: dict[str, str]) -> Packing:
    """How the weights are kept; the dtype was chosen before, and its origin says who did."""
    automatic = origins["dtype"] != "user"
    if device.type != "cpu" or not automatic:
        return "none"  # asking for native kernels may compile them
    packing = choose_packing(
        device=device.type,
        automatic=automatic,
        native=native.reason() if native.available() else None,
        half=half.available(),
    )
    if packing != "none":
        origins["dtype"] += ", of activations: the weights are packed"
    return packing


def _quantise_target(config: EngineConfig, device: torch.device) -> Target:
    """What the settings quantise, if this device computes with the result."""
    layers = () if config.topology is None else [layer.isq for _, layer in config.topology.entries]
    wanted = {"isq": config.isq is not None, "topology": any(isq is not None for isq in layers)}
    asked = " and ".join(name for name, there in wanted.items() if there)
    if not asked:
        return quantise_target(None, None)
    refuse_quantising(asked, device=device, dtype=config.dtype)
    return quantise_target(config.isq, config.topology)


def _choose_attention(
    config: EngineConfig, device: torch.device, origins: dict[str, str]
) -> tuple[str | None, ModelDType]:
    """The backend of a paged cache, and the type keys and values are kept in."""
    if paged_config(config) is None:
        origins["kv_dtype"] = "the model's dtype"
        return None, config.dtype
    on_cpu = device.type == "cpu"  # asking for native kernels may compile them
    choice = select_backend(
        device=device.type,
        dtype=config.dtype.value,
        native=native.reason() if on_cpu and not native.available() else None,
    )
    origins["attention"] = "; not ".join(("automatic", *choice.reasons))
    kv = select_kv_dtype(
        choice.name,
        config.dtype.value,
        user_dtype=origins["dtype"] == "user",
        fast_halves=choice.name == "CpuBackend" and has_fast_halves(),
        environ=os.environ,
    )
    origins["kv_dtype"] = kv.origin
    return choice.name, ModelDType(kv.dtype)
