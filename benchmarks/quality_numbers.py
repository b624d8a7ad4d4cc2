"""The arithmetic of `quality.py`: how far two models' predictions are apart, and its limits."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

_ROWS = 64
"""Positions compared at once: float64 takes twice the memory."""


@attrs.frozen(eq=False)
class Differences:
    """Position by position, how two predictions differ."""

    kl: Tensor
    """[positions] float64: Kullback-Leibler divergence of the reference from the other, in nats."""
    same: Tensor
    """[positions] bool: whether the likeliest token is the same."""


@attrs.frozen(kw_only=True)
class Distance:
    """How far predictions are from those of a reference, over all positions of the text."""

    kl: float
    """Mean divergence."""
    kl_p99: float
    """The divergence that one position of a hundred exceeds."""
    top1: float
    """Part of the positions where the likeliest token is the same."""
    positions: int


@attrs.frozen(kw_only=True)
class Limit:
    """What a distance must keep."""

    kl: float
    top1: float = 0.0

    def holds(self, distance: Distance) -> bool:
        """Whether it does; a divergence that is not a number does not."""
        return distance.kl <= self.kl and distance.top1 >= self.top1


@attrs.frozen(kw_only=True)
class Comparison:
    """One line of the result."""

    what: str
    against: str
    distance: Distance
    limit: Limit | None = None

    @property
    def passes(self) -> bool | None:
        """None without a limit."""
        return None if self.limit is None else self.limit.holds(self.distance)


def compare(reference: Tensor, logits: Tensor) -> Differences:
    """Compare the logits [positions, vocabulary] of a reference and of another model."""
    kl = []
    for expected, found in zip(reference.split(_ROWS), logits.split(_ROWS), strict=True):
        p, q = (part.double().log_softmax(-1) for part in (expected, found))
        kl.append((p.exp() * (p - q)).sum(-1))
    return Differences(torch.cat(kl), reference.argmax(-1) == logits.argmax(-1))


def distance(parts: Sequence[Differences]) -> Distance:
    """What the differences of all windows come to."""
    kl = torch.cat([part.kl for part in parts])
    same = torch.cat([part.same for part in parts])
    return Distance(
        kl=float(kl.mean()),
        kl_p99=float(kl.quantile(0.99)),
        top1=float(same.double().mean()),
        positions=len(kl),
    )


def to_json(comparisons: Sequence[Comparison]) -> list[dict[str, object]]:
    """The comparisons as JSON has them, each with its verdict."""
    return [{**attrs.asdict(one), "passes": one.passes} for one in comparisons]


def table(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as a Markdown table."""
    lines = [
        "| What | Against | KL | 99th percentile | Top-1 | Limit | |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in comparisons:
        found = one.distance
        lines.append(
            f"| {one.what} | {one.against} | {found.kl:.2g} | {found.kl_p99:.2g} "
            f"| {found.top1:.1%} | {_limit(one.limit)} | {_VERDICTS[one.passes]} |"
        )
    return "\n".join(lines)


_VERDICTS = {None: "", True: "pass", False: "FAIL"}


def _limit(limit: Limit | None) -> str:
    if limit is None:
        return ""
    top1 = f", {limit.top1:.0%}" if limit.top1 else ""
    return f"{limit.kl:g}{top1}"
