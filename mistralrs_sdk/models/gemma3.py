"""Gemma 3, text only: head norms, and windowed layers with a rotation of their own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mistralrs_sdk.errors import UnsupportedError
from mistralrs_sdk.models.config import ModelConfig, RopeConfig
from mistralrs_sdk.models.decoder import CausalLM, Decoder, SandwichNormLayer
from mistralrs_sdk.models.hf_config import (
    BOTH_WAYS,
    LAYER_TYPES,
    flag,
    number,
    positive,
    read_dense,
    read_layer_types,
    read_rope,
    required,
)

_MAX_POSITIONS = 131_072


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face `Gemma3TextConfig`."""
    if (cap := hf.get("attn_logit_softcapping")) is not None:
        raise UnsupportedError(
            f"attn_logit_softcapping {cap!r}: Gemma 3 does not cap its attention scores"
        )
    bias = flag(hf, "attention_bias")
    every = positive(hf, "sliding_window_pattern", 6) or 6
    layers = range(1, required(hf, "num_hidden_layers") + 1)
    default = ["sliding_attention" if i % every else "full_attention" for i in layers]
    window, both_ways = positive(hf, "sliding_window", 4096), flag(hf, BOTH_WAYS)
    if both_ways and window is not None:
        window = window // 2 + 1  # the config counts the keys of both sides together
    return read_dense(
        hf,
        architecture="Gemma3ForCausalLM",
        max_positions=_MAX_POSITIONS,
        kv_heads=4,
        head_dim=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
        window=window,
        layer_types=read_layer_types(hf, default),
        ropes=_ropes(hf),
        attention_scale=(number(hf, "query_pre_attn_scalar", 256) or 256) ** -0.5,
        qkv_bias=bias,
        o_bias=bias,
        final_softcap=number(hf, "final_logit_softcapping"),
        causal=not both_ways,
    )


def _ropes(hf: Mapping[str, Any]) -> dict[str, RopeConfig]:
    """Rotation by layer type; the older keys stretch the full layers only."""
    given = dict(hf.get("rope_parameters") or {})
    if stray := sorted(set(given) - set(LAYER_TYPES)):
        raise UnsupportedError(
            f"rope_parameters has {stray[0]} ({given[stray[0]]!r}) beside the layer types: "
            "Gemma 3 needs one entry per layer type"
        )
    full = {**(given.get("full_attention") or {}), **(hf.get("rope_scaling") or {})}
    sliding = given.get("sliding_attention") or {}
    theta = number(hf, "rope_theta", 1e6) or 1e6
    local = number(hf, "rope_local_base_freq", 1e4) or 1e4
    return {
        "full_attention": read_rope(hf, full, theta=theta, max_positions=_MAX_POSITIONS),
        "sliding_attention": read_rope(hf, sliding, theta=local, max_positions=_MAX_POSITIONS),
    }


class Gemma3ForCausalLM(CausalLM):
    """Sandwich-norm layers with head norms over scaled embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        make_layer = partial(SandwichNormLayer, head_norm=True)
        scale = config.hidden_size**0.5
        decoder = Decoder(config, make_layer, embedding_scale=scale, norm_offset=1.0)
        super().__init__(config, decoder)
