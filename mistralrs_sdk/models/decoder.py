"""Decoder layers and the causal language model around them, as several families share them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from mistralrs_sdk.attention.backend import AttentionBackend, AttentionSpec, Batch, Rotation
from mistralrs_sdk.layers.attention import Attention
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.linear import Linear
from mistralrs_sdk.layers.mlp import GatedMLP
from mistralrs_sdk.layers.norm import RMSNorm
from mistralrs_sdk.layers.rotary import RotaryEmbedding
from mistralrs_sdk.layers.softcap import softcap
from mistralrs_sdk.models.config import ModelConfig


class CausalLM(nn.Module):
    """A decoder with a head; a family names its layers in a subclass.

    `specs` has the attention of each layer; `packed_modules` maps each fused module's name to the
    names its parts have in a checkpoint. A model that ties its embeddings has no `lm_head`.
    """

    packed_modules: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: ModelConfig, decoder: Decoder) -> None:
        super().__init__()
        self.config = config
        self.specs = tuple(attention_spec(config, layer) for layer in range(config.num_layers))
        self.model = decoder
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size)

    @torch.inference_mode()
    def forward(self, batch: Batch, backend: AttentionBackend) -> Tensor:
        """Logits of the rows `batch.logits_indices`, [num_logits, vocab_size] float32.

        The backend must have planned this batch.
        """
        x = self.model(batch, backend)
        head = self.model.embed_tokens.project if self.lm_head is None else self.lm_head
        logits = head(x).float()
        cap = self.config.final_softcap
        return logits if cap is None else softcap(logits, cap)


class Decoder(nn.Module):
    """Token ids to hidden states, normalised, of the rows whose logits are wanted.

    A layer takes the sum of all before it and what the last one adds to that, which it adds in
    place: so adding is one pass with its first norm. It returns what it adds itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        make_layer: Callable[[ModelConfig, int], nn.Module],
        *,
        embedding_scale: float | None = None,
        norm_offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, scale=embedding_scale)
        self.layers = nn.ModuleList(make_layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, offset=norm_offset)
        distinct = list(dict.fromkeys(config.ropes))
        self.ropes = [
            RotaryEmbedding(config.head_dim, rope.theta, scaling=rope.scaling) for rope in distinct
        ]
        self.rope_of_layer = [distinct.index(rope) for rope in config.ropes]
        self.runs: Sequence[tuple[torch.device, range]] = ()
        """Consecutive layers and their device, in order, if they are on several; all else is on the
        first."""

    def forward(self, batch: Batch, backend: AttentionBackend) -> Tensor:
        x: Tensor = self.embed_tokens(batch.input_ids)
        home, added = x.device, None
        layers = zip(self.layers, self.rope_of_layer, strict=True)
        for device, run in self.runs or ((home, range(len(self.layers))),):
            if added is not None:
                x, added = _across(x, added, device), None
            positions = batch.positions.to(device)
            rotations = [rope(positions, x.dtype) for rope in self.ropes]
            for layer, rope in itertools.islice(layers, len(run)):
                added = layer(x, added, rotations[rope], backend)
        assert added is not None, "there are layers"
        rows = batch.logits_indices.to(x.device)
        if rows.shape[0] < x.shape[0]:
            x, added = x.index_select(0, rows), added.index_select(0, rows)
        if self.runs:
            x, added = _across(x, added, home), None
        return self.norm(x, added)


class PreNormLayer(nn.Module):
    """Normalise, transform, leave the adding to the next norm."""

    def __init__(self, config: ModelConfig, layer: int, *, head_norm: bool = False) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = _attention(config, layer, head_norm=head_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = _mlp(config)

    def forward(
        self, x: Tensor, added: Tensor | None, rotation: Rotation, backend: AttentionBackend
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x, added), rotation, backend)
        return self.mlp(self.post_attention_layernorm(x, attended))


class SandwichNormLayer(nn.Module):
    """Normalise, transform, normalise, add, with norms that keep their weight minus one."""

    def __init__(self, config: ModelConfig, layer: int, *, head_norm: bool = False) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(size, eps, offset=1.0)
        self.self_attn = _attention(config, layer, head_norm=head_norm, norm_offset=1.0)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=1.0)
        self.pre_feedforward_layernorm = RMSNorm(size, eps, offset=1.0)
        self.mlp = _mlp(config)
        self.post_feedforward_layernorm = RMSNorm(size, eps, offset=1.0)

    def forward(
        self, x: Tensor, added: Tensor | None, rotation: Rotation, backend: AttentionBackend
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x, added), rotation, backend)
        attended = self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(x, attended))
        return self.post_feedforward_layernorm(fed)


def _across(x: Tensor, added: Tensor, device: torch.device) -> Tensor:
    """Their sum on another device: one copy."""
    return x.add_(added).to(device)


def attention_spec(config: ModelConfig, layer: int) -> AttentionSpec:
    """What a backend must know of one layer."""
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        window=config.windows[layer],
        softcap=config.attn_softcap,
        causal=config.causal,
    )


def _attention(
    config: ModelConfig, layer: int, *, head_norm: bool, norm_offset: float = 0.0
) -> Attention:
    def norm() -> RMSNorm:
        return RMSNorm(config.head_dim, config.norm_eps, offset=norm_offset)

    return Attention(
        config.hidden_size,
        attention_spec(config, layer),
        layer=layer,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        norms=(norm(), norm()) if head_norm else None,
    )


def _mlp(config: ModelConfig) -> GatedMLP:
    return GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        activation=config.activation,
        bias=config.mlp_bias,
    )
