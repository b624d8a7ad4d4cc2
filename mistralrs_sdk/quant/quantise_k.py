"""Quantisers of the K types: super-blocks of 256 values, scales that are quantised themselves.

ggml defines only how such blocks are read. Here each group of values gets its scale (and minimum)
from a search over grids with a least-squares fit each; then the super-block's float16 scales, the
groups' whole-number scales and the values are improved in turns, always for the least (weighted)
squared error of what will be read back.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.kernels.group_search import (
    SINGULAR,
    Groups,
    LevelSums,
    arrange,
    level_sums,
    search_affine,
    search_symmetric,
    solve_affine,
)
from mistralrs_sdk.kernels.group_sums import (
    as_half,
    block_first,
    farthest,
    fold,
    half_bytes,
    inverse,
    quotient,
)


def quantise_q2_k(blocks: Tensor, weights: Tensor | None) -> Tensor:
    """Quantise to Q2_K. Blocks [n, 256] and weights alike (or None) in float32 give uint8 [n, 84];
    so do the functions below, with their own number of bytes."""
    found = _fit_affine(blocks, weights, size=16, top=3, top_scale=15)
    quants = found.quants.view(-1, 2, 4, 32)
    packed = _stack_bits(quants, 2)
    scales = found.scales | found.minima << 4
    return torch.cat([scales, packed.flatten(1), half_bytes(found.scale, found.minimum)], dim=1)


def quantise_q3_k(blocks: Tensor, weights: Tensor | None) -> Tensor:
    """Quantise to Q3_K, [n, 110]."""
    found = _fit_symmetric(blocks, weights, half=4, half_scale=32)
    quants = found.quants.view(-1, 2, 4, 32)
    high = _stack_bits(found.quants.view(-1, 1, 8, 32) >> 2, 1)
    packed = _stack_bits(quants & 3, 2)
    scales = found.scales
    low_scales = (scales[:, :8] & 15) | (scales[:, 8:] & 15) << 4
    high_scales = _stack_bits(scales.view(-1, 1, 4, 4) >> 4, 2)
    parts = [high, packed, low_scales, high_scales, half_bytes(found.scale)]
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def quantise_q4_k(blocks: Tensor, weights: Tensor | None) -> Tensor:
    """Quantise to Q4_K, [n, 144]."""
    found = _fit_affine(blocks, weights, size=32, top=15, top_scale=63)
    packed = _stack_bits(found.quants.view(-1, 4, 2, 32), 4)
    return torch.cat([_affine_head(found), packed.flatten(1)], dim=1)


def quantise_q5_k(blocks: Tensor, weights: Tensor | None) -> Tensor:
    """Quantise to Q5_K, [n, 176]."""
    found = _fit_affine(blocks, weights, size=32, top=31, top_scale=63)
    high = _stack_bits(found.quants.view(-1, 1, 8, 32) >> 4, 1)
    packed = _stack_bits(found.quants.view(-1, 4, 2, 32) & 15, 4)
    return torch.cat([_affine_head(found), high.flatten(1), packed.flatten(1)], dim=1)


def quantise_q6_k(blocks: Tensor, weights: Tensor | None) -> Tensor:
    """Quantise to Q6_K, [n, 210]."""
    found = _fit_symmetric(blocks, weights, half=32, half_scale=128)
    # Of each half block, quarters 0 and 2 share bytes, and 1 and 3.
    nibbles = (found.quants & 15).view(-1, 2, 2, 2, 32).transpose(2, 3)
    low = _stack_bits(nibbles.reshape(-1, 4, 2, 32), 4)
    high = _stack_bits(found.quants.view(-1, 2, 4, 32) >> 4, 2)
    scales = found.scales ^ 128  # stored signed, found from zero up
    return torch.cat([low.flatten(1), high.flatten(1), scales, half_bytes(found.scale)], dim=1)


@attrs.frozen
class _Found:
    """The parts of n super-blocks; whole numbers are uint8 from zero up, as most are stored."""

    quants: Tensor
    """[n, 256]."""
    scales: Tensor
    """[n, groups]."""
    scale: Tensor
    """float32 [n], a float16's value; so is the minimum."""
    minima: Tensor
    """[n, groups]; of the affine types only, like `minimum`."""
    minimum: Tensor


# From here on values lie with the index inside a group first, then the group, then the block:
# [group, groups, n]. Sums over a group are then additions of long rows.


# Scales of a super-block to start from, relative to the one that just holds the greatest scale.
_SCALE_STARTS = (1.0, 0.93, 0.86, 1.07)

# How often the values are rounded anew for improved scales; more rounds gain less than 0.1%.
_ROUNDS = 2


def _fit_affine(
    blocks: Tensor, weights: Tensor | None, *, size: int, top: int, top_scale: int
) -> _Found:
    """Fit value = scale * scales * l - minimum * minima with l up to `top`."""
    groups = arrange(blocks, weights, size=size)
    s, m = search_affine(groups, top)
    starts = torch.tensor(_SCALE_STARTS, device=blocks.device).view(-1, 1)
    d, least = s.amax(0) / top_scale * starts, m.amax(0) / top_scale * starts
    scales, minima = s, m
    for _ in range(_ROUNDS):
        sums = level_sums(groups, _affine_levels(groups, s, m, top))
        s, _, _ = solve_affine(groups, sums)
        d, least, scales, minima = _super_affine(groups, sums, s, (d, least), top_scale)
        s, m = d * scales, least * minima
        d, least = d.unsqueeze(0), least.unsqueeze(0)
    quants = _affine_levels(groups, s, m, top)
    return _Found(
        quants=block_first(quants),
        scales=block_first(scales),
        scale=d.squeeze(0),
        minima=block_first(minima),
        minimum=least.squeeze(0),
    )


def _affine_levels(groups: Groups, s: Tensor, m: Tensor, top: int) -> Tensor:
    levels = torch.add(groups.x, m, out=groups.scratch[0])
    return levels.mul_(inverse(s)).round_().clamp_(0, top)


def _super_affine(
    groups: Groups, sums: LevelSums, s: Tensor, starts: tuple[Tensor, Tensor], top_scale: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best float16 scale and minimum [n] and whole-number ones [groups, n] for given levels.

    `s` are the scales to come near; `starts` are the scales and minima [starts, n] to begin with.
    """
    halves = as_half(starts[0]), as_half(starts[1])
    found = _whole_affine(groups, sums, s, halves, top_scale)
    best = found[2].argmin(0)
    d, least, scales, minima, error = (_choose(part, best) for part in (*halves, *found))
    # The real numbers that are best for these whole ones, by least squares.
    uu = fold(scales * scales * sums.wll)
    uv = fold(scales * minima * sums.wl)
    vv = fold(minima * minima * groups.sum_w)
    xu = fold(scales * sums.wxl)
    xv = fold(minima * groups.sum_wx)
    determinant = uu * vv - uv * uv
    regular = determinant > uu * vv * SINGULAR
    new_d = as_half((xu * vv - xv * uv) / determinant)
    new_least = as_half((xu * uv - xv * uu) / determinant)
    new_d = torch.where(regular & (new_d > 0), new_d, d)
    new_least = torch.where(regular & (new_least > 0), new_least, least)
    fitted = new_d.unsqueeze(0), new_least.unsqueeze(0)
    new_scales, new_minima, new_error = _whole_affine(groups, sums, s, fitted, top_scale)
    better = new_error[0] < error
    return (
        torch.where(better, new_d, d),
        torch.where(better, new_least, least),
        torch.where(better, new_scales[:, 0], scales),
        torch.where(better, new_minima[:, 0], minima),
    )


def _whole_affine(
    groups: Groups, sums: LevelSums, s: Tensor, halves: tuple[Tensor, Tensor], top_scale: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best whole-number scales and minima [groups, starts, n] near `s` for given float16 ones
    [starts, n], and the error [starts, n]."""
    d, least = halves
    sum_w, sum_wx = groups.sum_w.unsqueeze(1), groups.sum_wx.unsqueeze(1)
    wxl, wll, wl = (part.unsqueeze(1) for part in (sums.wxl, sums.wll, sums.wl))
    near = (s.unsqueeze(1) * inverse(d)).round_()
    per_least = inverse(least)
    best = best_scales = best_minima = near.new_full((), torch.inf)
    for shift in (0, -1, 1):
        scales = (near + shift).clamp_(0, top_scale)
        real = d * scales
        minima = (real * wl).sub_(sum_wx).div_(sum_w).mul_(per_least).round_().clamp_(0, top_scale)
        offset = least * minima
        # The error without the values' own squares: the same for all candidates.
        error = (offset * wl).add_(wxl).mul_(-2).add_(real * wll).mul_(real)
        error += (offset * sum_w).add_(2 * sum_wx).mul_(offset)
        better = error < best
        best = torch.where(better, error, best)
        best_scales = torch.where(better, scales, best_scales)
        best_minima = torch.where(better, minima, best_minima)
    return best_scales, best_minima, fold(best)


def _choose(parts: Tensor, best: Tensor) -> Tensor:
    """Of [..., starts, n] the ones that `best` [n] numbers, [..., n]."""
    return parts.gather(-2, best.expand(*parts.shape[:-2], 1, -1)).squeeze(-2)


def _fit_symmetric(blocks: Tensor, weights: Tensor | None, *, half: int, half_scale: int) -> _Found:
    """Fit value = scale * scales * l with l and the scales from -half up to half - 1."""
    groups = arrange(blocks, weights, size=16)
    s = search_symmetric(groups, half)
    starts = torch.tensor(_SCALE_STARTS, device=blocks.device).view(-1, 1)
    d = farthest(s) / -half_scale * starts
    scales = s
    for _ in range(_ROUNDS):
        sums = level_sums(groups, _symmetric_levels(groups, s, half))
        d, scales = _super_symmetric(sums, d, half_scale)
        s = d * scales
        d = d.unsqueeze(0)
    quants = _symmetric_levels(groups, s, half).add_(half)
    nothing = blocks.new_empty(0)
    return _Found(
        quants=block_first(quants),
        scales=block_first(scales + half_scale),
        scale=d.squeeze(0),
        minima=nothing,
        minimum=nothing,
    )


def _symmetric_levels(groups: Groups, s: Tensor, half: int) -> Tensor:
    levels = torch.mul(groups.x, inverse(s), out=groups.scratch[0])
    return levels.round_().clamp_(-half, half - 1)


def _super_symmetric(sums: LevelSums, starts: Tensor, half_scale: int) -> tuple[Tensor, Tensor]:
    """The best float16 scale [n] and whole-number scales [groups, n] for given levels."""
    s = quotient(sums.wxl, sums.wll)
    d = as_half(starts)
    scales, error = _whole_symmetric(sums, s, d, half_scale)
    best = error.argmin(0)
    d, error, scales = (_choose(part, best) for part in (d, error, scales))
    new_d = as_half(quotient(fold(scales * sums.wxl), fold(scales * scales * sums.wll)))
    new_scales, new_error = _whole_symmetric(sums, s, new_d.unsqueeze(0), half_scale)
    better = new_error[0] < error
    return torch.where(better, new_d, d), torch.where(better, new_scales[:, 0], scales)


def _whole_symmetric(
    sums: LevelSums, s: Tensor, d: Tensor, half_scale: int
) -> tuple[Tensor, Tensor]:
    """The whole-number scales [groups, starts, n] nearest to `s` for given float16 scales
    [starts, n], and the error [starts, n] over that of `s`."""
    s = s.unsqueeze(1)
    scales = (s * inverse(d)).round_().clamp_(-half_scale, half_scale - 1)
    apart = (d * scales).sub_(s)
    return scales, fold(apart.mul_(apart).mul_(sums.wll.unsqueeze(1)))


def _stack_bits(parts: Tensor, width: int) -> Tensor:
    """uint8 [n, a, parts, b] to [n, a, b]: part i is shifted left by i * width bits."""
    packed = parts[:, :, 0]
    for i in range(1, parts.shape[2]):
        packed = packed | parts[:, :, i] * (1 << i * width)  # multiplying is quicker than shifting
    return packed


def _affine_head(found: _Found) -> Tensor:
    """The first 16 bytes of Q4_K and Q5_K: two float16, then eight pairs of 6 bits."""
    scales, minima = found.scales, found.minima
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    third = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    return torch.cat([half_bytes(found.scale, found.minimum), first, second, third], dim=1)
