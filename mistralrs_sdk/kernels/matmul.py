"""Products with weights that stay as GGUF stores them, on a CPU.

A weight is packed once (`pack`); `linear` and `embedding_rows` then use the native kernels, or
without a compiler the pure-torch references beside them, which have the same signatures. Inputs of
quantised weights are rounded by row and group of 32 values (see `linear`); the references do not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mistralrs_sdk.kernels import native
from mistralrs_sdk.kernels.packing import (
    COLUMNS,
    PACKABLE,
    PackedWeight,
    pack,
    packed_bytes,
    unpack,
    unpack_groups,
)

__all__ = [
    "COLUMNS",
    "MOST_PEAKS",
    "PACKABLE",
    "PEAKS",
    "PackedWeight",
    "embedding_rows",
    "embedding_rows_reference",
    "linear",
    "linear_reference",
    "pack",
    "packed_bytes",
    "unpack",
]


PEAKS = 2
"""Values of an input row that are not rounded; more gain little."""
MOST_PEAKS = 8


def linear(
    x: Tensor,
    packed: PackedWeight,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    peaks: int = PEAKS,
    num_threads: int | None = None,
) -> Tensor:
    """`x @ weight.T + bias` in float32; x is [..., in_features].

    Inputs of quantised weights are rounded to 8 bits by row and group of 32. The greatest value of
    each of the `peaks` groups (0 to 8) with the greatest ones is not: in many models a few channels
    outshine all others, and would leave their neighbours few of the 8 bits.

    `out` (float32, [..., out_features], values of a row adjacent, rows any one distance apart: a
    slice of a wider result, say) takes the result in place of a new tensor.

    A row's result does not depend on the other rows or on the number of threads, which is torch's
    unless given. With quantised weights a group of 32 inputs that is not finite gives NaN, and one
    whose greatest magnitude is below 1.5e-36 counts as zero.

    Raises: ValueError if x, bias or out does not fit.
    """
    library = native.library()
    if library is None or not x.is_cpu:
        return linear_reference(x, packed, bias=bias, out=out, num_threads=num_threads)
    _check(x, packed, bias)
    n, k = packed.shape
    if x.dtype is not torch.float32:
        x = x.to(torch.float32)
    if out is None:
        y, y_stride = x.new_empty((*x.shape[:-1], n)), n
    else:
        y, y_stride = out, _out_stride(out, x, n)
    num_rows, stride = y.numel() // n, k
    if not num_rows:
        return y
    if not x.is_contiguous():
        x, stride = _rows(x, k)
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    status = native.call(
        "mistralrs_linear",
        packed.code,
        x.data_ptr(),
        stride,
        packed.address,
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        y_stride,
        num_rows,
        peaks,
        n,
        k,
        num_threads or torch.get_num_threads(),
    )
    if status:
        raise MemoryError(f"no memory for the packed input of a product with {tuple(x.shape)}")
    return y


def linear_reference(
    x: Tensor,
    packed: PackedWeight,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    peaks: int = PEAKS,
    num_threads: int | None = None,
) -> Tensor:
    """The same by torch, with unrounded inputs; it dequantises the whole weight for each call."""
    del peaks, num_threads  # all are exact, and torch's own
    _check(x, packed, bias)
    weight = unpack(packed).to(x.device)
    bias = None if bias is None else bias.to(torch.float32)
    y = functional.linear(x.to(torch.float32), weight, bias)
    if out is None:
        return y
    _out_stride(out, x, packed.shape[0])
    return out.copy_(y)


def embedding_rows(packed: PackedWeight, ids: Tensor, *, num_threads: int | None = None) -> Tensor:
    """Rows `ids` (any shape, whole numbers) of the weight in float32, [*ids.shape, in_features].

    Bit for bit what dequantising the weight gives.

    Raises: IndexError if an id is not a row.
    """
    library = native.library()
    if library is None or not ids.is_cpu:
        return embedding_rows_reference(packed, ids, num_threads=num_threads)
    n, k = packed.shape
    wanted = ids.to(torch.int64).contiguous()
    out = torch.empty((*ids.shape, k), dtype=torch.float32)
    wrong = native.call(
        "mistralrs_embedding_rows",
        packed.code,
        packed.address,
        wanted.data_ptr(),
        out.data_ptr(),
        wanted.numel(),
        n,
        k,
        num_threads or torch.get_num_threads(),
    )
    if wrong >= 0:
        _check_ids(packed, ids)
    return out


def embedding_rows_reference(
    packed: PackedWeight, ids: Tensor, *, num_threads: int | None = None
) -> Tensor:
    """The same by torch."""
    del num_threads  # torch's own
    _check_ids(packed, ids)
    if not ids.numel():
        return torch.empty((*ids.shape, packed.shape[1]), device=ids.device)
    flat = ids.to(torch.int64).reshape(-1)
    data = packed.data.to(ids.device)
    groups = unpack_groups(data[flat // COLUMNS], packed.ggml_type)
    rows = groups[torch.arange(len(flat), device=ids.device), flat % COLUMNS]
    return rows.view(*ids.shape, packed.shape[1])


def _rows(x: Tensor, k: int) -> tuple[Tensor, int]:
    """x as rows of k adjacent values, copied only if it must be, and the distance of the rows."""
    rows = x.reshape(-1, k)
    if k > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


def _out_stride(out: Tensor, x: Tensor, n: int) -> int:
    """The distance of the rows of a result the caller brings; ValueError if it does not fit."""
    wanted = (*x.shape[:-1], n)
    if out.shape != wanted or out.dtype is not torch.float32 or out.device != x.device:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; this product needs "
            f"torch.float32 {wanted} on {x.device}"
        )
    if out.is_contiguous():
        return n
    try:
        rows = out.view(-1, n)
    except RuntimeError:
        rows = None
    if rows is None or (n > 1 and rows.stride(1) != 1) or rows.stride(0) < n:
        raise ValueError(
            f"out has strides {out.stride()}: values of a row must be adjacent, and the rows "
            "one distance apart that leaves room for them"
        )
    return rows.stride(0)


def _check(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> None:
    n, k = packed.shape
    if x.shape[-1] != k:
        raise ValueError(f"the input has {x.shape[-1]} features, the weight takes {k}")
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"the bias has shape {tuple(bias.shape)}, the weight gives {n} features")


def _check_ids(packed: PackedWeight, ids: Tensor) -> None:
    n = packed.shape[0]
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < n):
        raise IndexError(
            f"ids from {int(ids.min())} to {int(ids.max())} are not all rows of an embedding of {n}"
        )
