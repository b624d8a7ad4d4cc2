"""Qwen2 and Qwen2.5: biases on queries, keys and values, and a window in the late layers if any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mistralrs_sdk.models.config import ModelConfig
from mistralrs_sdk.models.decoder import CausalLM, Decoder, PreNormLayer
from mistralrs_sdk.models.hf_config import late_window, read_dense


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face `Qwen2Config`."""
    return read_dense(
        hf,
        architecture="Qwen2ForCausalLM",
        max_positions=32_768,
        kv_heads=32,
        qkv_bias=True,
        **late_window(hf),
    )


class Qwen2ForCausalLM(CausalLM):
    """Pre-norm layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, Decoder(config, PreNormLayer))
