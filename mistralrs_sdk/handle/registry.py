"""`ModelRegistry`: the models behind one handle, which of them are loaded, and their names."""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, TypeAlias

import attrs

from mistralrs_sdk.errors import ConfigError, EngineClosedError, ModelLoadError, RequestError

if TYPE_CHECKING:
    from mistralrs_sdk.config import ModelSource
    from mistralrs_sdk.serving.served_embedder import ServedEmbedder
    from mistralrs_sdk.serving.served_model import ServedModel
    from mistralrs_sdk.tools.sessions import SessionStore

logger = logging.getLogger("mistralrs_sdk.models")

DEFAULT = "default"
"""The name that always means the default model."""

_CLOSED = "the model was closed; build it again to use it"

Served: TypeAlias = "ServedModel | ServedEmbedder"
"""A loaded model on an engine of its own: one that chats, or one that embeds."""


class AnyModelBuilder(Protocol):
    """What describes a model that a handle can hold, and load as often as need be."""

    @property
    def source(self) -> ModelSource:
        """Where its files come from."""
        ...

    async def serve(self) -> Served:
        """Load the model and start its engine."""
        ...


class ModelStatus(enum.StrEnum):
    """Where a model of a handle is."""

    LOADED = "loaded"
    UNLOADED = "unloaded"
    """Its memory is free; the next request loads it again."""
    RELOADING = "reloading"
    """It is being loaded; requests wait for it."""


@attrs.define(eq=False)
class _Entry:
    id: str
    builder: AnyModelBuilder
    served: Served | None = None
    sessions: SessionStore | None = None
    """Those of a model that chats; they stay while it is unloaded."""
    loading: asyncio.Task[Served] | None = None
    turn: asyncio.Lock = attrs.field(factory=asyncio.Lock)
    """Held while it is loaded or freed: a reload never overlaps the memory it replaces."""

    @property
    def status(self) -> ModelStatus:
        if self.loading is not None:
            return ModelStatus.RELOADING
        return ModelStatus.UNLOADED if self.served is None else ModelStatus.LOADED


class ModelRegistry:
    """Models by id. All methods are for the event loop it was made in.

    A model that was unloaded is loaded again by the first request for it, once, however many wait.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._aliases: dict[str, str] = {}
        self._default: str | None = None
        self._loop = asyncio.get_running_loop()
        self.closed = False

    # Which there are

    def ids(self) -> list[str]:
        """The ids of all models, in the order they were added."""
        return list(self._entries)

    def loaded_ids(self) -> list[str]:
        """The ids of the models that are loaded."""
        return [id for id, entry in self._entries.items() if entry.served is not None]

    def statuses(self) -> list[tuple[str, ModelStatus]]:
        """Every id with where its model is."""
        return [(id, entry.status) for id, entry in self._entries.items()]

    def is_loaded(self, model_id: str | None) -> bool:
        """Whether requests for this name would start at once; False for an unknown name too."""
        entry = self._find(model_id)
        return entry is not None and entry.served is not None and not self.closed

    @property
    def default(self) -> str:
        """The id of the model that requests without a name go to."""
        return self._entry(None).id

    @default.setter
    def default(self, model_id: str) -> None:
        self._default = self._entry(model_id).id

    def loaded(self, model_id: str | None) -> Served:
        """The model of this name, if it is there without waiting.

        Raises:
            RequestError: there is none of this name.
            EngineClosedError: it is unloaded, or being loaded.
        """
        entry = self._entry(model_id)
        if entry.served is None:
            if self.closed:
                raise EngineClosedError(_CLOSED)
            raise EngineClosedError(
                f"model {entry.id!r} is {entry.status.value}: a request loads it, or "
                f"await reload_model({entry.id!r})"
            )
        return entry.served

    async def served(self, model_id: str | None) -> Served:
        """The model of this name, loaded again if it was unloaded.

        Raises:
            RequestError: there is none of this name, or this is not the loop it belongs to.
            ModelLoadError: it cannot be loaded again; the cause is chained. The next call tries
                once more.
            EngineClosedError: it was unloaded or removed while it was being loaded.
        """
        entry = self._entry(model_id)
        return entry.served if entry.served is not None else await self._load(entry)

    def sessions(self, model_id: str | None) -> SessionStore:
        """The sessions of a model that chats; they are there even while it is unloaded.

        Raises:
            RequestError: there is no model of this name, or it keeps none.
        """
        entry = self._entry(model_id)
        if entry.sessions is None:
            raise RequestError(f"model {entry.id!r} keeps no sessions: it does not chat")
        return entry.sessions

    # Coming and going

    async def add(self, model_id: str, builder: AnyModelBuilder) -> None:
        """Load a model and take it in; the first one is the default. Cancelling stops the load.

        Raises:
            ConfigError: the id is no text, or taken.
            ModelLoadError: it does not load.
        """
        self._check_new(model_id)
        self._check_usable()
        entry = self._entries[model_id] = _Entry(id=model_id, builder=builder)
        task = self._start(entry)
        try:
            await task
        except BaseException:
            if self._entries.get(model_id) is entry:
                self._forget(entry)
            if task.cancelled() and not _is_cancelled():
                raise self._gone(entry) from None
            raise
        self._name(entry)

    async def unload(self, model_id: str | None) -> None:
        """Free a model's memory and keep what is needed to load it again, and its sessions."""
        await self._free(self._entry(model_id))

    async def reload(self, model_id: str | None) -> None:
        """Load a model that was unloaded; nothing happens if it is loaded."""
        await self.served(model_id)

    async def remove(self, model_id: str) -> None:
        """Free a model and forget it; if it was the default, the oldest that is left becomes it.

        Raises:
            RequestError: it is the last one.
        """
        entry = self._entry(model_id)
        if len(self._entries) == 1:
            raise RequestError(
                f"model {entry.id!r} is the last one: unload it, add another one first, or close "
                "the handle"
            )
        self._forget(entry)
        await self._free(entry)

    async def aclose(self) -> None:
        """Free all models; no request loads one again. What is known of them stays known."""
        self.closed = True
        loads = [entry.loading for entry in self._entries.values() if entry.loading is not None]
        for task in loads:
            task.cancel()
        if loads:
            await asyncio.wait(loads)
        await asyncio.gather(*(self._close(entry) for entry in self._entries.values()))

    def stop(self) -> None:
        """Tell all engines to end without waiting for them; any thread may."""
        self.closed = True
        for entry in self._entries.values():
            if entry.served is not None:
                entry.served.thread.stop()

    # Inside

    async def _load(self, entry: _Entry) -> Served:
        """Wait for the one load there is, starting it if need be; leaving does not stop it."""
        self._check_usable()
        task = entry.loading or self._start(entry)
        await asyncio.wait({task})
        if task.cancelled():
            raise self._gone(entry)
        if (error := task.exception()) is not None:
            raise ModelLoadError(
                f"model {entry.id!r} could not be loaded again: {type(error).__name__}: {error}"
            ) from error
        return task.result()

    def _start(self, entry: _Entry) -> asyncio.Task[Served]:
        async def load() -> Served:
            async with entry.turn:
                served = await entry.builder.serve()
            if self.closed:  # stopped meanwhile, by who could not wait
                served.thread.stop()
            return served

        entry.loading = asyncio.create_task(load(), name=f"load {entry.id}")
        entry.loading.add_done_callback(functools.partial(_loaded, entry))
        return entry.loading

    async def _free(self, entry: _Entry) -> None:
        if (task := entry.loading) is not None:
            task.cancel()
            await asyncio.wait({task})
        async with entry.turn:  # two that free it both wait until it is free
            served, entry.served = entry.served, None
            if served is not None:
                await served.aclose()

    async def _close(self, entry: _Entry) -> None:
        async with entry.turn:  # who is freeing it has not freed it yet
            if entry.served is not None:
                await entry.served.aclose()

    def _gone(self, entry: _Entry) -> EngineClosedError:
        how = "closed" if self.closed else "unloaded or removed"
        return EngineClosedError(f"model {entry.id!r} was {how} while it was being loaded")

    def _name(self, entry: _Entry) -> None:
        """Let the name it was loaded from mean it too, unless that means another one."""
        if entry.served is not None and entry.served.name not in self._entries:
            self._aliases.setdefault(entry.served.name, entry.id)
        if self._default is None:
            self._default = entry.id

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.id]
        self._aliases = {name: id for name, id in self._aliases.items() if id != entry.id}
        if self._default == entry.id:
            self._default = next(iter(self._entries), None)

    def _find(self, model_id: str | None) -> _Entry | None:
        if model_id is None or (model_id == DEFAULT and DEFAULT not in self._entries):
            model_id = self._default
        if not isinstance(model_id, str):
            return None
        return self._entries.get(model_id) or self._entries.get(self._aliases.get(model_id, ""))

    def _entry(self, model_id: str | None) -> _Entry:
        entry = self._find(model_id)
        if entry is None:
            raise RequestError(
                f"model {model_id!r} is not known: there {_are(self._entries)}; leave the name "
                f'out, or write "{DEFAULT}"'
            )
        return entry

    def _check_new(self, model_id: str) -> None:
        is_word = isinstance(model_id, str) and model_id
        if not is_word or (model_id == DEFAULT and self._entries):  # the first may be called so
            raise ConfigError(
                f'model id {model_id!r} must be a non-empty str other than "{DEFAULT}"'
            )
        if model_id in self._entries:
            raise ConfigError(
                f"model id {model_id!r} is taken: choose another, or remove that model first"
            )

    def _check_usable(self) -> None:
        if self.closed:
            raise EngineClosedError(_CLOSED)
        if asyncio.get_running_loop() is not self._loop:
            raise RequestError(
                "the model belongs to the event loop it was built in: build one per loop, or use "
                "BlockingModel, which any thread may call"
            )


def _loaded(entry: _Entry, task: asyncio.Task[Served]) -> None:
    """Note how a load ended; runs before anyone who waits for it goes on."""
    entry.loading = None
    if task.cancelled():
        return
    if (error := task.exception()) is not None:
        logger.warning("model %r does not load: %s", entry.id, error)
        return
    entry.served = task.result()
    toolbox = getattr(entry.served, "toolbox", None)  # what embeds has none
    if toolbox is None:
        return
    if entry.sessions is None:
        entry.sessions = toolbox.sessions
    else:
        toolbox.sessions = entry.sessions


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _are(ids: Iterable[str]) -> str:
    shown = ", ".join(map(repr, ids))
    return f"is {shown}" if "," not in shown else f"are {shown}"
