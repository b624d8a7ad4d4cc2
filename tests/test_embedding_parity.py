"""Embeddings equal those of sentence-transformers, on tiny checkpoints of every kind."""

from __future__ import annotations

import math
import random
import warnings
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from mistralrs_sdk.builders.embedding_builder import EmbeddingModelBuilder
from mistralrs_sdk.chat.embeddings import EmbeddingRequest, as_embedding_request
from tests.embedding_models import embedder, embedding_folder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sentence_transformers import SentenceTransformer

IDENTITY, TANH = "linear.Identity", "activation.Tanh"
PROMPTS = {"query": "find what answers this: ", "document": ""}
_random = random.Random(0)
TEXTS = [
    "".join(_random.choices("etaoin shrdlu", k=length)).strip() or "x"
    for length in (3, 90, 1, 40, 17, 60)
]


def oracle(folder: Path, texts: list[str], **settings) -> torch.Tensor:
    model = SentenceTransformer(str(folder), device="cpu")
    return model.encode(texts, convert_to_tensor=True, show_progress_bar=False, **settings)


@asynccontextmanager
async def served(builder: EmbeddingModelBuilder):
    model = await builder.serve()
    try:
        yield model
    finally:
        await model.aclose()


async def embed(folder: Path, texts: list[str], **settings) -> torch.Tensor:
    async with served(embedder(folder)) as model:
        request = EmbeddingRequest(texts, **settings)
        return torch.tensor((await model.embed(request)).embeddings)


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5 * wanted.abs().max().item())


async def test_qwen3_embedding_equals_the_oracle(tmp_path):
    """Last token after the tokenizer's EOS, normalised; with and without an instruction."""
    folder = embedding_folder(tmp_path / "m", "qwen3", prompts=PROMPTS)

    plain, asked = await embed(folder, TEXTS), await embed(folder, TEXTS, prompt_name="query")

    assert_equal(plain, oracle(folder, TEXTS))
    assert_equal(asked, oracle(folder, TEXTS, prompt_name="query"))
    assert not torch.allclose(plain, asked, atol=1e-3)


async def test_embedding_gemma_equals_the_oracle(tmp_path):
    """Attention and windows both ways, mean pooling, two dense layers, normalised."""
    dense = [(96, 160, False, IDENTITY), (160, 96, False, IDENTITY)]
    folder = embedding_folder(
        tmp_path / "m", "gemma", pooling="mean", dense=dense, prompts=PROMPTS,
        default_prompt_name="query",
    )  # fmt: skip

    assert_equal(await embed(folder, TEXTS), oracle(folder, TEXTS))
    assert_equal(
        await embed(folder, TEXTS, prompt_name="document"),
        oracle(folder, TEXTS, prompt_name="document"),
    )


@pytest.mark.parametrize(
    "modes",
    ["cls", "max", "mean_sqrt_len_tokens", "weightedmean", ["mean", "lasttoken"]],
    ids=str,
)
async def test_every_pooling_equals_the_oracle(tmp_path, modes):
    """Each mode, and two side by side; an instruction is left out where the folder says so."""
    size = 64 * (2 if isinstance(modes, list) else 1)
    config = {"word_embedding_dimension": 64, "pooling_mode": modes, "include_prompt": False}
    folder = embedding_folder(
        tmp_path / "m", "llama", pooling_config=config, dense=[(size, 24, True, TANH)],
        normalize=False, prompts=PROMPTS,
    )  # fmt: skip

    assert_equal(await embed(folder, TEXTS), oracle(folder, TEXTS))
    assert_equal(
        await embed(folder, TEXTS, prompt_name="query"), oracle(folder, TEXTS, prompt_name="query")
    )


async def test_a_folder_saved_by_the_oracle_is_read(tmp_path):
    """The files that today's sentence-transformers writes, not only the older ones."""
    folder = embedding_folder(tmp_path / "m", "qwen3", dense=[(64, 32, True, TANH)])
    SentenceTransformer(str(folder), device="cpu").save(str(tmp_path / "saved"))

    assert_equal(await embed(tmp_path / "saved", TEXTS), oracle(folder, TEXTS))


async def test_a_cut_text_keeps_its_special_tokens(tmp_path):
    """`truncate_sequence` drops the end of the text before the tokenizer's EOS is added."""
    folder = embedding_folder(tmp_path / "m", "qwen3", max_seq_length=12)

    found = await embed(folder, TEXTS, truncate_sequence=True)

    assert_equal(found, oracle(folder, TEXTS))


async def test_packed_weights_give_nearly_the_same_vectors(tmp_path):
    """The default on a CPU rounds weights to float16: cosine above 0.999."""
    folder = embedding_folder(tmp_path / "m", "gemma", pooling="mean")
    builder = EmbeddingModelBuilder(folder).with_force_cpu().with_num_threads(1)

    async with served(builder) as model:
        response = await model.embed(as_embedding_request(TEXTS))

    wanted = oracle(folder, TEXTS)
    cosines = torch.cosine_similarity(torch.tensor(response.embeddings), wanted)
    assert cosines.min() > 0.999
    assert all(math.isclose(v.norm().item(), 1, abs_tol=1e-5) for v in wanted)
