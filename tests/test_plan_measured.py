"""Measured memory: what a step and a loaded model really take, against the plan."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mistralrs_sdk.attention.backend import Batch
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.sdpa import SdpaBackend
from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.engine.pool_size import estimate_activations
from mistralrs_sdk.loading.loader import load_model, open_checkpoint
from tests.model_helpers import tiny_folder

CPU = torch.device("cpu")
ON_LINUX = pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads Linux's /proc")


class PeakMemory(TorchDispatchMode):
    """Follows the bytes of tensors that operations make, those of `known` left out."""

    def __init__(self, known) -> None:
        super().__init__()
        self._sizes = {t.untyped_storage()._cdata: 0 for t in known}
        self._now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return out

    def _follow(self, storage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


@pytest.mark.parametrize("name", ["llama", "llama_gqa93", "gemma2", "gemma3", "qwen3"])
@pytest.mark.parametrize(("num_seqs", "length"), [(1, 500), (4, 125), (4, 10)])
def test_a_step_takes_what_was_estimated(name, num_seqs, length):
    """Never more than the estimate, and at least 0.4 of it, for prompts of one or more sequences.

    Measured by following every tensor that the forward makes.
    """
    model = load_model(
        open_checkpoint(ModelSource(model_id=tiny_folder(name))), dtype=torch.float32, device=CPU
    )
    cache = PagedKVCache(model.specs, num_blocks=300, block_size=8, dtype=torch.float32, device=CPU)
    backend = SdpaBackend(cache)
    blocks = -(-length // 8)
    tables = [[1 + i + num_seqs * j for j in range(blocks)] for i in range(num_seqs)]
    places = [(i, p) for i in range(num_seqs) for p in range(length)]
    batch = Batch(
        input_ids=torch.arange(3, 3 + len(places)) % 512,
        positions=torch.tensor([p for _, p in places]),
        slot_mapping=torch.tensor([tables[i][p // 8] * 8 + p % 8 for i, p in places]),
        logits_indices=torch.tensor([(i + 1) * length - 1 for i in range(num_seqs)]),
        query_start=[i * length for i in range(num_seqs + 1)],
        seq_lens=[length] * num_seqs,
        block_tables=tables,
    )
    there = [batch.input_ids, batch.positions, batch.slot_mapping, batch.logits_indices]

    gc.collect()
    with PeakMemory([*model.parameters(), *cache.k, *cache.v, *there]) as memory_used:
        backend.plan(batch)
        model(batch, backend)

    estimate = estimate_activations(
        model.config,
        itemsize=4,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=len(places),
        max_model_len=length,
    ).total
    assert 0.4 * estimate < memory_used.peak <= estimate


_RESIDENT = """
import asyncio, json, sys
from mistralrs_sdk import ModelBuilder

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) * 1024

async def main(path, rounds):
    models, found = [], []
    for dtype, copies in rounds:
        builder = ModelBuilder(path).with_force_cpu().with_num_threads(1).with_dtype(dtype)
        plan = await builder.plan()
        before = resident()
        models += [await builder.build() for _ in range(copies)]
        found.append([(resident() - before) / copies, plan.weight_bytes])
    print(json.dumps(found))
    for model in models:
        await model.aclose()

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


def resident_growth(path: Path, *rounds: tuple[str, int]) -> list[tuple[float, int]]:
    """For (dtype, copies): resident bytes that each built model adds, and the weights planned.

    VmRSS of a fresh process, which has imported everything and keeps all the models. A model holds
    its weights and what its engine needs besides; the pool takes memory only when it is used.
    """
    ran = subprocess.run(
        [sys.executable, "-c", _RESIDENT, str(path), json.dumps(rounds)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout)


@ON_LINUX
def test_tiny_models_take_what_was_planned():
    """Within 15 percent. What an engine needs besides is left out: float32 less bfloat16."""
    warm_up = [("bf16", 4), ("f32", 4)]

    *_, half, full = resident_growth(tiny_folder(), *warm_up, ("bf16", 12), ("f32", 12))

    assert abs((full[0] - half[0]) / (full[1] - half[1]) - 1) < 0.15


@ON_LINUX
@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_the_demo_model_takes_what_was_planned(demo_model):
    """Resident memory grows by the planned weights, within 15 percent."""
    ((grown, planned),) = resident_growth(demo_model, ("f32", 1))

    assert abs(grown / planned - 1) < 0.15
