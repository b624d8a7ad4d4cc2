"""From a model and settings to a `MemoryPlan`: what `build()` takes and `plan()` shows."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

import attrs
import torch

from mistralrs_sdk.attention.kv_cache import DENSE_GROWTH, bytes_per_token
from mistralrs_sdk.config import EngineConfig, PagedAttentionConfig
from mistralrs_sdk.device_map import UNIFIED_FRACTION, DeviceMap, MapDevice, MapSizes, map_layers
from mistralrs_sdk.engine.cuda_graphs import capturing
from mistralrs_sdk.engine.kept_memory import KeptMemory, kept_memory
from mistralrs_sdk.engine.pool_size import (
    KNOBS,
    Activations,
    DeviceMemory,
    PoolPlace,
    choose_pool_size,
    estimate_activations,
)
from mistralrs_sdk.errors import ConfigError, ModelLoadError
from mistralrs_sdk.loading.forms import Form, describe_forms, total_bytes
from mistralrs_sdk.machine import available_memory, physical_memory
from mistralrs_sdk.models.decoder import CausalLM
from mistralrs_sdk.plan import DevicePlan, MemoryPlan

_FRACTION = "MISTRALRS_IGPU_MEMORY_FRACTION"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@attrs.frozen(kw_only=True)
class DeviceShare:
    """What one device holds of a model."""

    device: torch.device
    layers: tuple[int, ...]
    holds_rest: bool
    """Whether embedding, last norm and head are there, too."""
    memory: DeviceMemory
    """Before the weights are loaded."""

    def forms(self, forms: Mapping[str, Form]) -> dict[str, Form]:
        """Of the forms of a model's parameters those of this device."""
        own = {name: layer_of(name) for name in forms}
        return {
            name: forms[name]
            for name, layer in own.items()
            if (self.holds_rest if layer is None else layer in self.layers)
        }


@attrs.frozen(kw_only=True)
class Measured:
    """What is known of a device once the weights are there."""

    activation_bytes: int
    """What the largest step takes."""
    left: DeviceMemory


def layer_of(name: str) -> int | None:
    """The layer that a parameter of this name is in; None for those in no layer."""
    match = _LAYER.match(name)
    return None if match is None else int(match[1])


def plan_memory(
    model: CausalLM,
    config: EngineConfig,
    *,
    name: str,
    forms: Mapping[str, Form],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    adapter_bytes: int = 0,
    memory: DeviceMemory,
    shares: Sequence[DeviceShare] = (),
    measured: Mapping[torch.device, Measured] | None = None,
) -> MemoryPlan:
    """Size everything before the weights are read, or again with what was `measured` after that.

    The parameters of `model` may be on "meta"; `forms` says how they are kept. `config` has its
    device, dtype, `flashinfer` and `cuda_graphs` resolved; `kv_dtype` is of keys and values,
    `dtype` if not given; `adapter_bytes` is of adapters that are loaded with it; `memory` is the
    device's before loading. `shares` are those of several devices that the layers are mapped to.

    Raises:
        ConfigError: a length or a size does not suit the model.
        ModelLoadError: the asked KV cache does not fit.
    """
    context, asked = model.config.max_position_embeddings, config.max_model_len
    if asked is not None and asked > context:
        raise ConfigError(f"max_model_len ({asked}) is longer than the model's context ({context})")
    length = asked or context
    paged = paged_config(config)
    places: list[PoolPlace] = []
    kept: list[KeptMemory] = []
    devices: list[DevicePlan] = []
    parts = shares or [_whole(model, config, memory)]
    for share in parts:
        found = None if measured is None else measured.get(share.device)
        loaded = total_bytes(share.forms(forms)) + adapter_bytes
        specs = [model.specs[layer] for layer in share.layers]
        kept.append(
            KeptMemory()
            if paged is None
            else kept_memory(
                model.config,
                specs,
                config,
                dtype=dtype,
                block_size=paged.block_size,
                max_model_len=length,
                device=share.device,
            )
        )
        activations = activations_of(model, config, dtype=dtype, length=length)
        computed = activations.total if share.holds_rest else activations.mapped
        places.append(
            PoolPlace(
                name=str(share.device),
                bytes_per_token=bytes_per_token(specs, kv_dtype or dtype),
                activation_bytes=computed if found is None else found.activation_bytes,
                memory=share.memory.after_loading(loaded) if found is None else found.left,
            )
        )
        devices.append(
            DevicePlan(
                device=str(share.device),
                layers=share.layers,
                holds_rest=share.holds_rest,
                free_bytes=share.memory.free,
                weight_bytes=loaded,
                activation_bytes=places[-1].activation_bytes,
                attention_bytes=kept[-1].attention,
                kv_bytes=0,
            )
        )
    kv_per_token = 0 if config.no_kv_cache else sum(place.bytes_per_token for place in places)
    plan = MemoryPlan(
        name=name,
        architecture=model.config.architecture,
        device=str(config.device),
        dtype=config.dtype.value,
        free_bytes=sum(share.memory.free for share in parts),
        num_parameters=sum(form.num_values for form in forms.values()),
        weight_bytes=total_bytes(forms),
        weights=describe_forms(forms.values()),
        adapter_bytes=adapter_bytes,
        activation_bytes=sum(place.activation_bytes for place in places),
        activations_measured=measured is not None,
        attention_bytes=sum(each.attention for each in kept),
        graph_bytes=sum(each.graphs for each in kept),
        reserve_bytes=sum(place.memory.reserve for place in places),
        cache="none" if config.no_kv_cache else "dense",
        kv_bytes_per_token=kv_per_token,
        kv_growth=DENSE_GROWTH,
        num_blocks=0,
        kv_bytes=0,
        kv_reason="none: every token is computed again in every step",
        max_model_len=length,
        max_model_len_reason="user" if asked is not None else "model",
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        devices=tuple(devices) if shares else (),
    )
    if config.no_kv_cache:
        return plan
    if paged is None:
        return attrs.evolve(
            plan,
            kv_bytes=sum(place.safe for place in places),
            kv_reason="at most: the cache of each sequence grows with it",
        )
    size = choose_pool_size(
        wanted=paged.gpu_memory,
        block_size=paged.block_size,
        places=[
            attrs.evolve(place, activation_bytes=place.activation_bytes + each.total)
            for place, each in zip(places, kept, strict=True)
        ],
        max_num_seqs=config.max_num_seqs,
        model_context=context,
        max_model_len=asked,
    )
    num_tokens = size.num_blocks * paged.block_size
    plan = attrs.evolve(
        plan,
        devices=tuple(
            attrs.evolve(each, kv_bytes=num_tokens * place.bytes_per_token)
            for each, place in zip(plan.devices, places, strict=False)  # none of one device
        ),
        cache="paged",
        kv_growth=paged.block_size,
        num_blocks=size.num_blocks - 1,
        kv_bytes=num_tokens * kv_per_token,
        kv_reason=size.reason,
        max_model_len=size.max_model_len,
    )
    if size.max_model_len < length:
        reason = f"limited by the KV cache (the model has {context})"
        plan = attrs.evolve(plan, max_model_len_reason=reason)
    return plan


def require_room_for_adapters(plan: MemoryPlan) -> None:
    """Refuse adapters that do not fit beside all the rest.

    Raises:
        ModelLoadError: the message says what is taken and what is free.
    """
    taken = plan.adapter_bytes
    planned = plan.taken_bytes - taken + (plan.kv_bytes if plan.cache == "paged" else 0)
    if taken and planned + taken > plan.free_bytes:
        raise ModelLoadError(
            f"the adapters take {taken / 2**20:.0f} MiB beside {planned / 2**30:.2f} GiB for the "
            f"model and its KV cache, and {plan.free_bytes / 2**30:.2f} GiB are free: load fewer, "
            f"or lower the cache with {KNOBS}"
        )


def paged_config(config: EngineConfig) -> PagedAttentionConfig | None:
    """How the KV cache is paged; None if it is not."""
    if config.no_kv_cache or config.paged_attn is None:
        return None
    return PagedAttentionConfig() if config.paged_attn == "auto" else config.paged_attn


def plan_layers(
    model: CausalLM,
    config: EngineConfig,
    plan: MemoryPlan,
    *,
    forms: Mapping[str, Form],
    dtype: torch.dtype,
    devices: list[MapDevice],
) -> DeviceMap:
    """Where the layers would go by size over `devices`, the pool of `plan` divided over them.

    Raises:
        ModelLoadError: they do not fit.
    """
    sizes = map_sizes(
        forms,
        model.config.num_layers,
        activations=activations_of(model, config, dtype=dtype, length=plan.max_model_len),
        kv_per_layer=plan.kv_bytes // model.config.num_layers if plan.cache == "paged" else 0,
        base_reserve=plan.reserve_bytes,
    )
    # What an integrated GPU may take was limited when its memory was read.
    return map_layers(devices, sizes, paged=plan.cache == "paged", unified_fraction=1.0)


def map_sizes(
    forms: Mapping[str, Form],
    num_layers: int,
    *,
    activations: Activations,
    kv_per_layer: int,
    base_reserve: int,
) -> MapSizes:
    """What the layers take and what is in no layer, weights kept as `forms` says."""
    layers = [0] * num_layers
    for name, form in forms.items():
        layer = layer_of(name)
        if layer is not None:
            layers[layer] += form.num_bytes
    return MapSizes(
        layers=layers,
        non_mapped=total_bytes(forms) - sum(layers),
        activations_mapped=activations.mapped,
        activations_non_mapped=activations.total,  # what computes the logits computes layers, too
        kv_per_layer=kv_per_layer,
        base_reserve=base_reserve,
    )


def device_memory(device: torch.device) -> DeviceMemory:
    """What the device has now."""
    if device.type == "cuda":
        release_cached(device)
        free, total = torch.cuda.mem_get_info(device)
        memory = DeviceMemory(free=free, total=total, is_cpu=False)
        integrated = torch.cuda.get_device_properties(device).is_integrated
        return memory.limited_to(integrated_fraction(os.environ)) if integrated else memory
    return DeviceMemory(free=available_memory(), total=physical_memory(), is_cpu=True)


def release_cached(device: torch.device) -> None:
    """Give memory that torch keeps, and nothing uses, back to a GPU: others then see it as free."""
    if device.type != "cuda":
        return
    with capturing:  # torch fails if somebody in this process captures a graph meanwhile
        torch.cuda.empty_cache()


def integrated_fraction(environ: Mapping[str, str]) -> float:
    """Share of the memory that an integrated GPU may take, from MISTRALRS_IGPU_MEMORY_FRACTION.

    Raises:
        ConfigError: the variable is no number above 0, at most 1.
    """
    text = environ.get(_FRACTION, "").strip()
    if not text:
        return UNIFIED_FRACTION
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise ConfigError(f"{_FRACTION} ({text!r}) must be a number above 0, at most 1, or unset")
    return fraction


def cuda_devices(first: torch.device, memory: DeviceMemory) -> list[MapDevice]:
    """All CUDA devices, `first` first and by what is free there; of others all memory counts.

    Asking another device what is free would take memory on it.
    """
    index = first.index or 0
    others = [i for i in range(torch.cuda.device_count()) if i != index]
    found = [(index, memory.free)]
    found += [(i, torch.cuda.get_device_properties(i).total_memory) for i in others]
    return [MapDevice(name=f"cuda:{i}", capacity=size) for i, size in found]


def activations_of(
    model: CausalLM, config: EngineConfig, *, dtype: torch.dtype, length: int
) -> Activations:
    """What the largest step computes, as an estimate; sequences are up to `length` long."""
    return estimate_activations(
        model.config,
        itemsize=dtype.itemsize,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=most_tokens(config, length),
        max_model_len=length,
    )


def most_tokens(config: EngineConfig, max_model_len: int) -> int:
    """Tokens of the largest step; `config` has its device resolved."""
    tokens = config.max_num_batched_tokens
    if config.device != "cpu":  # prompts are cut into chunks there, and decodes ride along
        tokens = min(tokens, config.max_prefill_chunk_tokens + config.max_num_seqs)
    if paged_config(config) is None:
        tokens = max(tokens, max_model_len)  # unpaged, a prompt is not split
    return tokens


def _whole(model: CausalLM, config: EngineConfig, memory: DeviceMemory) -> DeviceShare:
    return DeviceShare(
        device=torch.device(config.device or "cpu"),
        layers=tuple(range(model.config.num_layers)),
        holds_rest=True,
        memory=memory,
    )
