"""`Model`: what a builder's `build()` returns; one model or several, each on its own engine."""

from __future__ import annotations

import warnings
from typing import NoReturn, Self

from mistralrs_sdk.handle.adapters import ModelAdapters
from mistralrs_sdk.handle.names import ModelNames
from mistralrs_sdk.handle.registry import AnyModelBuilder, ModelRegistry, ModelStatus
from mistralrs_sdk.handle.sessions import ModelSessions
from mistralrs_sdk.handle.unsupported import ModelUnsupported


class Model(ModelNames, ModelAdapters, ModelSessions, ModelUnsupported):
    """A loaded model. Its methods may be called concurrently; requests share batches inside.

    Made by `await ModelBuilder(...).build()`. Close it with `await model.aclose()`, or use it as
    `async with await builder.build() as model`. It belongs to the event loop it was built in.

    It can hold several models (`add_model`, `MultiModelBuilder`). Methods then take the id of the
    one they are for as `model_id`; None and "default" are the default model.

    Raises:
        RequestError: from each method: there is no model of that id; the message lists those there
            are. Or the model does not do what is asked: chat, or embed.
    """

    @classmethod
    async def build(cls, builder: AnyModelBuilder) -> Self:
        """Do what `builder.build()` promises.

        Raises:
            ModelLoadError, UnsupportedError: as that.
        """
        models = ModelRegistry()
        await models.add(builder.source.model_id, builder)
        return cls(models)

    # Several models

    def list_models(self) -> list[str]:
        """Return the ids of the models that are loaded."""
        return self._models.loaded_ids()

    def list_models_with_status(self) -> list[tuple[str, ModelStatus]]:
        """Return the id of every model and whether it is loaded, unloaded or reloading."""
        return self._models.statuses()

    def is_model_loaded(self, model_id: str | None = None) -> bool:
        """Return whether a request for this model starts at once; an unknown one is not loaded."""
        return self._models.is_loaded(model_id)

    def get_default_model_id(self) -> str:
        """Return the id of the model that calls without `model_id` go to."""
        return self._models.default

    def set_default_model_id(self, model_id: str) -> None:
        """Let calls without `model_id` go to this model.

        Raises:
            RequestError: there is none of this id.
        """
        self._models.default = model_id

    async def add_model(self, model_id: str, builder: AnyModelBuilder) -> None:
        """Load one more model on an engine of its own; requests name it by `model_id`.

        The name it was loaded from means it too, unless that means another one. Cancelling stops
        the load.

        Raises:
            ConfigError: the id is taken.
            ModelLoadError, UnsupportedError: as the builder's `build()`.
        """
        await self._models.add(model_id, builder)

    async def remove_model(self, model_id: str) -> None:
        """Free a model and forget it; its open requests fail with `EngineClosedError`.

        If it was the default, the oldest of the others becomes it.

        Raises:
            RequestError: it is the last one.
        """
        await self._models.remove(model_id)

    async def unload_model(self, model_id: str | None = None) -> None:
        """Free a model's memory; the next request for it loads it again as its builder says.

        Its open requests fail with `EngineClosedError`, as those do that wait for it to be loaded:
        wait for them first if they matter. What was changed while it ran is gone: cached prefixes,
        adapters that were loaded, `re_isq_model`. Sessions stay. Unloading what is unloaded does
        nothing.
        """
        await self._models.unload(model_id)

    async def reload_model(self, model_id: str | None = None) -> None:
        """Load a model that was unloaded now; nothing happens if it is loaded.

        However many ask at once, it is loaded once; cancelling who waits does not stop it.

        Raises:
            ModelLoadError: it does not load any more; the cause is chained. It stays unloaded, and
                the next request tries again.
        """
        await self._models.reload(model_id)

    # Ending

    async def aclose(self) -> None:
        """Stop every engine after its current step and free the models; open requests fail.

        Raises nothing when called again.
        """
        await self._models.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        models = getattr(self, "_models", None)  # missing if __init__ never ran
        if models is not None and not models.closed:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2)
            models.stop()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Model cannot be copied or pickled: share it, or build another")

    def __repr__(self) -> str:
        ids = self._models.ids()
        name = self._models.default
        if self._models.closed:
            state = "closed"
        elif self._models.is_loaded(None):
            served = self._models.loaded(None)
            state = f"({served.info.architecture}) on {served.info.config.device}"
        else:
            state = dict(self._models.statuses())[name].value
        more = f", and {len(ids) - 1} more" if len(ids) > 1 else ""
        return f"<Model {name!r} {state}{more}>"
