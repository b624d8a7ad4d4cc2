"""The cap that some models put on their logits."""

from __future__ import annotations

from torch import Tensor

from mistralrs_sdk.kernels import elementwise


def softcap(x: Tensor, cap: float) -> Tensor:
    """Make x `cap * tanh(x / cap)` in place, and return it; x is contiguous."""
    cap_values = elementwise.softcap if elementwise.usable(x) else elementwise.softcap_reference
    return cap_values(x, cap)
