"""`PagedAttentionMetaBuilder`: describes the pool of KV blocks."""

from __future__ import annotations

from typing import Any, Self

import attrs

from mistralrs_sdk.builders.model_builder import evolve_for
from mistralrs_sdk.config import MemoryGpuConfig, PagedAttentionConfig, PagedCacheType


@attrs.frozen
class PagedAttentionMetaBuilder:
    """Describes the KV block pool: `PagedAttentionMetaBuilder().with_block_size(16).build()`.

    Without `with_gpu_memory` the pool is sized automatically. mistral.rs takes ContextSize(4096)
    there: 4096 tokens for all sequences together, so that a few concurrent requests preempt each
    other all the time. Ask for it if you want it.

    Raises:
        ConfigError: from each method, at once: a value is out of range.
    """

    config: PagedAttentionConfig = attrs.field(factory=PagedAttentionConfig)

    def with_block_size(self, block_size: int) -> Self:
        """Tokens per block: 8, 16 or 32. Default 32."""
        return self._set("with_block_size", block_size=block_size)

    def with_gpu_memory(self, memory: MemoryGpuConfig) -> Self:
        """Size the pool in MiB, as a fraction of memory, or in tokens. Default: automatically."""
        return self._set("with_gpu_memory", gpu_memory=memory)

    def with_paged_cache_type(self, cache_type: PagedCacheType | str) -> Self:
        """Number type of keys and values: a `PagedCacheType`, "auto" or "f8e4m3". Default AUTO."""
        return self._set("with_paged_cache_type", cache_type=cache_type)

    def build(self) -> PagedAttentionConfig:
        """The value for `ModelBuilder.with_paged_attn`."""
        return self.config

    def _set(self, method: str, **setting: Any) -> Self:
        return attrs.evolve(self, config=evolve_for(self.config, method, setting))
