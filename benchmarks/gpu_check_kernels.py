"""FlashInfer's kernels beside torch's attention in float32, shape by shape."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
from gpu_check_report import Book, Check, LeftOutError
from torch import Tensor

from mistralrs_sdk.attention import flashinfer
from mistralrs_sdk.attention.backend import AttentionSpec, Batch, BatchLists
from mistralrs_sdk.attention.flashinfer import FlashInferBackend
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.sdpa import SdpaBackend
from mistralrs_sdk.engine.cuda_graphs import GraphFactory

BLOCK = 32
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest difference, as a part of 1 + the value's size: what rounding the result leaves room for.

Values are averages of normal numbers, so most are below 1."""
COMPILE_SECONDS = 60.0
"""What compiling a shape's kernels may take."""


@attrs.frozen(kw_only=True)
class Case:
    """A shape of attention and the types it is computed in."""

    name: str
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=self.window,
            softcap=self.softcap,
        )


CASES = (
    Case(name="bf16, 4 heads a key"),
    Case(name="bf16, 2 heads a key", heads=16),
    Case(name="bf16, 1 head a key", heads=8),
    Case(name="bf16, 7 heads a key", heads=28, kv_heads=4),
)
"""One module of FlashInfer's for decodes and one for prompts: those of the models measured."""
MORE_CASES = (
    Case(name="bf16, window", window=100),
    Case(name="bf16, softcap", softcap=10.0),
    Case(name="bf16, f8e4m3 cache", kv_dtype=torch.float8_e4m3fn),
    Case(name="f16, heads of 64", heads=14, kv_heads=2, head_dim=64, dtype=torch.float16),
    Case(name="bf16, heads of 256", heads=8, kv_heads=4, head_dim=256),
)
"""Each compiles modules of its own."""


def check_kernels(
    book: Book,
    cases: Sequence[Case],
    *,
    device: torch.device,
    graphs: Callable[[], GraphFactory],
    tiny: bool,
) -> None:
    """Compare every case that there is time for."""
    for case in cases[:2] if tiny else cases:
        with book.check(case.name) as check:
            if (missing := flashinfer.flashinfer_missing()) is not None:
                raise LeftOutError(missing)
            if cases is MORE_CASES:
                book.require_time(0 if tiny else COMPILE_SECONDS)
            compare(check, case, device=device, graphs=graphs(), longest=90 if tiny else 1500)


@torch.inference_mode()
def compare(
    check: Check,
    case: Case,
    *,
    device: torch.device,
    graphs: GraphFactory,
    longest: int,
) -> None:
    """Prompts, chunks behind what is cached, mixed batches, decodes, and a graph of decodes."""
    generator = torch.Generator(device).manual_seed(0)
    rows = make_rows(longest)
    num_blocks = 1 + sum(len(row.blocks) for row in rows)
    pair = [
        PagedKVCache([case.spec], num_blocks=num_blocks, block_size=BLOCK, dtype=d, device=device)
        for d in (case.kv_dtype or case.dtype, torch.float32)
    ]
    ours = FlashInferBackend(
        pair[0],
        [case.spec],
        dtype=case.dtype,
        max_num_seqs=len(rows) + 2,
        max_model_len=longest,
    )
    exact = SdpaBackend(pair[1])

    def attend(batch: Batch, run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
        q, k, v = _qkv(case, len(batch.input_ids), generator)
        found = run(q, k, v).float()
        exact.plan(batch)
        k, v = (_as_stored(case, x) for x in (k, v))
        wanted = exact.run(case.spec, 0, q.float(), k, v)
        error = ((found - wanted).abs() / (1 + wanted.abs())).max()
        return float(error.nan_to_num(nan=float("inf")))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ours.run(case.spec, 0, q, k, v)

    errors: dict[str, float] = {}
    for what, counts in passes(rows):
        batch = lay_out(rows, counts).batch(device)
        ours.plan(batch)
        errors[what] = max(errors.get(what, 0.0), attend(batch, run))
    graph = GraphOfDecodes(ours, case, size=len(rows) + 2, device=device, graphs=graphs)
    for _ in range(3):  # captured at one length, replayed at the next ones
        batch = lay_out(rows, [1] * len(rows)).batch(device)
        errors["graph"] = max(errors.get("graph", 0.0), attend(batch, graph.prepare(rows, batch)))
    text = ", ".join(f"{what} {error:.1e}" for what, error in errors.items())
    tolerance = TOLERANCE[case.dtype]
    check.expect(max(errors.values()) < tolerance, f"errors below {tolerance:g}: {text}", **errors)


@attrs.define
class Row:
    """A sequence: the blocks it has, and how much of it is computed."""

    blocks: list[int]
    length: int
    computed: int = 0


def make_rows(longest: int) -> list[Row]:
    """Sequences of several lengths, their blocks apart and out of order; room for decodes."""
    lengths = [longest - 20, longest // 2, BLOCK, BLOCK + 1, 40]
    counts = [-(-(length + 20) // BLOCK) for length in lengths]
    numbers = list(range(1, 1 + sum(counts)))
    random.Random(0).shuffle(numbers)
    ends = list(itertools.accumulate(counts, initial=0))
    spans = itertools.pairwise(ends)
    return [Row(numbers[a:b], length) for (a, b), length in zip(spans, lengths, strict=True)]


def passes(rows: Sequence[Row]) -> Iterator[tuple[str, list[int]]]:
    """What is computed of each row in each pass, until all prompts are done, then decodes."""
    yield "prompts", [row.length // 3 for row in rows]
    yield "chunks", [row.length // 3 for row in rows]
    yield "mixed", [1, *(row.length - row.computed for row in rows[1:])]
    yield "mixed", [rows[0].length - rows[0].computed, *([1] * (len(rows) - 1))]
    for _ in range(3):
        yield "decodes", [1] * len(rows)


def lay_out(rows: Sequence[Row], counts: Sequence[int]) -> BatchLists:
    """The next `counts` tokens of the rows, which count as computed from now on."""
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for row, count in zip(rows, counts, strict=True):
        span = range(row.computed, row.computed + count)
        positions += span
        slots += [row.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in span]
        starts.append(len(positions))
        row.computed += count
    return BatchLists(
        input_ids=[0] * len(positions),
        positions=positions,
        slot_mapping=slots,
        logits_indices=[start - 1 for start in starts[1:]],
        query_start=starts,
        seq_lens=[row.computed for row in rows],
        block_tables=[row.blocks[: -(-row.computed // BLOCK)] for row in rows],
    )


class GraphOfDecodes:
    """One layer's decodes as a graph, filled up with rows in the null block."""

    def __init__(
        self,
        backend: FlashInferBackend,
        case: Case,
        *,
        size: int,
        device: torch.device,
        graphs: GraphFactory,
    ) -> None:
        self._backend, self._case, self._size, self._graphs = backend, case, size, graphs
        heads = (case.heads, case.kv_heads, case.kv_heads)
        self._qkv = [
            torch.zeros(size, n, case.head_dim, dtype=case.dtype, device=device) for n in heads
        ]
        self._slots = torch.zeros(size, dtype=torch.int64, device=device)
        self._graph = None

    def prepare(
        self, rows: Sequence[Row], batch: Batch
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Plan for the batch; returns what fills in its rows and replays."""
        count, missing = len(rows), self._size - len(rows)
        self._slots.zero_()[:count] = batch.slot_mapping
        padded = attrs.evolve(
            batch,
            input_ids=self._slots,
            positions=self._slots,
            slot_mapping=self._slots,
            logits_indices=self._slots,
            query_start=range(self._size + 1),
            seq_lens=[*batch.seq_lens, *([1] * missing)],
            block_tables=[*batch.block_tables, *([[0]] * missing)],
        )
        self._backend.plan(padded, graph_size=self._size)

        def step() -> Tensor:
            return self._backend.run(self._case.spec, 0, *self._qkv)

        def replay(*qkv: Tensor) -> Tensor:
            for static, given in zip(self._qkv, qkv, strict=True):
                static[:count] = given
            if self._graph is None:
                self._graphs.warm_up(step)
                self._graph = self._graphs.capture(step)
            self._graph.replay()
            return self._graph.output[:count]

        return replay


def _qkv(case: Case, tokens: int, generator: torch.Generator) -> list[Tensor]:
    shape = (tokens, case.heads + 2 * case.kv_heads, case.head_dim)
    made = torch.randn(shape, generator=generator, device=generator.device).to(case.dtype)
    return list(made.split((case.heads, case.kv_heads, case.kv_heads), 1))


def _as_stored(case: Case, x: Tensor) -> Tensor:
    """Keys or values with the rounding that the cache gives them."""
    return x.float() if case.kv_dtype is None else x.to(case.kv_dtype).float()
