"""Products with packed weights: every kind of native tile against the dequantised weight."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mistralrs_sdk.kernels import matmul, native
from tests.matmul_helpers import (
    QUANTISED,
    TYPES,
    inputs,
    make,
    reference,
    set_scales,
)

TILES = {
    "native": (),
    "without AVX-512": ("-DKERNELS_WITHOUT_AVX512",),
    # compilers take long to vectorise this one
    "plain C++": ("-O1", *(f"-DKERNELS_WITHOUT_{name}" for name in ("AVX512", "AVX2", "NEON"))),
}
FEW_EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.fixture(scope="module", params=TILES)
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The kernels with one kind of tile in place of this machine's; the test runs with each."""
    more = native.more_flags(os.environ)
    if TILES[request.param] and more:
        pytest.skip(f"{native.MORE_FLAGS} chooses the tiles")
    flags = [*native.FLAGS, *TILES[request.param], *more]
    try:
        native.find_compiler(os.environ)
    except native.NativeError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("kernels")
    library = native.load(native.build(flags, sources="matmul.cpp", folder=folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: library)
        yield library.mistralrs_instructions().decode()


def rounded(x: Tensor, num_peaks: int = matmul.PEAKS) -> Tensor:
    """What a row is multiplied as, in float64: its peaks as they are, the rest in 8 bits."""
    rest, peaks = x.clone(), torch.zeros_like(x)
    groups = x.unflatten(-1, (-1, 32))
    greatest, places = groups.abs().max(-1)
    for row in range(len(x)):
        for group in greatest[row].argsort(descending=True, stable=True)[:num_peaks].tolist():
            at = 32 * group + int(places[row, group])
            peaks[row, at], rest[row, at] = x[row, at], 0
    return rounded_groups(rest) + peaks.double()


def rounded_groups(x: Tensor) -> Tensor:
    """Each group of 32 values as 8-bit multiples of its greatest magnitude over 127, in float64."""
    groups = x.unflatten(-1, (-1, 32))
    greatest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(greatest, 127).div(greatest.clamp_min(1e-37))  # 127 / x rounds twice
    multiples = (groups * inverse).round()
    return (multiples.double() * (greatest / 127).double()).flatten(-2)


def assert_product(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """y is x @ weight.T up to float32 sums; x and the reference are float64."""
    reference = x.double() @ weight.double().T
    size = x.double().abs().sum(-1, keepdim=True) * weight.double().abs().amax(-1)
    assert y.dtype == torch.float32
    assert y.shape == reference.shape
    assert ((y - reference).abs() <= 2e-6 * size + 1e-36).all()


@FEW_EXAMPLES
@given(
    ggml_type=st.sampled_from(QUANTISED),
    n=st.integers(1, 40),
    blocks=st.integers(1, 3),
    rows=st.integers(0, 45),
    exponent=st.integers(-30, 30),
    peaks=st.integers(0, matmul.MOST_PEAKS),
    seed=st.integers(0, 1 << 30),
)
def test_quantised_products_round_only_the_input(
    kernels: str,
    ggml_type: str,
    n: int,
    blocks: int,
    rows: int,
    exponent: int,
    peaks: int,
    seed: int,
):
    """The result is that of 8-bit inputs, exact up to float32 sums, at any shape and size."""
    k = blocks * TYPES[ggml_type].block_size
    packed, weight = make(ggml_type, n, k, seed=seed)
    x = inputs(rows, k, seed=seed) * 10.0**exponent

    y = matmul.linear(x, packed, peaks=peaks, num_threads=2)

    assert_product(y, rounded(x, peaks), weight)


@pytest.mark.parametrize("ggml_type", QUANTISED)
def test_values_that_outshine_their_row_do_not_cost_the_others_precision(
    kernels: str, ggml_type: str
):
    """Two channels a thousand times as great as the rest, also of one group, leave it its bits."""
    packed, weight = make(ggml_type, 40, 512)
    x = inputs(21, 512)
    quiet = (matmul.linear(x, packed) - x.double() @ weight.double().T).abs().max()
    x[:, 77] = 1000
    x[::2, 300] = -3000
    x[1::2, 17] = 2000

    error = (matmul.linear(x, packed) - x.double() @ weight.double().T).abs()

    assert error.max() < 2 * quiet + 1e-5 * float(weight.abs().max()) * 3000


@FEW_EXAMPLES
@given(
    n=st.integers(1, 40),
    k=st.integers(1, 130),
    rows=st.integers(0, 30),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 1 << 30),
)
def test_f16_products_are_exact_up_to_float32_sums(
    kernels: str, n: int, k: int, rows: int, exponent: int, seed: int
):
    """Inputs stay float32 and weights as they are, at any shape and size."""
    packed, weight = make("F16", n, k, seed=seed)
    x = inputs(rows, k, seed=seed) * 10.0**exponent

    assert_product(matmul.linear(x, packed, num_threads=2), x, weight)


@pytest.mark.parametrize("ggml_type", QUANTISED)
def test_the_rounding_error_is_half_a_step(kernels: str, ggml_type: str):
    """Against unrounded inputs a result is off by at most half a step of each group."""
    packed, weight = make(ggml_type, 40, 512)
    x = inputs(7, 512)
    steps = x.unflatten(-1, (-1, 32)).abs().amax(-1) / 127
    bound = steps.double() / 2 @ weight.double().unflatten(-1, (-1, 32)).abs().sum(-1).T

    error = (matmul.linear(x, packed) - x.double() @ weight.double().T).abs()

    assert (error <= bound * 1.001).all()
    assert error.max() > 0


@pytest.mark.parametrize("ggml_type", matmul.PACKABLE)
def test_a_row_does_not_depend_on_its_neighbours(kernels: str, ggml_type: str):
    """Alone, among 3, among 32, in a prompt, with any number of threads: the same bits."""
    packed, _ = make(ggml_type, 24, 2048)
    x = inputs(230, 2048)  # more than one chunk
    whole = matmul.linear(x, packed, num_threads=2)

    for start, count in ((0, 1), (7, 1), (229, 1), (5, 3), (100, 9), (60, 32), (1, 190)):
        part = matmul.linear(x[start : start + count], packed, num_threads=1)
        assert torch.equal(part, whole[start : start + count])
    assert torch.equal(matmul.linear(x, packed, num_threads=1), whole)
    assert torch.equal(matmul.linear(x, packed, num_threads=7), whole)


@pytest.mark.parametrize("ggml_type", QUANTISED)
def test_the_greatest_values_do_not_overflow(kernels: str, ggml_type: str):
    """Weights, sub-scales and inputs at the ends of their ranges give the right sum."""
    kind = TYPES[ggml_type]
    k = 2 * kind.block_size
    raw = torch.empty(32, kind.block_bytes, dtype=torch.uint8)
    for byte in range(8):
        raw[byte::8] = (0, 255, 128, 127, 240, 15, 63, 192)[byte]
    set_scales(raw, ggml_type, torch.ones(32, 2))
    packed = matmul.pack(raw, ggml_type, (16, k))
    x = torch.tensor([[127.0], [-127.0]]).expand(2, k)

    y = matmul.linear(x, packed)

    assert_product(y, x, reference(raw.view(-1), ggml_type, (16, k)))


@pytest.mark.parametrize("ggml_type", matmul.PACKABLE)
@pytest.mark.parametrize("view", ["offset", "step", "columns", "expanded", "half", "batch"])
def test_any_view_of_the_input_is_taken(kernels: str, ggml_type: str, view: str):
    """Rows apart, values apart, odd addresses, other types and more dimensions are all the same."""
    packed, _ = make(ggml_type, 19, 256)
    base = inputs(6, 520)
    x = {
        "offset": base[:, 3:259],
        "step": base[::2, 1:513:2],
        "columns": base[:, :256].T.contiguous().T,
        "expanded": base[:1, :256].expand(5, 256),
        "half": base[:, :256].half(),
        "batch": base[:, :512].reshape(2, 3, 2, 256).transpose(1, 2),
    }[view]

    y = matmul.linear(x, packed)

    plain = x.float().contiguous().view(-1, 256)
    assert torch.equal(y, matmul.linear(plain, packed).view(*x.shape[:-1], 19))


@pytest.mark.parametrize("ggml_type", matmul.PACKABLE)
def test_the_bias_is_added_last(kernels: str, ggml_type: str):
    """The result is the product's plus the bias, rounded once more."""
    packed, _ = make(ggml_type, 19, 256)
    x, bias = inputs(5, 256), inputs(19, seed=3)

    assert torch.equal(matmul.linear(x, packed, bias=bias), matmul.linear(x, packed) + bias)


@pytest.mark.parametrize("ggml_type", QUANTISED)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_input_that_is_not_finite_gives_nan_in_its_row(
    kernels: str, ggml_type: str, value: float
):
    """Nothing is hidden, and no other row notices."""
    packed, _ = make(ggml_type, 19, 256)
    x = inputs(5, 256)
    good = matmul.linear(x, packed)
    x[2, 40] = value

    y = matmul.linear(x, packed)

    assert y[2].isnan().all()
    assert torch.equal(y[[0, 1, 3, 4]], good[[0, 1, 3, 4]])


@pytest.mark.parametrize("ggml_type", QUANTISED)
@pytest.mark.parametrize("value", [1e36, 1e-36, 1e-39, 0.0])
def test_the_ends_of_float32_are_inputs_too(kernels: str, ggml_type: str, value: float):
    """Great numbers keep their sum; the smallest may be taken as zero."""
    packed, weight = make(ggml_type, 19, 256, scale=1e-5)
    x = inputs(3, 256).sign() * value

    y = matmul.linear(x, packed)

    assert ((y - x.double() @ weight.double().T).abs() <= 1e-5 * value * 256 + 2e-36).all()


@pytest.mark.parametrize("ggml_type", matmul.PACKABLE)
@pytest.mark.parametrize("function", [matmul.linear, matmul.linear_reference])
def test_a_slice_of_a_wider_result_takes_the_product(kernels: str, ggml_type: str, function):
    """The bits are those of a result of its own, and nothing beside the slice is written."""
    packed, _ = make(ggml_type, 19, 256)
    x, bias = inputs(2, 20, 256), inputs(19, seed=3)
    wide = torch.full((2, 20, 30), 7.5)

    y = function(x, packed, bias=bias, out=wide[..., 4:23])

    assert y.data_ptr() == wide[..., 4:].data_ptr()
    assert torch.equal(wide[..., 4:23], function(x, packed, bias=bias))
    assert (wide[..., :4] == 7.5).all()
    assert (wide[..., 23:] == 7.5).all()


@pytest.mark.parametrize("function", [matmul.linear, matmul.linear_reference])
@pytest.mark.parametrize(
    ("out", "words"),
    [
        (torch.empty(3, 18), "this product needs"),
        (torch.empty(3, 19, dtype=torch.float16), "torch.float16"),
        (torch.empty(3, 40)[:, ::2][:, :19], "values of a row must be adjacent"),
        (torch.empty(1, 19).expand(3, 19), "leaves room for them"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(kernels: str, function, out: Tensor, words: str):
    """Native code writes nowhere but into rows of the right size and type."""
    packed, _ = make("Q8_0", 19, 64)

    with pytest.raises(ValueError, match=words):
        function(inputs(3, 64), packed, out=out)


@pytest.mark.parametrize("ggml_type", matmul.PACKABLE)
def test_embedding_rows_are_the_dequantised_ones(kernels: str, ggml_type: str):
    """Any ids in any shape, repeated or none, bit for bit."""
    packed, weight = make(ggml_type, 37, 512)

    for ids in (torch.arange(37), torch.tensor([[36, 0], [5, 5]]), torch.zeros(0, dtype=torch.int)):
        rows = matmul.embedding_rows(packed, ids, num_threads=2)
        assert torch.equal(rows, weight[ids.long()])
        assert torch.equal(rows, matmul.embedding_rows_reference(packed, ids))


def test_every_half_is_read_right(kernels: str):
    """All 65536 float16 bit patterns: subnormals, infinities and NaN included."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    packed = matmul.pack(values, "F16", (1 << 12, 16))

    rows = matmul.embedding_rows(packed, torch.arange(1 << 12))

    assert torch.equal(rows.nan_to_num(7.5).view(-1), values.float().nan_to_num(7.5))
    assert torch.equal(rows.isnan().view(-1), values.isnan())


@pytest.mark.parametrize("ids", [[-1], [0, 37]])
def test_an_id_outside_the_embedding_is_refused(kernels: str, ids: list[int]):
    """Native code never reads past the weight."""
    packed, _ = make("Q8_0", 37, 32)

    with pytest.raises(IndexError, match="rows of an embedding of 37"):
        matmul.embedding_rows(packed, torch.tensor(ids))


@pytest.mark.parametrize("ggml_type", matmul.PACKABLE)
def test_the_reference_takes_the_same_arguments(ggml_type: str):
    """Without native kernels a product is that with the dequantised weight."""
    packed, weight = make(ggml_type, 19, 256)
    x, bias = inputs(2, 3, 256), inputs(19, seed=3)

    y = matmul.linear_reference(x, packed, bias=bias, num_threads=1)

    assert torch.equal(y, torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("function", [matmul.linear, matmul.linear_reference])
def test_an_input_that_does_not_fit_is_refused(kernels: str, function):
    """Features and bias are checked before native code reads them."""
    packed, _ = make("Q8_0", 19, 64)

    with pytest.raises(ValueError, match="the input has 32 features, the weight takes 64"):
        function(inputs(2, 32), packed)
    with pytest.raises(ValueError, match=r"the bias has shape \(18,\), the weight gives 19"):
        function(inputs(2, 64), packed, bias=inputs(18))
