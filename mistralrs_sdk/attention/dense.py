"""Attention over dense caches: sequences of one length are one call of the kernel."""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionSpec, Batch, Rotation
from mistralrs_sdk.attention.kv_cache import DenseBatch, DenseKVCache
from mistralrs_sdk.attention.sdpa import (
    Tile,
    attend_decodes,
    attend_prompts,
    prompt_tiles,
    refuse_graph,
    tile_masks,
)


class DenseSdpaBackend:
    """Attends to a `DenseKVCache`, through torch's scaled_dot_product_attention on any device.

    A sequence's block table is its id alone. The batch falls into parts of sequences with as many
    new tokens and the same length; each is one call per layer, whatever else shares the batch. A
    part's caches are brought together in `plan`; a step of the same sequences moves nothing.
    """

    supports_graphs: ClassVar[bool] = False

    def __init__(self, cache: DenseKVCache) -> None:
        self._cache = cache

    def plan(self, batch: Batch, *, graph_size: int | None = None) -> None:
        refuse_graph(self, graph_size)
        alike: dict[tuple[int, int], list[int]] = {}
        for i, length in enumerate(batch.seq_lens):
            alike.setdefault((batch.query_start[i + 1] - batch.query_start[i], length), []).append(
                i
            )
        self._parts = [
            self._part(batch, members, rows=rows, length=length)
            for (rows, length), members in alike.items()
        ]

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
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for part in self._parts:
            out[part.where] = part.attend(spec, layer, q, k, v)
        return out

    def _part(self, batch: Batch, members: list[int], *, rows: int, length: int) -> _Part:
        start_of = {batch.block_tables[i][0]: batch.query_start[i] for i in members}
        caches = self._cache.gather(list(start_of), computed=length - rows, length=length)
        starts = [start_of[sequence_id] for sequence_id in caches.members]
        where: slice | Tensor = slice(starts[0], starts[0] + rows * len(starts))
        if starts != list(range(where.start, where.stop, rows)):
            first = torch.tensor(starts, device=batch.input_ids.device)
            where = (first[:, None] + torch.arange(rows, device=first.device)).flatten()
        return _Part(where, caches, rows, length)


@attrs.define(eq=False)
class _Part:
    """Sequences with `rows` new tokens each and `length` tokens after this step."""

    where: slice | Tensor
    """Their rows in the batch, in the order of the caches' members."""
    caches: DenseBatch
    rows: int
    length: int
    tiles: dict[int | None, list[tuple[Tile, Tensor]]] = attrs.field(factory=dict, init=False)
    """By window: what a prompt is cut into, and the masks."""

    def attend(self, spec: AttentionSpec, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the part's keys and values, then attend; [rows of the part, heads, head_dim]."""
        shape = (len(self.caches.members), self.rows)
        keys, values = (x[layer][: shape[0]] for x in (self.caches.k, self.caches.v))
        for store, new in ((keys, k), (values, v)):
            store[:, self.length - self.rows : self.length] = new[self.where].unflatten(0, shape)
        q = q[self.where]
        if self.rows == 1:
            first = 0 if spec.window is None else max(0, self.length - spec.window)
            seen = slice(first, self.length)
            return attend_decodes(spec, q, keys[:, seen], values[:, seen])
        q = q.unflatten(0, shape)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for tile, mask in self._tiles(spec.window, q.device):
            rows, seen = slice(tile.low, tile.high), slice(tile.first, tile.end)
            out[:, rows] = attend_prompts(
                spec, q[:, rows], keys[:, seen], values[:, seen], mask=mask, causal=tile.causal
            )
        return out.flatten(0, 1)

    def _tiles(self, window: int | None, device: torch.device) -> list[tuple[Tile, Tensor]]:
        known = self.tiles.get(window)
        if known is None:
            tiles = prompt_tiles(self.rows, self.length, window)
            masks = tile_masks(tiles, window, device)
            known = self.tiles[window] = list(zip(tiles, masks, strict=True))
        return known
