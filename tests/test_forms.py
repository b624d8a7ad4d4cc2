"""In which form each weight is kept, chosen from headers and settings alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from mistralrs_sdk import IsqBits, LayerTopology, Topology
from mistralrs_sdk.kernels.matmul import packed_bytes
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.linear import Linear, MergedLinear
from mistralrs_sdk.loading.checkpoint import Checkpoint, StoredBlocks, TensorSource
from mistralrs_sdk.loading.forms import (
    Form,
    choose_forms,
    choose_packing,
    describe_forms,
    forms_as_kept,
    parts_of_parameters,
    quantise_target,
    total_bytes,
)
from mistralrs_sdk.models import build_model, read_config
from mistralrs_sdk.models.decoder import CausalLM
from mistralrs_sdk.quant.half import HALF
from mistralrs_sdk.quant.packed import PackedMethod, Rows
from tests.checkpoint_files import config_for

HIDDEN, MLP, VOCAB, KV = 256, 288, 512, 128
LAYER = "model.layers.0"
QKV, GATE_UP, DOWN = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def unread() -> torch.Tensor:
    raise AssertionError("a tensor was read")


def model_of(kind: str = "llama", *, tied: bool = False) -> CausalLM:
    """Two layers, parameters on "meta"; MLP is no multiple of 256."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": MLP, "tie_word_embeddings": tied}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.device("meta"):
        return build_model(read_config(config_for(kind, **sizes, **heads)))


def checkpoint_of(model: CausalLM, types: Mapping[str, str] | None = None) -> Checkpoint:
    """Headers that suit the model; `types` has the blocks of some tensors, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parts in parts_of_parameters(model).items():
        parameter, module = model.get_parameter(name), model.get_submodule(name.rpartition(".")[0])
        sizes = module.parts.values() if isinstance(module, MergedLinear) else parameter.shape[:1]
        shapes |= {p: (n, *parameter.shape[1:]) for p, n in zip(parts, sizes, strict=True)}
    blocks = {name: StoredBlocks(ggml_type=t, load=unread) for name, t in (types or {}).items()}
    tensors = {
        name: TensorSource(shape=shape, load=unread, blocks=blocks.get(name))
        for name, shape in shapes.items()
    }
    made_up: Any = None
    return Checkpoint(
        name="made up",
        files=(),
        config={},
        tensors=tensors,
        tokenizer=made_up,
        generation_config={},
        format="made up",
    )


def forms_of(
    model: CausalLM | None = None, types: Mapping[str, str] | None = None, **settings: Any
) -> dict[str, Form]:
    """As on a CPU with native kernels, if nothing else is said."""
    model = model_of() if model is None else model
    settings = {"packing": "native", "dtype": torch.float32} | settings
    return choose_forms(model, checkpoint_of(model, types), **settings)


def by_isq(isq: Any, model: CausalLM | None = None, **settings: Any) -> dict[str, Form]:
    return forms_of(model, target=quantise_target(isq, None), **settings)


def types_of(forms: Mapping[str, Form]) -> set[str]:
    """Of the matrices."""
    return {kind for form in forms.values() if form.is_matrix for kind in form.types}


# By themselves


@pytest.mark.parametrize(
    ("changes", "packing"),
    [
        ({}, "native"),
        ({"native": "AVX-512"}, "native"),
        ({"native": "plain C++"}, "half"),
        ({"native": None}, "half"),
        ({"native": None, "half": False}, "none"),
        ({"native": "plain C++", "half": False}, "none"),
        ({"automatic": False}, "none"),
        ({"device": "cuda"}, "none"),
        ({"device": "mps"}, "none"),
    ],
)
def test_weights_are_packed_by_the_fastest_that_is_there(changes, packing):
    """On a CPU only, and only if the user named no number type."""
    settings = {"device": "cpu", "automatic": True, "native": "AVX2", "half": True}

    assert choose_packing(**(settings | changes)) == packing


def test_floats_become_float16_and_what_is_no_matrix_keeps_the_dtype():
    """Norms and biases are few, and added to activations."""
    forms = forms_of(model_of("qwen2"))

    assert types_of(forms) == {"F16"}
    plain = {name: form for name, form in forms.items() if not form.is_matrix}
    assert {name.rpartition(".")[2] for name in plain} == {"weight", "bias"}
    assert all(form.method is None and set(form.types) == {"f32"} for form in plain.values())
    assert forms["model.norm.weight"].num_bytes == 4 * HIDDEN
    assert forms[f"{LAYER}.self_attn.qkv_proj.bias"].num_bytes == 4 * (HIDDEN + 2 * KV)
    assert forms[HEAD].num_bytes == 2 * VOCAB * HIDDEN


def test_blocks_are_kept_as_they_are_stored():
    """Nothing is quantised anew, and the bytes are the file's but for the order."""
    types = {f"{LAYER}.{DOWN}": "Q8_0", EMBEDDING: "Q6_K"}
    forms = forms_of(types=types)

    assert forms[f"{LAYER}.{DOWN}"].method == PackedMethod((Rows("Q8_0", HIDDEN),))
    assert forms[f"{LAYER}.{DOWN}"].num_bytes == HIDDEN * MLP // 32 * 34
    assert forms[EMBEDDING].num_bytes == packed_bytes("Q6_K", (VOCAB, HIDDEN))
    assert forms[f"model.layers.1.{DOWN}"].types == ("F16",)


def test_parts_of_a_fused_layer_keep_their_own_types():
    """As in files that give values more bits than queries; neighbours of one type are one run."""
    types = {
        f"{LAYER}.self_attn.q_proj.weight": "Q4_K",
        f"{LAYER}.self_attn.k_proj.weight": "Q4_K",
        f"{LAYER}.self_attn.v_proj.weight": "Q6_K",
        f"{LAYER}.mlp.gate_proj.weight": "Q5_0",
    }
    forms = forms_of(types=types)

    qkv, gate_up = forms[f"{LAYER}.{QKV}"], forms[f"{LAYER}.{GATE_UP}"]
    assert qkv.types == ("Q4_K", "Q4_K", "Q6_K")
    assert qkv.method == PackedMethod((Rows("Q4_K", HIDDEN + KV), Rows("Q6_K", KV)))
    assert qkv.num_bytes == packed_bytes("Q4_K", (HIDDEN + KV, HIDDEN)) + packed_bytes(
        "Q6_K", (KV, HIDDEN)
    )
    assert gate_up.types == ("Q5_0", "F16")
    assert gate_up.method == PackedMethod((Rows("Q5_0", MLP), Rows("F16", MLP)))


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "f16")]
)
def test_unpacked_weights_have_the_dtype(dtype, name):
    """Blocks as well: the file's own type does not matter."""
    model = model_of()
    forms = forms_of(model, {EMBEDDING: "Q8_0"}, packing="none", dtype=dtype)

    assert {kind for form in forms.values() for kind in form.types} == {name}
    assert all(form.method is None for form in forms.values())
    assert total_bytes(forms) == dtype.itemsize * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_without_native_kernels_products_are_float16_and_rows_are_not(tied):
    """torch multiplies by float16 weights, but does not look rows up in them."""
    forms = forms_of(model_of(tied=tied), {f"{LAYER}.{DOWN}": "Q8_0"}, packing="half")

    assert (forms[EMBEDDING].method, forms[EMBEDDING].types) == (None, ("f32",))
    packed = [form for name, form in forms.items() if form.is_matrix and name != EMBEDDING]
    assert all(form.method is HALF and set(form.types) == {"F16"} for form in packed)
    assert all(form.num_bytes == 2 * form.num_values for form in packed)
    assert (HEAD in forms) is not tied


# Quantised while loading


@pytest.mark.parametrize(
    ("isq", "kind", "promoted"),
    [
        ("q4_0", "Q4_0", "Q6_K"),
        ("q5_1", "Q5_1", "Q8_0"),
        ("q8_0", "Q8_0", "Q8_0"),
        ("hqq4", "HQQ4", "HQQ8"),
        (IsqBits.EIGHT, "Q8_0", "Q8_0"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_every_matrix_gets_the_type_and_the_ends_more(isq, kind, promoted, tied):
    """Embedding and head see every token; a tied head is the embedding."""
    forms = by_isq(isq, model_of(tied=tied))

    ends = [EMBEDDING] if tied else [EMBEDDING, HEAD]
    assert all(forms[name].types == (promoted,) for name in ends)
    inner = {name: form for name, form in forms.items() if name not in ends}
    assert types_of(inner) == {kind}
    assert forms["model.norm.weight"].method is None


@pytest.mark.parametrize(
    ("isq", "narrow"),
    [("q2k", "Q4_0"), ("q3k", "Q4_0"), ("q4k", "Q5_0"), ("q5k", "Q5_1"), ("q6k", "Q8_0")],
)
def test_rows_that_are_no_whole_blocks_get_a_similar_type(isq, narrow):
    """288 inputs are no multiple of 256; all others of the layer keep what was asked for."""
    forms = by_isq(isq)

    assert forms[f"{LAYER}.{DOWN}"].types == (narrow,)
    assert set(forms[f"{LAYER}.{QKV}"].types) == {f"{isq[:2].upper()}_K"}


def test_rows_that_no_blocks_fill_are_kept_in_float16():
    """As in a model of width 72: then nothing is quantised, and nothing lost."""
    config = read_config(config_for("llama"))
    with torch.device("meta"):
        model = build_model(config)

    forms = by_isq("q4k", model)

    assert config.hidden_size == 72
    assert forms[f"{LAYER}.{QKV}"].types == ("F16",) * 3
    assert forms[f"{LAYER}.{DOWN}"].types == ("Q5_0",)


def test_isq_wins_over_stored_blocks_and_over_the_dtype():
    """What was asked for is what is kept, whatever the file has."""
    stored = {f"{LAYER}.{DOWN}": "Q4_0", f"{LAYER}.self_attn.q_proj.weight": "Q4_K"}

    for packing in ("native", "none"):
        assert types_of(by_isq("q8_0", None, types=stored, packing=packing)) == {"Q8_0"}


def test_a_topology_quantises_only_what_it_names():
    """The rest is kept as without it, also beside a named part of a fused layer."""
    layer, part = LayerTopology(isq="q4_0"), LayerTopology(isq="q8_0")
    topology = Topology().with_range(range(1, 2), layer).with_pattern(r"0\.self_attn\.v_proj", part)
    target = quantise_target(None, topology)

    packed = forms_of(target=target)
    dense = forms_of(target=target, packing="none")

    for forms, kept in ((packed, "F16"), (dense, "f32")):
        assert forms[f"model.layers.1.{GATE_UP}"].types == ("Q4_0", "Q4_0")
        assert forms[f"{LAYER}.{QKV}"].types == ("F16", "F16", "Q8_0")
        assert forms[f"{LAYER}.{GATE_UP}"].types == (kept, kept)
        assert forms[EMBEDDING].types == (kept,)


def test_a_topology_wins_over_isq_and_promotes_nothing():
    """A pattern that names the head means what it says."""
    topology = Topology().with_pattern("lm_head", LayerTopology(isq="q4_0"))

    forms = forms_of(target=quantise_target(IsqBits.EIGHT, topology))

    assert forms[HEAD].types == ("Q4_0",)
    assert forms[EMBEDDING].types == ("Q8_0",)


# What is said of them


def test_types_are_told_by_how_many_values_they_hold():
    """Parts are counted one by one, norms not at all."""
    types = {f"{LAYER}.self_attn.v_proj.weight": "Q6_K", f"{LAYER}.{DOWN}": "Q8_0"}

    assert describe_forms(forms_of(types=types).values()) == "F16 x14, Q8_0 x1, Q6_K x1"
    assert describe_forms([]) == ""


def test_all_weights_together_are_their_sum():
    """What a plan shows: packed matrices and plain rest."""
    forms = by_isq("q8_0")
    plain = sum(4 * form.num_values for form in forms.values() if not form.is_matrix)
    matrices = sum(form.num_values for form in forms.values() if form.is_matrix)

    assert total_bytes(forms) == plain + matrices // 32 * 34


def test_what_was_kept_dense_after_all_is_told_as_dense():
    """A weight that float16 cannot hold is found out when it is read."""
    model = model_of()
    forms = forms_of(model)
    for name, form in forms.items():
        module: Any = model.get_submodule(name.rpartition(".")[0])
        if form.method is not None and name != HEAD:
            module.method = form.method

    kept = forms_as_kept(forms, model, dtype=torch.float32)

    assert [name for name in forms if kept[name] != forms[name]] == [HEAD]
    assert (kept[HEAD].method, kept[HEAD].types) == (None, ("f32",))
    assert kept[HEAD].num_bytes == 4 * VOCAB * HIDDEN


def test_linear_layers_and_embeddings_are_the_matrices():
    """All of them, and nothing else."""
    model = model_of()
    names = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, (Linear, Embedding))
    }

    assert {name for name, form in forms_of(model).items() if form.is_matrix} == names
