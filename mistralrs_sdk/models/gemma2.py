"""Gemma 2: sandwich norms, capped scores and logits, a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mistralrs_sdk.models.config import ModelConfig
from mistralrs_sdk.models.decoder import CausalLM, Decoder, SandwichNormLayer
from mistralrs_sdk.models.hf_config import (
    flag,
    number,
    positive,
    read_dense,
    read_layer_types,
    required,
)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face `Gemma2Config`."""
    bias = flag(hf, "attention_bias")
    alternating = ("sliding_attention", "full_attention")
    default = [alternating[i % 2] for i in range(required(hf, "num_hidden_layers"))]
    return read_dense(
        hf,
        architecture="Gemma2ForCausalLM",
        max_positions=8192,
        kv_heads=4,
        head_dim=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
        window=positive(hf, "sliding_window", 4096),
        layer_types=read_layer_types(hf, default),
        attention_scale=(number(hf, "query_pre_attn_scalar", 256) or 256) ** -0.5,
        qkv_bias=bias,
        o_bias=bias,
        attn_softcap=number(hf, "attn_logit_softcapping", 50.0),
        final_softcap=number(hf, "final_logit_softcapping", 30.0),
    )


class Gemma2ForCausalLM(CausalLM):
    """Sandwich-norm layers over scaled embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        scale = config.hidden_size**0.5
        decoder = Decoder(config, SandwichNormLayer, embedding_scale=scale, norm_offset=1.0)
        super().__init__(config, decoder)
