"""Which layers go to which device: exact numbers over made-up devices."""

from __future__ import annotations

import attrs
import pytest

from mistralrs_sdk.device_map import MapDevice, MapSizes, map_layers
from mistralrs_sdk.errors import ModelLoadError

MIB = 2**20
# Ten layers of 100 MiB with 20 MiB of keys and values each; the first device also needs
# 50 + max(30, 40) MiB, the others 30, and each keeps 10 free.
SIZES = MapSizes(
    layers=[100 * MIB] * 10,
    non_mapped=50 * MIB,
    activations_mapped=30 * MIB,
    activations_non_mapped=40 * MIB,
    kv_per_layer=20 * MIB,
    base_reserve=10 * MIB,
)


def gpu(number: int, mib: int, **changes) -> MapDevice:
    return MapDevice(name=f"cuda:{number}", capacity=mib * MIB, **changes)


def cpu(mib: int) -> MapDevice:
    return MapDevice(name="cpu", capacity=mib * MIB, is_cpu=True)


def test_a_model_that_fits_the_first_device_stays_there():
    """1300 MiB, to the byte: the second device stays empty, and that is no warning."""
    result = map_layers([gpu(0, 1300), gpu(1, 9000)], SIZES, paged=True)

    assert result.placed == (("cuda:0", range(10)),)
    assert result.warnings == ()
    assert str(result) == "cuda:0: layers 0 to 9"


def test_layers_fill_the_devices_in_order():
    """One byte less on the first device moves its last layer to the second."""
    first = attrs.evolve(gpu(0, 1300), capacity=1300 * MIB - 1)

    result = map_layers([first, gpu(1, 160)], SIZES, paged=True)

    assert result.placed == (("cuda:0", range(9)), ("cuda:1", range(9, 10)))
    assert str(result) == "cuda:0: layers 0 to 8, cuda:1: layers 9 to 9"


def test_every_device_keeps_room_for_computation_and_its_reserve():
    """cuda:0 has 100 MiB besides its layers, cuda:1 40: four layers of 120 each, and two left."""
    devices = [gpu(0, 100 + 480 + 119), gpu(1, 40 + 480 + 119), gpu(2, 40 + 240)]

    result = map_layers(devices, SIZES, paged=True)

    assert [(name, len(layers)) for name, layers in result.placed] == [
        ("cuda:0", 4),
        ("cuda:1", 4),
        ("cuda:2", 2),
    ]


def test_layers_of_different_sizes_stay_consecutive():
    """A small layer behind a large one does not overtake it."""
    sizes = attrs.evolve(SIZES, layers=(100 * MIB, 300 * MIB, 10 * MIB), kv_per_layer=0)

    result = map_layers([gpu(0, 100 + 150), gpu(1, 40 + 310)], sizes, paged=True)

    assert result.placed == (("cuda:0", range(1)), ("cuda:1", range(1, 3)))


def test_a_larger_cache_moves_layers():
    """Keys and values count with the layer they belong to."""
    devices = [gpu(0, 1300), gpu(1, 2000)]

    result = map_layers(devices, attrs.evolve(SIZES, kv_per_layer=50 * MIB), paged=True)

    assert result.placed == (("cuda:0", range(8)), ("cuda:1", range(8, 10)))


def test_the_first_device_must_hold_what_is_in_no_layer():
    """100 MiB are needed before any layer; 99 are one too few, whatever the others have."""
    assert map_layers([gpu(0, 100), gpu(1, 9000)], SIZES, paged=True).placed == (
        ("cuda:1", range(10)),
    )

    with pytest.raises(ModelLoadError) as caught:
        map_layers([gpu(0, 99), gpu(1, 9000)], SIZES, paged=True)

    for part in ("cuda:0 must hold", "50 MiB", "40 MiB", "10 MiB", "1 MiB more"):
        assert part in str(caught.value)


def test_a_device_without_layers_is_a_warning():
    """It is named, with what it has and what a layer takes."""
    result = map_layers([gpu(0, 800), gpu(1, 159), gpu(2, 9000)], SIZES, paged=True)

    assert result.placed == (("cuda:0", range(5)), ("cuda:2", range(5, 10)))
    (warning,) = result.warnings
    for part in ("cuda:1 takes no layers", "layer 5 needs 120 MiB", "119 MiB are left"):
        assert part in warning


def test_layers_left_over_are_an_error_with_the_mib_that_are_missing():
    """Of 1200 MiB of layers 600 + 480 go in, and 30 that are left on the last device do not do."""
    with pytest.raises(ModelLoadError) as caught:
        map_layers([gpu(0, 700), gpu(1, 40 + 480 + 30)], SIZES, paged=True)

    for part in ("cuda:0, cuda:1", "1 of 10 layers", "by 90 MiB", "max_num_batched_tokens"):
        assert part in str(caught.value)


def test_what_is_missing_is_what_would_be_enough():
    """With the missing MiB added to the last device the layers fit; with one less they do not."""
    map_layers([gpu(0, 700), gpu(1, 550 + 90)], SIZES, paged=True)

    with pytest.raises(ModelLoadError, match="by 1 MiB"):
        map_layers([gpu(0, 700), gpu(1, 550 + 89)], SIZES, paged=True)


def test_paging_is_never_dropped_for_layers_on_the_cpu():
    """Layers behind the GPU would not be paged: an error that says how to choose that."""
    with pytest.raises(ModelLoadError) as caught:
        map_layers([gpu(0, 700), cpu(9000)], SIZES, paged=True)

    for part in ("5 of 10 layers", "cpu", "600 MiB", "with_paged_attn(None)"):
        assert part in str(caught.value)


def test_without_paging_the_cpu_takes_the_rest():
    """The explicit choice; the CPU comes last wherever it stands in the list."""
    result = map_layers([cpu(9000), gpu(0, 700)], SIZES, paged=False)

    assert result.placed == (("cuda:0", range(5)), ("cpu", range(5, 10)))


def test_a_cpu_alone_pages():
    """It is the first device, not what is left behind an accelerator."""
    assert map_layers([cpu(1300)], SIZES, paged=True).placed == (("cpu", range(10)),)


def test_a_unified_accelerator_counts_three_quarters_and_leaves_out_the_cpu():
    """Its memory is the CPU's: 1734 MiB * 0.75 hold the 1300, and the CPU adds nothing."""
    result = map_layers([gpu(0, 1734, unified=True), cpu(9000)], SIZES, paged=False)

    assert result.placed == (("cuda:0", range(10)),)
    with pytest.raises(ModelLoadError, match=r"does not fit on cuda:0: 1 of 10 .* by 1 MiB"):
        map_layers([gpu(0, 1733, unified=True), cpu(9000)], SIZES, paged=False)
    whole = map_layers([gpu(0, 1300, unified=True)], SIZES, paged=True, unified_fraction=1.0)
    assert whole == result


def test_no_device_is_an_error():
    """There is nowhere to go."""
    with pytest.raises(ModelLoadError, match="no device"):
        map_layers([], SIZES, paged=False)
