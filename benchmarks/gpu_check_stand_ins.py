"""What takes the place of a GPU when `gpu_check.py` runs on a CPU: so that it is itself tested.

FlashInfer's wrappers, int4 kernels, graphs and copies are those of the tests. Nothing that is found
with them says anything about a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from mistralrs_sdk.attention import flashinfer
from mistralrs_sdk.attention.select import Choice, GraphChoice
from mistralrs_sdk.engine import build, model_runner, paged_attention, quantising
from mistralrs_sdk.engine.cuda_graphs import GraphFactory, GraphRunner
from mistralrs_sdk.engine.transfers import Transfers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from fake_device import FakeGraphs, FakeTransfers
from flashinfer_reference import FlashInferReference
from int4_reference import int4_kernels


def make_graphs() -> GraphFactory:
    """Graphs that call the captured step again."""
    return FakeGraphs()


@contextmanager
def stand_ins() -> Iterator[None]:
    """Models that are built meanwhile take their decisions, and run, as on a GPU."""
    with (
        int4_kernels(),
        mock.patch.object(quantising, "has_device_kernels", return_value=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(flashinfer, "_flashinfer", FlashInferReference),
        mock.patch.object(flashinfer, "flashinfer_missing", return_value=None),
        mock.patch.object(paged_attention, "select_backend", _select_backend),
        mock.patch.object(paged_attention, "select_graphs", _select_graphs),
        mock.patch.object(build, "cuda_graphs", _graphs),
        mock.patch.object(model_runner, "_transfers", _transfers),
    ):
        yield


def _select_backend(*, dtype: str, flashinfer: bool | None, **facts: Any) -> Choice:
    fits = dtype != "f32" and flashinfer is not False
    return Choice(name="FlashInferBackend" if fits else "SdpaBackend")


def _select_graphs(backend: str | None, *, cuda_graphs: bool | None, **facts: Any) -> GraphChoice:
    fits = backend == "FlashInferBackend" and cuda_graphs is not False
    return GraphChoice(on=fits, reason="a stand-in")


def _graphs(model: Any, backend: Any, *, device: torch.device, max_num_seqs: int) -> Any:
    return GraphRunner(
        model,
        backend,
        device=device,
        max_num_seqs=max_num_seqs,
        graphs=make_graphs(),
        transfers=_transfers(None),
    )


def _transfers(runner: Any) -> Transfers:
    return FakeTransfers()
