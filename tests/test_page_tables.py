"""The page tables that FlashInfer reads: arrays of a batch, and the host buffer they are in."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mistralrs_sdk.attention.backend import Batch
from mistralrs_sdk.attention.page_tables import PageTables

CPU = torch.device("cpu")


def batch_of(rows: list[int], lengths: list[int], tables: list[list[int]]) -> Batch:
    starts = [sum(rows[:i]) for i in range(len(rows) + 1)]
    nothing = torch.empty(0, dtype=torch.int64)
    return Batch(
        input_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        logits_indices=nothing,
        query_start=starts,
        seq_lens=lengths,
        block_tables=tables,
    )


def decode_of(pages: int) -> Batch:
    """One sequence that fills that many pages of 4."""
    return batch_of([1], [4 * pages], [list(range(1, pages + 1))])


@given(st.data())
def test_the_arrays_say_where_every_token_is(data):
    """Sequence by sequence, its pages and the tokens of the last one give back its blocks and its
    length, whatever else its block table holds; rows are bounded by query_start."""
    size = data.draw(st.sampled_from([1, 8, 16, 32]))
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=9))
    rows = [data.draw(st.integers(1, length)) for length in lengths]
    needed = [-(-length // size) for length in lengths]
    tables = [
        data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n + 2)) for n in needed
    ]

    found = PageTables(size, CPU).fill(batch_of(rows, lengths, tables))

    arrays = (found.query_start, found.indptr, found.last_page_len, found.indices)
    assert {array.dtype for array in arrays} == {torch.int32}
    assert all(array.is_contiguous() for array in arrays)
    assert found.query_start.diff().tolist() == rows
    assert len(found.indices) == found.indptr[-1]
    for i, length in enumerate(lengths):
        start, end = found.indptr[i : i + 2].tolist()
        last = int(found.last_page_len[i])
        assert found.indices[start:end].tolist() == tables[i][: needed[i]]
        assert 1 <= last <= size
        assert (end - start - 1) * size + last == length


def test_the_buffer_grows_with_what_a_batch_needs():
    """A batch with more pages than were ever there has them all."""
    tables = PageTables(4, CPU)
    tables.fill(decode_of(2))

    found = tables.fill(decode_of(50_000))

    assert found.indices.tolist() == list(range(1, 50_001))


class Queue:
    """Stands for an event of a stream, and writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def record(self) -> None:
        self.calls.append("record")

    def synchronize(self) -> None:
        self.calls.append("wait")


def test_the_buffer_is_written_to_only_when_its_copies_are_over():
    """The first step waits for nothing; each later one for the copies of the one before."""
    queue = Queue()
    tables = PageTables(4, CPU, make_event=lambda: queue)
    for _ in range(3):
        tables.fill(decode_of(3))
        queue.calls.append("copy")
        tables.copies_started()

    assert queue.calls == ["copy", "record", "wait", "copy", "record", "wait", "copy", "record"]


def test_a_step_that_started_no_copies_is_not_waited_for():
    """There is nothing in the queue that reads the buffer."""
    queue = Queue()
    tables = PageTables(4, CPU, make_event=lambda: queue)

    tables.fill(decode_of(3))
    tables.fill(decode_of(3))

    assert queue.calls == []
