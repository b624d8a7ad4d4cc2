"""How a linear layer or an embedding keeps its weight and uses it; the dense method."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class LinearMethod(Protocol):
    """Owns the weight [out_features, in_features] of a module. The tensors hang on the module."""

    def create_weights(
        self,
        module: nn.Module,
        *,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Register the parameters, unset. None means torch's current default dtype or device."""

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`; x is [..., in_features]."""
        ...

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        """Rows `ids` of the weight, [*ids.shape, in_features]."""
        ...

    def from_dense(self, module: nn.Module, weight: Tensor) -> None:
        """Keep a dense [out_features, in_features] weight in this form; the bias stays."""

    def to_dense(self, module: nn.Module) -> Tensor:
        """The weight [out_features, in_features] in a float type."""
        ...


class DenseMethod:
    """The weight as it is, in a float type."""

    def create_weights(
        self,
        module: nn.Module,
        *,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        module.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        offset = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        module.register_parameter(
            "bias", None if offset is None else nn.Parameter(offset, requires_grad=False)
        )

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        return functional.linear(x, cast(Tensor, module.weight), cast("Tensor | None", module.bias))

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        return functional.embedding(ids, cast(Tensor, module.weight))

    def from_dense(self, module: nn.Module, weight: Tensor) -> None:
        module.weight = nn.Parameter(weight, requires_grad=False)

    def to_dense(self, module: nn.Module) -> Tensor:
        return cast(Tensor, module.weight)


DENSE = DenseMethod()


class KeptInParts:
    """A method whose weight is tensors of its own form, in `module.packed`."""

    def create_weights(
        self,
        module: nn.Module,
        *,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        DENSE.create_weights(
            module,
            in_features=in_features,
            out_features=out_features,
            bias=bias,
            dtype=dtype,
            device=device,
        )
        module.register_parameter("weight", None)
        cast(Any, module).packed = ()
