"""Draws tokens where the logits are, without waiting: the next step can start from them there.

The arithmetic and the random numbers are those of `sampler.sample`, and so are the tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.engine.request import Request, SampledToken
from mistralrs_sdk.engine.sampler import complaint, first_draw, sample, uniform
from mistralrs_sdk.engine.sampler_rows import sampler_row
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from mistralrs_sdk.engine.transfers import Fetched, Transfers
from mistralrs_sdk.kernels.row_draws import draw_rows, ranked_width
from mistralrs_sdk.kernels.sampling import Draw


def drawn_on_device(request: Request) -> bool:
    """Whether nothing but temperature, top-k, top-p, min-p and the seed shapes the draw.

    Penalties, biases, processors and constraints need what the host knows, and log probabilities
    are a second thing to read.
    """
    params = request.sampling
    return not (
        request.raw_logits
        or request.constraint is not None
        or request.logits_processors
        or params.return_logprobs
        or params.top_n_logprobs
        or params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.logits_bias
        or (params.dry_params is not None and params.dry_params.multiplier)
    )


class DeviceSampler:
    """Draws for sequences that `drawn_on_device` is true of."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._settings: dict[int, Draw] = {}
        """Of the sequences of the last draw."""

    @torch.inference_mode()
    def draw(
        self, logits: Tensor, sequences: Sequence[EngineSequence], *, ahead: int = 0
    ) -> DeviceDraw:
        """Start drawing the token that follows each sequence and `ahead` more unknown ones.

        logits is [sequences, vocab] float32.
        """
        known = self._settings
        self._settings = {
            s.id: known.get(s.id) or first_draw(s.request.sampling) for s in sequences
        }
        peak, tokens = logits.max(dim=-1)  # NaN and +inf come out on top
        settled = torch.ones_like(tokens, dtype=torch.bool)
        vocab = logits.shape[1]
        groups: dict[int, list[int]] = {}
        for i, item in enumerate(self._settings.values()):
            if item.temperature:
                width = ranked_width(item.top_k, item.top_p, vocab=vocab)
                groups.setdefault(width, []).append(i)
        if groups:
            table = self._transfers.send(self._table(groups, sequences, ahead=ahead, vocab=vocab))
            parts = table.split([len(lines) for lines in groups.values()])
            for (width, lines), part in zip(groups.items(), parts, strict=True):
                settings = [self._settings[sequences[i].id] for i in lines]
                at = part[:, 0].long()
                # lines ascend, so as many as there are means all of them: no copy
                whole = len(lines) == len(sequences)
                drawn, sure = draw_rows(
                    logits if whole else logits.index_select(0, at),
                    peak if whole else peak.index_select(0, at),
                    part[:, 1:],
                    width=width,
                    filters=any([item.min_p for item in settings]),
                    passes=any([item.kept_at_most(vocab) > width for item in settings]),
                )
                tokens.index_copy_(0, at, drawn)
                settled.index_copy_(0, at, sure)
            tokens.clamp_(max=vocab - 1)  # a row of NaN may point past it, and is embedded yet
        report = torch.stack([tokens.double(), peak.double(), settled.double()])
        ranked = [i for width, lines in groups.items() if width for i in lines]
        return DeviceDraw(
            tokens=tokens,
            sequences=sequences,
            ranked={i: i for i in ranked},
            logits=logits,
            fetched=self._transfers.fetch(report),
            transfers=self._transfers,
        )

    def _table(
        self,
        groups: Mapping[int, Sequence[int]],
        sequences: Sequence[EngineSequence],
        *,
        ahead: int,
        vocab: int,
    ) -> Tensor:
        """A line for each row that is not greedy: its number, and what `draw_rows` takes."""
        numbers = array("d")
        for lines in groups.values():
            for i in lines:
                sequence = sequences[i]
                item = self._settings[sequence.id]
                limit = item.kept_at_most(vocab)
                u = uniform(sequence.request.seed, sequence.choice, len(sequence) + ahead)
                numbers.extend((i, item.temperature, limit, item.top_p, item.min_p, u))
        return torch.frombuffer(numbers, dtype=torch.float64).view(-1, 6)


@attrs.define(kw_only=True, eq=False)
class DeviceDraw:
    """Tokens that are being drawn."""

    tokens: Tensor
    """[rows] int64 on the device; some may be void, which only `read` knows."""
    sequences: Sequence[EngineSequence]
    ranked: Mapping[int, int]
    """The rows that may have to be drawn again, and where each is in `logits`."""
    logits: Tensor
    fetched: Fetched
    """Tokens, greatest logits and whether each token is final, [3, rows] float64."""
    transfers: Transfers
    redone: frozenset[int] = frozenset()
    """After `read`: the rows whose token on the device was void and is another one now."""

    @torch.inference_mode()
    def keep_logits(self) -> None:
        """Copy what may be needed of the logits: the next step overwrites them."""
        if self.ranked:
            places = torch.tensor(list(self.ranked.values()))
            self.logits = self.logits.index_select(0, self.transfers.send(places))
            self.ranked = {row: i for i, row in enumerate(self.ranked)}

    def read(self) -> list[SampledToken]:
        """Wait for the tokens. Each sequence must end just before its own by then."""
        tokens, peaks, settled = self.fetched.wait().tolist()
        drawn = [
            SampledToken(int(token))
            if math.isfinite(peak)
            else SampledToken(-1, error=complaint(peak))
            for token, peak in zip(tokens, peaks, strict=True)
        ]
        late = [i for i in self.ranked if not settled[i] and math.isfinite(peaks[i])]
        if late:
            places = torch.tensor([self.ranked[i] for i in late])
            rows = [sampler_row(self.sequences[i]) for i in late]
            again = sample(self.logits.index_select(0, self.transfers.send(places)), rows)
            for i, token in zip(late, again, strict=True):
                drawn[i] = token
            self.redone = frozenset(late)
        return drawn
