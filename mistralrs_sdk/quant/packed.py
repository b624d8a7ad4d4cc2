"""Weights in GGML blocks on a CPU, multiplied by the native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from mistralrs_sdk.kernels import matmul
from mistralrs_sdk.kernels.matmul import PackedWeight
from mistralrs_sdk.quant.linear_method import KeptInParts
from mistralrs_sdk.quant.quantise import quantise, stored_type


@attrs.frozen
class Rows:
    """Rows of a weight that are kept in one type."""

    ggml_type: str
    count: int


@attrs.frozen
class PackedMethod(KeptInParts):
    """Some rows of the weight in one GGML type, the next ones in another; float32 in and out.

    Inputs of quantised rows are rounded to 8 bits but for their `peaks`, as in `matmul.linear`.
    """

    parts: tuple[Rows, ...]
    peaks: int = matmul.PEAKS

    @classmethod
    def of(cls, parts: Sequence[tuple[str, int]], *, peaks: int = matmul.PEAKS) -> PackedMethod:
        """For parts (type, rows) one under the other; neighbours of one type become one."""
        merged: list[Rows] = []
        for name, count in parts:
            ggml_type = stored_type(name).name
            if merged and merged[-1].ggml_type == ggml_type:
                count += merged.pop().count
            merged.append(Rows(ggml_type, count))
        return cls(tuple(merged), peaks)

    def num_bytes(self, in_features: int) -> int:
        """Memory the weight takes."""
        shapes = [(part.ggml_type, (part.count, in_features)) for part in self.parts]
        return sum(matmul.packed_bytes(*shape) for shape in shapes)

    def from_blocks(self, module: nn.Module, blocks: Sequence[Tensor]) -> None:
        """Keep stored blocks, uint8 [rows, bytes], one tensor per part; float16 for "F16"."""
        owner = cast(Any, module)
        owner.packed = tuple(
            matmul.pack(raw, part.ggml_type, (part.count, owner.in_features))
            for raw, part in zip(blocks, self.parts, strict=True)
        )
        owner.weight = None
        owner.method = self

    def from_dense(self, module: nn.Module, weight: Tensor) -> None:
        counts = [part.count for part in self.parts]
        pieces = zip(weight.split(counts), self.parts, strict=True)
        self.from_blocks(module, [quantise(rows, part.ggml_type) for rows, part in pieces])

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        packed, bias = _packed(module), cast("Tensor | None", module.bias)
        if len(packed) == 1:
            return matmul.linear(x, packed[0], bias=bias, peaks=self.peaks)
        out = x.new_empty((*x.shape[:-1], cast(int, module.out_features)), dtype=torch.float32)
        start = 0
        for weight in packed:
            end = start + weight.shape[0]
            offset = None if bias is None else bias[start:end]
            matmul.linear(x, weight, bias=offset, out=out[..., start:end], peaks=self.peaks)
            start = end
        return out

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        (packed,) = _packed(module)
        return matmul.embedding_rows(packed, ids)

    def to_dense(self, module: nn.Module) -> Tensor:
        return torch.cat([matmul.unpack(weight) for weight in _packed(module)])


def _packed(module: nn.Module) -> tuple[PackedWeight, ...]:
    return cast("tuple[PackedWeight, ...]", module.packed)
