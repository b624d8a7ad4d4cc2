"""Attention on a CPU through the native kernel: ragged batches over paged keys and values."""

from __future__ import annotations

import mmap
from array import array
from typing import ClassVar

import attrs
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
        self._graphs: dict[int, _Graph] = {}

    def plan(self, batch: Batch, *, graph_size: int | None = None) -> None:
        self._slots = batch.slot_mapping
        if graph_size is not None:
            graph = self._graphs.get(graph_size)
            if graph is None:
                most = len(self._layers[0].k)
                graph = self._graphs[graph_size] = _Graph.of(graph_size, most=most)
            self._batch = graph.fill(batch)
            return
        width = max(map(len, batch.block_tables), default=0)
        tables = [[*table, *[0] * (width - len(table))] for table in batch.block_tables]
        self._batch = PagedBatch(
            block_tables=torch.tensor(tables, dtype=torch.int32).view(len(tables), width),
            query_start=torch.tensor(batch.query_start, dtype=torch.int32),
            seq_lens=torch.tensor(batch.seq_lens, dtype=torch.int32),
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


@attrs.frozen(eq=False)
class _Graph:
    """The batch of a graph, into which numbers are written without torch.

    Between two steps the weights drive torch's code out of the processor's caches: each of its
    functions then takes 20 to 70 us, and copying into a buffer next to nothing.
    """

    batch: PagedBatch
    _block_tables: memoryview
    _seq_lens: memoryview
    _most: int

    @classmethod
    def of(cls, size: int, *, most: int) -> _Graph:
        """For `size` sequences of one row each, and tables of up to `most` blocks."""
        tables = mmap.mmap(-1, 4 * size * most)  # takes memory only where it is written to
        lengths = array("i", bytes(4 * size))
        batch = PagedBatch(
            block_tables=torch.frombuffer(tables, dtype=torch.int32).view(size, most),
            query_start=torch.arange(size + 1, dtype=torch.int32),
            seq_lens=torch.frombuffer(lengths, dtype=torch.int32),
        )
        return cls(batch, memoryview(tables).cast("i"), memoryview(lengths), most)

    def fill(self, batch: Batch) -> PagedBatch:
        """Be about the sequences of this batch."""
        self._seq_lens[:] = array("i", batch.seq_lens)
        start = 0
        for table in batch.block_tables:
            self._block_tables[start : start + len(table)] = array("i", table)
            start += self._most
        return self.batch
