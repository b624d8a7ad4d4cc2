"""The order in which the matmul kernels read a weight, and the way there from GGUF's and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.errors import UnsupportedError
from mistralrs_sdk.kernels import memory

COLUMNS = 16
"""Output columns that are interleaved in a packed weight."""


_SUB_BYTES = {"": 0, "nibbles": 16, "byte": 16, "six bits": 12, "pairs": 12}
_PACKED_SUB_BYTES = 16


@attrs.frozen
class _Plane:
    """Some of the bits of each value: a run of values fills as many bytes, which the runs behind it
    share, the first in the lowest bits."""

    stored_at: int
    """Byte of the stored block."""
    bits: int
    run: int


@attrs.frozen(kw_only=True)
class _Format:
    """A type's stored block; packed, it has the planes first, then sub-scales and scales."""

    code: int
    """Its number in GGUF, and for the native kernels."""
    block_values: int
    planes: tuple[_Plane, ...]
    """The low bits, and for some types the high ones."""
    scales_at: int = 0
    num_scales: int = 1
    """A float16 scale, or that and a minimum."""
    subs: str = ""
    """How scales of parts of the block are stored, if it has any: a scale and a minimum in the two
    "nibbles" of a byte, "pairs" of these in six bits each, or a scale in a "byte" or in "six
    bits"."""
    subs_at: int = 0
    offset: int = 0
    """What a value of zero is stored as."""

    @property
    def bits(self) -> int:
        return sum(plane.bits for plane in self.planes)

    @property
    def stored_bytes(self) -> int:
        """Of a block."""
        return self.block_values * self.bits // 8 + self.sub_bytes + 2 * self.num_scales

    @property
    def sub_bytes(self) -> int:
        """Of the sub-scales, as stored."""
        return _SUB_BYTES[self.subs]

    @property
    def packed_bytes(self) -> int:
        """Of a block."""
        return self.stored_bytes - self.sub_bytes + (_PACKED_SUB_BYTES if self.subs else 0)


def _block(code: int, scales: int, *planes: _Plane, offset: int = 0) -> _Format:
    """A type of 32 values a block, whose scale comes first."""
    return _Format(code=code, block_values=32, num_scales=scales, planes=planes, offset=offset)


_FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "F16": _Format(code=1, block_values=1, planes=(_Plane(0, 16, 1),), num_scales=0),
        "Q4_0": _block(2, 1, _Plane(2, 4, 16), offset=8),
        "Q4_1": _block(3, 2, _Plane(4, 4, 16)),
        "Q5_0": _block(6, 1, _Plane(6, 4, 16), _Plane(2, 1, 4), offset=16),
        "Q5_1": _block(7, 2, _Plane(8, 4, 16), _Plane(4, 1, 4)),
        "Q8_0": _block(8, 1, _Plane(2, 8, 32)),
        "Q2_K": _Format(
            code=10,
            block_values=256,
            planes=(_Plane(16, 2, 32),),
            scales_at=80,
            num_scales=2,
            subs="nibbles",
        ),
        "Q3_K": _Format(
            code=11,
            block_values=256,
            planes=(_Plane(32, 2, 32), _Plane(0, 1, 32)),
            scales_at=108,
            subs="six bits",
            subs_at=96,
            offset=4,
        ),
        "Q4_K": _Format(
            code=12,
            block_values=256,
            planes=(_Plane(16, 4, 32),),
            num_scales=2,
            subs="pairs",
            subs_at=4,
        ),
        "Q5_K": _Format(
            code=13,
            block_values=256,
            planes=(_Plane(48, 4, 32), _Plane(16, 1, 32)),
            num_scales=2,
            subs="pairs",
            subs_at=4,
        ),
        "Q6_K": _Format(
            code=14,
            block_values=256,
            planes=(_Plane(0, 4, 64), _Plane(128, 2, 32)),
            scales_at=208,
            subs="byte",
            subs_at=192,
            offset=32,
        ),
        "HQQ8": _block(264, 2, _Plane(4, 8, 32)),
    }
)

PACKABLE = tuple(_FORMATS)
"""Names of the types that can be packed: GGML's, and HQQ8, whose blocks are a float16 scale, a
float16 minimum and 32 signed bytes (value = byte * scale + minimum)."""


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


def packed_bytes(ggml_type: str, shape: Sequence[int]) -> int:
    """Memory that a weight of this type and shape (out_features, in_features) takes packed.

    Raises: UnsupportedError for a type outside PACKABLE; ValueError for a shape it cannot have.
    """
    kind = _format(ggml_type, shape)
    n, k = shape
    return math.ceil(n / COLUMNS) * COLUMNS * (k // kind.block_values) * kind.packed_bytes


def pack(raw: Tensor, ggml_type: str, shape: Sequence[int]) -> PackedWeight:
    """Reorder a stored weight for the kernels; the values stay bit for bit the same.

    `raw` is the tensor's bytes as GGUF stores them (uint8, any strides), or for "F16" the float16
    tensor itself; `shape` is (out_features, in_features). `raw` is not kept.

    Raises: UnsupportedError for a type outside PACKABLE; ValueError if the sizes do not fit.
    """
    kind = _format(ggml_type, shape)
    n, k = shape
    raw = raw.reshape(-1).contiguous().view(torch.uint8)
    blocks = k // kind.block_values
    if raw.numel() != n * blocks * kind.stored_bytes:
        raise ValueError(
            f"{ggml_type} of shape {(n, k)} takes {n * blocks * kind.stored_bytes} bytes, "
            f"not {raw.numel()}"
        )
    groups = math.ceil(n / COLUMNS)
    stored = raw.view(n, blocks, kind.stored_bytes)
    if n % COLUMNS:
        padding = stored.new_zeros(groups * COLUMNS - n, blocks, kind.stored_bytes)
        stored = torch.cat([stored, padding])
    stored = stored.view(groups, COLUMNS, blocks, kind.stored_bytes)
    size = (groups, blocks, COLUMNS * kind.packed_bytes)
    data = memory.reserve(math.prod(size)).view(size) if raw.is_cpu else raw.new_empty(size)
    parts = []
    for plane in kind.planes:
        end = plane.stored_at + kind.block_values * plane.bits // 8
        part = stored[..., plane.stored_at : end]
        parts.append(_spread_bits(part) if (plane.bits, plane.run) == (1, 4) else part)
    if kind.subs:
        subs = stored[..., kind.subs_at : kind.subs_at + kind.sub_bytes]
        parts.append(_unpack_subs(subs, kind.subs))
    if kind.num_scales:
        parts.append(stored[..., kind.scales_at : kind.scales_at + 2 * kind.num_scales])
    for packed, part in zip(_parts(data, kind), parts, strict=True):
        packed.copy_(part.contiguous().view(packed.dtype).permute(0, 2, 3, 1))
    return PackedWeight(data=data, ggml_type=ggml_type, shape=(n, k))


def unpack(packed: PackedWeight) -> Tensor:
    """The weight in float32, bit for bit as ggml's reference dequantises it."""
    n, k = packed.shape
    return unpack_groups(packed.data, packed.ggml_type).reshape(-1, k)[:n]


def unpack_groups(data: Tensor, ggml_type: str) -> Tensor:
    """Some of the groups of packed data as float32 [groups, COLUMNS, in_features]."""
    kind = _FORMATS[ggml_type]
    # cloned: a part of one unit would be called contiguous as it is, and could not be viewed
    parts = [
        part.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
        for part in _parts(data, kind)
    ]
    if not kind.num_scales:
        return parts[0].to(torch.float32).flatten(2)
    codes = torch.zeros((), dtype=torch.uint8, device=data.device)
    shift = 0
    for plane, part in zip(kind.planes, parts, strict=False):
        codes = codes | (_fields(part.view(torch.uint8), plane) << shift)
        shift += plane.bits
    values = codes.view(torch.int8).to(torch.float32).sub_(kind.offset)
    scales = parts[-1].to(torch.float32)
    scale, minimum = scales[..., :1], scales[..., 1:]
    if kind.subs:
        sub_scales, sub_minima = _sub_scales(parts[-2], kind.subs)
        scale, minimum = scale * sub_scales, -(minimum * sub_minima)
    values = values.unflatten(-1, (scale.shape[-1], -1)).mul_(scale.unsqueeze(-1))
    if kind.num_scales == 2:
        values.add_(minimum.unsqueeze(-1))
    return values.flatten(2)


def _format(ggml_type: str, shape: Sequence[int]) -> _Format:
    """The format of a weight that can be packed; an error says why it cannot."""
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
    return kind


def _parts(data: Tensor, kind: _Format) -> list[Tensor]:
    """Views of packed data [groups, blocks, units, COLUMNS]: planes, sub-scales if any, scales."""
    unit = torch.int32 if kind.num_scales else torch.float16  # four values of k, or one
    sizes = [(kind.block_values * plane.bits // 8, unit) for plane in kind.planes]
    if kind.subs:
        sizes.append((_PACKED_SUB_BYTES, torch.uint8))
    if kind.num_scales:
        sizes.append((2 * kind.num_scales, torch.float16))
    views, start = [], 0
    for size, dtype in sizes:
        end = start + COLUMNS * size
        views.append(data[..., start:end].view(dtype).unflatten(-1, (-1, COLUMNS)))
        start = end
    return views


def _fields(part: Tensor, plane: _Plane) -> Tensor:
    """Bytes of a plane as one number for each value, in order."""
    if plane.bits == 8:
        return part
    runs = part.unflatten(-1, (-1, plane.run))
    mask = (1 << plane.bits) - 1
    return torch.stack(
        [(runs >> shift) & mask for shift in range(0, 8, plane.bits)], dim=-2
    ).flatten(-3)


def _spread_bits(part: Tensor) -> Tensor:
    """A bit for each of 32 values [..., 4], eight neighbours in a byte, as a plane of runs of 4."""
    places = torch.arange(8, dtype=torch.uint8, device=part.device)
    bits = ((part.unsqueeze(-1) >> places) & 1).flatten(-2)
    runs = bits.unflatten(-1, (8, 4)) << places.unsqueeze(-1)
    return runs.sum(-2, dtype=torch.uint8)


def _unpack_subs(stored: Tensor, subs: str) -> Tensor:
    """Sub-scales as a byte each, [..., 16]: for "pairs" eight scales, then eight minima."""
    if subs == "pairs":
        first, second, third = stored.unflatten(-1, (3, 4)).unbind(-2)
        scales = (first & 63, (third & 15) | ((first >> 2) & 48))
        minima = (second & 63, (third >> 4) | ((second >> 2) & 48))
        return torch.cat([*scales, *minima], dim=-1)
    if subs == "six bits":
        low, high = stored[..., :8], stored[..., 8:]
        fours = torch.cat([low & 15, low >> 4], dim=-1)
        twos = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
        return (fours | (twos << 4)) - 32  # as a signed byte
    return stored


def _sub_scales(packed: Tensor, subs: str) -> tuple[Tensor, Tensor]:
    """Factors of the block's scale and minimum in float32, one for each part of the block."""
    if subs == "pairs":
        scales, minima = packed[..., :8], packed[..., 8:]
    elif subs == "nibbles":
        scales, minima = packed & 15, packed >> 4
    else:
        scales = packed.view(torch.int8)
        minima = scales[..., :0]
    return scales.to(torch.float32), minima.to(torch.float32)
