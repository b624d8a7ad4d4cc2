"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from mistralrs_sdk.layers.linear import Linear, MergedLinear

ACTIVATIONS = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_pytorch_tanh": lambda: nn.GELU(approximate="tanh"),
}


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))`; `activation` is a key of `ACTIVATIONS`."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, activation: str, bias: bool = False
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.activation(gate) * up)
