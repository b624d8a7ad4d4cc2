"""What model and attention backends agree on: specs, rotations, batches, the backend protocol."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import ClassVar, Protocol

import attrs
import torch
from torch import Tensor


@attrs.frozen(kw_only=True)
class AttentionSpec:
    """The shape of one layer's attention; backends plan once per distinct spec."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    """Keys a query may look back on, itself included; None for all. Not causal: also ahead."""
    softcap: float | None = None
    """Scores become `softcap * tanh(scores / softcap)` before the softmax."""
    causal: bool = True
    """Whether a query sees no keys after it; only `EncoderBackend` does without that."""


@attrs.frozen(eq=False)
class Rotation:
    """Cosines and sines of one step's positions, [num_tokens, 1, head_dim].

    The first half of the sines is negated: rotating is `x * cos + swap_halves(x) * sin`.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate [num_tokens, heads, head_dim]."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


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
    """[num_logits] int64, the rows whose logits are wanted, ascending, none twice.

    So as many as there are tokens are all of them, which the model takes without copying any."""
    query_start: Sequence[int]
    seq_lens: Sequence[int]
    """Tokens of each sequence after this forward."""
    block_tables: Sequence[Sequence[int]]


@attrs.define(kw_only=True, eq=False)
class BatchLists:
    """A `Batch` before any tensor is made of it: the same fields, in lists."""

    input_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    logits_indices: list[int]
    query_start: list[int]
    seq_lens: list[int]
    block_tables: list[Sequence[int]]

    def batch(self, device: torch.device) -> Batch:
        """The batch, with its tensors on `device`."""
        return Batch(
            input_ids=_tensor(self.input_ids, device),
            positions=_tensor(self.positions, device),
            slot_mapping=_tensor(self.slot_mapping, device),
            logits_indices=_tensor(self.logits_indices, device),
            query_start=self.query_start,
            seq_lens=self.seq_lens,
            block_tables=self.block_tables,
        )


class AttentionBackend(Protocol):
    """Attention over a store of keys and values. Plan once per step, run once per layer."""

    supports_graphs: ClassVar[bool]
    """Whether `plan` takes a `graph_size`: a graph is a step recorded once and then replayed."""

    def plan(self, batch: Batch, *, graph_size: int | None = None) -> None:
        """Prepare for `batch`. With `graph_size`, fill the static buffers of that graph.

        The batch then has that many sequences with one token each, and its tensors are those of the
        graph already.
        """

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
        """Rotate q and k if there is a rotation, store k and v at the batch's slots, then attend.

        q is [num_tokens, heads, head_dim]; k and v are [num_tokens, kv_heads, head_dim]; the result
        has the shape of q. q and k may be rotated where they are: the caller needs them no more.
        """
        ...


def _tensor(values: list[int], device: torch.device) -> Tensor:
    if not values:
        return torch.empty(0, dtype=torch.int64, device=device)
    made = torch.frombuffer(array("q", values), dtype=torch.int64)  # half of `torch.tensor`'s time
    return made if device.type == "cpu" else made.to(device)
