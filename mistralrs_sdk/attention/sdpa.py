"""Attention through torch's scaled_dot_product_attention: any device, any float type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from mistralrs_sdk.attention.backend import AttentionSpec, Batch, Rotation
from mistralrs_sdk.attention.kv_cache import PagedKVCache

TILE_ROWS = 512
"""Query rows of one sequence attended to at once: bounds the score matrix of a long prompt."""


class SdpaBackend:
    """Attends to a `PagedKVCache`; prefill rows and decode rows may share a batch."""

    supports_graphs: ClassVar[bool] = False

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache

    def plan(self, batch: Batch, *, graph_size: int | None = None) -> None:
        refuse_graph(self, graph_size)
        self._slots = batch.slot_mapping
        self._plan = _Plan(
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            tables=batch.block_tables,
            block_size=self._cache.block_size,
            device=batch.slot_mapping.device,
        )

    def run(
        self,
        spec: AttentionSpec,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotation: Rotation | None = None,
    ) -> Tensor:
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        self._cache.store(layer, self._slots, k, v)
        keys, values = self._cache.flat(layer)
        return self._plan.attend(spec, q, keys, values)


class UncachedSdpaBackend:
    """Keeps nothing: each sequence's rows are all its tokens, and attend to each other."""

    supports_graphs: ClassVar[bool] = False

    def plan(self, batch: Batch, *, graph_size: int | None = None) -> None:
        refuse_graph(self, graph_size)
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
            device=batch.slot_mapping.device,
        )

    def run(
        self,
        spec: AttentionSpec,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotation: Rotation | None = None,
    ) -> Tensor:
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        return self._plan.attend(spec, q, k, v)


def refuse_graph(backend: object, graph_size: int | None) -> None:
    """Raise ValueError if a CUDA graph is asked for."""
    if graph_size is not None:
        raise ValueError(
            f"{type(backend).__name__} has no CUDA graphs (graph_size {graph_size}): "
            "plan without graph_size"
        )


@attrs.frozen
class Tile:
    """Rows [low, high) of a prompt and the keys [first, end) that some of them see."""

    low: int
    high: int
    first: int
    end: int
    causal: bool
    """The mask is the plain square causal one, which kernels know by themselves."""


def prompt_tiles(rows: int, length: int, window: int | None) -> list[Tile]:
    """Cut the last `rows` of `length` tokens into tiles of at most TILE_ROWS rows."""
    tiles = []
    for low in range(0, rows, TILE_ROWS):
        high = min(low + TILE_ROWS, rows)
        end = length - (rows - high)
        first = 0 if window is None else max(0, end - (high - low) - window + 1)
        causal = high - low == end - first and (window is None or high - low <= window)
        tiles.append(Tile(low, high, first, end, causal))
    return tiles


def tile_masks(tiles: Sequence[Tile], window: int | None, device: torch.device) -> list[Tensor]:
    """For each tile [rows, keys], True where a row sees a key; views of one tensor."""
    if not tiles:
        return []
    rows = max(tile.high - tile.low for tile in tiles)
    keys = max(tile.end - tile.first for tile in tiles)
    row = torch.arange(keys - rows, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    mask = key <= row
    if window is not None:
        mask &= key > row - window
    # The last row of every tile stands on its last key: a lower right corner serves any size.
    return [mask[rows - t.high + t.low :, keys - t.end + t.first :] for t in tiles]


def attend_decodes(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """Attention of one query row per sequence, in one call of the kernel.

    q is [sequences, heads, head_dim], k and v are [sequences, keys, kv_heads, head_dim]; the result
    has the shape of q. The mask is [sequences, 1, 1, keys].
    """
    # The heads of a group stand where query rows would.
    q = q.unflatten(1, (spec.num_kv_heads, -1))
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    return _softmax_attention(spec, q, k, v, mask=mask, causal=False).flatten(1, 2)


def attend_prompts(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool
) -> Tensor:
    """Attention of as many query rows of every sequence, in one call of the kernel.

    q is [sequences, rows, heads, head_dim], k and v are [sequences, keys, kv_heads, head_dim]; the
    result has the shape of q. The mask is [rows, keys]; with `causal` kernels do without it.
    """
    sequences, group = len(q), spec.num_heads // spec.num_kv_heads
    # KV heads stand where the batch would, so that a group shares its keys without a copy.
    q = q.unflatten(2, (spec.num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    k, v = (x.transpose(1, 2).flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))
    out = _softmax_attention(spec, q, k, v, mask=mask, causal=causal)
    return out.unflatten(0, (sequences, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _softmax_attention(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool
) -> Tensor:
    k, v = k.to(q.dtype), v.to(q.dtype)
    if spec.softcap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None if causal else mask, is_causal=causal, scale=spec.scale
        )
    scores = torch.matmul(q, k.transpose(-1, -2)).float().mul_(spec.scale / spec.softcap)
    scores = scores.tanh_().mul_(spec.softcap)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    return torch.matmul(scores.softmax(-1).to(v.dtype), v)


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
        places: list[tuple[slice, slice | Tensor]] = []
        tiles: list[Tile] = []
        for i, length in enumerate(self.seq_lens):
            if self._rows(i) <= 1:
                continue
            start = self.query_start[i]
            new = prompt_tiles(self._rows(i), length, window)
            span = self._span(i, new[0].first)
            for tile in new:
                keys = _sub(span, tile.first - new[0].first, tile.end - new[0].first)
                places.append((slice(start + tile.low, start + tile.high), keys))
            tiles += new
        masks = tile_masks(tiles, window, self.device)
        return [
            _Task(rows=rows, slots=slots, decode=False, mask=mask, causal=tile.causal)
            for (rows, slots), tile, mask in zip(places, tiles, masks, strict=True)
        ]

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
    q, k, v = q[task.rows], _take(keys, task.slots), _take(values, task.slots)
    if not task.decode:
        return attend_prompts(
            spec, q[None], k[None], v[None], mask=task.mask, causal=task.causal
        ).squeeze(0)
    if k.ndim == 3:
        k, v = k[None], v[None]
    return attend_decodes(spec, q, k, v, mask=task.mask)


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
