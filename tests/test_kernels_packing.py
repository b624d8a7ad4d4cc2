"""Packed weights: nothing but the order of the bytes differs from what GGUF stores."""

from __future__ import annotations

import pytest
import torch

from mistralrs_sdk.errors import UnsupportedError
from mistralrs_sdk.kernels import matmul
from tests.matmul_helpers import QUANTISED, TYPES, make, stored


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)


@pytest.mark.parametrize("ggml_type", matmul.PACKABLE)
@pytest.mark.parametrize("shape", [(1, 256), (16, 512), (37, 768)])
def test_packing_changes_no_value(ggml_type: str, shape: tuple[int, int]):
    """Unpacking gives the dequantised weight bit for bit, whatever the rows fill."""
    packed, weight = make(ggml_type, *shape)

    assert torch.equal(bits(matmul.unpack(packed)), bits(weight))


@pytest.mark.parametrize("ggml_type", [name for name in QUANTISED if "K" not in name])
def test_a_row_of_one_small_block_can_be_packed(ggml_type: str):
    """32 values are enough where the type's blocks are that small."""
    packed, weight = make(ggml_type, 3, 32)

    assert torch.equal(bits(matmul.unpack(packed)), bits(weight))


@pytest.mark.parametrize("ggml_type", matmul.PACKABLE)
def test_a_packed_weight_is_hardly_bigger_than_the_stored_one(ggml_type: str):
    """Whole groups of columns take what the file does, but for six-bit sub-scales."""
    packed, _ = make(ggml_type, 64, 512)
    size = stored(ggml_type, 64, 512).numel()

    most = 1.04 if ggml_type in ("Q3_K", "Q4_K", "Q5_K") else 1
    assert size <= packed.num_bytes <= most * size


@pytest.mark.parametrize("ggml_type", matmul.PACKABLE)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_the_packed_size_is_known_before(ggml_type: str, rows: int):
    """Type and shape tell how many bytes packing will take, padding included."""
    packed, _ = make(ggml_type, rows, 512)

    assert matmul.packed_bytes(ggml_type, (rows, 512)) == packed.num_bytes


def test_a_weight_that_cannot_be_packed_is_refused():
    """The message says what can be, or how big the bytes should be."""
    with pytest.raises(UnsupportedError, match="no kernel multiplies by F32 weights"):
        matmul.pack(torch.zeros(4, dtype=torch.uint8), "F32", (1, 1))
    with pytest.raises(ValueError, match="the last a multiple of 32"):
        matmul.pack(torch.zeros(34, dtype=torch.uint8), "Q8_0", (1, 33))
    with pytest.raises(ValueError, match="takes 68 bytes, not 34"):
        matmul.pack(torch.zeros(34, dtype=torch.uint8), "Q8_0", (2, 32))


def test_the_size_of_what_cannot_be_packed_is_refused():
    """A plan for a weight that no kernel takes fails as packing it would."""
    with pytest.raises(UnsupportedError, match="no kernel multiplies by BF16 weights"):
        matmul.packed_bytes("BF16", (16, 64))
    with pytest.raises(ValueError, match="the last a multiple of 256"):
        matmul.packed_bytes("Q4_K", (16, 64))


def test_the_helpers_know_every_type():
    """A type that can be packed is tested."""
    assert {*QUANTISED, "F16"} == set(matmul.PACKABLE) <= set(TYPES)
