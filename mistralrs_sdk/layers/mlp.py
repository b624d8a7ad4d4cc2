"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from mistralrs_sdk.kernels.elementwise import gated, gated_reference, usable
from mistralrs_sdk.layers.linear import Linear, MergedLinear


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))`; `activation` is one of `elementwise.ACTIVATIONS`."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, activation: str, bias: bool = False
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)
        activate = gated if usable(gate_up) else gated_reference
        return self.down_proj(activate(gate_up, self.activation))

    def extra_repr(self) -> str:
        return self.activation
