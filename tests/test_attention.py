"""The paged cache and the attention backends against attention written out in full."""

from __future__ import annotations

import attrs
import pytest
import torch

from mistralrs_sdk.attention import sdpa
from mistralrs_sdk.attention.backend import AttentionSpec
from mistralrs_sdk.attention.kv_cache import PagedKVCache, bytes_per_token
from mistralrs_sdk.attention.sdpa import SdpaBackend, UncachedSdpaBackend
from tests.batches import Row, make_batch

SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=8, scale=0.3)
SPECS = {
    "plain": SPEC,
    "one kv head": attrs.evolve(SPEC, num_kv_heads=1),
    "no groups": attrs.evolve(SPEC, num_kv_heads=6),
    "window": attrs.evolve(SPEC, window=5),
    "window of one": attrs.evolve(SPEC, window=1),
    "softcap": attrs.evolve(SPEC, softcap=2.0),
    "both": attrs.evolve(SPEC, window=5, softcap=2.0),
}
LENGTHS = [(1, 1), (33, 1), (9, 1), (12, 1), (17, 1), (31, 1), (7, 7), (30, 11), (40, 40), (21, 2)]
"""Tokens of each sequence after the step, and how many of them are new."""


def written_out(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """Attention of the last len(q) positions of one sequence, in float64, head by head."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    for row in range(len(q)):
        position = len(k) - len(q) + row
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        for head in range(spec.num_heads):
            group = head * spec.num_kv_heads // spec.num_heads
            keys, values = k[first : position + 1, group], v[first : position + 1, group]
            scores = keys @ q[row, head] * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            out[row, head] = scores.softmax(0) @ values
    return out


def draw(tokens: int, spec: AttentionSpec, *, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    return [torch.randn(tokens, n, spec.head_dim, generator=generator).to(dtype) for n in heads]


def blocks_for(lengths: list[tuple[int, int]], block_size: int, *, scattered: bool):
    """A block table per sequence out of one pool, and the number of blocks of that pool."""
    counts = [-(-length // block_size) for length, _ in lengths]
    numbers = torch.arange(1, sum(counts) + 1)
    if scattered:
        numbers = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(1))]
    return [part.tolist() for part in numbers.split(counts)], sum(counts) + 1


def check(
    spec: AttentionSpec,
    lengths: list[tuple[int, int]] = LENGTHS,
    *,
    block_size: int = 4,
    scattered: bool = True,
    dtype: torch.dtype = torch.float32,
    atol: float = 1e-5,
) -> None:
    """Store what came before, run one step over all sequences, compare with `written_out`."""
    tables, num_blocks = blocks_for(lengths, block_size, scattered=scattered)
    cache = PagedKVCache(
        [spec, spec], num_blocks=num_blocks, block_size=block_size, dtype=dtype, device="cpu"
    )
    for store in (*cache.k, *cache.v):
        store.fill_(float("nan"))
    parts, before, now = [], [], []
    for (length, new), blocks in zip(lengths, tables, strict=True):
        row = Row([0] * length, blocks)
        if length > new:
            before.append((row, length - new))
        parts.append((attrs.evolve(row, computed=length - new), new))
        now.append(draw(length, spec, dtype=dtype))
    news = [[x[len(x) - new :] for x in qkv] for qkv, (_, new) in zip(now, lengths, strict=True)]
    olds = [
        [x[: length - new] for x in qkv]
        for qkv, (length, new) in zip(now, lengths, strict=True)
        if length > new
    ]
    if before:
        _, k, v = (torch.cat(x) for x in zip(*olds, strict=True))
        cache.store(1, make_batch(before, block_size).slot_mapping, k, v)

    backend = SdpaBackend(cache)
    backend.plan(make_batch(parts, block_size))
    out = backend.run(spec, 1, *(torch.cat(x) for x in zip(*news, strict=True)))

    expected = [written_out(spec, n[0], a[1], a[2]) for n, a in zip(news, now, strict=True)]
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=atol, rtol=0)
    assert cache.k[0].isnan().all()
    assert cache.k[1][0].isnan().all()


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_mixed_batch_is_exact(spec: AttentionSpec, block_size: int):
    """Decode rows and prefill chunks of one batch each see their own keys, whatever else is
    in their blocks (NaN here), and nothing is written beyond the layer's own slots."""
    check(spec, block_size=block_size)


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_adjoining_blocks_give_the_same(spec: AttentionSpec):
    """Blocks that happen to adjoin are read in place."""
    check(spec, scattered=False)


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_long_prompt_in_tiles_is_exact(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch):
    """A prompt longer than a tile is attended to tile by tile."""
    monkeypatch.setattr(sdpa, "TILE_ROWS", 7)
    check(spec)
    check(spec, scattered=False)


@pytest.mark.parametrize("lengths", [[(5, 1)], [(5, 5)], [(8, 1), (8, 1)], [(1, 1)]], ids=str)
def test_batches_without_padding(lengths: list[tuple[int, int]]):
    """One sequence, or several of one length, need no mask."""
    check(SPEC, lengths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", [SPECS["plain"], SPECS["both"]], ids=["plain", "both"])
def test_half_precision(spec: AttentionSpec, dtype: torch.dtype):
    """Below float32 the error is one of rounding: the softmax itself is float32."""
    check(spec, dtype=dtype, atol=0.03)


def test_window_and_no_window_in_one_step():
    """Layers with different windows share one plan of the batch."""
    wide, narrow = SPECS["plain"], SPECS["window"]
    cache = PagedKVCache(
        [wide, narrow], num_blocks=4, block_size=4, dtype=torch.float32, device="cpu"
    )
    q, k, v = draw(10, wide)
    backend = SdpaBackend(cache)
    backend.plan(make_batch([(Row([0] * 10, [3, 1, 2]), 10)], 4))

    for layer, spec in enumerate((wide, narrow)):
        torch.testing.assert_close(
            backend.run(spec, layer, q, k, v).double(),
            written_out(spec, q, k, v),
            atol=1e-5,
            rtol=0,
        )


def test_neighbours_nan_stays_with_the_neighbour():
    """A sequence whose own keys are NaN does not touch the others of its batch."""
    cache = PagedKVCache([SPEC], num_blocks=9, block_size=4, dtype=torch.float32, device="cpu")
    backend = SdpaBackend(cache)
    parts = [(Row([0] * n, blocks), n) for n, blocks in ((6, [1, 3]), (7, [2, 5]))]
    q, k, v = draw(13, SPEC)
    k[6:] = float("nan")
    backend.plan(make_batch(parts, 4))
    backend.run(SPEC, 0, q, k, v)
    for row, count in parts:
        row.computed, row.ids = count, [0] * (count + 1)
    backend.plan(make_batch([(row, 1) for row, _ in parts], 4))

    out = backend.run(SPEC, 0, q[:2], torch.ones(2, 2, 8), v[:2])

    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_uncached_attends_within_the_batch(spec: AttentionSpec):
    """Without a cache the rows of a sequence are its keys."""
    lengths = [1, 12, 1, 5]
    q, k, v = draw(sum(lengths), spec)
    backend = UncachedSdpaBackend()
    backend.plan(make_batch([(Row([0] * n, list(range(n))), n) for n in lengths], 1))

    out = backend.run(spec, 0, q, k, v)

    split = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    expected = torch.cat([written_out(spec, *part) for part in split])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


def test_uncached_refuses_a_part_of_a_sequence():
    """Rows that are not all of a sequence would silently miss their keys."""
    batch = make_batch([(Row([0] * 5, [1, 2], computed=4), 1)], 4)

    with pytest.raises(ValueError, match="1 rows but 5 tokens"):
        UncachedSdpaBackend().plan(batch)


def test_graph_size_is_refused():
    """The backend says that it has no CUDA graphs instead of ignoring the argument."""
    with pytest.raises(ValueError, match="graph_size 8"):
        UncachedSdpaBackend().plan(make_batch([(Row([0], [1]), 1)], 4), graph_size=8)
    assert not SdpaBackend.supports_graphs


def test_cache_starts_as_zeros_and_stores_by_slot():
    """Slot block * block_size + offset is that place in that block; layers may differ in shape."""
    specs = [SPEC, attrs.evolve(SPEC, num_kv_heads=3, head_dim=4)]
    cache = PagedKVCache(specs, num_blocks=5, block_size=4, dtype=torch.bfloat16, device="cpu")
    k = torch.randn(2, 3, 4)

    cache.store(1, torch.tensor([4 * 3 + 2, 4]), k, -k)

    assert cache.k[0].shape == (5, 4, 2, 8)
    assert cache.v[1].shape == (5, 4, 3, 4)
    assert torch.equal(cache.k[1][3, 2], k[0].bfloat16())
    assert torch.equal(cache.v[1][1, 0], -k[1].bfloat16())
    assert sum(x.count_nonzero() for x in (*cache.k, *cache.v)) == 2 * k.numel()


def test_bytes_per_token_counts_keys_and_values_of_all_layers():
    """The cache's size is its tokens times this."""
    specs = [SPEC, attrs.evolve(SPEC, num_kv_heads=3, head_dim=4)]
    cache = PagedKVCache(specs, num_blocks=5, block_size=4, dtype=torch.float16, device="cpu")

    assert bytes_per_token(specs, torch.float16) == (2 * 2 * 8 + 2 * 3 * 4) * 2
    assert sum(x.nbytes for x in (*cache.k, *cache.v)) == 20 * bytes_per_token(specs, torch.float16)


def test_a_large_cache_takes_memory_only_when_used():
    """8 GiB of blocks can be made on a machine that never fills them."""
    spec = attrs.evolve(SPEC, head_dim=128, num_kv_heads=8, num_heads=8)
    cache = PagedKVCache(
        [spec] * 2, num_blocks=65_536, block_size=16, dtype=torch.bfloat16, device="cpu"
    )

    cache.store(1, torch.tensor([65_536 * 16 - 1]), torch.ones(1, 8, 128), torch.ones(1, 8, 128))

    assert cache.k[1][-1, -1].eq(1).all()
    assert cache.k[0][-1].eq(0).all()
