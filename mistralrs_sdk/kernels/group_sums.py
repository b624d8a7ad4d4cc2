"""Arithmetic over groups of values: the same bits whatever the threads do.

A sum by `torch.sum` may add in another order where a thread's share of a tensor ends. These add
whole rows, so that a group's result depends on that group only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_first(blocks: Tensor, size: int) -> Tensor:
    """Blocks [n, values] as [size, groups of a block, n], so that sums add long rows."""
    return blocks.view(len(blocks), -1, size).permute(2, 1, 0).contiguous()


def block_first(values: Tensor) -> Tensor:
    """Whole numbers [size, groups, n] or [groups, n] as uint8 [n, values], in stored order."""
    return values.to(torch.uint8).movedim(-1, 0).transpose(1, -1).flatten(1)


def fold(terms: Tensor) -> Tensor:
    """Sum over the first dimension, a power of two from 2 up; `terms` is used up."""
    count = len(terms) // 2
    while count > 1:
        terms[:count].add_(terms[count : 2 * count])
        count //= 2
    return terms[0] + terms[1]


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and zero where the denominator is zero."""
    return (numerator / denominator).masked_fill_(denominator == 0, 0.0)


def inverse(values: Tensor, factor: float = 1.0) -> Tensor:
    """1 / values * factor, and zero where the value is zero."""
    return values.reciprocal().mul_(factor).masked_fill_(values == 0, 0.0)


def farthest(values: Tensor) -> Tensor:
    """The value of greatest magnitude along the first dimension, with its sign."""
    low, high = values.amin(0), values.amax(0)
    return torch.where(-low > high, low, high)


def as_half(values: Tensor) -> Tensor:
    """Rounded to float16's values, in float32."""
    return values.to(torch.float16).to(torch.float32)


def half_bytes(*values: Tensor) -> Tensor:
    """The float16 bytes of numbers [n] each, [n, 2 * how many]; minus zero becomes zero."""
    return (torch.stack(values, dim=1).to(torch.float16) + 0.0).view(torch.uint8)
