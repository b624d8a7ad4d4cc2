"""Where the layers of a model go if several devices hold it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from mistralrs_sdk.attention.kv_cache import bytes_per_token
from mistralrs_sdk.config import EngineConfig, PagedAttentionConfig
from mistralrs_sdk.device_map import (
    AutoDeviceMapParams,
    DeviceMap,
    DeviceMapMetadata,
    MapDevice,
    map_layers,
)
from mistralrs_sdk.engine.memory import (
    DeviceShare,
    activations_of,
    layer_of,
    map_sizes,
    paged_config,
)
from mistralrs_sdk.engine.pool_size import DeviceMemory
from mistralrs_sdk.errors import ConfigError, ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.forms import Form
from mistralrs_sdk.models.decoder import CausalLM

MemoryOf = Callable[[torch.device], DeviceMemory]


@attrs.frozen(kw_only=True)
class LayerPlaces:
    """Runs of consecutive layers and their devices, in order; the first also holds the rest."""

    runs: tuple[tuple[torch.device, range], ...]
    shares: tuple[DeviceShare, ...]
    """What each device holds: one with several runs has one share."""
    warnings: tuple[str, ...] = ()

    def device_of(self, name: str) -> torch.device:
        """Where the parameter of this name is."""
        layer = layer_of(name)
        if layer is None:
            return self.runs[0][0]
        return next(device for device, layers in self.runs if layer in layers)

    def device_map(self) -> DeviceMap:
        """The same with the names of devices, as a plan shows it."""
        placed = tuple((str(device), layers) for device, layers in self.runs)
        return DeviceMap(placed=placed, warnings=self.warnings)


def place_layers(
    model: CausalLM,
    config: EngineConfig,
    *,
    forms: Mapping[str, Form],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    devices: Sequence[torch.device],
    memory_of: MemoryOf,
) -> LayerPlaces | None:
    """Place the layers as `config.device_mapping` says; None if one device holds all.

    `device` is the model's, the first that gets layers; `devices` are all that there are of its
    kind, `device` among them. `config` has its device and dtype resolved; `memory_of` says what a
    device has before the weights are loaded.

    Raises:
        ConfigError: the map does not suit the model or the machine.
        ModelLoadError: the weights do not fit.
        UnsupportedError: layers are to be placed by size, and there is no GPU.
    """
    setting = config.device_mapping
    if setting is None:
        return None
    if setting.auto is None:
        assert setting.placed is not None, "it asks for something"
        runs = _by_hand(setting.placed, model.config.num_layers, devices=devices)
        return _places(runs, forms, memory_of=memory_of)
    if device.type != "cuda":
        raise UnsupportedError(
            f"device_mapping (auto) places layers on CUDA devices, and the device is {device}: "
            "leave it out"
        )
    order = [device, *(other for other in devices if other != device)]
    found = _by_size(
        setting.auto,
        model,
        config,
        forms=forms,
        dtype=dtype,
        kv_dtype=kv_dtype,
        memories={each: memory_of(each) for each in order},
    )
    runs = [(torch.device(name), layers) for name, layers in found.placed]
    if len(runs) == 1 and runs[0][0] == device:
        return None
    if runs[0][0] != device:
        raise ModelLoadError(
            f"device_mapping (auto): {device} holds what is in no layer, and no layer fits beside "
            f"it: begin with another device (with_device), or lower max_num_batched_tokens"
        )
    return _places(runs, forms, memory_of=memory_of, warnings=found.warnings)


def refuse_crowded(
    places: LayerPlaces, forms: Mapping[str, Form], *, needed: Callable[[Mapping[str, Form]], int]
) -> None:
    """Refuse weights that do not fit on the device they are mapped to.

    `needed` says what loading some of them takes.

    Raises:
        ModelLoadError: with what they take and what is free there.
    """
    for share in places.shares:
        size = needed(share.forms(forms))
        if size > share.memory.free:
            raise ModelLoadError(
                f"{share.device} does not hold what is mapped to it: {len(share.layers)} layers"
                f"{' and what is in no layer' if share.holds_rest else ''} take "
                f"{size / 2**30:.2f} GiB and {share.memory.free / 2**30:.2f} GiB are free; map "
                "fewer layers to it, or use a smaller dtype"
            )


def _by_hand(
    wanted: DeviceMapMetadata, num_layers: int, *, devices: Sequence[torch.device]
) -> list[tuple[torch.device, range]]:
    runs: list[tuple[torch.device, range]] = []
    start = 0
    for run in wanted.device_layers:
        device = torch.device(run.ordinal)
        if device.type == "cuda" and device not in devices:
            there = ", ".join(str(each) for each in devices if each.type == "cuda") or "none"
            raise ConfigError(
                f"device_mapping: there is no {device}; CUDA devices of this machine: {there}"
            )
        runs.append((device, range(start, start + run.layers)))
        start += run.layers
    if start > num_layers:
        raise ConfigError(
            f"device_mapping places {start} layers and the model has {num_layers}: place no more "
            "than it has; what is left over goes to the CPU"
        )
    if start < num_layers:
        runs.append((torch.device("cpu"), range(start, num_layers)))
    return runs


def _by_size(
    params: AutoDeviceMapParams,
    model: CausalLM,
    config: EngineConfig,
    *,
    forms: Mapping[str, Form],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    memories: Mapping[torch.device, DeviceMemory],
) -> DeviceMap:
    """Leave room for the tokens that were asked for; beyond that for as many as there can be.

    The first device is filled before the next one is begun, so that with too little room for keys
    and values it would be left with the least of them, and the whole pool with no more.
    """
    num_layers = model.config.num_layers
    length = min(config.max_model_len or params.max_seq_len, model.config.max_position_embeddings)
    activations = activations_of(model, config, dtype=dtype, length=length)
    per_token = max(bytes_per_token([spec], kv_dtype) for spec in model.specs)
    devices = [
        MapDevice(name=str(device), capacity=memory.free) for device, memory in memories.items()
    ]

    sizes = map_sizes(
        forms,
        num_layers,
        activations=activations,
        kv_per_layer=0,
        base_reserve=max(memory.reserve for memory in memories.values()),
    )

    def place(tokens: int) -> DeviceMap:
        roomy = attrs.evolve(sizes, kv_per_layer=per_token * tokens)
        return map_layers(devices, roomy, paged=True, unified_fraction=1.0)

    paged = paged_config(config)
    total = per_token * num_layers
    least = 0 if paged is None else _tokens_wanted(params, config, paged, bytes_per_token=total)
    best = place(least)
    if len(best.placed) == 1 or paged is None:
        return best
    # As much as memory could hold if nothing else were in it: more is not worth trying.
    most = sum(memory.free for memory in memories.values()) // total + 1
    low, high = least, max(most, least)
    while high - low > max(low // 64, 1):
        middle = (low + high) // 2
        try:
            best, low = place(middle), middle
        except ModelLoadError:
            high = middle
    return best


def _tokens_wanted(
    params: AutoDeviceMapParams,
    config: EngineConfig,
    paged: PagedAttentionConfig,
    *,
    bytes_per_token: int,
) -> int:
    """Tokens that there must be room for, whoever asks for most."""
    wanted = [params.max_seq_len * params.max_batch_size, config.max_model_len or 0]
    pool = paged.gpu_memory
    if pool is not None and pool.kind == "context":
        wanted.append(int(pool.amount))
    elif pool is not None and pool.kind == "mb":
        wanted.append(int(pool.amount) * 2**20 // bytes_per_token)
    return max(wanted)


def _places(
    runs: Sequence[tuple[torch.device, range]],
    forms: Mapping[str, Form],
    *,
    memory_of: MemoryOf,
    warnings: tuple[str, ...] = (),
) -> LayerPlaces:
    shares = []
    for device in dict.fromkeys(device for device, _ in runs):
        layers = [layer for own, run in runs if own == device for layer in run]
        shares.append(
            DeviceShare(
                device=device,
                layers=tuple(layers),
                holds_rest=device == runs[0][0],
                memory=memory_of(device),
            )
        )
    return LayerPlaces(runs=tuple(runs), shares=tuple(shares), warnings=warnings)
