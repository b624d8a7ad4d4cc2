"""`LoraModelBuilder`: a text model that takes LoRA adapters, as mistral.rs spells it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

import attrs

from mistralrs_sdk.adapters import LoraAdapterSpec, LoraRuntimeConfig
from mistralrs_sdk.builders.model_builder import ModelBuilder
from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.errors import ConfigError

if TYPE_CHECKING:
    from mistralrs_sdk.handle.model import Model
    from mistralrs_sdk.plan import MemoryPlan
    from mistralrs_sdk.serving.served_model import ServedModel


@attrs.frozen
class LoraModelBuilder:
    """Adds adapters to a `ModelBuilder`, which has all of this itself as `with_lora...`.

    `LoraModelBuilder.from_text_model_builder(builder).with_adapter("sql", "folder").build()`
    """

    builder: ModelBuilder
    """What is built in the end."""

    @classmethod
    def from_text_model_builder(cls, builder: ModelBuilder) -> LoraModelBuilder:
        """The same model, which now takes adapters.

        Raises:
            ConfigError: `builder` is none of a text model.
        """
        if not isinstance(builder, ModelBuilder):
            raise ConfigError(
                f"from_text_model_builder({builder!r:.80}): must be a TextModelBuilder, or another "
                "builder of a model that chats"
            )
        return cls(builder.with_lora())

    @property
    def source(self) -> ModelSource:
        """Where the files of the model come from."""
        return self.builder.source

    def with_adapter(self, alias: str, source: str | os.PathLike[str]) -> Self:
        """Load this adapter too; see `ModelBuilder.with_lora_adapter`.

        Raises:
            AdapterError, ConfigError: as that.
        """
        return attrs.evolve(self, builder=self.builder.with_lora_adapter(alias, source))

    def with_adapter_revision(
        self, alias: str, source: str | os.PathLike[str], revision: str
    ) -> Self:
        """The same, at this branch, tag or commit of the hub repository.

        Raises:
            AdapterError, ConfigError: as `ModelBuilder.with_lora_adapter`.
        """
        changed = self.builder.with_lora_adapter_revision(alias, source, revision)
        return attrs.evolve(self, builder=changed)

    def with_adapters(self, adapters: Iterable[LoraAdapterSpec | str]) -> Self:
        """The same for several.

        Raises:
            AdapterError, ConfigError: as `ModelBuilder.with_lora_adapters`.
        """
        return attrs.evolve(self, builder=self.builder.with_lora_adapters(adapters))

    def with_runtime_config(self, limits: LoraRuntimeConfig) -> Self:
        """Keep these limits. Default: 16 adapters, rank 256, 8 GiB."""
        return attrs.evolve(self, builder=self.builder.with_lora_runtime_config(limits))

    async def build(self) -> Model:
        """Load the model and its adapters; see `ModelBuilder.build`.

        Raises:
            ModelLoadError, UnsupportedError: as that; an adapter is at fault, too.
        """
        return await self.builder.build()

    async def serve(self) -> ServedModel:
        """The same, without a handle; see `ModelBuilder.serve`.

        Raises:
            ModelLoadError, UnsupportedError: as `build()`.
        """
        return await self.builder.serve()

    async def plan(self) -> MemoryPlan:
        """Work out what `build()` would take in memory; see `ModelBuilder.plan`.

        Raises:
            ConfigError, ModelLoadError, UnsupportedError: as that.
        """
        return await self.builder.plan()
