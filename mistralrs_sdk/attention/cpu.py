"""Attention on a CPU through the native kernel: ragged batches over paged keys and values."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionSpec, Batch, Rotation
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.kernels.attention import (
    LayerCache,
    PagedBatch,
    keys_by_dim,
    paged_attention,
    store_kv,
)
from mistralrs_sdk.kernels.elementwise import rotate_and_store


class CpuBackend:
    """Attends to a float32 or float16 `PagedKVCache` with float32 queries.

    It owns the cache, and lays its keys out as the kernel reads them. A row's result does not
    depend, to the last bit, on what else is in the batch.
    """

    supports_graphs: ClassVar[bool] = True

    def __init__(self, cache: PagedKVCache) -> None:
        cache.lay_out_keys(keys_by_dim)
        self._layers = [LayerCache(k=k, v=v) for k, v in zip(cache.k, cache.v, strict=True)]
        self._graphs: dict[int, PagedBatch] = {}

    def plan(self, batch: Batch, *, graph_size: int | None = None) -> None:
        width = max(map(len, batch.block_tables), default=0)
        tables = [[*table, *[0] * (width - len(table))] for table in batch.block_tables]
        self._slots = batch.slot_mapping
        block_tables = torch.tensor(tables, dtype=torch.int32).view(len(tables), width)
        query_start = torch.tensor(batch.query_start, dtype=torch.int32)
        seq_lens = torch.tensor(batch.seq_lens, dtype=torch.int32)
        if graph_size is None:
            self._batch = PagedBatch(
                block_tables=block_tables, query_start=query_start, seq_lens=seq_lens
            )
            return
        self._batch = self._buffers(graph_size)
        self._batch.block_tables[:, :width] = block_tables
        self._batch.query_start.copy_(query_start)
        self._batch.seq_lens.copy_(seq_lens)

    def _buffers(self, graph_size: int) -> PagedBatch:
        """The buffers of a graph, with room for tables as long as can be."""
        if graph_size not in self._graphs:
            most = len(self._layers[0].k)
            self._graphs[graph_size] = PagedBatch(
                block_tables=torch.empty(graph_size, most, dtype=torch.int32),
                query_start=torch.empty(graph_size + 1, dtype=torch.int32),
                seq_lens=torch.empty(graph_size, dtype=torch.int32),
            )
        return self._graphs[graph_size]

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
        cache = self._layers[layer]
        if rotation is None:
            store_kv(k, v, slots=self._slots, cache=cache)
        else:
            rotate_and_store(
                q, k, v=v, cos=rotation.cos, sin=rotation.sin, slots=self._slots, cache=cache
            )
        return paged_attention(
            q,
            cache,
            batch=self._batch,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
