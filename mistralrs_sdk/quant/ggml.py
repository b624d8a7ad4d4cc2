"""GGML tensor types: how each lays out its blocks, and how a block becomes float32 again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.errors import UnsupportedError


@attrs.frozen
class GgmlType:
    """One way to store a tensor: `block_size` values in `block_bytes` bytes."""

    code: int
    name: str
    block_size: int
    block_bytes: int

    def num_bytes(self, num_values: int) -> int:
        """Bytes that `num_values` values take; they must fill whole blocks."""
        return num_values // self.block_size * self.block_bytes


GGML_TYPES: Mapping[int, GgmlType] = MappingProxyType(
    {
        kind.code: kind
        for kind in (
            GgmlType(0, "F32", 1, 4),
            GgmlType(1, "F16", 1, 2),
            GgmlType(2, "Q4_0", 32, 18),
            GgmlType(3, "Q4_1", 32, 20),
            GgmlType(6, "Q5_0", 32, 22),
            GgmlType(7, "Q5_1", 32, 24),
            GgmlType(8, "Q8_0", 32, 34),
            GgmlType(10, "Q2_K", 256, 84),
            GgmlType(11, "Q3_K", 256, 110),
            GgmlType(12, "Q4_K", 256, 144),
            GgmlType(13, "Q5_K", 256, 176),
            GgmlType(14, "Q6_K", 256, 210),
            GgmlType(30, "BF16", 1, 2),
        )
    }
)
"""The supported types, by their code in a GGUF file."""

HQQ8 = GgmlType(-1, "HQQ8", 32, 36)
"""Our own, in no file: float16 scale, float16 offset and 32 signed bytes, scale * byte + offset."""

FLOAT_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""The types that are plain numbers: their bytes are the tensor."""

# Known to GGUF, not to us: the name makes an error readable.
_OTHER_NAMES = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}


def ggml_type_name(code: int) -> str:
    """Name of a type code, supported or not; "unknown type" for a code GGUF does not define."""
    if code in GGML_TYPES:
        return GGML_TYPES[code].name
    return _OTHER_NAMES.get(code, "unknown type")


def supported_ggml_types() -> str:
    """The supported type names, for messages."""
    return ", ".join(kind.name for kind in GGML_TYPES.values())


def read_stored(raw: Tensor, ggml_type: GgmlType, shape: Sequence[int]) -> Tensor:
    """Read stored bytes: F32, F16 and BF16 as what they are (no copy), all others as float32."""
    if ggml_type.name in FLOAT_DTYPES:
        _check_size(raw, ggml_type, shape)
        return raw.view(FLOAT_DTYPES[ggml_type.name]).view(tuple(shape))
    return dequantise(raw, ggml_type, shape)


def dequantise(raw: Tensor, ggml_type: GgmlType, shape: Sequence[int]) -> Tensor:
    """Turn stored bytes into float32, bit for bit as ggml's reference does.

    `raw` is a contiguous uint8 tensor; `shape` is the tensor's, row-major, whole blocks along the
    last dimension. The result is on `raw`'s device.

    Raises: UnsupportedError for a type without a kernel; ValueError if the sizes do not fit.
    """
    _check_size(raw, ggml_type, shape)
    if ggml_type.name in FLOAT_DTYPES:
        return raw.view(FLOAT_DTYPES[ggml_type.name]).to(torch.float32).view(tuple(shape))
    kernel = _KERNELS.get(ggml_type.name)
    if kernel is None:
        raise UnsupportedError(
            f"cannot dequantise {ggml_type.name} (type {ggml_type.code}); "
            f"supported: {supported_ggml_types()}"
        )
    blocks = raw.view(raw.numel() // ggml_type.block_bytes, ggml_type.block_bytes)
    out = torch.empty(
        (blocks.shape[0], ggml_type.block_size), dtype=torch.float32, device=raw.device
    )
    step = max(1, _CHUNK_VALUES // ggml_type.block_size)
    for start in range(0, blocks.shape[0], step):
        kernel(blocks[start : start + step], out[start : start + step])
    return out.view(tuple(shape))


# A chunk's temporaries stay in the cache, and a big tensor never needs them all at once.
_CHUNK_VALUES = 1 << 18


def _check_size(raw: Tensor, ggml_type: GgmlType, shape: Sequence[int]) -> None:
    if shape and shape[-1] % ggml_type.block_size:
        raise ValueError(
            f"{ggml_type.name} stores blocks of {ggml_type.block_size} values: "
            f"rows of {shape[-1]} do not fit"
        )
    expected = ggml_type.num_bytes(math.prod(shape))
    if raw.dtype != torch.uint8 or raw.numel() != expected:
        raise ValueError(
            f"{ggml_type.name} of shape {tuple(shape)} takes {expected} bytes (uint8), "
            f"not {raw.numel()} of {raw.dtype}"
        )


# Every kernel takes blocks [n, block_bytes] (uint8) and fills out [n, block_size] (float32). The
# order of multiplications and additions is ggml's: another order would round differently.


def _scale(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at a byte offset of each block, as float32 [n, 1]."""
    return blocks[:, offset : offset + 2].view(torch.float16).to(torch.float32)


def _fill_nibbles(packed: Tensor, out: Tensor) -> None:
    """Low nibbles [n, 16] are the first half of a block, high nibbles the second."""
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _fifth_bits(packed: Tensor) -> Tensor:
    """32 bits in 4 little-endian bytes [n, 4] as 0 or 16, [n, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (((packed.unsqueeze(-1) >> shifts) & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _fill_nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_scale(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _fill_nibbles(blocks[:, 4:], out)
    out.mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _fill_nibbles(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_scale(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _fill_nibbles(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks[:, 4:8])).mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_scale(blocks, 0))


def _hqq8(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 4:].view(torch.int8))
    out.mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    scales, packed = blocks[:, :16], blocks[:, 16:80].unflatten(1, (2, 32))
    values = out.unflatten(1, (2, 4, 32))
    for i in range(4):
        values[:, :, i] = (packed >> (2 * i)) & 3
    groups = out.unflatten(1, (16, 16))
    groups.mul_((_scale(blocks, 80) * (scales & 15)).unsqueeze(-1))
    groups.sub_((_scale(blocks, 82) * (scales >> 4)).unsqueeze(-1))


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    high, packed = blocks[:, :32], blocks[:, 32:96].unflatten(1, (2, 32))
    values = out.unflatten(1, (8, 32))
    for i in range(8):
        low = (packed[:, i // 4] >> (2 * (i % 4))) & 3
        values[:, i] = low | (((high >> i) & 1) << 2)
    low_scales, high_scales = blocks[:, 96:104], blocks[:, 104:108]
    scales = torch.cat([low_scales & 15, low_scales >> 4], dim=1)
    scales |= torch.cat([((high_scales >> (2 * i)) & 3) << 4 for i in range(4)], dim=1)
    factors = _scale(blocks, 108) * (scales.to(torch.float32) - 32)
    out.unflatten(1, (16, 16)).sub_(4).mul_(factors.unsqueeze(-1))


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes, [n, 8] each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=1)
    return scales, minima


def _scale_and_shift_k(blocks: Tensor, out: Tensor) -> None:
    """Q4_K and Q5_K: value * scale - minimum for each of eight groups of 32."""
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    groups = out.unflatten(1, (8, 32))
    groups.mul_((_scale(blocks, 0) * scales).unsqueeze(-1))
    groups.sub_((_scale(blocks, 2) * minima).unsqueeze(-1))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    packed = blocks[:, 16:].unflatten(1, (4, 32))
    values = out.unflatten(1, (4, 2, 32))
    values[:, :, 0] = packed & 15
    values[:, :, 1] = packed >> 4
    _scale_and_shift_k(blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    high, packed = blocks[:, 16:48], blocks[:, 48:].unflatten(1, (4, 32))
    values = out.unflatten(1, (8, 32))
    for i in range(8):
        low = (packed[:, i // 2] >> (4 * (i % 2))) & 15
        values[:, i] = low | (((high >> i) & 1) << 4)
    _scale_and_shift_k(blocks, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low = blocks[:, :128].unflatten(1, (2, 2, 32))
    high = blocks[:, 128:192].unflatten(1, (2, 32))
    values = out.unflatten(1, (2, 4, 32))
    for i in range(4):
        nibble = (low[:, :, i % 2] >> (4 * (i // 2))) & 15
        values[:, :, i] = nibble | (((high >> (2 * i)) & 3) << 4)
    factors = _scale(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    out.unflatten(1, (16, 16)).sub_(32).mul_(factors.unsqueeze(-1))


def group_parameters(blocks: Tensor, ggml_type: str) -> tuple[Tensor, Tensor, Tensor]:
    """Of 4-bit blocks uint8 [any, bytes of whole blocks]: q, scale and offset of each group of 32.

    A value is scale * (q - 8) + offset. q is uint8 [groups, 32], the others float32 [groups].

    Raises: UnsupportedError for other types than Q4_0, Q4_1 (of which HQQ4's are) and Q4_K.
    """
    kind = "Q4_1" if ggml_type == "HQQ4" else ggml_type
    sizes = {known.name: known.block_bytes for known in GGML_TYPES.values()}
    if kind == "Q4_K":
        raw = blocks.reshape(-1, sizes[kind])
        q = torch.empty((len(raw), 4, 2, 32), dtype=torch.uint8, device=raw.device)
        packed = raw[:, 16:].unflatten(1, (4, 32))
        q[:, :, 0], q[:, :, 1] = packed & 15, packed >> 4
        scales, minima = _six_bit_pairs(raw[:, 4:16])
        scale, low = (_scale(raw, 0) * scales).flatten(), -(_scale(raw, 2) * minima).flatten()
        return q.view(-1, 32), scale, low + 8 * scale
    if kind not in ("Q4_0", "Q4_1"):
        raise UnsupportedError(f"{ggml_type} blocks are no groups of 4 bits")
    raw = blocks.reshape(-1, sizes[kind])
    q = torch.empty((len(raw), 32), dtype=torch.uint8, device=raw.device)
    _fill_nibbles(raw[:, sizes[kind] - 16 :], q)
    scale = _scale(raw, 0).flatten()
    offset = torch.zeros_like(scale) if kind == "Q4_0" else _scale(raw, 2).flatten() + 8 * scale
    return q, scale, offset


_KERNELS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "HQQ8": _hqq8,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
