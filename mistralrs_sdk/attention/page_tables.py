"""Which pages hold a batch's keys and values, as FlashInfer reads it, built once per step."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from typing import Any, Protocol, cast

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import Batch

_FIRST_CAPACITY = 4096


class Event(Protocol):
    """A point in the device's work that the host can wait for, such as `torch.cuda.Event`."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@attrs.frozen(kw_only=True, eq=False)
class PageTable:
    """The pages of each sequence of a batch, in compressed rows; all int32.

    Sequence `i` has the pages `indices[indptr[i]:indptr[i + 1]]`, and the rows
    `query_start[i]:query_start[i + 1]`. Only `indices` is on the device: a plan reads the others.
    """

    query_start: Tensor
    """[sequences + 1], on the host."""
    indptr: Tensor
    """[sequences + 1], on the host."""
    last_page_len: Tensor
    """[sequences], on the host: tokens in the last page, 1 to the size of a page."""
    indices: Tensor
    """[pages], on the device."""


class PageTables:
    """Writes page tables into one host buffer, pinned if the device is a GPU.

    Copies to the device read the buffer after `fill` has returned. Whoever starts them calls
    `copies_started` behind them; the next `fill` waits until they are over.
    """

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        *,
        make_event: Callable[[], Event] | None = None,
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._event = None if make_event is None else make_event()
        self._pending = False
        self._reserve(_FIRST_CAPACITY)

    def fill(self, batch: Batch) -> PageTable:
        """The page table of `batch`, good until the next call."""
        if self._pending and self._event is not None:
            self._event.synchronize()
            self._pending = False
        size = self._block_size
        counts = [-(-length // size) for length in batch.seq_lens]
        indptr = list(itertools.accumulate(counts, initial=0))
        rows = len(counts)
        parts = (rows + 1, rows + 1, rows, indptr[-1])
        total = sum(parts)
        if total > len(self._numbers):
            self._reserve(max(total, 2 * len(self._numbers)))
        numbers = self._numbers
        numbers[: rows + 1] = array("i", batch.query_start)
        numbers[rows + 1 : 2 * rows + 2] = array("i", indptr)
        numbers[2 * rows + 2 : 3 * rows + 2] = array(
            "i", [length - (n - 1) * size for length, n in zip(batch.seq_lens, counts, strict=True)]
        )
        start = 3 * rows + 2
        for table, count in zip(batch.block_tables, counts, strict=True):
            numbers[start : start + count] = array("i", table[:count])
            start += count
        query_start, begins, last, indices = self._memory[:total].split(parts)
        return PageTable(
            query_start=query_start,
            indptr=begins,
            last_page_len=last,
            # A host tensor would be copied once per plan, and into a graph's buffer with a wait.
            indices=indices.to(self._device, non_blocking=True),
        )

    def copies_started(self) -> None:
        """Say that all copies out of the last page table are in the device's queue."""
        if self._event is not None:
            self._event.record()
            self._pending = True

    def _reserve(self, capacity: int) -> None:
        with torch.inference_mode(False):
            self._memory = torch.empty(
                capacity, dtype=torch.int32, pin_memory=self._device.type == "cuda"
            )
        self._numbers = memoryview(cast(Any, self._memory.numpy()))
