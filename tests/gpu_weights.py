"""Weights kept as on a GPU, on a CPU: what the tests of them share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.sdpa import SdpaBackend
from mistralrs_sdk.config import EngineConfig, ModelDType
from mistralrs_sdk.engine import quantising, requantise, settle
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.linear import Linear
from mistralrs_sdk.quant import device_kinds
from mistralrs_sdk.quant.device_method import DeviceMethod
from mistralrs_sdk.quant.linear_method import DenseMethod
from tests.batches import Row, make_batch
from tests.int4_reference import int4_kernels

CPU = torch.device("cpu")


@contextmanager
def gpu_weights(capability: tuple[int, int] = (9, 0)) -> Iterator[list[str]]:
    """The engine keeps weights on this CPU as on a GPU; yields int4 calls as they come."""
    choose = settle._choose_dtype

    def choose_dtype(config: EngineConfig, device: Any, origins: dict[str, str]) -> ModelDType:
        found = choose(config, device, origins)
        return ModelDType.BF16 if config.dtype is ModelDType.AUTO else found

    with int4_kernels() as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(settle, "_choose_dtype", choose_dtype)
        for module in (quantising, requantise):
            patch.setattr(module, "has_device_kernels", lambda device: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        patch.setattr(device_kinds, "_tried", set())
        yield calls


class ExactMethod(DenseMethod):
    """Multiplies in float32 by the numbers that a form stands for, inputs rounded as it rounds."""

    def __init__(self, method: DeviceMethod) -> None:
        self._parts = method.parts

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        weight, bias = module.weight.float(), module.bias
        rows, found, start = x.reshape(-1, x.shape[-1]), [], 0
        for part in self._parts:
            own = weight[start : start + part.count]
            found.append(part.kind.inputs(rows) @ own.t())
            start += part.count
        y = torch.cat(found, 1)
        y = y if bias is None else y + bias.float()
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        return super().rows(module, ids).to(torch.bfloat16)


def make_exact(model: nn.Module) -> None:
    """Put the numbers that its quantised weights stand for in their place."""
    for module in model.modules():
        method: Any = getattr(module, "method", None)
        if isinstance(module, (Linear, Embedding)) and isinstance(method, DeviceMethod):
            weight = method.to_dense(module)
            module.weight = nn.Parameter(weight, requires_grad=False)
            module.packed, module.method = (), ExactMethod(method)


def tensor_bytes(model: nn.Module) -> int:
    """Memory that a model's weights really take."""
    parameters = sum(p.nbytes for p in model.parameters())
    packed = [own for module in model.modules() for own in getattr(module, "packed", ())]
    return parameters + sum(tensor.nbytes for own in packed for tensor in own)


def margins(model: Any, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """Of each token of some (prompt, answer): how much likelier another one was, as a part of the
    spread of all logits.

    Computed by a `CausalLM` at once, without an engine.
    """
    found = []
    for ids, answer in answers:
        whole = [*ids, *answer]
        blocks = list(range(1, 2 + len(whole) // 8))
        cache = PagedKVCache(
            model.specs,
            num_blocks=len(blocks) + 1,
            block_size=8,
            dtype=torch.bfloat16,
            device="cpu",
        )
        backend = SdpaBackend(cache)
        batch = make_batch([(Row(whole, blocks), len(whole))], 8)
        batch = attrs.evolve(batch, logits_indices=torch.arange(len(ids) - 1, len(whole) - 1))
        backend.plan(batch)
        logits = model(batch, backend).float()
        taken = logits.gather(1, torch.tensor(answer)[:, None]).squeeze(1)
        found.append((logits.amax(1) - taken) / logits.std())
    return torch.cat(found)
