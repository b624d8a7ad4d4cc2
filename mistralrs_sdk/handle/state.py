"""`ModelState`: the methods of `Model` that say how a model runs, and that change it."""

from __future__ import annotations

from mistralrs_sdk.config import EngineConfig, Progress
from mistralrs_sdk.engine.metrics import EngineMetrics
from mistralrs_sdk.engine.scheduler import SchedulerStats
from mistralrs_sdk.handle.base import ModelHandle
from mistralrs_sdk.handle.registry import Served
from mistralrs_sdk.isq import Isq


class ModelState(ModelHandle):
    """Settings, sizes and counters of a model that is loaded.

    These do not load one that was unloaded: that is an `EngineClosedError`.
    """

    def config(self, *, model_id: str | None = None) -> EngineConfig:
        """Return the settings the engine runs with, nothing left open.

        Raises:
            EngineClosedError: the model is unloaded.
        """
        return self._models.loaded(model_id).info.config

    def max_sequence_length(self, *, model_id: str | None = None) -> int:
        """Return the longest prompt plus completion, in tokens.

        Raises:
            EngineClosedError: the model is unloaded.
        """
        return self._models.loaded(model_id).info.max_model_len

    def describe(self, *, model_id: str | None = None) -> str:
        """Return every resolved setting and where it came from, as text for people.

        Raises:
            EngineClosedError: the model is unloaded.
        """
        return self._models.loaded(model_id).describe()

    async def stats(self, *, model_id: str | None = None) -> SchedulerStats:
        """Return what runs, waits and is cached right now.

        Raises:
            EngineDeadError, EngineClosedError: there is no engine any more, or not now.
        """
        return await self._models.loaded(model_id).stats()

    async def metrics(self, *, model_id: str | None = None) -> EngineMetrics:
        """Return what the engine holds now and has done so far, with latency histograms.

        Raises:
            EngineDeadError, EngineClosedError: there is no engine any more, or not now.
        """
        return await self._models.loaded(model_id).metrics()

    async def clear_prefix_cache(self, *, model_id: str | None = None) -> None:
        """Forget all cached prefixes.

        Raises:
            EngineDeadError, EngineClosedError: there is no engine any more, or not now.
        """
        await self._loaded_chat_model(model_id).clear_prefix_cache()

    def inner(self, *, model_id: str | None = None) -> Served:
        """Return the engine's side of the model, for what no method here does.

        Raises:
            EngineClosedError: the model is unloaded.
        """
        return self._models.loaded(model_id)

    async def re_isq_model(
        self, isq: Isq | str | int, *, progress: Progress = False, model_id: str | None = None
    ) -> None:
        """Quantise the weights of the running model to another type, as `with_isq` would have.

        `isq` is a type or a number of bits. The weights are read again from the model's files, so
        more bits bring back quality. No step runs meanwhile; streams then go on with the new
        weights, which compute their keys and values again. `progress` is as for `with_progress`.
        Cancelling who waits does not stop it. A model that is loaded again after `unload_model` is
        as its builder says.

        Raises:
            ConfigError: `isq` is no type and no number of bits.
            UnsupportedError: nothing here computes with the type, or the device does not.
            ModelLoadError: the files have changed or it does not fit, and nothing was changed; or
                reading failed later: each weight is then the old or the new one.
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        model = await self._chat_model(model_id)
        await model.re_isq(isq, progress=progress)
