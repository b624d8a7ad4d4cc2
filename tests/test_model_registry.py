"""`ModelRegistry`: names, the default, unloading and loading again, whoever waits."""

from __future__ import annotations

import asyncio

import pytest

from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.errors import (
    ConfigError,
    EngineClosedError,
    ModelLoadError,
    RequestError,
    UnsupportedError,
)
from mistralrs_sdk.handle.registry import ModelRegistry, ModelStatus


class FakeServed:
    """A loaded model that only knows whether it was closed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread = self
        self.closed = False
        self.may_close = asyncio.Event()
        self.may_close.set()

    async def aclose(self) -> None:
        await self.may_close.wait()
        self.closed = True

    def stop(self) -> None:
        self.closed = True


class FakeBuilder:
    """Loads when it may; counts its loads and raises `error` if there is one."""

    def __init__(self, name: str) -> None:
        self.source = ModelSource(model_id=name)
        self.loads = 0
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.error: Exception | None = None
        self.stopped = 0
        self.last: FakeServed | None = None

    async def serve(self) -> FakeServed:
        self.loads += 1
        try:
            await self.may_load.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        if self.error is not None:
            raise self.error
        self.last = FakeServed(self.source.model_id)
        return self.last


async def registry_of(*names: str) -> tuple[ModelRegistry, list[FakeBuilder]]:
    """A registry with a model of each name, loaded from "<name>.gguf"."""
    registry, builders = ModelRegistry(), [FakeBuilder(f"{name}.gguf") for name in names]
    for name, builder in zip(names, builders, strict=True):
        await registry.add(name, builder)
    return registry, builders


async def test_a_model_is_found_by_id_by_source_and_by_being_the_default():
    """None and "default" are the default, the first one added unless another was chosen."""
    registry, (a, b) = await registry_of("a", "b")

    for name in (None, "default", "a", "a.gguf"):
        assert await registry.served(name) is a.last
    assert await registry.served("b.gguf") is b.last
    registry.default = "b.gguf"
    assert registry.default == "b"
    assert await registry.served(None) is b.last


async def test_an_unknown_model_is_an_error_that_lists_those_there_are():
    """Also for the default; a name that is no text is unknown too."""
    registry, _ = await registry_of("a", "b")

    with pytest.raises(RequestError, match=r"'c' is not known: there are 'a', 'b'"):
        await registry.served("c")
    with pytest.raises(RequestError, match="'c'"):
        registry.default = "c"
    with pytest.raises(RequestError, match="3"):
        registry.loaded(3)
    assert not registry.is_loaded("c")


async def test_two_models_from_one_source_are_found_by_id_and_the_source_means_the_first():
    """Removing the first takes its source's name away with it."""
    registry, first = ModelRegistry(), FakeBuilder("x.gguf")
    second = FakeBuilder("x.gguf")
    await registry.add("a", first)
    await registry.add("b", second)

    assert await registry.served("x.gguf") is first.last
    await registry.remove("a")
    with pytest.raises(RequestError):
        registry.loaded("x.gguf")


async def test_an_id_can_be_used_once_and_must_be_text():
    """Neither empty nor "default", nor one that is taken, even by a model still loading."""
    registry, _ = await registry_of("a")
    slow = FakeBuilder("b.gguf")
    slow.may_load.clear()
    adding = asyncio.create_task(registry.add("b", slow))
    await asyncio.sleep(0)

    for id in ("a", "b", "", "default", None):
        with pytest.raises(ConfigError, match="model id"):
            await registry.add(id, FakeBuilder("c.gguf"))
    slow.may_load.set()
    await adding


async def test_a_failed_add_leaves_no_trace():
    """The error is the load's own, and the id is free again."""
    registry, _ = await registry_of("a")
    broken = FakeBuilder("b.gguf")
    broken.error = UnsupportedError("no such architecture")

    with pytest.raises(UnsupportedError, match="no such architecture"):
        await registry.add("b", broken)
    assert registry.ids() == ["a"]
    broken.error = None
    await registry.add("b", broken)
    assert registry.loaded_ids() == ["a", "b"]


async def test_cancelling_an_add_stops_the_load():
    """Nothing is left of it."""
    registry, _ = await registry_of("a")
    slow = FakeBuilder("b.gguf")
    slow.may_load.clear()
    adding = asyncio.create_task(registry.add("b", slow))
    await asyncio.sleep(0.001)

    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    assert slow.stopped == 1
    assert registry.ids() == ["a"]


async def test_removing_a_model_while_it_is_added_ends_the_add():
    """Who adds it is told so, instead of being cancelled."""
    registry, _ = await registry_of("a")
    slow = FakeBuilder("b.gguf")
    slow.may_load.clear()
    adding = asyncio.create_task(registry.add("b", slow))
    await asyncio.sleep(0.001)

    await registry.remove("b")
    with pytest.raises(EngineClosedError, match="'b' was unloaded or removed"):
        await adding
    assert registry.ids() == ["a"]


async def test_removing_the_default_moves_it_on_and_the_last_one_stays():
    """The oldest that is left becomes the default."""
    registry, (a, _b, _c) = await registry_of("a", "b", "c")

    await registry.remove("a")
    assert a.last.closed
    assert registry.default == "b"
    await registry.remove("b")
    with pytest.raises(RequestError, match="'c' is the last one"):
        await registry.remove("c")
    assert registry.loaded_ids() == ["c"]


async def test_an_unloaded_model_is_loaded_once_however_many_wait():
    """Status and lists follow; unloading twice does nothing."""
    registry, (a,) = await registry_of("a")
    first = a.last
    await registry.unload("a")
    await registry.unload("a")
    assert first.closed
    assert registry.statuses() == [("a", ModelStatus.UNLOADED)]
    assert registry.loaded_ids() == []
    with pytest.raises(EngineClosedError, match=r"'a' is unloaded.*reload_model\('a'\)"):
        registry.loaded("a")

    a.may_load.clear()
    waiting = [asyncio.create_task(registry.served(None)) for _ in range(5)]
    await asyncio.sleep(0)
    assert registry.statuses() == [("a", ModelStatus.RELOADING)]
    a.may_load.set()
    assert {await task for task in waiting} == {a.last}
    assert a.loads == 2
    assert registry.statuses() == [("a", ModelStatus.LOADED)]
    await registry.reload("a")
    assert a.loads == 2


async def test_cancelling_who_waits_for_a_reload_leaves_it_to_the_others():
    """The load goes on, even if nobody waits any more."""
    registry, (a,) = await registry_of("a")
    await registry.unload(None)
    a.may_load.clear()
    gone = asyncio.create_task(registry.served("a"))
    stays = asyncio.create_task(registry.served("a"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    a.may_load.set()

    assert await stays is a.last
    assert gone.cancelled()
    assert a.loads == 2


async def test_a_failed_reload_tells_everyone_and_the_next_one_tries_again():
    """Each gets an error of its own with the cause chained; the model stays unloaded."""
    registry, (a,) = await registry_of("a")
    await registry.unload("a")
    a.error = MemoryError("none left")

    errors = await asyncio.gather(*(registry.served("a") for _ in range(3)), return_exceptions=True)

    assert {type(error) for error in errors} == {ModelLoadError}
    assert len({id(error) for error in errors}) == 3
    assert all(error.__cause__ is a.error for error in errors)
    assert "none left" in str(errors[0])
    assert registry.statuses() == [("a", ModelStatus.UNLOADED)]
    a.error = None
    assert await registry.served("a") is a.last


async def test_unloading_during_a_reload_stops_it():
    """Who waits is told; the next request loads anew."""
    registry, (a,) = await registry_of("a")
    await registry.unload("a")
    a.may_load.clear()
    waiting = asyncio.create_task(registry.served("a"))
    await asyncio.sleep(0.001)

    await registry.unload("a")

    with pytest.raises(EngineClosedError, match="while it was being loaded"):
        await waiting
    assert a.stopped == 1
    a.may_load.set()
    assert await registry.served("a") is a.last


async def test_a_reload_waits_until_the_old_memory_is_free():
    """Two copies of a model never overlap."""
    registry, (a,) = await registry_of("a")
    a.last.may_close.clear()
    old = a.last
    unloading = asyncio.create_task(registry.unload("a"))
    await asyncio.sleep(0.001)
    loading = asyncio.create_task(registry.served("a"))
    await asyncio.sleep(0.001)
    assert a.loads == 1

    old.may_close.set()
    await unloading
    assert old.closed
    assert await loading is a.last is not old


async def test_closing_stops_everything_and_nothing_is_loaded_again():
    """Loads in flight too; what was loaded is still known."""
    registry, (a, b) = await registry_of("a", "b")
    await registry.unload("b")
    b.may_load.clear()
    waiting = asyncio.create_task(registry.served("b"))
    await asyncio.sleep(0.001)

    await registry.aclose()
    await registry.aclose()

    assert a.last.closed
    with pytest.raises(EngineClosedError, match="closed"):
        await waiting
    with pytest.raises(EngineClosedError, match="build it again"):
        await registry.served("b")
    with pytest.raises(EngineClosedError):
        await registry.add("c", FakeBuilder("c"))
    assert registry.loaded("a") is a.last
    assert not registry.is_loaded("a")


async def test_closing_waits_for_a_model_that_is_being_freed():
    """When it returns, no engine is left, whoever began to free it."""
    registry, (builder,) = await registry_of("a")
    builder.last.may_close.clear()
    unload = asyncio.create_task(registry.unload("a"))
    await asyncio.sleep(0)
    close = asyncio.create_task(registry.aclose())
    await asyncio.sleep(0.01)

    assert not close.done()
    builder.last.may_close.set()
    await asyncio.wait_for(close, 5)
    assert builder.last.closed
    await unload


async def test_another_event_loop_may_not_load():
    """An engine belongs to one loop; the error says what to do."""
    registry, (_,) = await registry_of("a")
    await registry.unload("a")

    with pytest.raises(RequestError, match="one per loop"):
        await asyncio.to_thread(lambda: asyncio.run(registry.served("a")))
