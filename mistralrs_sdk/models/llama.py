"""Llama, and the many models that use its architecture (SmolLM, Yi, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mistralrs_sdk.models.config import ModelConfig
from mistralrs_sdk.models.decoder import CausalLM, Decoder, PreNormLayer
from mistralrs_sdk.models.hf_config import flag, read_dense


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face `LlamaConfig`."""
    bias = flag(hf, "attention_bias")
    return read_dense(
        hf,
        architecture="LlamaForCausalLM",
        max_positions=2048,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(hf, "mlp_bias"),
    )


class LlamaForCausalLM(CausalLM):
    """Pre-norm layers, optional biases, any rope scaling."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, Decoder(config, PreNormLayer))
