"""An engine that takes a CPU for a GPU: FlashInfer's wrappers, graphs and copies are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import attrs
import torch

from mistralrs_sdk.attention import flashinfer
from mistralrs_sdk.attention.select import Choice, GraphChoice
from mistralrs_sdk.config import EngineConfig
from mistralrs_sdk.engine import build, model_runner, paged_attention
from mistralrs_sdk.engine.cuda_graphs import GraphRunner
from tests.fake_device import FakeGraphs, FakeTransfers
from tests.flashinfer_reference import FlashInferReference


@attrs.frozen
class Played:
    """What the engines that were built meanwhile computed with."""

    reference: FlashInferReference
    graphs: list[GraphRunner] = attrs.field(factory=list)


@contextmanager
def gpu_engine(*, graphs: bool = True) -> Iterator[Played]:
    """Models that are built meanwhile, on any thread, run as on a GPU, in any dtype.

    With `graphs` decode steps are captured, unless a setting says otherwise.
    """
    played = Played(FlashInferReference(any_shape=True))

    def make(model: Any, backend: Any, **settings: Any) -> GraphRunner:
        runner = GraphRunner(
            model, backend, graphs=FakeGraphs(), transfers=FakeTransfers(), **settings
        )
        played.graphs.append(runner)
        return runner

    def choose(backend: str | None, *, cuda_graphs: bool | None, **facts: Any) -> GraphChoice:
        return GraphChoice(on=graphs and cuda_graphs is not False, reason="a stand-in")

    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        # The settings say "cpu" once the device is chosen, which refuses float8 and graphs.
        mock.patch.object(EngineConfig, "_refuse_contradictions", return_value=None),
        mock.patch.object(flashinfer, "_flashinfer", return_value=played.reference),
        mock.patch.object(
            paged_attention, "select_backend", return_value=Choice(name="FlashInferBackend")
        ),
        mock.patch.object(paged_attention, "select_graphs", choose),
        mock.patch.object(build, "cuda_graphs", make),
        mock.patch.object(model_runner, "_transfers", return_value=FakeTransfers()),
    ):
        yield played
