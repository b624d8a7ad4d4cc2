"""torch's int4 kernels for CUDA, in torch on a CPU, refusing what they refuse.

`int4_kernels()` gives the two operators, which have none for a CPU, these ones for a while. The
layout is written down as the CUDA source has it, word by word; products are those of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def int4_kernels() -> Iterator[list[str]]:
    """Yields the names of what is called from then on, in order."""
    calls: list[str] = []

    def convert(weight: Tensor, inner: int) -> Tensor:
        calls.append("convert")
        with weight.device:
            return convert_weight(weight, inner)

    def multiply(x: Tensor, words: Tensor, group: int, both: Tensor) -> Tensor:
        calls.append("multiply")
        with x.device:
            return multiply_by(x, words, group, both)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_convert_weight_to_int4pack", convert, "CPU")
    library.impl("_weight_int4pack_mm", multiply, "CPU")
    try:
        yield calls
    finally:
        library._destroy()


def convert_weight(weight: Tensor, inner: int) -> Tensor:
    """[n, k / 2] bytes, the first of two columns in the upper half, to [n / 8, k / 16 i, 32, i / 2]
    words."""
    assert weight.dim() == 2
    assert weight.dtype == torch.uint8
    assert weight.is_contiguous()
    assert inner in (2, 4, 8)
    n, half = weight.shape
    assert 2 * half % (16 * inner) == 0
    tiles, outer = -(-n // 8), 2 * half // (16 * inner)
    filled = torch.zeros((8 * tiles, half), dtype=torch.int64)
    filled[:n] = weight
    words = torch.zeros((tiles, outer, 32, inner // 2), dtype=torch.int64)
    for lane in range(32):
        rows = filled[lane // 4 :: 8]
        for pair in range(inner // 2):
            base = torch.arange(outer) * inner * 8 + pair * 16  # bytes; a tile of 16 columns has 8
            v = [rows[:, base + lane % 4 + offset] for offset in (0, 4, 8, 12)]
            for place, value in enumerate([v[0] >> 4, v[1] >> 4, v[2] >> 4, v[3] >> 4, *v]):
                words[:, :, lane, pair] |= (value & 15) << 4 * place
    return torch.where(words >= 2**31, words - 2**32, words).int()


def multiply_by(x: Tensor, words: Tensor, group: int, both: Tensor) -> Tensor:
    """x [m, k] times weights of `words`, with scales and offsets [k / group, n, 2]."""
    assert x.dim() == 2
    assert x.dtype == torch.bfloat16
    assert x.is_contiguous()
    assert words.dim() == 4
    assert words.dtype == torch.int32
    assert words.is_contiguous()
    (m, k), (tiles, outer, lanes, inner) = x.shape, words.shape
    assert m > 0, "a grid of no blocks"
    assert 2 * inner in (2, 4, 8)
    assert (outer, lanes) == (k // (32 * inner), 32)
    assert k % (32 * inner) == 0
    assert group in (32, 64, 128, 256)
    assert k % group == 0
    assert both.dtype == torch.bfloat16
    assert both.is_contiguous()
    assert both.shape == (k // group, 8 * tiles, 2)
    signed = numbers_of(words).float() - 8
    scale, offset = (part.t().repeat_interleave(group, 1) for part in both.float().unbind(-1))
    weight = (signed * scale + offset).bfloat16()
    return (x.float() @ weight.float().t()).bfloat16()


def numbers_of(words: Tensor) -> Tensor:
    """The 4-bit numbers [n, k] in words, each looked for where the kernel has it."""
    tiles, outer, _, inner = words.shape
    numbers = torch.zeros((tiles, 8, outer, inner, 32), dtype=torch.uint8)
    for lane in range(32):
        # eight numbers: those of columns 0, 8, 16 and 24 from there, then those beside them
        for place, offset in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
            found = words[:, :, lane] >> 4 * place & 15
            numbers[:, lane // 4, :, :, 2 * (lane % 4) + offset] = found.to(torch.uint8)
    return numbers.view(8 * tiles, -1)
