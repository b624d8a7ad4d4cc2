"""Products with low-rank adapters on a CPU: those of a whole step in one call for each layer."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.kernels import matmul, native
from mistralrs_sdk.kernels.matmul import PackedWeight

MAX_SPANS = 1024
"""Adapters in one step."""

_SPAN_WORDS = 3


@attrs.frozen(eq=False)
class LowRankPart:
    """Outputs that one matrix of an adapter adds to: a layer, or one part of a fused one."""

    ranks: slice
    """Its own among the products with the layer's `a`."""
    outputs: slice
    b: PackedWeight
    """F16 [outputs, ranks]."""


@attrs.frozen(eq=False)
class LowRank:
    """What an adapter adds to one layer: `x @ a.T`, then for each part `@ b.T`."""

    a: PackedWeight
    """F16 [rank, in_features], that of all parts one under the other."""
    parts: tuple[LowRankPart, ...]

    @property
    def weights(self) -> tuple[PackedWeight, ...]:
        return (self.a, *(part.b for part in self.parts))


class LowRankTable:
    """What one adapter has for each layer, where the kernel finds it; None: nothing.

    It keeps the weights in memory.
    """

    def __init__(self, layers: Sequence[LowRank | None]) -> None:
        self.layers = tuple(layers)
        words: list[int] = [0] * len(self.layers)
        for number, low_rank in enumerate(self.layers):
            if low_rank is not None:
                words[number] = 8 * len(words)
                words += _describe(low_rank)
        self._words = torch.tensor(words, dtype=torch.int64)
        self.address = self._words.data_ptr()
        there = [number for number, low_rank in enumerate(self.layers) if low_rank is not None]
        self._words[there] += self.address


class Spans:
    """Which rows of a step have which adapter; kept in one place, for calls that are repeated."""

    def __init__(self) -> None:
        self.items: list[tuple[int, int, LowRankTable]] = []
        self._words = torch.zeros(1 + _SPAN_WORDS * MAX_SPANS, dtype=torch.int64)
        self.address = self._words.data_ptr()

    def set(self, items: Sequence[tuple[int, int, LowRankTable]]) -> None:
        """Rows [start, end) have the adapter of the table; spans do not overlap.

        Raises: ValueError for more than MAX_SPANS.
        """
        if len(items) > MAX_SPANS:
            raise ValueError(f"{len(items)} adapters in one step are more than {MAX_SPANS}")
        self.items = list(items)
        words = [len(items)]
        for start, end, table in items:
            words += (start, end, table.address)
        self._words[: len(words)] = torch.tensor(words, dtype=torch.int64)


def add_low_rank(
    x: Tensor, y: Tensor, spans: Spans, layer: int, *, num_threads: int | None = None
) -> None:
    """Add to the rows of each span what its adapter has for `layer`: `y += x @ a.T @ b.T`.

    x is [rows, in_features], y [rows, out_features], both float32 with dense rows. Other rows stay
    as they are, and a row's result does not depend on the others or on the number of threads
    (default: torch's).

    Raises: ValueError if x or y does not fit.
    """
    library = native.library()
    if library is None or not x.is_cpu:
        add_low_rank_reference(x, y, spans, layer, num_threads=num_threads)
        return
    _check(x, y, spans)
    status = native.call(
        "mistralrs_lora",
        x.data_ptr(),
        x.stride(0),
        y.data_ptr(),
        y.stride(0),
        spans.address,
        layer,
        num_threads or torch.get_num_threads(),
    )
    if status:
        raise MemoryError(f"no memory for the adapters of {x.shape[0]} rows")


def add_low_rank_reference(
    x: Tensor, y: Tensor, spans: Spans, layer: int, *, num_threads: int | None = None
) -> None:
    """The same by one product after the other; with native kernels the same bit for bit."""
    _check(x, y, spans)
    for start, end, table in spans.items:
        low_rank = table.layers[layer]
        if low_rank is None:
            continue
        inner = matmul.linear(x[start:end], low_rank.a, num_threads=num_threads)
        for part in low_rank.parts:
            added = matmul.linear(inner[:, part.ranks], part.b, num_threads=num_threads)
            y[start:end, part.outputs] += added


def _describe(low_rank: LowRank) -> list[int]:
    """As `struct LowRank` and its parts in `src/lora.cpp`."""
    rank, in_features = low_rank.a.shape
    words = [in_features, rank, low_rank.a.address, len(low_rank.parts)]
    for part in low_rank.parts:
        outputs = part.outputs.stop - part.outputs.start
        own = part.ranks.stop - part.ranks.start
        words += [part.ranks.start, own, part.outputs.start, outputs, part.b.address]
    return words


def _check(x: Tensor, y: Tensor, spans: Spans) -> None:
    for name, tensor in (("x", x), ("y", y)):
        if tensor.dtype is not torch.float32 or tensor.ndim != 2 or tensor.stride(1) != 1:
            raise ValueError(
                f"{name} is {tensor.dtype} with shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}: it must be float32 [rows, features] with dense rows"
            )
    end = max((end for _, end, _ in spans.items), default=0)
    if len(x) != len(y) or end > len(x):
        raise ValueError(
            f"x has {len(x)} rows and y {len(y)}; they must be equal, and at least {end}"
        )
