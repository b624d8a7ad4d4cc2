"""Rotary position embedding and the ways it is stretched to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import Rotation
from mistralrs_sdk.kernels.elementwise import rope_table, rope_table_reference, usable

Scaling = Mapping[str, Any]

ROPE_TYPES = ("default", "factors", "linear", "llama3", "yarn")


class RotaryEmbedding:
    """Turns positions into rotations; layers that rotate alike share one.

    `theta` is the base; `scaling` is Hugging Face's `rope_parameters`, complete with its
    `rope_type`, or None. No module: it has nothing to load or to move. The frequencies are worked
    out on the device of the positions when first asked there.
    """

    def __init__(self, head_dim: int, theta: float, *, scaling: Scaling | None = None) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        self._frequencies: dict[torch.device, tuple[Tensor, float]] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation at each position; angles are float32 whatever the dtype."""
        known = self._frequencies.get(positions.device)
        if known is None:
            known = self._frequencies[positions.device] = rope_frequencies(
                self.head_dim, self.theta, scaling=self.scaling, device=positions.device
            )
        frequencies, magnitude = known
        table = rope_table if usable(frequencies) else rope_table_reference
        cos, sin = table(positions, frequencies, magnitude=magnitude)
        return Rotation(cos.to(dtype), sin.to(dtype))


def rope_frequencies(
    head_dim: int, theta: float, *, scaling: Scaling | None, device: torch.device | str
) -> tuple[Tensor, float]:
    """Angle per position of each pair, [head_dim / 2] float32, and the factor on cos and sin.

    Raises: ValueError if the `rope_type` is none of `ROPE_TYPES`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    plain = 1.0 / theta**exponents
    if scaling is None:
        return plain, 1.0
    match scaling["rope_type"]:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / scaling["factor"], 1.0
        case "factors":
            return plain / torch.tensor(scaling["factors"], device=device), 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(plain, scaling, theta=theta), _yarn_magnitude(scaling)
        case other:
            raise ValueError(f"rope_type {other!r} is not one of {', '.join(ROPE_TYPES)}")


def _llama3(plain: Tensor, scaling: Scaling) -> Tensor:
    """Llama 3.1: slow pairs are slowed by `factor`, fast ones kept, with a ramp between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / scaling["factor"]


def _yarn(plain: Tensor, scaling: Scaling, *, theta: float) -> Tensor:
    """YaRN (arXiv 2309.00071), "NTK by parts": a ramp over the pairs' number, not their speed."""
    pairs, length = len(plain), scaling["original_max_position_embeddings"]

    def pair_turning(turns: float) -> float:
        return pairs * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    low = pair_turning(scaling.get("beta_fast") or 32)
    high = pair_turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    number = torch.arange(pairs, dtype=torch.float32, device=plain.device)
    # The published ramp widens an empty range by a thousandth instead of dividing by zero.
    slow = ((number - low) / ((high - low) or 0.001)).clamp(0, 1)
    return slow * plain / scaling["factor"] + (1 - slow) * plain


def _yarn_magnitude(scaling: Scaling) -> float:
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]

    def magnitude(weight: float) -> float:
        factor = scaling["factor"]
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight, weight_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return magnitude(weight) / magnitude(weight_all) if weight and weight_all else magnitude(1.0)
