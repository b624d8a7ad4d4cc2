"""Weights of few bits packed into 32-bit words: GPTQ, AWQ and the like."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.checkpoint import StoredCodes, TensorSource
from mistralrs_sdk.loading.stored_tensor import (
    FLOAT_TYPES,
    WAY_OUT,
    Parts,
    Scheme,
    StoredTensor,
    dequantise,
    expect,
    expect_matrix,
    need,
    read_scale,
    scale_block,
    whole,
)
from mistralrs_sdk.quant.device_kind import Parts as Encoded
from mistralrs_sdk.quant.int4_groups import GROUPS, Int4Groups, nibbles

_GPTQ_BITS = (2, 3, 4, 8)
_AWQ_BITS = _INT4_BITS = 4
_AWQ_COLUMN_AT = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ keeps each of eight columns: words hold them in the order 0, 2, 4, 6, 1, 3, 5, 7."""
_WORDS = ("I32",)
_INDICES = ("I32", "I64")


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The numbers that lie back to back in `words`, from the lowest bit of the first word up.

    `words` is int32 [rows, any]; a number may straddle two words. Returns uint8 [rows, count].
    """
    padded = functional.pad(words, (0, -words.shape[-1] % bits))
    blocks = padded.unflatten(-1, (-1, bits))  # 32 numbers fill as many words as they have bits
    values = torch.empty((*blocks.shape[:-1], 32), dtype=torch.uint8)
    for i in range(32):
        word, offset = divmod(i * bits, 32)
        value = blocks[..., word] >> offset
        held = 32 - offset
        if held < bits:
            value = value & ((1 << held) - 1) | blocks[..., word + 1] << held
        values[..., i] = value & ((1 << bits) - 1)
    return values.flatten(-2)[..., :count]


def gptq_scheme(settings: Mapping[str, Any]) -> Scheme:
    """GPTQ as AutoGPTQ and GPTQModel write it.

    Raises:
        UnsupportedError: a width or layout that is not read.
    """
    label = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    if settings.get("is_marlin_format"):
        label = "marlin"
    if label not in ("gptq", "gptq_v2"):
        raise UnsupportedError(f"GPTQ weights in the layout {label!r} are not read: {WAY_OUT}")
    for key, plain in (("pack_dtype", "int32"), ("rotation", None)):
        if settings.get(key) not in (None, plain):
            raise UnsupportedError(f"GPTQ with {key} {settings[key]!r} is not read: {WAY_OUT}")
    return Scheme(
        words=f"GPTQ, {_widths(*_gptq_width(settings))}",
        main="qweight",
        helpers=("qzeros", "scales", "g_idx"),
        source=partial(_gptq_source, settings=settings, zeros_less_one=label == "gptq"),
    )


def awq_scheme(settings: Mapping[str, Any]) -> Scheme:
    """AWQ as AutoAWQ writes it, in its layout "gemm".

    Raises:
        UnsupportedError: a width or layout that is not read.
    """
    layout = "gemm"
    for key in ("version", "checkpoint_format", "format"):
        layout = str(settings.get(key) or layout).lower()
        if layout != "gemm":
            raise UnsupportedError(f"AWQ weights in the layout {layout!r} are not read: {WAY_OUT}")
    bits = whole(settings, "bits", "w_bit", default=_AWQ_BITS)
    if bits != _AWQ_BITS:
        raise UnsupportedError(f"AWQ with bits {bits} is not read, only {_AWQ_BITS}: {WAY_OUT}")
    size = _group_size(settings, "group_size", "q_group_size")
    return Scheme(
        words=f"AWQ, {_widths(bits, size)}",
        main="qweight",
        helpers=("qzeros", "scales"),
        source=partial(_awq_source, group_size=size),
    )


def signed_source(
    parts: Parts, *, bits: int, symmetric: bool, block: tuple[int, int] | None
) -> TensorSource:
    """A weight that compressed-tensors packed row by row, with scales [out, groups] beside it."""
    packed, scales = need(parts, "weight_packed"), need(parts, "weight_scale")
    shape = _original_shape(need(parts, "weight_shape"))
    expect(packed, shape=(shape[0], _words(shape[1], bits)), types=_WORDS)
    shared = scale_block(scales, shape, block=block)
    groups = math.ceil(shape[1] / shared[1])
    zero = None if symmetric else need(parts, "weight_zero_point")
    if zero is not None:
        expect(zero, shape=(_words(shape[0], bits), groups), types=_WORDS)
    order = parts.get("weight_g_idx")
    if order is not None:
        expect(order, shape=(shape[1],), types=_INDICES)

    def read_grids() -> tuple[Tensor, Tensor]:
        grid = read_scale(scales, shape, shared)
        if zero is None:  # numbers are stored without a sign: their zero is in the middle
            return grid, torch.full_like(grid, 1 << (bits - 1))
        return grid, unpack(zero.load().t(), bits, shape[0]).t().to(torch.float32)

    def load() -> Tensor:
        words = packed.load()
        grid, zeros = read_grids()
        return dequantise(
            shape,
            rows=lambda start, end: unpack(words[start:end], bits, shape[1]),
            scales=grid,
            zeros=zeros,
            row_block=shared[0],
            columns=_columns(order, shape[1], shared[1], groups),
        )

    codes = None
    if bits == _INT4_BITS and order is None and shared[0] == 1:
        codes = _int4_codes(
            "compressed",
            shared[1],
            shape[1],
            numbers=lambda: unpack(packed.load(), bits, shape[1]),
            grids=read_grids,
        )
    return TensorSource(shape=shape, load=load, codes=codes)


def _gptq_source(
    parts: Parts, *, settings: Mapping[str, Any], zeros_less_one: bool
) -> TensorSource:
    """Numbers packed down the columns [words, out], scales and zeros [groups, out]."""
    weight = need(parts, "qweight")
    own = _override(settings, weight.name.rpartition(".")[0])
    bits, size = _gptq_width(own)
    scales, zeros = need(parts, "scales"), need(parts, "qzeros")
    height, out = expect_matrix(weight, _WORDS)
    order = parts.get("g_idx")
    if order is not None and 0 in order.shape:  # written so where columns are in order
        order = None
    width = height * 32 // bits if order is None else math.prod(order.shape)
    expect(weight, shape=(_words(width, bits), out), types=_WORDS)
    groups = math.ceil(width / (size or width))
    expect(scales, shape=(groups, out), types=FLOAT_TYPES)
    expect(zeros, shape=(groups, _words(out, bits)), types=_WORDS)
    if order is not None:
        expect(order, shape=(width,), types=_INDICES)

    def read_zeros() -> Tensor:
        stored = unpack(zeros.load(), bits, out)
        # A symmetric zero lies in the middle: one that is stored there was not reduced by one,
        # whatever the config says.
        middle = bool(own.get("sym")) and bool((stored == 1 << (bits - 1)).all())
        return (stored + 1) & ((1 << bits) - 1) if zeros_less_one and not middle else stored

    def read_grids() -> tuple[Tensor, Tensor]:
        return scales.load().t().to(torch.float32), read_zeros().t().to(torch.float32)

    def load() -> Tensor:
        words = weight.load().t()
        grid, zeroes = read_grids()
        return dequantise(
            (out, width),
            rows=lambda start, end: unpack(words[start:end], bits, width),
            scales=grid,
            zeros=zeroes,
            row_block=1,
            columns=_columns(order, width, size or width, groups),
        )

    def numbers() -> Tensor:
        if order is not None and not torch.equal(
            order.load().to(torch.int64), torch.arange(width) // (size or width)
        ):
            raise ModelLoadError(
                f"tensor {order.name!r} in {order.file} puts columns out of order although "
                'desc_act is not set: use with_dtype("bf16"), which makes the weights dense'
            )
        return unpack(weight.load().t(), bits, width)

    codes = None
    if bits == _INT4_BITS and (order is None or not own.get("desc_act")):
        codes = _int4_codes("GPTQ", size or width, width, numbers=numbers, grids=read_grids)
    return TensorSource(shape=(out, width), load=load, codes=codes)


def _awq_source(parts: Parts, *, group_size: int | None) -> TensorSource:
    """Eight outputs in each word [in, out / 8]; scales [groups, out], zeros [groups, out / 8]."""
    weight, scales, zeros = (need(parts, leaf) for leaf in ("qweight", "scales", "qzeros"))
    width, words = expect_matrix(weight, _WORDS)
    out = words * 8
    groups = math.ceil(width / (group_size or width))
    expect(scales, shape=(groups, out), types=FLOAT_TYPES)
    expect(zeros, shape=(groups, words), types=_WORDS)

    def read_grids() -> tuple[Tensor, Tensor]:
        return scales.load().t().to(torch.float32), _unpack_awq(zeros.load()).t().to(torch.float32)

    def load() -> Tensor:
        stored = weight.load()
        grid, zeroes = read_grids()
        return dequantise(
            (out, width),
            rows=lambda start, end: _unpack_awq(stored[:, start // 8 : end // 8]).t(),
            scales=grid,
            zeros=zeroes,
            row_block=1,
            columns=_columns(None, width, group_size or width, groups),
        )

    codes = _int4_codes(
        "AWQ",
        group_size or width,
        width,
        numbers=lambda: _unpack_awq(weight.load()).t(),
        grids=read_grids,
    )
    return TensorSource(shape=(out, width), load=load, codes=codes)


def _int4_codes(
    source: str,
    size: int,
    width: int,
    *,
    numbers: Callable[[], Tensor],
    grids: Callable[[], tuple[Tensor, Tensor]],
) -> StoredCodes | None:
    """How a GPU keeps 4-bit numbers, uint8 [out, in], in groups of `size`; None if it does not.

    `grids` reads scales and zeros, float32 [out, groups]. Large groups become several smaller ones.
    """
    if width % size:
        return None
    group = next((known for known in reversed(GROUPS) if size % known == 0), None)
    if group is None:
        return None

    def load() -> Encoded:
        scale, zero = (grid.repeat_interleave(size // group, 1) for grid in grids())
        return nibbles(numbers()), scale, (8 - zero) * scale

    return StoredCodes(kind=Int4Groups(source, group).name, load=load)


def _unpack_awq(words: Tensor) -> Tensor:
    values = unpack(words, _AWQ_BITS, words.shape[-1] * 8)
    return values.unflatten(-1, (-1, 8))[..., list(_AWQ_COLUMN_AT)].flatten(-2)


def _columns(order: StoredTensor | None, width: int, size: int, groups: int) -> Tensor:
    """The group that each column belongs to: as stored, else in runs of `size`."""
    if order is None:
        return torch.arange(width) // size
    found = order.load().to(torch.int64)
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= groups:
        raise ModelLoadError(
            f"tensor {order.name!r} in {order.file} names the groups {low} to {high} where there "
            f"are {groups}: it is damaged"
        )
    return found


def _original_shape(tensor: StoredTensor) -> tuple[int, int]:
    expect(tensor, shape=(2,), types=_INDICES)
    rows, columns = tensor.load().tolist()
    return rows, columns


def _gptq_width(settings: Mapping[str, Any]) -> tuple[int, int | None]:
    """Bits and group size; None is one group for all columns."""
    bits = whole(settings, "bits", default=4)
    if bits not in _GPTQ_BITS:
        known = ", ".join(map(str, _GPTQ_BITS))
        raise UnsupportedError(f"GPTQ with bits {bits} is not read, only {known}: {WAY_OUT}")
    return bits, _group_size(settings, "group_size")


def _group_size(settings: Mapping[str, Any], *names: str) -> int | None:
    size = whole(settings, *names, default=128)
    if size != -1 and size < 1:
        raise ModelLoadError(f"group_size {size} in quantization_config must be -1 or at least 1")
    return None if size == -1 else size


def _override(settings: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """The settings of one module: the first pattern under "dynamic" that matches changes some."""
    changes: Mapping[str, Mapping[str, Any]] = settings.get("dynamic") or {}
    for pattern, change in changes.items():
        if re.match(pattern.removeprefix("+:"), module):
            return {**settings, **change}
    return settings


def _widths(bits: int, group_size: int | None) -> str:
    return f"{bits} bits" + (f" in groups of {group_size}" if group_size else "")


def _words(count: int, bits: int) -> int:
    return math.ceil(count * bits / 32)
