"""An embedding model behind `Model`: batches, errors, life and the builder."""

from __future__ import annotations

import asyncio
import pickle
import random
import time

import anyio
import pytest
import torch

from mistralrs_sdk import (
    ConfigError,
    EngineClosedError,
    InferenceError,
    ModelBuilder,
    RequestError,
    UnsupportedError,
)
from mistralrs_sdk.builders.embedding_builder import EmbeddingModelBuilder
from mistralrs_sdk.chat.embeddings import EmbeddingRequest
from mistralrs_sdk.engine.embedding_build import EmbeddingRunner
from tests.embedding_models import bare_folder, embedder, embedding_folder
from tests.model_helpers import tiny_builder

PROMPTS = {"query": "find: ", "document": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("embedding") / "model"
    return embedding_folder(path, "gemma", pooling="mean", prompts=PROMPTS)


@pytest.fixture
async def model(folder):
    async with await embedder(folder).build() as built:
        yield built


def texts(count: int) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices("etaoin shrdlu", k=draw.randint(1, 60))) for _ in range(count)]


async def test_a_hundred_inputs_come_back_in_order(model):
    """Each has the vector that it has alone, whatever shared its batch."""
    asked = texts(100)

    together = torch.tensor(await model.generate_embeddings(asked))

    for index in (0, 1, 31, 32, 99):
        alone = torch.tensor(await model.generate_embedding(asked[index]))
        torch.testing.assert_close(together[index], alone, rtol=0, atol=1e-6)
    assert len({tuple(vector.tolist()) for vector in together}) == 100


async def test_requests_sent_at_once_share_batches(folder, monkeypatch):
    """Sixteen single texts take fewer passes than there are texts."""
    batches = []
    run = EmbeddingRunner.run

    def slow_run(self, inputs):
        batches.append(len(inputs))
        time.sleep(0.01)
        return run(self, inputs)

    monkeypatch.setattr(EmbeddingRunner, "run", slow_run)
    async with await embedder(folder).build() as model:
        await asyncio.gather(*map(model.generate_embedding, texts(16)))

    assert sum(batches) == 16
    assert len(batches) < 8


async def test_token_ids_and_their_text_have_one_vector(model):
    """What tokenize gives, special tokens included, is what a text becomes."""
    ids = await model.tokenize("hello there")

    assert ids[0] == 1
    assert ids[-1] == 2
    assert await model.generate_embedding(ids) == await model.generate_embedding("hello there")
    assert await model.detokenize(ids) == "hello there"


async def test_usage_counts_all_tokens(model):
    """Instructions and special tokens included."""
    request = EmbeddingRequest.builder().add_prompt("hello").with_prompt_name("query")

    response = await model.send_embedding_request(request)

    assert response.prompt_tokens == len(await model.tokenize("find: hello"))
    assert response.dimensions == 96
    assert response.embeddings == await model.generate_embeddings(request)


async def test_a_cancelled_request_leaves_nothing(model):
    """What was not computed is dropped, and the model goes on."""
    served = model.inner()
    task = asyncio.ensure_future(model.generate_embeddings(texts(400)))
    while not (await served.stats()).waiting:
        await asyncio.sleep(0.001)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    with anyio.fail_after(10):
        while (await served.stats()).waiting:
            await asyncio.sleep(0.001)
    assert (await model.metrics()).completed["canceled"] > 0
    assert len(await model.generate_embedding("still here")) == 96


async def test_a_failing_input_is_named_and_fails_alone(model, monkeypatch, caplog):
    """Another request in the same batch gets its vector."""
    served = model.inner()

    def run(inputs):
        if any(len(asked.ids) == 9 for asked in inputs):
            raise RuntimeError("no memory for nine")
        return [[1.0]] * len(inputs)

    await served.thread.call(lambda engine: setattr(engine, "_run", run))
    with caplog.at_level("CRITICAL", "mistralrs_sdk.engine"):
        good, bad = await asyncio.gather(
            model.generate_embedding([5] * 3),
            model.generate_embeddings([[5] * 4, [5] * 9]),
            return_exceptions=True,
        )

    assert good == [1.0]
    assert isinstance(bad, InferenceError)
    assert "input 1 failed: RuntimeError: no memory for nine" in str(bad)


async def test_a_bad_request_computes_nothing(model):
    """A too long input is refused before the others run."""
    before = (await model.stats()).computed_tokens

    with pytest.raises(RequestError, match="input 1 has 600 tokens"):
        await model.generate_embeddings(["fine", [5] * 600])

    assert (await model.stats()).computed_tokens == before


async def test_an_embedding_model_does_not_chat(model):
    """The refusal says what the model is for."""
    with pytest.raises(RequestError, match="embeds"):
        await model.chat("hello")


async def test_a_chat_model_does_not_embed():
    """The refusal names the builder to use."""
    async with await tiny_builder("llama").build() as chat:
        with pytest.raises(RequestError, match="EmbeddingModelBuilder"):
            await chat.generate_embedding("hello")


async def test_a_closed_model_embeds_no_more(folder):
    """Open and later requests get EngineClosedError."""
    model = await embedder(folder).build()
    waiting = asyncio.ensure_future(model.generate_embeddings(texts(400)))
    while not (await model.stats()).waiting:
        await asyncio.sleep(0.001)

    await model.aclose()

    with pytest.raises(EngineClosedError):
        await waiting
    with pytest.raises(EngineClosedError):
        await model.generate_embedding("hello")


async def test_describe_says_how_it_pools(model):
    """Pooling, what comes after it, size, instructions, longest input."""
    described = model.describe()

    for shown in ("mean, then normalize", "query, document", "max_model_len", "EncoderBackend"):
        assert shown in described
    assert model.max_sequence_length() == 512
    assert "paged_attn" not in described


async def test_quantised_weights_embed_nearly_alike(folder):
    """`with_isq` quantises an embedding model as it does a chat model."""
    builder = EmbeddingModelBuilder(folder).with_force_cpu().with_num_threads(1)
    async with await embedder(folder).build() as exact:
        wanted = torch.tensor(await exact.generate_embeddings(texts(8)))
    async with await builder.with_isq("q8_0").build() as model:
        found = torch.tensor(await model.generate_embeddings(texts(8)))

    assert torch.cosine_similarity(found, wanted).min() > 0.99
    assert not torch.equal(found, wanted)


async def test_progress_is_reported_on_the_loop(folder):
    """A function sees the weights being read."""
    seen = []

    async with await embedder(folder).with_progress(lambda *args: seen.append(args)).build():
        await asyncio.sleep(0)

    assert seen[-1][1] == seen[-1][2] > 0


# The builder


def test_builders_are_values():
    """Equal settings make equal builders; a method changes nothing; pickling keeps it."""
    first = EmbeddingModelBuilder("org/model").with_max_num_seqs(4)

    assert first == EmbeddingModelBuilder("org/model").with_max_num_seqs(4)
    assert hash(first) == hash(pickle.loads(pickle.dumps(first)))
    assert first != EmbeddingModelBuilder("org/model")
    assert repr(first) == "EmbeddingModelBuilder('org/model').with_max_num_seqs(4)"
    assert first.source.model_id == "org/model"


def test_every_setting_reaches_the_engine_or_the_loader(tmp_path):
    """The methods do as those of ModelBuilder."""
    topology = tmp_path / "topology.yml"
    topology.write_text("0-2:\n  isq: q8_0\n")
    built = (
        EmbeddingModelBuilder("org/model")
        .with_max_num_batched_tokens(100)
        .with_max_num_seqs(3)
        .with_dtype("f32")
        .with_device("cpu")
        .with_num_threads(2)
        .with_auto_isq(4)
        .with_topology_from_path(topology)
        .with_imatrix("matrix.dat")
        .with_tokenizer_json("tokenizer.json")
        .with_token_source("none")
        .with_hf_revision("v1")
        .from_hf_cache_path("cache")
        .with_throughput_logging()
        .with_logging()
        .with_progress(False)
    )

    same = (
        ModelBuilder("org/model")
        .with_max_num_batched_tokens(100)
        .with_max_num_seqs(3)
        .with_dtype("f32")
        .with_device("cpu")
        .with_num_threads(2)
        .with_auto_isq(4)
        .with_topology_from_path(topology)
        .with_imatrix("matrix.dat")
        .with_tokenizer_json("tokenizer.json")
        .with_token_source("none")
        .with_hf_revision("v1")
        .from_hf_cache_path("cache")
        .with_throughput_logging()
        .with_logging()
        .with_progress(False)
    )
    assert (built.base, built.config, built.source) == (same, same.config, same.source)


def test_wrong_settings_are_refused_at_once():
    """The error names the method."""
    with pytest.raises(ConfigError, match=r"with_max_num_seqs\(0\)"):
        EmbeddingModelBuilder("org/model").with_max_num_seqs(0)
    with pytest.raises(UnsupportedError, match="with_calibration_file"):
        EmbeddingModelBuilder("org/model").with_calibration_file("text")


def test_settings_of_chats_are_refused_by_name():
    """What has no part in embedding is not there, and the error says why."""
    with pytest.raises(AttributeError, match="no with_paged_attn; it concerns models that chat"):
        EmbeddingModelBuilder("org/model").with_paged_attn(None)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"has no with_nonsense$"):
        EmbeddingModelBuilder("org/model").with_nonsense()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "method", ["with_loader_type", "with_device_mapping", "write_uqff", "from_uqff"]
)
def test_what_only_rust_does_is_refused(method):
    """The names are there, and the error says what to do instead."""
    with pytest.raises(UnsupportedError, match=rf"{method}\('x'\) is not supported: \w+"):
        getattr(EmbeddingModelBuilder("org/model"), method)("x")


async def test_a_chat_builder_names_the_right_one():
    """A model without a head is sent to EmbeddingModelBuilder."""
    for kind, named in (("qwen3", "Qwen3Model"), ("gemma", "Gemma3TextModel")):
        with pytest.raises(UnsupportedError, match=f"{named}.*EmbeddingModelBuilder"):
            await ModelBuilder(bare_folder(kind)).with_force_cpu().build()
