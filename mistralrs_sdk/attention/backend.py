"""What the model and the attention backends agree on: specs, batches and the backend protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import attrs
from torch import Tensor


@attrs.frozen(kw_only=True)
class AttentionSpec:
    """The shape of one layer's attention; backends plan once per distinct spec."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    """Keys a query may look back on, itself included; None for all."""
    softcap: float | None = None
    """Scores become `softcap * tanh(scores / softcap)` before the softmax."""


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """One forward's input: the tokens of all its sequences, flat, without padding.

    Sequence `i` owns the rows `query_start[i]:query_start[i + 1]`. They are its last tokens: the
    first of them stands at position `seq_lens[i] - rows`.
    """

    input_ids: Tensor
    """[num_tokens] int64."""
    positions: Tensor
    """[num_tokens] int64, each token's place in its own sequence."""
    slot_mapping: Tensor
    """[num_tokens] int64, where each token's key and value go: block * block_size + offset."""
    logits_indices: Tensor
    """[num_logits] int64, the rows whose logits are wanted."""
    query_start: Sequence[int]
    seq_lens: Sequence[int]
    """Tokens of each sequence after this forward."""
    block_tables: Sequence[Sequence[int]]


class AttentionBackend(Protocol):
    """Attention over a store of keys and values. Plan once per step, run once per layer."""

    supports_cuda_graph: ClassVar[bool]

    def plan(self, batch: Batch, *, graph_size: int | None = None) -> None:
        """Prepare for `batch`. With `graph_size`, fill the static buffers of that graph."""

    def run(self, spec: AttentionSpec, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v at the batch's slots, then attend.

        q is [num_tokens, heads, head_dim]; k and v are [num_tokens, kv_heads, head_dim]; the result
        has the shape of q.
        """
        ...
