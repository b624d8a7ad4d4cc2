"""Decode steps on a CPU, recorded once for each number of sequences and then replayed."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionBackend, Batch, BatchLists
from mistralrs_sdk.kernels.tape import Arena, ReplayError, Tape, record

logger = logging.getLogger("mistralrs_sdk.engine")

MAX_ROWS = 32
"""Sequences of the largest step that is recorded.

Calling the kernels one by one costs the same whatever the size: 4 ms for 30 layers, a third of a
step of one sequence, and lost beside the products of a larger step than this.
"""
ATTEMPTS = 2
"""Recordings of one size before it is left alone: the first may meet what the model makes once."""


class StepTapes:
    """The recorded steps of one model, which must be dropped (`clear`) when its weights change.

    `backend` is one that supports graphs.
    """

    def __init__(
        self, model: Callable[[Batch, AttentionBackend], Tensor], backend: AttentionBackend
    ) -> None:
        self._model = model
        self._backend = backend
        self._arena = Arena()
        self._steps: dict[int, _Step] = {}
        """By the number of sequences, negative with adapters."""
        self._num_threads = 0  # what the steps were recorded with: it is an argument of their calls

    def run(self, lists: BatchLists, *, adapted: bool = False) -> Tensor | None:
        """Plan and run a decode step; None if it is not one that can be replayed, and nothing ran.

        With `adapted` the model also makes the calls for adapters, whichever they are in the step.

        Returns the logits, as the model does; they are good until the next call. A replay in which
        a kernel fails returns None too: the step run by itself raises what the kernel found.
        """
        size = len(lists.seq_lens)
        if not 0 < size <= MAX_ROWS:
            return None
        if len(lists.input_ids) != size or len(lists.logits_indices) != size:
            return None
        if self._num_threads != torch.get_num_threads():
            self.clear()
            self._num_threads = torch.get_num_threads()
        key = -size if adapted else size
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _Step(size)
        if step.tape is None and step.attempts >= ATTEMPTS:
            return None
        static = step.fill(lists)
        self._backend.plan(static, graph_size=size)
        if step.tape is None:
            return self._record(step, static)
        try:
            return step.tape.run()
        except ReplayError as error:
            logger.debug("A step of %d sequences is repeated without its tape: %s", size, error)
            return None

    def clear(self) -> None:
        """Forget all recordings, and with them the addresses of weights and cache."""
        self._steps.clear()
        self._arena = Arena()

    def _record(self, step: _Step, static: Batch) -> Tensor:
        recorded = record(lambda: self._model(static, self._backend), self._arena)
        step.tape = recorded.tape
        step.attempts += 1
        size = len(static.seq_lens)
        if step.tape is None:
            logger.debug("A step of %d sequences is not replayed: %s", size, recorded.reason)
        else:
            logger.debug("A step of %d sequences is %d calls", size, len(step.tape.names))
        return recorded.result


class _Step:
    """The inputs of steps of one size, which stay where they are, and their tape."""

    def __init__(self, size: int) -> None:
        self.tape: Tape | None = None
        self.attempts = 0
        numbers = array("q", bytes(8 * 3 * size))
        tensors = torch.frombuffer(numbers, dtype=torch.int64).view(3, size).unbind()
        self._numbers = memoryview(numbers)
        self._seq_lens: list[int] = []
        self._block_tables: list[Sequence[int]] = []
        self._batch = Batch(
            input_ids=tensors[0],
            positions=tensors[1],
            slot_mapping=tensors[2],
            logits_indices=torch.arange(size),
            query_start=range(size + 1),
            seq_lens=self._seq_lens,
            block_tables=self._block_tables,
        )

    def fill(self, lists: BatchLists) -> Batch:
        """The step's own batch, with these numbers: until it is filled again."""
        self._numbers[:] = array("q", lists.input_ids + lists.positions + lists.slot_mapping)
        self._seq_lens[:] = lists.seq_lens
        self._block_tables[:] = lists.block_tables
        return self._batch
