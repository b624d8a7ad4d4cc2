"""Importance matrices of quantised models, and what quantising refuses."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mistralrs_sdk import (
    LayerTopology,
    ModelBuilder,
    ModelLoadError,
    Topology,
    UnsupportedError,
)
from mistralrs_sdk.config import EngineConfig
from mistralrs_sdk.engine import quantising
from mistralrs_sdk.isq import IMATRIX_TYPES
from mistralrs_sdk.kernels import native
from mistralrs_sdk.loading.imatrix import importance_of
from mistralrs_sdk.loading.loader import load_model
from tests.checkpoint_files import config_for, tensors_of, write_folder
from tests.model_helpers import continue_ids, prompt, tiny_builder
from tests.packed_models import (
    CPU,
    HIDDEN,
    MLP,
    dense_weights,
    error_of,
    gguf_of,
    load_quantised,
    open_path,
)
from tests.test_imatrix import write_gguf as write_imatrix

needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels here")

LAYER_MATRICES = {
    "attn_q": HIDDEN,
    "attn_k": HIDDEN,
    "attn_v": HIDDEN,
    "attn_output": HIDDEN,
    "ffn_gate": HIDDEN,
    "ffn_up": HIDDEN,
    "ffn_down": MLP,
}
"""The inputs of each matrix of a layer, by GGUF name."""


def importance_file(path: Path, *, size: int = 0) -> Path:
    """Which inputs matter: the first ones a thousand times more; `size` replaces their number."""
    tensors = {}
    for layer in range(2):
        for name, inputs in LAYER_MATRICES.items():
            sums = np.ones((1, size or inputs), dtype=np.float32)
            sums[:, :16] = 1000
            weight = f"blk.{layer}.{name}.weight"
            tensors |= {f"{weight}.in_sum2": sums, f"{weight}.counts": np.ones((1, 1), np.float32)}
    return write_imatrix(path, tensors)


@needs_native
@pytest.mark.parametrize("isq", sorted(IMATRIX_TYPES))
def test_an_importance_matrix_makes_important_inputs_more_exact(tmp_path, isq):
    """The first sixteen inputs of every matrix of a layer; what it does not name is as without."""
    checkpoint = open_path(gguf_of(tmp_path / "a.gguf", "F32"))
    importance = importance_of(checkpoint, importance_file(tmp_path / "i.gguf"))
    exact = dense_weights(load_model(checkpoint, dtype=torch.float32, device=CPU))

    plain = dense_weights(load_quantised(checkpoint, isq))
    weighted = dense_weights(load_quantised(checkpoint, isq, importance=importance))

    for name, numbers in exact.items():
        if ".layers." not in name:
            assert torch.equal(plain[name], weighted[name]), name
            continue
        before, after = (x[name] for x in (plain, weighted))
        assert error_of(after[:, :16], numbers[:, :16]) < error_of(before[:, :16], numbers[:, :16])


@needs_native
async def test_a_builder_uses_its_importance_matrix(tmp_path):
    """The weights are others than without."""
    path, found = gguf_of(tmp_path / "a.gguf", "F32", vocab=48), []
    builder = ModelBuilder(path).with_force_cpu().with_num_threads(1).with_isq("q4k")
    for each in (builder, builder.with_imatrix(importance_file(tmp_path / "i.gguf"))):
        async with await each.build() as model:
            found.append(await model.inner().thread.call(lambda e: dense_weights(e.runner.model)))

    same = [name for name in found[0] if torch.equal(found[0][name], found[1][name])]
    assert same == ["model.embed_tokens", "lm_head"]


@needs_native
@pytest.mark.parametrize(("size", "words"), [(64, "64,.*has 256 inputs"), (0, "nothing for")])
async def test_an_importance_matrix_of_another_model_is_refused(tmp_path, size, words):
    """Of another size, or of other names; the error names the file."""
    if size:
        file = importance_file(tmp_path / "i.gguf", size=size)
    else:
        tensors = {"blk.9.attn_q.weight.in_sum2": np.ones((1, HIDDEN), np.float32)}
        tensors["blk.9.attn_q.weight.counts"] = np.ones((1, 1), np.float32)
        file = write_imatrix(tmp_path / "i.gguf", tensors)
    builder = ModelBuilder(gguf_of(tmp_path / "a.gguf", "F32", vocab=48)).with_force_cpu()

    with pytest.raises(ModelLoadError, match=words) as caught:
        await builder.with_isq("q4k").with_imatrix(file).build()

    assert str(file) in str(caught.value)
    assert "another model" in str(caught.value)


# What is refused


@pytest.mark.parametrize("setting", ["isq", "topology"])
async def test_quantising_without_native_kernels_is_refused(monkeypatch, setting):
    """Nothing multiplies by the result; the error says what is missing."""
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "reason", lambda: "no compiler was found")
    topology = Topology().with_range(range(2), LayerTopology(isq="q8_0"))
    builder = tiny_builder().with_dtype("auto")
    builder = builder.with_isq("q8_0") if setting == "isq" else builder.with_topology(topology)

    for verb in (builder.plan, builder.build):
        with pytest.raises(UnsupportedError, match=f"{setting}: .*no compiler was found"):
            await verb()


@pytest.mark.parametrize("settings", [{"isq": "q8_0"}, {"isq": 4}, {"topology": True}])
def test_quantising_for_a_device_without_kernels_is_refused(settings):
    """Before native kernels are asked for; the error names setting, device and way out."""
    if "topology" in settings:
        settings = {"topology": Topology().with_range(range(2), LayerTopology(isq="q8_0"))}
    config = EngineConfig(device="mps", dtype="f32", **settings)

    with pytest.raises(UnsupportedError, match=rf"{next(iter(settings))}: .*mps.*force_cpu"):
        quantising.asked_target(config, torch.device("mps"))


def test_a_topology_that_quantises_nothing_needs_no_kernels(monkeypatch):
    """It may only name the device that the model is on."""
    monkeypatch.setattr(native, "available", lambda: False)
    topology = Topology().with_range(range(2), LayerTopology(device="cpu"))

    target = quantising.asked_target(EngineConfig(dtype="bf16", topology=topology), CPU)

    assert target("model.layers.0.mlp.up_proj", 64) is None


@pytest.mark.parametrize("setting", ["isq", "topology"])
async def test_a_type_of_gpus_is_refused_on_a_cpu(setting):
    """The error names the nearest that a CPU computes with."""
    builder = tiny_builder().with_dtype("auto")
    if setting == "isq":
        builder = builder.with_isq("f8e4m3")
    else:
        builder = builder.with_topology(Topology.from_str("0: {isq: f8e4m3}"))

    match = rf"^{'' if setting == 'isq' else 'topology: '}isq \(f8e4m3\).*use q8_0"
    for verb in (builder.plan, builder.build):
        with pytest.raises(UnsupportedError, match=match):
            await verb()


@needs_native
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
async def test_a_half_precision_model_is_not_quantised(dtype):
    """Products with packed weights are float32: a dtype is obeyed or refused."""
    builder = tiny_builder().with_dtype(dtype).with_isq("q8_0")

    for verb in (builder.plan, builder.build):
        with pytest.raises(UnsupportedError, match=rf"isq: .*dtype is {dtype}.*f32"):
            await verb()
    async with await builder.with_dtype("f32").build() as model:
        assert model.inner().info.weights == "Q8_0 x30"
        assert len(await continue_ids(model, prompt(9), 3)) == 3


@needs_native
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 7e4])
async def test_weights_that_have_no_scale_are_refused_by_name(tmp_path, value):
    """Nothing is quantised to nonsense, and the build ends as other failed ones do."""
    tensors = tensors_of(config_for("llama"))
    name = "model.layers.1.mlp.down_proj.weight"  # its rows are whole blocks
    tensors[name][3, 5] = value
    folder = write_folder(tmp_path, config_for("llama"), tensors)

    with pytest.raises(ModelLoadError, match=rf"{re.escape(name)} cannot be quantised to Q8_0"):
        await ModelBuilder(folder).with_force_cpu().with_num_threads(1).with_isq("q8_0").build()


@needs_native
async def test_a_part_that_nobody_asked_for_may_be_beyond_float16(tmp_path, caplog):
    """Then the fused layer is dense, with a warning, and none of it is quantised."""
    tensors = tensors_of(config_for("llama"))
    tensors["model.layers.0.mlp.gate_proj.weight"][0, 0] = 7e4
    folder = write_folder(tmp_path, config_for("llama"), tensors)
    caplog.set_level(logging.WARNING)
    builder = ModelBuilder(folder).with_force_cpu().with_num_threads(1)
    topology = Topology().with_pattern("0.mlp.up_proj", LayerTopology(isq="hqq8"))
    async with await builder.with_topology(topology).build() as model:
        assert model.inner().info.weights.endswith("f32 x2")
        assert len(await continue_ids(model, prompt(9), 3)) == 3
    assert "gate_proj.weight + model.layers.0.mlp.up_proj.weight has values" in caplog.text
