"""Engines whose weights are kept as on a GPU: what they say, what they take, what they re-read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mistralrs_sdk import (
    LayerTopology,
    Model,
    ModelBuilder,
    ModelLoadError,
    Topology,
    UnsupportedError,
)
from mistralrs_sdk.distributed import TensorParallel
from mistralrs_sdk.engine import requantise
from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.isq import parse_isq
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.linear import Linear
from mistralrs_sdk.loading.forms import choose_forms, quantise_target
from mistralrs_sdk.loading.loader import prepare_model
from mistralrs_sdk.loading.shards import refuse_split_blocks, shard_checkpoint, whole_target
from mistralrs_sdk.loading.weights import fill
from mistralrs_sdk.models.parallel import parts_of, share_on_meta
from mistralrs_sdk.quant.device_kinds import DENSE_ROWS, INT8
from mistralrs_sdk.quant.device_method import DeviceMethod
from mistralrs_sdk.quant.int4_groups import Int4Groups
from tests.checkpoint_files import config_for, tensors_of, write_folder
from tests.gpu_engine import gpu_engine
from tests.gpu_weights import CPU, gpu_weights, make_exact, margins, tensor_bytes
from tests.model_helpers import assert_idle, continue_ids, generated_ids, prompt, tiny_builder
from tests.packed_models import gguf_of, open_path
from tests.test_lora_model import adapter, ask

PROMPTS = [prompt(n, seed=n) for n in (5, 40, 150)]
SHORT = [prompt(n, seed=n) for n in (5, 40, 90)]
FORMS = pytest.mark.parametrize("isq", ["4", "8", "f8e4m3"])


@pytest.fixture(autouse=True)
def calls():
    """The int4 kernels that were called."""
    with gpu_weights() as found:
        yield found


def builder(name: str = "llama") -> ModelBuilder:
    """As a GPU computes by itself."""
    return tiny_builder(name).with_dtype("bf16")


def wide(tmp_path, *kinds: str) -> ModelBuilder:
    """A model whose rows fill blocks of every type."""
    path = gguf_of(tmp_path / "a.gguf", *(kinds or ("F32",)), vocab=512)
    return ModelBuilder(path).with_force_cpu().with_num_threads(1)


async def on_engine(model: Model, ask: Any) -> Any:
    """What `ask` returns for the engine's `CausalLM`."""

    def call(engine: Any) -> Any:
        with torch.inference_mode():
            return ask(engine.runner.model)

    return await model.inner().thread.call(call)


async def assert_its_weights_speak(
    model: Model, prompts: Sequence[Sequence[int]] = PROMPTS
) -> None:
    """Answers of prompts that are computed together are those of the numbers that its weights stand
    for, in float32 but for activations: nearly as likely as any other at every token."""
    found = await asyncio.gather(*(continue_ids(model, ids, 20) for ids in prompts))

    def compare(inner: Any) -> Tensor:
        make_exact(inner)
        return margins(inner, list(zip(prompts, found, strict=True)))

    behind = await on_engine(model, compare)
    assert float(behind.max()) < 0.25
    assert float(behind.mean()) < 0.01


# What is said


@FORMS
@pytest.mark.parametrize("name", ["llama", "llama_bias", "llama_tied", "qwen3", "gemma2"])
async def test_answers_are_those_of_the_quantised_weights(name, isq):
    """Fused layers, biases, tied heads, windows and soft caps; prompts beside decodes."""
    async with await builder(name).with_isq(isq).build() as model:
        await assert_its_weights_speak(model)
        await assert_idle(model)


async def test_answers_are_those_of_k_blocks(tmp_path, calls):
    """Four bits in the types of K: rows of 256 numbers and more."""
    async with await wide(tmp_path).with_isq(4).build() as model:
        assert model.inner().info.weights == "INT4/32 (Q4_K) x14, INT8 x2"
        await assert_its_weights_speak(model, SHORT)
    assert {"convert", "multiply"} == set(calls)


async def test_decodes_are_captured_with_quantised_weights():
    """In graphs, on FlashInfer's stand-in; answers are the same as without."""
    found = []
    for graphs in (True, False):
        with gpu_engine(graphs=graphs) as played:
            async with await builder().with_max_num_seqs(2).with_isq("4").build() as model:
                found.append([await continue_ids(model, ids, 12) for ids in PROMPTS[:2]])
            assert graphs is bool(played.graphs and played.graphs[0].stats.replayed)

    assert found[0] == found[1]


async def test_adapters_add_to_quantised_layers():
    """A row with one is another answer, beside rows without, which are as if there were none."""
    async with await builder().with_isq(8).build() as model:
        alone = generated_ids(await ask(model, None))
    made = builder().with_lora().with_lora_adapter("a", adapter("a")).with_isq(8)
    async with await made.build() as model:
        names = (None, "a", None, "a")
        found = await asyncio.gather(*(ask(model, name) for name in names))
        first, second, third, fourth = map(generated_ids, found)

    assert first == third == alone
    assert second == fourth != alone


# What is kept, and what it takes


@FORMS
async def test_a_plan_says_what_is_built(tmp_path, isq):
    """Forms, and bytes: of a loaded model exactly those."""
    made = wide(tmp_path).with_isq(isq)
    plan = await made.plan()

    async with await made.build() as model:
        info = model.inner().info
        taken = await on_engine(model, tensor_bytes)
        shown = str(model.describe())

    assert plan.weight_bytes == info.weight_bytes == taken
    assert plan.weights == info.weights
    assert info.weights in shown
    kind = {"4": "INT4/32 (Q4_K) x14", "8": "INT8 x16", "f8e4m3": "F8E4M3 x16"}[isq]
    assert kind in info.weights


async def test_a_topology_gives_parts_of_a_layer_forms_of_their_own(tmp_path):
    """What it leaves out stays dense, also within a fused layer."""
    topology = Topology().with_pattern(r"0\.self_attn\.v_proj", LayerTopology(isq=8))
    topology = topology.with_pattern(r"1\.mlp\.(gate|down)", LayerTopology(isq="q4_0"))

    async with await wide(tmp_path).with_topology(topology).build() as model:
        kinds = await on_engine(
            model,
            lambda inner: {
                name: [part.kind for part in module.method.parts]
                for name, module in inner.named_modules()
                if isinstance(getattr(module, "method", None), DeviceMethod)
            },
        )
        await assert_its_weights_speak(model, SHORT)

    layers = "model.layers"
    assert kinds == {
        f"{layers}.0.self_attn.qkv_proj": [DENSE_ROWS, INT8],
        f"{layers}.1.mlp.gate_up_proj": [Int4Groups("Q4_0"), DENSE_ROWS],
        f"{layers}.1.mlp.down_proj": [Int4Groups("Q4_0")],
    }


async def test_one_part_is_in_floats_at_a_time(tmp_path, monkeypatch):
    """The host reads a tensor, and some rows of it become floats on the device."""
    from mistralrs_sdk.loading import weights

    monkeypatch.setattr(weights, "_ENCODED_VALUES", 64 * 256)
    seen: list[int] = []
    encode = weights._encode

    def watched(kind: Any, weight: Tensor, **settings: Any) -> Any:
        seen.append(len(weight))
        return encode(kind, weight, **settings)

    monkeypatch.setattr(weights, "_encode", watched)
    async with await wide(tmp_path).with_isq(8).build() as model:
        await assert_its_weights_speak(model, SHORT)
    assert max(seen) == 64
    assert sum(seen) == 2 * 512 + 2 * (256 + 2 * 128 + 256 + 2 * 512 + 256)


async def test_an_importance_matrix_is_used_by_four_bits(tmp_path):
    """It changes the numbers of the layers that it is about."""
    from tests.test_isq_refused import importance_file

    found = []
    made = wide(tmp_path).with_isq(4)
    for each in (made, made.with_imatrix(importance_file(tmp_path / "i.gguf"))):
        async with await each.build() as model:
            found.append(await on_engine(model, dense_weights))

    same = [name for name in found[0] if torch.equal(found[0][name], found[1][name])]
    assert same == ["model.embed_tokens", "lm_head"]


@FORMS
async def test_a_weight_without_finite_values_is_refused_by_name(tmp_path, isq):
    """The error names the tensor and the form."""
    tensors = tensors_of(config_for("llama"))
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = float("nan")
    folder = write_folder(tmp_path, config_for("llama"), tensors)

    with pytest.raises(ModelLoadError, match=rf"{re.escape(name)} cannot be quantised to \w+"):
        await ModelBuilder(folder).with_force_cpu().with_num_threads(1).with_isq(isq).build()


# Requantising


def dense_weights(model: Any) -> dict[str, Tensor]:
    layers = ((n, m) for n, m in model.named_modules() if isinstance(m, (Linear, Embedding)))
    return {name: module.method.to_dense(module).clone() for name, module in layers}


async def test_a_running_model_is_requantised(tmp_path):
    """To what a model that is built so has, from and to every form; graphs are taken anew."""
    made = wide(tmp_path).with_max_num_seqs(2)
    with gpu_engine() as played:
        async with await made.build() as model:
            for isq in ("4", "f8e4m3", "8", "q4_0"):
                await continue_ids(model, PROMPTS[0], 6)
                await model.re_isq_model(isq)
                assert played.graphs[0].stats.captured == ()
                async with await made.with_isq(isq).build() as other:
                    ours = await on_engine(model, dense_weights)
                    theirs = await on_engine(other, dense_weights)
                    assert model.inner().info.weights == other.inner().info.weights
                    assert await continue_ids(model, PROMPTS[1], 8) == await continue_ids(
                        other, PROMPTS[1], 8
                    )
                assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


async def test_requantising_to_what_the_device_does_not_take_changes_nothing(tmp_path):
    """The error names the nearest, and the model goes on."""
    async with await wide(tmp_path).with_isq(8).build() as model:
        before = await continue_ids(model, PROMPTS[0], 6)
        with pytest.raises(UnsupportedError, match=r"^re_isq_model: isq \(q5k\).*use 8"):
            await model.re_isq_model("q5k")
        assert await continue_ids(model, PROMPTS[0], 6) == before


async def test_a_dtype_that_kernels_do_not_take_is_refused_when_requantising(tmp_path):
    """A model in float16 is built, and stays as it is."""
    async with await wide(tmp_path).with_dtype("f16").build() as model:
        with pytest.raises(UnsupportedError, match=r"re_isq_model: .*bfloat16.*dtype is f16"):
            await model.re_isq_model(4)


async def test_memory_is_given_back_after_requantising(tmp_path, monkeypatch):
    """The device's, which torch would keep."""
    given: list[torch.device] = []
    monkeypatch.setattr(requantise, "release_cached", given.append)
    async with await wide(tmp_path).build() as model:
        await model.re_isq_model(8)
    assert given == [CPU]


# Ranks


def ranks_of(checkpoint: Any, isq: str) -> list[tuple[Any, dict[str, Any]]]:
    """The models of two ranks, their weights loaded, and the forms these have."""
    found = []
    for rank in range(2):
        parallel = TensorParallel(rank, 2)
        whole = prepare_model(checkpoint)
        parts = parts_of(whole, parallel)
        target = whole_target(quantise_target(parse_isq(isq), None, on_cuda=True), checkpoint)
        refuse_split_blocks(checkpoint, parts, parallel, packing="none", target=target)
        own, model = shard_checkpoint(checkpoint, parts), share_on_meta(whole, parallel)
        forms = choose_forms(model, own, dtype=torch.bfloat16, packing="none", target=target)
        for name, form in forms.items():
            fill(model, name, form, tensors=own.tensors, dtype=torch.bfloat16, device=CPU)
        found.append((model, forms))
    return found


@pytest.mark.parametrize("isq", ["q4_0", "8", "f8e4m3"])
def test_ranks_divide_every_product(tmp_path, isq):
    """Rows side by side, and sums of what columns give, are those of the whole weight, as near as
    its form is: each rank quantises its part."""
    checkpoint = open_path(gguf_of(tmp_path / "a.gguf", "F32", vocab=100))
    models = ranks_of(checkpoint, isq)
    assert models[0][1].keys() == models[1][1].keys()
    near = 0.1 if isq == "q4_0" else 0.05

    def product(name: str, parts: Sequence[slice]) -> list[Tensor]:
        x = torch.randn((6, 256), generator=torch.Generator().manual_seed(1)).bfloat16()
        layers = [model.get_submodule(name) for model, _ in models]
        return [
            layer.method.apply(layer, x[:, part]) for layer, part in zip(layers, parts, strict=True)
        ]

    def whole(name: str) -> Tensor:
        x = torch.randn((6, 256), generator=torch.Generator().manual_seed(1)).bfloat16()
        return x.float() @ checkpoint.tensors[f"{name}.weight"].load().float().t()

    def is_near(found: Tensor, exact: Tensor) -> bool:
        return float((found.float() - exact).norm() / exact.norm()) < near

    halves = (slice(128), slice(128, 256))
    summed = sum(part.float() for part in product("model.layers.0.self_attn.o_proj", halves))
    assert is_near(summed, whole("model.layers.0.self_attn.o_proj"))
    head = torch.cat(product("lm_head", (slice(None),) * 2), 1)
    assert head.shape == (6, 100)
    assert is_near(head, whole("lm_head"))


def test_parts_that_begin_inside_of_a_group_are_refused(tmp_path):
    """Both numbers are named: where it would be cut, and the size of a block."""
    checkpoint = open_path(gguf_of(tmp_path / "a.gguf", "F32"))

    match = r"tensor_parallel \(2\).*o_proj.*column 128, inside of a INT4/32 \(Q4_K\) block of 256"
    with pytest.raises(ConfigError, match=match):
        ranks_of(checkpoint, "4")
