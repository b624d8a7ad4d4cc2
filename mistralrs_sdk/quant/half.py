"""Weights in float16 on a CPU without native kernels, by the library that comes with torch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mistralrs_sdk.quant.linear_method import DenseMethod


def available() -> bool:
    """Whether this build of torch has FBGEMM, which multiplies by such weights."""
    return "fbgemm" in torch.backends.quantized.supported_engines


class HalfMethod(DenseMethod):
    """The weight packed in float16, float32 in and out: half of float32's memory to read."""

    def num_bytes(self, num_values: int) -> int:
        """Memory the weight takes."""
        return num_values * torch.float16.itemsize

    def from_dense(self, module: nn.Module, weight: Tensor) -> None:
        owner = cast(Any, module)
        owner.packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), owner.bias)
        owner.weight = None
        owner.method = self

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, module.packed)

    def to_dense(self, module: nn.Module) -> Tensor:
        return cast(Tensor, torch.ops.quantized.linear_unpack_fp16(module.packed)[0])


HALF = HalfMethod()
