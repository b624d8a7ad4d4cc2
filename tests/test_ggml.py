"""GGML types against the reference decoder of the `gguf` package."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from mistralrs_sdk.errors import UnsupportedError
from mistralrs_sdk.quant.ggml import (
    GGML_TYPES,
    GgmlType,
    dequantise,
    ggml_type_name,
    read_stored,
    supported_ggml_types,
)

ALL_TYPES = list(GGML_TYPES.values())
BLOCK_TYPES = [kind for kind in ALL_TYPES if kind.block_size > 1]

# Where each block keeps its float16 scales: random bytes there could be infinite.
SCALE_OFFSETS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_bytes(kind: GgmlType, num_values: int, *, seed: int = 0) -> np.ndarray:
    """Stored bytes with every bit pattern but for infinite or absurd scales."""
    rng = np.random.default_rng(seed)
    if kind.block_size == 1:
        values = rng.standard_normal(num_values).astype(np.float32)
        return gguf.quants.quantize(values, GGMLQuantizationType(kind.code)).view(np.uint8)
    blocks = rng.integers(0, 256, (num_values // kind.block_size, kind.block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS[kind.name]:
        scales = rng.standard_normal((len(blocks), 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(-1)


def reference(stored: np.ndarray, kind: GgmlType, shape: tuple[int, ...]) -> np.ndarray:
    rows = stored.reshape(math.prod(shape[:-1]), -1)
    return gguf.quants.dequantize(rows, GGMLQuantizationType(kind.code)).reshape(shape)


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
def test_dequantised_values_equal_the_reference_bit_for_bit(kind):
    """Random blocks of each type decode to exactly the reference's bits, and stay finite."""
    shape = (6, 1024)
    stored = random_bytes(kind, math.prod(shape))

    result = dequantise(torch.from_numpy(stored), kind, shape)

    assert result.dtype == torch.float32
    assert result.shape == shape
    assert torch.isfinite(result).all()
    expected = np.ascontiguousarray(reference(stored, kind, shape), dtype=np.float32)
    assert np.array_equal(result.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_values_quantised_by_the_reference_come_back_close(name):
    """What the reference quantises, we read back within the type's precision."""
    kind = next(kind for kind in BLOCK_TYPES if kind.name == name)
    values = np.random.default_rng(1).standard_normal((8, 256)).astype(np.float32)
    stored = gguf.quants.quantize(values, GGMLQuantizationType(kind.code))

    result = dequantise(torch.from_numpy(stored.reshape(-1)), kind, values.shape)

    assert np.abs(result.numpy() - values).max() < 0.6


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
def test_a_tensor_larger_than_one_chunk_is_decoded_whole(name):
    """Chunking is invisible: the last block is decoded as the first."""
    kind = next(kind for kind in BLOCK_TYPES if kind.name == name)
    shape = (5, 1 << 17)
    stored = random_bytes(kind, math.prod(shape), seed=2)

    result = dequantise(torch.from_numpy(stored), kind, shape)

    assert np.array_equal(result.numpy(), reference(stored, kind, shape))


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
def test_block_sizes_are_those_of_the_format(kind):
    """Block size and bytes per block agree with the format's own table."""
    expected = gguf.GGML_QUANT_SIZES[GGMLQuantizationType(kind.code)]

    assert (kind.block_size, kind.block_bytes) == expected
    assert GGMLQuantizationType(kind.code).name == kind.name


def test_every_type_the_format_defines_has_a_name():
    """A code GGUF defines is named, one it does not define is called unknown."""
    for known in GGMLQuantizationType:
        assert ggml_type_name(known.value) == known.name
    assert ggml_type_name(200) == "unknown type"


@pytest.mark.parametrize(
    ("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_float_tensors_keep_their_own_type(name, dtype):
    """Plain floats are read as they are stored, without widening."""
    kind = next(kind for kind in ALL_TYPES if kind.name == name)
    values = torch.arange(12, dtype=dtype).view(3, 4)

    result = read_stored(values.view(torch.uint8).flatten(), kind, (3, 4))

    assert result.dtype == dtype
    assert torch.equal(result, values)


def test_a_wrong_number_of_bytes_is_refused():
    """The bytes must be exactly those the shape takes."""
    kind = GGML_TYPES[3]
    with pytest.raises(ValueError, match=r"takes 40 bytes"):
        dequantise(torch.zeros(39, dtype=torch.uint8), kind, (2, 32))


def test_rows_that_do_not_fill_blocks_are_refused():
    """A row holds whole blocks."""
    with pytest.raises(ValueError, match="rows of 48 do not fit"):
        dequantise(torch.zeros(60, dtype=torch.uint8), GGML_TYPES[3], (2, 48))


def test_a_type_without_a_kernel_is_refused_by_name():
    """An unsupported type is named together with what is supported."""
    kind = GgmlType(20, "IQ4_NL", 32, 18)
    with pytest.raises(UnsupportedError, match=r"IQ4_NL \(type 20\).*Q4_K") as error:
        dequantise(torch.zeros(18, dtype=torch.uint8), kind, (1, 32))
    assert supported_ggml_types() in str(error.value)
