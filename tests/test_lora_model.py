"""A served model with adapters: answers as PEFT's, caches apart, changes while requests run."""

from __future__ import annotations

import asyncio
import functools
import tempfile
import threading
import weakref
from pathlib import Path

import anyio.to_thread
import attrs
import pytest

from mistralrs_sdk import ModelBuilder, QueueFullError, RequestBuilder
from mistralrs_sdk.adapters import LoraAdapterLoadPolicy, LoraRuntimeConfig
from mistralrs_sdk.builders.lora_builder import LoraModelBuilder
from mistralrs_sdk.engine import settle
from mistralrs_sdk.errors import (
    AdapterError,
    EngineClosedError,
    ModelLoadError,
    RequestError,
    UnsupportedError,
)
from mistralrs_sdk.kernels import native
from tests.adapter_files import peft_merged, tiny_adapter, write_adapter
from tests.model_helpers import (
    assert_idle,
    expected,
    generated_ids,
    greedy,
    tiny_builder,
    tiny_folder,
)
from tests.tiny_models import hf_greedy

TEXT = "the same words for all of them, and enough of these to fill some blocks of the cache"
COUNT = 8
LEAVES = {"a": ("q_proj", "k_proj", "v_proj", "o_proj"), "b": ("v_proj", "up_proj", "down_proj")}


@functools.cache
def adapter(name: str) -> Path:
    """One of a few adapters for the tiny llama, written once."""
    leaves = LEAVES.get(name, LEAVES["a"])
    folder = Path(tempfile.mkdtemp(prefix=f"adapter-{name}-"))
    return tiny_adapter(folder, leaves=leaves, seed=ord(name), size=0.3)


@functools.cache
def oracle(name: str | None, ids: tuple[int, ...]) -> list[int]:
    """Hugging Face's greedy continuation, with the adapter merged by PEFT."""
    if name is None:
        return expected("llama", ids, COUNT)
    return hf_greedy(peft_merged("llama", adapter(name)), ids, COUNT)


def with_adapters(*names: str) -> ModelBuilder:
    builder = tiny_builder().with_lora()
    for name in names:
        builder = builder.with_lora_adapter(name, adapter(name))
    return builder


def asking(name: str | None, text: str = TEXT) -> RequestBuilder:
    return RequestBuilder().add_message("user", text).set_sampling(greedy(COUNT)).set_adapter(name)


async def ask(model, name: str | None, salt: str | None = None):
    request = asking(name)
    return await model.send_chat_request(request if salt is None else request.with_cache_salt(salt))


async def prompt_ids(model) -> tuple[int, ...]:
    return tuple(await model.tokenize(asking(None)))


async def test_different_adapters_in_one_batch_answer_as_peft_merges_them():
    """Base and two adapters at once, several of each: every answer is the merged model's."""
    names = [None, "a", "b", "a", None, "b"]
    async with await with_adapters("a", "b").build() as model:
        ids = await prompt_ids(model)
        responses = await asyncio.gather(*(ask(model, name) for name in names))
        await assert_idle(model)

    answers = [oracle(name, ids) for name in names]
    assert [generated_ids(response) for response in responses] == answers
    assert len({tuple(answer) for answer in answers}) == 3


async def test_prefixes_are_shared_within_one_generation_only():
    """Base, two adapters and one reloaded under its name: never each other's keys and values.

    A cache salt that spells an adapter's name or generation is not the adapter either.
    """
    async with await with_adapters("a", "b").build() as model:
        served = model.inner()
        ids = await prompt_ids(model)
        cold = {name: await ask(model, name) for name in (None, "a", "b")}
        warm = {name: await ask(model, name) for name in (None, "a", "b")}
        await served.load_adapter("a", adapter("c"), policy=LoraAdapterLoadPolicy.Upsert())
        reloaded = await ask(model, "a")
        salted = [
            await ask(model, None, salt=salt)
            for salt in ("a", str(reloaded.adapter_generation), str(cold["b"].adapter_generation))
        ]
        again = await ask(model, "a")

    for name, response in cold.items():
        assert response.usage.cached_tokens == 0
        assert generated_ids(response) == oracle(name, ids)
        assert warm[name].usage.cached_tokens >= 8
        assert generated_ids(warm[name]) == oracle(name, ids)
    assert [r.usage.cached_tokens for r in (reloaded, *salted)] == [0] * 4
    assert generated_ids(reloaded) == oracle("c", ids)
    assert all(generated_ids(response) == oracle(None, ids) for response in salted)
    assert again.usage.cached_tokens >= 8


async def test_caches_without_paging_are_apart_too():
    """Whole caches of ended sequences are found under their generation only."""
    builder = with_adapters("a", "b").with_paged_attn(None)
    async with await builder.build() as model:
        ids = await prompt_ids(model)
        for name in (None, "a", "b", "a"):
            response = await ask(model, name)
            assert generated_ids(response) == oracle(name, ids)


async def test_running_requests_finish_with_the_weights_they_began_with():
    """Replacing and unloading are for those that come later."""
    async with await with_adapters("a").build() as model:
        served = model.inner()
        ids = await prompt_ids(model)
        async with await model.stream_chat_request(asking("a")) as stream:
            first = await anext(stream)
            await served.load_adapter("a", adapter("b"), policy=LoraAdapterLoadPolicy.Upsert())
            later = await ask(model, "a")
            await served.unload_adapter("a")
            status = await served.adapter_status()
            response = await stream.collect()
        with pytest.raises(RequestError, match="'a' is unknown"):
            await ask(model, "a")
        await assert_idle(model)
        after = await served.adapter_status()

    assert generated_ids(response) == oracle("a", ids)
    assert generated_ids(later) == oracle("b", ids)
    assert status.retired_generations == status.resident_generations
    assert first.adapter_generation == response.adapter_generation != later.adapter_generation
    assert after.resident_bytes == 0


async def test_the_response_says_which_weights_answered():
    """Whole and in chunks; nothing for the base model."""
    async with await with_adapters("a").build() as model:
        (info,) = await model.inner().list_adapters()
        response = await ask(model, "a")
        base = await ask(model, None)
        exact = await ask(model, info.generation)

    assert response.adapter_generation == exact.adapter_generation == info.generation
    assert response.to_dict()["adapter_generation"] == info.generation
    assert base.adapter_generation is None
    assert "adapter_generation" not in base.to_dict()


async def test_an_unknown_adapter_fails_its_request_only():
    """The others are answered."""
    async with await with_adapters("a").build() as model:
        ids = await prompt_ids(model)
        outcomes = await asyncio.gather(
            ask(model, "a"), ask(model, "sql"), ask(model, None), return_exceptions=True
        )

    assert isinstance(outcomes[1], AdapterError)
    assert outcomes[1].kind == "not_found"
    assert generated_ids(outcomes[0]) == oracle("a", ids)
    assert generated_ids(outcomes[2]) == oracle(None, ids)


async def test_a_model_without_adapters_refuses_them():
    """The way out is in the message."""
    async with await tiny_builder().build() as model:
        with pytest.raises(RequestError, match=r"with_lora\(\)"):
            await ask(model, "a")
        with pytest.raises(AdapterError, match=r"with_lora\(\)"):
            await model.inner().load_adapter("a", adapter("a"))


async def test_several_choices_of_one_request_share_the_adapter():
    """Their weights are let go once, when the last one ends."""
    request = asking("a").set_sampler_n_choices(3)
    async with await with_adapters("a").build() as model:
        response = await model.send_chat_request(request)
        await model.inner().unload_adapter("a")
        await assert_idle(model)
        status = await model.inner().adapter_status()

    texts = {choice.message.content for choice in response.choices}
    assert len(response.choices) == 3
    assert len(texts) == 1
    assert status.resident_bytes == 0


async def test_an_abandoned_stream_lets_its_adapter_go():
    """Leaving early is an end too."""
    async with await with_adapters("a").build() as model:
        async with await model.stream_chat_request(asking("a")) as stream:
            await anext(stream)
            await model.inner().unload_adapter("a")
        await assert_idle(model)
        assert (await model.inner().adapter_status()).resident_bytes == 0


async def test_loading_while_requests_run_does_not_stop_them():
    """It happens beside them, and what was loaded can be used at once."""
    async with await tiny_builder().with_lora().build() as model:
        ids = await prompt_ids(model)
        running = asyncio.ensure_future(ask(model, None))
        await model.inner().load_adapter("a", adapter("a"))
        response = await ask(model, "a")

        assert generated_ids(response) == oracle("a", ids)
        assert generated_ids(await running) == oracle(None, ids)


@pytest.mark.skipif(not native.available(), reason="no native kernels here")
async def test_adapters_stay_on_a_model_that_is_requantised():
    """What they add is in float16 beside any type of the weights."""
    builder = ModelBuilder(tiny_folder("llama")).with_force_cpu().with_num_threads(1)
    async with await builder.with_lora_adapter("a", adapter("a")).build() as model:
        before = [generated_ids(await ask(model, name)) for name in (None, "a")]
        await model.re_isq_model("q8_0")
        after = [generated_ids(await ask(model, name)) for name in (None, "a")]

    assert before[0] != before[1]
    assert after[0] != after[1]
    assert after[1][0] == before[1][0]


async def test_a_closed_model_is_free_of_its_adapters():
    """Nothing keeps the weights, of the model or of an adapter, and every call says why."""
    model = await with_adapters("a").build()
    served = model.inner()
    layers = weakref.ref(await served.thread.call(lambda engine: engine.runner.lora))
    await model.aclose()

    assert layers() is None
    for call in (served.load_adapter("b", adapter("b")), served.adapter_status()):
        with pytest.raises(EngineClosedError):
            await call


# Building


async def test_adapters_that_do_not_load_fail_the_build(tmp_path):
    """Missing, over a limit, or with something in them that is not done."""
    with pytest.raises(ModelLoadError, match="is no folder"):
        await tiny_builder().with_lora_adapter("a", tmp_path / "none").build()
    with pytest.raises(ModelLoadError, match="max_rank is 2"):
        await with_adapters("a").with_lora(max_rank=2).build()
    write_adapter(tmp_path / "dora", {}, use_dora=True)
    with pytest.raises(UnsupportedError, match="DoRA"):
        await tiny_builder().with_lora_adapter("a", tmp_path / "dora").build()


async def test_adapters_for_which_the_plan_leaves_no_room_fail_plan_and_build(monkeypatch):
    """What is loaded with the model counts beside its weights and its KV cache."""
    plain = settle.plan_memory

    def without_room(*args, **kwargs):
        plan = plain(*args, **kwargs)
        used = plan.weight_bytes + plan.activation_bytes + plan.kv_bytes
        return attrs.evolve(plan, free_bytes=used + 10_000)

    monkeypatch.setattr(settle, "plan_memory", without_room)
    async with await tiny_builder().with_lora().build():
        pass
    for work in (with_adapters("a").plan(), with_adapters("a").build()):
        with pytest.raises(ModelLoadError, match="load fewer, or lower the cache"):
            await work


async def test_a_plan_counts_adapters_as_they_will_be_in_memory():
    """Equal ones once; without any there is nothing to count."""
    plain = await with_adapters().plan()
    planned = await with_adapters("a", "b").with_lora_adapter("same", adapter("a")).plan()

    async with await with_adapters("a", "b").build() as model:
        status = await model.lora_adapter_status()
    assert plain.adapter_bytes == 0
    assert planned.adapter_bytes == status.resident_bytes > 0
    assert "adapters" in str(planned)
    assert "adapters" not in str(plain)


async def test_a_plan_refuses_adapters_as_building_does(tmp_path):
    """Missing, or over a limit: nobody has to wait for the weights to hear of it."""
    with pytest.raises(ModelLoadError, match="is no folder"):
        await tiny_builder().with_lora_adapter("a", tmp_path / "none").plan()
    with pytest.raises(ModelLoadError, match="max_rank is 2"):
        await with_adapters("a").with_lora(max_rank=2).plan()
    with pytest.raises(ModelLoadError, match="max_bytes is 10"):
        await with_adapters("a").with_lora(max_bytes=10).plan()


async def test_the_settings_in_effect_are_shown():
    """Limits are those of the default if only adapters were named."""
    async with await tiny_builder().with_lora_adapter("a", adapter("a")).build() as model:
        assert model.config().lora_runtime_config == LoraRuntimeConfig()
        assert "lora_adapters" in model.describe()


async def test_a_lora_model_builder_is_the_builder_it_wraps():
    """mistral.rs' name for the same."""
    builder = LoraModelBuilder.from_text_model_builder(tiny_builder())
    builder = builder.with_adapter("a", adapter("a")).with_adapters([f"b={adapter('b')}"])
    builder = builder.with_adapter_revision("c", adapter("c"), "main")
    builder = builder.with_runtime_config(LoraRuntimeConfig(max_adapters=3))

    expected_builder = (
        with_adapters("a", "b")
        .with_lora_adapter_revision("c", adapter("c"), "main")
        .with_lora(max_adapters=3)
    )
    assert builder.builder == expected_builder
    async with await builder.build() as model:
        infos = await model.inner().list_adapters()
    assert [info.alias for info in infos] == ["a", "b", "c"]
    assert infos[2].revision == "main"


async def test_a_request_that_is_refused_does_not_keep_its_adapter():
    """Whoever keeps the error of a full queue does not keep the weights in memory."""
    builder = with_adapters("a").with_max_num_seqs(1).with_max_queue(0)
    async with await builder.build() as model:
        asked = RequestBuilder().add_message("user", TEXT).set_adapter("a")
        async with await model.stream_chat_request(asked.set_sampler_max_len(300)):
            with pytest.raises(QueueFullError) as refused:
                await model.send_chat_request(asked)
            await model.unload_lora_adapter("a")
        await assert_idle(model)

        assert (await model.lora_adapter_status()).resident_bytes == 0
        assert refused.value is not None


async def test_adapters_that_load_leave_the_other_threads_to_others(monkeypatch):
    """However many wait for a slow download, prompts and constraints find a thread."""
    go = threading.Event()
    async with await with_adapters().build() as model:
        monkeypatch.setattr(model.inner()._adapters, "load", lambda *_: go.wait(20))
        loads = [asyncio.create_task(model.load_lora_adapter(f"x{i}", "y")) for i in range(60)]
        await asyncio.sleep(0.05)
        taken = anyio.to_thread.current_default_thread_limiter().borrowed_tokens
        go.set()
        await asyncio.gather(*loads)

    assert taken == 0


async def test_a_closed_model_forgets_its_adapters_whatever_fails(monkeypatch):
    """Tools that cannot be ended do not keep the model's layers in memory."""

    async def fail() -> None:
        raise OSError("the tools do not end")

    async with await with_adapters("a").build() as model:
        served = model.inner()
        with monkeypatch.context() as patch:
            patch.setattr(served.toolbox, "aclose", fail)
            with pytest.raises(OSError, match="do not end"):
                await served.aclose()

        assert await served.list_adapters() == ()
