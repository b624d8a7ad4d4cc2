"""Attention of whole prompts that keeps nothing: what an embedding model needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionSpec, Batch, Rotation
from mistralrs_sdk.attention.sdpa import (
    TILE_ROWS,
    UncachedSdpaBackend,
    attend_prompts,
    refuse_graph,
)


class EncoderBackend:
    """Every sequence's rows are all its tokens; layers may look back only, or both ways.

    A sequence is attended to by itself: its result does not depend on the others in the batch.
    """

    supports_graphs: ClassVar[bool] = False

    def __init__(self) -> None:
        self._causal = UncachedSdpaBackend()

    def plan(self, batch: Batch, *, graph_size: int | None = None) -> None:
        refuse_graph(self, graph_size)
        self._causal.plan(batch)
        self._bounds = list(zip(batch.query_start, batch.query_start[1:], strict=False))
        self._masks: dict[tuple[int, int, int, int], Tensor] = {}

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
        if spec.causal:
            return self._causal.run(spec, layer, q, k, v, rotation=rotation)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for start, end in self._bounds:
            for rows, keys, mask in self._tiles(end - start, spec.window, q.device):
                here = slice(start + rows.start, start + rows.stop)
                seen = slice(start + keys.start, start + keys.stop)
                out[here] = attend_prompts(
                    spec, q[None, here], k[None, seen], v[None, seen], mask=mask, causal=False
                )[0]
        return out

    def _tiles(
        self, length: int, window: int | None, device: torch.device
    ) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Rows of a sequence, the keys that some of them see, and which sees which."""
        for low in range(0, length, TILE_ROWS):
            high = min(low + TILE_ROWS, length)
            if window is None or window >= length:
                yield slice(low, high), slice(0, length), None
                continue
            first, end = max(0, low - window + 1), min(length, high + window - 1)
            mask = self._mask(low - first, high - low, end - first, window, device=device)
            yield slice(low, high), slice(first, end), mask

    def _mask(
        self, offset: int, rows: int, keys: int, window: int, *, device: torch.device
    ) -> Tensor:
        """True where a row and a key are less than `window` apart; the first row stands on key
        `offset`."""
        shape = (offset, rows, keys, window)
        mask = self._masks.get(shape)
        if mask is None:
            row = torch.arange(offset, offset + rows, device=device)[:, None]
            key = torch.arange(keys, device=device)
            mask = self._masks[shape] = (row - key).abs() < window
        return mask
