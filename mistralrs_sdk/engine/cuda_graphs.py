"""Decode steps on a GPU, captured once for each bucket of sequences and then replayed."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionBackend, Batch, BatchLists
from mistralrs_sdk.engine.block_pool import NULL_BLOCK
from mistralrs_sdk.engine.transfers import CudaTransfers, Transfers

logger = logging.getLogger("mistralrs_sdk.engine")

EXACT_ROWS = 8
"""Up to so many sequences each number has a graph of its own."""
CAPTURE_SECONDS = 20.0
"""How long captures are started before there is work."""
CAPTURE_BYTES = 512 * 2**20
"""Device memory that the graphs of a model may take; past it none is captured."""

NOT_DECODE = "a prompt, or a decode of several tokens, is in the pass"
ADAPTED = "an adapter is in the pass"
FIRST = "the first of its size, captured for those after it"


class Graph(Protocol):
    """A captured step."""

    @property
    def output(self) -> Tensor:
        """What the step returned; each replay writes it anew."""
        ...

    @property
    def num_bytes(self) -> int:
        """Device memory it takes beside the graphs before it."""
        ...

    def replay(self) -> None: ...


class GraphFactory(Protocol):
    """Makes graphs: CUDA's, or a test's."""

    def warm_up(self, step: Callable[[], Tensor]) -> Tensor:
        """Run a step in the way that its capture needs to have seen."""
        ...

    def capture(self, step: Callable[[], Tensor]) -> Graph:
        """Record what the step launches; nothing of it is computed."""
        ...


@attrs.frozen(kw_only=True)
class GraphStats:
    """What became of the steps that were asked to be replayed."""

    replayed: int = 0
    eager: Mapping[str, int] = attrs.field(factory=dict)
    """Steps that ran without a graph, by reason."""
    captured: tuple[int, ...] = ()
    """The buckets that have a graph, ascending."""
    disabled: Mapping[int, str] = attrs.field(factory=dict)
    """The buckets that get none any more, and why."""
    num_bytes: int = 0
    """Device memory of all graphs."""

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.captured)) or "none"
        parts = [f"{self.replayed} steps replayed, captured for {sizes}"]
        parts += [f"{count} eager: {reason}" for reason, count in self.eager.items()]
        parts += [f"none for {bucket}: {reason}" for bucket, reason in self.disabled.items()]
        return "; ".join(parts)


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """The numbers of sequences that get graphs: 1 to 8, then doubled, up to `max_num_seqs`.

    At most 32 for up to 134 million sequences, so that all are kept: a graph serves every length.
    """
    sizes = list(range(1, min(EXACT_ROWS, max_num_seqs) + 1))
    while sizes[-1] < max_num_seqs:
        sizes.append(min(2 * sizes[-1], max_num_seqs))
    return tuple(sizes)


def cuda_graphs(
    model: Callable[[Batch, AttentionBackend], Tensor],
    backend: AttentionBackend,
    *,
    device: torch.device,
    max_num_seqs: int,
) -> GraphRunner | None:
    """The graphs of a model on a GPU, none captured yet; None where there can be none."""
    if device.type != "cuda" or not backend.supports_graphs:
        return None
    return GraphRunner(
        model,
        backend,
        device=device,
        max_num_seqs=max_num_seqs,
        graphs=CudaGraphs(device),
        transfers=CudaTransfers(device),
    )


class GraphRunner:
    """The graphs of one model, which must be dropped (`clear`) when its weights change.

    `backend` is one that supports graphs. A step of fewer sequences than its bucket is filled up
    with sequences of one token, all in the null block's first slot. None is captured once they take
    `max_bytes`.
    """

    def __init__(
        self,
        model: Callable[[Batch, AttentionBackend], Tensor],
        backend: AttentionBackend,
        *,
        device: torch.device,
        max_num_seqs: int,
        graphs: GraphFactory,
        transfers: Transfers,
        max_bytes: int = CAPTURE_BYTES,
    ) -> None:
        self.buckets = buckets(max_num_seqs)
        self.max_bytes = max_bytes
        self.together = False
        """Whether other processes compute each step with this one: all replay it then, or none.

        So what fails is raised, not left to an eager step, and nothing changes after `finish`.
        """
        self._model = model
        self._backend = backend
        self._device = device
        self._factory = graphs
        self._transfers = transfers
        self._captured: dict[int, _Captured] = {}
        self._disabled: dict[int, str] = {}
        self._replayed = 0
        self._eager: Counter[str] = Counter()

    @property
    def stats(self) -> GraphStats:
        """What was replayed, what was not and why."""
        return GraphStats(
            replayed=self._replayed,
            eager=dict(self._eager),
            captured=tuple(sorted(self._captured)),
            disabled=dict(self._disabled),
            num_bytes=self._num_bytes(),
        )

    def capture_ahead(self, *, seconds: float = CAPTURE_SECONDS) -> None:
        """Capture every bucket before there is work, smallest first, for `seconds` at most.

        The capture that runs when they are over is finished. What is left is captured by the first
        step that would be replayed.
        """
        end = time.monotonic() + seconds
        for bucket in self.buckets:
            if bucket in self._captured or bucket in self._disabled:
                continue
            if time.monotonic() >= end:
                logger.info("CUDA graphs: %g s are over before %d sequences", seconds, bucket)
                return
            self.capture(bucket)

    def capture(self, bucket: int) -> None:
        """Capture the steps of a bucket before there are any.

        Raises:
            Exception: it fails, and others compute `together` with this process.
        """
        self._attempt(bucket, lambda: self._meet(bucket, _NOBODY))

    def finish(self, reason: str) -> None:
        """Capture no other bucket, for this reason."""
        for bucket in self.buckets:
            if bucket not in self._captured:
                self._disabled.setdefault(bucket, reason)

    def run(
        self, lists: BatchLists, *, input_ids: Tensor | None = None, adapted: bool = False
    ) -> Tensor | None:
        """Plan and run a decode step; None if it has to run without a graph.

        `input_ids` are the tokens if only the device knows them. With `adapted` an adapter takes
        part. Returns the logits, as the model does; they are good until the next call. What a
        failed attempt has computed are keys and values that the same step computes again.

        Raises:
            Exception: it fails, and others compute `together` with this process.
        """
        size = len(lists.seq_lens)
        if adapted or not _is_decode(lists):
            self._eager[ADAPTED if adapted else NOT_DECODE] += 1
            return None
        bucket = next((bucket for bucket in self.buckets if bucket >= size), None)
        assert bucket is not None, f"{size} sequences run, and max_num_seqs is {self.buckets[-1]}"
        logits = None
        if bucket not in self._disabled:
            captured = self._captured.get(bucket)
            if captured is None:
                logits = self._attempt(bucket, lambda: self._meet(bucket, lists, input_ids))
                if logits is not None:
                    self._eager[FIRST] += 1
            else:
                logits = self._attempt(bucket, lambda: self._replay(captured, lists, input_ids))
                self._replayed += logits is not None
        if logits is None:
            self._eager[self._disabled[bucket]] += 1
            return None
        return logits[:size]

    def clear(self) -> None:
        """Forget all graphs, and with them the addresses of weights and cache."""
        self._captured.clear()
        self._disabled.clear()

    def _meet(self, bucket: int, lists: BatchLists, input_ids: Tensor | None = None) -> Tensor:
        """Run the first step of a bucket, and capture it for those that follow."""
        taken = self._num_bytes()
        if taken >= self.max_bytes:
            raise MemoryError(full(taken, self.max_bytes))
        inputs = _Inputs(bucket, self._device)
        batch = inputs.fill(lists, input_ids, transfers=self._transfers)
        self._backend.plan(batch, graph_size=bucket)

        def step() -> Tensor:
            return self._model(batch, self._backend)

        logits = self._factory.warm_up(step)
        try:
            self._captured[bucket] = _Captured(inputs, self._factory.capture(step))
        except Exception as error:  # the step itself is done
            if self.together:
                raise
            self._disable(bucket, error)
        return logits

    def _replay(self, captured: _Captured, lists: BatchLists, input_ids: Tensor | None) -> Tensor:
        bucket = captured.inputs.bucket
        batch = captured.inputs.fill(lists, input_ids, transfers=self._transfers)
        self._backend.plan(batch, graph_size=bucket)
        captured.graph.replay()
        return captured.graph.output

    @torch.inference_mode()
    def _attempt(self, bucket: int, compute: Callable[[], Tensor]) -> Tensor | None:
        """What `compute` returns; None, and the bucket is off, if it fails."""
        try:
            return compute()
        except Exception as error:  # whatever it is, the eager step meets it again or does without
            if self.together:
                raise
            self._captured.pop(bucket, None)
            self._disable(bucket, error)
            return None

    def _disable(self, bucket: int, error: Exception) -> None:
        self._disabled[bucket] = f"{type(error).__name__}: {error}"
        logger.warning(
            "CUDA graphs: none any more for %d sequences, which run without (%s)",
            bucket,
            self._disabled[bucket],
        )

    def _num_bytes(self) -> int:
        return sum(captured.graph.num_bytes for captured in self._captured.values())


def full(taken: int, most: int) -> str:
    """Why no more is captured, with both numbers of bytes."""
    return f"the graphs take {taken / 2**20:.0f} MiB of the {most / 2**20:.0f} that they may"


class CudaGraphs:
    """CUDA's own graphs, all in one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], Tensor]) -> Tensor:
        # On the stream of the captures: what libraries set up for a stream is there by then.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = step()
        # Its memory is that stream's, which takes it up again only after waiting as above.
        current.wait_stream(self._stream)
        return result

    def capture(self, step: Callable[[], Tensor]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with capturing, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            torch.cuda.empty_cache()  # as capturing does first: it is not to count as given back
            before = torch.cuda.memory_reserved()
            try:
                # "thread_local": what other threads do, another model's for one, is no error.
                with torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=self._stream,
                    capture_error_mode="thread_local",
                ):
                    output = step()
            except Exception:
                # One that cannot be ended leaves its stream current, and its pool taken.
                torch.cuda.set_stream(current)
                self._pool = torch.cuda.graph_pool_handle()
                raise
            taken = max(0, torch.cuda.memory_reserved() - before)
        return _CudaGraph(graph, output, taken)


capturing = threading.Lock()
"""Held while a graph is captured: torch cannot take two at once, nor give memory back meanwhile.

Each model has a thread."""


@attrs.frozen(eq=False)
class _CudaGraph:
    _graph: torch.cuda.CUDAGraph
    output: Tensor
    num_bytes: int

    def replay(self) -> None:
        self._graph.replay()


@attrs.frozen(eq=False)
class _Captured:
    inputs: _Inputs
    graph: Graph


class _Inputs:
    """The inputs of the steps of one bucket, which stay where they are."""

    def __init__(self, bucket: int, device: torch.device) -> None:
        self.bucket = bucket
        self._numbers = torch.zeros(3, bucket, dtype=torch.int64, device=device)
        input_ids, positions, slots = self._numbers.unbind()
        self._seq_lens: list[int] = []
        self._block_tables: list[Sequence[int]] = []
        self._batch = Batch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slots,
            logits_indices=torch.arange(bucket, device=device),
            query_start=range(bucket + 1),
            seq_lens=self._seq_lens,
            block_tables=self._block_tables,
        )

    def fill(self, lists: BatchLists, input_ids: Tensor | None, *, transfers: Transfers) -> Batch:
        """The bucket's batch, with these sequences and padding: until it is filled again."""
        size = len(lists.seq_lens)
        missing = self.bucket - size
        zeros = [0] * missing  # the token, the position, and the null block's first slot
        rows = (lists.input_ids, lists.positions, lists.slot_mapping)
        transfers.fill(self._numbers, torch.tensor([row + zeros for row in rows]))
        if input_ids is not None:
            self._batch.input_ids[:size].copy_(input_ids)
        self._seq_lens[:] = lists.seq_lens + [1] * missing
        self._block_tables[:] = lists.block_tables + [[NULL_BLOCK]] * missing
        return self._batch


_NOBODY = BatchLists(
    input_ids=[],
    positions=[],
    slot_mapping=[],
    logits_indices=[],
    query_start=[0],
    seq_lens=[],
    block_tables=[],
)


def _is_decode(lists: BatchLists) -> bool:
    """Whether every sequence computes one token and wants its logits."""
    return len(lists.seq_lens) == len(lists.input_ids) == len(lists.logits_indices)
