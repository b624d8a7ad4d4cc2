"""Attention on a CPU through the native kernel: ragged batches over paged keys and values."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionSpec, Batch
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.kernels.attention import LayerCache, PagedBatch, paged_attention, store_kv


class CpuBackend:
    """Attends to a float32 or float16 `PagedKVCache` with float32 queries.

    A row's result does not depend, to the last bit, on what else is in the batch.
    """

    supports_cuda_graph: ClassVar[bool] = False

    def __init__(self, cache: PagedKVCache) -> None:
        self._layers = [LayerCache(k=k, v=v) for k, v in zip(cache.k, cache.v, strict=True)]

    def plan(self, batch: Batch, *, graph_size: int | None = None) -> None:
        if graph_size is not None:
            raise ValueError(f"CpuBackend has no CUDA graphs (graph_size {graph_size})")
        width = max(map(len, batch.block_tables), default=0)
        tables = [[*table, *[0] * (width - len(table))] for table in batch.block_tables]
        self._slots = batch.slot_mapping
        self._batch = PagedBatch(
            block_tables=torch.tensor(tables, dtype=torch.int32).view(len(tables), width),
            query_start=torch.tensor(batch.query_start, dtype=torch.int32),
            seq_lens=torch.tensor(batch.seq_lens, dtype=torch.int32),
        )

    def run(self, spec: AttentionSpec, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self._layers[layer]
        store_kv(k, v, slots=self._slots, cache=cache)
        return paged_attention(
            q,
            cache,
            batch=self._batch,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
