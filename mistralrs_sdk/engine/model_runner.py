"""One step on the device: scheduled sequences -> batch -> logits -> drawn tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionBackend, Batch
from mistralrs_sdk.engine.request import SampledToken
from mistralrs_sdk.engine.sampler import SamplerRow, sample
from mistralrs_sdk.engine.scheduler import Scheduled
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from mistralrs_sdk.engine.step_tapes import StepTapes


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
    tapes: StepTapes | None = attrs.field(
        init=False, default=attrs.Factory(lambda self: _tapes(self), takes_self=True)
    )
    """Of a CPU whose backend supports them; to be cleared when the weights change."""
    _rows: WeakKeyDictionary[EngineSequence, SamplerRow] = attrs.field(
        init=False, factory=WeakKeyDictionary
    )

    @torch.inference_mode()
    def run(self, scheduled: Sequence[Scheduled]) -> list[SampledToken | None]:
        """Compute the step; returns one entry per sequence, None where nothing is drawn."""
        batch = build_batch(scheduled, block_size=self.block_size, device=self.device)
        logits = None if self.tapes is None else self.tapes.run(batch)
        if logits is None:
            self.backend.plan(batch)
            logits = self.model(batch, self.backend)
        rows = [self._row(item.sequence) for item in scheduled if item.samples]
        drawn = iter(sample(logits, rows) if rows else ())
        return [next(drawn) if item.samples else None for item in scheduled]

    def _row(self, sequence: EngineSequence) -> SamplerRow:
        """What the sampler knows of a sequence, kept as long as that lives."""
        row = self._rows.get(sequence)
        if row is None:
            row = self._rows[sequence] = sampler_row(sequence)
        row.advance(sequence.tokens)
        return row


def _tapes(runner: ModelRunner) -> StepTapes | None:
    fits = runner.device.type == "cpu" and runner.backend.supports_graphs
    return StepTapes(runner.model, runner.backend) if fits else None


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
    return Batch(
        input_ids=_tensor(input_ids, device),
        positions=_tensor(positions, device),
        slot_mapping=_tensor(slots, device),
        logits_indices=_tensor(logits_indices, device),
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=tables,
    )


def _tensor(values: list[int], device: torch.device) -> Tensor:
    if not values:
        return torch.empty(0, dtype=torch.int64, device=device)
    # half of what `torch.tensor` takes, and in a small step that is half of all that is not kernels
    made = torch.frombuffer(array("q", values), dtype=torch.int64)
    return made if device.type == "cpu" else made.to(device)


def sampler_row(sequence: EngineSequence) -> SamplerRow:
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
