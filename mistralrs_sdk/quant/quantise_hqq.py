"""Half-quadratic quantisation (HQQ) of groups of 32 values to 4 or 8 bits.

From H. Badri and A. Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (Mobius
Labs, 2023): with the scale s fixed by the extreme values, the zero point z of w = s * (q - z)
minimises the p-norm of the error for a p below one, which cares less for outliers than squares do.
Alternately, q is rounded for z, e = shrink(w - s * (q - z)) splits off the errors of outliers, and
z = mean(q - (w - e) / s), with shrink(x) = sign(x) * max(|x| - |x|^(p - 1) / beta, 0) and a beta
that grows from turn to turn. Here errors are in units of s, so that the result does not depend on
the scale of the weights, and p is 1/2 (there 0.7), which is quicker and no worse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mistralrs_sdk.kernels.group_search import search_zero
from mistralrs_sdk.kernels.group_sums import as_half, block_first, group_first, half_bytes, inverse
from mistralrs_sdk.quant.quantise_round import pack_nibbles


def quantise_hqq4(blocks: Tensor, weights: Tensor | None) -> Tensor:
    """Quantise blocks [n, 32] in float32 to Q4_1 blocks, uint8 [n, 20]; `weights` are not used."""
    del weights
    scale, offset, quants = _fit(blocks, 0, 15)
    return torch.cat([half_bytes(scale, offset), pack_nibbles(block_first(quants))], dim=1)


def quantise_hqq8(blocks: Tensor, weights: Tensor | None) -> Tensor:
    """Quantise blocks [n, 32] in float32 to HQQ8, uint8 [n, 36]; `weights` are not used."""
    del weights
    scale, offset, quants = _fit(blocks, -128, 127)
    signed = block_first(quants.add_(128)) ^ 128
    return torch.cat([half_bytes(scale, offset), signed], dim=1)


def _fit(blocks: Tensor, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and offset [n] (float16's values) and quants [32, 1, n] of w = scale * q + offset."""
    w = group_first(blocks, 32)
    least, greatest = w.amin(0), w.amax(0)
    scale = as_half((greatest - least) / (high - low))
    zero = search_zero(w, scale, low=low, high=high)
    offset = as_half(torch.where(scale == 0, (least + greatest) / 2, -zero * scale))
    quants = torch.sub(w, offset).mul_(inverse(scale)).round_().clamp_(low, high)
    return scale.squeeze(0), offset.squeeze(0), quants
