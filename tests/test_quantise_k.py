"""The searches of the K types: against plain rounding, against dense searches, native and torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mistralrs_sdk.kernels import group_search, native
from mistralrs_sdk.kernels.group_search import arrange
from mistralrs_sdk.quant.ggml import GGML_TYPES, dequantise
from mistralrs_sdk.quant.quantise import quantise

needs_library = pytest.mark.skipif(not native.available(), reason="no native kernels")
KINDS = {kind.name: kind for kind in GGML_TYPES.values()}

AFFINE = {"Q2_K": (16, 3, 15), "Q4_K": (32, 15, 63), "Q5_K": (32, 31, 63)}
"""Values of a group, greatest level, greatest whole-number scale."""
SYMMETRIC = {"Q3_K": (4, 32), "Q6_K": (32, 128)}
"""Half the number of levels, half the number of whole-number scales."""


LLAMA_CPP = {
    "Q2_K": (0.182504, 0.022806),
    "Q3_K": (0.0626526, 0.00953176),
    "Q4_K": (0.0148206, 0.00220719),
    "Q5_K": (0.00376111, 0.00061147),
    "Q6_K": (0.00100378, 0.000163262),
}
"""Mean squared errors of ggml 0.13's quantisers for 256 rows of `heavy_tailed` weights: with even
weights, its better mode, and with an importance of `weighting()`, weighted by it."""

OURS = {
    "Q2_K": (0.920, 0.906),
    "Q3_K": (0.978, 0.972),
    "Q4_K": (0.962, 0.950),
    "Q5_K": (0.945, 0.886),
    "Q6_K": (0.971, 0.958),
}
"""What is left of them here, and a few thousandths."""


def heavy_tailed(rows: int, *, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).standard_t(4, (rows, 256))
    return torch.from_numpy(values.astype(np.float32))


def weighting() -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).random(256).astype(np.float32)) ** 4


def squared_error(weight: Tensor, ggml_type: str, *, importance: Tensor | None = None) -> float:
    """Summed over the weight, and weighted by the importance."""
    stored = quantise(weight, ggml_type, importance=importance)
    result = dequantise(stored.view(-1), KINDS[ggml_type], weight.shape)
    factor = 1.0 if importance is None else importance
    return float(((result - weight) ** 2 * factor).sum())


def rounded_affine(weight: Tensor, size: int, top: int, top_scale: int) -> Tensor:
    """Scales and minima from the extreme values, rounded: no search."""
    x = weight.view(len(weight), -1, size)
    m = (-x.amin(-1, keepdim=True)).clamp(min=0)
    s = (x.amax(-1, keepdim=True) + m) / top
    d, least = (t.amax(1, keepdim=True) / top_scale for t in (s, m))
    s, m = d * (s / d).round(), least * (m / least).round()
    return (((x + m) / s).round().clamp(0, top) * s - m).view(weight.shape)


def rounded_symmetric(weight: Tensor, half: int, half_scale: int) -> Tensor:
    x = weight.view(len(weight), -1, 16)
    s = x.abs().amax(-1, keepdim=True) / half
    d = s.amax(1, keepdim=True) / (half_scale - 1)
    s = d * (s / d).round()
    return ((x / s).round().clamp(-half, half - 1) * s).view(weight.shape)


@pytest.mark.parametrize("ggml_type", [*AFFINE, *SYMMETRIC])
def test_the_search_beats_rounding_by_the_extreme_values(ggml_type):
    """Searching takes at least an eighth off the squared error of heavy-tailed weights."""
    weight = heavy_tailed(64)
    if ggml_type in AFFINE:
        plain = rounded_affine(weight, *AFFINE[ggml_type])
    else:
        plain = rounded_symmetric(weight, *SYMMETRIC[ggml_type])

    assert squared_error(weight, ggml_type) < 0.875 * float(((plain - weight) ** 2).sum())


@pytest.mark.parametrize("ggml_type", LLAMA_CPP)
def test_errors_are_below_those_of_llama_cpp(ggml_type):
    """The same weights lose less here, with and without an importance."""
    weight, importance = heavy_tailed(256), weighting()
    even, weighted = (
        error * left for error, left in zip(LLAMA_CPP[ggml_type], OURS[ggml_type], strict=True)
    )

    assert squared_error(weight, ggml_type) < even * weight.numel()
    assert squared_error(weight, ggml_type, importance=importance) < weighted * weight.numel()


@pytest.mark.parametrize("ggml_type", SYMMETRIC)
def test_no_dense_search_of_scales_is_much_better(ggml_type):
    """Trying all whole-number scales for 200 float16 scales gains at most a tenth."""
    half, half_scale = SYMMETRIC[ggml_type]
    weight = heavy_tailed(4, seed=1)
    whole = torch.arange(-half_scale, half_scale).view(1, -1, 1, 1)
    total = 0.0
    for row in weight.split(1):
        x = row.view(1, 1, 16, 16)
        start = float(row.abs().max()) / half / half_scale
        best = math.inf
        for d in torch.linspace(0.8 * start, 1.6 * start, 200).half().float().split(20):
            s = d.view(-1, 1, 1, 1) * whole
            levels = (x / s.masked_fill(s == 0, math.inf)).round_().clamp_(-half, half - 1)
            errors = levels.mul_(s).sub_(x).square_().sum(-1)
            best = min(best, float(errors.amin(1).sum(-1).min()))
        total += best

    assert squared_error(weight, ggml_type) < 1.1 * total


def test_no_dense_search_of_scales_and_minima_is_much_better():
    """Trying all pairs of Q4_K's whole numbers for 144 pairs of scales gains at most a tenth."""
    row = heavy_tailed(1, seed=2)
    x = row.view(8, 1, 1, 32)
    spread = float((row.view(8, 32).amax(1) - row.view(8, 32).amin(1)).max())
    depth = float(-row.min())
    numbers = torch.arange(64.0)
    best = math.inf
    for d in (torch.linspace(0.75, 1.2, 12) * spread / 15 / 63).half().tolist():
        s = (numbers * d).view(1, 64, 1, 1)
        for least in (torch.linspace(0.6, 1.1, 12) * depth / 63).half().tolist():
            m = (numbers * least).view(1, 1, 64, 1)
            levels = ((x + m) / s.clamp(min=1e-9)).round_().clamp_(0, 15)
            errors = levels.mul_(s).sub_(m).sub_(x).square_().sum(-1)
            best = min(best, float(errors.flatten(1).amin(1).sum()))

    assert squared_error(row, "Q4_K") < 1.1 * best


@pytest.mark.parametrize("ggml_type", AFFINE)
def test_blocks_that_the_type_can_hold_come_back_exactly(ggml_type):
    """Values on a grid of scales that are powers of two are found again."""
    size, top, _ = AFFINE[ggml_type]
    levels = np.random.default_rng(3).integers(0, top + 1, (16, 256 // size, size))
    levels[:, :, 0], levels[:, :, 1] = 0, top
    weight = torch.from_numpy(levels.astype(np.float32).reshape(16, 256)) / 64 - 0.125

    assert squared_error(weight, ggml_type) < 1e-6 * float((weight**2).sum())


SCALES = st.sampled_from([1.0, 1e-3, 3e4, 1e-20, 1e-38, 3e-42])


def draw_blocks(seed: int, rows: int, scale: float, *, kind: str) -> Tensor:
    blocks = torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, 256)))
    blocks = blocks.to(torch.float32)
    if kind == "whole":
        blocks = blocks.round()
    if kind == "positive":
        blocks = blocks.abs()
    if kind == "negative":
        blocks = -blocks.abs()
    if kind == "sparse":
        blocks[:, torch.arange(256) % 16 > 1] = 0
    blocks[0, :64] = float(blocks[0, 0])
    return blocks * scale


@needs_library
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 20),
    scale=SCALES,
    kind=st.sampled_from(["any", "whole", "positive", "negative", "sparse"]),
    weighted=st.booleans(),
)
def test_native_searches_equal_the_references_bit_for_bit(seed, rows, scale, kind, weighted):
    """With and without a compiler a weight gets the same bytes."""
    blocks = draw_blocks(seed, rows, scale, kind=kind)
    weights = torch.rand(rows, 256, generator=torch.Generator().manual_seed(seed)) ** 4 + 1e-6
    for size, top, _ in AFFINE.values():
        groups = arrange(blocks, weights if weighted else None, size=size)
        expected = group_search.search_affine_reference(groups, top)
        found = group_search.search_affine(groups, top)
        assert all(map(torch.equal, found, expected))
    for half, _ in SYMMETRIC.values():
        groups = arrange(blocks, weights if weighted else None, size=16)
        expected = group_search.search_symmetric_reference(groups, half)
        assert torch.equal(group_search.search_symmetric(groups, half), expected)
    x = arrange(blocks, None, size=32).x
    for low, high in ((0, 15), (-128, 127)):
        scale_of = ((x.amax(0) - x.amin(0)) / (high - low)).half().float()
        expected = group_search.search_zero_reference(x, scale_of, low=low, high=high)
        found = group_search.search_zero(x, scale_of, low=low, high=high)
        assert torch.equal(found, expected)


@needs_library
@pytest.mark.parametrize("ggml_type", ["Q2_K", "Q6_K", "HQQ4"])
def test_without_the_library_torch_gives_the_same_bytes(ggml_type, monkeypatch):
    """The bytes of a model do not depend on whether there is a compiler."""
    weight = heavy_tailed(9)
    stored = quantise(weight, ggml_type)

    monkeypatch.setattr(native, "available", lambda: False)

    assert torch.equal(quantise(weight, ggml_type), stored)
