"""What a GPU that keeps weights quantised refuses, before anything is read or allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mistralrs_sdk import EngineConfig, LayerTopology, ModelBuilder, Topology, UnsupportedError
from mistralrs_sdk.engine import quantising, settle
from mistralrs_sdk.engine.memory import layer_of
from mistralrs_sdk.engine.quantising import asked_target, refuse_places
from mistralrs_sdk.isq import parse_isq
from mistralrs_sdk.loading.forms import choose_forms, quantise_target
from tests import int4_reference
from tests.gpu_weights import CPU, gpu_weights
from tests.model_helpers import tiny_builder, tiny_folder
from tests.test_forms import checkpoint_of, model_of

CUDA = torch.device("cuda", 1)


def capability(monkeypatch, version: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)


def config_of(setting: str, isq: Any, **settings: Any) -> EngineConfig:
    if setting == "isq":
        return EngineConfig(isq=isq, **settings)
    layer = LayerTopology(isq=isq)
    return EngineConfig(topology=Topology().with_range(range(2), layer), **settings)


@pytest.mark.parametrize("setting", ["isq", "topology"])
@pytest.mark.parametrize(
    ("version", "isq", "words"),
    [
        ((7, 5), 4, "INT4/32.*capability 8.0, and cuda:1 has 7.5; leave it out, or.*force_cpu"),
        ((7, 5), 8, "INT8 needs.*capability 8.0, and cuda:1 has 7.5; leave it out"),
        ((8, 6), "f8e4m3", "F8E4M3 needs.*capability 8.9, and cuda:1 has 8.6; use 8 or 4"),
    ],
)
def test_a_gpu_without_the_kernels_is_refused(monkeypatch, setting, version, isq, words):
    """The error names setting, form, both versions and a way out; nothing is tried."""
    capability(monkeypatch, version)
    monkeypatch.setattr(quantising, "obstacle", None)

    with pytest.raises(UnsupportedError, match=f"^{setting}: .*{words}"):
        asked_target(config_of(setting, isq, dtype="bf16"), CUDA)


@pytest.mark.parametrize("setting", ["isq", "topology"])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_another_dtype_than_bfloat16_is_refused(monkeypatch, setting, dtype):
    """A dtype is obeyed or refused, before kernels are tried."""
    capability(monkeypatch, (9, 0))
    monkeypatch.setattr(quantising, "obstacle", None)

    match = rf"^{setting}: .*bfloat16 on cuda:1, and dtype is {dtype}; leave.*bf16"
    with pytest.raises(UnsupportedError, match=match):
        asked_target(config_of(setting, 8, dtype=dtype), CUDA)


@pytest.mark.parametrize("setting", ["isq", "topology"])
@pytest.mark.parametrize(("isq", "nearest"), [("q8_0", 8), ("q6k", 8), (2, 4)])
def test_a_type_that_gpus_do_not_take_is_refused(setting, isq, nearest):
    """Whatever the GPU; the nearest is named."""
    match = rf"isq \({isq}\) is not computed with on CUDA: use {nearest}"
    with pytest.raises(UnsupportedError, match=match):
        asked_target(config_of(setting, isq, dtype="bf16"), CUDA)


async def test_kernels_that_do_not_work_are_refused_in_time(monkeypatch):
    """Before the plan, and with what was found."""

    def missing(weight: torch.Tensor, inner: int) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    with gpu_weights():
        monkeypatch.setattr(int4_reference, "convert_weight", missing)
        builder = tiny_builder().with_dtype("bf16").with_isq(4)
        for verb in (builder.plan, builder.build):
            with pytest.raises(
                UnsupportedError, match=r"^isq: INT4/32 \(Q4_K\) cannot be had on cpu: .*no kernel"
            ):
                await verb()


async def test_what_takes_the_place_of_others_must_work_too(monkeypatch):
    """Int8 is what embedding and head become, and rows that four bits do not fill."""
    against = quantising._against
    monkeypatch.setattr(
        quantising,
        "_against",
        lambda name, device: name if name == "INT8" else against(name, device),
    )
    with gpu_weights(), pytest.raises(UnsupportedError, match=r"^isq: INT8"):
        await tiny_builder().with_dtype("bf16").with_isq(4).build()


# Layers on several devices


def forms_on(places: dict[int, torch.device], isq: Any) -> None:
    """Check a model of two layers, quantised, with its layers there and the rest on cuda:1."""
    model = model_of()
    target = quantise_target(parse_isq(isq), None, on_cuda=True)
    forms = choose_forms(
        model, checkpoint_of(model), dtype=torch.bfloat16, packing="none", target=target
    )

    def device_of(name: str) -> torch.device:
        layer = layer_of(name)
        return CUDA if layer is None else places.get(layer, CUDA)

    refuse_places(forms, device_of)


def test_layers_on_a_cpu_are_not_quantised_as_on_a_gpu(monkeypatch):
    """The error names weight, form and device; on GPUs that have the kernels they are."""
    capability(monkeypatch, (9, 0))
    monkeypatch.setattr(quantising, "obstacle", lambda kind, device: None)

    forms_on({}, 8)
    with pytest.raises(UnsupportedError, match=r"layers\.1\..* would be INT8 on cpu: only a GPU"):
        forms_on({1: CPU}, 8)


def test_every_gpu_must_have_the_kernels(monkeypatch):
    """Not only the model's, which the others are beside."""
    versions = {CUDA: (9, 0), torch.device("cuda", 0): (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", versions.__getitem__)
    monkeypatch.setattr(quantising, "obstacle", lambda kind, device: None)

    with pytest.raises(UnsupportedError, match=r"layers\.0\..* F8E4M3 on cuda:0: .*has 8.0"):
        forms_on({0: torch.device("cuda", 0)}, "f8e4m3")


async def test_mapped_layers_are_asked_about(monkeypatch):
    """When a model is settled, with where its layers go."""
    seen: list[torch.device] = []
    monkeypatch.setattr(
        settle, "refuse_places", lambda forms, device_of: seen.extend(map(device_of, forms))
    )
    with gpu_weights():
        builder = ModelBuilder(tiny_folder()).with_device_mapping("cpu:2;cpu:2")
        await builder.with_dtype("bf16").with_isq(8).plan()

    assert set(seen) == {CPU}
