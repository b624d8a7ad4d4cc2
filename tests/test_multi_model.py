"""Several models behind one handle: `MultiModelBuilder`, adding, unloading, and who answers."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading

import attrs
import pytest
import torch

from mistralrs_sdk import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    ModelBuilder,
    ModelLoadError,
    RequestError,
    SamplingParams,
    UnsupportedError,
)
from mistralrs_sdk.builders.lora_builder import LoraModelBuilder
from mistralrs_sdk.builders.multi_model_builder import MultiModelBuilder
from mistralrs_sdk.builders.text_builders import TextModelBuilder
from mistralrs_sdk.handle.model import Model
from mistralrs_sdk.handle.registry import ModelStatus
from tests.embedding_models import embedder, embedding_folder
from tests.model_helpers import (
    assert_idle,
    endless,
    expected,
    generated_ids,
    greedy,
    prompt,
    resident_bytes,
    tiny_builder,
    tiny_folder,
)

IDS = prompt(9)


def two_models() -> MultiModelBuilder:
    """A llama, the default, and a qwen3."""
    return (
        MultiModelBuilder()
        .add_model_with_alias("a", tiny_builder("llama"))
        .add_model_with_alias("b", tiny_builder("qwen3"))
    )


async def ids_of(model: Model, model_id: str | None, count: int = 8) -> list[int]:
    """The greedy continuation by one of the models."""
    response = await model.send_completion_request(IDS, greedy(count), model_id=model_id)
    return generated_ids(response)


def engine_threads() -> int:
    return sum(thread.name == "mistralrs-engine" for thread in threading.enumerate())


async def test_each_request_is_answered_by_the_model_it_names():
    """Side by side in one loop, each as if alone; None is the default, the first one added."""
    async with await two_models().build() as model:
        results = await asyncio.gather(*(ids_of(model, id, 12) for id in ("a", "b", None, "b") * 4))
        assert results[0::4] == results[2::4] == [expected("llama", tuple(IDS), 12)] * 4
        assert results[1::4] == results[3::4] == [expected("qwen3", tuple(IDS), 12)] * 4
        assert model.list_models() == ["a", "b"]
        assert model.config(model_id="b").max_num_seqs == 32
        assert "Qwen3" in model.describe(model_id="b")
        with pytest.raises(RequestError, match=r"'c' is not known: there are 'a', 'b'"):
            await model.chat("hi", model_id="c")


async def test_the_default_can_be_changed_and_moves_on_when_it_is_removed():
    """By id or by what it was loaded from; the last model cannot be removed."""
    builder = two_models().with_default_model(str(tiny_folder("qwen3")))
    async with await builder.build() as model:
        assert model.get_default_model_id() == "b"
        model.set_default_model_id("a")
        assert await ids_of(model, None) == expected("llama", tuple(IDS), 8)
        await model.remove_model("a")
        assert await ids_of(model, None) == expected("qwen3", tuple(IDS), 8)
        with pytest.raises(RequestError, match="last one"):
            await model.remove_model("b")
    assert engine_threads() == 0


async def test_a_model_can_be_added_to_a_single_one():
    """The handle of one model takes more; the first keeps the name it was loaded from."""
    async with await tiny_builder().build() as model:
        await model.add_model("b", tiny_builder("qwen3"))
        assert model.list_models() == [str(tiny_folder("llama")), "b"]
        assert await ids_of(model, "b") == expected("qwen3", tuple(IDS), 8)
        assert "and 1 more" in repr(model)


async def test_an_unloaded_model_comes_back_with_the_next_request():
    """Once for all that wait; the other model is not concerned."""
    async with await two_models().build() as model:
        await model.unload_model("a")
        assert model.list_models() == ["b"]
        assert model.list_models_with_status() == [
            ("a", ModelStatus.UNLOADED),
            ("b", ModelStatus.LOADED),
        ]
        assert engine_threads() == 1
        assert not model.is_model_loaded("a")
        assert "unloaded" in repr(model)
        with pytest.raises(EngineClosedError, match="'a' is unloaded"):
            model.max_sequence_length()

        results = await asyncio.gather(*(ids_of(model, id) for id in ("a", "a", "b", "a")))

        assert results[0] == results[1] == results[3] == expected("llama", tuple(IDS), 8)
        assert results[2] == expected("qwen3", tuple(IDS), 8)
        assert engine_threads() == 2
        assert model.max_sequence_length() == 512


async def test_unloading_while_requests_run_fails_them():
    """Three running requests get EngineClosedError; the model then loads again."""
    async with await tiny_builder().build() as model:
        streams = [await model.stream_chat_request(endless(str(i))) for i in range(3)]
        for stream in streams:
            await anext(stream)
        await model.unload_model()
        for stream in streams:
            with pytest.raises(EngineClosedError):
                await stream.collect()
        model.abort(streams[0].id)  # it ended with the engine
        assert engine_threads() == 0
        assert await ids_of(model, None) == expected("llama", tuple(IDS), 8)
        await assert_idle(model)


async def test_a_model_whose_engine_died_can_be_unloaded_and_comes_back(monkeypatch):
    """Nothing but its own requests is lost."""
    async with await two_models().build() as model:
        engine = await model.inner(model_id="b").thread.call(lambda engine: engine)

        def broken(self):
            raise MemoryError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(type(engine.scheduler), "schedule", broken)
            with pytest.raises(EngineDeadError, match="injected"):
                await ids_of(model, "b")
        del engine
        assert await ids_of(model, "a") == expected("llama", tuple(IDS), 8)
        with pytest.raises(EngineDeadError):
            await ids_of(model, "b")
        await model.unload_model("b")
        assert await ids_of(model, "b") == expected("qwen3", tuple(IDS), 8)


async def test_a_model_whose_files_are_gone_stays_unloaded(tmp_path):
    """Each request says why; once the files are back it loads."""
    link = tmp_path / "model"
    link.symlink_to(tiny_folder())
    builder = ModelBuilder(link).with_force_cpu().with_num_threads(1).with_dtype("f32")
    async with await builder.build() as model:
        await model.unload_model()
        link.unlink()
        for _ in range(2):
            with pytest.raises(ModelLoadError, match="could not be loaded again") as caught:
                await model.chat("hi")
            assert isinstance(caught.value.__cause__, ModelLoadError)
        link.symlink_to(tiny_folder())
        await model.reload_model()
        assert await ids_of(model, None) == expected("llama", tuple(IDS), 8)


async def test_ten_unload_and_reload_cycles_leave_memory_and_threads_flat():
    """Load, run, unload ten times: resident memory does not grow, no thread is left."""
    sizes = []
    threads = threading.active_count()
    async with await tiny_builder().build() as model:
        for _ in range(10):
            await ids_of(model, None, 4)
            await model.unload_model()
            gc.collect()
            sizes.append(resident_bytes())
        assert engine_threads() == 0
    # One reading may be high without a leak: the lowest of the last against the highest before.
    assert min(sizes[-3:]) < 1.05 * max(sizes[2:5])
    assert threading.active_count() <= threads + 1


async def test_failed_builds_leave_nothing():
    """Five times: what was loaded is closed, the error keeps its type and names the model."""
    threads = threading.active_count()
    for _ in range(5):
        builder = two_models().add_model_with_alias("c", ModelBuilder("./no/such/folder"))
        with pytest.raises(ModelLoadError, match="no/such/folder") as caught:
            await builder.build()
        assert "'c'" in caught.value.__notes__[0]
    assert engine_threads() == 0
    assert threading.active_count() <= threads + 1


async def test_a_model_that_fails_after_others_were_loaded_closes_them(monkeypatch):
    """Also when the failure shows only while loading, not while planning."""
    broken = tiny_builder("qwen3").with_paged_attn(None)

    async def fail(self):
        if self == broken:
            assert engine_threads() == 1
            raise ModelLoadError("injected")
        return await serve(self)

    serve = ModelBuilder.serve
    monkeypatch.setattr(ModelBuilder, "serve", fail)
    builder = two_models().add_model_with_alias("c", broken)
    builder = attrs.evolve(builder, models=(builder.models[0], builder.models[2]))
    with pytest.raises(ModelLoadError, match="injected"):
        await builder.build()
    assert engine_threads() == 0


async def test_a_cancelled_build_closes_what_was_loaded(monkeypatch):
    """Cancelled while the second model loads."""
    loading = asyncio.Event()

    async def slow(self):
        if self.config.max_num_seqs == 7:
            loading.set()
            await asyncio.sleep(60)
        return await serve(self)

    serve = ModelBuilder.serve
    monkeypatch.setattr(ModelBuilder, "serve", slow)
    second = tiny_builder("qwen3").with_max_num_seqs(7)
    builder = MultiModelBuilder().add_model(tiny_builder()).add_model(second)
    task = asyncio.create_task(builder.build())
    await loading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine_threads() == 0


def test_a_multi_model_builder_refuses_names_that_mean_nothing_or_two_things():
    """At once, not when it is built; each method returns a new builder."""
    one = MultiModelBuilder().add_model_with_alias("a", tiny_builder())

    with pytest.raises(ConfigError, match=r"'a'.*add_model_with_alias"):
        one.add_model_with_alias("a", tiny_builder("qwen3"))
    with pytest.raises(ConfigError, match="add_model_with_alias"):
        MultiModelBuilder().add_model(tiny_builder()).add_model(tiny_builder())
    with pytest.raises(ConfigError, match="alias"):
        one.add_model_with_alias("default", tiny_builder())
    with pytest.raises(ConfigError, match="'b' is not among those added"):
        one.with_default_model("b")
    with pytest.raises(ConfigError, match="must be a model builder"):
        one.add_model_with_alias("b", "x.gguf")
    for no_builder in (3, "x.gguf", ModelBuilder):
        with pytest.raises(ConfigError, match="must be a model builder"):
            one.add_model(no_builder)
    assert len(one.models) == 1
    assert one == MultiModelBuilder().add_model_with_alias("a", tiny_builder())


async def test_a_text_model_builder_is_a_model_builder():
    """It differs in its name; what mistral.rs' has beside is refused with the way out."""
    builder = TextModelBuilder(tiny_folder()).with_force_cpu().with_num_threads(1)
    assert repr(builder).startswith("TextModelBuilder(")
    with pytest.raises(UnsupportedError, match="leave it out"):
        builder.with_loader_type("llama")
    with pytest.raises(UnsupportedError, match="GgufModelBuilder"):
        builder.from_uqff(["x.uqff"])

    async with await MultiModelBuilder().add_model(builder.with_dtype("f32")).build() as model:
        assert await ids_of(model, None) == expected("llama", tuple(IDS), 8)


async def test_a_multi_model_builder_without_models_is_refused():
    """It says what is missing."""
    with pytest.raises(ConfigError, match="add_model first"):
        await MultiModelBuilder().build()


async def test_a_model_that_chats_and_one_that_embeds_share_a_handle(tmp_path):
    """Each kind answers its own requests and names the other's builder for the rest."""
    folder = embedding_folder(tmp_path / "embedder", "qwen3", pooling="lasttoken")
    builder = two_models().add_model_with_alias("e", embedder(folder))
    async with await builder.build() as model:
        vector = await model.generate_embedding("hello", model_id="e")
        assert await model.generate_embeddings(["hello"], model_id="e") == [vector]
        assert await ids_of(model, "a") == expected("llama", tuple(IDS), 8)
        with pytest.raises(RequestError, match="ModelBuilder"):
            await model.chat("hi", model_id="e")
        with pytest.raises(RequestError, match="EmbeddingModelBuilder"):
            await model.generate_embedding("hello")
        with pytest.raises(RequestError, match="'e' keeps no sessions"):
            model.list_session_ids(model_id="e")
        await model.unload_model("e")
        assert await model.generate_embedding("hello", model_id="e") == vector
        assert await model.tokenize("hello", model_id="e")


async def test_each_engine_computes_with_its_own_number_of_threads():
    """Loading a second model changes nothing for the first."""
    builder = (
        MultiModelBuilder()
        .add_model_with_alias("two", tiny_builder().with_num_threads(2))
        .add_model_with_alias("one", tiny_builder().with_num_threads(1))
    )
    async with await builder.build() as model:
        for id, count in (("two", 2), ("one", 1), ("two", 2)):
            thread = model.inner(model_id=id).thread
            assert await thread.call(lambda _: torch.get_num_threads()) == count


def test_models_answer_from_two_threads_as_if_alone():
    """Two handles on two loops in two threads, eight requests each, share nothing."""
    results: dict[str, list[list[int]]] = {}
    together = threading.Barrier(2)

    def work(name: str) -> None:
        async def ask() -> list[list[int]]:
            async with await tiny_builder(name).build() as model:
                together.wait(20)
                return await asyncio.gather(*(ids_of(model, None, 12) for _ in range(8)))

        results[name] = asyncio.run(ask())

    threads = [threading.Thread(target=work, args=(name,)) for name in ("llama", "qwen3")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    for name in ("llama", "qwen3"):
        assert results[name] == [expected(name, tuple(IDS), 12)] * 8


@pytest.mark.parametrize("wrap", [lambda b: b, LoraModelBuilder.from_text_model_builder])
async def test_a_shared_pool_is_what_the_models_are_built_with(wrap, monkeypatch):
    """What was shared out reaches the engines of any builder, and a reload takes no more."""
    monkeypatch.setattr("mistralrs_sdk.builders.kv_shares.AUTO_CPU_BYTES", 2 * 2**20)
    builder = MultiModelBuilder()
    for alias, plain in two_models().models:
        builder = builder.add_model_with_alias(alias, wrap(plain))
    async with await builder.build() as model:
        for _ in range(2):
            for id in ("a", "b"):
                info = model.inner(model_id=id).info
                size = info.num_blocks * 8 * info.kv_bytes_per_token
                assert size <= 2**20 + 8 * info.kv_bytes_per_token
            await model.unload_model("b")
            await model.reload_model("b")


def test_builders_of_what_is_not_done_say_so_and_name_the_way_out():
    """Made by a constructor or over another builder."""
    from mistralrs_sdk import unsupported_names as refused

    for name in (
        "AnyMoeModelBuilder",
        "DiffusionModelBuilder",
        "GgufLoraModelBuilder",
        "GgufXLoraModelBuilder",
        "MultimodalModelBuilder",
        "SpeechModelBuilder",
        "UqffEmbeddingModelBuilder",
        "UqffMultimodalModelBuilder",
        "UqffTextModelBuilder",
        "XLoraModelBuilder",
    ):
        with pytest.raises(UnsupportedError, match=f"{name} is not supported: .*"):
            getattr(refused, name)("some/model", [])
    with pytest.raises(UnsupportedError, match="from_text_model_builder is not supported"):
        refused.XLoraModelBuilder.from_text_model_builder(ModelBuilder("x"), "adapters")


async def test_a_model_is_not_copied():
    """Two handles would each stop the engines of the other."""
    async with await tiny_builder().build() as model:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="share it"):
                make(model)


async def test_a_response_id_is_never_used_again():
    """Also not after a reload: aborting an old answer must not end a new one."""
    async with await tiny_builder().build() as model:
        before = await model.send_completion_request([5], SamplingParams(max_len=1))
        await model.unload_model()
        after = await model.send_completion_request([5], SamplingParams(max_len=1))

    assert before.id != after.id
