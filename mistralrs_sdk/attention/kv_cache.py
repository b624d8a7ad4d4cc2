"""Where keys and values live: in a pool of blocks, or in tensors of their own per sequence."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Collection, Iterable, Sequence

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionSpec
from mistralrs_sdk.machine import is_out_of_memory

DENSE_GROWTH = 512
"""Tokens by which a dense cache grows."""
_F8_MOST = torch.finfo(torch.float8_e4m3fn).max


class PagedKVCache:
    """Keys and values of all layers, in blocks of `block_size` tokens.

    `k[layer]` and `v[layer]` are [num_blocks, block_size, kv_heads, head_dim], however they lie in
    memory: token by token, unless the backend that owns the cache wants its keys otherwise (see
    `lay_out_keys`). Slot `block * block_size + offset` holds one token. Block 0 is the null block:
    the pool never hands it out. The cache starts as zeros; on the CPU memory is taken only when a
    block is first used. In float8_e4m3fn a number beyond 448 is kept as 448, without a scale.
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
        self.k = tuple(untouched_zeros(shape, dtype=dtype, device=device) for shape in shapes)
        self.v = tuple(untouched_zeros(shape, dtype=dtype, device=device) for shape in shapes)
        self._flat: list[tuple[Tensor, Tensor]] | None = [
            (k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(self.k, self.v, strict=True)
        ]

    def lay_out_keys(self, lay_out: Callable[[Tensor], Tensor]) -> None:
        """Replace each layer's keys by `lay_out(keys)`: the same memory and shape, other strides.

        For the backend that owns the cache, before anything is stored. From then on that backend
        stores, and `flat` and `store` are refused.
        """
        self.k = tuple(map(lay_out, self.k))
        self._flat = None

    def flat(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's keys and values by slot, [num_slots, kv_heads, head_dim].

        Raises:
            ValueError: the keys do not lie token by token.
        """
        if self._flat is None:
            raise ValueError("the keys of this cache lie as its backend wants them: read k and v")
        return self._flat[layer]

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write one token per slot; k and v are [num_tokens, kv_heads, head_dim].

        Raises:
            ValueError: the keys do not lie token by token.
        """
        keys, values = self.flat(layer)
        if self.dtype is torch.float8_e4m3fn:
            # Bytes are copied: index_copy_ does not know the type.
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
            k, v = _to_f8(k).view(torch.uint8), _to_f8(v).view(torch.uint8)
        keys.index_copy_(0, slots, k.to(keys.dtype))
        values.index_copy_(0, slots, v.to(values.dtype))


@attrs.define(eq=False)
class DenseBatch:
    """The caches of sequences that compute together, one row each.

    `k[layer]` and `v[layer]` are [rows, capacity, kv_heads, head_dim]; sequence `members[i]` has
    row i, and rows past the members are free.
    """

    k: list[Tensor]
    v: list[Tensor]
    members: list[int] = attrs.field(factory=list)

    @property
    def num_rows(self) -> int:
        return self.k[0].shape[0]

    @property
    def capacity(self) -> int:
        """Tokens a row has room for."""
        return self.k[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in (*self.k, *self.v))

    def resize(self, rows: int, capacity: int) -> None:
        """Change both sizes, one layer after the other; what fits is kept."""
        for tensors in (self.k, self.v):
            for layer, old in enumerate(tensors):
                new = old.new_empty(rows, capacity, *old.shape[2:])
                kept = old[:rows, :capacity]
                new[: kept.shape[0], : kept.shape[1]] = kept
                tensors[layer] = new

    def copy_row(self, row: int, source: DenseBatch, source_row: int, *, tokens: int) -> None:
        """Take over the first `tokens` tokens of a row, possibly of another batch."""
        for mine, theirs in ((self.k, source.k), (self.v, source.v)):
            for to, origin in zip(mine, theirs, strict=True):
                to[row, :tokens] = origin[source_row, :tokens]


class DenseKVCache:
    """Keys and values of each sequence in one piece, grown by 512 tokens.

    Sequences that compute together have their caches side by side in a `DenseBatch`, so that a
    step reads them without a copy. They are copied only when the set of sequences changes, and a
    batch that waits while others compute stays as it is.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self._shapes = [(spec.num_kv_heads, spec.head_dim) for spec in specs]
        self._places: dict[int, tuple[DenseBatch, int]] = {}
        """Batch and row of each sequence; a row of no member's is only read."""

    @property
    def owners(self) -> Collection[int]:
        """Ids of the sequences that have a cache."""
        return self._places.keys()

    @property
    def num_bytes(self) -> int:
        """What the caches of all sequences take, free rows and room to grow included."""
        batches = {id(batch): batch for batch, _ in self._places.values()}
        return sum(batch.num_bytes for batch in batches.values())

    @torch.inference_mode()
    def gather(self, ids: Sequence[int], *, computed: int, length: int) -> DenseBatch:
        """Bring these sequences into one batch, with room for `length` tokens each.

        Their first `computed` tokens are kept; the members may stand in another order than `ids`.
        """
        capacity = -(-length // DENSE_GROWTH) * DENSE_GROWTH
        batch = self._batch_of(ids)
        if batch is not None:
            if batch.capacity < length:
                batch.resize(len(ids), capacity)
            return batch
        batch = self._allocate(len(ids), capacity)
        for row, sequence_id in enumerate(ids if computed else ()):
            batch.copy_row(row, *self._places[sequence_id], tokens=computed)
        self.free(ids)
        batch.members += ids
        self._places.update((sequence_id, (batch, row)) for row, sequence_id in enumerate(ids))
        return batch

    @torch.inference_mode()
    def keep(self, sequence_id: int, length: int) -> DenseBatch | None:
        """A copy of the sequence's first `length` tokens, for others to start from.

        None if there is no memory for it: a copy is only there to save time.
        """
        try:
            kept = self._allocate(1, length)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        kept.copy_row(0, *self._places[sequence_id], tokens=length)
        return kept

    def start_from(self, sequence_id: int, kept: DenseBatch) -> None:
        """Let a sequence begin with what `keep` returned; it is copied when first computed."""
        self._places[sequence_id] = (kept, 0)

    @torch.inference_mode()
    def free(self, ids: Iterable[int]) -> None:
        """Forget the caches of these sequences; those without one are ignored."""
        left: dict[int, tuple[DenseBatch, set[int]]] = {}
        for sequence_id in ids:
            if (place := self._places.pop(sequence_id, None)) is not None:
                left.setdefault(id(place[0]), (place[0], set()))[1].add(sequence_id)
        for batch, gone in left.values():
            self._close_up(batch, gone)

    def _close_up(self, batch: DenseBatch, gone: set[int]) -> None:
        """Move the last rows into those that `gone` left; give memory back once half is free."""
        count = sum(member not in gone for member in batch.members)
        if not count:
            batch.members.clear()
            return
        for row in range(count):
            if batch.members[row] not in gone:
                continue
            while batch.members[-1] in gone:
                batch.members.pop()
            last = batch.members.pop()
            batch.copy_row(row, batch, len(batch.members), tokens=batch.capacity)
            batch.members[row] = last
            self._places[last] = (batch, row)
        del batch.members[count:]
        if 2 * count <= batch.num_rows:
            try:
                batch.resize(count, batch.capacity)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise  # else there is no room for the smaller copy: the large one stays

    def _batch_of(self, ids: Sequence[int]) -> DenseBatch | None:
        """The batch whose members are exactly these sequences."""
        batch, _ = self._places.get(ids[0], (None, 0))
        if batch is None or len(batch.members) != len(ids):
            return None
        alike = all(i in self._places and self._places[i][0] is batch for i in ids)
        return batch if alike else None

    def _allocate(self, rows: int, capacity: int) -> DenseBatch:
        k, v = (
            [
                torch.empty((rows, capacity, *shape), dtype=self.dtype, device=self.device)
                for shape in self._shapes
            ]
            for _ in range(2)
        )
        return DenseBatch(k, v)


def bytes_per_token(specs: Sequence[AttentionSpec], dtype: torch.dtype) -> int:
    """Bytes the keys and values of one token take in all layers."""
    return sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs) * dtype.itemsize


def untouched_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, which on the CPU take memory only where they are first used."""
    size = math.prod(shape)
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page; an anonymous mapping is zero without being touched.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=private)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _to_f8(x: Tensor) -> Tensor:
    """As float8_e4m3fn, in which some versions of torch make NaN of what is out of range."""
    return x.clamp(-_F8_MOST, _F8_MOST).to(torch.float8_e4m3fn)
