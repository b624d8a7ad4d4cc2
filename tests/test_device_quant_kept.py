"""What was quantised by others and is kept on a GPU as it is stored; what is made dense instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mistralrs_sdk import ModelBuilder, ModelLoadError
from mistralrs_sdk.distributed import TensorParallel
from mistralrs_sdk.engine import quantising
from mistralrs_sdk.loading.forms import choose_forms
from mistralrs_sdk.loading.loader import prepare_model
from mistralrs_sdk.loading.shards import shard_checkpoint
from mistralrs_sdk.loading.weights import fill
from mistralrs_sdk.models.parallel import Part, parts_of, share_on_meta
from mistralrs_sdk.quant.device_kinds import kind_of
from tests.checkpoint_files import write_folder
from tests.gpu_weights import CPU, gpu_weights, tensor_bytes
from tests.model_helpers import continue_ids
from tests.packed_models import gguf_of, open_path
from tests.quantised_files import (
    AWQ,
    FP8,
    GPTQ,
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
from tests.test_device_quant_model import SHORT, assert_its_weights_speak, dense_weights, on_engine
from tests.tiny_models import tiny_model

NAME = "model.layers.0.self_attn.o_proj.weight"


@pytest.fixture(autouse=True)
def _gpu():
    with gpu_weights():
        yield


def numbers_of(checkpoint: Any) -> tuple[str | None, Tensor | None]:
    """The form that the one weight can be kept in, and its numbers there."""
    source = checkpoint.tensors[NAME]
    if source.codes is None:
        return None, None
    kind = kind_of(source.codes.kind)
    assert kind is not None
    packed = kind.pack([source.codes.load()])
    assert sum(tensor.nbytes for tensor in packed) == kind.num_bytes(*source.shape)
    return source.codes.kind, kind.to_dense(packed, rows=source.shape[0])


def assert_same(found: Tensor | None, exact: Tensor) -> None:
    """Up to scales, offsets and results in bfloat16."""
    assert found is not None
    error = (found - exact).abs().amax(1)
    assert (error <= 3 * 2**-8 * exact.abs().amax(1)).all()


# One weight


@pytest.mark.parametrize("group", [32, 48, 96, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", ["gptq", "gptq_v2", "awq"])
def test_four_bits_in_groups_are_kept(tmp_path, group, symmetric, method):
    """With zeros or without; large groups as several smaller ones, others not at all."""
    numbers = random_numbers(SHAPE, bits=4, group_size=group, symmetric=symmetric)
    settings = (AWQ if method == "awq" else GPTQ) | {"group_size": group, "sym": symmetric}
    parts = awq_parts(numbers)
    if method != "awq":
        settings |= {"checkpoint_format": method}
        parts = gptq_parts(numbers, bits=4, less_one=method == "gptq")

    checkpoint = opened(tmp_path, settings, parts)
    name, found = numbers_of(checkpoint)

    if group == 48:
        assert name is None
        return
    assert name == f"INT4/32 ({'AWQ' if method == 'awq' else 'GPTQ'})"
    assert_same(found, numbers.weight)
    assert torch.equal(checkpoint.tensors[NAME].load(), numbers.weight)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", [{"strategy": "channel"}, {"group_size": 32}])
def test_packed_integers_of_compressed_tensors_are_kept(tmp_path, symmetric, strategy):
    """Their zero is in the middle, or stored."""
    size = strategy.get("group_size", -1)
    numbers = random_numbers(SHAPE, bits=4, group_size=size, symmetric=symmetric)
    parts = {
        "weight_packed": pack(numbers.codes, 4, 1),
        "weight_scale": numbers.scales,
        "weight_shape": torch.tensor(SHAPE),
    }
    if not symmetric:
        parts["weight_zero_point"] = pack(numbers.zeros, 4, 0)
    settings = compressed("pack-quantized", num_bits=4, symmetric=symmetric, **strategy)

    name, found = numbers_of(opened(tmp_path, settings, parts))

    assert name == "INT4/32 (compressed)"
    assert_same(found, numbers.weight)


@pytest.mark.parametrize("scales", [(1,), (SHAPE[0], 1)])
def test_float8_with_scales_by_rows_is_kept_exactly(tmp_path, scales):
    """One scale for all rows is one for each."""
    codes, values = float8(SHAPE)
    scale = torch.rand(scales, generator=torch.Generator().manual_seed(0)) + 0.1

    name, found = numbers_of(opened(tmp_path, FP8, {"weight": codes, "weight_scale": scale}))

    assert name == "F8E4M3"
    assert torch.equal(found, values * scale)


@pytest.mark.parametrize("activations", [None, {"num_bits": 8, "type": "float"}])
def test_float8_is_kept_where_inputs_were_to_be_float8(tmp_path, activations):
    """Of a checkpoint that quantises weights alone, products in float8 would be coarser."""
    settings = compressed(
        "float-quantized", activations, num_bits=8, type="float", strategy="channel"
    )
    parts = {"weight": float8(SHAPE)[0], "weight_scale": torch.ones(SHAPE[0], 1)}

    name, _ = numbers_of(opened(tmp_path, settings, parts))

    assert name == (None if activations is None else "F8E4M3")


def test_int8_with_scales_by_rows_is_kept(tmp_path):
    """Up to the scale in bfloat16."""
    codes = torch.randint(-128, 128, SHAPE, generator=torch.Generator().manual_seed(0))
    parts = {"weight": codes.to(torch.int8), "weight_scale": torch.rand(SHAPE[0], 1) + 0.1}
    settings = compressed("int-quantized", num_bits=8, symmetric=True, strategy="channel")

    name, found = numbers_of(opened(tmp_path, settings, parts))

    assert name == "INT8"
    assert_same(found, codes * parts["weight_scale"])


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            FP8 | {"weight_block_size": [128, 32]},
            {"weight": float8(SHAPE)[0], "weight_scale_inv": torch.ones(3, 3)},
        ),
        (FP8, {"weight": float8((264, 90))[0], "weight_scale": torch.ones(1)}),
        (
            GPTQ | {"bits": 8},
            gptq_parts(random_numbers(SHAPE, bits=8, group_size=32), bits=8),
        ),
        (
            GPTQ | {"desc_act": True},
            gptq_parts(random_numbers(SHAPE, bits=4, group_size=32, shuffled=True), bits=4),
        ),
    ],
    ids=["scales of blocks", "rows of 90", "8 bits in groups", "columns out of order"],
)
def test_what_kernels_do_not_take_is_not_kept(tmp_path, settings, parts):
    """It is read as floats, as ever."""
    checkpoint = opened(tmp_path, settings, parts)

    assert numbers_of(checkpoint) == (None, None)
    assert checkpoint.format.endswith("dequantised)") or "dequantised, act" in checkpoint.format
    assert checkpoint.tensors[NAME].load().isfinite().all()


def test_columns_out_of_order_that_nobody_announced_are_refused(tmp_path):
    """Found out when they are read; the dense way is named, and works."""
    numbers = random_numbers(SHAPE, bits=4, group_size=32, shuffled=True)
    checkpoint = opened(tmp_path, GPTQ, gptq_parts(numbers, bits=4))

    with pytest.raises(ModelLoadError, match=r"g_idx.*desc_act is not set.*with_dtype"):
        numbers_of(checkpoint)
    assert torch.equal(checkpoint.tensors[NAME].load(), numbers.weight)


# Whole models


def folder_of(path: Path, method: str) -> Path:
    """A tiny llama whose projections are quantised that way."""
    model = tiny_model("llama")
    tensors: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.clone()
        elif method == "fp8":
            scale = weight.abs().amax(1, keepdim=True) / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{module}.weight_scale"] = scale
        else:
            numbers = rounded(weight, bits=4, group_size=32)
            parts = gptq_parts(numbers, bits=4) if method == "gptq" else awq_parts(numbers)
            tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in parts.items()}
    settings = {"gptq": GPTQ, "awq": AWQ, "fp8": FP8}[method]
    config = model.config.to_dict() | {"quantization_config": settings}
    return write_folder(path, config, tensors)


def builder(path: Path) -> ModelBuilder:
    return ModelBuilder(path).with_force_cpu().with_num_threads(1)


@pytest.mark.parametrize(
    ("method", "kind"),
    [("gptq", "INT4/32 (GPTQ)"), ("awq", "INT4/32 (AWQ)"), ("fp8", "F8E4M3")],
)
async def test_a_checkpoint_is_kept_as_it_is_stored(tmp_path, method, kind, caplog):
    """What others quantised stays so, and the rest as floats; nothing is warned of."""
    folder = folder_of(tmp_path, method)
    dense = builder(folder).with_dtype("bf16")
    async with await dense.build() as model:
        exact = await on_engine(model, dense_weights)
        assert model.inner().info.weights == "bf16 x30"
    assert "28 of 28 quantised weights" in caplog.text
    caplog.clear()

    async with await builder(folder).build() as model:
        info = model.inner().info
        assert info.weights == f"{kind} x28, bf16 x2"
        assert info.weight_bytes == await on_engine(model, tensor_bytes)
        found = await on_engine(model, dense_weights)
        for name, numbers in exact.items():
            assert_same(found[name].float(), numbers.float())
        await assert_its_weights_speak(model)
    assert "made dense" not in caplog.text


async def test_blocks_of_a_gguf_are_kept_where_they_are_groups(tmp_path, caplog):
    """Four bits are; wider types are made dense, which is said once."""
    path = gguf_of(tmp_path / "a.gguf", "Q4_K", "Q4_0", "Q6_K", "Q4_1", vocab=512)
    caplog.set_level(logging.WARNING)
    async with await builder(path).build() as model:
        info = model.inner().info
        assert info.weights == ("INT4/32 (Q4_K) x4, INT4/32 (Q4_0) x4, bf16 x4, INT4/32 (Q4_1) x4")
        assert info.weight_bytes == await on_engine(model, tensor_bytes)
        plan = await builder(path).plan()
        assert (plan.weight_bytes, plan.weights) == (info.weight_bytes, info.weights)
        await assert_its_weights_speak(model, SHORT)

    warned = [r.message for r in caplog.records if "made dense" in r.message]
    assert set(warned) == {
        "4 of 16 quantised weights of the checkpoint are made dense on cpu: Q6_K x4"
    }


async def test_isq_quantises_what_others_have_quantised(tmp_path):
    """What was asked for is what is kept."""
    async with await builder(folder_of(tmp_path, "gptq")).with_isq(8).build() as model:
        assert model.inner().info.weights == "INT8 x30"
        await continue_ids(model, SHORT[0], 3)


async def test_blocks_that_have_the_type_are_not_quantised_again(tmp_path):
    """They are taken over as they are."""
    path = gguf_of(tmp_path / "a.gguf", "Q4_0", vocab=512)
    async with await builder(path).build() as model:
        kept = await on_engine(model, dense_weights)
    async with await builder(path).with_isq("q4_0").build() as model:
        asked = await on_engine(model, dense_weights)

    layers = [name for name in kept if ".layers." in name]
    assert len(layers) == 8
    assert all(torch.equal(kept[name], asked[name]) for name in layers)


@pytest.mark.parametrize(
    "obstacle", [lambda name, device: f"{name} needs a larger GPU", None], ids=["kernels", "dtype"]
)
async def test_without_kernels_a_checkpoint_is_made_dense(
    tmp_path, obstacle: Callable[..., str] | None, monkeypatch, caplog
):
    """Nobody asked for them: the model is there all the same, and the reason is said."""
    path = gguf_of(tmp_path / "a.gguf", "Q4_0", vocab=512)
    made = builder(path)
    if obstacle is None:
        made = made.with_dtype("f16")
    else:
        monkeypatch.setattr(quantising, "_against", obstacle)

    async with await made.build() as model:
        kind = "f16" if obstacle is None else "bf16"
        assert model.inner().info.weights == f"{kind} x16"
    assert "16 of 16 quantised weights of the checkpoint are made dense" in caplog.text
    assert ("needs a larger GPU" in caplog.text) is (obstacle is not None)


# Ranks


@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_ranks_keep_their_part_of_what_is_stored(tmp_path, method):
    """Rows and columns of the whole weight's numbers, bit for bit."""
    checkpoint = open_path(folder_of(tmp_path, method))
    o_proj, down = ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj")
    wholes = {name: stored_numbers(checkpoint, name) for name in (o_proj, down)}
    found: dict[str, list[Tensor]] = {o_proj: [], down: []}
    for rank in range(2):
        parallel = TensorParallel(rank, 2)
        whole = prepare_model(checkpoint)
        parts = parts_of(whole, parallel)
        own, model = shard_checkpoint(checkpoint, parts), share_on_meta(whole, parallel)
        forms = choose_forms(model, own, dtype=torch.bfloat16, packing="device")
        for name in found:
            form = forms[f"{name}.weight"]
            assert form.types[0].startswith(("INT4", "F8"))
            fill(
                model, f"{name}.weight", form, tensors=own.tensors, dtype=torch.bfloat16, device=CPU
            )
            module: Any = model.get_submodule(name)
            found[name].append(module.method.to_dense(module))

    for name, parts_found in found.items():
        assert torch.equal(torch.cat(parts_found, 1), wholes[name])


def stored_numbers(checkpoint: Any, name: str) -> Tensor:
    source = checkpoint.tensors[f"{name}.weight"]
    kind = kind_of(source.codes.kind)
    assert kind is not None
    return kind.to_dense(kind.pack([source.codes.load()]), rows=source.shape[0])


def test_a_part_that_ends_inside_of_a_group_is_read_as_floats(tmp_path):
    """Nobody asked for it to be kept."""
    checkpoint = opened(
        tmp_path, GPTQ, gptq_parts(random_numbers(SHAPE, bits=4, group_size=32), bits=4)
    )
    cut = shard_checkpoint(checkpoint, {NAME: Part(columns=range(48))}).tensors[NAME]
    even = shard_checkpoint(checkpoint, {NAME: Part(columns=range(32, 64))}).tensors[NAME]

    assert cut.codes is None
    assert cut.load().shape == (264, 48)
    assert even.codes is not None
    assert [tuple(tensor.shape) for tensor in even.codes.load()] == [(264, 16), (264, 1), (264, 1)]
