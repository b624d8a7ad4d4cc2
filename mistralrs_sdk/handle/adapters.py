"""`ModelAdapters`: the methods of `Model` that load, list and unload LoRA adapters."""

from __future__ import annotations

import os

from mistralrs_sdk.adapters import LoraAdapterInfo, LoraAdapterLoadPolicy, LoraRuntimeStatus
from mistralrs_sdk.handle.base import ModelHandle


class ModelAdapters(ModelHandle):
    """Adapters of a model that was built to take them; a request chooses one with `set_adapter`.

    What was loaded here is gone after `unload_model`; what the builder names is there again.
    """

    async def load_lora_adapter(
        self,
        alias: str,
        source: str | os.PathLike[str],
        *,
        revision: str | None = None,
        policy: LoraAdapterLoadPolicy | None = None,
        model_id: str | None = None,
    ) -> LoraAdapterInfo:
        """Load an adapter in PEFT's layout while the model runs, and give it a name.

        `source` is a folder, or a hub id with an optional `revision`. `policy` says what becomes of
        an adapter that has the name; None: the name must be free. Requests that run go on with the
        weights they began with.

        Raises:
            AdapterError: the model takes no adapters, the name is taken or cannot be one, or a
                limit is exceeded; `kind` says which.
            ModelLoadError, UnsupportedError: it cannot be found or read, does not suit the model,
                or holds what is not done here.
        """
        model = await self._chat_model(model_id)
        return await model.load_adapter(alias, source, revision=revision, policy=policy)

    async def unload_lora_adapter(
        self, alias: str, *, generation: str | None = None, model_id: str | None = None
    ) -> LoraAdapterInfo:
        """Take an adapter's name away; its memory is free when the last request with it ends.

        With `generation` only if it is that one.

        Raises:
            AdapterError: there is no such adapter, or it is another generation.
        """
        model = await self._chat_model(model_id)
        return await model.unload_adapter(alias, generation=generation)

    async def list_lora_adapters(
        self, *, model_id: str | None = None
    ) -> tuple[LoraAdapterInfo, ...]:
        """Return the loaded adapters in the order of their names; none if it takes none."""
        model = await self._chat_model(model_id)
        return await model.list_adapters()

    async def lora_adapter_status(self, *, model_id: str | None = None) -> LoraRuntimeStatus:
        """Return the loaded adapters, the memory they take, and the limits.

        Raises:
            AdapterError: the model takes no adapters.
        """
        model = await self._chat_model(model_id)
        return await model.adapter_status()

    # mistral.rs' names

    async def load_lora_adapter_with_model(
        self, alias: str, source: str | os.PathLike[str], model_id: str | None
    ) -> LoraAdapterInfo:
        """As `load_lora_adapter`."""
        return await self.load_lora_adapter(alias, source, model_id=model_id)

    async def load_lora_adapter_with_policy(
        self, alias: str, source: str | os.PathLike[str], policy: LoraAdapterLoadPolicy
    ) -> LoraAdapterInfo:
        """As `load_lora_adapter`."""
        return await self.load_lora_adapter(alias, source, policy=policy)

    async def load_lora_adapter_with_model_and_policy(
        self,
        alias: str,
        source: str | os.PathLike[str],
        model_id: str | None,
        policy: LoraAdapterLoadPolicy,
    ) -> LoraAdapterInfo:
        """As `load_lora_adapter`."""
        return await self.load_lora_adapter(alias, source, policy=policy, model_id=model_id)

    async def unload_lora_adapter_with_model(
        self, alias: str, model_id: str | None
    ) -> LoraAdapterInfo:
        """As `unload_lora_adapter`."""
        return await self.unload_lora_adapter(alias, model_id=model_id)

    async def unload_lora_adapter_if_generation(
        self, alias: str, generation: str
    ) -> LoraAdapterInfo:
        """As `unload_lora_adapter`."""
        return await self.unload_lora_adapter(alias, generation=generation)

    async def unload_lora_adapter_with_model_if_generation(
        self, alias: str, model_id: str | None, generation: str
    ) -> LoraAdapterInfo:
        """As `unload_lora_adapter`."""
        return await self.unload_lora_adapter(alias, generation=generation, model_id=model_id)

    async def list_lora_adapters_with_model(
        self, model_id: str | None
    ) -> tuple[LoraAdapterInfo, ...]:
        """As `list_lora_adapters`."""
        return await self.list_lora_adapters(model_id=model_id)

    async def lora_adapter_status_with_model(self, model_id: str | None) -> LoraRuntimeStatus:
        """As `lora_adapter_status`."""
        return await self.lora_adapter_status(model_id=model_id)
