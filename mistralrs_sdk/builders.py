"""The builders beside `ModelBuilder`: for GGUF files by name, and for the KV block pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import attrs

from mistralrs_sdk.builder import ModelBuilder, PathLike, evolve_for, model_id_text
from mistralrs_sdk.config import (
    MemoryGpuConfig,
    ModelSource,
    PagedAttentionConfig,
    PagedCacheType,
)
from mistralrs_sdk.errors import ConfigError


@attrs.frozen(init=False, repr=False)
class GgufModelBuilder(ModelBuilder):
    """A `ModelBuilder` for named GGUF files of a folder or hub repository.

    `GgufModelBuilder("folder", ["model.Q4_K_M.gguf"])`; of a split model the first file is enough.
    """

    def __init__(self, model_id: PathLike, files: Iterable[PathLike]) -> None:
        source = ModelSource(model_id=model_id_text(model_id), files=files)
        wrong = [file for file in source.files if not file.lower().endswith(".gguf")]
        if wrong or not source.files:
            shown = repr(wrong[0]) if wrong else "an empty list"
            raise ConfigError(
                f"GgufModelBuilder files: {shown} given; name at least one file, "
                "and each must end in .gguf"
            )
        self._start(source)

    def _head(self) -> str:
        return f"{type(self).__name__}({self.source.model_id!r}, {list(self.source.files)!r})"


@attrs.frozen
class PagedAttentionMetaBuilder:
    """Describes the KV block pool: `PagedAttentionMetaBuilder().with_block_size(16).build()`.

    Without `with_gpu_memory` the pool is sized automatically. mistral.rs takes ContextSize(4096)
    there: 4096 tokens for all sequences together, so that a few concurrent requests preempt each
    other all the time. Ask for it if you want it.
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
