"""Checkpoints that others quantised: read to the exact float weights."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from torch import Tensor

from mistralrs_sdk import ModelBuilder
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.safetensors import open_folder
from tests.checkpoint_files import config_for, write_folder, write_json
from tests.model_helpers import continue_ids, prompt
from tests.quantised_files import (
    AWQ,
    FP8,
    GPTQ,
    LAYER,
    SHAPE,
    awq_parts,
    compressed,
    float8,
    gptq_parts,
    opened,
    pack,
    random_numbers,
    rounded,
)
from tests.tiny_models import hf_greedy, tiny_model


def weight_of(checkpoint: Checkpoint) -> Tensor:
    """The only tensor there is, and of the shape that was promised."""
    assert list(checkpoint.tensors) == [f"{LAYER}.weight"]
    source = checkpoint.tensors[f"{LAYER}.weight"]
    weight = source.load()
    assert weight.shape == source.shape
    assert weight.is_contiguous()
    return weight


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, 40, -1])
@pytest.mark.parametrize(
    ("label", "symmetric", "shuffled"),
    [("gptq", True, False), ("gptq", False, True), ("gptq_v2", False, False), (None, False, True)],
)
def test_gptq_weight_is_exact(tmp_path, bits, group_size, label, symmetric, shuffled):
    """(code - zero) * scale, whatever the width, groups, order of columns and version."""
    numbers = random_numbers(
        SHAPE, bits=bits, group_size=group_size, symmetric=symmetric, shuffled=shuffled
    )
    settings = GPTQ | {"bits": bits, "group_size": group_size, "sym": symmetric}
    settings |= {"checkpoint_format": label} if label else {}

    parts = gptq_parts(numbers, bits=bits, less_one=label != "gptq_v2")

    weight = weight_of(opened(tmp_path, settings, parts))
    assert torch.equal(weight, numbers.weight)
    assert weight.dtype == torch.float32


@pytest.mark.parametrize("g_idx", [None, torch.empty(0, dtype=torch.int32)])
def test_gptq_without_an_order_of_columns_takes_runs(tmp_path, g_idx):
    """Files without g_idx, or with an empty one, keep each group together."""
    numbers = random_numbers(SHAPE, bits=4, group_size=32)
    parts = gptq_parts(numbers, bits=4) | {"g_idx": g_idx}

    checkpoint = opened(tmp_path, GPTQ, {k: v for k, v in parts.items() if v is not None})

    assert torch.equal(weight_of(checkpoint), numbers.weight)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_symmetric_zero_in_the_middle_was_not_reduced(tmp_path, bits):
    """Some writers label version 2 as "gptq": a symmetric zero shows it."""
    numbers = random_numbers(SHAPE, bits=bits, group_size=32, symmetric=True)
    parts = gptq_parts(numbers, bits=bits, less_one=False)

    checkpoint = opened(
        tmp_path, GPTQ | {"bits": bits, "sym": True, "checkpoint_format": "gptq"}, parts
    )

    assert torch.equal(weight_of(checkpoint), numbers.weight)


def test_gptq_widths_may_differ_by_module(tmp_path):
    """The first pattern under "dynamic" that matches a module changes its settings."""
    numbers = random_numbers(SHAPE, bits=8, group_size=48)
    dynamic = {
        "-:.*gate_proj": {},
        r"+:.*\.o_proj": {"bits": 8, "group_size": 48},
        ".*": {"bits": 2},
    }

    checkpoint = opened(tmp_path, GPTQ | {"dynamic": dynamic}, gptq_parts(numbers, bits=8))

    assert torch.equal(weight_of(checkpoint), numbers.weight)


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json"])
def test_settings_may_lie_in_a_file_of_their_own(tmp_path, file):
    """As AutoGPTQ and AutoAWQ once wrote them."""
    numbers = random_numbers(SHAPE, bits=4, group_size=32)
    if file == "quantize_config.json":
        settings = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}
        parts = gptq_parts(numbers, bits=4)
    else:
        settings = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
        parts = awq_parts(numbers)
    write_json(tmp_path / file, settings)

    assert torch.equal(weight_of(opened(tmp_path, None, parts)), numbers.weight)


@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("zero_point", [True, False])
def test_awq_weight_is_exact(tmp_path, group_size, zero_point):
    """Eight outputs to a word, in AWQ's order; a zero is stored even where it is the middle."""
    numbers = random_numbers(SHAPE, bits=4, group_size=group_size, symmetric=not zero_point)
    settings = AWQ | {"group_size": group_size, "zero_point": zero_point}

    checkpoint = opened(tmp_path, settings, awq_parts(numbers))

    assert torch.equal(weight_of(checkpoint), numbers.weight)


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16, "exponents", "bytes"])
def test_fp8_weight_in_blocks_is_exact(tmp_path, scale_type):
    """One scale per block, also where the last blocks are cut off; scales may be exponents."""
    codes, values = float8(SHAPE)
    grid = (math.ceil(SHAPE[0] / 128), math.ceil(SHAPE[1] / 64))
    exponents = torch.randint(118, 130, grid, generator=torch.Generator().manual_seed(1))
    scales = torch.ldexp(torch.ones(grid), exponents - 127)
    if scale_type == "bytes":
        stored = exponents.to(torch.uint8)
    elif scale_type == "exponents":
        stored = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    else:
        stored = (scales * 1.375).to(scale_type)
        scales = stored.float()
    settings = {"quant_method": "fp8", "weight_block_size": [128, 64], "fmt": "e4m3"}

    checkpoint = opened(tmp_path, settings, {"weight": codes, "weight_scale_inv": stored})

    rows, columns = torch.arange(SHAPE[0]) // 128, torch.arange(SHAPE[1]) // 64
    assert torch.equal(weight_of(checkpoint), values * scales[rows][:, columns])


FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        (FP8, ()),
        (FP8, (1,)),
        (FBGEMM, (SHAPE[0], 1)),
        (FBGEMM, (SHAPE[0],)),
        (compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), (1,)),
        (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), (264, 1)),
        (compressed("naive-quantized", num_bits=8, type="float", strategy="channel"), (264, 1)),
    ],
)
def test_fp8_weight_with_a_scale_per_row_or_for_all_is_exact(tmp_path, settings, scale):
    """Per tensor or per row, as a number, a vector or a column; what serves activations is left."""
    codes, values = float8(SHAPE)
    scales = torch.rand(scale, generator=torch.Generator().manual_seed(1)) + 0.1
    parts = {"weight": codes, "weight_scale": scales, "input_scale": torch.tensor(0.5)}

    weight = weight_of(opened(tmp_path, settings, parts))

    assert torch.equal(weight, values * (scales if scales.numel() == 1 else scales.view(-1, 1)))


def test_compressed_fp8_in_blocks_is_exact(tmp_path):
    """The blocks are those of block_structure."""
    codes, values = float8(SHAPE)
    scales = torch.rand((9, 2), generator=torch.Generator().manual_seed(1))
    settings = compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[32, 48]
    )

    weight = weight_of(opened(tmp_path, settings, {"weight": codes, "weight_scale": scales}))

    rows, columns = torch.arange(SHAPE[0]) // 32, torch.arange(SHAPE[1]) // 48
    assert torch.equal(weight, values * scales[rows][:, columns])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shuffled", [False, True])
def test_compressed_packed_weight_is_exact(tmp_path, bits, group_size, symmetric, shuffled):
    """Packed along the row, zeros along the rows; the zero of a symmetric one is the middle."""
    numbers = random_numbers(
        SHAPE, bits=bits, group_size=group_size, symmetric=symmetric, shuffled=shuffled
    )
    parts = {
        "weight_packed": pack(numbers.codes, bits, 1),
        "weight_scale": numbers.scales,
        "weight_shape": torch.tensor(SHAPE),
    }
    parts |= {"weight_g_idx": numbers.group_of.int()} if shuffled else {}
    parts |= {} if symmetric else {"weight_zero_point": pack(numbers.zeros, bits, 0)}
    settings = compressed(
        "pack-quantized",
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy="channel" if group_size == -1 else "group",
        group_size=None if group_size == -1 else group_size,
    )

    assert torch.equal(weight_of(opened(tmp_path, settings, parts)), numbers.weight)


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_int8_weight_is_exact(tmp_path, symmetric):
    """One signed byte per value and a scale per row."""
    numbers = random_numbers(SHAPE, bits=8, symmetric=symmetric)
    parts = {
        "weight": (numbers.codes - 128).to(torch.int8),
        "weight_scale": numbers.scales,
        "weight_zero_point": (numbers.zeros - 128).to(torch.int8),
    }
    settings = compressed(
        "int-quantized",
        {"num_bits": 8, "dynamic": True},
        num_bits=8,
        type="int",
        strategy="channel",
    )

    assert torch.equal(weight_of(opened(tmp_path, settings, parts)), numbers.weight)


def test_what_was_not_quantised_is_read_as_it_is(tmp_path):
    """Norms, embeddings and modules left out keep their type; the config forgets the rest."""
    parts = gptq_parts(random_numbers(SHAPE, bits=4, group_size=32), bits=4)
    tensors = {f"{LAYER}.{leaf}": tensor for leaf, tensor in parts.items()}
    head = torch.randn(8, 4).bfloat16()
    config = config_for("llama", quantization_config=GPTQ)

    checkpoint = open_folder(
        write_folder(tmp_path, config, tensors | {"lm_head.weight": head}), name="tiny"
    )

    assert checkpoint.tensors.keys() == {f"{LAYER}.weight", "lm_head.weight"}
    assert torch.equal(checkpoint.tensors["lm_head.weight"].load(), head)
    assert checkpoint.config == config_for("llama")


@pytest.mark.parametrize(
    ("bias", "config", "kept"),
    [(0.0, {}, False), (0.0, {"attention_bias": True}, True), (0.5, {}, True)],
)
def test_a_bias_that_only_the_quantiser_added_is_left(tmp_path, bias, config, kept):
    """A bias of zeros that the model's config does not ask for; any other is kept."""
    parts = gptq_parts(random_numbers(SHAPE, bits=4, group_size=32), bits=4)
    parts["bias"] = torch.full((SHAPE[0],), bias).half()

    checkpoint = opened(tmp_path, GPTQ, parts, **config)

    assert (f"{LAYER}.bias" in checkpoint.tensors) == kept


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (GPTQ, "GPTQ, 4 bits in groups of 32, dequantised unless CUDA keeps it"),
        (GPTQ | {"group_size": -1}, "GPTQ, 4 bits, dequantised unless CUDA keeps it"),
        (GPTQ | {"group_size": 16}, "GPTQ, 4 bits in groups of 16, dequantised"),
    ],
)
def test_format_names_the_quantisation(tmp_path, settings, words):
    """For `describe()`: what it was, and that it is dequantised."""
    size = settings["group_size"]
    parts = gptq_parts(random_numbers(SHAPE, bits=4, group_size=size), bits=4)

    assert opened(tmp_path, settings, parts).format == f"safetensors (F16, I32; {words})"


def test_quantised_activations_are_said_not_to_be_done(tmp_path, caplog):
    """Once in the log, and in the format."""
    codes, _ = float8(SHAPE)
    parts = {"weight": codes, "weight_scale": torch.ones(1), "k_scale": torch.ones(1)}

    with caplog.at_level(logging.WARNING, logger="mistralrs_sdk.loading"):
        checkpoint = opened(tmp_path, FP8, parts)

    assert checkpoint.format == (
        "safetensors (F32, F8_E4M3; FP8, dequantised unless CUDA keeps it, "
        "activations not quantised)"
    )
    assert [r.message for r in caplog.records if "only its weights are used" in r.message] == [
        caplog.records[0].message
    ]


def test_a_config_that_quantises_nothing_is_said(tmp_path, caplog):
    """The weights are floats: they are read, with a warning."""
    checkpoint = opened(tmp_path, GPTQ, {"weight": torch.ones(4, 4)})

    assert torch.equal(weight_of(checkpoint), torch.ones(4, 4))
    assert "no weight is quantised" in caplog.text


@pytest.mark.parametrize("method", ["gptq", "awq"])
async def test_a_quantised_llama_says_what_its_dequantised_weights_say(tmp_path, method):
    """The same greedy tokens as Hugging Face with the same weights in floats."""
    reference = copy.deepcopy(tiny_model("llama"))
    tensors: dict[str, Tensor] = {}
    for name, weight in reference.state_dict().items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.clone()
            continue
        numbers = rounded(weight, bits=4, group_size=32, shuffled=method == "gptq")
        parts = gptq_parts(numbers, bits=4) if method == "gptq" else awq_parts(numbers)
        tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in parts.items()}
        weight.copy_(numbers.weight)
    settings = GPTQ | {"desc_act": True} if method == "gptq" else AWQ
    config = reference.config.to_dict() | {"quantization_config": settings}
    folder = write_folder(tmp_path, config, tensors)
    ids = prompt(12)

    builder = ModelBuilder(folder).with_force_cpu().with_num_threads(1).with_dtype("f32")
    async with await builder.build() as model:
        assert await continue_ids(model, ids, 16) == hf_greedy(reference, ids, 16)
        assert "4 bits in groups of 32, dequantised" in str(model.describe())
