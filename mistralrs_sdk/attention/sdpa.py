"""Attention through torch's scaled_dot_product_attention: any device, any float type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from mistralrs_sdk.attention.backend import AttentionSpec, Batch
from mistralrs_sdk.attention.kv_cache import PagedKVCache

TILE_ROWS = 512
"""Query rows of one sequence attended to at once: bounds the score matrix of a long prompt."""


class SdpaBackend:
    """Attends to a `PagedKVCache`; prefill rows and decode rows may share a batch."""

    supports_cuda_graph: ClassVar[bool] = False

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache

    def plan(self, batch: Batch, *, graph_size: int | None = None) -> None:
        _refuse_graph(self, graph_size)
        self._slots = batch.slot_mapping
        self._plan = _Plan(
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            tables=batch.block_tables,
            block_size=self._cache.block_size,
            device=batch.input_ids.device,
        )

    def run(self, spec: AttentionSpec, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._cache.store(layer, self._slots, k, v)
        keys, values = self._cache.flat(layer)
        return self._plan.attend(spec, q, keys, values)


class UncachedSdpaBackend:
    """Keeps nothing: each sequence's rows are all its tokens, and attend to each other."""

    supports_cuda_graph: ClassVar[bool] = False

    def plan(self, batch: Batch, *, graph_size: int | None = None) -> None:
        _refuse_graph(self, graph_size)
        starts = batch.query_start
        for i, length in enumerate(batch.seq_lens):
            if starts[i + 1] - starts[i] != length:
                raise ValueError(
                    f"sequence {i} of the batch has {starts[i + 1] - starts[i]} rows but {length} "
                    "tokens: without a KV cache every forward needs all tokens of a sequence"
                )
        self._plan = _Plan(
            query_start=starts,
            seq_lens=batch.seq_lens,
            # The rows of the batch themselves, seen as a cache with blocks of one token.
            tables=[range(starts[i], starts[i + 1]) for i in range(len(batch.seq_lens))],
            block_size=1,
            device=batch.input_ids.device,
        )

    def run(self, spec: AttentionSpec, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._plan.attend(spec, q, k, v)


def _refuse_graph(backend: object, graph_size: int | None) -> None:
    if graph_size is not None:
        raise ValueError(
            f"{type(backend).__name__} has no CUDA graphs (graph_size {graph_size}): "
            "plan without graph_size"
        )


@attrs.frozen(eq=False)
class _Task:
    """One call of the attention kernel.

    Decode: slots are [sequences, keys], one query row each. Prefill: slots are [keys], the query
    rows are the last tokens of one sequence. Slots name only tokens of the sequence itself, so
    whatever else a block holds is never read.
    """

    rows: slice | Tensor
    slots: slice | Tensor
    decode: bool
    mask: Tensor | None = None
    causal: bool = False
    """The mask is the plain square causal one, which kernels know by themselves."""


@attrs.define(eq=False)
class _Plan:
    """What a batch's attention calls are, worked out once per window."""

    query_start: Sequence[int]
    seq_lens: Sequence[int]
    tables: Sequence[Sequence[int]]
    block_size: int
    device: torch.device
    tasks: dict[int | None, list[_Task]] = attrs.field(factory=dict, init=False)

    def attend(self, spec: AttentionSpec, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of all rows; keys and values are [slots, kv_heads, head_dim]."""
        tasks = self.tasks.get(spec.window)
        if tasks is None:
            tasks = self.tasks[spec.window] = self._decode(spec.window) + self._prefill(spec.window)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for task in tasks:
            out[task.rows] = _run(spec, task, q, keys, values)
        return out

    def _rows(self, i: int) -> int:
        return self.query_start[i + 1] - self.query_start[i]

    def _decode(self, window: int | None) -> list[_Task]:
        groups: dict[int, list[tuple[int, int]]] = {}
        for i, length in enumerate(self.seq_lens):
            if self._rows(i) == 1:
                first = 0 if window is None else max(0, length - window)
                # Sequences of one bit length differ by less than 2x: so does the padding.
                groups.setdefault((length - first).bit_length(), []).append((i, first))
        return [self._decode_group(members) for members in groups.values()]

    def _decode_group(self, members: list[tuple[int, int]]) -> _Task:
        rows = _as_slice([self.query_start[i] for i, _ in members])
        if len(members) == 1:
            return _Task(
                rows=_tensor(rows, self.device), slots=self._span(*members[0]), decode=True
            )
        counts = [self.seq_lens[i] - first for i, first in members]
        slots = self._padded_spans(members, counts)
        mask = None
        if min(counts) != max(counts):
            mask = torch.arange(max(counts), device=self.device) < self._column(counts)
            mask = mask[:, None, None]
        return _Task(rows=_tensor(rows, self.device), slots=slots, decode=True, mask=mask)

    def _prefill(self, window: int | None) -> list[_Task]:
        tiles: list[tuple[slice, slice | Tensor, int, int]] = []
        for i, length in enumerate(self.seq_lens):
            if self._rows(i) <= 1:
                continue
            start, stop = self.query_start[i], self.query_start[i + 1]
            begin = 0 if window is None else max(0, length - (stop - start) - window + 1)
            span = self._span(i, begin)
            for low in range(start, stop, TILE_ROWS):
                high = min(low + TILE_ROWS, stop)
                end = length - (stop - high)
                first = 0 if window is None else max(0, end - (high - low) - window + 1)
                keys = _sub(span, first - begin, end - begin)
                tiles.append((slice(low, high), keys, high - low, end - first))
        if not tiles:
            return []
        mask = self._mask(window, rows=max(t[2] for t in tiles), keys=max(t[3] for t in tiles))
        return [
            _Task(
                rows=where,
                slots=slots,
                decode=False,
                mask=mask[mask.shape[0] - rows :, mask.shape[1] - keys :],
                causal=rows == keys and (window is None or rows <= window),
            )
            for where, slots, rows, keys in tiles
        ]

    def _mask(self, window: int | None, *, rows: int, keys: int) -> Tensor:
        """[rows, keys], True where a row sees a key; the last row stands on the last key.

        Aligned at its lower right corner, so that corner of any size serves a smaller tile.
        """
        row = torch.arange(keys - rows, keys, device=self.device)[:, None]
        key = torch.arange(keys, device=self.device)
        mask = key <= row
        return mask if window is None else mask & (key > row - window)

    def _blocks(self, i: int, first: int) -> list[int]:
        last = (self.seq_lens[i] - 1) // self.block_size
        return list(self.tables[i][first // self.block_size : last + 1])

    def _span(self, i: int, first: int) -> slice | Tensor:
        """Slots of sequence i from position `first` on; a slice, free to read, if they adjoin."""
        blocks, offset = self._blocks(i, first), first % self.block_size
        count = self.seq_lens[i] - first
        adjoining = _as_slice(blocks)
        if isinstance(adjoining, slice):
            start = blocks[0] * self.block_size + offset
            return slice(start, start + count)
        table = torch.tensor(blocks, device=self.device)
        offsets = torch.arange(self.block_size, device=self.device)
        return (table[:, None] * self.block_size + offsets).flatten()[offset : offset + count]

    def _padded_spans(self, members: list[tuple[int, int]], counts: list[int]) -> Tensor:
        """[sequences, most keys]; short rows repeat the sequence's own newest slot."""
        tables = [self._blocks(i, first) for i, first in members]
        width = max(map(len, tables))
        table = torch.tensor([t + [0] * (width - len(t)) for t in tables], device=self.device)
        place = torch.arange(max(counts), device=self.device).minimum(self._column(counts) - 1)
        place = place + self._column([first % self.block_size for _, first in members])
        return table.gather(1, place // self.block_size) * self.block_size + place % self.block_size

    def _column(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)[:, None]


def _run(spec: AttentionSpec, task: _Task, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    heads = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads)
    q, k, v = q[task.rows].unflatten(1, heads), _take(keys, task.slots), _take(values, task.slots)
    if task.decode:
        if k.ndim == 3:
            k, v = k[None], v[None]
        # One query row a sequence: the heads of a group stand where query rows would.
        out = _softmax_attention(spec, q, k.transpose(1, 2), v.transpose(1, 2), task)
        return out.flatten(1, 2)
    # KV heads stand where the batch would, so that a group shares its keys without a copy.
    k = k.transpose(0, 1)[:, None].expand(-1, heads[1], -1, -1)
    v = v.transpose(0, 1)[:, None].expand(-1, heads[1], -1, -1)
    out = _softmax_attention(spec, q.permute(1, 2, 0, 3), k, v, task)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _softmax_attention(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, task: _Task) -> Tensor:
    k, v = k.to(q.dtype), v.to(q.dtype)
    if spec.softcap is None:
        mask = None if task.causal else task.mask
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=task.causal, scale=spec.scale
        )
    scores = torch.matmul(q, k.transpose(-1, -2)).float().mul_(spec.scale / spec.softcap)
    scores = scores.tanh_().mul_(spec.softcap)
    if task.mask is not None:
        scores.masked_fill_(~task.mask, float("-inf"))
    return torch.matmul(scores.softmax(-1).to(v.dtype), v)


def _take(store: Tensor, slots: slice | Tensor) -> Tensor:
    if isinstance(slots, slice):
        return store[slots]
    # index_select copies whole rows; indexing with a tensor is several times slower on the CPU.
    rows = store.flatten(1).index_select(0, slots.flatten())
    return rows.view(*slots.shape, *store.shape[1:])


def _sub(span: slice | Tensor, start: int, stop: int) -> slice | Tensor:
    if isinstance(span, slice):
        return slice(span.start + start, span.start + stop)
    return span[start:stop]


def _as_slice(numbers: list[int]) -> slice | list[int]:
    low, high = numbers[0], numbers[0] + len(numbers)
    return slice(low, high) if numbers == list(range(low, high)) else numbers


def _tensor(rows: slice | list[int], device: torch.device) -> slice | Tensor:
    return rows if isinstance(rows, slice) else torch.tensor(rows, device=device)
