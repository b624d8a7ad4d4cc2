"""Quantisers that round: F16, and ggml's types of 32 values with scales from the extreme values.

Each gives bit for bit what ggml's reference gives for finite scales.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantise_f16(blocks: Tensor, weights: Tensor | None) -> Tensor:
    """Round to float16. Blocks [n, values] in float32 give uint8 [n, bytes]; `weights` are not
    used. So it is with the functions below, whose blocks have 32 values."""
    del weights
    return blocks.to(torch.float16).view(torch.uint8)


def quantise_q4_0(blocks: Tensor, weights: Tensor | None) -> Tensor:
    """Quantise to Q4_0, [n, 18]."""
    del weights
    scale, quants = _round_symmetric(blocks, 8)
    return torch.cat([scale, pack_nibbles(quants)], dim=1)


def quantise_q4_1(blocks: Tensor, weights: Tensor | None) -> Tensor:
    """Quantise to Q4_1, [n, 20]."""
    del weights
    scale, minimum, quants = _round_affine(blocks, 15)
    return torch.cat([scale, minimum, pack_nibbles(quants)], dim=1)


def quantise_q5_0(blocks: Tensor, weights: Tensor | None) -> Tensor:
    """Quantise to Q5_0, [n, 22]."""
    del weights
    scale, quants = _round_symmetric(blocks, 16)
    return torch.cat([scale, _pack_fifth_bits(quants), pack_nibbles(quants & 15)], dim=1)


def quantise_q5_1(blocks: Tensor, weights: Tensor | None) -> Tensor:
    """Quantise to Q5_1, [n, 24]."""
    del weights
    scale, minimum, quants = _round_affine(blocks, 31)
    fifth = _pack_fifth_bits(quants)
    return torch.cat([scale, minimum, fifth, pack_nibbles(quants & 15)], dim=1)


def quantise_q8_0(blocks: Tensor, weights: Tensor | None) -> Tensor:
    """Quantise to Q8_0, [n, 34]."""
    del weights
    low, high = torch.aminmax(blocks, dim=1, keepdim=True)
    scale = torch.maximum(-low, high).abs_() / 127  # of zeros, a positive zero
    exact = blocks * _inverse(scale)
    # Halves go away from zero. Adding a half and cutting would take 0.49999997 with them.
    whole = exact.trunc()
    quants = whole + exact.sub_(whole).mul_(2).trunc_()
    return torch.cat([as_half_bytes(scale), quants.to(torch.int8).view(torch.uint8)], dim=1)


def pack_nibbles(quants: Tensor) -> Tensor:
    """uint8 [n, 32] up to 15 to [n, 16]: the first half of a block in the low nibbles."""
    return quants[:, :16] | quants[:, 16:] << 4


def as_half_bytes(values: Tensor) -> Tensor:
    """Numbers [n, 1] as the two bytes of their float16."""
    return values.to(torch.float16).view(torch.uint8)


def _round_symmetric(blocks: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Scale bytes and quants from 0 to 2 * half - 1: the value of greatest magnitude gets 0."""
    low, high = torch.aminmax(blocks, dim=1, keepdim=True)
    extreme = torch.where(-low > high, low, high)
    tied = (-low == high).squeeze(1).nonzero().squeeze(1)
    if len(tied):  # the first of the two counts
        rows = blocks[tied]
        extreme[tied] = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
    scale = extreme / -half
    exact = (blocks * _inverse(scale)).add_(half + 0.5)
    return as_half_bytes(scale), _cut(exact, 2 * half - 1)


def _round_affine(blocks: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes of scale and minimum, and quants from 0 to `top`."""
    low, high = torch.aminmax(blocks, dim=1, keepdim=True)
    scale = (high - low) / top
    exact = (blocks - low).mul_(_inverse(scale)).add_(0.5)
    return as_half_bytes(scale), as_half_bytes(low), _cut(exact, top)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale; zero where that is no number: such a scale is zero in float16 as well."""
    inverse = scale.reciprocal()
    return torch.where(inverse.isfinite(), inverse, 0.0)


def _cut(exact: Tensor, top: int) -> Tensor:
    return exact.clamp_(0, top).to(torch.uint8)


def _pack_fifth_bits(quants: Tensor) -> Tensor:
    """The fifth bits of uint8 [n, 32] as 4 little-endian bytes [n, 4]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=quants.device)
    bits = (quants.view(-1, 4, 8) >> 4) << shifts
    return bits.sum(dim=2, dtype=torch.uint8)
