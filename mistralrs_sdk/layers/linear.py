"""Linear layers whose weight is kept by a `LinearMethod`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from mistralrs_sdk.quant.linear_method import DENSE, LinearMethod

Addition = Callable[[Tensor, Tensor], None]
"""Gets inputs [rows, in_features] and outputs [rows, out_features], and adds to the latter."""


class Linear(nn.Module):
    """`x @ weight.T + bias`, in the form its method gives the weight.

    `additions` is what adapters add in the step that runs; see `layers/lora.py`.
    """

    additions: Sequence[Addition] = ()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        method: LinearMethod = DENSE,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.method = method
        method.create_weights(self, in_features=in_features, out_features=out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.method.apply(self, x)
        for add in self.additions:
            add(x, y)
        return y

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {type(self.method).__name__}"


class MergedLinear(Linear):
    """Several linear layers of one input as one multiplication; outputs side by side.

    `parts` maps the name each has in a checkpoint to its output size, in order.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        method: LinearMethod = DENSE,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, method=method)
        self.parts = dict(parts)

    def rows(self, part: str) -> slice:
        """Where one part stands among the outputs, which are the rows of the weight."""
        names = list(self.parts)
        start = sum(self.parts[name] for name in names[: names.index(part)])
        return slice(start, start + self.parts[part])
