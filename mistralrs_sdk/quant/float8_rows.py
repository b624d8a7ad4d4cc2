"""Weights on a GPU as float8_e4m3fn with a scale for each row, multiplied by float8."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.quant.device_kind import DTYPE, Parts, filled_up, joined, row_scale

GREATEST = torch.finfo(torch.float8_e4m3fn).max
_BORDER = 16
"""The kernels take rows and columns in multiples of this: rows are filled up with zeros."""


@attrs.frozen
class Float8Rows:
    """weight = scale * q, q in float8_e4m3fn and a float32 scale for each row.

    Inputs become such numbers too, with a scale for each of their rows: their greatest value is
    exact, and the others are off by up to a sixteenth.
    """

    name: str = "F8E4M3"
    block_size: int = _BORDER

    def num_bytes(self, rows: int, columns: int) -> int:
        return -(-rows // _BORDER) * _BORDER * (columns + torch.float32.itemsize)

    def encode(self, weight: Tensor, importance: Tensor | None = None) -> Parts:
        del importance
        scale = row_scale(weight, GREATEST)
        return _rounded(weight.float() / scale), scale.squeeze(1)

    def pack(self, pieces: Sequence[Parts]) -> Parts:
        codes = filled_up(joined([piece[0].view(torch.uint8) for piece in pieces]), _BORDER)
        scale = filled_up(joined([piece[1] for piece in pieces]), _BORDER)
        return codes.view(torch.float8_e4m3fn), scale.view(1, -1)

    def multiply(self, x: Tensor, packed: Parts, *, rows: int, bias: Tensor | None) -> Tensor:
        codes, scale = packed
        inputs, input_scale = quantise_inputs(x)
        padded = len(codes) != rows
        y = torch.ops.aten._scaled_mm(
            inputs,
            codes.t(),
            scale_a=input_scale,
            scale_b=scale,
            bias=None if padded else bias,
            out_dtype=DTYPE,
        )
        if not padded:
            return y
        y = y[:, :rows].contiguous()
        return y if bias is None else y.add_(bias)

    def inputs(self, x: Tensor) -> Tensor:
        codes, scale = quantise_inputs(x)
        return codes.float().mul_(scale)

    def pick(self, packed: Parts, ids: Tensor) -> Tensor:
        codes, scale = packed
        # As bytes: not every version of torch selects rows of float8.
        rows = codes.view(torch.uint8).index_select(0, ids).view(torch.float8_e4m3fn)
        return rows.float().mul_(scale[0].index_select(0, ids).unsqueeze(1)).to(DTYPE)

    def to_dense(self, packed: Parts, *, rows: int) -> Tensor:
        codes, scale = packed
        return codes[:rows].float().mul_(scale[0, :rows].unsqueeze(1))


def quantise_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs [n, columns] as float8 numbers of that shape and float32 scales [n, 1]."""
    greatest = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True, dtype=torch.float32)
    scale = greatest.div_(GREATEST).clamp_min_(1e-12)
    return _rounded(x / scale), scale


def _rounded(exact: Tensor) -> Tensor:
    """The nearest float8 numbers of what is at most GREATEST but for the rounding of a scale."""
    return exact.to(torch.float8_e4m3fn)
