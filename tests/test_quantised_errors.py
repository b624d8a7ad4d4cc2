"""Quantised checkpoints that cannot be read: refused by name, before anything is allocated."""

from __future__ import annotations

import pytest
import torch

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from tests.quantised_files import (
    AWQ,
    FP8,
    GPTQ,
    LAYER,
    SHAPE,
    compressed,
    float8,
    gptq_parts,
    opened,
    random_numbers,
)


@pytest.mark.parametrize(
    "method",
    ["bitsandbytes", "mxfp4", "hqq", "torchao", "eetq", "aqlm", "quanto", "auto-round", "modelopt"],
)
def test_other_methods_are_refused_by_name(tmp_path, method):
    """With what can be read, and what to do."""
    with pytest.raises(UnsupportedError) as caught:
        opened(tmp_path, {"quant_method": method}, {"weight": torch.zeros(4, dtype=torch.uint8)})

    for word in (repr(method), "awq, compressed-tensors, fbgemm_fp8, fp8, gptq", "with_isq"):
        assert word in str(caught.value)


INT4 = {"num_bits": 4, "type": "int", "strategy": "channel"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bits": 4}, "no quant_method"),
        (GPTQ | {"bits": 5}, "bits 5.*2, 3, 4, 8"),
        (GPTQ | {"checkpoint_format": "gptq_p"}, "'gptq_p'"),
        (GPTQ | {"is_marlin_format": True}, "'marlin'"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        (GPTQ | {"rotation": "hadamard"}, "rotation 'hadamard'"),
        (AWQ | {"version": "GEMV"}, "'gemv'"),
        (AWQ | {"bits": 3}, "bits 3"),
        (compressed("pack-quantized", **INT4 | {"num_bits": 3}), "int3.*'pack-quantized'"),
        (compressed("nvfp4-pack-quantized", **INT4), "'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", **INT4 | {"strategy": "tensor_group"}), "'tensor_group'"),
        (compressed("marlin-24", **INT4) | {"sparsity_config": {"format": "x"}}, "sparsity_config"),
        (
            compressed("pack-quantized", **INT4) | {"transform_config": {"R1": 1}},
            "transform_config",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": INT4}, "b": {"weights": INT4 | {"num_bits": 8}}},
            },
            "different kinds.*a, b",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}},
            "preset 'W4A16'",
        ),
    ],
)
def test_layouts_that_are_not_read_are_refused_by_name(tmp_path, settings, words):
    """Never read as something they are not."""
    with pytest.raises(UnsupportedError, match=words):
        opened(tmp_path, settings, {"qweight": torch.zeros(4, 4, dtype=torch.int32)})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (GPTQ | {"bits": "four"}, "bits 'four'"),
        (GPTQ | {"group_size": 0}, "group_size 0"),
        (GPTQ | {"dynamic": {"(": {}}}, "quantization_config.*gptq"),
        (GPTQ | {"dynamic": [1]}, "quantization_config.*gptq"),
        ("gptq", "'gptq'"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}},
            "quantises weights",
        ),
    ],
)
def test_senseless_settings_are_named(tmp_path, settings, words):
    """A wrong value is an error that says which."""
    with pytest.raises(ModelLoadError, match=words):
        opened(tmp_path, settings, {"qweight": torch.zeros(4, 4, dtype=torch.int32)})


@pytest.mark.parametrize("leaf", ["qweight", "qzeros", "scales"])
def test_a_missing_part_is_named(tmp_path, leaf):
    """With the tensor that needs it, and its file."""
    parts = gptq_parts(random_numbers(SHAPE, bits=4, group_size=32), bits=4)
    del parts[leaf]

    with pytest.raises(ModelLoadError, match=rf"{LAYER}\.{leaf} is missing.*model\.safetensors"):
        opened(tmp_path, GPTQ, parts)


def test_fp8_without_a_scale_is_named(tmp_path):
    """Bytes alone say nothing."""
    with pytest.raises(ModelLoadError, match=rf"{LAYER}\.weight_scale_inv is missing"):
        opened(tmp_path, FP8, {"weight": float8(SHAPE)[0]})


@pytest.mark.parametrize(
    ("leaf", "change"),
    [
        ("qweight", lambda t: t[:-1].contiguous()),
        ("qweight", lambda t: t[0].contiguous()),
        ("qzeros", lambda t: t[:, :-1].contiguous()),
        ("scales", lambda t: t[:-1].contiguous()),
        ("scales", lambda t: t.int()),
        ("g_idx", lambda t: t[None].contiguous()),
        ("qzeros", lambda t: t.short()),
    ],
)
def test_parts_that_do_not_fit_are_named_before_any_is_read(tmp_path, leaf, change):
    """A wrong shape or type, with the tensor's name and its file."""
    parts = gptq_parts(random_numbers(SHAPE, bits=4, group_size=32), bits=4)
    parts[leaf] = change(parts[leaf])

    with pytest.raises(ModelLoadError, match=rf"{LAYER}\.{leaf}.*model\.safetensors"):
        opened(tmp_path, GPTQ, parts)


@pytest.mark.parametrize("group", [-1, 3])
def test_a_column_of_no_group_is_named_on_reading(tmp_path, group):
    """The order of columns may name only groups that there are."""
    parts = gptq_parts(random_numbers(SHAPE, bits=4, group_size=32), bits=4)
    parts["g_idx"][5] = group
    checkpoint = opened(tmp_path, GPTQ, parts)

    with pytest.raises(ModelLoadError, match=rf"{LAYER}\.g_idx.*model\.safetensors.*there are 3"):
        checkpoint.tensors[f"{LAYER}.weight"].load()


def test_floats_with_scales_are_refused(tmp_path):
    """A weight that is stored in floats needs no scale: something is wrong."""
    parts = {"weight": torch.ones(4, 4), "weight_scale_inv": torch.ones(1)}

    with pytest.raises(ModelLoadError, match=rf"{LAYER}\.weight'.*has type F32"):
        opened(tmp_path, FP8, parts)
