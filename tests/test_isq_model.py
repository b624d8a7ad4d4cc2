"""Models quantised while they are loaded: what they compute, what is refused, what it takes."""

from __future__ import annotations

import asyncio
import re
import weakref

import attrs
import pytest
import torch
from torch import Tensor, nn

from mistralrs_sdk import (
    ConfigError,
    LayerTopology,
    ModelBuilder,
    Topology,
)
from mistralrs_sdk.isq import RUNNABLE_TYPES
from mistralrs_sdk.kernels import native
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.linear import Linear
from mistralrs_sdk.loading import weights
from mistralrs_sdk.loading.checkpoint import Checkpoint, TensorSource
from mistralrs_sdk.loading.forms import choose_forms, quantise_target
from mistralrs_sdk.loading.loader import load_model, prepare_model
from mistralrs_sdk.models.decoder import CausalLM
from mistralrs_sdk.quant.ggml import GGML_TYPES, dequantise
from mistralrs_sdk.quant.quantise import quantise
from tests.checkpoint_files import config_for, tensors_of, write_folder
from tests.model_helpers import assert_idle, continue_ids, prompt, tiny_builder, tiny_folder
from tests.packed_models import (
    CPU,
    HIDDEN,
    IDS,
    dense_weights,
    error_of,
    gguf_of,
    load_quantised,
    logits,
    open_path,
    packed_bytes_of,
)
from tests.tiny_models import TINY_MODELS, hf_logits

needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels here")

PROMPTS = [prompt(length, seed=length) for length in (1, 12, 3, 37)]
COUNT = 24


def packed_builder(name: str = "llama", *, kv_tokens: int | None = None) -> ModelBuilder:
    """As a CPU keeps a tiny model by itself."""
    return tiny_builder(name, kv_tokens=kv_tokens).with_dtype("auto")


def with_numbers_of(packed: CausalLM, checkpoint: Checkpoint) -> CausalLM:
    """The same model with dense weights of the values that the packed ones have."""
    dense = load_model(checkpoint, dtype=torch.float32, device=CPU)
    numbers = dense_weights(packed)
    for name, module in dense.named_modules():
        if isinstance(module, (Linear, Embedding)):
            module.weight = nn.Parameter(numbers[name], requires_grad=False)
    return dense


# What they compute


@needs_native
@pytest.mark.parametrize(("number", "name"), list(enumerate(TINY_MODELS)))
async def test_text_does_not_depend_on_batches_chunks_preemption_or_the_cache(number, name):
    """Alone, all at once, in chunks of 5, from a warm prefix cache, and in a pool too small."""
    isq = ("q8_0", "q4_0", "hqq4", "q5_1")[number % 4]
    builder = packed_builder(name).with_isq(isq)
    async with await builder.with_prefix_cache_n(None).build() as model:
        alone = [await continue_ids(model, ids, COUNT) for ids in PROMPTS]
    chunked = builder.with_max_num_seqs(4).with_max_num_batched_tokens(5)
    small = packed_builder(name, kv_tokens=72).with_isq(isq).with_max_model_len(64)
    for variant in (builder, chunked, small):
        async with await variant.build() as model:
            for _ in range(2):
                texts = await asyncio.gather(*(continue_ids(model, ids, COUNT) for ids in PROMPTS))
                assert texts == alone
            stats = await model.stats()
            assert stats.preemptions > 0 if variant is small else stats.prefix_hits > 0
            await assert_idle(model)


@needs_native
@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_are_off_by_the_rounding_of_weights_and_inputs_only(name):
    """Against Hugging Face in float32; tiny models with wide weights magnify what is rounded."""
    checkpoint = open_path(tiny_folder(name))
    exact = hf_logits(name, IDS)
    eight, four = load_quantised(checkpoint, "q8_0"), load_quantised(checkpoint, "q4_0")

    assert error_of(logits(eight), exact) < 0.2
    assert error_of(logits(four), exact) > error_of(logits(eight), exact)
    for model in (eight, four):
        assert error_of(logits(model), logits(with_numbers_of(model, checkpoint))) < 0.15


@needs_native
@pytest.mark.parametrize("isq", RUNNABLE_TYPES)
def test_every_type_gives_the_weights_that_quantising_gives(tmp_path, isq):
    """Bit for bit, fused layers included: read, quantised, packed and unpacked again."""
    checkpoint = open_path(gguf_of(tmp_path / "a.gguf", "F32"))
    forms = choose_forms(
        prepare_model(checkpoint),
        checkpoint,
        dtype=torch.float32,
        packing="native",
        target=quantise_target(isq, None),
    )

    numbers = dense_weights(load_quantised(checkpoint, isq))

    known = {kind.name: kind for kind in GGML_TYPES.values()}
    for name, form in forms.items():
        if not form.is_matrix:
            continue
        parts = []
        for part, kind in zip(form.parts, form.types, strict=True):
            source = checkpoint.tensors[part]
            blocks = quantise(source.load(), kind)
            stored = known.get("Q4_1" if kind == "HQQ4" else kind)
            if stored is not None:
                parts.append(dequantise(blocks, stored, source.shape))
        if parts:  # HQQ8 is in no file, so nothing else reads it
            assert torch.equal(numbers[name.removesuffix(".weight")], torch.cat(parts)), name


@needs_native
@pytest.mark.parametrize("name", ["llama_tied", "qwen3"])
async def test_a_tied_head_is_the_quantised_embedding(name):
    """Rows that are looked up and scores come from one table of 8 bits."""
    checkpoint = open_path(tiny_folder(name))
    model = load_quantised(checkpoint, "q8_0")
    table = checkpoint.tensors["model.embed_tokens.weight"].load()

    assert model.lm_head is None
    rows = model.model.embed_tokens(torch.arange(512))
    assert torch.equal(rows, dense_weights(model)["model.embed_tokens"])
    torch.testing.assert_close(rows, table, atol=float(table.abs().max()) / 127, rtol=0)
    async with await packed_builder(name).with_auto_isq(8).build() as built:
        assert built.inner().info.weights == "Q8_0 x29"


@needs_native
async def test_a_head_that_the_file_unties_is_quantised_too(tmp_path, caplog):
    """The config ties them, the file has another head: that one is used, with a warning."""
    config = config_for("llama", tie_word_embeddings=True)
    tensors = tensors_of(config)
    tensors["lm_head.weight"] = torch.randn(512, 72)
    checkpoint = open_path(write_folder(tmp_path, config, tensors))

    model = load_quantised(checkpoint, "q8_0")

    assert "the file's head is used" in caplog.text
    assert error_of(dense_weights(model)["lm_head"], tensors["lm_head.weight"]) < 0.01


@needs_native
async def test_a_gguf_file_is_quantised_anew(tmp_path):
    """From its own numbers, into fewer bytes; what is of the type already is kept."""
    path = gguf_of(tmp_path / "a.gguf", "Q8_0", "Q4_0", vocab=48)
    builder = ModelBuilder(path).with_force_cpu().with_num_threads(1)
    async with await builder.with_isq("q4_0").build() as model:
        numbers = await model.inner().thread.call(lambda e: dense_weights(e.runner.model))
        info, text = model.inner().info, await continue_ids(model, IDS, 8)

    stored = open_path(path).tensors["model.layers.0.self_attn.k_proj.weight"]
    assert stored.blocks is not None
    assert stored.blocks.ggml_type == "Q4_0"
    kept = numbers["model.layers.0.self_attn.qkv_proj"][HIDDEN : HIDDEN + stored.shape[0]]
    assert torch.equal(kept, stored.load())
    assert info.weights == "Q4_0 x14, Q6_K x2"
    assert len(text) == 8


@needs_native
@pytest.mark.real_model
@pytest.mark.timeout(300)
async def test_the_demo_model_in_8_bits_says_what_it_says(demo_model):
    """Its tied head and embedding included; alone as in a batch."""
    builder = ModelBuilder(demo_model).with_force_cpu().with_num_threads(1).with_max_model_len(256)
    alphabet = "Here is the English alphabet: ABC"
    async with await builder.with_auto_isq(8).build() as model:
        ids = await model.tokenize(alphabet)
        alone = await continue_ids(model, ids, 6)
        others = [continue_ids(model, prompt(9, seed=i), 6) for i in range(3)]
        together = await asyncio.gather(continue_ids(model, ids, 6), *others)
        text = await model.detokenize(alone)

    assert text == "DEFGHIJKLM"
    assert together[0] == alone


# What they take and say


@needs_native
@pytest.mark.parametrize("bits", [2, 4, 8])
async def test_plan_memory_and_description_agree(tmp_path, bits):
    """Also of a number of bits, and fewer of these take less."""
    builder = ModelBuilder(gguf_of(tmp_path / "a.gguf", "F32", vocab=48)).with_force_cpu()
    builder = builder.with_num_threads(1).with_auto_isq(bits)
    plan = await builder.plan()
    async with await builder.build() as model:
        taken = await model.inner().thread.call(lambda e: packed_bytes_of(e.runner.model))
        info, shown = model.inner().info, model.describe()

    kinds = {2: "Q2_K x14, Q6_K x2", 4: "Q4_K x14, Q6_K x2", 8: "Q8_0 x16"}[bits]
    assert plan.weights == info.weights == kinds
    assert plan.weight_bytes == info.weight_bytes == taken
    assert taken < plan.num_parameters * (bits + 2) / 8
    assert kinds in shown
    assert re.search(rf"^isq +{bits} +user$", shown, re.MULTILINE)


@needs_native
async def test_progress_counts_the_bytes_of_the_result():
    """From none to all of what the quantised weights take."""
    seen: list[tuple[str, int, int]] = []
    builder = packed_builder().with_isq("q4_0").with_progress(lambda *step: seen.append(step))
    async with await builder.build() as model:
        await asyncio.sleep(0)
        total = model.inner().info.weight_bytes

    assert seen[0] == ("loading " + seen[0][0].split()[1], 0, total)
    assert seen[-1][1:] == (total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


@needs_native
def test_one_tensor_is_held_while_its_blocks_are_made():
    """Also of a fused layer: each tensor that was read is gone before the next one is."""
    checkpoint = open_path(tiny_folder())
    read: list[weakref.ref[Tensor]] = []

    def watched(source: TensorSource) -> TensorSource:
        def read_one() -> Tensor:
            assert all(tensor() is None for tensor in read)
            tensor = source.load().clone()
            read.append(weakref.ref(tensor))
            return tensor

        return attrs.evolve(source, load=read_one)

    tensors = {name: watched(source) for name, source in checkpoint.tensors.items()}

    load_quantised(attrs.evolve(checkpoint, tensors=tensors), "q8_0")

    assert len(read) == len(tensors)


@needs_native
@pytest.mark.parametrize(("switch", "used"), [("1", 1), ("0", 3), (None, 3)])
def test_quantising_takes_one_thread_if_asked(monkeypatch, switch, used):
    """MISTRALRS_ISQ_SINGLETHREAD; what computes afterwards has its threads again."""
    seen = set()

    def counting(*arguments, **settings):
        seen.add(torch.get_num_threads())
        return quantise(*arguments, **settings)

    monkeypatch.setattr(weights, "quantise", counting)
    monkeypatch.delenv(weights.SINGLE_THREAD, raising=False)
    if switch is not None:
        monkeypatch.setenv(weights.SINGLE_THREAD, switch)
    checkpoint, threads = open_path(tiny_folder()), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        load_quantised(checkpoint, "q4_0")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)

    assert seen == {used}


# Layer by layer


@needs_native
async def test_a_topology_quantises_the_layers_it_names():
    """The others stay as a CPU keeps them; the text is their own."""
    four, eight = LayerTopology(isq="q4_0"), LayerTopology(isq=8)
    topology = Topology().with_range(range(1, 3), four).with_pattern(r"v_proj$", eight)
    async with await packed_builder().with_topology(topology).build() as model:
        assert model.inner().info.weights == "F16 x14, Q4_0 x12, Q8_0 x4"
        mixed = await continue_ids(model, PROMPTS[1], COUNT)
        assert (
            await asyncio.gather(*(continue_ids(model, PROMPTS[1], COUNT) for _ in range(3)))
            == [mixed] * 3
        )


@needs_native
@pytest.mark.parametrize(
    ("topology", "named"),
    [
        (Topology().with_range(range(4, 9), LayerTopology(isq="q8_0")), "4-9"),
        (Topology().with_pattern("experts", LayerTopology(isq="q8_0")), "/experts/"),
    ],
)
async def test_a_topology_about_nothing_is_refused(topology, named):
    """A model of four layers has none of these; the error says what it has."""
    with pytest.raises(ConfigError, match=rf"{re.escape(named)} is about nothing.*0 to 3") as built:
        await packed_builder().with_topology(topology).build()
    with pytest.raises(ConfigError) as planned:
        await packed_builder().with_topology(topology).plan()

    assert str(built.value) == str(planned.value)
