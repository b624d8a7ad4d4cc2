"""The kernel for low-rank adapters against its reference, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mistralrs_sdk.kernels import matmul, native
from mistralrs_sdk.kernels.lora import (
    MAX_SPANS,
    LowRank,
    LowRankPart,
    LowRankTable,
    Spans,
    add_low_rank,
    add_low_rank_reference,
)

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels here")


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def low_rank(k: int, parts: Sequence[tuple[int, slice]], *, seed: int) -> LowRank:
    """An adapter's part in a layer with `k` inputs; each part has a rank and outputs."""
    made = []
    rank = 0
    for i, (own, outputs) in enumerate(parts):
        b = draw(outputs.stop - outputs.start, own, seed=seed + i + 1).half()
        made.append(LowRankPart(slice(rank, rank + own), outputs, matmul.pack(b, "F16", b.shape)))
        rank += own
    a = draw(rank, k, seed=seed).half()
    return LowRank(matmul.pack(a, "F16", a.shape), tuple(made))


def spans_of(*items: tuple[int, int, LowRankTable]) -> Spans:
    spans = Spans()
    spans.set(items)
    return spans


def both(x: Tensor, n: int, spans: Spans, layer: int, threads: int = 1) -> tuple[Tensor, Tensor]:
    """What the kernel and the reference make of the same random outputs."""
    results = []
    for add in (add_low_rank, add_low_rank_reference):
        y = draw(len(x), n, seed=9)
        add(x, y, spans, layer, num_threads=threads)
        results.append(y)
    return results[0], results[1]


TWO = LowRankTable(
    [
        low_rank(72, [(4, slice(0, 96))], seed=1),
        low_rank(96, [(4, slice(0, 48)), (7, slice(72, 96))], seed=2),
        None,
    ]
)
HIGH = LowRankTable([low_rank(72, [(40, slice(16, 96))], seed=3), None, None])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 5, 40, 300])
def test_the_kernel_is_the_reference_bit_for_bit(rows, threads):
    """Any number of rows and threads, ranks that fill no group, parts with gaps between them."""
    spans = spans_of((rows // 3, rows, TWO))

    for layer, k in ((0, 72), (1, 96)):
        kernel, reference = both(draw(rows, k, seed=8), 96, spans, layer, threads)
        assert torch.equal(kernel, reference)
        assert not torch.equal(kernel, draw(rows, 96, seed=9))


def test_each_span_gets_its_own_adapter_and_the_rest_nothing():
    """Rows before, between and behind them stay; an adapter without the layer adds nothing."""
    spans = spans_of((1, 3, TWO), (3, 20, HIGH), (25, 26, TWO))
    x, before = draw(30, 72, seed=8), draw(30, 96, seed=9)

    kernel, reference = both(x, 96, spans, 0)

    assert torch.equal(kernel, reference)
    outside = [0, *range(20, 25), *range(26, 30)]
    assert torch.equal(kernel[outside], before[outside])
    assert not torch.equal(kernel[3:20, 16:], before[3:20, 16:])
    assert torch.equal(kernel[3:20, :16], before[3:20, :16])
    for layer in (1, 2):
        kernel, reference = both(draw(30, 96, seed=8), 96, spans_of((0, 30, HIGH)), layer)
        assert torch.equal(kernel, before)


def test_the_sums_are_those_of_the_matrices():
    """Against one product in double precision of the same float16 values."""
    x = draw(6, 96, seed=8)
    (part, other) = TWO.layers[1].parts
    a = matmul.unpack(TWO.layers[1].a).double()
    exact = draw(6, 96, seed=9).double()
    exact[:, :48] += x.double() @ a[:4].T @ matmul.unpack(part.b).double().T
    exact[:, 72:] += x.double() @ a[4:].T @ matmul.unpack(other.b).double().T

    kernel, _ = both(x, 96, spans_of((0, 6, TWO)), 1)

    torch.testing.assert_close(kernel.double(), exact, rtol=1e-4, atol=1e-4)


def test_rows_may_stand_apart():
    """x and y may be slices of wider tensors."""
    x, wide = draw(5, 100, seed=8), draw(5, 120, seed=9)
    dense = wide[:, 10:106].clone()
    add_low_rank(x[:, :72].contiguous(), dense, spans_of((0, 5, TWO)), 0)

    add_low_rank(x[:, :72], wide[:, 10:106], spans_of((0, 5, TWO)), 0)

    assert torch.equal(wide[:, 10:106], dense)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.zeros(4, 72), torch.zeros(4, 96)),
        (torch.zeros(5, 72), torch.zeros(6, 96)),
        (torch.zeros(5, 72, dtype=torch.float64), torch.zeros(5, 96)),
        (torch.zeros(5, 72), torch.zeros(96, 5).T),
    ],
)
def test_tensors_that_do_not_fit_are_refused(x, y):
    """Too few rows for a span, different numbers of rows, other types, rows that are not dense."""
    for add in (add_low_rank, add_low_rank_reference):
        with pytest.raises(ValueError, match="must be"):
            add(x, y, spans_of((0, 5, TWO)), 0)


def test_a_step_has_room_for_many_adapters():
    """And says so when there are more."""
    spans = Spans()
    spans.set([(i, i + 1, TWO) for i in range(MAX_SPANS)])
    with pytest.raises(ValueError, match="1025 adapters"):
        spans.set([(i, i + 1, TWO) for i in range(MAX_SPANS + 1)])
