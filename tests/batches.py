"""Batches and a small generation loop, for tests that drive a model without the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from mistralrs_sdk.attention.backend import AttentionBackend, Batch
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.sdpa import SdpaBackend, UncachedSdpaBackend


@attrs.define
class Row:
    """One sequence as a test sees it: its ids, its blocks, how many ids are computed."""

    ids: list[int]
    blocks: list[int]
    computed: int = 0
    logits: list[torch.Tensor] = attrs.field(factory=list)
    """After the prompt and after every new id."""


def make_batch(parts: Sequence[tuple[Row, int]], block_size: int) -> Batch:
    """A batch of the next `count` ids of each row, which asks for the last logits of each."""
    ids, positions, slots, starts = [], [], [], [0]
    for row, count in parts:
        span = range(row.computed, row.computed + count)
        ids += [row.ids[p] for p in span]
        positions += span
        slots += [row.blocks[p // block_size] * block_size + p % block_size for p in span]
        starts.append(len(ids))
    lengths = [row.computed + count for row, count in parts]
    return Batch(
        input_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        logits_indices=torch.tensor(starts[1:]) - 1,
        query_start=starts,
        seq_lens=lengths,
        block_tables=[
            row.blocks[: -(-length // block_size)]
            for (row, _), length in zip(parts, lengths, strict=True)
        ],
    )


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    n: int,
    *,
    block_size: int = 8,
    chunk: int = 10_000,
    apart: int = 0,
) -> list[Row]:
    """Greedy ids through the paged cache; prompt i arrives `apart * i` steps after the first.

    Prompts are fed `chunk` ids at a time, in one batch with whatever else runs. The blocks of a
    sequence lie scattered, and hold NaN until they are written.
    """
    each = -(-(max(map(len, prompts)) + n) // block_size)
    numbers = list(range(1, 1 + each * len(prompts)))
    random.Random(0).shuffle(numbers)
    cache = PagedKVCache(
        model.specs,
        num_blocks=len(numbers) + 1,
        block_size=block_size,
        dtype=next(model.parameters()).dtype,
        device="cpu",
    )
    for store in (*cache.k, *cache.v):
        store.fill_(float("nan"))
    rows = [Row(list(p), numbers[i * each : (i + 1) * each]) for i, p in enumerate(prompts)]
    arrivals = [apart * i for i in range(len(rows))]
    return _run(
        model,
        SdpaBackend(cache),
        list(zip(rows, arrivals, strict=True)),
        n,
        block_size=block_size,
        take=lambda row: min(chunk, len(row.ids) - row.computed),
    )


def generate_uncached(model: Any, prompts: Sequence[Sequence[int]], n: int) -> list[Row]:
    """Greedy ids with every sequence computed whole at each step."""
    rows = [Row(list(p), list(range(1000))) for p in prompts]

    def take(row: Row) -> int:
        row.computed = 0
        return len(row.ids)

    backend = UncachedSdpaBackend()
    return _run(model, backend, [(row, 0) for row in rows], n, block_size=1, take=take)


def _run(
    model: Any,
    backend: AttentionBackend,
    arrivals: list[tuple[Row, int]],
    n: int,
    *,
    block_size: int,
    take: Callable[[Row], int],
) -> list[Row]:
    step = 0
    while any(len(row.logits) < n for row, _ in arrivals):
        parts = [(r, take(r)) for r, at in arrivals if at <= step and len(r.logits) < n]
        batch = make_batch(parts, block_size)
        backend.plan(batch)
        logits = model(batch, backend)
        for (row, count), scores in zip(parts, logits, strict=True):
            row.computed += count
            if row.computed == len(row.ids):
                row.logits.append(scores)
                row.ids.append(int(scores.argmax()))
        step += 1
    return [row for row, _ in arrivals]
