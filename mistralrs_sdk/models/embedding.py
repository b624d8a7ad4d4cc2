"""An embedding model: a decoder without its head, pooling, and what comes after that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast, get_args

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from mistralrs_sdk.attention.backend import AttentionBackend, Batch
from mistralrs_sdk.models.decoder import CausalLM

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
POOLING_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)

Activation = Literal["identity", "gelu", "relu", "sigmoid", "silu", "tanh"]

_ACTIVATIONS = {
    "identity": lambda x: x,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


@attrs.frozen
class Pooling:
    """How the hidden states of a sequence become one vector: each mode's result, side by side."""

    modes: tuple[PoolingMode, ...]
    include_prompt: bool = True
    """Whether the tokens of an instruction in front of the text take part."""


class Dense(nn.Module):
    """`activation(x @ weight.T + bias)`, in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, activation: Activation) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.weight = nn.Parameter(weight.float(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return _ACTIVATIONS[self.activation](functional.linear(x, self.weight, self.bias))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, {self.activation}"


class Normalize(nn.Module):
    """Scales each vector to length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=-1)


class EmbeddingHead(nn.Module):
    """From the hidden states of all tokens to one float32 vector per sequence."""

    def __init__(self, pooling: Pooling, steps: Sequence[Dense | Normalize]) -> None:
        super().__init__()
        self.pooling = pooling
        self.steps = nn.ModuleList(steps)

    def forward(self, hidden: Tensor, query_start: Sequence[int], skip: Sequence[int]) -> Tensor:
        """`hidden` is [num_tokens, hidden_size]; of sequence i, `skip[i]` tokens are left out.

        The result is [sequences, size].
        """
        hidden = hidden.float()
        x = torch.stack(
            [
                torch.cat([_pool(mode, hidden[start:end], left_out) for mode in self.pooling.modes])
                for start, end, left_out in zip(query_start, query_start[1:], skip, strict=False)
            ]
        )
        for step in self.steps:
            x = step(x)
        return x

    def dimensions(self, hidden_size: int) -> int:
        """Size of the vectors, for hidden states of this size."""
        size = hidden_size * len(self.pooling.modes)
        for step in self.steps:
            if isinstance(step, Dense):
                size = step.weight.shape[0]
        return size


class EmbeddingModel(nn.Module):
    """Token ids to vectors. The language model's own head, if it has one, is not used."""

    def __init__(self, language_model: CausalLM, head: EmbeddingHead) -> None:
        super().__init__()
        self.language_model = language_model
        self.head = head

    @torch.inference_mode()
    def forward(self, batch: Batch, backend: AttentionBackend, skip: Sequence[int]) -> Tensor:
        """[sequences, size] float32; `batch.logits_indices` must name all rows.

        The backend must have planned this batch.
        """
        hidden = cast(Tensor, self.language_model.model(batch, backend))
        return self.head(hidden, batch.query_start, skip)


def _pool(mode: PoolingMode, hidden: Tensor, skip: int) -> Tensor:
    """One vector of [tokens, size]; the weights of `weightedmean` count from the first token."""
    x = hidden[skip:]
    match mode:
        case "cls":
            return x[0]
        case "lasttoken":
            return x[-1]
        case "max":
            return x.amax(0)
        case "mean":
            return x.mean(0)
        case "mean_sqrt_len_tokens":
            return x.sum(0) / len(x) ** 0.5
        case "weightedmean":
            weights = torch.arange(skip + 1, len(hidden) + 1, dtype=torch.float32, device=x.device)
            return (x * weights[:, None]).sum(0) / weights.sum()
