"""Token embedding, also the output head of models that tie the two."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Embedding(nn.Module):
    """Rows of a [vocab_size, size] table, times `scale` if there is one.

    The scale is rounded to the table's dtype first, as Gemma was trained.
    """

    def __init__(self, vocab_size: int, size: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = functional.embedding(ids, self.weight)
        if self.scale is None:
            return x
        return x * torch.tensor(self.scale, dtype=x.dtype, device="cpu")

    def project(self, x: Tensor) -> Tensor:
        """Scores of each token: the tied head; the scale has no part in it."""
        return functional.linear(x, self.weight)
