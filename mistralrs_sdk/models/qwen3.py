"""Qwen3: queries and keys are normalised per head, and heads have a size of their own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mistralrs_sdk.models.config import ModelConfig
from mistralrs_sdk.models.decoder import CausalLM, Decoder, PreNormLayer
from mistralrs_sdk.models.hf_config import flag, late_window, read_dense


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face `Qwen3Config`."""
    bias = flag(hf, "attention_bias")
    return read_dense(
        hf,
        architecture="Qwen3ForCausalLM",
        max_positions=32_768,
        kv_heads=32,
        head_dim=128,
        qkv_bias=bias,
        o_bias=bias,
        **late_window(hf),
    )


class Qwen3ForCausalLM(CausalLM):
    """Pre-norm layers with head norms."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, Decoder(config, partial(PreNormLayer, head_norm=True)))
