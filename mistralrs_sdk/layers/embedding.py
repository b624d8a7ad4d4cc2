"""Token embedding, also the output head of models that tie the two."""

from __future__ import annotations

from torch import Tensor, nn

from mistralrs_sdk.kernels import elementwise
from mistralrs_sdk.quant.linear_method import DENSE, LinearMethod


class Embedding(nn.Module):
    """Rows of a [vocab_size, size] table, times `scale` if there is one.

    The scale is rounded to the table's dtype first, as Gemma was trained.
    """

    def __init__(
        self,
        vocab_size: int,
        size: int,
        *,
        scale: float | None = None,
        method: LinearMethod = DENSE,
    ) -> None:
        super().__init__()
        self.in_features = size
        self.out_features = vocab_size
        self.scale = scale
        self.method = method
        method.create_weights(self, in_features=size, out_features=vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.method.rows(self, ids)
        if self.scale is None:
            return x
        multiply = elementwise.scale if elementwise.usable(x) else elementwise.scale_reference
        return multiply(x, self.scale)

    def project(self, x: Tensor) -> Tensor:
        """Scores of each token: the tied head; the scale has no part in it."""
        return self.method.apply(self, x)

    def extra_repr(self) -> str:
        return f"{self.out_features}, {self.in_features}, {type(self.method).__name__}"
