"""Chooses the next token of every sequence from the logits of one forward.

Each row is computed from its own logits, settings and history alone, and its one random number is a
hash of (seed, choice, position). So a token depends on nothing else: not on the neighbours in the
batch, their order, how the prompt was chunked, or whether the sequence was preempted.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.engine.request import LOWEST_LOGPROB, SampledToken, TokenLogprobs
from mistralrs_sdk.sampling_params import DrySamplingParams, SamplingParams

DRY_MATCH_CAP = 50
"""Longest repetition DRY looks for."""

_BLOCK = 256  # a draw finds its block of tokens first, then the token
_NUCLEUS = 1024  # tokens ranked for top-p; a row whose mass lies beyond ranks them all
_TIE_ROOM = 32  # tokens ranked past top-k, to see every tie at its edge
_HUGE = 1e38  # keeps a penalty, bias or temperature within float32
_BELOW_ONE = 1.0 - 2.0**-24


@attrs.define(slots=True, kw_only=True)
class SamplerRow:
    """What the sampler knows of the sequence behind one row of logits."""

    sampling: SamplingParams
    """Resolved: nothing that shapes the draw is None."""
    seed: int
    choice: int
    position: int
    """Index of the token to be drawn in its sequence: prompt length + tokens generated so far."""
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    dry_breakers: frozenset[int] = frozenset()


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SamplerRow]) -> list[SampledToken]:
    """Choose one token per row.

    logits is [rows, vocab] in float32 and is left as it was. The order is DRY, frequency and
    presence penalty, repetition penalty, logits bias, temperature, top-k, top-p of the mass top-k
    left, min-p, one draw; a greedy row takes the largest logit after the bias, the lowest id among
    equals. Log probabilities are those of the untouched logits. A row whose logits hold NaN or
    +inf, or exclude every token, gets an error; the others are not affected.

    Costs one host sync, one more if a row wants log probabilities, and one more in the rare case
    that a row's top-k or top-p reaches past the tokens ranked at first.
    """
    assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits for {len(rows)} rows"
    if not rows:
        return []
    if logits.device.type == "mps":
        logits = logits.cpu()  # the draw needs float64, which MPS lacks; its memory is shared
    logits = logits.float()
    tokens, errors = _choose(logits, rows)
    wanted = [
        i
        for i, row in enumerate(rows)
        if errors[i] is None and (row.sampling.return_logprobs or row.sampling.top_n_logprobs)
    ]
    logprobs: dict[int, TokenLogprobs] = {}
    if wanted:
        reported = _logprobs(
            _lines(logits, wanted),
            [tokens[i] for i in wanted],
            top_n=[rows[i].sampling.top_n_logprobs for i in wanted],
        )
        logprobs = dict(zip(wanted, reported, strict=True))
    return [
        SampledToken(-1 if errors[i] else tokens[i], logprobs=logprobs.get(i), error=errors[i])
        for i in range(len(rows))
    ]


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


def _choose(logits: Tensor, rows: Sequence[SamplerRow]) -> tuple[list[int], list[str | None]]:
    vocab = logits.shape[1]
    peak, best = logits.max(dim=-1)  # NaN and +inf come out on top
    settled = torch.ones_like(best, dtype=torch.bool)
    source: list[tuple[Tensor, int]] = [(logits, i) for i in range(len(rows))]
    edits = [i for i, row in enumerate(rows) if _edits_logits(row)]
    if edits:
        edited = logits[edits].contiguous()
        _edit(edited, [rows[i] for i in edits])
        peak[edits], best[edits] = edited.max(dim=-1)
        for line, i in enumerate(edits):
            source[i] = (edited, line)

    def draw(widths: dict[int, int]) -> None:
        groups: dict[tuple[bool, int], list[int]] = {}
        for i, width in widths.items():
            groups.setdefault((source[i][0] is logits, width), []).append(i)
        for (_, width), group in groups.items():
            x = _lines(source[group[0]][0], [source[i][1] for i in group])
            group_rows = [rows[i] for i in group]
            best[group], settled[group] = _draw(x, _lines(peak, group), group_rows, width=width)

    drawn = {
        i: _ranked_width(row, vocab) for i, row in enumerate(rows) if not row.sampling.is_greedy
    }
    draw(drawn)
    tokens, peaks, done = torch.stack([best.double(), peak.double(), settled.double()]).tolist()
    errors = [_complaint(value) for value in peaks]
    late = [i for i in drawn if not done[i] and errors[i] is None]
    if late:
        draw(dict.fromkeys(late, vocab))
        tokens = best.tolist()
    return [int(token) for token in tokens], errors


def _complaint(peak: float) -> str | None:
    """Why a row with this largest logit has no token, None if it has."""
    if math.isfinite(peak):
        return None
    if peak == -math.inf:
        return "no token can be chosen: every logit is -inf"
    return f"the model's logits hold {peak}: its weights or their number format overflow"


def _lines(matrix: Tensor, lines: list[int]) -> Tensor:
    # lines ascend, so as many as there are means all of them: no copy
    return matrix if len(lines) == matrix.shape[0] else matrix[lines]


def _edits_logits(row: SamplerRow) -> bool:
    params = row.sampling
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.logits_bias
        or (params.dry_params and params.dry_params.multiplier)
    )


def _edit(x: Tensor, rows: Sequence[SamplerRow]) -> None:
    """Apply penalties and bias to x [rows, vocab] in place; skip ids it lacks."""
    flat = x.view(-1)
    vocab = x.shape[1]
    losses: dict[int, float] = {}
    gains: dict[int, float] = {}
    seen: list[Tensor] = []
    factors: list[float] = []
    for line, row in enumerate(rows):
        params, start = row.sampling, line * vocab
        for token, loss in _losses(row).items():
            if token < vocab:
                losses[start + token] = _bounded(loss)
        if params.repetition_penalty != 1.0:
            ids = torch.tensor([*row.prompt_ids, *row.output_ids], dtype=torch.int64)
            seen.append(ids[ids < vocab] + start)
            factors.append(max(_bounded(_known(params.repetition_penalty)), 1 / _HUGE))
        for token, bias in (params.logits_bias or {}).items():
            if token < vocab:
                gains[start + token] = _bounded(bias)
    if losses:
        at, amount = _entries(losses, x)
        flat[at] -= amount
    if seen:
        at = torch.cat(seen).to(x.device)
        counts = torch.tensor([len(ids) for ids in seen])
        factor = torch.tensor(factors, dtype=x.dtype).repeat_interleave(counts).to(x.device)
        old = flat[at]
        # an id seen twice is written twice with the same value: penalised once
        flat[at] = torch.where(old > 0, old / factor, old * factor)
    if gains:
        at, amount = _entries(gains, x)
        flat[at] += amount


def _losses(row: SamplerRow) -> dict[int, float]:
    """What DRY, frequency and presence penalty subtract, by token."""
    params = row.sampling
    losses: dict[int, float] = {}
    if params.dry_params and params.dry_params.multiplier:
        context = [*row.prompt_ids, *row.output_ids]
        losses = dry_penalties(context, params.dry_params, breakers=row.dry_breakers)
    if params.frequency_penalty or params.presence_penalty:
        frequency, presence = _known(params.frequency_penalty), _known(params.presence_penalty)
        for token, count in Counter(row.output_ids).items():
            losses[token] = losses.get(token, 0.0) + count * frequency + presence
    return losses


def _known(value: float | None) -> float:
    assert value is not None, "the sampler takes resolved settings"
    return value


def _bounded(value: float) -> float:
    return max(-_HUGE, min(_HUGE, value))


def _entries(values: dict[int, float], like: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.tensor(list(values), dtype=torch.int64, device=like.device),
        torch.tensor(list(values.values()), dtype=like.dtype, device=like.device),
    )


def _top_k(row: SamplerRow, vocab: int) -> int:
    top_k = int(_known(row.sampling.top_k))
    return top_k if 0 < top_k < vocab else vocab


def _ranked_width(row: SamplerRow, vocab: int) -> int:
    """How many of the most likely tokens a row needs in order; 0 for none."""
    top_k = _top_k(row, vocab)
    if top_k < vocab:
        width = 1 << (top_k + _TIE_ROOM - 1).bit_length()  # few widths: few groups
        return min(width, vocab) if width <= _NUCLEUS else vocab
    return min(_NUCLEUS, vocab) if _known(row.sampling.top_p) < 1 else 0


def _draw(
    x: Tensor, peak: Tensor, rows: Sequence[SamplerRow], *, width: int
) -> tuple[Tensor, Tensor]:
    """Draw a token per row of x from its `width` best, from all of them if that is 0.

    The second result is False where a filter or a tie reaches past `width`: that token is void.
    """
    vocab = x.shape[1]
    settings = torch.tensor(
        [
            (
                min(_known(row.sampling.temperature), _HUGE),
                _top_k(row, vocab),
                row.sampling.top_p,
                min(_known(row.sampling.min_p), _BELOW_ONE),  # the most likely token always stays
                uniform(row.seed, row.choice, row.position),
            )
            for row in rows
        ],
        dtype=torch.float64,
        device=x.device,
    )
    temperature, limit, top_p, min_p, u = settings.split(1, dim=1)
    temperature, min_p = temperature.float(), min_p.float()
    if width == 0:
        weights = _weights(x, peak, temperature)
        if any(row.sampling.min_p for row in rows):
            weights.mul_(torch.gt(weights, min_p, out=torch.empty_like(weights)))
        return _pick(weights, u), torch.ones_like(u[:, 0], dtype=torch.bool)

    values, ids = _ranked(x, width)
    best = torch.exp((values - peak[:, None]) / temperature)
    through = best.cumsum(-1, dtype=torch.float64)
    mass = through.gather(1, limit.long().clamp(max=width) - 1)
    if any(_top_k(row, vocab) > width for row in rows):
        everything = _block_sums(_weights(x, peak, temperature)).sum(-1, keepdim=True)
        mass = torch.where(limit > width, everything, mass)
    rank = torch.arange(width, device=x.device)
    kept = (rank < limit) & (through - best < top_p * mass) & (best > min_p) | (rank == 0)
    edge = kept.sum(-1, keepdim=True)
    beyond = values[:, -1:] < values.gather(1, edge - 1)
    settled = (edge < width) & beyond | (width == vocab)
    place = _pick(_padded(best * kept), u).clamp(max=width - 1)  # a row of NaN may point past it
    return ids.gather(1, place[:, None])[:, 0], settled[:, 0]


def _ranked(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest values of each row and their ids, equals by lowest id first.

    If equal values straddle the end, which of them are in is not defined.
    """
    if width == x.shape[1]:
        return torch.sort(x, dim=-1, descending=True, stable=True)
    values, ids = x.topk(width, sorted=False)
    ids, order = ids.sort(-1)
    values, order = torch.sort(values.gather(1, order), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _weights(x: Tensor, peak: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Unnormalised probabilities, the largest being 1; zeros pad the row to whole blocks."""
    rows, vocab = x.shape
    padded = x.new_empty(rows, -(-vocab // _BLOCK) * _BLOCK)
    padded[:, vocab:] = 0.0
    # the peak goes first: dividing large logits by a tiny temperature would lose their difference
    body = torch.sub(x, peak[:, None], out=padded[:, :vocab])
    if temperature is not None:
        body /= temperature
    body.exp_()
    return padded


def _padded(weights: Tensor) -> Tensor:
    short = -weights.shape[1] % _BLOCK
    return torch.nn.functional.pad(weights, (0, short)) if short else weights


def _block_sums(weights: Tensor) -> Tensor:
    # sums of blocks are added the same way whatever the number of rows or threads
    return weights.view(weights.shape[0], -1, _BLOCK).sum(-1).double()


def _pick(weights: Tensor, u: Tensor) -> Tensor:
    """Invert the cumulative weights at u [rows, 1]: one index per row, never one of weight 0."""
    sums = _block_sums(weights)
    through = sums.cumsum(-1)
    target = u * through[:, -1:]
    block = _first_past(sums, through, target)
    inside = weights.view(weights.shape[0], -1, _BLOCK)
    inside = inside.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double()
    before = (through - sums).gather(1, block)
    token = _first_past(inside, inside.cumsum(-1), target - before)
    return (block * _BLOCK + token)[:, 0]


def _first_past(weights: Tensor, through: Tensor, target: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds the target; else the last possible one."""
    possible = weights > 0
    hit = possible & (through > target)
    first = hit.int().argmax(-1, keepdim=True)
    last = weights.shape[1] - 1 - possible.flip(-1).int().argmax(-1, keepdim=True)
    return torch.where(hit.any(-1, keepdim=True), first, last)


def _logprobs(x: Tensor, tokens: Sequence[int], *, top_n: Sequence[int]) -> list[TokenLogprobs]:
    peak = x.amax(dim=-1)
    total = _block_sums(_weights(x, peak)).sum(-1, keepdim=True)
    normaliser = peak[:, None].double() + total.log()
    chosen = x.gather(1, torch.tensor(tokens, device=x.device)[:, None])
    width = min(max(top_n), x.shape[1])
    values, ids = _ranked(x, min(width + _TIE_ROOM, x.shape[1]))
    reported = torch.cat([chosen, values[:, :width]], dim=1).double() - normaliser
    reported = reported.clamp(LOWEST_LOGPROB, 0.0)
    lines = torch.cat([reported, ids[:, :width].double()], dim=1).tolist()
    return [
        TokenLogprobs(
            token_id=token,
            logprob=line[0],
            top=tuple(
                (int(line[1 + width + rank]), line[1 + rank]) for rank in range(min(n, width))
            ),
        )
        for line, token, n in zip(lines, tokens, top_n, strict=True)
    ]
