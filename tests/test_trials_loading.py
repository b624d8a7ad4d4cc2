"""Failures others met, as trials: weights, number types, GGUF files, several models at once."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import attrs
import pytest
import torch

from mistralrs_sdk import (
    BlockingModel,
    EngineClosedError,
    ModelBuilder,
    ModelLoadError,
    PagedAttentionMetaBuilder,
    RequestError,
)
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.sdpa import SdpaBackend
from mistralrs_sdk.loading.gguf import open_gguf
from mistralrs_sdk.loading.loader import load_model
from tests.batches import Row, make_batch
from tests.model_helpers import (
    assert_idle,
    continue_ids,
    endless,
    expected,
    greedy,
    prompt,
    resident_bytes,
    tiny_builder,
    tiny_folder,
)
from tests.tiny_models import hf_greedy, hf_logits, tiny_checkpoint

ALPHABET = "Here is the English alphabet: ABC"


def real_model(test):
    """The marks of a test on the real model."""
    return pytest.mark.real_model(pytest.mark.timeout(300)(test))


def smol_builder(path: Path) -> ModelBuilder:
    builder = ModelBuilder(path).with_force_cpu().with_num_threads(1)
    return builder.with_max_model_len(512).with_max_num_seqs(4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama_bias"])
async def test_biases_and_query_and_key_norms_count(name):
    """From a checkpoint on disk, a prompt of 100 ids and 24 greedy ones equal the oracle."""
    ids = prompt(100, seed=49)
    async with await tiny_builder(name).build() as model:
        assert await continue_ids(model, ids, 24) == expected(name, tuple(ids), 24)


@pytest.mark.parametrize("window", [32, None, 4096])
async def test_any_sliding_window_with_chunks_and_prefix_cache(tmp_path, window):
    """Prompts around and beyond the window, sent twice, shared prefixes; null is full attention."""
    folder = tiny_checkpoint("mistral_swa", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    prompts = [prompt(length, seed=length) for length in (31, 32, 33, 100)]
    shared = [[*prompt(64, seed=64), *prompt(5, seed=i)] for i in range(2)]
    oracle = [hf_greedy(folder, ids, 40) for ids in [*prompts, *shared]]
    paged = PagedAttentionMetaBuilder().with_block_size(8).build()
    builder = ModelBuilder(folder).with_dtype("f32").with_num_threads(1).with_paged_attn(paged)
    builder = builder.with_max_num_seqs(4)
    async with await builder.with_max_num_batched_tokens(8).build() as model:
        for _ in range(2):
            assert [await continue_ids(model, ids, 40) for ids in prompts] == oracle[:4]
            both = await asyncio.gather(*(continue_ids(model, ids, 40) for ids in shared))
            assert both == oracle[4:]
        assert (await model.stats()).prefix_hits >= 6
        await assert_idle(model)
    narrow = expected("mistral_swa", tuple(prompts[-1]), 40)
    assert (oracle[3] == narrow) is (window == 32)


async def test_half_precision_agrees_with_the_reference_in_half_precision():
    """First tokens of 50 short prompts: float32 as the oracle, bf16 as Hugging Face's bf16."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        tiny_folder(), attn_implementation="eager", dtype=torch.bfloat16
    ).eval()
    prompts = [prompt(3 + i % 10, seed=i) for i in range(50)]
    for dtype, wanted, share in (
        ("f32", [expected("llama", tuple(ids), 1) for ids in prompts], 1.0),
        ("bf16", [hf_greedy(reference, ids, 1) for ids in prompts], 0.95),
    ):
        async with await tiny_builder().with_dtype(dtype).build() as model:
            firsts = await asyncio.gather(*(continue_ids(model, ids, 1) for ids in prompts))
        same = sum(a == b for a, b in zip(firsts, wanted, strict=True))
        assert same >= share * len(prompts)


@real_model
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
async def test_the_real_model_runs_in_every_number_type(demo_model, dtype):
    """describe() shows the type asked for, 500 ids go through, the reference text begins."""
    async with await smol_builder(demo_model).with_dtype(dtype).build() as model:
        row = next(line for line in model.describe().splitlines() if line.startswith("dtype"))
        assert row.split()[1:] == [dtype, "user"]
        long = await model.send_completion_request(list(range(1000, 1500)), greedy(1))
        assert long.usage.prompt_tokens == 500
        answer = await model.send_completion_request(ALPHABET, greedy(3))
        assert answer.choices[0].text == "DEFGHI"


@real_model
def test_logits_of_the_real_model_equal_hugging_faces(demo_model):
    """The same dequantised weights in LlamaForCausalLM: the last 10 of 300 positions agree."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_gguf(demo_model)
    ours = load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    config = LlamaConfig(**checkpoint.config, attn_implementation="eager")
    weights = {name: source.load().float() for name, source in checkpoint.tensors.items()}
    theirs = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32
    ).eval()
    ids = checkpoint.tokenizer.tokenizer.encode("The rain in Spain. " * 60).ids[:300]

    reference = hf_logits(theirs, ids)[-10:]
    with torch.inference_mode():
        logits = all_logits(ours, ids)[-10:]

    assert len(ids) == 300
    cosine = torch.nn.functional.cosine_similarity(logits, reference, dim=-1)
    assert cosine.min() >= 0.999
    assert torch.equal(logits.argmax(-1), reference.argmax(-1))


def all_logits(model, ids: list[int]) -> torch.Tensor:
    """Logits after each of the ids, computed in one step."""
    row = Row(ids, list(range(1, 2 + len(ids) // 16)))
    cache = PagedKVCache(
        model.specs,
        num_blocks=len(row.blocks) + 1,
        block_size=16,
        dtype=torch.float32,
        device="cpu",
    )
    backend = SdpaBackend(cache)
    batch = attrs.evolve(make_batch([(row, len(ids))], 16), logits_indices=torch.arange(len(ids)))
    backend.plan(batch)
    return model(batch, backend)


async def assert_no_engine_thread() -> None:
    """Soon: a build that fails does not wait for its thread to end."""
    with anyio.fail_after(10):
        while any(thread.name == "mistralrs-engine" for thread in threading.enumerate()):
            await asyncio.sleep(0.005)


def edited_copy(source: Path, target: Path, *keys: str) -> Path:
    """A copy of a GGUF file in which these metadata keys have another name."""
    shutil.copyfile(source, target)
    with open(target, "r+b") as file:
        header = file.read(8 << 20)
        for key in keys:
            file.seek(header.index(key.encode()))
            file.write(key[:-2].encode() + b"__")
    return target


@real_model
async def test_a_gguf_without_template_and_bos_completes_but_does_not_chat(demo_model, tmp_path):
    """chat() says what is missing and how to go on; raw text gets no invented BOS."""
    keys = (
        "tokenizer.chat_template",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.add_bos_token",
    )
    path = edited_copy(demo_model, tmp_path / "edited.gguf", *keys)
    async with await smol_builder(path).build() as model:
        with pytest.raises(RequestError, match="chat template"):
            await model.chat("Hello")
        assert await model.tokenize("Hello") == [19556]
        answer = await model.send_completion_request(ALPHABET, greedy(2))
        assert answer.choices[0].text == "DEFGH"


@real_model
@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("llama.attention.head_count_kv", "wrong shape"),
        ("llama.context_length", "llama.context_length"),
    ],
)
async def test_a_gguf_without_a_key_it_needs_is_never_half_built(demo_model, tmp_path, key, words):
    """A default that does not suit the tensors, or no default at all: a typed error, no thread."""
    path = edited_copy(demo_model, tmp_path / "edited.gguf", key)
    with pytest.raises(ModelLoadError, match=words):
        await smol_builder(path).build()
    await assert_no_engine_thread()


async def test_a_build_that_fails_on_the_engine_thread_leaks_nothing(tmp_path):
    """A tensor is missing, five times: typed error, no thread, no open file, memory flat."""
    folder = tiny_checkpoint("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    files = len(os.listdir("/proc/self/fd"))
    sizes = []
    for _ in range(5):
        with pytest.raises(ModelLoadError, match=r"missing: .*layers\.4"):
            await ModelBuilder(folder).with_num_threads(1).build()
        gc.collect()
        sizes.append(resident_bytes())
    await assert_no_engine_thread()
    assert len(os.listdir("/proc/self/fd")) <= files
    assert sizes[-1] < 1.05 * sizes[1]


def test_two_models_from_two_threads_answer_as_alone():
    """Eight requests each, from plain threads, at the same time."""
    requests = [endless(f"request {i}").set_sampler_max_len(12) for i in range(8)]
    with (
        BlockingModel.from_builder(tiny_builder("llama")) as llama,
        BlockingModel.from_builder(tiny_builder("qwen3")) as qwen,
        ThreadPoolExecutor(2) as threads,
    ):

        def ask_all(model: BlockingModel) -> list[str | None]:
            answers = [model.send_chat_request(request) for request in requests]
            return [answer.choices[0].message.content for answer in answers]

        solo = [ask_all(llama), ask_all(qwen)]
        together = list(threads.map(ask_all, [llama, qwen]))
    assert together == solo
    assert solo[0] != solo[1]


async def test_two_models_in_one_loop_answer_as_alone():
    """Eight requests each, all at once."""
    prompts = [prompt(9, seed=i) for i in range(8)]
    names = ("llama", "qwen3")
    async with await tiny_builder("llama").build() as a, await tiny_builder("qwen3").build() as b:
        results = await asyncio.gather(
            *(continue_ids(model, ids, 12) for ids in prompts for model in (a, b))
        )
        await assert_idle(a)
        await assert_idle(b)
    assert results == [expected(name, tuple(ids), 12) for ids in prompts for name in names]


async def test_closing_with_three_requests_running_fails_all_three():
    """Each gets EngineClosedError within a second, and so does whoever comes later."""
    model = await tiny_builder().build()
    running = [asyncio.create_task(model.send_chat_request(endless(f"{i}"))) for i in range(3)]
    while (await model.stats()).running < 3:
        await asyncio.sleep(0.001)
    started = time.perf_counter()
    await model.aclose()
    outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert time.perf_counter() - started < 1
    assert [type(outcome) for outcome in outcomes] == [EngineClosedError] * 3
    with pytest.raises(EngineClosedError):
        await model.send_completion_request(prompt(9))


@real_model
async def test_building_the_real_model_again_and_again_leaves_memory_flat(demo_model):
    """Ten cycles: resident memory grows by less than 5 percent after the third, threads by none."""
    sizes, counts = [], []
    for _ in range(10):
        async with await smol_builder(demo_model).build() as model:
            response = await model.send_completion_request("Hello", greedy(1))
            assert response.usage.completion_tokens == 1
        del model, response
        gc.collect()
        sizes.append(resident_bytes())
        counts.append(threading.active_count())
    # now and then the allocator gives a buffer back one cycle late
    assert min(sizes[-3:]) < 1.05 * max(sizes[:3])
    assert counts[-1] <= counts[2]
