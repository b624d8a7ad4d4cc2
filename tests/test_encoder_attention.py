"""Attention of whole prompts: causal or both ways, in windows, each sequence by itself."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from mistralrs_sdk.attention import encoder as encoder_module
from mistralrs_sdk.attention.backend import AttentionSpec, BatchLists
from mistralrs_sdk.attention.encoder import EncoderBackend

HEADS, KV_HEADS, DIM = 4, 2, 8


def attended(lengths: list[int], **changes) -> tuple[Tensor, Tensor]:
    """What the backend computes for sequences of these lengths, and what is right."""
    spec = AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=0.3, **changes)
    total = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(total, HEADS, DIM, generator=generator)
    k, v = (torch.randn(total, KV_HEADS, DIM, generator=generator) for _ in range(2))
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    batch = BatchLists(
        input_ids=[0] * total,
        positions=[0] * total,
        slot_mapping=[],
        logits_indices=[],
        query_start=starts,
        seq_lens=lengths,
        block_tables=[],
    ).batch(torch.device("cpu"))
    backend = EncoderBackend()
    backend.plan(batch)
    parts = [_naive(spec, q[a:b], k[a:b], v[a:b]) for a, b in itertools.pairwise(starts)]
    return backend.run(spec, 0, q, k, v), torch.cat(parts)


def _naive(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    away = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = torch.ones_like(away, dtype=torch.bool)
    if spec.causal:
        seen &= away >= 0
    if spec.window is not None:
        seen &= away.abs() < spec.window
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@pytest.mark.parametrize("tile", [512, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_rows_see_what_they_should(monkeypatch, tile, causal, window):
    """Within their own sequence and window, on one side or both, however it is cut."""
    monkeypatch.setattr(encoder_module, "TILE_ROWS", tile)

    found, right = attended([5, 1, 13, 9], causal=causal, window=window)

    torch.testing.assert_close(found, right)


def test_soft_caps_work_both_ways():
    """Scores are capped before rows are masked."""
    found, right = attended([7, 12], causal=False, window=4, softcap=0.5)

    torch.testing.assert_close(found, right)


def test_a_graph_is_refused():
    """There is nothing to record."""
    with pytest.raises(ValueError, match="graph_size 4"):
        EncoderBackend().plan(None, graph_size=4)  # type: ignore[arg-type]
