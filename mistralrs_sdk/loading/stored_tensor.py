"""What readers of quantised safetensors share: tensors as stored, and scales applied to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.checkpoint import ReadPart, StoredCodes, TensorSource
from mistralrs_sdk.quant.device_kind import Parts as Encoded
from mistralrs_sdk.quant.device_kinds import FLOAT8, INT8

FLOAT_TYPES = ("BF16", "F16", "F32", "F64")
FLOAT8_TYPES = ("F8_E4M3", "F8_E5M2")
SCALE_TYPES = (*FLOAT_TYPES, "F8_E8M0", "U8")

WAY_OUT = "use the unquantised checkpoint (with_isq quantises it while it loads) or a GGUF file"

_SLAB = 256
"""Rows that are dequantised at a time, so that little is needed besides the result."""


@attrs.frozen(kw_only=True)
class StoredTensor:
    """One tensor of a safetensors file, of any number type, not yet read."""

    name: str
    file: str
    """Name of the file, without its folder."""
    dtype: str
    """As safetensors writes it, for example "BF16" or "I32"."""
    shape: tuple[int, ...]
    load: Callable[[], Tensor]
    load_part: ReadPart | None = None


Parts = Mapping[str, StoredTensor]
"""The tensors of one quantised module, by the last part of their names; never empty."""


@attrs.frozen(kw_only=True)
class Scheme:
    """How a checkpoint stores its quantised weights."""

    words: str
    """What it is, for `describe()`."""
    main: str
    """Last part of the name of the tensor that holds a module's values."""
    helpers: tuple[str, ...]
    """Last parts of the names of what belongs to it."""
    source: Callable[[Parts], TensorSource]
    """The weight [out, in] in float32; raises ModelLoadError if the parts do not fit together."""
    quantises_activations: bool = False
    """Whether the model was meant to run with quantised activations, which is not done here."""


def float_source(tensor: StoredTensor) -> TensorSource:
    """A tensor that is read as it is.

    Raises:
        UnsupportedError: it does not hold floats.
    """
    if tensor.dtype not in FLOAT_TYPES:
        raise UnsupportedError(
            f"tensor {tensor.name!r} in {tensor.file} has type {tensor.dtype}: supported are "
            f"{', '.join(FLOAT_TYPES)}"
        )
    return TensorSource(shape=tensor.shape, load=tensor.load, load_part=tensor.load_part)


def need(parts: Parts, leaf: str) -> StoredTensor:
    """The part of that name.

    Raises:
        ModelLoadError: it is missing.
    """
    if leaf not in parts:
        other = next(iter(parts.values()))
        module = other.name.rpartition(".")[0]
        raise ModelLoadError(
            f"{module}.{leaf} is missing, without which {other.name!r} in {other.file} cannot be "
            "read: download the checkpoint again"
        )
    return parts[leaf]


def expect(tensor: StoredTensor, *, shape: tuple[int, ...], types: Collection[str]) -> None:
    """Raise ModelLoadError unless the tensor has this shape and one of these number types."""
    expect_type(tensor, types)
    if tensor.shape != shape:
        raise ModelLoadError(
            f"tensor {tensor.name!r} in {tensor.file} has shape {list(tensor.shape)} where "
            f"{list(shape)} fits the others of its layer and the quantization_config: one of them "
            "is damaged"
        )


def expect_type(tensor: StoredTensor, types: Collection[str]) -> None:
    """Raise ModelLoadError unless the tensor has one of these number types."""
    if tensor.dtype not in types:
        raise ModelLoadError(
            f"tensor {tensor.name!r} in {tensor.file} has type {tensor.dtype}, which does not fit "
            f"the quantization_config: it must be {' or '.join(types)}"
        )


def expect_matrix(tensor: StoredTensor, types: Collection[str]) -> tuple[int, int]:
    """Return the tensor's two dimensions; ModelLoadError if it has others or another type."""
    expect_type(tensor, types)
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise ModelLoadError(
            f"tensor {tensor.name!r} in {tensor.file} has shape {list(tensor.shape)}: a quantised "
            "weight must have two dimensions, neither of them 0"
        )
    return tensor.shape[0], tensor.shape[1]


def whole(settings: Mapping[str, Any], *names: str, default: int) -> int:
    """The number under the first of these keys that is there.

    Raises:
        ModelLoadError: it is no whole number.
    """
    for name in names:
        value = settings.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelLoadError(f"{name} {value!r} in quantization_config is no whole number")
        return value
    return default


def block_size(value: Any, key: str) -> tuple[int, int]:
    """Rows and columns of a block, as a config writes them.

    Raises:
        ModelLoadError: these are not two whole numbers from 1 up.
    """
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case _:
            raise ModelLoadError(
                f"{key} {value!r} in quantization_config must be two whole numbers from 1 up"
            )


def scale_block(
    scale: StoredTensor, shape: tuple[int, int], *, block: tuple[int, int] | None
) -> tuple[int, int]:
    """Rows and columns of a weight [out, in] of `shape` that share one value of `scale`.

    `block` says what they must be; without it the scale may be for the whole weight or per row.

    Raises:
        ModelLoadError: the scale has another shape or no number type of a scale.
    """
    if block is not None:
        grid = (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]))
        expect(scale, shape=grid, types=SCALE_TYPES)
        return block
    expect_type(scale, SCALE_TYPES)
    if math.prod(scale.shape) == 1:
        return shape
    if scale.shape != (shape[0],):
        expect(scale, shape=(shape[0], 1), types=SCALE_TYPES)
    return 1, shape[1]


def read_scale(scale: StoredTensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """The scales as a grid, float32 [ceil(out / block rows), ceil(in / block columns)]."""
    values = scale.load()
    if values.dtype == torch.uint8:  # exponents of two, written before there was a type for them
        values = values.view(torch.float8_e8m0fnu)
    rows = math.ceil(shape[0] / block[0])
    return values.to(torch.float32).reshape(rows, -1)


def dequantise(
    shape: tuple[int, int],
    *,
    rows: Callable[[int, int], Tensor],
    scales: Tensor,
    zeros: Tensor | None,
    row_block: int,
    columns: Tensor,
) -> Tensor:
    """(values - zeros) * scales, float32 [out, in].

    `rows(start, end)` gives the stored values of these rows, any type, [end - start, in]; start is
    a multiple of 8. `scales` and `zeros` are grids [r, c]: row i of the weight takes row
    i // row_block of them, column j takes column `columns[j]`.
    """
    result = torch.empty(shape, dtype=torch.float32)
    for start in range(0, shape[0], _SLAB):
        end = min(start + _SLAB, shape[0])
        own = torch.arange(start, end) // row_block
        slab = result[start:end]
        slab.copy_(rows(start, end))
        if zeros is not None:
            slab.sub_(zeros[own][:, columns])
        slab.mul_(scales[own][:, columns])
    return result


def one_byte_source(
    parts: Parts, *, scale: str, types: Collection[str], block: tuple[int, int] | None
) -> TensorSource:
    """A weight [out, in] with one byte per value, of one of `types`, and the part `scale`."""
    weight, scales = need(parts, "weight"), need(parts, scale)
    shape = expect_matrix(weight, types)
    shared = scale_block(scales, shape, block=block)
    zero = parts.get("weight_zero_point")
    if zero is not None:
        expect(zero, shape=scales.shape, types=("I8", *types, *FLOAT_TYPES))

    def load() -> Tensor:
        stored = weight.load()
        grid = read_scale(scales, shape, shared)
        return dequantise(
            shape,
            rows=lambda start, end: stored[start:end],
            scales=grid,
            zeros=None if zero is None else zero.load().to(torch.float32).reshape(grid.shape),
            row_block=shared[0],
            columns=torch.arange(shape[1]) // shared[1],
        )

    def load_codes() -> Encoded:
        return weight.load(), read_scale(scales, shape, shared).expand(shape[0], 1).squeeze(1)

    kind = {"F8_E4M3": FLOAT8, "I8": INT8}.get(weight.dtype)
    codes, by_rows = None, shared in (shape, (1, shape[1]))
    if kind and zero is None and by_rows and shape[1] % kind.block_size == 0:
        codes = StoredCodes(kind=kind.name, load=load_codes)
    return TensorSource(shape=shape, load=load, codes=codes)
