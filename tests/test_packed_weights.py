"""Models whose weights stay packed on a CPU: what they compute, take and say."""

from __future__ import annotations

import gc
import logging
import math
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import torch
from torch import Tensor, nn

from mistralrs_sdk import ModelBuilder
from mistralrs_sdk.config import EngineConfig
from mistralrs_sdk.engine.settle import settle
from mistralrs_sdk.kernels import native
from mistralrs_sdk.kernels.matmul import PACKABLE
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.linear import Linear
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.forms import choose_forms, total_bytes
from mistralrs_sdk.loading.loader import load_model, prepare_model
from mistralrs_sdk.loading.weights import bytes_to_read
from mistralrs_sdk.models.decoder import CausalLM
from mistralrs_sdk.quant import half
from mistralrs_sdk.quant.packed import PackedMethod
from tests.batches import generate_uncached
from tests.checkpoint_files import config_for, tensors_of, write_folder
from tests.model_helpers import continue_ids, prompt, tiny_folder
from tests.packed_models import (
    CPU,
    dense_weights,
    error_of,
    gguf_of,
    logits,
    open_path,
    packed_bytes_of,
)
from tests.test_plan_measured import PeakMemory

needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels here")
needs_half = pytest.mark.skipif(not half.available(), reason="this torch has no FBGEMM")

STORED = (*(kind for kind in PACKABLE if kind != "HQQ8"), "BF16", "F32")
"""Every type of a GGUF file that is kept, and the floats that become another one."""


def load(checkpoint: Checkpoint, dtype: str = "auto") -> CausalLM:
    """As `build()` does on a CPU."""
    config = EngineConfig(device="cpu", dtype=dtype, num_threads=1)
    settled = settle(checkpoint, config, {})
    return load_model(
        checkpoint,
        dtype=settled.dtype,
        device=CPU,
        model=settled.model,
        forms=settled.forms,
    )


@needs_native
@pytest.mark.parametrize("start", range(3))
def test_a_file_of_every_type_at_once_is_its_dequantised_self(tmp_path, start):
    """Parts of one fused layer have different types; each type is in each place once."""
    kinds = STORED[start:] + STORED[:start]
    checkpoint = open_path(gguf_of(tmp_path / "mixed.gguf", *kinds))
    packed, dense = load(checkpoint), load(checkpoint, "f32")

    ours, theirs = dense_weights(packed), dense_weights(dense)
    for name, module in packed.named_modules():
        if not isinstance(module, (Linear, Embedding)):
            continue
        first = 0
        for part in cast(PackedMethod, module.method).parts:
            rows = slice(first, first + part.count)
            expected = theirs[name][rows]
            same = expected.half().float() if part.ggml_type == "F16" else expected
            assert torch.equal(ours[name][rows], same), (name, part)
            first += part.count
    assert error_of(logits(packed), logits(dense)) < 0.05


@needs_native
@pytest.mark.parametrize("kind", STORED)
def test_a_file_of_one_type_gives_the_logits_of_its_numbers(tmp_path, kind):
    """Inputs of quantised weights are rounded to 8 bits; those of float16 ones are not."""
    checkpoint = open_path(gguf_of(tmp_path / "one.gguf", kind))

    error = error_of(logits(load(checkpoint)), logits(load(checkpoint, "f32")))

    # float32 weights lose bits in float16; the other two are there already, in numbers like these
    limit = {"F16": 1e-5, "BF16": 1e-5, "F32": 2e-3}.get(kind, 0.05)
    assert error < limit


@needs_native
@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K", "Q8_0"), ("Q4_1",), ("F32",), STORED])
async def test_a_model_takes_what_was_planned_and_says_so(tmp_path, kinds):
    """Bytes in memory, of the plan and of the description are one number."""
    builder = ModelBuilder(gguf_of(tmp_path / "a.gguf", *kinds, vocab=48))
    builder = builder.with_force_cpu().with_num_threads(1)
    plan = await builder.plan()
    async with await builder.build() as model:
        taken = await model.inner().thread.call(lambda e: packed_bytes_of(e.runner.model))
        info, shown = model.inner().info, model.describe()

    assert taken == plan.weight_bytes == info.weight_bytes
    assert info.weights == plan.weights
    row = next(line for line in shown.splitlines() if line.startswith("weights"))
    assert f"{taken / 2**20:.1f} MiB" in row
    assert plan.weights in row
    wanted = {"F16" if kind in ("F32", "BF16") else kind for kind in kinds}
    assert {word.split()[0] for word in plan.weights.split(", ")} == wanted


@needs_native
@pytest.mark.real_model
@pytest.mark.timeout(120)
def test_the_demo_model_takes_hardly_more_than_its_file(demo_model):
    """At most 1.4 times; by itself, and all of it packed."""
    model = load(open_path(demo_model))

    assert packed_bytes_of(model) <= 1.4 * demo_model.stat().st_size


@needs_native
def test_stored_blocks_are_not_dequantised_on_the_way(tmp_path):
    """Only norms are read as numbers."""
    checkpoint = open_path(gguf_of(tmp_path / "a.gguf", "Q4_K"))

    def refuse() -> Tensor:
        raise AssertionError("blocks were dequantised")

    tensors = {
        name: source if source.blocks is None else attrs.evolve(source, load=refuse)
        for name, source in checkpoint.tensors.items()
    }

    assert load(attrs.evolve(checkpoint, tensors=tensors)).lm_head is not None


@needs_native
@pytest.mark.parametrize("kinds", [("Q4_K",), ("Q5_0",), ("F32",), ("Q4_K", "Q6_K", "F32")])
def test_loading_takes_what_was_said_before(tmp_path, kinds):
    """At its peak no more than the result and what reading the greatest weight was said to take."""
    checkpoint = open_path(gguf_of(tmp_path / "a.gguf", *kinds, vocab=4096))
    model = prepare_model(checkpoint)
    forms = choose_forms(model, checkpoint, dtype=torch.float32, packing="native")
    said = total_bytes(forms) + max(bytes_to_read(f, checkpoint.tensors) for f in forms.values())
    gc.collect()

    with PeakMemory(list(model.parameters())) as measured:
        load_model(checkpoint, dtype=torch.float32, device=CPU, model=model, forms=forms)

    assert (
        measured.peak <= said
    )  # it may be less than the result: memory that was free is used again


# Values that float16 does not hold


OUTLIERS = {"too great": 7e4, "too small": -1e38, "infinite": math.inf}


def folder_with_outlier(path: Path, value: float, *names: str) -> Path:
    """A tiny llama with one such value in each of these tensors."""
    tensors = tensors_of(config_for("llama"))
    for name in names:
        tensors[name][2, 3] = value
    return write_folder(path, config_for("llama"), tensors)


@pytest.mark.parametrize("outlier", OUTLIERS)
@pytest.mark.parametrize("packing", [pytest.param("native", marks=needs_native), "half"])
def test_weights_beyond_float16_stay_dense(tmp_path, caplog, outlier, packing):
    """With a warning that names the tensor: the whole of a fused layer, and nothing else."""
    if packing == "half" and not half.available():
        pytest.skip("this torch has no FBGEMM")
    name = "model.layers.1.mlp.up_proj.weight"
    checkpoint = open_path(folder_with_outlier(tmp_path, OUTLIERS[outlier], name))
    dense = load_model(checkpoint, dtype=torch.float32, device=CPU)
    caplog.clear()

    forms = choose_forms(dense, checkpoint, dtype=torch.float32, packing=packing)
    model = load_model(checkpoint, dtype=torch.float32, device=CPU, forms=forms)

    fused: Any = model.get_submodule("model.layers.1.mlp.gate_up_proj")
    assert torch.equal(fused.weight, dense_weights(dense)["model.layers.1.mlp.gate_up_proj"])
    assert model.get_submodule("model.layers.0.mlp.gate_up_proj").weight is None
    assert caplog.messages == [
        f"model.layers.1.mlp.gate_proj.weight + {name} has values beyond float16 (65504): "
        "it is kept in the model's dtype"
    ]
    if (packing, outlier) == ("native", "too great"):  # with the others no logits are numbers
        assert error_of(logits(model), logits(dense)) < 0.02


@needs_native
async def test_a_model_says_which_weights_did_not_fit_float16(tmp_path):
    """The plan reads no weights, so it counts float16; what was built is told as it is."""
    folder = folder_with_outlier(tmp_path, 7e4, "lm_head.weight")
    builder = ModelBuilder(folder).with_force_cpu().with_num_threads(1)
    plan = await builder.plan()
    async with await builder.build() as model:
        taken = await model.inner().thread.call(lambda e: packed_bytes_of(e.runner.model))
        info, ours = model.inner().info, await continue_ids(model, prompt(9), 8)
    async with await builder.with_dtype("f32").build() as model:
        theirs = await continue_ids(model, prompt(9), 8)

    assert plan.weights == "F16 x16"
    assert info.weights == "F16 x15, f32 x1"
    assert plan.weight_bytes < info.weight_bytes == taken
    assert ours == theirs


@needs_native
def test_the_greatest_float16_fits(tmp_path, caplog):
    """65504 and its negative need no warning."""
    name = "lm_head.weight"
    tensors = tensors_of(config_for("llama"))
    tensors[name][0, 0], tensors[name][0, 1] = 65504.0, -65504.0
    caplog.set_level(logging.WARNING)

    model = load(open_path(write_folder(tmp_path, config_for("llama"), tensors)))

    assert model.lm_head is not None
    assert dense_weights(model)["lm_head"][0, :2].tolist() == [65504.0, -65504.0]
    assert not caplog.messages


# Without native kernels


@needs_half
async def test_without_native_kernels_a_model_is_kept_in_float16(monkeypatch):
    """Products are torch's, rows are looked up in float32, and the text is that of float16."""
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "library", lambda: None)
    builder = ModelBuilder(tiny_folder()).with_force_cpu().with_num_threads(1)
    plan = await builder.plan()
    async with await builder.build() as model:
        info, text = model.inner().info, await continue_ids(model, prompt(9), 12)

    rounded = load_model(open_path(tiny_folder()), dtype=torch.float32, device=CPU)
    for name, module in rounded.named_modules():
        if isinstance(module, Linear):
            module.weight = nn.Parameter(module.weight.half().float(), requires_grad=False)
        assert "packed" not in name
    assert plan.weights == info.weights == "F16 x29, f32 x1"
    assert info.weight_bytes == plan.weight_bytes
    assert text == greedy_ids(rounded, prompt(9), 12)


def greedy_ids(model: CausalLM, ids: list[int], count: int) -> list[int]:
    """Computed by torch alone, each from the beginning."""
    (row,) = generate_uncached(model, [ids], count)
    return row.ids[len(ids) :][:count]
