"""The forms that weights have on a GPU: their numbers, their layout and their products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mistralrs_sdk.kernels import group_search
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.linear import MergedLinear
from mistralrs_sdk.quant import device_kind, device_kinds, int4_groups, int8_rows
from mistralrs_sdk.quant.device_kinds import DENSE_ROWS, FLOAT8, INT8, fallback, kind_of, obstacle
from mistralrs_sdk.quant.device_method import DeviceMethod
from mistralrs_sdk.quant.ggml import dequantise
from mistralrs_sdk.quant.int4_groups import Int4Groups, nibbles, unpacked
from mistralrs_sdk.quant.quantise import quantise, stored_type
from tests import int4_reference
from tests.gpu_weights import CPU
from tests.int4_reference import int4_kernels

KINDS = [
    Int4Groups("Q4_K"),
    Int4Groups("Q4_0"),
    Int4Groups("Q4_1"),
    Int4Groups("HQQ4"),
    Int4Groups("GPTQ", 64),
    Int4Groups("AWQ", 128),
    INT8,
    FLOAT8,
    DENSE_ROWS,
]
BY_NAME = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@pytest.fixture(autouse=True)
def _kernels():
    with int4_kernels():
        yield


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm())


# Numbers


@pytest.mark.parametrize("source", ["Q4_K", "Q4_0", "Q4_1", "HQQ4"])
def test_int4_has_the_numbers_of_its_type_up_to_bfloat16(source):
    """Scale, offset and result are rounded once each."""
    weight, kind = draw(24, 512), Int4Groups(source)
    blocks = quantise(weight, source)
    wanted = dequantise(blocks.view(-1), stored_type(source), weight.shape)

    found = kind.to_dense(kind.pack([kind.encode(weight)]), rows=24)

    groups = wanted.view(24, -1, 32).abs().amax(-1, keepdim=True)
    error = (found - wanted).view(24, -1, 32).abs()
    assert (error <= 3 * 2**-8 * groups).all()
    assert (error > 0).any()


def test_int4_of_others_is_rounded_as_torchao_does():
    """Scale (greatest - least) / 15, offset least + 8 scales, in bfloat16: two groups by hand."""
    weight = torch.cat([torch.arange(32) * 0.25 - 4, torch.arange(32) / 31 * 15 + 1]).view(1, 64)
    kind = Int4Groups("GPTQ", 32)

    codes, scale, offset = kind.encode(weight)

    assert scale.tolist() == [[0.515625, 1.0]]  # 7.75 / 15 = 0.51667, rounded to eight bits
    assert offset.tolist() == [[0.125, 9.0]]
    q = torch.stack([codes >> 4, codes & 15], -1).view(2, 32)
    steps = torch.arange(32)
    assert q[0].tolist() == ((steps * 0.25 - 4.125) / 0.515625 + 8).round().tolist()
    assert q[1].tolist() == (steps / 31 * 15).round().tolist()


def test_int8_is_off_by_half_a_step_at_most():
    """A step is a 127th of the row's greatest value; a row of zeros stays one."""
    weight = draw(9, 48).index_fill(0, torch.tensor([4]), 0)

    found = INT8.to_dense(INT8.pack([INT8.encode(weight)]), rows=9)

    steps = weight.abs().amax(1, keepdim=True) / 127
    assert ((found - weight).abs() <= 0.51 * steps).all()
    codes, _ = INT8.encode(weight)
    assert codes.abs().amax(1).tolist() == [127] * 4 + [0] + [127] * 4


def test_float8_is_off_by_a_sixteenth_at_most():
    """Of each value; the greatest of a row is exact up to its scale, and no value overflows."""
    weight = draw(9, 48).index_fill(0, torch.tensor([4]), 0)
    weight[5] *= 1e30
    weight[6] *= 1e-6

    found = FLOAT8.to_dense(FLOAT8.pack([FLOAT8.encode(weight)]), rows=9)

    large = weight.abs() > weight.abs().amax(1, keepdim=True) * 2**-14
    assert ((found - weight).abs() <= weight.abs() / 16)[large].all()
    greatest = weight.abs().amax(1)
    assert torch.allclose(found.abs().amax(1), greatest, rtol=1e-6)


@pytest.mark.parametrize("kind", [KINDS[0], INT8, FLOAT8], ids=lambda kind: kind.name)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused(kind, value):
    """Nothing is quantised to nonsense."""
    weight = draw(8, 256)
    weight[3, 5] = value

    with pytest.raises(ValueError, match=r"no finite|finite values"):
        kind.encode(weight)


# Layout


def test_a_word_holds_the_numbers_that_a_lane_multiplies():
    """Columns 0, 8, 16, 24 and those beside them, from the lowest four bits up: by hand."""
    q = torch.zeros(8, 64, dtype=torch.uint8)
    q[0] = torch.arange(64) % 16
    q[5, 34], q[5, 35] = 7, 9  # second pair of tiles, lane 5 * 4 + 1

    words = torch.ops.aten._convert_weight_to_int4pack(nibbles(q), 4)

    assert words.shape == (1, 1, 32, 2)
    assert words[0, 0, 0, 0].item() & 0xFFFFFFFF == 0x91918080
    assert words[0, 0, 3, 1].item() & 0xFFFFFFFF == 0xF7F7E6E6
    assert words[0, 0, 21, 1].item() == 7 | 9 << 16
    assert torch.equal(unpacked(words), q)


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (8, 64), (24, 96), (16, 256), (8, 640)])
def test_words_are_unpacked_to_what_was_packed(rows, columns):
    """Whatever number of tiles lie together."""
    q = torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(1))
    q = q.to(torch.uint8)

    words = torch.ops.aten._convert_weight_to_int4pack(
        nibbles(q), int4_groups._inner_tiles(columns)
    )

    assert torch.equal(unpacked(words), q)
    assert torch.equal(int4_reference.numbers_of(words), q)


@pytest.mark.parametrize("group", int4_groups.GROUPS)
def test_the_reference_multiplies_as_torchs_own_kernel_for_cpus(group):
    """Which has another layout, and the same scales and offsets."""
    rows, columns = 64, 512
    generator = torch.Generator().manual_seed(group)
    q = torch.randint(0, 16, (rows, columns), generator=generator)
    both = torch.randn((columns // group, rows, 2), generator=generator).bfloat16()
    x = draw(5, columns).bfloat16()

    words = int4_reference.convert_weight(nibbles(q.to(torch.uint8)), 8)
    found = int4_reference.multiply_by(x, words, group, both)

    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 8)
    theirs = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, both)
    assert distance(found, theirs) < 5e-3


@BY_NAME
@pytest.mark.parametrize("rows", [16, 21])
def test_a_weight_takes_what_its_plan_says(kind, rows):
    """Rows that are filled up included."""
    packed = kind.pack([kind.encode(draw(rows, 512))])

    assert sum(tensor.nbytes for tensor in packed) == kind.num_bytes(rows, 512)


# Products


def layer_of(method: DeviceMethod, weight: Tensor, *, bias: bool = False) -> MergedLinear:
    parts = {f"part{i}": part.count for i, part in enumerate(method.parts)}
    layer = MergedLinear(weight.shape[1], parts, bias=bias)
    if bias:
        layer.bias = torch.nn.Parameter(draw(weight.shape[0], seed=3).bfloat16(), False)
    method.from_dense(layer, weight)
    return layer


def exact(layer: MergedLinear, x: Tensor) -> Tensor:
    """The product in float32 of the numbers that a layer's parts stand for."""
    weight, start, found = layer.method.to_dense(layer), 0, []
    for part in layer.method.parts:
        found.append(part.kind.inputs(x) @ weight[start : start + part.count].t())
        start += part.count
    y = torch.cat(found, 1)
    return y if layer.bias is None else y + layer.bias.float()


@BY_NAME
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [45, 48])
@pytest.mark.parametrize("count", [1, 4, 5, 128, 129])
def test_products_are_those_of_the_numbers(kind, bias, rows, count, monkeypatch):
    """For few rows of inputs and for many, where a weight is made dense in several slabs; whether
    or not a weight's own rows are filled up."""
    monkeypatch.setattr(device_kind, "SLAB_VALUES", 16 * 512)
    x = draw(count, 512, seed=count).bfloat16()
    layer = layer_of(DeviceMethod.of([(kind, rows)]), draw(rows, 512), bias=bias)

    y = layer(x)

    assert (y.shape, y.dtype) == ((count, rows), torch.bfloat16)
    assert distance(y, exact(layer, x)) < 4e-3


@pytest.mark.parametrize("rows", [int8_rows.FEW_ROWS, int8_rows.FEW_ROWS + 1])
def test_int8_is_multiplied_where_torch_has_no_kernel_for_it(rows, monkeypatch):
    """As on CUDA before torch 2.9."""
    monkeypatch.setattr(int8_rows, "_has_kernel", lambda device: False)
    x = draw(rows, 64).bfloat16()
    layer = layer_of(DeviceMethod.of([(INT8, 32)]), draw(32, 64))

    assert distance(layer(x), exact(layer, x)) < 4e-3


def test_parts_of_a_fused_layer_may_have_any_forms():
    """Neighbours of one form are one; each piece of a bias goes to its part."""
    kinds = [KINDS[0], KINDS[0], INT8, DENSE_ROWS, FLOAT8]
    method = DeviceMethod.of(zip(kinds, [16, 8, 10, 6, 9], strict=True))
    layer = layer_of(method, draw(49, 256), bias=True)
    x = draw(7, 256, seed=2).bfloat16()

    assert [(part.kind, part.count) for part in method.parts] == [
        (KINDS[0], 24),
        (INT8, 10),
        (DENSE_ROWS, 6),
        (FLOAT8, 9),
    ]
    assert distance(layer(x), exact(layer, x)) < 4e-3
    assert layer(x).is_contiguous()
    assert method.num_bytes(256) == sum(t.nbytes for own in layer.packed for t in own)


@BY_NAME
def test_no_inputs_give_no_outputs(kind):
    """A step in which nobody wants logits; kernels refuse to run for nothing."""
    layer = layer_of(DeviceMethod.of([(kind, 16)]), draw(16, 256))

    assert layer(torch.empty(0, 256, dtype=torch.bfloat16)).shape == (0, 16)
    assert layer(draw(2, 3, 256).bfloat16()).shape == (2, 3, 16)


@BY_NAME
def test_a_tied_table_is_looked_up_in_and_multiplied_by(kind):
    """Rows are those of the numbers, in bfloat16; scores are products."""
    table = Embedding(50, 256, scale=2.0)
    DeviceMethod.of([(kind, 50)]).from_dense(table, draw(50, 256))
    ids, x = torch.tensor([[3, 49], [3, 0]]), draw(3, 256).bfloat16()
    weight = table.method.to_dense(table)

    assert torch.equal(table(ids), weight.bfloat16()[ids] * 2)
    assert distance(table.project(x), kind.inputs(x) @ weight.t()) < 4e-3


@BY_NAME
def test_what_a_form_has_given_it_keeps(kind):
    """Quantising the numbers again changes them little."""
    once = layer_of(DeviceMethod.of([(kind, 16)]), draw(16, 256))
    dense = once.method.to_dense(once)
    twice = layer_of(DeviceMethod.of([(kind, 16)]), dense)

    assert dense.dtype == torch.float32
    assert distance(twice.method.to_dense(twice), dense) < 0.01


@BY_NAME
def test_everything_is_where_the_weight_is(kind, monkeypatch):
    """What is made on the way names its device: a default of another one is never met."""
    monkeypatch.setattr(group_search, "_native", lambda x: False)  # as on a GPU
    weight, x = draw(21, 512), draw(200, 512).bfloat16()
    ids, importance = torch.tensor([20, 3]), torch.ones(512)

    with torch.device("meta"):
        packed = kind.pack([kind.encode(weight, importance)])
        found = [
            kind.multiply(x[:3], packed, rows=21, bias=None),
            kind.multiply(x, packed, rows=21, bias=None),
            kind.pick(packed, ids),
            kind.inputs(x),
            kind.to_dense(packed, rows=21),
        ]

    assert {tensor.device for tensor in (*packed, *found)} == {CPU}


# Which, and whether


def test_forms_are_found_by_their_names():
    """Names of others are none."""
    assert [kind_of(kind.name) for kind in KINDS] == KINDS
    assert {kind_of(name) for name in ("Q4_K", "f32", "INT4/48 (AWQ)", "INT4")} == {None}


@pytest.mark.parametrize(
    ("name", "columns", "found"),
    [
        ("INT4/32 (Q4_K)", 512, "INT4/32 (Q4_K)"),
        ("INT4/32 (Q4_K)", 288, "INT4/32 (HQQ4)"),
        ("INT4/32 (Q4_0)", 48, "INT8"),
        ("F8E4M3", 48, "F8E4M3"),
        ("F8E4M3", 72, "INT8"),
        ("INT8", 7, "INT8"),
    ],
)
def test_rows_that_are_no_whole_blocks_get_a_similar_form(name, columns, found):
    """Int8 takes rows of any length."""
    assert fallback(name, columns) == found


@BY_NAME
def test_kernels_that_work_are_no_obstacle(kind, monkeypatch):
    """They are tried once."""
    monkeypatch.setattr(device_kinds, "_tried", set())

    assert obstacle(kind, CPU) is None
    monkeypatch.setattr(device_kinds, "_error", None)
    assert obstacle(kind, CPU) is None


def test_kernels_that_are_wrong_are_an_obstacle(monkeypatch):
    """For one whose words are in another order, or whose scales are read otherwise."""
    monkeypatch.setattr(device_kinds, "_tried", set())
    convert, multiply = int4_reference.convert_weight, int4_reference.multiply_by
    with monkeypatch.context() as patch:
        patch.setattr(int4_reference, "convert_weight", lambda w, inner: convert(w, inner).flip(2))
        assert "kernels are wrong, by" in str(obstacle(KINDS[0], CPU))
    with monkeypatch.context() as patch:
        patch.setattr(
            int4_reference, "multiply_by", lambda x, w, g, both: multiply(x, w, g, both * 1.05)
        )
        assert "kernels are wrong, by" in str(obstacle(KINDS[0], CPU))
    assert obstacle(KINDS[0], CPU) is None


def test_kernels_that_are_missing_are_an_obstacle(monkeypatch):
    """The error says what torch said."""
    monkeypatch.setattr(device_kinds, "_tried", set())

    def missing(weight: Tensor, inner: int) -> Tensor:
        raise RuntimeError("not compiled with CUDA 12\nmore")

    monkeypatch.setattr(int4_reference, "convert_weight", missing)
    why = obstacle(KINDS[0], CPU)
    assert why == "its kernels do not run: RuntimeError: not compiled with CUDA 12"
