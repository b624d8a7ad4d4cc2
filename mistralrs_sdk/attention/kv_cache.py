"""Where keys and values live: a pool of blocks per layer, addressed by slot."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionSpec


class PagedKVCache:
    """Keys and values of all layers, in blocks of `block_size` tokens.

    `k[layer]` and `v[layer]` are [num_blocks, block_size, kv_heads, head_dim]. Slot
    `block * block_size + offset` holds one token. Block 0 is the null block: the pool never hands
    it out. The cache starts as zeros; on the CPU memory is taken only when a block is first used.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        device = torch.device(device)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        shapes = [(num_blocks, block_size, spec.num_kv_heads, spec.head_dim) for spec in specs]
        self.k = tuple(_zeros(shape, dtype=dtype, device=device) for shape in shapes)
        self.v = tuple(_zeros(shape, dtype=dtype, device=device) for shape in shapes)
        self._flat = [
            (k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(self.k, self.v, strict=True)
        ]

    def flat(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's keys and values by slot, [num_slots, kv_heads, head_dim]."""
        return self._flat[layer]

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write one token per slot; k and v are [num_tokens, kv_heads, head_dim]."""
        keys, values = self._flat[layer]
        keys.index_copy_(0, slots, k.to(self.dtype))
        values.index_copy_(0, slots, v.to(self.dtype))


def bytes_per_token(specs: Sequence[AttentionSpec], dtype: torch.dtype) -> int:
    """Bytes the keys and values of one token take in all layers."""
    return sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs) * dtype.itemsize


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    size = math.prod(shape)
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page; an anonymous mapping is zero without being touched.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=private)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
