"""What `tune` compares and chooses: ways to keep a model's weights, with sizes and speeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from mistralrs_sdk import MemoryPlan
from mistralrs_sdk.cli.tune_probe import Times

Profile = Literal["quality", "balanced", "fast"]
Quality = Literal["baseline", "near-lossless", "good", "acceptable", "degraded"]

_ORDER: tuple[Quality, ...] = ("baseline", "near-lossless", "good", "acceptable", "degraded")
_QUALITY_OF_BITS: dict[int, Quality] = {
    8: "near-lossless",
    6: "good",
    5: "good",
    4: "acceptable",
    3: "degraded",
    2: "degraded",
}
"""Of a model of a few billion parameters; small ones lose more (docs/quality.md)."""
BITS = tuple(_QUALITY_OF_BITS)
_FLOOR: dict[Profile, Quality] = {
    "quality": "near-lossless",
    "balanced": "good",
    "fast": "acceptable",
}
_AS_FAST = 0.95
"""Of the highest rate: too little is lost to give up quality for it, or to be sure of it."""


@attrs.frozen(kw_only=True)
class Candidate:
    """One way to keep the weights."""

    bits: int | None
    """Bits to quantise to; None: as stored."""
    plan: MemoryPlan | None = None
    """None if it does not fit."""
    reason: str | None = None
    """Why it does not fit."""
    times: Times | None = None
    """What the model is expected to take; None: nothing was measured."""
    measured: bool = False
    """Whether a slice kept in this way was measured; if not, one kept in another was."""

    @property
    def name(self) -> str:
        """What a table calls it."""
        return "as stored" if self.bits is None else f"{self.bits} bits"

    @property
    def quality(self) -> Quality:
        """How much of the model's quality is left, in words."""
        return "baseline" if self.bits is None else _QUALITY_OF_BITS[self.bits]


@attrs.frozen(kw_only=True)
class Findings:
    """All candidates, and how their speeds were found."""

    candidates: Sequence[Candidate]
    plan: MemoryPlan
    """That of the first that fits: the device, and what it computes in."""
    seconds: float = 0.0
    """How long was measured."""
    unmeasured: str | None = None
    """Why nothing was."""


def completed(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Give those that fit and were not measured the times of the one next in size.

    Steps take as long for each byte, prompts for each token.
    """
    known = [c for c in candidates if c.plan is not None and c.times is not None]
    return [_completed(candidate, known) for candidate in candidates]


def recommend(candidates: Sequence[Candidate], profile: Profile) -> Candidate | None:
    """The fastest that fits and is no worse than the profile allows, else the best that fits.

    Of those about as fast the one of the best quality. Quantising to what is no smaller than the
    model's files makes nothing better, so those are then kept as they are. Without speeds the
    smallest counts as the fastest.
    """
    fitting = [candidate for candidate in candidates if candidate.plan is not None]
    if not fitting:
        return None
    allowed = [c for c in fitting if _rank(c) <= _ORDER.index(_FLOOR[profile])]
    stored = next((_size(c) for c in allowed if c.bits is None), None)
    allowed = [c for c in allowed if stored is None or c.bits is None or _size(c) < stored]
    if allowed:
        enough = _AS_FAST * max(_rate(c) for c in allowed)
        return min((c for c in allowed if _rate(c) >= enough), key=lambda c: _best(c))
    return min(fitting, key=_best)


def _completed(candidate: Candidate, known: Sequence[Candidate]) -> Candidate:
    if candidate.plan is None or candidate.times is not None or not known:
        return candidate
    size = _size(candidate)
    near = min(known, key=lambda other: abs(_size(other) - size))
    assert near.times is not None, "it is known"
    steps = tuple(step * size / _size(near) for step in near.times.steps)
    return attrs.evolve(candidate, times=attrs.evolve(near.times, steps=steps), measured=False)


def _size(candidate: Candidate) -> int:
    assert candidate.plan is not None, "it fits"
    return candidate.plan.weight_bytes


def _rate(candidate: Candidate) -> float:
    """Tokens a second of one request; without speeds what is the higher the smaller it is."""
    return 1 / (_size(candidate) if candidate.times is None else candidate.times.steps[0])


def _best(candidate: Candidate) -> tuple[int, int]:
    return _rank(candidate), -(candidate.bits or 0)


def _rank(candidate: Candidate) -> int:
    return _ORDER.index(candidate.quality)
