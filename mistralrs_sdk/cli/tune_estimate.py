"""What `tune` makes of its measurements: expected speeds, and a choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import attrs

from mistralrs_sdk import MemoryPlan
from mistralrs_sdk.cli.tune_probe import REQUESTS, Probe, Sizes, main_type

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


@attrs.frozen(kw_only=True)
class Speeds:
    """Expected tokens per second."""

    decode: tuple[float, ...] = (0.0,) * len(REQUESTS)
    """Of all answers together, with `REQUESTS` of them at once."""
    prefill: float = 0.0
    """Of a prompt."""


@attrs.frozen(kw_only=True)
class Candidate:
    """One way to keep the weights."""

    bits: int | None
    """Bits to quantise to; None: as stored."""
    quality: Quality
    plan: MemoryPlan | None = None
    """None if it does not fit."""
    reason: str | None = None
    """Why it does not fit."""
    speeds: Speeds = Speeds()

    @property
    def name(self) -> str:
        """What a table calls it."""
        return "as stored" if self.bits is None else f"{self.bits} bits"


def quality_of(bits: int | None) -> Quality:
    """How much of the model's quality is left, in words."""
    return "baseline" if bits is None else _QUALITY_OF_BITS[bits]


def estimate(plan: MemoryPlan, sizes: Sizes, probes: Sequence[Probe]) -> Speeds:
    """What a model is expected to do, from what stand-ins of its layers did.

    A type that was not measured lies between its neighbours in bytes a value, on a straight line;
    beyond all of them it is taken for the last one.
    """
    bytes_per_value = plan.weight_bytes / plan.num_parameters
    same = [probe for probe in probes if probe.weights == main_type(plan)]
    known = sorted(same or probes, key=lambda probe: probe.bytes_per_value)

    def seconds(of: Callable[[Probe], float]) -> float:
        points = [(probe.bytes_per_value, of(probe)) for probe in known]
        return _on_line(points, bytes_per_value)

    steps = [seconds(lambda probe, n=n: probe.decode_seconds[n]) for n in range(len(REQUESTS))]
    prompt = seconds(lambda probe: probe.prefill_seconds)
    return Speeds(
        decode=tuple(n / (step * sizes.read) for n, step in zip(REQUESTS, steps, strict=True)),
        prefill=1 / (prompt * sizes.layers * sizes.layer_values),
    )


def recommend(candidates: Sequence[Candidate], profile: Profile) -> Candidate | None:
    """The fastest that fits and is no worse than the profile allows, else the best that fits.

    Quantising to what is no smaller than the model's files is neither faster nor better, so those
    are kept as they are.
    """
    fitting = [candidate for candidate in candidates if candidate.plan is not None]
    if not fitting:
        return None
    allowed = [c for c in fitting if _rank(c) <= _ORDER.index(_FLOOR[profile])]
    if allowed:
        return max(allowed, key=lambda c: (c.speeds.decode[0], -_rank(c)))
    return min(fitting, key=lambda c: (_rank(c), -(c.bits or 0)))


def _rank(candidate: Candidate) -> int:
    return _ORDER.index(candidate.quality)


def _on_line(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at x of straight lines between points in order of x; beyond them the last one's."""
    if x <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in zip(points, points[1:], strict=False):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return points[-1][1]
