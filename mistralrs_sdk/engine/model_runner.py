"""One step on the device: scheduled sequences -> batch -> logits -> drawn tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionBackend, Batch, BatchLists
from mistralrs_sdk.engine.cuda_graphs import GraphRunner
from mistralrs_sdk.engine.device_sampler import DeviceDraw, DeviceSampler, drawn_on_device
from mistralrs_sdk.engine.request import SampledToken
from mistralrs_sdk.engine.sampler import sample
from mistralrs_sdk.engine.sampler_rows import sampler_row
from mistralrs_sdk.engine.scheduler import Scheduled
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from mistralrs_sdk.engine.step_tapes import StepTapes
from mistralrs_sdk.engine.transfers import CudaTransfers, Transfers
from mistralrs_sdk.layers.lora import LoraLayers, LoraWeights


class CausalModel(Protocol):
    """What a model file provides."""

    def __call__(self, batch: Batch, backend: AttentionBackend) -> Tensor: ...


@attrs.define(eq=False)
class LaunchedStep:
    """A step that the device may still be computing."""

    scheduled: Sequence[Scheduled]
    draw: DeviceDraw
    places: Sequence[int]
    """Of each row that is drawn: its sequence in `scheduled`."""

    def read(self) -> list[SampledToken | None]:
        """Wait for the tokens: as `ModelRunner.run`, to be called before they are appended."""
        tokens: list[SampledToken | None] = [None] * len(self.scheduled)
        for place, token in zip(self.places, self.draw.read(), strict=True):
            tokens[place] = token
        return tokens

    @property
    def redone(self) -> frozenset[int]:
        """After `read`: who got another token than a step launched after this one started from."""
        return frozenset(self.places[row] for row in self.draw.redone)


@attrs.define
class ModelRunner:
    """Runs the model over what the scheduler chose.

    On a device that computes while the host goes on, tokens are drawn there if every row of the
    step allows it, and a step can be launched before the tokens of the one before it are read.
    """

    model: CausalModel
    backend: AttentionBackend
    device: torch.device
    block_size: int | None
    """None without paging: tokens then have no slots."""
    lora: LoraLayers | None = None
    """The layers that adapters can change; None: no request has one."""
    graphs: GraphRunner | None = None
    """Of a GPU whose backend supports them."""
    transfers: Transfers | None = attrs.field(
        default=attrs.Factory(lambda self: _transfers(self), takes_self=True), kw_only=True
    )
    """None where the host computes."""
    tapes: StepTapes | None = attrs.field(
        init=False, default=attrs.Factory(lambda self: _tapes(self), takes_self=True)
    )
    """Of a CPU whose backend supports them."""
    _sampler: DeviceSampler | None = attrs.field(
        init=False, default=attrs.Factory(lambda self: _sampler(self), takes_self=True)
    )

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

    def launch(self, scheduled: Sequence[Scheduled]) -> LaunchedStep | None:
        """Start a step and leave its tokens on the device; None if some are not drawn there.

        Nothing was started then.
        """
        if self._sampler is None or not all(map(_is_plain, scheduled)):
            return None
        places = [i for i, item in enumerate(scheduled) if item.samples]
        if not places:
            return None
        logits = self.forward(lay_out(scheduled, block_size=self.block_size))
        draw = self._sampler.draw(logits, [scheduled[i].sequence for i in places])
        return LaunchedStep(scheduled, draw, places)

    def launch_after(self, step: LaunchedStep, rows: Sequence[int]) -> LaunchedStep:
        """Start the decode step after a decode step that was launched and not read yet.

        `rows` are those of its sequences that go on, ascending; each has a block for the token that
        is being drawn.
        """
        assert self._sampler is not None, "a step was launched"
        assert self.transfers is not None, "a step was launched"
        scheduled = [step.scheduled[row] for row in rows]
        sequences = [item.sequence for item in scheduled]
        input_ids = step.draw.tokens
        if len(rows) < len(input_ids):
            input_ids = input_ids.index_select(0, self.transfers.send(torch.tensor(rows)))
        step.draw.keep_logits()
        logits = self.forward(lay_out_next(sequences, block_size=self.block_size), input_ids)
        draw = self._sampler.draw(logits, sequences, ahead=1)
        return LaunchedStep(scheduled, draw, range(len(scheduled)))

    def replay_counts(self) -> tuple[int, Mapping[str, int]]:
        """How many steps were CUDA graphs, and how many were not though there are some, and why."""
        if self.graphs is None:
            return 0, {}
        stats = self.graphs.stats
        return stats.replayed, stats.eager

    def forget_recordings(self) -> None:
        """Drop recorded steps: the weights or the cache have moved."""
        if self.tapes is not None:
            self.tapes.clear()
        if self.graphs is not None:
            self.graphs.clear()

    def _run(
        self, scheduled: Sequence[Scheduled], *, adapted: bool = False
    ) -> list[SampledToken | None]:
        launched = self.launch(scheduled)
        if launched is not None:
            return launched.read()
        lists = lay_out(scheduled, block_size=self.block_size)
        logits = self.forward(lists, adapted=adapted)
        if any([item.sequence.request.raw_logits for item in scheduled]):
            return _with_prompt_logits(logits, scheduled)
        rows = [sampler_row(item.sequence) for item in scheduled if item.samples]
        drawn = sample(logits, rows) if rows else []
        if len(drawn) == len(scheduled):
            return [*drawn]
        rest = iter(drawn)
        return [next(rest) if item.samples else None for item in scheduled]

    def forward(
        self, lists: BatchLists, input_ids: Tensor | None = None, *, adapted: bool = False
    ) -> Tensor:
        """Run the model, recorded if it can be; `input_ids` if only the device knows them.

        Returns the logits, good until the next call. With `adapted` an adapter takes part.
        """
        logits = None
        if self.tapes is not None:
            logits = self.tapes.run(lists, adapted=adapted)
        elif self.graphs is not None:
            logits = self.graphs.run(lists, input_ids=input_ids, adapted=adapted)
        if logits is not None:
            return logits
        if self.transfers is None:
            return self._eager(lists.batch(self.device))
        return self._eager(_send(lists, input_ids, self.transfers))

    @torch.inference_mode()  # a replayed step has no use for it, and entering it takes a while
    def _eager(self, batch: Batch) -> Tensor:
        self.backend.plan(batch)
        return self.model(batch, self.backend)


def _tapes(runner: ModelRunner) -> StepTapes | None:
    fits = runner.transfers is None and runner.device.type == "cpu"
    fits = fits and runner.backend.supports_graphs
    return StepTapes(runner.model, runner.backend) if fits else None


def _transfers(runner: ModelRunner) -> Transfers | None:
    return CudaTransfers(runner.device) if runner.device.type == "cuda" else None


def _sampler(runner: ModelRunner) -> DeviceSampler | None:
    return None if runner.transfers is None else DeviceSampler(runner.transfers)


def _is_plain(item: Scheduled) -> bool:
    request = item.sequence.request
    return request.adapter is None and drawn_on_device(request)


def _send(lists: BatchLists, input_ids: Tensor | None, transfers: Transfers) -> Batch:
    """The batch on the device, in one copy."""
    parts = (lists.input_ids, lists.positions, lists.slot_mapping, lists.logits_indices)
    numbers = transfers.send(torch.tensor([*itertools.chain.from_iterable(parts)]))
    sent_ids, positions, slots, indices = numbers.split([len(part) for part in parts])
    return Batch(
        input_ids=sent_ids if input_ids is None else input_ids,
        positions=positions,
        slot_mapping=slots,
        logits_indices=indices,
        query_start=lists.query_start,
        seq_lens=lists.seq_lens,
        block_tables=lists.block_tables,
    )


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


def lay_out_next(sequences: Sequence[EngineSequence], *, block_size: int | None) -> BatchLists:
    """Lay out the decode of the token after each sequence's last, which is not known yet: 0."""
    assert block_size is not None, "only where keys and values are in blocks"
    count = len(sequences)
    positions = [len(sequence) for sequence in sequences]
    return BatchLists(
        input_ids=[0] * count,
        positions=positions,
        slot_mapping=[
            sequence.blocks[p // block_size] * block_size + p % block_size
            for sequence, p in zip(sequences, positions, strict=True)
        ],
        logits_indices=list(range(count)),
        query_start=list(range(count + 1)),
        seq_lens=[p + 1 for p in positions],
        block_tables=[
            sequence.blocks[: p // block_size + 1]
            for sequence, p in zip(sequences, positions, strict=True)
        ],
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
    rows = [sampler_row(item.sequence) for item, wants, _ in parts if item.samples and not wants]
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
