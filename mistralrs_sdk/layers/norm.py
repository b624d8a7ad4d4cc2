"""Root mean square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mistralrs_sdk.kernels import elementwise


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last dimension, float32 inside.

    Below float32 the two families differ in rounding: without offset (Llama) the normalised value
    is rounded before it meets the weight, with offset (Gemma) only the product is.
    """

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Normalise x; with `added`, of the same shape, x is first increased by it in place."""
        if elementwise.usable(x):
            if added is None:
                return elementwise.rms_norm(x, self.weight, eps=self.eps, offset=self.offset)
            return elementwise.rms_norm(
                added, self.weight, eps=self.eps, offset=self.offset, residual=x
            )
        if added is not None:
            x.add_(added)
        if self.offset:
            weight = self.weight.float() + self.offset
            return functional.rms_norm(x.float(), (self.size,), weight, self.eps).to(x.dtype)
        if x.dtype == torch.float32:
            return functional.rms_norm(x, (self.size,), self.weight, self.eps)
        return functional.rms_norm(x, (self.size,), None, self.eps) * self.weight

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}, offset={self.offset}"
