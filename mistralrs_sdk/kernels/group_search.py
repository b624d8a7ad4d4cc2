"""Searches for the scales of groups of weights, native and in torch, with the same bits.

Values lie as [size of a group, groups, blocks]: index inside the group first.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.kernels import native
from mistralrs_sdk.kernels.group_sums import farthest, fold, group_first, inverse, quotient


@attrs.frozen(eq=False)
class Groups:
    """Values with what the searches need to know of them."""

    x: Tensor
    """float32 [size, groups, n]."""
    weights: Tensor | None
    """How much each squared error counts, of x's shape; None: all the same."""
    sum_w: Tensor
    """Sums over each group [groups, n]; so are the next two."""
    sum_wx: Tensor
    sum_wxx: Tensor
    scratch: tuple[Tensor, Tensor]
    """Two more of x's size: fresh memory costs as much as a pass over it."""


@attrs.frozen(eq=False)
class LevelSums:
    """Sums over each group of products with whole-number levels l, [groups, n]."""

    wxl: Tensor
    wll: Tensor
    wl: Tensor


def arrange(blocks: Tensor, weights: Tensor | None, *, size: int) -> Groups:
    """Put blocks [n, values], and weights alike, into groups of `size` values."""
    x = group_first(blocks, size)
    scratch = torch.empty_like(x), torch.empty_like(x)
    if weights is None:
        sum_w, sum_wx = torch.full_like(x[0], size), fold(scratch[0].copy_(x))
        return Groups(x, None, sum_w, sum_wx, fold(torch.mul(x, x, out=scratch[0])), scratch)
    w = group_first(weights, size)
    sum_w, sum_wx = fold(scratch[0].copy_(w)), fold(torch.mul(w, x, out=scratch[0]))
    return Groups(x, w, sum_w, sum_wx, fold(torch.mul(w, x, out=scratch[0]).mul_(x)), scratch)


def level_sums(groups: Groups, levels: Tensor) -> LevelSums:
    """Sums for levels that lie in the first scratch tensor; it is used up."""
    product = torch.mul(levels, levels, out=groups.scratch[1])
    if groups.weights is not None:
        product.mul_(groups.weights)
        levels.mul_(groups.weights)
    wll = fold(product)
    wxl = fold(torch.mul(levels, groups.x, out=product))
    return LevelSums(wxl=wxl, wll=wll, wl=fold(levels))


def search_affine(groups: Groups, top: int) -> tuple[Tensor, Tensor]:
    """The s and m from zero up, [groups, n], with the least error of x = s * l - m.

    The levels l go from 0 to `top`. Each of several grids over a group's range is fitted by least
    squares.
    """
    if not _native(groups.x):
        return search_affine_reference(groups, top)
    s, m = torch.empty_like(groups.sum_w), torch.empty_like(groups.sum_w)
    native.call(
        "mistralrs_search_affine",
        groups.x.data_ptr(),
        0 if groups.weights is None else groups.weights.data_ptr(),
        groups.sum_w.data_ptr(),
        groups.sum_wx.data_ptr(),
        groups.sum_wxx.data_ptr(),
        s.data_ptr(),
        m.data_ptr(),
        s.numel(),
        len(groups.x),
        top,
        torch.get_num_threads(),
    )
    return s, m


def search_symmetric(groups: Groups, half: int) -> Tensor:
    """The s of either sign, [groups, n], with the least error of x = s * l; groups of 16.

    The levels l go from -half to half - 1.
    """
    if not _native(groups.x):
        return search_symmetric_reference(groups, half)
    s = torch.empty_like(groups.sum_w)
    native.call(
        "mistralrs_search_symmetric",
        groups.x.data_ptr(),
        0 if groups.weights is None else groups.weights.data_ptr(),
        s.data_ptr(),
        s.numel(),
        half,
        torch.get_num_threads(),
    )
    return s


def search_zero(x: Tensor, scale: Tensor, *, low: int, high: int) -> Tensor:
    """The zero point z of x = scale * (q - z) by half-quadratic optimisation.

    x is [32, groups, n], scale and z are [groups, n]; q goes from `low` to `high`. In turns, q is
    rounded for z, what a p-norm below one takes for outliers is taken off the errors, and z moves
    by the mean of the rest: see `quant/quantise_hqq.py` for the formula and its source.
    """
    if not _native(x):
        return search_zero_reference(x, scale, low=low, high=high)
    zero = torch.empty_like(scale)
    native.call(
        "mistralrs_search_zero",
        x.data_ptr(),
        scale.data_ptr(),
        zero.data_ptr(),
        zero.numel(),
        low,
        high,
        torch.get_num_threads(),
    )
    return zero


# A grid of levels begins a fraction of a step inside the least value and ends one inside the
# greatest, or outside (below zero): heavy tails want the former. One candidate per pair of these.
_GRID_INSETS = (0.6, 0.3, 0.0, -0.3)

# The value of greatest magnitude falls so many levels away from the end of a symmetric range.
_END_OFFSETS = (-0.5, -0.16, 0.18, 0.52, 0.86, 1.2)

# Fits with a smaller determinant, relative to its terms, are lost in float32's rounding.
SINGULAR = 4e-6

_TURNS = 20
_BETA = 10.0
_BETA_GROWTH = 1.01


def search_affine_reference(groups: Groups, top: int) -> tuple[Tensor, Tensor]:
    """The same by torch."""
    low, high = groups.x.amin(0).clamp_(max=0.0), groups.x.amax(0)
    spread = high - low
    best = torch.full_like(low, torch.inf)
    s, m = torch.zeros_like(low), torch.zeros_like(low)
    for start in _GRID_INSETS:
        for end in _GRID_INSETS:
            per_step = inverse(spread, top - start - end)
            levels = torch.mul(groups.x, per_step, out=groups.scratch[0])
            levels.sub_(low * per_step - start).round_().clamp_(0, top)
            fit_s, fit_m, error = solve_affine(groups, level_sums(groups, levels))
            better = error < best
            best = torch.where(better, error, best)
            s, m = torch.where(better, fit_s, s), torch.where(better, fit_m, m)
    return s, m


def solve_affine(groups: Groups, sums: LevelSums) -> tuple[Tensor, Tensor, Tensor]:
    """The s and m with the least error for given levels, and the error."""
    both = groups.sum_w * sums.wll
    determinant = both - sums.wl * sums.wl
    regular = determinant > both * SINGULAR
    s = (groups.sum_w * sums.wxl - groups.sum_wx * sums.wl).div_(determinant)
    m = (sums.wl * sums.wxl - sums.wll * groups.sum_wx).div_(determinant)
    # All levels alike, or a minimum below zero: one of the two numbers has to do.
    below = ~regular & (groups.sum_wx < 0)
    upper = ~below & (~regular | (m < 0))
    s = torch.where(upper, quotient(sums.wxl, sums.wll), s).masked_fill_(below, 0.0)
    m = torch.where(below, -groups.sum_wx / groups.sum_w, m.masked_fill_(upper, 0.0))
    return s, m, groups.sum_wxx - s * sums.wxl + m * groups.sum_wx


def search_symmetric_reference(groups: Groups, half: int) -> Tensor:
    """The same by torch."""
    extreme = farthest(groups.x)
    best, s = torch.zeros_like(extreme), torch.zeros_like(extreme)
    for end in (-half, half - 1):
        for offset in _END_OFFSETS:
            per_step = inverse(extreme, end + offset)
            levels = torch.mul(groups.x, per_step, out=groups.scratch[0])
            sums = level_sums(groups, levels.round_().clamp_(-half, half - 1))
            fit = quotient(sums.wxl, sums.wll)
            gain = fit * sums.wxl
            better = gain > best
            best, s = torch.where(better, gain, best), torch.where(better, fit, s)
    return s


def search_zero_reference(x: Tensor, scale: Tensor, *, low: int, high: int) -> Tensor:
    """The same by torch."""
    per_step = inverse(scale)
    steps = x * per_step
    zero = best_zero = low - x.amin(0) * per_step
    best = torch.full_like(zero, torch.inf)
    q, error, power = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    beta = _BETA
    for _ in range(_TURNS):
        torch.add(steps, zero, out=q).round_().clamp_(low, high).sub_(zero)
        torch.sub(steps, q, out=error)
        torch.abs(error, out=power)
        loss = fold(q.copy_(power))
        better = loss < best
        best, best_zero = torch.where(better, loss, best), torch.where(better, zero, best_zero)
        power.rsqrt_().mul_(1.0 / beta)  # not sqrt_: some builds of torch round that elsewhere
        error.clamp_(power.neg(), power)
        zero = zero - fold(error) / len(x)
        beta *= _BETA_GROWTH
    return best_zero


def _native(x: Tensor) -> bool:
    return x.is_cpu and native.available()
