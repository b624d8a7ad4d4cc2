"""Layers with packed weights against dense ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from mistralrs_sdk.kernels.matmul import PACKABLE
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.linear import Linear, MergedLinear
from mistralrs_sdk.quant import half
from mistralrs_sdk.quant.half import HALF
from mistralrs_sdk.quant.packed import PackedMethod
from tests.packed_models import draw

needs_half = pytest.mark.skipif(not half.available(), reason="this torch has no FBGEMM")


def linear_of(parts: list[tuple[str, int]], size: int, *, bias: bool) -> tuple[Linear, Linear]:
    """A layer with a run of rows of each type, and a dense one that multiplies by the same."""
    outputs = {f"part {i}": count for i, (_, count) in enumerate(parts)}
    packed, dense = (MergedLinear(size, outputs, bias=bias) for _ in range(2))
    if bias:
        packed.bias = dense.bias = nn.Parameter(draw(dense.out_features), requires_grad=False)
    PackedMethod.of(parts).from_dense(packed, draw(packed.out_features, size) / size**0.5)
    dense.weight = nn.Parameter(packed.method.to_dense(packed), requires_grad=False)
    return packed, dense


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from([*PACKABLE, "HQQ4"]), st.integers(1, 40)), min_size=1, max_size=4
    ),
    rows=st.integers(1, 40),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_layer_of_any_types_is_its_dequantised_self(
    parts: list[tuple[str, int]], rows: int, bias: bool, seed: int
):
    """As many rows of each type as a fused layer has, biases included, for one row to forty."""
    packed, dense = linear_of(parts, 256, bias=bias)
    x = draw(rows, 256, seed=seed)

    y, expected = packed(x), dense(x)

    assert y.shape == (rows, sum(count for _, count in parts))
    # half a step of an 8-bit input is at most 4.5 / 254 for numbers drawn like these
    torch.testing.assert_close(y, expected, atol=0.05, rtol=0)
    # float16 parts do not round their inputs
    start = 0
    for kind, count in parts:
        if kind == "F16":
            own = slice(start, start + count)
            torch.testing.assert_close(y[:, own], expected[:, own], atol=1e-5, rtol=1e-5)
        start += count


def test_inputs_may_have_any_leading_dimensions():
    """Also for a layer that puts its result together from parts."""
    packed, _ = linear_of([("Q8_0", 16), ("F16", 9)], 64, bias=True)
    x = draw(2, 3, 64)

    assert torch.equal(packed(x), packed(x.view(6, 64)).view(2, 3, 25))
    assert packed(x[:, :0]).shape == (2, 0, 25)


@pytest.mark.parametrize("kind", PACKABLE)
def test_an_embedding_gives_exact_rows_and_is_a_head(kind):
    """A tied table: rows are dequantised bit for bit, scores are products."""
    table, ids = Embedding(50, 256), torch.tensor([[0, 49], [7, 7]])
    PackedMethod.of([(kind, 50)]).from_dense(table, draw(50, 256))
    weight = table.method.to_dense(table)

    assert torch.equal(table(ids), weight[ids])
    x = draw(3, 256)
    torch.testing.assert_close(table.project(x), x @ weight.T, atol=0.8, rtol=0)


def test_an_embedding_scales_rows_but_not_scores():
    """As Gemma: the factor meets what is looked up, and only a copy of it."""
    table, ids = Embedding(50, 64, scale=8.0), torch.tensor([3, 3, 4])
    PackedMethod.of([("Q8_0", 50)]).from_dense(table, draw(50, 64))
    weight = table.method.to_dense(table)

    for _ in range(2):
        assert torch.equal(table(ids), 8 * weight[ids])
    x = draw(3, 64)
    torch.testing.assert_close(table.project(x), x @ weight.T, atol=0.5, rtol=0)


def test_a_packed_layer_can_be_made_without_a_dense_one():
    """The method of a new layer: it has a bias, and a weight once it is filled."""
    method = PackedMethod.of([("Q8_0", 8), ("Q8_0", 24)])
    layer = Linear(64, 32, bias=True, method=method)
    layer.bias = nn.Parameter(torch.zeros(32), requires_grad=False)
    weight = draw(32, 64)

    method.from_dense(layer, weight)

    assert len(method.parts) == 1
    assert layer.weight is None
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    torch.testing.assert_close(method.to_dense(layer), weight, atol=0.02, rtol=0)


@needs_half
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_without_native_kernels_weights_are_those_rounded_to_float16(bias, rows):
    """Inputs and results are float32, and the weight can be had again."""
    layer, weight, x = Linear(72, 33, bias=bias), draw(33, 72), draw(rows, 72, seed=1)
    if bias:
        layer.bias = nn.Parameter(draw(33), requires_grad=False)

    HALF.from_dense(layer, weight)

    rounded = weight.half().float()
    y = layer(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, functional.linear(x, rounded, layer.bias), atol=1e-4, rtol=1e-5)
    assert torch.equal(layer(x[None]), y[None])
    assert torch.equal(HALF.to_dense(layer).float(), rounded)
    assert layer.weight is None
