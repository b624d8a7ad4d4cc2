"""Which layers go to which device: what can be asked for, and a pure function over sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import attrs

from mistralrs_sdk.errors import ConfigError, ModelLoadError, UnsupportedError

_MIB = 2**20
UNIFIED_FRACTION = 0.75
"""Share of its memory that counts on an accelerator that has it in common with the CPU."""
_DEVICE = re.compile(r"cpu|cuda:[0-9]{1,4}")
_ENTRY = re.compile(r"(?:cuda:)?([0-9]{1,4}|cpu):([0-9]{1,9})")


def _device(ordinal: Any) -> str:
    """A device as torch calls it, from its number or its name."""
    if isinstance(ordinal, int) and not isinstance(ordinal, bool) and 0 <= ordinal < 10_000:
        return f"cuda:{ordinal}"
    if isinstance(ordinal, str) and _DEVICE.fullmatch(ordinal):
        return ordinal
    raise ConfigError(
        f"the device of some layers ({ordinal!r:.80}) must be the number of a CUDA device, "
        '"cuda:N" or "cpu"'
    )


@attrs.frozen
class DeviceLayerMapMetadata:
    """How many layers a device takes.

    `ordinal` is the number of a CUDA device, or a name: "cuda:1", "cpu".

    Raises:
        ConfigError: a value is neither, or there are no layers.
    """

    ordinal: str = attrs.field(converter=_device)
    layers: int = attrs.field()

    def __attrs_post_init__(self) -> None:
        if isinstance(self.layers, bool) or not isinstance(self.layers, int) or self.layers < 1:
            raise ConfigError(
                f"the layers on {self.ordinal} ({self.layers!r:.80}) must be a whole number of at "
                "least 1: leave the device out if it takes none"
            )


def _runs(layers: Any) -> tuple[DeviceLayerMapMetadata, ...]:
    runs = tuple(layers) if isinstance(layers, Iterable) else (layers,)
    for run in runs:
        if not isinstance(run, DeviceLayerMapMetadata):
            raise ConfigError(
                f"the layers of a device ({run!r:.80}) must be a "
                "DeviceLayerMapMetadata(ordinal, layers)"
            )
    return runs


@attrs.frozen
class DeviceMapMetadata:
    """Runs of consecutive layers, in order: so many on the first device, so many on the next.

    The first device also holds what is in no layer. Layers that are left over go to the CPU, as in
    mistral.rs. Without runs every layer is on one device.

    Raises:
        ConfigError: an entry is no `DeviceLayerMapMetadata`.
    """

    device_layers: tuple[DeviceLayerMapMetadata, ...] = attrs.field(default=(), converter=_runs)

    @classmethod
    def from_num_device_layers(
        cls, device_layers: Iterable[DeviceLayerMapMetadata]
    ) -> DeviceMapMetadata:
        """So many layers on each of these devices."""
        return cls(device_layers)

    @classmethod
    def dummy(cls) -> DeviceMapMetadata:
        """Every layer on one device."""
        return cls()


@attrs.frozen(kw_only=True)
class AutoDeviceMapParams:
    """What there must be room for where layers are placed by size.

    Raises:
        ConfigError: a number is below 1.
    """

    max_seq_len: int = 4096
    """Tokens of a sequence."""
    max_batch_size: int = 1
    """Sequences."""

    @classmethod
    def Text(  # noqa: N802 (mistral.rs' name)
        cls, max_seq_len: int = 4096, max_batch_size: int = 1
    ) -> AutoDeviceMapParams:
        """The keys and values of so many sequences of so many tokens."""
        return cls(max_seq_len=max_seq_len, max_batch_size=max_batch_size)

    @classmethod
    def Multimodal(cls, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: N802 (mistral.rs' name)
        """Not done: `UnsupportedError`. Models here read text only."""
        raise UnsupportedError(
            "AutoDeviceMapParams.Multimodal is not supported: models here read text only; use Text"
        )

    def __attrs_post_init__(self) -> None:
        for name in ("max_seq_len", "max_batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} ({value!r:.80}) must be a whole number of at least 1")


@attrs.frozen(repr=False)
class DeviceMapSetting:
    """Where the layers of a model go; made by a class method.

    Raises:
        ConfigError: what is given is no map, or no parameters.
    """

    placed: DeviceMapMetadata | None = None
    """Set by hand."""
    auto: AutoDeviceMapParams | None = None
    """By size."""

    @classmethod
    def Map(cls, layers: DeviceMapMetadata) -> DeviceMapSetting:  # noqa: N802 (mistral.rs' name)
        """So many layers on each device."""
        if not isinstance(layers, DeviceMapMetadata):
            raise ConfigError(f"DeviceMapSetting.Map({layers!r:.80}): must be a DeviceMapMetadata")
        return cls(placed=layers)

    @classmethod
    def Auto(  # noqa: N802 (mistral.rs' name)
        cls, params: AutoDeviceMapParams | None = None
    ) -> DeviceMapSetting:
        """Over all CUDA devices, by size; on the first alone if the model fits there."""
        params = AutoDeviceMapParams() if params is None else params
        if not isinstance(params, AutoDeviceMapParams):
            raise ConfigError(
                f"DeviceMapSetting.Auto({params!r:.80}): must be AutoDeviceMapParams.Text(...)"
            )
        return cls(auto=params)

    @classmethod
    def dummy(cls) -> DeviceMapSetting:
        """Every layer on one device, the default."""
        return cls(placed=DeviceMapMetadata.dummy())

    @classmethod
    def Nccl(cls, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: N802 (mistral.rs' name)
        """Not done: `UnsupportedError`. Use `with_tensor_parallel`."""
        raise UnsupportedError(
            "DeviceMapSetting.Nccl is not supported: with_tensor_parallel(n) divides every layer"
        )

    @classmethod
    def DummyNccl(cls, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: N802 (mistral.rs' name)
        """Not done: `UnsupportedError`. Use `with_tensor_parallel`."""
        raise UnsupportedError(
            "DeviceMapSetting.DummyNccl is not supported: with_tensor_parallel(n) divides every "
            "layer"
        )

    @classmethod
    def parse(cls, text: str) -> DeviceMapSetting:
        """Read "auto", or "0:16;1:16": the number of a device (or "cpu") and its layers.

        Raises:
            ConfigError: it is neither.
        """
        if text.strip().lower() == "auto":
            return cls.Auto()
        found = [_ENTRY.fullmatch(entry.strip()) for entry in text.split(";")]
        if not all(found):
            raise ConfigError(
                f"device_mapping ({text!r:.80}) must be auto, or devices and their numbers of "
                "layers: 0:16;1:16"
            )
        runs = [
            DeviceLayerMapMetadata("cpu" if match[1] == "cpu" else int(match[1]), int(match[2]))
            for match in found
            if match is not None
        ]
        return cls.Map(DeviceMapMetadata.from_num_device_layers(runs))

    @property
    def is_dummy(self) -> bool:
        """Whether it asks for nothing."""
        return self.auto is None and (self.placed is None or not self.placed.device_layers)

    @property
    def first_device(self) -> str | None:
        """The device that holds what is in no layer, where it is set by hand."""
        runs = () if self.placed is None else self.placed.device_layers
        return runs[0].ordinal if runs else None

    def __str__(self) -> str:
        if self.auto is not None:
            return "auto"
        runs = () if self.placed is None else self.placed.device_layers
        return ";".join(f"{run.ordinal}:{run.layers}" for run in runs) or "one device"

    def __repr__(self) -> str:
        if self.auto is not None:
            return f"DeviceMapSetting.Auto({self.auto!r})"
        if self.is_dummy:
            return "DeviceMapSetting.dummy()"
        return f"DeviceMapSetting.Map({self.placed!r})"


def as_device_mapping(value: Any) -> DeviceMapSetting | None:
    """A setting, from itself or its text; None, too, for one that asks for nothing.

    Raises:
        ConfigError: it is neither.
    """
    setting = DeviceMapSetting.parse(value) if isinstance(value, str) else value
    if setting is None:
        return None
    if not isinstance(setting, DeviceMapSetting):
        raise ConfigError(
            f"device_mapping ({value!r:.80}) must be a DeviceMapSetting, or its text: 0:16;1:16"
        )
    return None if setting.is_dummy else setting


@attrs.frozen(kw_only=True)
class MapDevice:
    """A place for layers; `capacity` is in bytes."""

    name: str
    capacity: int
    is_cpu: bool = False
    unified: bool = False
    """An accelerator whose memory is the machine's: then the CPU offers nothing besides."""


@attrs.frozen(kw_only=True)
class MapSizes:
    """What a model takes, in bytes."""

    layers: tuple[int, ...] = attrs.field(converter=tuple)
    """Weights of each layer, in order."""
    non_mapped: int
    """Weights outside the layers: embedding, last norm, head. They go to the first device."""
    activations_mapped: int
    """Temporary computation of a layer, on every device that holds one."""
    activations_non_mapped: int
    """Temporary computation on the first device, where the logits are."""
    kv_per_layer: int
    """Keys and values of one layer, all tokens together."""
    base_reserve: int
    """Kept free on each device."""


@attrs.frozen(kw_only=True)
class DeviceMap:
    """Runs of consecutive layers, in order; the first device also holds what is in no layer."""

    placed: tuple[tuple[str, range], ...]
    """Device and its layers, for devices that got any."""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(
            f"{name}: layers {layers.start} to {layers.stop - 1}" for name, layers in self.placed
        )


def map_layers(
    devices: Sequence[MapDevice],
    sizes: MapSizes,
    *,
    paged: bool,
    unified_fraction: float = UNIFIED_FRACTION,
) -> DeviceMap:
    """Fill the devices one after the other: weights, temporary computation and KV cache together.

    Accelerators come first, in the order given, and a CPU last; where an accelerator is unified
    the CPU is left out, and `unified_fraction` of that accelerator's memory counts. A model that
    fits the first device stays there. A device that takes no layer is named in `warnings`.

    Raises:
        ModelLoadError: the first device cannot hold what must be there; or layers are left over,
            with the MiB that are missing; or `paged` and layers would have to go to the CPU
            behind an accelerator, where the KV cache is not paged: nothing is switched off unasked.
    """
    order = _in_order(devices)
    if not order:
        raise ModelLoadError("there is no device to place layers on")
    rooms = [_capacity(device, unified_fraction) - sizes.base_reserve for device in order]
    _require_first(order[0], rooms[0] + sizes.base_reserve, sizes)
    rooms[0] -= sizes.non_mapped + max(sizes.activations_mapped, sizes.activations_non_mapped)
    rooms[1:] = [room - sizes.activations_mapped for room in rooms[1:]]
    needs = [layer + sizes.kv_per_layer for layer in sizes.layers]
    if sum(needs) <= rooms[0]:
        return DeviceMap(placed=((order[0].name, range(len(needs))),))
    placed: list[tuple[str, range]] = []
    warnings: list[str] = []
    start = 0
    for number, (device, room) in enumerate(zip(order, rooms, strict=True)):
        if start == len(needs):
            break
        if paged and device.is_cpu and number > 0:
            _refuse_cpu_tail(device, needs, start=start, room=rooms[number - 1])
        stop = start
        while stop < len(needs) and needs[stop] <= room:
            room -= needs[stop]
            stop += 1
        if stop == start:
            warnings.append(
                f"{device.name} takes no layers: layer {start} needs {_mib(needs[start])} MiB and "
                f"{max(room, 0) // _MIB} MiB are left there"
            )
        else:
            placed.append((device.name, range(start, stop)))
        start, rooms[number] = stop, room
    if start < len(needs):
        missing = sum(needs[start:]) - rooms[-1]
        raise ModelLoadError(
            f"the model does not fit on {', '.join(device.name for device in order)}: "
            f"{len(needs) - start} of {len(needs)} layers are left over, which exceeds the total "
            f"capacity by {_mib(missing)} MiB; use a smaller dtype, a smaller KV cache, or lower "
            "max_num_batched_tokens or max_num_seqs"
        )
    return DeviceMap(placed=tuple(placed), warnings=tuple(warnings))


def _in_order(devices: Sequence[MapDevice]) -> list[MapDevice]:
    accelerators = [device for device in devices if not device.is_cpu]
    if any(device.unified for device in accelerators):
        return accelerators  # the CPU's memory is theirs
    return accelerators + [device for device in devices if device.is_cpu]


def _capacity(device: MapDevice, unified_fraction: float) -> int:
    return int(device.capacity * unified_fraction) if device.unified else device.capacity


def _require_first(first: MapDevice, capacity: int, sizes: MapSizes) -> None:
    activations = max(sizes.activations_mapped, sizes.activations_non_mapped)
    needed = sizes.non_mapped + activations + sizes.base_reserve
    if needed > capacity:
        raise ModelLoadError(
            f"{first.name} must hold the weights outside the layers "
            f"({_mib(sizes.non_mapped)} MiB), temporary computation ({_mib(activations)} MiB) and "
            f"a reserve ({_mib(sizes.base_reserve)} MiB): {_mib(needed - capacity)} MiB more than "
            "it has"
        )


def _refuse_cpu_tail(cpu: MapDevice, needs: Sequence[int], *, start: int, room: int) -> None:
    # what the last accelerator has left after the layers it took
    missing = sum(needs[start:]) - room
    raise ModelLoadError(
        f"{len(needs) - start} of {len(needs)} layers would have to go to {cpu.name}, where the KV "
        f"cache would not be paged: the accelerators lack {_mib(missing)} MiB; use a smaller "
        "dtype or KV cache, or choose with_paged_attn(None) to run without paging"
    )


def _mib(size: int) -> int:
    return -(-size // _MIB)
