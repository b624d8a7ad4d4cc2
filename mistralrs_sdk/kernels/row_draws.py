"""Draws from rows of scores in torch, on any device: nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
"""Tokens of a block: a draw finds its block first, then the token."""
NUCLEUS = 1024
"""Tokens that are ranked for top-p; a row whose mass lies beyond has to rank them all."""
TIE_ROOM = 32
"""Tokens that are ranked past top-k, to see every tie at its edge."""


def ranked_width(top_k: int, top_p: float, *, vocab: int) -> int:
    """How many of the most likely tokens a row needs in order, 0 for none; `top_k` 0 is off."""
    if 0 < top_k < vocab:
        width = 1 << (top_k + TIE_ROOM - 1).bit_length()  # few widths: few groups
        return min(width, vocab) if width <= NUCLEUS else vocab
    return min(NUCLEUS, vocab) if top_p < 1 else 0


def draw_rows(
    x: Tensor, peak: Tensor, table: Tensor, *, width: int, filters: bool, passes: bool
) -> tuple[Tensor, Tensor]:
    """Draw a token per row of x from its `width` best, from all of them if that is 0.

    x is [rows, vocab] float32 and `peak` the greatest of each row. `table` is [rows, 5] float64 on
    their device: temperature, how many to keep (all of them without top-k), top-p, min-p and the
    random number. `filters` says that some row has a min-p, `passes` that some row keeps more than
    `width`. The second result is False where a filter or a tie reaches past `width`: that token is
    void.
    """
    vocab = x.shape[1]
    temperature, limit, top_p, min_p, u = table.split(1, dim=1)
    temperature, min_p = temperature.float(), min_p.float()
    if width == 0:
        mass = weights(x, peak, temperature)
        if filters:
            mass.mul_(torch.gt(mass, min_p, out=torch.empty_like(mass)))
        return pick(mass, u), torch.ones_like(u[:, 0], dtype=torch.bool)

    values, ids = ranked(x, width)
    best = torch.exp((values - peak[:, None]) / temperature)
    through = best.cumsum(-1, dtype=torch.float64)
    total = through.gather(1, limit.long().clamp(max=width) - 1)
    if passes:
        everything = block_sums(weights(x, peak, temperature)).sum(-1, keepdim=True)
        total = torch.where(limit > width, everything, total)
    rank = torch.arange(width, device=x.device)
    kept = (rank < limit) & (through - best < top_p * total) & (best > min_p) | (rank == 0)
    edge = kept.sum(-1, keepdim=True)
    beyond = values[:, -1:] < values.gather(1, edge - 1)
    settled = (edge < width) & beyond | (width == vocab)
    place = pick(_padded(best * kept), u).clamp(max=width - 1)  # a row of NaN may point past it
    return ids.gather(1, place[:, None])[:, 0], settled[:, 0]


def ranked(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest values of each row and their ids, equals by lowest id first.

    If equal values straddle the end, which of them are in is not defined.
    """
    if width == x.shape[1]:
        return torch.sort(x, dim=-1, descending=True, stable=True)
    values, ids = x.topk(width, sorted=False)
    ids, order = ids.sort(-1)
    values, order = torch.sort(values.gather(1, order), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def weights(x: Tensor, peak: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Unnormalised probabilities, the largest being 1; zeros pad the row to whole blocks."""
    rows, vocab = x.shape
    padded = x.new_empty(rows, -(-vocab // BLOCK) * BLOCK)
    padded[:, vocab:] = 0.0
    # the peak goes first: dividing large logits by a tiny temperature would lose their difference
    body = torch.sub(x, peak[:, None], out=padded[:, :vocab])
    if temperature is not None:
        body /= temperature
    body.exp_()
    return padded


def block_sums(mass: Tensor) -> Tensor:
    """The sum of each block of weights, [rows, blocks] float64."""
    # sums of blocks are added the same way whatever the number of rows or threads
    return mass.view(mass.shape[0], -1, BLOCK).sum(-1).double()


def pick(mass: Tensor, u: Tensor) -> Tensor:
    """Invert the cumulative weights at u [rows, 1]: one index per row, never one of weight 0."""
    sums = block_sums(mass)
    through = sums.cumsum(-1)
    target = u * through[:, -1:]
    block = _first_past(sums, through, target)
    inside = mass.view(mass.shape[0], -1, BLOCK)
    inside = inside.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double()
    before = (through - sums).gather(1, block)
    token = _first_past(inside, inside.cumsum(-1), target - before)
    return (block * BLOCK + token)[:, 0]


def _padded(mass: Tensor) -> Tensor:
    short = -mass.shape[1] % BLOCK
    return torch.nn.functional.pad(mass, (0, short)) if short else mass


def _first_past(mass: Tensor, through: Tensor, target: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds the target; else the last possible one."""
    possible = mass > 0
    hit = possible & (through > target)
    first = hit.int().argmax(-1, keepdim=True)
    last = mass.shape[1] - 1 - possible.flip(-1).int().argmax(-1, keepdim=True)
    return torch.where(hit.any(-1, keepdim=True), first, last)
