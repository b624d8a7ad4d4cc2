"""Quantising weights: what the stored bytes are worth, and which weights are refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from mistralrs_sdk.errors import UnsupportedError
from mistralrs_sdk.quant import quantise as quantise_module
from mistralrs_sdk.quant.ggml import GGML_TYPES, HQQ8, dequantise
from mistralrs_sdk.quant.quantise import (
    QUANTISABLE,
    WEIGHTED,
    fallback,
    fits,
    quantise,
    stored_type,
)

BY_REFERENCE = ["F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
K_TYPES = sorted(WEIGHTED)

# Root mean square error of normal values, relative to theirs: measured, and 3% of room.
ERROR_BOUNDS = {
    "F16": 0.00022,
    "Q4_0": 0.0887,
    "Q4_1": 0.0807,
    "Q5_0": 0.0440,
    "Q5_1": 0.0391,
    "Q8_0": 0.00551,
    "Q2_K": 0.2690,
    "Q3_K": 0.1480,
    "Q4_K": 0.0719,
    "Q5_K": 0.0357,
    "Q6_K": 0.0176,
    "HQQ4": 0.0755,
    "HQQ8": 0.00444,
}


def normal(rows: int, size: int, *, seed: int = 0) -> Tensor:
    return torch.from_numpy(
        np.random.default_rng(seed).standard_normal((rows, size)).astype(np.float32)
    )


def read_back(weight: Tensor, ggml_type: str, *, importance: Tensor | None = None) -> Tensor:
    stored = quantise(weight, ggml_type, importance=importance)
    return dequantise(stored.view(-1), stored_type(ggml_type), weight.shape)


def relative_error(weight: Tensor, result: Tensor) -> float:
    return float((result - weight).norm() / weight.norm())


def reference(weight: Tensor, ggml_type: str) -> np.ndarray:
    stored = gguf.quants.quantize(weight.numpy(), GGMLQuantizationType[ggml_type])
    return stored.view(np.uint8)


@pytest.mark.parametrize("ggml_type", BY_REFERENCE)
@settings(max_examples=40, deadline=None)
@given(
    values=arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.sampled_from([32, 96])),
        elements=st.one_of(
            st.floats(-2.0, 2.0, width=32, allow_subnormal=False),
            st.floats(-(2.0**15), 2.0**15, width=16, allow_subnormal=False),
            st.integers(-8, 8).map(lambda i: i / 8),  # ties between greatest and least
        ),
    )
)
def test_rounding_types_equal_the_reference_bit_for_bit(ggml_type, values):
    """What ggml's reference implements, we store with exactly the same bytes."""
    # The reference divides by zero for less, and numpy's least of 0.0 and -0.0 is either.
    values[np.abs(values) < 1e-30] = 0
    weight = torch.from_numpy(values)

    stored = quantise(weight, ggml_type)

    assert np.array_equal(stored.numpy(), reference(weight, ggml_type))


def test_halves_are_rounded_away_from_zero_in_q8_0():
    """A quotient that ends in exactly one half goes to the greater number, one just below not."""
    values = [127.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, -0.49999997]
    weight = torch.tensor([values + [0.0] * 24])

    quants = quantise(weight, "Q8_0")[0, 2:10].view(torch.int8)

    assert quants.tolist() == [127, 1, -1, 2, 3, -3, 0, 0]


@pytest.mark.parametrize("ggml_type", QUANTISABLE)
def test_bytes_have_the_size_of_the_stored_type(ggml_type):
    """A row of 512 values takes whole blocks of the stored type, one row after the other."""
    stored = quantise(normal(3, 512), ggml_type)

    assert stored.dtype == torch.uint8
    assert stored.shape == (3, stored_type(ggml_type).num_bytes(512))


@pytest.mark.parametrize("ggml_type", QUANTISABLE)
def test_normal_values_come_back_within_the_bound(ggml_type):
    """The error of normally distributed weights stays within what the type can do."""
    weight = normal(64, 512)

    assert relative_error(weight, read_back(weight, ggml_type)) < ERROR_BOUNDS[ggml_type]


@pytest.mark.parametrize("ggml_type", QUANTISABLE)
def test_zeros_stay_zeros(ggml_type):
    """A block of zeros among others is read as zeros."""
    weight = normal(2, 1024)
    weight[:, 256:512] = 0

    assert not read_back(weight, ggml_type)[:, 256:512].any()


@pytest.mark.parametrize("value", [1.0, -1.0, 0.0123, -0.0123])
@pytest.mark.parametrize("ggml_type", QUANTISABLE)
def test_constant_rows_come_back(ggml_type, value):
    """A block of one value needs no levels: only the scales are rounded."""
    weight = torch.full((2, 256), value)

    assert relative_error(weight, read_back(weight, ggml_type)) < 0.005


@pytest.mark.parametrize("size", [6e4, 1e3, 1e-3])
@pytest.mark.parametrize("ggml_type", QUANTISABLE)
def test_error_does_not_depend_on_the_size_of_the_weights(ggml_type, size):
    """Large and small weights come back as well as those around one."""
    weight = normal(8, 512).clamp(-4, 4) / 4
    near_one = relative_error(weight, read_back(weight, ggml_type))

    far = relative_error(weight * size, read_back(weight * size, ggml_type))

    assert far < 1.1 * near_one + 0.003


@pytest.mark.parametrize("size", [1e-6, 1e-9, 1e-40])
@pytest.mark.parametrize("ggml_type", QUANTISABLE)
def test_tiny_weights_lose_at_most_what_float16_scales_lose(ggml_type, size):
    """Below float16's least numbers a weight becomes zero or stays small; never NaN."""
    weight = normal(4, 512) * size

    result = read_back(weight, ggml_type)

    assert torch.isfinite(result).all()
    assert (result - weight).abs().max() <= weight.abs().max() + 2.0**-17


@pytest.mark.parametrize("ggml_type", QUANTISABLE)
def test_a_row_depends_on_itself_only(ggml_type, monkeypatch):
    """Bytes of a row are the same alone, among others, in other chunks and with more threads."""
    weight = normal(67, 768)
    threads = torch.get_num_threads()
    whole = quantise(weight, ggml_type)

    alone = torch.cat([quantise(row, ggml_type) for row in weight[:4].split(1)])
    monkeypatch.setattr(quantise_module, "_CHUNK_VALUES", 3 * 256)
    torch.set_num_threads(2)
    try:
        chunked = quantise(weight, ggml_type)
        monkeypatch.undo()
        threaded = quantise(weight, ggml_type)
    finally:
        torch.set_num_threads(threads)

    assert torch.equal(alone, whole[:4])
    assert torch.equal(chunked, whole)
    assert torch.equal(threaded, whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ggml_type", QUANTISABLE)
def test_half_precision_is_quantised_as_its_float32_values(ggml_type, dtype):
    """A float16 or bfloat16 weight gives the bytes of the same numbers in float32."""
    weight = normal(3, 256).to(dtype)

    assert torch.equal(quantise(weight, ggml_type), quantise(weight.float(), ggml_type))


def test_a_view_that_is_not_contiguous_is_quantised_as_its_values():
    """Strides do not matter."""
    weight = normal(256, 6).T[::2]

    assert torch.equal(quantise(weight, "Q4_K"), quantise(weight.contiguous(), "Q4_K"))


def test_no_rows_give_no_bytes():
    """An empty weight is no error."""
    assert quantise(torch.empty(0, 256), "Q4_K").shape == (0, 144)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 70000.0, -1e30])
@pytest.mark.parametrize("ggml_type", ["F16", "Q8_0", "Q4_K", "HQQ4"])
def test_values_that_no_scale_can_hold_are_refused(ggml_type, value):
    """NaN, infinities and values beyond float16 are named, with the way out."""
    weight = normal(2, 256)
    weight[1, 200] = value

    with pytest.raises(ValueError, match=r"has a value of .*keep this weight in float32"):
        quantise(weight, ggml_type)


def test_rows_that_blocks_do_not_fill_are_refused():
    """The message says how long blocks are and which type to use."""
    with pytest.raises(ValueError, match=r"Q4_K stores blocks of 256 .* rows of 576 .*: use Q5_0"):
        quantise(normal(2, 576), "Q4_K")


def test_unknown_types_are_refused_by_name():
    """A type without a quantiser is named together with those that have one."""
    for call in (lambda: quantise(normal(2, 256), "IQ4_XS"), lambda: fits("IQ4_XS", 256)):
        with pytest.raises(UnsupportedError, match=r"quantised to IQ4_XS: use one of F16, Q4_0"):
            call()


@pytest.mark.parametrize("weight", [torch.zeros(256), torch.zeros(2, 256, dtype=torch.int8)])
def test_only_matrices_of_floats_are_quantised(weight):
    """A vector or whole numbers are an error, not a guess."""
    with pytest.raises(ValueError, match="matrix of floats"):
        quantise(weight, "Q8_0")


@pytest.mark.parametrize(
    ("ggml_type", "size", "expected"),
    [
        ("Q4_K", 512, "Q4_K"),
        ("Q2_K", 576, "Q4_0"),
        ("Q3_K", 576, "Q4_0"),
        ("Q4_K", 576, "Q5_0"),
        ("Q5_K", 576, "Q5_1"),
        ("Q6_K", 576, "Q8_0"),
        ("HQQ4", 576, "HQQ4"),
        ("Q6_K", 100, "F16"),
        ("Q8_0", 100, "F16"),
        ("HQQ8", 100, "F16"),
        ("F16", 100, "F16"),
    ],
)
def test_rows_that_do_not_fit_fall_back_as_in_llama_cpp(ggml_type, size, expected):
    """K types give way to blocks of 32, and those to F16; the result always fits."""
    assert fallback(ggml_type, size) == expected
    assert fits(expected, size)
    assert fits(ggml_type, size) == (ggml_type == expected)


def test_hqq4_is_stored_in_q4_1_blocks_and_beats_q4_1():
    """HQQ only chooses scale and zero point better than the extreme values do."""
    weight = normal(32, 512)

    assert stored_type("HQQ4").name == "Q4_1"
    hqq, plain = read_back(weight, "HQQ4"), read_back(weight, "Q4_1")
    assert (hqq - weight).abs().mean() < 0.95 * (plain - weight).abs().mean()


def test_hqq8_blocks_are_scale_offset_and_signed_bytes():
    """HQQ8 is no GGUF type; its layout is what `ggml.HQQ8` says."""
    weight = normal(1, 32) + 5

    stored = quantise(weight, "HQQ8")

    scale, offset = stored[0, :4].view(torch.float16).float()
    assert torch.equal(
        dequantise(stored.view(-1), HQQ8, (1, 32))[0],
        stored[0, 4:].view(torch.int8) * scale + offset,
    )
    assert HQQ8.name not in {kind.name for kind in GGML_TYPES.values()}


@pytest.mark.parametrize("ggml_type", K_TYPES)
def test_importance_moves_the_error_to_inputs_that_matter_less(ggml_type):
    """With an importance the weighted error falls, and the plain one rises."""
    weight = normal(32, 512)
    importance = torch.from_numpy(np.random.default_rng(1).random(512)) ** 4

    plain = (read_back(weight, ggml_type) - weight) ** 2
    guided = (read_back(weight, ggml_type, importance=importance) - weight) ** 2

    assert (guided * importance).mean() < 0.9 * (plain * importance).mean()
    assert guided.mean() > plain.mean()


@pytest.mark.parametrize("ggml_type", K_TYPES)
def test_only_the_proportions_of_an_importance_count(ggml_type):
    """A common factor changes nothing, and the same for all is as good as none."""
    weight = normal(4, 256)
    importance = torch.arange(256) % 7 + 1.0

    stored = quantise(weight, ggml_type, importance=importance)

    assert torch.equal(quantise(weight, ggml_type, importance=importance * 1024), stored)
    for same in (torch.full((256,), 3.0), torch.zeros(256)):
        even = quantise(weight, ggml_type, importance=same)
        assert torch.equal(even, quantise(weight, ggml_type))


@pytest.mark.parametrize("ggml_type", K_TYPES)
def test_inputs_without_importance_do_no_harm(ggml_type):
    """Inputs that were never active may come back badly, but never as NaN."""
    weight = normal(4, 512)
    importance = torch.ones(512)
    importance[:256] = 0
    importance[300:310] = 0

    result = read_back(weight, ggml_type, importance=importance)

    assert torch.isfinite(result).all()
    active = importance > 0
    assert relative_error(weight[:, active], result[:, active]) < ERROR_BOUNDS[ggml_type] * 1.1


@pytest.mark.parametrize("ggml_type", sorted(set(QUANTISABLE) - WEIGHTED))
def test_other_types_leave_the_importance_alone(ggml_type):
    """Types that only round give the same bytes with an importance."""
    weight = normal(2, 64)

    weighted = quantise(weight, ggml_type, importance=torch.rand(64))

    assert torch.equal(weighted, quantise(weight, ggml_type))


@pytest.mark.parametrize(
    ("importance", "words"),
    [
        (torch.ones(128), r"shape \(128,\), the weight has 256 inputs"),
        (torch.full((256,), -1.0), "from zero up"),
        (torch.full((256,), float("nan")), "from zero up"),
    ],
)
def test_an_importance_that_does_not_fit_is_refused(importance, words):
    """Its length and its values are checked."""
    with pytest.raises(ValueError, match=words):
        quantise(normal(2, 256), "Q4_K", importance=importance)
