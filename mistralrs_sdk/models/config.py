"""What a model is, in numbers: read from a Hugging Face style config, whatever file it is from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]


@attrs.frozen(kw_only=True)
class RopeConfig:
    """Rotary embedding of one layer: base and, if any, how it is stretched."""

    theta: float
    scaling: Mapping[str, Any] | None = attrs.field(default=None, hash=False)
    """None, or Hugging Face's `rope_parameters` with its `rope_type`: linear, llama3 or yarn.

    Also "factors", as GGUF has them: the frequency of pair `i` is divided by `factors[i]`."""


@attrs.frozen(kw_only=True)
class ModelConfig:
    """A decoder-only text model. Per-layer tuples have `num_layers` entries."""

    architecture: str
    """Hugging Face class name, for example "LlamaForCausalLM"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    activation: Activation
    ropes: tuple[RopeConfig, ...]
    windows: tuple[int | None, ...]
    """Sliding window per layer, the token itself included; None attends to everything."""
    attention_scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    attn_softcap: float | None = None
    final_softcap: float | None = None
    causal: bool = True
    """Whether a token sees only itself and those before it; else windows reach both ways."""
