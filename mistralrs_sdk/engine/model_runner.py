"""One step on the device: scheduled sequences -> batch -> logits -> drawn tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionBackend, Batch, BatchLists
from mistralrs_sdk.engine.request import SampledToken
from mistralrs_sdk.engine.sampler import SamplerRow, sample
from mistralrs_sdk.engine.scheduler import Scheduled
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from mistralrs_sdk.engine.step_tapes import StepTapes
from mistralrs_sdk.layers.lora import LoraLayers, LoraWeights


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
    lora: LoraLayers | None = None
    """The layers that adapters can change; None: no request has one."""
    tapes: StepTapes | None = attrs.field(
        init=False, default=attrs.Factory(lambda self: _tapes(self), takes_self=True)
    )
    """Of a CPU whose backend supports them; to be cleared when the weights change."""

    def run(self, scheduled: Sequence[Scheduled]) -> list[SampledToken | None]:
        """Compute the step; returns one entry per sequence, None where nothing is drawn."""
        if self.lora is None or not any(item.sequence.request.adapter for item in scheduled):
            return self._run(scheduled)
        order = sorted(range(len(scheduled)), key=lambda i: _generation(scheduled[i]))
        together = [scheduled[i] for i in order]  # the rows of one adapter are one span
        with self.lora.adding(adapter_spans(together)):
            drawn = self._run(together, adapted=True)
        by_place = dict(zip(order, drawn, strict=True))
        return [by_place[i] for i in range(len(scheduled))]

    def _run(
        self, scheduled: Sequence[Scheduled], *, adapted: bool = False
    ) -> list[SampledToken | None]:
        lists = lay_out(scheduled, block_size=self.block_size)
        logits = None if self.tapes is None else self.tapes.run(lists, adapted=adapted)
        if logits is None:
            logits = self._forward(lists.batch(self.device))
        if any([item.sequence.request.raw_logits for item in scheduled]):
            return _with_prompt_logits(logits, scheduled)
        rows = [_row(item.sequence) for item in scheduled if item.samples]
        drawn = sample(logits, rows) if rows else []
        if len(drawn) == len(scheduled):
            return [*drawn]
        rest = iter(drawn)
        return [next(rest) if item.samples else None for item in scheduled]

    @torch.inference_mode()  # a replayed step has no use for it, and entering it takes a while
    def _forward(self, batch: Batch) -> Tensor:
        self.backend.plan(batch)
        return self.model(batch, self.backend)


def _tapes(runner: ModelRunner) -> StepTapes | None:
    fits = runner.device.type == "cpu" and runner.backend.supports_graphs
    return StepTapes(runner.model, runner.backend) if fits else None


def adapter_spans(scheduled: Sequence[Scheduled]) -> list[tuple[int, int, LoraWeights]]:
    """The rows [start, end) of each adapter in a batch laid out in this order."""
    spans = []
    end = 0
    for _, items in itertools.groupby(scheduled, key=_generation):
        own = list(items)
        start, end = end, end + sum(item.num_tokens for item in own)
        adapter = own[0].sequence.request.adapter
        if adapter is not None:
            spans.append((start, end, adapter.weights))
    return spans


def _generation(item: Scheduled) -> str:
    """The adapter of a sequence; the base model comes first."""
    adapter = item.sequence.request.adapter
    return "" if adapter is None else adapter.generation


def lay_out(scheduled: Sequence[Scheduled], *, block_size: int | None) -> BatchLists:
    """Lay the scheduled tokens out flat."""
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
            if end - start > 1 and sequence.request.raw_logits:
                logits_indices += range(query_start[-2], len(input_ids) - 1)
            logits_indices.append(len(input_ids) - 1)
    return BatchLists(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slots,
        logits_indices=logits_indices,
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=tables,
    )


def _with_prompt_logits(
    logits: Tensor, scheduled: Sequence[Scheduled]
) -> list[SampledToken | None]:
    """Give requests for raw logits theirs, and draw for the others."""
    raw = [item.sequence.request.raw_logits for item in scheduled]
    counts = [
        item.num_tokens if wants else int(item.samples)
        for item, wants in zip(scheduled, raw, strict=True)
    ]
    parts = list(zip(scheduled, raw, logits.split(counts), strict=True))
    rows = [_row(item.sequence) for item, wants, _ in parts if item.samples and not wants]
    others = [part for _, wants, part in parts if not wants]
    drawn = iter(sample(torch.cat(others), rows) if rows else ())
    found: list[SampledToken | None] = []
    for item, wants, part in parts:
        if wants:  # copied: a part would keep the whole step's logits
            own = part.to("cpu", torch.float32, copy=True)
            found.append(SampledToken(0, prompt_logits=own))
        else:
            found.append(next(drawn) if item.samples else None)
    return found


def _row(sequence: EngineSequence) -> SamplerRow:
    """What the sampler knows of a sequence, kept as long as that lives."""
    row = sequence.sampler_row
    if row is None:
        row = sequence.sampler_row = sampler_row(sequence)
    row.advance(sequence.tokens)
    return row


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
        matcher=sequence.matcher,
        processors=request.logits_processors,
    )
