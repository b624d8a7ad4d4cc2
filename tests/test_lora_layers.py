"""What adapters add to the layers: as PEFT merges it, in every form the weights are kept in."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from mistralrs_sdk.attention.sdpa import UncachedSdpaBackend
from mistralrs_sdk.kernels import native
from mistralrs_sdk.kernels.lora import Spans, add_low_rank
from mistralrs_sdk.layers.lora import LoraLayers, LoraPair, LoraWeights
from mistralrs_sdk.loading.forms import choose_forms
from mistralrs_sdk.loading.loader import load_model, prepare_model
from mistralrs_sdk.loading.peft import open_adapter
from mistralrs_sdk.models.decoder import CausalLM
from tests.adapter_files import LEAVES, module, peft_merged, random_pairs, shapes_of, write_adapter
from tests.batches import Row, make_batch
from tests.gguf_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    metadata_for,
    tensors_for,
    write_gguf,
)
from tests.model_helpers import tiny_folder
from tests.packed_models import CPU, dense_weights, error_of, gguf_of, open_path
from tests.tiny_models import hf_logits, tiny_config

IDS = list(range(3, 39))
GGUF_SHAPES = shapes_of(
    {
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS,
    }
)
native_only = pytest.mark.skipif(not native.available(), reason="no native kernels here")


def load(path: Path, *, packing: Any = "none") -> CausalLM:
    """The model in float32, its weights dense or as a CPU keeps them by itself."""
    checkpoint = open_path(path)
    model = prepare_model(checkpoint)
    forms = choose_forms(model, checkpoint, dtype=torch.float32, packing=packing)
    return load_model(checkpoint, dtype=torch.float32, device=CPU, model=model, forms=forms)


def layers_of(model: CausalLM, *, packed: bool = False) -> LoraLayers:
    return LoraLayers(model, packed=packed, dtype=torch.float32, device=CPU)


@torch.inference_mode()
def logits(model: CausalLM, ids: list[int] = IDS) -> Tensor:
    """After each id."""
    batch = make_batch([(Row(ids, list(range(100))), len(ids))], 8)
    batch = attrs.evolve(batch, logits_indices=torch.arange(len(ids)))
    backend = UncachedSdpaBackend()
    backend.plan(batch)
    return model(batch, backend)


def adapted(model: CausalLM, layers: LoraLayers, weights: LoraWeights) -> Tensor:
    """The same with an adapter on all rows."""
    with layers.adding([(0, len(IDS), weights)]):
        return logits(model)


@functools.cache
def tiny(name: str) -> CausalLM:
    return load(tiny_folder(name))


@pytest.mark.parametrize(
    ("name", "leaves", "changes"),
    [
        ("llama", LEAVES, {}),
        ("llama", ("k_proj", "up_proj"), {"use_rslora": True}),
        ("llama_gqa93", LEAVES, {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"o_proj": 1}}),
        ("mistral_swa", ("q_proj", "v_proj"), {}),
        ("qwen2", LEAVES, {}),
        ("qwen3_bias", ("q_proj", "k_proj", "v_proj", "down_proj"), {}),
        ("gemma2", LEAVES, {"target_modules": "all-linear"}),
        ("gemma3", LEAVES, {"target_modules": r".*\.(self_attn|mlp)\.\w+_proj"}),
    ],
)
def test_an_adapter_computes_what_peft_merges(tmp_path, name, leaves, changes):
    """Logits within 1e-4 of their spread of the merged Hugging Face model, far from the base's."""
    ranks = dict.fromkeys(leaves, 4) | changes.get("rank_pattern", {})
    tensors = random_pairs(shapes_of(tiny_config(name)), ranks, leaves=leaves, size=0.05)
    folder = write_adapter(tmp_path, tensors, leaves=leaves, **changes)
    merged = hf_logits(peft_merged(name, folder), IDS)
    model = tiny(name)
    layers = layers_of(model)

    found = adapted(model, layers, layers.make(open_adapter(folder, layers.targets).load()))

    spread = merged.std()
    torch.testing.assert_close(found / spread, merged / spread, atol=1e-4, rtol=0)
    assert (found - logits(model)).abs().max() > 0.01 * spread


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k as llama's GGUF files store them: the two halves of a head interleaved."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def test_the_parts_land_right_in_a_gguf_file_with_permuted_rows(tmp_path):
    """The same as a GGUF file into which the adapter was merged in the file's own order."""
    pairs = pairs_of(random_pairs(GGUF_SHAPES, 4, size=0.1))
    tensors = tensors_for("llama")
    base = write_gguf(tmp_path / "base.gguf", "llama", metadata_for("llama"), tensors)
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    for layer in range(LAYERS):
        for leaf, name in zip(LEAVES, names, strict=True):
            delta = merged_delta(pairs[module(layer, leaf)])
            if leaf in heads:
                delta = permuted(delta, heads[leaf])
            tensors[f"blk.{layer}.{name}.weight"] += delta.numpy()
    merged = write_gguf(tmp_path / "merged.gguf", "llama", metadata_for("llama"), tensors)
    model, wanted, ids = load(base), load(merged), [3 + i for i in range(25)]
    layers = layers_of(model)

    with layers.adding([(0, len(ids), layers.make(pairs))]):
        found = logits(model, ids)

    exact = logits(wanted, ids)
    assert error_of(found, exact) < 1e-5
    assert error_of(logits(model, ids), exact) > 0.1


def pairs_of(tensors: dict[str, Tensor], scale: float = 2.0) -> dict[str, LoraPair]:
    """The matrices of a file by the name of what they change."""
    names = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    return {
        name: LoraPair(
            a=tensors[f"base_model.model.{name}.lora_A.weight"],
            b=tensors[f"base_model.model.{name}.lora_B.weight"],
            scale=scale,
        )
        for name in names
    }


def merged_delta(pair: LoraPair) -> Tensor:
    """What merging adds to the weight."""
    return pair.scale * pair.b @ pair.a


def merge(model: CausalLM, pairs: dict[str, LoraPair]) -> None:
    """Add the adapter to the dense weights of a model."""
    layers = layers_of(model)
    for name, pair in pairs.items():
        target = layers.targets[name]
        parent = model.get_submodule(name.rpartition(".")[0])
        leaf = {"self_attn": "qkv_proj", "mlp": "gate_up_proj"}[name.split(".")[3]]
        owner: Any = getattr(parent, name.rpartition(".")[2], None) or getattr(parent, leaf)
        owner.weight[target.rows] += merged_delta(pair)


@native_only
@pytest.mark.parametrize("kinds", [("F16",), ("Q8_0",), ("Q4_K", "Q6_K", "F16", "Q8_0")])
def test_quantised_base_weights_get_the_same_addition(tmp_path, kinds):
    """As far from the merged dequantised weights as the base model is from its own."""
    path = gguf_of(tmp_path / "m.gguf", *kinds)
    model = load(path, packing="native")
    config = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    pairs = pairs_of(random_pairs(shapes_of(config), 8, size=0.03))
    dense = load(path)
    for name, weight in dense_weights(model).items():
        dense.get_submodule(name).weight.copy_(weight)  # type: ignore[union-attr]
    ids = [3 + i for i in range(len(IDS))]
    base_error = error_of(logits(model, ids), logits(dense, ids))
    base = logits(model, ids)
    merge(dense, pairs)
    exact = logits(dense, ids)
    layers = layers_of(model, packed=True)

    with layers.adding([(0, len(ids), layers.make(pairs))]):
        found = logits(model, ids)

    assert error_of(found, exact) < 2 * base_error + 2e-3
    assert error_of(base, exact) > 10 * error_of(found, exact)


# Rows and steps


def weights_of(layers: LoraLayers, seed: int, leaves: tuple[str, ...] = LEAVES) -> LoraWeights:
    shapes = {name: (t.out_features, t.in_features) for name, t in layers.targets.items()}
    return layers.make(pairs_of(random_pairs(shapes, 4, leaves=leaves, seed=seed)))


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=native_only)])
def test_rows_of_no_adapter_stay_bit_for_bit(packed):
    """Of one layer: rows before, between and behind those of two adapters."""
    model = tiny("llama")
    layers = layers_of(model, packed=packed)
    first, second = weights_of(layers, 1), weights_of(layers, 2, ("q_proj", "v_proj"))
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    layer = model.get_submodule("model.layers.0.self_attn.qkv_proj")
    base = layer(x)

    with layers.adding([(3, 7, first), (12, 19, second)]):
        found = layer(x)

    others = [0, 1, 2, 7, 8, 9, 10, 11, 19]
    assert torch.equal(found[others], base[others])
    for rows in (slice(3, 7), slice(12, 19)):
        assert not torch.equal(found[rows], base[rows])
    assert torch.equal(layer(x), base), "nothing is left behind"


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=native_only)])
def test_a_layer_an_adapter_does_not_change_is_the_base_models(packed):
    """Also the other parts of a fused one."""
    model = tiny("llama")
    layers = layers_of(model, packed=packed)
    weights = weights_of(layers, 1, ("k_proj",))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    fused = model.get_submodule("model.layers.1.self_attn.qkv_proj")
    other = model.get_submodule("model.layers.1.self_attn.o_proj")
    base, base_other = fused(x), other(x)

    with layers.adding([(0, 3, weights)]):
        found, found_other = fused(x), other(x)

    k = layers.targets[module(1, "k_proj")].rows
    assert torch.equal(found_other, base_other)
    assert torch.equal(found[:, : k.start], base[:, : k.start])
    assert torch.equal(found[:, k.stop :], base[:, k.stop :])
    assert not torch.equal(found[:, k], base[:, k])


def test_nothing_is_left_behind_when_a_step_fails():
    """The next step is the base model's again."""
    model = tiny("llama")
    layers = layers_of(model)

    with pytest.raises(RuntimeError, match="lost"), layers.adding([(0, 2, weights_of(layers, 1))]):
        raise RuntimeError("lost")

    assert not any(vars(layer).get("additions") for layer in model.modules())


def test_a_layer_that_was_replaced_is_found_again():
    """As requantising does."""
    model = load(tiny_folder("llama"))
    layers = layers_of(model)
    weights = weights_of(layers, 1, ("down_proj",))
    parent: Any = model.get_submodule("model.layers.0.mlp")
    parent.down_proj = copy.deepcopy(parent.down_proj)

    with layers.adding([(0, 2, weights)]):
        assert vars(parent.down_proj)["additions"]


# Numbers


@native_only
@pytest.mark.parametrize(("size_a", "size_b"), [(1.0, 1.0), (30.0, 1e-6), (1e-7, 1e3), (1.0, 0.0)])
def test_float16_keeps_matrices_of_any_magnitude(size_a, size_b):
    """Small values next to great ones lose no digits: only float16's rounding is seen."""
    model = tiny("llama")
    layers = layers_of(model, packed=True)
    generator = torch.Generator().manual_seed(0)
    pair = LoraPair(
        a=torch.randn(8, 64, generator=generator) * size_a,
        b=torch.randn(64, 8, generator=generator) * size_b,
        scale=2.0,
    )
    x = torch.randn(5, 64, generator=generator)
    weights = layers.make({module(0, "q_proj"): pair})
    found = torch.zeros(5, 64)
    spans = Spans()
    assert weights.packed is not None
    spans.set([(0, 5, weights.packed)])
    add_low_rank(x, found, spans, layers.targets[module(0, "q_proj")].module)

    exact = x @ merged_delta(pair).T
    assert (found - exact).norm() <= 1e-3 * exact.norm()


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=native_only)])
def test_values_that_are_no_numbers_are_refused_with_the_matrix(packed):
    """Before any request sees them."""
    layers = layers_of(tiny("llama"), packed=packed)
    pair = LoraPair(a=torch.full((4, 64), torch.nan), b=torch.ones(64, 4), scale=1.0)

    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj: .* no finite numbers"):
        layers.make({module(0, "q_proj"): pair})


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=native_only)])
def test_the_size_is_known_before_anything_is_made(packed):
    """What is announced is what the matrices take."""
    layers = layers_of(tiny("llama"), packed=packed)
    leaves = ("q_proj", "k_proj", "down_proj")
    weights = weights_of(layers, 1, leaves)
    if weights.packed is not None:
        low_ranks = [low_rank for low_rank in weights.packed.layers if low_rank is not None]
        taken = sum(w.num_bytes for low_rank in low_ranks for w in low_rank.weights)
    else:
        taken = sum(p.a.nbytes + p.b.nbytes for parts in weights.dense for p in parts)

    ranks = {name: 4 for name in layers.targets if name.endswith(leaves)}
    assert layers.num_bytes(ranks) == taken
