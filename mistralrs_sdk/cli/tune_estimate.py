"""What `tune` expects of a machine: a short measurement, a formula, and a choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs

from mistralrs_sdk import MemoryPlan

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

_READ_SHARE = 0.7
"""Of the bandwidth of a plain sum, what a decode step on a CPU reads weights with."""
_STEP_SECONDS = 0.0015
"""What such a step takes besides. Both were fitted to the rates of docs/performance.md."""
_MULTIPLY_SHARE = 0.8
"""Of the rate of a large product, what a prompt is computed with; types of 8 bits do better."""

_READ_BYTES = 2**28
_ROWS, _SIZE = 512, 2048
_TRIES = 5


@attrs.frozen(kw_only=True)
class Machine:
    """What a device does at best."""

    bytes_per_second: float
    """Read from its memory."""
    operations_per_second: float
    """In a large matrix product, in the type it computes in."""


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
    decode_tokens_per_second: float = 0.0
    """Of one request, expected."""
    prefill_tokens_per_second: float = 0.0
    """Of a prompt, expected at least."""

    @property
    def name(self) -> str:
        """What a table calls it."""
        return "as stored" if self.bits is None else f"{self.bits} bits"


def quality_of(bits: int | None) -> Quality:
    """How much of the model's quality is left, in words."""
    return "baseline" if bits is None else _QUALITY_OF_BITS[bits]


def measure(device: str, dtype: str, *, num_threads: int | None = None) -> Machine:
    """Read a quarter of a GiB, and multiply 512 rows by a matrix of 2048 columns; the best of 5."""
    import torch
    from torch.nn import functional

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    data = torch.ones(_READ_BYTES // 4, device=device)
    x = torch.rand(_ROWS, _SIZE, device=device).to(kind)
    weight = torch.rand(_SIZE, _SIZE, device=device).to(kind)

    def finish() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    read = _best_seconds(data.sum, finish)
    product = _best_seconds(lambda: functional.linear(x, weight), finish)
    return Machine(
        bytes_per_second=_READ_BYTES / read,
        operations_per_second=2 * _ROWS * _SIZE**2 / product,
    )


def estimate(plan: MemoryPlan, machine: Machine) -> tuple[float, float]:
    """Expected tokens per second of one request's decoding, and of a prompt.

    A decode step reads every weight once; each token of a prompt multiplies with every weight.
    """
    step = plan.weight_bytes / (_READ_SHARE * machine.bytes_per_second) + _STEP_SECONDS
    rate = _MULTIPLY_SHARE * machine.operations_per_second
    return 1 / step, rate / (2 * plan.num_parameters)


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
        return max(allowed, key=lambda c: (c.decode_tokens_per_second, -_rank(c)))
    return min(fitting, key=lambda c: (_rank(c), -(c.bits or 0)))


def _rank(candidate: Candidate) -> int:
    return _ORDER.index(candidate.quality)


def _best_seconds(work: Callable[[], Any], finish: Callable[[], None]) -> float:
    times = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        work()
        finish()
        times.append(time.perf_counter() - started)
    return min(times)
