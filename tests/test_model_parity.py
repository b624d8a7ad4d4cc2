"""Our models against Hugging Face's own, on tiny random weights."""

from __future__ import annotations

import functools
import json

import attrs
import pytest
import torch

from mistralrs_sdk.layers.attention import Attention
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.linear import MergedLinear
from mistralrs_sdk.models import build_model, read_config
from mistralrs_sdk.models.config import ModelConfig, RopeConfig
from tests.batches import Row, generate, generate_uncached
from tests.tiny_models import (
    TINY_MODELS,
    hf_greedy,
    hf_logits,
    tiny_checkpoint,
    tiny_config,
    tiny_model,
)

PROMPT = tuple(range(3, 48))
FAMILIES = ("llama", "mistral_swa", "qwen2_swa", "qwen3", "gemma2", "gemma3")


@functools.cache
def config_of(name: str) -> ModelConfig:
    return read_config(tiny_config(name).to_dict())


def ours(name: str, *, dtype: torch.dtype = torch.float32, config: ModelConfig | None = None):
    """Our model with the weights of the tiny Hugging Face one."""
    with torch.device("meta"):
        model = build_model(config or config_of(name))
    weights = tiny_model(name).state_dict()
    for module in model.modules():
        for key, _ in list(module.named_parameters(recurse=False)):
            path = next(n for n, m in model.named_modules() if m is module)
            if isinstance(module, MergedLinear):
                parent = path.rpartition(".")[0]
                weight = torch.cat([weights[f"{parent}.{part}.{key}"] for part in module.parts])
            else:
                weight = weights[f"{path}.{key}"]
            setattr(module, key, torch.nn.Parameter(weight.to(dtype), requires_grad=False))
    return model


@functools.cache
def cached(name: str):
    return ours(name)


@functools.cache
def reference(name: str, ids: tuple[int, ...]) -> torch.Tensor:
    return hf_logits(name, ids)


def assert_parity(name: str, rows: list[Row], prompts: list[tuple[int, ...]]) -> None:
    """Each id is the reference's most likely one after those before it, its logits within 1e-3."""
    for row, prompt in zip(rows, prompts, strict=True):
        expected = reference(name, tuple(row.ids[:-1]))[len(prompt) - 1 :]
        assert row.ids[len(prompt) :] == expected.argmax(-1).tolist()
        torch.testing.assert_close(torch.stack(row.logits), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize(("block_size", "chunk"), [(16, 1000), (4, 1), (8, 7), (16, 8)])
def test_greedy_ids_and_logits_equal_the_reference(name: str, block_size: int, chunk: int):
    """However the prompt is cut and its blocks lie, 24 greedy ids and their logits are right."""
    rows = generate(cached(name), [PROMPT], 24, block_size=block_size, chunk=chunk)

    assert_parity(name, rows, [PROMPT])


def test_reference_loop_gives_the_same_ids():
    """Generating with the reference itself ends in the same place as the step-by-step check."""
    rows = generate(cached("llama"), [PROMPT], 8)

    assert rows[0].ids[len(PROMPT) :] == hf_greedy("llama", PROMPT, 8)


@pytest.mark.parametrize("name", FAMILIES)
def test_sequences_in_one_batch_do_not_see_each_other(name: str):
    """Decode rows and prefill chunks of others in the batch leave a sequence's ids as they are."""
    prompts = [tuple(range(3, 3 + n)) for n in (3, 12, 37, 64)]

    rows = generate(cached(name), prompts, 16, chunk=7, apart=2)
    alone = [generate(cached(name), [prompt], 1)[0] for prompt in prompts]

    assert_parity(name, rows, prompts)
    for row, solo in zip(rows, alone, strict=True):
        torch.testing.assert_close(row.logits[0], solo.logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_prompt_lengths_around_block_and_window_edges(length: int):
    """A prompt that ends at, before or after a block or the window gives the same ids."""
    prompt = tuple(range(3, 3 + length))
    for chunk in (7, 16, 17):
        rows = generate(cached("mistral_swa"), [prompt], 6, block_size=16, chunk=chunk)

        assert_parity("mistral_swa", rows, [prompt])


@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_cache_the_ids_are_the_same(name: str):
    """Attending within the batch gives what attending to the cache gives."""
    prompts = [PROMPT, PROMPT[:1], PROMPT[:9]]

    assert_parity(name, generate_uncached(cached(name), prompts, 8), prompts)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3"])
def test_bfloat16_is_as_close_as_the_reference_in_bfloat16(name: str):
    """Our bfloat16 logits stray from float32 no more than the reference's own, first ids agree."""
    prompts = [tuple(range(3 + i, 23 + i)) for i in range(50)]
    exact = tiny_model(name)
    rounded = type(exact)(exact.config)
    rounded.load_state_dict(exact.state_dict())
    rounded.to(torch.bfloat16)
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        truth = exact(input_ids=ids, use_cache=False).logits[:, -1]
        theirs = rounded(input_ids=ids, use_cache=False).logits[:, -1].float()

    mine = torch.stack(
        [r.logits[0] for r in generate(ours(name, dtype=torch.bfloat16), prompts, 1)]
    )

    assert (mine - truth).abs().mean() <= 1.05 * (theirs - truth).abs().mean()
    top = theirs.topk(2).values
    clear = top[:, 0] - top[:, 1] > (theirs - truth).abs().mean()
    assert clear.sum() >= 25
    agree = mine.argmax(-1) == theirs.argmax(-1)
    assert agree[clear].float().mean() >= 0.95


def broken(name: str, **changes: object) -> float:
    """How far logits move when the config is changed."""
    model = ours(name, config=attrs.evolve(config_of(name), **changes))
    return distance(name, model)


def distance(name: str, model: torch.nn.Module) -> float:
    row = generate(model, [PROMPT], 1)[0]
    return float((row.logits[0] - reference(name, PROMPT)[-1]).abs().max())


@pytest.mark.parametrize("name", ["mistral_swa", "qwen2_swa", "qwen3_bias", "gemma2", "gemma3"])
def test_a_window_one_key_too_wide_would_show(name: str):
    """The comparison notices a window that is off by one."""
    windows = tuple(w and w + 1 for w in config_of(name).windows)

    assert broken(name, windows=windows) > 0.01


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", {"attn_softcap": None}),
        ("gemma2", {"final_softcap": None}),
        ("gemma3", {"final_softcap": None}),
        ("gemma3", {"attention_scale": 24**-0.5}),
        ("gemma3", {"ropes": (RopeConfig(theta=10_000.0),) * 6}),
        ("llama_bias", {"ropes": (RopeConfig(theta=10_000.0),) * 4}),
        ("llama_yarn", {"ropes": (RopeConfig(theta=10_000.0),) * 4}),
        ("mistral_full", {"ropes": (RopeConfig(theta=10_000.0),) * 4}),
        ("qwen2", {"qkv_bias": False}),
        ("llama_bias", {"o_bias": False}),
        ("llama_bias", {"mlp_bias": False}),
        ("qwen3_bias", {"qkv_bias": False}),
    ],
)
def test_a_feature_left_out_would_show(name: str, change: dict[str, object]):
    """The comparison notices each optional feature."""
    assert broken(name, **change) > 0.01


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_head_norms_left_out_would_show(name: str):
    """The comparison notices missing query and key norms."""
    model = ours(name)
    for module in model.modules():
        if isinstance(module, Attention):
            module.q_norm = module.k_norm = None

    assert distance(name, model) > 0.1


def test_embedding_scale_left_out_would_show():
    """The comparison notices Gemma's embedding scale."""
    model = ours("gemma2")
    for module in model.modules():
        if isinstance(module, Embedding):
            module.scale = None

    assert distance("gemma2", model) > 0.01


@pytest.mark.parametrize("name", TINY_MODELS)
def test_config_file_reads_like_the_config_object(name: str, tmp_path):
    """What save_pretrained writes, with keys left out as it likes, is the same model."""
    folder = tiny_checkpoint(name, tmp_path)

    assert read_config(json.loads((folder / "config.json").read_text())) == config_of(name)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_parameters_have_checkpoint_names(name: str):
    """Unpacking the fused names gives the reference's parameter names, no more and no fewer."""
    with torch.device("meta"):
        model = build_model(config_of(name))
    names = set()
    for key, weight in model.named_parameters():
        *parents, module, leaf = key.split(".")
        for part in model.packed_modules.get(module, (module,)):
            names.add(".".join([*parents, part, leaf]))
        assert weight.is_meta

    assert names == {key for key, _ in tiny_model(name).named_parameters()}
    assert not list(model.named_buffers())
    assert len(model.specs) == config_of(name).num_layers
