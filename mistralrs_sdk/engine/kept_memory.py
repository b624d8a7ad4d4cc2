"""Device memory that a model keeps beside weights and cache: FlashInfer's buffers, CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from mistralrs_sdk.attention.backend import AttentionSpec
from mistralrs_sdk.attention.flashinfer import PLAN_BYTES, workspace_on
from mistralrs_sdk.config import EngineConfig
from mistralrs_sdk.engine.cuda_graphs import CAPTURE_BYTES, buckets
from mistralrs_sdk.engine.pool_size import estimate_activations
from mistralrs_sdk.models.config import ModelConfig

WRAPPER_BYTES = 8 * 2**20 + 2**17
"""What FlashInfer allocates for a wrapper: a plan, and room for the lengths of 32768 sequences."""
_WRAPPERS = 2
"""Of each distinct spec: one for decodes, one for everything else."""


@attrs.frozen(kw_only=True)
class KeptMemory:
    """Bytes that are taken once and stay."""

    attention: int = 0
    """FlashInfer's workspace and what its wrappers have besides."""
    graphs: int = 0
    """What captured steps return, and compute in; an estimate."""

    @property
    def total(self) -> int:
        return self.attention + self.graphs


def kept_memory(
    model: ModelConfig,
    specs: Sequence[AttentionSpec],
    config: EngineConfig,
    *,
    dtype: torch.dtype,
    block_size: int,
    max_model_len: int,
    device: torch.device,
) -> KeptMemory:
    """What is kept on `device`, which attends for layers with these `specs`.

    `config` has `flashinfer` and `cuda_graphs` resolved; there is nothing to count without a GPU.
    """
    if device.type != "cuda" or not config.flashinfer:
        return KeptMemory()
    distinct = tuple(dict.fromkeys(specs))
    attention = workspace_on(device, distinct, max_num_seqs=config.max_num_seqs)
    attention += len(distinct) * _WRAPPERS * WRAPPER_BYTES
    if not config.cuda_graphs:
        return KeptMemory(attention=attention)
    captured = buckets(config.max_num_seqs)
    blocks = -(-max_model_len // block_size)
    for size in captured:
        # The tables of pages are one set for all specs; see `FlashInferBackend`.
        attention += len(distinct) * PLAN_BYTES + 4 * (size * blocks + 2 * size + 1)
    largest = captured[-1]
    computed = estimate_activations(
        model,
        itemsize=dtype.itemsize,
        max_num_seqs=largest,
        max_num_batched_tokens=largest,
        max_model_len=1,  # what FlashInfer reads of the cache it does not copy
    )
    # Graphs compute in memory they share; what each returns stays its own.
    graphs = computed.total + sum(captured) * model.vocab_size * torch.float32.itemsize
    return KeptMemory(attention=attention, graphs=min(graphs, CAPTURE_BYTES))
