"""Which layers go to which device: a pure function over devices and sizes."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from mistralrs_sdk.errors import ModelLoadError

_MIB = 2**20
UNIFIED_FRACTION = 0.75
"""Share of its memory that counts on an accelerator that has it in common with the CPU."""


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
    """Temporary computation outside the layers: the logits."""
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
