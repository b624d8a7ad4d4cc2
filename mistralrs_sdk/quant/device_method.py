"""Weights on a GPU in the forms that its kernels take, some rows in one, the next in another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from mistralrs_sdk.quant.device_kind import DeviceKind, Parts
from mistralrs_sdk.quant.linear_method import KeptInParts


@attrs.frozen
class KindRows:
    """Rows of a weight that are kept in one form."""

    kind: DeviceKind
    count: int


@attrs.frozen
class DeviceMethod(KeptInParts):
    """Each part in its form; bfloat16 in and out."""

    parts: tuple[KindRows, ...]

    @classmethod
    def of(cls, parts: Iterable[tuple[DeviceKind, int]]) -> DeviceMethod:
        """For parts (form, rows) one under the other; neighbours of one form become one."""
        merged: list[KindRows] = []
        for kind, count in parts:
            if merged and merged[-1].kind == kind:
                count += merged.pop().count
            merged.append(KindRows(kind, count))
        return cls(tuple(merged))

    def num_bytes(self, in_features: int) -> int:
        """Memory the weight takes."""
        return sum(part.kind.num_bytes(part.count, in_features) for part in self.parts)

    def from_encoded(self, module: nn.Module, pieces: Iterable[tuple[Parts, int]]) -> None:
        """Keep what the forms have encoded: pieces with their numbers of rows, from the top.

        A piece lies within one part.
        """
        waiting = iter(pieces)
        packed = []
        for part in self.parts:
            own: list[Parts] = []
            missing = part.count
            while missing:
                piece, count = next(waiting)
                own.append(piece)
                missing -= count
            packed.append(part.kind.pack(own))
        owner = cast(Any, module)
        owner.packed = tuple(packed)
        owner.weight = None
        owner.method = self

    def from_dense(self, module: nn.Module, weight: Tensor) -> None:
        counts = [part.count for part in self.parts]
        rows = zip(weight.split(counts), self.parts, strict=True)
        self.from_encoded(module, [(part.kind.encode(own), part.count) for own, part in rows])

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        packed, bias = _packed(module), cast("Tensor | None", module.bias)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        shape = (*x.shape[:-1], cast(int, module.out_features))
        if not len(rows):  # nobody wants logits, for one; kernels take no empty grids
            return x.new_empty(shape)
        if len(packed) == 1:
            (part,) = self.parts
            return part.kind.multiply(rows, packed[0], rows=part.count, bias=bias).view(shape)
        found, start = [], 0
        for part, own in zip(self.parts, packed, strict=True):
            end = start + part.count
            offset = None if bias is None else bias[start:end]
            found.append(part.kind.multiply(rows, own, rows=part.count, bias=offset))
            start = end
        return torch.cat(found, dim=1).view(shape)

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        (part,), (packed,) = self.parts, _packed(module)
        return part.kind.pick(packed, ids.view(-1)).view(*ids.shape, -1)

    def to_dense(self, module: nn.Module) -> Tensor:
        own = zip(self.parts, _packed(module), strict=True)
        return torch.cat([part.kind.to_dense(packed, rows=part.count) for part, packed in own])


def _packed(module: nn.Module) -> Sequence[Parts]:
    return cast("Sequence[Parts]", module.packed)
