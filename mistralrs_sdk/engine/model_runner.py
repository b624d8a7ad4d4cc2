"""One step on the device: scheduled sequences -> batch -> logits -> drawn tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionBackend, Batch
from mistralrs_sdk.engine.request import SampledToken
from mistralrs_sdk.engine.sampler import SamplerRow, sample
from mistralrs_sdk.engine.scheduler import Scheduled


class CausalModel(Protocol):
    """What a model file provides."""

    def __call__(self, batch: Batch, backend: AttentionBackend) -> Tensor: ...


@attrs.define
class ModelRunner:
    """Runs the model over what the scheduler chose."""

    model: CausalModel
    backend: AttentionBackend
    device: torch.device
    block_size: int | None
    """None without paging: tokens then have no slots."""

    @torch.inference_mode()
    def run(self, scheduled: Sequence[Scheduled]) -> list[SampledToken | None]:
        """Compute the step; returns one entry per sequence, None where nothing is drawn."""
        batch = build_batch(scheduled, block_size=self.block_size, device=self.device)
        self.backend.plan(batch)
        logits = self.model(batch, self.backend)
        drawing = [item for item in scheduled if item.samples]
        drawn = iter(sample(logits, [sampler_row(item) for item in drawing]) if drawing else ())
        return [next(drawn) if item.samples else None for item in scheduled]


def build_batch(
    scheduled: Sequence[Scheduled], *, block_size: int | None, device: torch.device
) -> Batch:
    """Lay the scheduled tokens out flat; each tensor is built from host lists once."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logits_indices: list[int] = []
    query_start = [0]
    seq_lens: list[int] = []
    tables: list[Sequence[int]] = []
    for item in scheduled:
        sequence = item.sequence
        start = sequence.num_computed_tokens
        end = start + item.num_tokens
        input_ids += sequence.tokens[start:end]
        positions += range(start, end)
        if block_size is not None:
            blocks = sequence.blocks
            slots += [
                blocks[p // block_size] * block_size + p % block_size for p in range(start, end)
            ]
            tables.append(blocks[: -(-end // block_size)])
        else:
            tables.append([sequence.id])  # what a dense cache knows it by
        query_start.append(len(input_ids))
        seq_lens.append(end)
        if item.samples:
            logits_indices.append(len(input_ids) - 1)

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Batch(
        input_ids=tensor(input_ids),
        positions=tensor(positions),
        slot_mapping=tensor(slots),
        logits_indices=tensor(logits_indices),
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=tables,
    )


def sampler_row(item: Scheduled) -> SamplerRow:
    sequence = item.sequence
    request = sequence.request
    return SamplerRow(
        sampling=request.sampling,
        seed=request.seed,
        choice=sequence.choice,
        position=len(sequence),
        prompt_ids=request.prompt_ids,
        output_ids=sequence.tokens[sequence.prompt_len :],
        dry_breakers=request.dry_breakers,
    )
