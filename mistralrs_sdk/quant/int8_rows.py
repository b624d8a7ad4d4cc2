"""Weights on a GPU as int8 with a scale for each row, multiplied by bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.quant.device_kind import (
    DTYPE,
    Parts,
    joined,
    multiply_by_slabs,
    row_scale,
)

FEW_ROWS = 4
"""Up to so many rows of inputs torch's kernel multiplies; above, the weight is made dense.

The kernel reads the weight anew for every row in some versions of torch, and in others leaves most
of the GPU idle. Not measured yet."""


@attrs.frozen
class Int8Rows:
    """weight = scale * q, q from -127 to 127 and a bfloat16 scale for each row."""

    name: str = "INT8"
    block_size: int = 1

    def num_bytes(self, rows: int, columns: int) -> int:
        return rows * (columns + DTYPE.itemsize)

    def encode(self, weight: Tensor, importance: Tensor | None = None) -> Parts:
        del importance
        scale = row_scale(weight, 127.0).to(DTYPE)
        exact = weight.float() / scale.float()  # the scale as it is kept, so that q makes up for it
        return exact.round_().clamp_(-127, 127).to(torch.int8), scale.squeeze(1)

    def pack(self, pieces: Sequence[Parts]) -> Parts:
        scale = joined([scale for _, scale in pieces]).to(DTYPE)
        return joined([codes for codes, _ in pieces]), scale

    def multiply(self, x: Tensor, packed: Parts, *, rows: int, bias: Tensor | None) -> Tensor:
        codes, scale = packed
        if len(x) <= FEW_ROWS and _has_kernel(x.device.type):
            # Older versions give float32.
            y = torch.ops.aten._weight_int8pack_mm(x, codes, scale).to(DTYPE)
        else:
            y = multiply_by_slabs(x, lambda start, end: codes[start:end].to(DTYPE), rows=rows)
            y.mul_(scale)
        return y if bias is None else y.add_(bias)

    def inputs(self, x: Tensor) -> Tensor:
        return x.float()

    def pick(self, packed: Parts, ids: Tensor) -> Tensor:
        codes, scale = packed
        return codes.index_select(0, ids).to(DTYPE).mul_(scale.index_select(0, ids).unsqueeze(1))

    def to_dense(self, packed: Parts, *, rows: int) -> Tensor:
        del rows
        codes, scale = packed
        return codes.float().mul_(scale.float().unsqueeze(1))


@functools.cache
def _has_kernel(device_type: str) -> bool:
    """Whether this version of torch multiplies by int8 on such a device; CUDA from 2.9 on."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        "aten::_weight_int8pack_mm", device_type.upper()
    )
