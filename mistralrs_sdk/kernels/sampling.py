"""Drawing tokens from rows of scores, and their log probabilities, with references in torch."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.kernels import native
from mistralrs_sdk.kernels.row_draws import (
    TIE_ROOM,
    block_sums,
    draw_rows,
    ranked,
    ranked_width,
    weights,
)

_ROW = struct.Struct("dddddqPPqPqPPq")
"""A `Draw` as `src/sampling.cpp` reads it."""
_NO_EDITS = (0,) * 8


@attrs.define(eq=False)
class Amounts:
    """A number for each of some token ids, none of them twice."""

    ids: array[int] = attrs.field(factory=lambda: array("q"))
    values: array[float] = attrs.field(factory=lambda: array("f"))

    @classmethod
    def of(cls, amounts: Iterable[tuple[int, float]]) -> Amounts:
        made = cls()
        for token, value in amounts:
            made.append(token, value)
        return made

    def append(self, token: int, value: float) -> None:
        self.ids.append(token)
        self.values.append(value)


@attrs.define(kw_only=True, eq=False)
class Draw:
    """What the token drawn from one row depends on, besides the row's scores.

    The edits come first, in the order they have here. Ids that are not in the row are skipped.
    """

    losses: Amounts = attrs.field(factory=Amounts)
    """Subtracted."""
    seen: array[int] = attrs.field(factory=lambda: array("q"))
    """Ids, none twice: positive scores are divided by `repetition`, others multiplied with it."""
    repetition: float = 1.0
    gains: Amounts = attrs.field(factory=Amounts)
    """Added."""
    temperature: float = 0.0
    """At least 1e-7; or 0, which takes the greatest score, the lowest id among equals."""
    top_k: int = 0
    """Keep so many of the best; 0 keeps all."""
    top_p: float = 1.0
    """Keep the best until they hold this share of what top-k left, at least one."""
    min_p: float = 0.0
    """Keep those more likely than this times the best one; below 1."""
    u: float = 0.0
    """The random number, in [0, 1)."""

    def kept_at_most(self, vocab: int) -> int:
        """How many tokens top-k leaves."""
        return self.top_k if 0 < self.top_k < vocab else vocab

    @property
    def edits(self) -> bool:
        """Whether any score is changed."""
        return bool(self.losses.ids or self.seen or self.gains.ids)


def draw(
    scores: Tensor, draws: Sequence[Draw], *, num_threads: int | None = None
) -> tuple[list[int], list[float]]:
    """Draw a token from each row of scores [rows, size] float32, dense but for the row stride.

    Returns the tokens, and the greatest score of each row after the edits. Where that is not
    finite, NaN being greater than all else, the token is void. `num_threads` defaults to torch's.

    Raises:
        ValueError: the scores are something else, or not a row for each of the draws.
    """
    stride = _row_stride(scores, rows=len(draws))
    table = array("b", b"".join([_pack(item) for item in draws]))
    out = array("d", bytes(16 * len(draws)))
    native.call(
        "mistralrs_draw",
        scores.data_ptr(),
        stride,
        len(draws),
        scores.shape[1],
        table.buffer_info()[0],
        out.buffer_info()[0],
        num_threads or torch.get_num_threads(),
    )
    return [int(token) for token in out[::2]], list(out[1::2])


def logprobs(
    scores: Tensor,
    lines: Sequence[int],
    *,
    tokens: Sequence[int],
    top: int,
    lowest: float,
    num_threads: int | None = None,
) -> list[list[float]]:
    """Natural logs of the softmax of some `lines` of scores [rows, size] float32, as in `draw`.

    Returns for each line that of its token, those of the `top` greatest scores, and the ids of
    these, best first, equals by id. None is below `lowest`; a line that is not finite is void.

    Raises:
        ValueError: the scores are something else, there are fewer than `top` in a row, or a line or
            token is not in them.
    """
    stride = _row_stride(scores, rows=scores.shape[0])
    rows, size = scores.shape
    if top > size or len(tokens) != len(lines):
        raise ValueError(
            f"{len(tokens)} tokens for {len(lines)} lines, and the {top} best of {size} scores: "
            "each line needs a token, and there can be no more best ones than scores"
        )
    for name, numbers, end in (("line", lines, rows), ("token", tokens, size)):
        if numbers and not (min(numbers) >= 0 and max(numbers) < end):
            raise ValueError(f"a {name} of {numbers} is not in scores {list(scores.shape)}")
    where, which = array("q", lines), array("q", tokens)
    width = 1 + 2 * top
    out = array("d", bytes(8 * width * len(lines)))
    native.call(
        "mistralrs_logprobs",
        scores.data_ptr(),
        stride,
        size,
        where.buffer_info()[0],
        which.buffer_info()[0],
        len(lines),
        top,
        lowest,
        out.buffer_info()[0],
        num_threads or torch.get_num_threads(),
    )
    return [list(out[i : i + width]) for i in range(0, len(out), width)]


@torch.inference_mode()
def draw_reference(
    scores: Tensor, draws: Sequence[Draw], *, num_threads: int | None = None
) -> tuple[list[int], list[float]]:
    """What `draw` does, in torch on any device, up to the rounding of the exponentials.

    Costs one host sync, and one more in the rare case that a row's top-k or top-p reaches past the
    tokens ranked at first.
    """
    vocab = scores.shape[1]
    peak, best = scores.max(dim=-1)  # NaN and +inf come out on top
    settled = torch.ones_like(best, dtype=torch.bool)
    source: list[tuple[Tensor, int]] = [(scores, i) for i in range(len(draws))]
    edits = [i for i, item in enumerate(draws) if item.edits]
    if edits:
        edited = scores[edits].contiguous()
        _edit(edited, [draws[i] for i in edits])
        peak[edits], best[edits] = edited.max(dim=-1)
        for line, i in enumerate(edits):
            source[i] = (edited, line)

    def choose(widths: dict[int, int]) -> None:
        groups: dict[tuple[bool, int], list[int]] = {}
        for i, width in widths.items():
            groups.setdefault((source[i][0] is scores, width), []).append(i)
        for (_, width), group in groups.items():
            x = _lines(source[group[0]][0], [source[i][1] for i in group])
            settings = [draws[i] for i in group]
            best[group], settled[group] = _draw(x, _lines(peak, group), settings, width=width)

    drawn = {
        i: ranked_width(item.top_k, item.top_p, vocab=vocab)
        for i, item in enumerate(draws)
        if item.temperature
    }
    choose(drawn)
    tokens, peaks, done = torch.stack([best.double(), peak.double(), settled.double()]).tolist()
    late = [i for i in drawn if not done[i] and abs(peaks[i]) < float("inf")]
    if late:
        choose(dict.fromkeys(late, vocab))
        tokens = best.tolist()
    return [int(token) for token in tokens], peaks


@torch.inference_mode()
def logprobs_reference(
    scores: Tensor,
    lines: Sequence[int],
    *,
    tokens: Sequence[int],
    top: int,
    lowest: float,
    num_threads: int | None = None,
) -> list[list[float]]:
    """What `logprobs` does, in torch on any device, at the cost of one host sync."""
    x = _lines(scores, list(lines))
    peak = x.amax(dim=-1)
    total = block_sums(weights(x, peak)).sum(-1, keepdim=True)
    normaliser = peak[:, None].double() + total.log()
    chosen = x.gather(1, torch.tensor(tokens, device=x.device)[:, None])
    values, ids = ranked(x, min(top + TIE_ROOM, x.shape[1]))
    reported = torch.cat([chosen, values[:, :top]], dim=1).double() - normaliser
    reported = reported.clamp(lowest, 0.0)
    return torch.cat([reported, ids[:, :top].double()], dim=1).tolist()


def _row_stride(scores: Tensor, *, rows: int) -> int:
    shape, strides = scores.shape, scores.stride()
    if (
        len(shape) != 2
        or shape[0] != rows
        or not shape[1]
        or (strides[1] != 1 and shape[1] > 1)
        or scores.dtype is not torch.float32
        or not scores.is_cpu
    ):
        raise ValueError(
            f"scores {list(shape)} ({scores.dtype} on {scores.device}, strides {strides}) must be "
            f"float32 on the CPU: {rows} rows of at least one column, each dense"
        )
    return strides[0]


def _pack(item: Draw) -> bytes:
    losses, seen, gains = item.losses, item.seen, item.gains
    edits = _NO_EDITS
    if losses.ids or seen or gains.ids:
        if len(losses.ids) != len(losses.values) or len(gains.ids) != len(gains.values):
            raise ValueError("losses and gains need a value for each id, and no more")
        edits = (
            losses.ids.buffer_info()[0],
            *losses.values.buffer_info(),
            *seen.buffer_info(),
            gains.ids.buffer_info()[0],
            *gains.values.buffer_info(),
        )
    return _ROW.pack(
        item.temperature,
        item.top_p,
        item.min_p,
        item.u,
        item.repetition,
        item.top_k,
        *edits,
    )


def _lines(matrix: Tensor, lines: list[int]) -> Tensor:
    # lines ascend, so as many as there are means all of them: no copy
    return matrix if len(lines) == matrix.shape[0] else matrix[lines]


def _edit(x: Tensor, draws: Sequence[Draw]) -> None:
    """Edit x [rows, vocab] in place."""
    flat = x.view(-1)
    at, amounts = _entries(x, [(item.losses.ids, item.losses.values) for item in draws])
    flat[at] -= amounts
    at, factor = _entries(
        x, [(item.seen, array("f", [item.repetition]) * len(item.seen)) for item in draws]
    )
    old = flat[at]
    flat[at] = torch.where(old > 0, old / factor, old * factor)
    at, amounts = _entries(x, [(item.gains.ids, item.gains.values) for item in draws])
    flat[at] += amounts


def _entries(x: Tensor, edits: Sequence[tuple[array[int], array[float]]]) -> tuple[Tensor, Tensor]:
    """The places in x.view(-1) of all ids that it has, and their amounts."""
    vocab = x.shape[1]
    places, amounts = array("q"), array("f")
    for line, (ids, values) in enumerate(edits):
        for token, value in zip(ids, values, strict=True):
            if 0 <= token < vocab:
                places.append(line * vocab + token)
                amounts.append(value)
    return (
        torch.tensor(places, dtype=torch.int64, device=x.device),
        torch.tensor(amounts, dtype=x.dtype, device=x.device),
    )


def _draw(x: Tensor, peak: Tensor, draws: Sequence[Draw], *, width: int) -> tuple[Tensor, Tensor]:
    """As `draw_rows`, by the settings of `draws`."""
    limits = [item.kept_at_most(x.shape[1]) for item in draws]
    table = torch.tensor(
        [
            (item.temperature, limit, item.top_p, item.min_p, item.u)
            for item, limit in zip(draws, limits, strict=True)
        ],
        dtype=torch.float64,
        device=x.device,
    )
    return draw_rows(
        x,
        peak,
        table,
        width=width,
        filters=any([item.min_p for item in draws]),
        passes=max(limits) > width,
    )
