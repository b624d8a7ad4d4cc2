"""The layers by native kernels and by torch: the same numbers, and nothing else computes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mistralrs_sdk.attention.cpu import CpuBackend
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.kernels import elementwise, native
from mistralrs_sdk.layers.mlp import GatedMLP
from mistralrs_sdk.layers.norm import RMSNorm
from mistralrs_sdk.layers.rotary import RotaryEmbedding
from mistralrs_sdk.layers.softcap import softcap
from tests.batches import Row, make_batch
from tests.test_model_parity import FAMILIES, cached

needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels here")

VIEWS = {"detach", "detach_", "flatten", "split_with_sizes", "to", "unflatten", "view"}
NO_ARITHMETIC = VIEWS | {"empty", "new_empty"}
MATRICES = {"embedding", "linear"}
"""What the weights are for; dense ones in these models, so torch multiplies by them."""


class Counting(TorchDispatchMode):
    """Counts the operations that reach torch's kernels."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def both_ways(monkeypatch, compute):
    """The results of native kernels and of torch."""
    results = [compute()]
    monkeypatch.setattr(elementwise.native, "available", lambda: False)
    return [*results, compute()]


@needs_native
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_computes_nothing_in_torch_but_matrix_products(family):
    """Norms, rotation, storing, attention, activation, adding, capping and Gemma's scaling of
    embeddings are kernel calls."""
    model = cached(family)
    cache = PagedKVCache(model.specs, num_blocks=5, block_size=8, dtype=torch.float16, device="cpu")
    backend = CpuBackend(cache)
    rows = [Row(list(range(9)), [1, 3]), Row(list(range(4)), [2])]
    for counts in ((8, 3), (1, 1)):
        batch = make_batch(list(zip(rows, counts, strict=True)), 8)
        backend.plan(batch)
        with Counting() as counting:
            model(batch, backend)
        for row, count in zip(rows, counts, strict=True):
            row.computed += count

    assert set(counting.names) <= NO_ARITHMETIC | MATRICES


@needs_native
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("with_added", [False, True])
def test_norms_agree(monkeypatch, offset, with_added):
    """With and without something to add first, which is added in place."""
    norm = RMSNorm(24, 1e-6, offset=offset)
    norm.weight.copy_(torch.randn(24))
    x, added = torch.randn(2, 5, 24)

    def compute():
        mine = x.clone()
        return norm(mine, added if with_added else None), mine

    (mine, sum_), (theirs, their_sum) = both_ways(monkeypatch, compute)
    torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6)
    assert torch.equal(sum_, their_sum)
    assert torch.equal(sum_, x + added if with_added else x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_computed_by_torch(dtype):
    """The kernels are for float32: all else takes the way it took without them."""
    norm, mlp = RMSNorm(8, 1e-6).to(dtype), GatedMLP(8, 16, activation="gelu").to(dtype)
    for parameter in (*norm.parameters(), *mlp.parameters()):
        parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(3, 8, dtype=dtype)

    out = softcap(mlp(norm(x.clone(), x)), 5.0)

    doubled = torch.nn.functional.rms_norm(2 * x.double(), (8,), eps=1e-6) * norm.weight
    gate, up = (doubled.double() @ mlp.gate_up_proj.weight.double().T).chunk(2, -1)
    fed = (torch.nn.functional.gelu(gate) * up) @ mlp.down_proj.weight.double().T
    tolerance = 0.2 if dtype is torch.bfloat16 else 1e-5
    assert out.dtype is dtype
    torch.testing.assert_close(
        out.double(), 5 * torch.tanh(fed / 5), atol=tolerance, rtol=tolerance
    )


@needs_native
@pytest.mark.parametrize("activation", elementwise.ACTIVATIONS)
def test_gated_layers_agree(monkeypatch, activation):
    """Every activation that a config may name."""
    mlp = GatedMLP(8, 24, activation=activation)
    for parameter in mlp.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(3, 8)

    mine, theirs = both_ways(monkeypatch, lambda: mlp(x))
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5)


@needs_native
def test_rotations_agree(monkeypatch):
    """The table is the same whoever made it, up to the last bits of a cosine."""
    rope = RotaryEmbedding(16, 1e4)
    positions = torch.tensor([0, 7, 4095])

    mine, theirs = both_ways(monkeypatch, lambda: rope(positions, torch.float32))
    torch.testing.assert_close((mine.cos, mine.sin), (theirs.cos, theirs.sin), atol=3e-7, rtol=0)
