"""What the sampler is told of the sequences in a step, kept from one step to the next."""

from __future__ import annotations

from mistralrs_sdk.engine.sampler import SamplerRow
from mistralrs_sdk.engine.sequence import Sequence


def sampler_row(sequence: Sequence) -> SamplerRow:
    """The sequence's row, brought up to date; it lives as long as the sequence."""
    row = sequence.sampler_row
    if row is None:
        request = sequence.request
        row = sequence.sampler_row = SamplerRow(
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
    row.advance(sequence.tokens)
    return row
