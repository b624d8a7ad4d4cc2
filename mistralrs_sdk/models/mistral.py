"""Mistral: Llama's layers with a sliding window in all of them, or in none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mistralrs_sdk.errors import UnsupportedError
from mistralrs_sdk.models.config import ModelConfig
from mistralrs_sdk.models.decoder import CausalLM, Decoder, PreNormLayer
from mistralrs_sdk.models.hf_config import positive, read_dense


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face `MistralConfig`."""
    if hf.get("layer_types"):
        raise UnsupportedError(
            f"layer_types {hf['layer_types']!r} with MistralForCausalLM: its layers are all alike"
        )
    return read_dense(
        hf,
        architecture="MistralForCausalLM",
        max_positions=131_072,
        kv_heads=8,
        window=positive(hf, "sliding_window", 4096),
    )


class MistralForCausalLM(CausalLM):
    """Pre-norm layers without biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, Decoder(config, PreNormLayer))
