"""Products with weights that stay as GGUF stores them: F16, Q4_0, Q4_1 and Q8_0 on a CPU.

A weight is packed once (`pack`); `linear` and `embedding_rows` then use the native kernels, or
without a compiler the pure-torch references beside them, which have the same signatures. Inputs of
quantised weights are rounded to 8 bits by row and group of 32 values; the references do not round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from mistralrs_sdk.errors import UnsupportedError
from mistralrs_sdk.kernels import native

COLUMNS = 16
"""Output columns that are interleaved in a packed weight."""


@attrs.frozen(kw_only=True)
class _Format:
    """How a type's stored block is laid out: scale and minimum first, then the quants."""

    code: int
    """Its number in GGUF, and for the native kernels."""
    block_values: int
    num_scales: int
    quant_bytes: int

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_scales + self.quant_bytes


_FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "F16": _Format(code=1, block_values=1, num_scales=0, quant_bytes=2),
        "Q4_0": _Format(code=2, block_values=32, num_scales=1, quant_bytes=16),
        "Q4_1": _Format(code=3, block_values=32, num_scales=2, quant_bytes=16),
        "Q8_0": _Format(code=8, block_values=32, num_scales=1, quant_bytes=32),
    }
)

PACKABLE = tuple(_FORMATS)
"""Names of the GGML types that can be packed."""


@attrs.frozen(kw_only=True, eq=False)
class PackedWeight:
    """A weight [out_features, in_features] in the order the kernels read it."""

    data: Tensor
    """uint8 [groups of COLUMNS rows, blocks along in_features, bytes]; the last group may be padded
    with zeros."""
    ggml_type: str
    shape: tuple[int, int]
    code: int = attrs.field(
        init=False, default=attrs.Factory(lambda self: _FORMATS[self.ggml_type].code, True)
    )
    """What the native kernels call the type."""
    address: int = attrs.field(
        init=False, default=attrs.Factory(lambda self: self.data.data_ptr(), True)
    )
    """Of the data."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.data.numel()


def pack(raw: Tensor, ggml_type: str, shape: Sequence[int]) -> PackedWeight:
    """Reorder a stored weight for the kernels; the values stay bit for bit the same.

    `raw` is the tensor's bytes as GGUF stores them (uint8, any strides), or for "F16" the float16
    tensor itself; `shape` is (out_features, in_features). `raw` is not kept.

    Raises: UnsupportedError for a type outside PACKABLE; ValueError if the sizes do not fit.
    """
    kind = _FORMATS.get(ggml_type)
    if kind is None:
        raise UnsupportedError(
            f"no kernel multiplies by {ggml_type} weights; there are kernels for "
            f"{', '.join(PACKABLE)}: dequantise it instead"
        )
    if len(shape) != 2 or min(shape) < 1 or shape[1] % kind.block_values:
        raise ValueError(
            f"a {ggml_type} weight has two dimensions, the last a multiple of "
            f"{kind.block_values}, not {tuple(shape)}"
        )
    n, k = shape
    raw = raw.reshape(-1).contiguous().view(torch.uint8)
    blocks = k // kind.block_values
    if raw.numel() != n * blocks * kind.block_bytes:
        raise ValueError(
            f"{ggml_type} of shape {(n, k)} takes {n * blocks * kind.block_bytes} bytes, "
            f"not {raw.numel()}"
        )
    groups = math.ceil(n / COLUMNS)
    stored = raw.view(n, blocks, kind.block_bytes)
    if n % COLUMNS:
        padding = stored.new_zeros(groups * COLUMNS - n, blocks, kind.block_bytes)
        stored = torch.cat([stored, padding])
    stored = stored.view(groups, COLUMNS, blocks, kind.block_bytes)
    data = raw.new_empty(groups, blocks, COLUMNS * kind.block_bytes)
    packed_quants, packed_scales = _parts(data, kind)
    quants = stored[..., 2 * kind.num_scales :].contiguous().view(_unit(kind))
    packed_quants.copy_(quants.permute(0, 2, 3, 1))
    if kind.num_scales:
        scales = stored[..., : 2 * kind.num_scales].contiguous().view(torch.float16)
        packed_scales.copy_(scales.permute(0, 2, 3, 1))
    return PackedWeight(data=data, ggml_type=ggml_type, shape=(n, k))


def unpack(packed: PackedWeight) -> Tensor:
    """The weight in float32, bit for bit as ggml's reference dequantises it."""
    kind = _FORMATS[packed.ggml_type]
    n, k = packed.shape
    return _dequantise(packed.data, kind).reshape(-1, k)[:n]


def linear(
    x: Tensor, packed: PackedWeight, *, bias: Tensor | None = None, num_threads: int | None = None
) -> Tensor:
    """`x @ weight.T + bias` in float32; x is [..., in_features].

    A row's result does not depend on the other rows or on the number of threads, which is torch's
    unless given. With quantised weights a group of 32 inputs that is not finite gives NaN, and one
    whose greatest magnitude is below 1.5e-36 counts as zero.

    Raises: ValueError if x or bias does not fit.
    """
    library = native.library()
    if library is None or not x.is_cpu:
        return linear_reference(x, packed, bias=bias, num_threads=num_threads)
    _check(x, packed, bias)
    n, k = packed.shape
    if x.dtype is not torch.float32:
        x = x.to(torch.float32)
    y = x.new_empty((*x.shape[:-1], n))
    num_rows, stride = y.numel() // n, k
    if not num_rows:
        return y
    if not x.is_contiguous():
        x, stride = _rows(x, k)
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    status = library.mistralrs_linear(
        packed.code,
        x.data_ptr(),
        stride,
        packed.address,
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        num_rows,
        n,
        k,
        num_threads or torch.get_num_threads(),
    )
    if status:
        raise MemoryError(f"no memory for the packed input of a product with {tuple(x.shape)}")
    return y


def linear_reference(
    x: Tensor, packed: PackedWeight, *, bias: Tensor | None = None, num_threads: int | None = None
) -> Tensor:
    """The same by torch, with unrounded inputs; it dequantises the whole weight for each call."""
    del num_threads  # torch's own
    _check(x, packed, bias)
    weight = unpack(packed).to(x.device)
    bias = None if bias is None else bias.to(torch.float32)
    return functional.linear(x.to(torch.float32), weight, bias)


def embedding_rows(packed: PackedWeight, ids: Tensor, *, num_threads: int | None = None) -> Tensor:
    """Rows `ids` (any shape, whole numbers) of the weight in float32, [*ids.shape, in_features].

    Bit for bit what dequantising the weight gives.

    Raises: IndexError if an id is not a row.
    """
    library = native.library()
    if library is None or not ids.is_cpu:
        return embedding_rows_reference(packed, ids, num_threads=num_threads)
    _check_ids(packed, ids)
    k = packed.shape[1]
    wanted = ids.to(torch.int64).contiguous()
    out = torch.empty((*ids.shape, k), dtype=torch.float32)
    library.mistralrs_embedding_rows(
        packed.code,
        packed.address,
        wanted.data_ptr(),
        out.data_ptr(),
        wanted.numel(),
        k,
        num_threads or torch.get_num_threads(),
    )
    return out


def embedding_rows_reference(
    packed: PackedWeight, ids: Tensor, *, num_threads: int | None = None
) -> Tensor:
    """The same by torch."""
    del num_threads  # torch's own
    _check_ids(packed, ids)
    if not ids.numel():
        return torch.empty((*ids.shape, packed.shape[1]), device=ids.device)
    kind = _FORMATS[packed.ggml_type]
    flat = ids.to(torch.int64).reshape(-1)
    data = packed.data.to(ids.device)
    groups = _dequantise(data[flat // COLUMNS], kind)
    rows = groups[torch.arange(len(flat), device=ids.device), flat % COLUMNS]
    return rows.view(*ids.shape, packed.shape[1])


def _parts(data: Tensor, kind: _Format) -> tuple[Tensor, Tensor]:
    """Views of packed data: quants [groups, blocks, units, COLUMNS] and f16 scales alike."""
    split = COLUMNS * kind.quant_bytes
    quants = data[..., :split].view(_unit(kind)).unflatten(-1, (-1, COLUMNS))
    return quants, data[..., split:].view(torch.float16).unflatten(-1, (kind.num_scales, COLUMNS))


def _unit(kind: _Format) -> torch.dtype:
    """What is interleaved: four values of k, or one in float16."""
    return torch.float16 if kind.block_values == 1 else torch.int32


def _dequantise(data: Tensor, kind: _Format) -> Tensor:
    """Packed groups as float32 [groups, COLUMNS, in_features]."""
    quants, scales = _parts(data, kind)
    quants = quants.permute(0, 3, 1, 2).contiguous()
    if kind.block_values == 1:
        return quants.to(torch.float32).flatten(2)
    scales = scales.permute(0, 3, 1, 2).to(torch.float32)
    if kind.quant_bytes == kind.block_values:
        values = quants.view(torch.int8).to(torch.float32)
    else:
        pairs = quants.view(torch.uint8)
        values = torch.cat([pairs & 15, pairs >> 4], dim=-1).to(torch.float32)
    if kind.num_scales == 2:
        return values.mul_(scales[..., :1]).add_(scales[..., 1:]).flatten(2)
    if kind.quant_bytes < kind.block_values:
        values.sub_(8)
    return values.mul_(scales).flatten(2)


def _rows(x: Tensor, k: int) -> tuple[Tensor, int]:
    """x as rows of k adjacent values, copied only if it must be, and the distance of the rows."""
    rows = x.reshape(-1, k)
    if k > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


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
