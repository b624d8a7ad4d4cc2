"""Self-attention: projections and head norms around an attention backend."""

from __future__ import annotations

from torch import Tensor, nn

from mistralrs_sdk.attention.backend import AttentionBackend, AttentionSpec, Rotation
from mistralrs_sdk.layers.linear import Linear, MergedLinear
from mistralrs_sdk.layers.norm import RMSNorm


class Attention(nn.Module):
    """Grouped-query attention of layer number `layer`.

    `norms` are for the queries and the keys, each over one head, before they are rotated.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: AttentionSpec,
        *,
        layer: int,
        qkv_bias: bool = False,
        o_bias: bool = False,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        parts = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.qkv_proj = MergedLinear(hidden_size, parts, bias=qkv_bias)
        self.o_proj = Linear(q, hidden_size, bias=o_bias)
        self.q_norm, self.k_norm = norms or (None, None)

    def forward(self, x: Tensor, rotation: Rotation, backend: AttentionBackend) -> Tensor:
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        qkv = self.qkv_proj(x).unflatten(-1, (heads + 2 * kv_heads, self.spec.head_dim))
        q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        attended = backend.run(self.spec, self.layer, q, k, v, rotation=rotation)
        return self.o_proj(attended.flatten(1))
