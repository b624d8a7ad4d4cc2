"""Chooses the next token of every sequence from the logits of one forward.

Each row is computed from its own logits, settings and history alone, and its one random number is a
hash of (seed, choice, position). So a token depends on nothing else: not on the neighbours in the
batch, their order, how the prompt was chunked, or whether the sequence was preempted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.engine.changed_rows import change_rows
from mistralrs_sdk.engine.request import LOWEST_LOGPROB, SampledToken, TokenLogprobs
from mistralrs_sdk.kernels import elementwise, sampling
from mistralrs_sdk.kernels.sampling import Amounts, Draw
from mistralrs_sdk.sampling_params import DrySamplingParams, SamplingParams

if TYPE_CHECKING:
    from mistralrs_sdk.constraints.matcher import Matcher

DRY_MATCH_CAP = 50
"""Longest repetition DRY looks for."""

_HUGE = 1e38  # keeps a penalty, bias or temperature within float32
_FAR = 1e30  # keeps a score that is divided by it, or multiplied with it, within float32
_BELOW_ONE = 1.0 - 2.0**-24
_MOST = 2**31  # no vocabulary has so many tokens


@attrs.define(slots=True, kw_only=True, on_setattr=attrs.setters.NO_OP)
class SamplerRow:
    """What the sampler knows of the sequence behind one row of logits.

    It may be kept from step to step (`advance`): what the penalties need is then added up once.
    """

    sampling: SamplingParams
    """Resolved: nothing that shapes the draw is None."""
    seed: int
    choice: int
    position: int
    """Index of the token to be drawn in its sequence: prompt length + tokens generated so far."""
    prompt_ids: Sequence[int]
    output_ids: list[int] = attrs.field(converter=list)
    dry_breakers: frozenset[int] = frozenset()
    matcher: Matcher | None = None
    """Of a constrained sequence, in step with its output; only read here."""
    processors: tuple[Callable[[Any, Sequence[int]], Any], ...] = ()
    """Each gets the row and all ids so far, and returns the row to go on with."""
    _drawing: _Drawing | None = attrs.field(default=None, init=False, eq=False, repr=False)

    @property
    def reports(self) -> bool:
        """Whether log probabilities are wanted."""
        return self.sampling.return_logprobs or self.sampling.top_n_logprobs > 0

    def advance(self, tokens: Sequence[int]) -> None:
        """Be about the token that follows `tokens`, prompt and output: more than there were."""
        output_ids = self.output_ids
        output_ids.extend(tokens[len(self.prompt_ids) + len(output_ids) :])
        self.position = len(tokens)


def sample(logits: Tensor, rows: Sequence[SamplerRow]) -> list[SampledToken]:
    """Choose one token per row.

    logits is [rows, vocab] in float32; rows with processors or a constraint are overwritten, the
    others left as they were. The order is DRY, frequency and presence penalty, repetition penalty,
    logits bias, logits processors, constraint, temperature, top-k, top-p of the mass top-k left,
    min-p, one draw; a greedy row takes the largest logit before the temperature, the lowest id
    among equals. Log probabilities are those of the untouched logits. A row whose logits hold NaN
    or +inf, or exclude every token, or whose processor or constraint fails, gets an error; the
    others are not affected.

    Costs one host sync, one more if a row wants log probabilities, and one more in the rare case
    that a row's top-k or top-p reaches past the tokens ranked at first.
    """
    if not rows:
        return []
    native = elementwise.usable(logits)
    if not native:
        if logits.device.type == "mps":
            logits = logits.cpu()  # the draw needs float64, which MPS lacks; its memory is shared
        logits = logits.float()
        native = elementwise.usable(logits)
        assert native or len(logits) == len(rows), f"{len(logits)} rows of logits for {len(rows)}"
    draws = [_draw(row) for row in rows]
    changed = [i for i, row in enumerate(rows) if row.matcher is not None or row.processors]
    raw = {i: logits[i].clone() for i in changed if rows[i].reports}
    errors = change_rows(logits, rows, lines=changed, draws=draws) if changed else {}
    tokens, peaks = (sampling.draw if native else sampling.draw_reference)(logits, draws)
    drawn = [
        SampledToken(token) if math.isfinite(peak) else SampledToken(-1, error=complaint(peak))
        for token, peak in zip(tokens, peaks, strict=True)
    ]
    for i, error in errors.items():
        drawn[i] = SampledToken(-1, error=error)
    if raw:
        _put_back(logits, raw)
    wanted = [i for i, row in enumerate(rows) if row.reports and drawn[i].error is None]
    if wanted:
        for i, logprobs in _logprobs(logits, wanted, rows=rows, tokens=tokens, native=native):
            drawn[i] = attrs.evolve(drawn[i], logprobs=logprobs)
    return drawn


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number of one token: in [0, 1), 53 bits, the same on every machine."""
    digest = hashlib.blake2b(f"{seed},{choice},{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def dry_penalties(
    context: Sequence[int], params: DrySamplingParams, *, breakers: frozenset[int] = frozenset()
) -> dict[int, float]:
    """What DRY subtracts from each token that would continue a repetition of the context's end.

    The end matches an earlier place over `match` tokens, at most 50, none but the last of them a
    breaker. The token that followed there loses multiplier * base ** (match - allowed_length),
    unless the match is shorter than allowed_length or the token is itself a breaker.
    """
    if params.multiplier == 0 or not context:
        return {}
    last = context[-1]
    longest: dict[int, int] = {}
    for at in [i for i, token in enumerate(context) if token == last][:-1]:
        candidate = context[at + 1]
        known = longest.get(candidate, 0)
        if candidate in breakers or known == DRY_MATCH_CAP:
            continue
        match = 1
        while match < DRY_MATCH_CAP and match <= at:
            token = context[-1 - match]
            if token != context[at - match] or token in breakers:
                break
            match += 1
        longest[candidate] = max(known, match)
    rate = math.log(params.base)
    return {
        token: params.multiplier * math.exp(min((match - params.allowed_length) * rate, 80.0))
        for token, match in longest.items()
        if match >= params.allowed_length
    }


@torch.inference_mode()
def _put_back(logits: Tensor, raw: Mapping[int, Tensor]) -> None:
    """Undo what was done to these rows: their log probabilities are of the model's own logits."""
    for i, row in raw.items():
        logits[i] = row


def complaint(peak: float) -> str:
    """Why a row with this largest logit has no token."""
    if peak == -math.inf:
        return "no token can be chosen: every logit is -inf"
    return f"the model's logits hold {peak}: its weights or their number format overflow"


@attrs.define(eq=False)
class _Drawing:
    """A row's draw, and what it takes to keep its penalties in step with the output."""

    draw: Draw
    num_seen: int = 0
    """Tokens of the output that are part of it."""
    known: set[int] = attrs.field(factory=set)
    """Those in `draw.seen`."""
    places: dict[int, int] = attrs.field(factory=dict)
    """Where each token of the output is in `counts`, and without DRY in `draw.losses`."""
    counts: list[int] = attrs.field(factory=list)


def _draw(row: SamplerRow) -> Draw:
    """The draw of a row's next token."""
    params = row.sampling
    drawing = row._drawing
    if drawing is None:
        drawing = row._drawing = _Drawing(first_draw(params))
        if params.repetition_penalty != 1.0:
            _see(drawing, row.prompt_ids)
    draw = drawing.draw
    new = row.output_ids[drawing.num_seen :]
    drawing.num_seen += len(new)
    if params.repetition_penalty != 1.0:
        _see(drawing, new)
    dry = params.dry_params if params.dry_params and params.dry_params.multiplier else None
    if params.frequency_penalty or params.presence_penalty:
        _count(drawing, new)
        if dry is None:
            _charge(drawing, new, params)
    if dry is not None:
        context = [*row.prompt_ids, *row.output_ids]
        losses = dry_penalties(context, dry, breakers=row.dry_breakers)
        for token, count in zip(drawing.places, drawing.counts, strict=True):
            losses[token] = losses.get(token, 0.0) + _loss(count, params)
        draw.losses = _amounts(losses.items())
    if draw.temperature:
        draw.u = uniform(row.seed, row.choice, row.position)
    return draw


def first_draw(params: SamplingParams) -> Draw:
    """What does not change from token to token."""
    bias = params.logits_bias or {}
    return Draw(
        repetition=max(1 / _FAR, min(_FAR, _known(params.repetition_penalty))),
        gains=_amounts((token, amount) for token, amount in bias.items() if token < _MOST),
        temperature=0.0 if params.is_greedy else min(_known(params.temperature), _HUGE),
        top_k=min(int(_known(params.top_k)), _MOST),
        top_p=_known(params.top_p),
        min_p=min(_known(params.min_p), _BELOW_ONE),  # the most likely token always stays
    )


def _see(drawing: _Drawing, tokens: Iterable[int]) -> None:
    known, seen = drawing.known, drawing.draw.seen
    for token in tokens:
        if token not in known:
            known.add(token)
            seen.append(token)


def _count(drawing: _Drawing, tokens: Iterable[int]) -> None:
    places, counts = drawing.places, drawing.counts
    for token in tokens:
        if token in places:
            counts[places[token]] += 1
        else:
            places[token] = len(counts)
            counts.append(1)


def _charge(drawing: _Drawing, tokens: Iterable[int], params: SamplingParams) -> None:
    """Bring the losses of tokens that were counted up to date."""
    losses = drawing.draw.losses
    for token in tokens:
        place = drawing.places[token]
        loss = _bounded(_loss(drawing.counts[place], params))
        if place < len(losses.ids):
            losses.values[place] = loss
        else:
            losses.append(token, loss)


def _loss(count: int, params: SamplingParams) -> float:
    """What frequency and presence penalty subtract from a token that occurred."""
    return count * _known(params.frequency_penalty) + _known(params.presence_penalty)


def _amounts(amounts: Iterable[tuple[int, float]]) -> Amounts:
    return Amounts.of((token, _bounded(amount)) for token, amount in amounts)


def _known(value: float | None) -> float:
    assert value is not None, "the sampler takes resolved settings"
    return value


def _bounded(value: float) -> float:
    return max(-_HUGE, min(_HUGE, value))


def _logprobs(
    logits: Tensor,
    lines: list[int],
    *,
    rows: Sequence[SamplerRow],
    tokens: Sequence[int],
    native: bool,
) -> Iterator[tuple[int, TokenLogprobs]]:
    """The rows of these numbers, and what each reports about its token."""
    top_n = [rows[i].sampling.top_n_logprobs for i in lines]
    width = min(max(top_n), logits.shape[1])
    chosen = [tokens[i] for i in lines]
    reported = (sampling.logprobs if native else sampling.logprobs_reference)(
        logits, lines, tokens=chosen, top=width, lowest=LOWEST_LOGPROB
    )
    for line, token, n, values in zip(lines, chosen, top_n, reported, strict=True):
        n = min(n, width)
        ids = map(int, values[1 + width : 1 + width + n])
        top = tuple(zip(ids, values[1 : 1 + n], strict=True))
        yield line, TokenLogprobs(token_id=token, logprob=values[0], top=top)
