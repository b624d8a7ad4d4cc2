"""What a form of weights on a GPU is; one that only keeps them; products in slabs of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor
from torch.nn import functional

DTYPE = torch.bfloat16
"""What all of them are multiplied in: the only type that every kernel takes."""

SLAB_VALUES = 1 << 24
"""How much of a weight is made dense at a time: 32 MiB, which stay in the cache of a large GPU."""

Parts = tuple[Tensor, ...]
"""The tensors of a weight, in the order of the form they belong to."""


class DeviceKind(Protocol):
    """A form in which rows of a weight are kept and multiplied on a GPU.

    `encode` gives tensors with a row for each row of the weight, which can be put under each other;
    `pack` puts them as the kernels take them.
    """

    @property
    def name(self) -> str:
        """As `describe()` shows it; `device_kinds.kind_of` finds the form by it."""
        ...

    @property
    def block_size(self) -> int:
        """How many values of a row belong together: rows must consist of whole blocks."""
        ...

    def num_bytes(self, rows: int, columns: int) -> int:
        """Memory that so many rows take."""
        ...

    def encode(self, weight: Tensor, importance: Tensor | None = None) -> Parts:
        """Quantise floats [rows, columns], on the device they are on.

        Raises:
            ValueError: they do not fill whole blocks, or hold values that are no finite numbers.
        """
        ...

    def pack(self, pieces: Sequence[Parts]) -> Parts:
        """Encoded rows, one piece under the other, for the kernels."""
        ...

    def multiply(self, x: Tensor, packed: Parts, *, rows: int, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`: contiguous bfloat16 [n, columns] to [n, rows], n from 1 up."""
        ...

    def inputs(self, x: Tensor) -> Tensor:
        """Inputs as the kernels take them, float32: rounded to few bits by some."""
        ...

    def pick(self, packed: Parts, ids: Tensor) -> Tensor:
        """Rows `ids` [n] of the weight, bfloat16 [n, columns]."""
        ...

    def to_dense(self, packed: Parts, *, rows: int) -> Tensor:
        """The numbers the kernels multiply by, float32 [rows, columns]."""
        ...


@attrs.frozen
class DenseRows:
    """Rows that nobody asked to quantise, beside others that somebody did."""

    name: str = "bf16"
    block_size: int = 1

    def num_bytes(self, rows: int, columns: int) -> int:
        return rows * columns * DTYPE.itemsize

    def encode(self, weight: Tensor, importance: Tensor | None = None) -> Parts:
        del importance
        return (weight.to(DTYPE),)

    def pack(self, pieces: Sequence[Parts]) -> Parts:
        return (joined([piece[0] for piece in pieces]),)

    def multiply(self, x: Tensor, packed: Parts, *, rows: int, bias: Tensor | None) -> Tensor:
        del rows
        return functional.linear(x, packed[0], bias)

    def inputs(self, x: Tensor) -> Tensor:
        return x.float()

    def pick(self, packed: Parts, ids: Tensor) -> Tensor:
        return functional.embedding(ids, packed[0])

    def to_dense(self, packed: Parts, *, rows: int) -> Tensor:
        del rows
        return packed[0].float()


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces one under the other, contiguous."""
    return torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0].contiguous()


def filled_up(tensor: Tensor, border: int) -> Tensor:
    """With rows of zeros behind, until there is a multiple of `border` of them."""
    missing = -len(tensor) % border
    return functional.pad(tensor, (*(0, 0) * (tensor.dim() - 1), 0, missing)) if missing else tensor


def multiply_by_slabs(
    x: Tensor, expand: Callable[[int, int], Tensor], *, rows: int, step: int = 1
) -> Tensor:
    """`x @ weight.T` with `expand(start, end)`, some rows of the weight dense, one after the other.

    Every start is a multiple of `step`.
    """
    slab = max(SLAB_VALUES // x.shape[1] // step, 1) * step
    if slab >= rows:
        return functional.linear(x, expand(0, rows))
    out = x.new_empty(len(x), rows)
    for start in range(0, rows, slab):
        end = min(start + slab, rows)
        torch.mm(x, expand(start, end).t(), out=out[:, start:end])
    return out


def row_scale(weight: Tensor, top: float) -> Tensor:
    """The scale of each row [rows, 1], float32, with which its greatest value becomes `top`.

    Raises:
        ValueError: a value is no finite number.
    """
    greatest = torch.linalg.vector_norm(weight, torch.inf, dim=-1, keepdim=True).float()
    if not bool(greatest.isfinite().all()):
        raise ValueError("the weight has values that are no finite numbers: repair the checkpoint")
    return (greatest / top).clamp_min_(1e-12)
