"""The methods of `ModelBuilder` that are about LoRA adapters."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import attrs

from mistralrs_sdk.adapters import LoraAdapterSpec, LoraRuntimeConfig
from mistralrs_sdk.config import EngineConfig
from mistralrs_sdk.errors import ConfigError


class AdapterMethods:
    """Says which adapters a model loads, and what others may be loaded while it runs.

    Every model that is built with one of these takes adapters: `model.load_lora_adapter(...)`
    brings more, and a request chooses its own with `set_adapter`. Limits are 16 adapters, rank 256
    and 8 GiB unless `with_lora_runtime_config` says otherwise.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # of the builder these methods are mixed into

        @property
        def config(self) -> EngineConfig: ...
        def _configure(self, method: str, **setting: Any) -> Self: ...

    def with_lora(
        self,
        *,
        max_adapters: int | None = None,
        max_rank: int | None = None,
        max_bytes: int | None = None,
    ) -> Self:
        """Take LoRA adapters while the model runs; none is loaded by this.

        The limits are those of `LoraRuntimeConfig`, `max_bytes` in bytes; None leaves one as it is.
        """
        given = {"max_adapters": max_adapters, "max_rank": max_rank, "max_bytes": max_bytes}
        limits = attrs.evolve(
            self.config.lora_runtime_config or LoraRuntimeConfig(),
            **{name: limit for name, limit in given.items() if limit is not None},
        )
        return self._configure("with_lora", lora_runtime_config=limits)

    def with_lora_adapter(self, alias: str, source: str | os.PathLike[str]) -> Self:
        """Load this adapter too: a folder in PEFT's layout, or a hub id; `alias` is its name.

        Raises:
            AdapterError: the alias cannot be one.
            ConfigError: it is taken, or these are more adapters than the limit.
        """
        spec = LoraAdapterSpec(alias, source)
        return self._configure("with_lora_adapter", lora_adapters=self._adapters_and([spec]))

    def with_lora_adapter_revision(
        self, alias: str, source: str | os.PathLike[str], revision: str
    ) -> Self:
        """The same, at this branch, tag or commit of the hub repository.

        Raises:
            AdapterError, ConfigError: as `with_lora_adapter`.
        """
        spec = LoraAdapterSpec(alias, source, revision)
        return self._configure(
            "with_lora_adapter_revision", lora_adapters=self._adapters_and([spec])
        )

    def with_lora_adapters(self, adapters: Iterable[LoraAdapterSpec | str]) -> Self:
        """The same for several, each a `LoraAdapterSpec` or written alias=source.

        Raises:
            AdapterError, ConfigError: as `with_lora_adapter`, or one is neither.
        """
        return self._configure("with_lora_adapters", lora_adapters=self._adapters_and(adapters))

    def with_lora_runtime_config(self, limits: LoraRuntimeConfig) -> Self:
        """Take LoRA adapters within these limits. Default: 16 adapters, rank 256, 8 GiB.

        Raises:
            ConfigError: more adapters are named already.
        """
        return self._configure("with_lora_runtime_config", lora_runtime_config=limits)

    def _adapters_and(
        self, more: Iterable[LoraAdapterSpec | str]
    ) -> tuple[LoraAdapterSpec | str, ...]:
        if isinstance(more, str):
            raise ConfigError(f"adapters ({more!r}) must be a list: [{more!r}]")
        return (*self.config.lora_adapters, *more)
