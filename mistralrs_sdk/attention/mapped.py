"""Attention of a model whose layers are on several devices: each device attends for its own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionBackend, AttentionSpec, Batch, Rotation
from mistralrs_sdk.attention.sdpa import refuse_graph


@attrs.frozen(kw_only=True, eq=False)
class MappedPart:
    """The layers of a device, and what attends for them; its cache numbers them from 0."""

    device: torch.device
    layers: Sequence[int]
    backend: AttentionBackend


class MappedBackend:
    """Attends on the device of each layer; all parts keep a token in the same slot.

    Attention reads nothing but slots of a batch's tensors, so nothing else goes to another device.
    """

    supports_graphs: ClassVar[bool] = False

    def __init__(self, parts: Sequence[MappedPart]) -> None:
        self.parts = tuple(parts)
        self._places = {
            layer: (part, place) for part in parts for place, layer in enumerate(part.layers)
        }

    def plan(self, batch: Batch, *, graph_size: int | None = None) -> None:
        refuse_graph(self, graph_size)
        for part in self.parts:
            slots = batch.slot_mapping.to(part.device)
            with _current(part.device):
                part.backend.plan(attrs.evolve(batch, slot_mapping=slots))

    def run(
        self,
        spec: AttentionSpec,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotation: Rotation | None = None,
    ) -> Tensor:
        part, place = self._places[layer]
        with _current(part.device):
            return part.backend.run(spec, place, q, k, v, rotation=rotation)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Kernels that are not torch's are launched on the current device, wherever tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
