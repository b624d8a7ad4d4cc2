"""Attention of ragged batches over paged keys and values: the native kernel and its reference."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.kernels import native

CACHE_DTYPES = (torch.float32, torch.float16)
"""How keys and values may be stored; queries, new keys and results are float32."""


def keys_by_dim(k: Tensor) -> Tensor:
    """The memory of k, seen as keys that lie as the kernels read them.

    k is contiguous, [num_blocks, block_size, kv_heads, head_dim]. So is the result, but in memory
    each dimension's keys of a block are adjacent: [num_blocks, kv_heads, head_dim, block_size].
    What k held is thereby shuffled.

    Raises:
        ValueError: k is not contiguous.
    """
    if not k.is_contiguous():
        raise ValueError(f"k {list(k.shape)} (strides {k.stride()}) must be contiguous")
    num_blocks, block_size, kv_heads, head_dim = k.shape
    return k.view(num_blocks, kv_heads, head_dim, block_size).permute(0, 3, 1, 2)


@attrs.frozen(kw_only=True, eq=False)
class LayerCache:
    """The keys and values of one layer, made once: checking them costs more than a short call.

    Both are [num_blocks, block_size, kv_heads, head_dim], float32 or float16: v contiguous, k a
    view that `keys_by_dim` returned.

    Raises:
        ValueError: they are something else.
    """

    k: Tensor
    v: Tensor
    arguments: tuple[int, ...] = attrs.field(init=False, repr=False)
    """What the kernels are told of it."""

    def __attrs_post_init__(self) -> None:
        k, v = self.k, self.v
        same = k.dtype == v.dtype and k.shape == v.shape and k.ndim == 4
        if k.dtype not in CACHE_DTYPES or not (same and v.is_contiguous()):
            raise ValueError(
                f"k {list(k.shape)} ({k.dtype}) and v {list(v.shape)} ({v.dtype}) of a cache must "
                "be alike, v contiguous, and float32 or float16"
            )
        if not k.permute(0, 2, 3, 1).is_contiguous():
            raise ValueError(
                f"k {list(k.shape)} (strides {k.stride()}) of a cache must have the tokens of a "
                "block adjacent: make it with keys_by_dim()"
            )
        half = k.dtype == torch.float16
        arguments = (k.data_ptr(), v.data_ptr(), int(half), *k.shape)
        object.__setattr__(self, "arguments", arguments)


@attrs.frozen(kw_only=True, eq=False)
class PagedBatch:
    """Which keys belong to which query rows, made once per pass.

    Sequence i owns the rows `query_start[i]:query_start[i + 1]`, its last tokens; `seq_lens[i]`
    counts all of its tokens, and `block_tables[i]` names the blocks that hold them. All are int32,
    contiguous, on the CPU: block_tables [sequences, max_blocks] (what stands behind a sequence's
    last block is not read), query_start [sequences + 1], seq_lens [sequences].

    Raises:
        ValueError: they are something else.
    """

    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    arguments: tuple[int, ...] = attrs.field(init=False, repr=False)
    """What the kernels are told of it."""

    def __attrs_post_init__(self) -> None:
        sequences = len(self.seq_lens)
        wanted = {
            "block_tables": (sequences, *self.block_tables.shape[1:2]),
            "query_start": (sequences + 1,),
            "seq_lens": (sequences,),
        }
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            right = tensor.dtype == torch.int32 and tensor.is_contiguous()
            if not right or tensor.ndim != len(shape) or tensor.shape != shape:
                raise ValueError(
                    f"{name} {list(tensor.shape)} ({tensor.dtype}) must be int32, contiguous and "
                    f"fit {sequences} sequences"
                )
        arguments = (
            self.block_tables.data_ptr(),
            self.block_tables.shape[1],
            self.query_start.data_ptr(),
            self.seq_lens.data_ptr(),
            sequences,
        )
        object.__setattr__(self, "arguments", arguments)


def paged_attention(
    q: Tensor,
    cache: LayerCache,
    *,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """Causal attention of the last rows of each sequence over its keys in the cache.

    q is [tokens, heads, head_dim] float32, dense but for the stride from token to token; the result
    has its shape. Rows that belong to no sequence are left undefined. A row's result does not
    depend, to the last bit, on what else is in the batch. `num_threads` defaults to torch's.

    Raises:
        ValueError: q does not fit the cache, or the batch names rows or blocks there are not.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = cache.arguments[5]
    check_rows("q", q)
    if head_dim != cache.arguments[6] or heads % kv_heads:
        raise ValueError(
            f"q {list(q.shape)} does not fit the cache {list(cache.k.shape)}: it needs its "
            "head_dim, and a multiple of its kv_heads"
        )
    out = q.new_empty(q.shape)
    wrong = native.call(
        "mistralrs_paged_attention",
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        tokens,
        heads,
        scale,
        window or 0,
        softcap or 0.0,
        num_threads or torch.get_num_threads(),
        *cache.arguments,
        *batch.arguments,
    )
    if wrong >= 0:
        raise ValueError(
            f"sequence {wrong} of the batch does not fit: its rows must lie among the {tokens} of "
            f"q and be at most its {int(batch.seq_lens[wrong])} tokens, which its blocks (each "
            f"below {len(cache.k)}) must hold"
        )
    return out


def has_fast_halves() -> bool:
    """Whether the kernels were compiled for a CPU that converts float16 by instructions."""
    return bool(native.call("mistralrs_has_fast_halves"))


def store_kv(k: Tensor, v: Tensor, *, slots: Tensor, cache: LayerCache) -> None:
    """Write the keys and values of new tokens, rounded to what the cache holds.

    k and v are [tokens, kv_heads, head_dim] float32, dense but for the stride from token to token;
    slots is [tokens] int64, `block * block_size + offset`.

    Raises:
        ValueError: the tensors do not fit together, or a slot is not in the cache.
    """
    tokens = len(slots)
    shape = (tokens, *cache.arguments[5:])
    check_rows("k", k)
    check_rows("v", v)
    if k.shape != shape or v.shape != shape:
        raise ValueError(
            f"k {list(k.shape)} and v {list(v.shape)} must be {list(shape)}, for {tokens} slots "
            f"of the cache {list(cache.k.shape)}"
        )
    check_slots(slots)
    wrong = native.call(
        "mistralrs_store_kv",
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        slots.data_ptr(),
        tokens,
        *cache.arguments,
    )
    if wrong >= 0:
        raise slot_error(int(slots[wrong]), cache)


def paged_attention_reference(
    q: Tensor,
    cache: LayerCache,
    *,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """What `paged_attention` computes, in torch and in the precision of q."""
    out = torch.zeros_like(q)
    block_size, kv_heads = cache.k.shape[1:3]
    starts = batch.query_start.tolist()
    for i, length in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        blocks = batch.block_tables[i, : -(-length // block_size)].long()
        keys, values = (
            x[blocks]
            .flatten(0, 1)[:length]
            .to(q.dtype)
            .repeat_interleave(q.shape[1] // kv_heads, 1)
            for x in (cache.k, cache.v)
        )
        scores = torch.einsum("rhd,khd->hrk", q[rows], keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        key = torch.arange(length)
        row = key[length - (rows.stop - rows.start) :, None]
        hidden = key > row
        if window is not None:
            hidden |= key <= row - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hrk,khd->rhd", weights, values)
    return out


def store_kv_reference(k: Tensor, v: Tensor, *, slots: Tensor, cache: LayerCache) -> None:
    """What `store_kv` does, in torch."""
    block_size = cache.k.shape[1]
    places = slots // block_size, slots % block_size
    cache.k[places] = k.to(cache.k.dtype)
    cache.v[places] = v.to(cache.v.dtype)


def check_slots(slots: Tensor) -> None:
    """Raise ValueError unless the slots are int64 numbers in a row."""
    if slots.dtype != torch.int64 or slots.ndim != 1 or not slots.is_contiguous():
        raise ValueError(
            f"slots {list(slots.shape)} ({slots.dtype}) must be int64, contiguous and of one "
            "dimension"
        )


def slot_error(slot: int, cache: LayerCache) -> ValueError:
    """The error for a slot outside of the cache."""
    total = cache.k.shape[0] * cache.k.shape[1]
    return ValueError(f"slot {slot} is not in the cache: it has {total} slots")


def check_rows(name: str, x: Tensor) -> None:
    """Raise ValueError unless only the stride from token to token is free."""
    _, heads, dim = x.shape
    _, by_head, by_value = x.stride()
    dense = (by_value == 1 or dim <= 1) and (by_head == dim or heads <= 1)
    if x.dtype != torch.float32 or not (dense or not x.numel()):
        raise ValueError(
            f"{name} {list(x.shape)} ({x.dtype}, strides {x.stride()}) must be float32 with its "
            "last two dimensions contiguous"
        )
