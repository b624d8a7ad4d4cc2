"""The native attention kernel against its reference, and rows against themselves in a batch."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from mistralrs_sdk.kernels import native
from mistralrs_sdk.kernels.attention import (
    LayerCache,
    PagedBatch,
    keys_by_dim,
    paged_attention,
    paged_attention_reference,
    store_kv,
    store_kv_reference,
)

needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels here")
NAN = float("nan")


@attrs.frozen(kw_only=True)
class Shape:
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None

    @property
    def options(self) -> dict:
        return {
            "scale": self.head_dim**-0.5,
            "window": self.window,
            "softcap": self.softcap,
        }


@attrs.define(eq=False)
class Case:
    """Sequences of (tokens, new rows) whose keys lie scattered in a cache of NaN."""

    q: torch.Tensor
    cache: LayerCache
    batch: PagedBatch


def empty_cache(
    blocks: int, block_size: int, kv_heads: int, head_dim: int, **options
) -> LayerCache:
    """Zeros in which no token was written."""
    k, v = (torch.zeros(blocks, block_size, kv_heads, head_dim, **options) for _ in range(2))
    return LayerCache(k=keys_by_dim(k), v=v)


def make_case(shape: Shape, lengths: list[tuple[int, int]], *, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // shape.block_size) for length, _ in lengths]
    numbers = torch.randperm(sum(counts), generator=generator) + 1
    sizes = (shape.block_size, shape.kv_heads, shape.head_dim)
    cache = empty_cache(sum(counts) + 1, *sizes, dtype=shape.dtype)
    for store in (cache.k, cache.v):
        store.fill_(NAN)
    tables = torch.full((len(lengths), max(counts, default=0) + 1), -1, dtype=torch.int32)
    for i, (blocks, (length, _)) in enumerate(zip(numbers.split(counts), lengths, strict=True)):
        tables[i, : len(blocks)] = blocks
        token = torch.arange(length)
        for store in (cache.k, cache.v):
            drawn = torch.randn(length, *sizes[1:], generator=generator)
            store[blocks[token // sizes[0]], token % sizes[0]] = drawn.to(shape.dtype)
    starts = torch.tensor([0, *(rows for _, rows in lengths)]).cumsum(0)
    q = torch.randn(
        int(starts[-1]), shape.kv_heads * shape.group, shape.head_dim, generator=generator
    )
    batch = PagedBatch(
        block_tables=tables,
        query_start=starts.int(),
        seq_lens=torch.tensor([length for length, _ in lengths], dtype=torch.int32),
    )
    return Case(q, cache, batch)


def run(shape: Shape, case: Case, *, threads: int = 1) -> torch.Tensor:
    return paged_attention(
        case.q, case.cache, batch=case.batch, num_threads=threads, **shape.options
    )


def check(shape: Shape, lengths: list[tuple[int, int]], *, threads: int = 1, seed: int = 0) -> None:
    case = make_case(shape, lengths, seed=seed)
    expected = paged_attention_reference(
        case.q.double(), case.cache, batch=case.batch, **shape.options
    )
    out = run(shape, case, threads=threads)
    torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=0)


def pick(case: Case, sequence: int, *, first: int = 0, rows: int | None = None) -> Case:
    """Rows [first, first + rows) of one sequence alone, its later tokens not there yet."""
    start, end = case.batch.query_start[sequence : sequence + 2].tolist()
    rows = end - start - first if rows is None else rows
    gone = end - start - first - rows
    batch = PagedBatch(
        block_tables=case.batch.block_tables[sequence : sequence + 1],
        query_start=torch.tensor([0, rows], dtype=torch.int32),
        seq_lens=case.batch.seq_lens[sequence : sequence + 1] - gone,
    )
    return Case(case.q[start + first : start + first + rows], case.cache, batch)


shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([1, 16, 20, 24, 40, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([1, 5, 8, 16, 24, 32, 48, 64, 200]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    window=st.none() | st.integers(1, 200),
    softcap=st.none() | st.sampled_from([0.5, 5.0, 50.0]),
)
sequences = st.integers(1, 200).flatmap(
    lambda length: st.tuples(st.just(length), st.just(1) | st.integers(0, min(length, 70)))
)


@needs_native
@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=shapes, lengths=st.lists(sequences, max_size=4), seed=st.integers(0, 9))
def test_ragged_batches_match_the_reference(shape: Shape, lengths: list, seed: int):
    """Decode rows and prefill chunks of one call each see exactly their own keys; what else is in
    the cache (NaN here) does not matter."""
    check(shape, lengths, threads=1 + seed % 2, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_reference_is_causal_attention_over_the_blocks(dtype: torch.dtype):
    """What stands in for the kernel agrees with torch's own attention of the gathered keys."""
    shape = Shape(dtype=dtype)
    case = make_case(shape, [(50, 50), (33, 1)])
    blocks = case.batch.block_tables[0, :4].long()
    keys, values = (x[blocks].flatten(0, 1)[:50].float() for x in (case.cache.k, case.cache.v))
    expected = functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (case.q[:50], keys, values)), is_causal=True, enable_gqa=True
    )

    out = paged_attention_reference(case.q, case.cache, batch=case.batch, **shape.options)

    torch.testing.assert_close(out[:50], expected.transpose(0, 1), atol=1e-5, rtol=0)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 100, 700])
def test_long_sequences_match_the_reference(dtype: torch.dtype, window: int | None):
    """Contexts that are shared out over threads, and prompts of many tiles, stay exact."""
    shape = Shape(head_dim=64, dtype=dtype, window=window)
    check(shape, [(3000, 1)], threads=2)
    check(shape, [(1000, 300), (2000, 2), (1, 1), (129, 129)], threads=2)


@needs_native
@pytest.mark.parametrize("shape", [Shape(), Shape(group=1, head_dim=24), Shape(group=5, window=70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_is_bit_equal_alone_and_in_a_batch(shape: Shape, dtype: torch.dtype):
    """Neither the company of a sequence nor the number of threads changes a bit."""
    shape = attrs.evolve(shape, dtype=dtype)
    lengths = [(37 * i % 500 + 60, 1 if i % 4 else 50) for i in range(32)]
    case = make_case(shape, lengths)
    together = run(shape, case, threads=2)

    for i in range(0, len(lengths), 3):
        start, end = case.batch.query_start[i : i + 2].tolist()
        for threads in (1, 2, 7):
            alone = run(shape, pick(case, i), threads=threads)
            assert torch.equal(alone, together[start:end])


@needs_native
@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(group=1),
        Shape(group=4, window=70, softcap=3.0),
        Shape(group=9, dtype=torch.float16),
        Shape(group=8, window=9, dtype=torch.float16),
        Shape(head_dim=20, block_size=5, dtype=torch.float16),
    ],
)
def test_a_row_is_bit_equal_in_any_chunking(shape: Shape):
    """A prompt gives the same bits whole, in chunks, and token by token."""
    case = make_case(shape, [(330, 330)])
    whole = run(shape, case)

    for size in (1, 7, 64, 200):
        parts = [
            run(shape, pick(case, 0, first=first, rows=min(size, 330 - first)))
            for first in range(0, 330, size)
        ]
        assert torch.equal(torch.cat(parts), whole)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_is_bit_equal_in_blocks_of_any_size(dtype: torch.dtype, window: int | None):
    """Where keys are read as they lie and where they are unpacked first, the sums are the same."""
    results = []
    for block_size in (1, 7, 8, 16, 24, 32, 64, 256):
        shape = Shape(head_dim=64, block_size=block_size, dtype=dtype, window=window)
        generator = torch.Generator().manual_seed(1)
        k, v, q = (torch.randn(300, heads, 64, generator=generator) for heads in (2, 2, 6))
        blocks = -(-300 // block_size)
        cache = empty_cache(blocks, block_size, 2, 64, dtype=dtype)
        store_kv(k, v, slots=torch.arange(300), cache=cache)
        batch = PagedBatch(
            block_tables=torch.arange(blocks, dtype=torch.int32)[None],
            query_start=torch.tensor([0, 40], dtype=torch.int32),
            seq_lens=torch.tensor([300], dtype=torch.int32),
        )
        case = Case(q[260:], cache, batch)
        whole, last = run(shape, case), run(shape, pick(case, 0, first=39, rows=1))
        results += [whole[:39], last]

    for whole, last in zip(results[::2], results[1::2], strict=True):
        assert torch.equal(whole, results[0])
        assert torch.equal(last, results[1])


@needs_native
def test_huge_and_tiny_values_are_exact():
    """Scores far apart do not overflow; a lone winner takes all."""
    case = make_case(Shape(), [(200, 3), (90, 90)])
    for factor in (1e-20, 1.0, 3e4):
        case.q = make_case(Shape(), [(200, 3), (90, 90)]).q * factor
        expected = paged_attention_reference(
            case.q.double(), case.cache, batch=case.batch, **Shape().options
        )
        # Rounding of the scores themselves moves weights where they are in the ten thousands.
        atol = 5e-6 if factor <= 1 else 0.05
        torch.testing.assert_close(run(Shape(), case).double(), expected, atol=atol, rtol=0)


@needs_native
def test_own_nan_stays_with_the_sequence():
    """A sequence whose own keys are NaN does not touch the others, nor its own earlier rows."""
    shape = Shape(block_size=8)
    case = make_case(shape, [(40, 40), (30, 1)])
    before = run(shape, case)
    last_block = int(case.batch.block_tables[0, 4])
    case.cache.k[last_block] = case.cache.v[last_block] = NAN

    out = run(shape, case)

    assert torch.equal(out[:32], before[:32])
    assert out[32:40].isnan().all()
    assert torch.equal(out[40], before[40])


@needs_native
def test_queries_may_be_a_view_of_the_fused_projection():
    """Only the stride from token to token is free, as in a split of q, k and v."""
    case = make_case(Shape(), [(20, 5), (9, 1)])
    fused = torch.randn(6, 10, 16)
    fused[:, :6] = case.q
    expected = run(Shape(), case)

    case.q = fused[:, :6]

    assert torch.equal(run(Shape(), case), expected)


@needs_native
def test_an_empty_batch_gives_an_empty_result():
    """No sequences, or sequences without rows, are no special case."""
    assert run(Shape(), make_case(Shape(), [])).shape == (0, 6, 16)
    assert run(Shape(), make_case(Shape(), [(5, 0), (3, 0)]), threads=2).shape == (0, 6, 16)


@needs_native
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("query_start", [0, 4, 7]),
        ("query_start", [0, -1, 6]),
        ("seq_lens", [3, 9]),
        ("seq_lens", [49, 9]),
        ("block_tables", [[1, 2, -1], [9, -1, -1]]),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(name: str, values: list):
    """Rows, lengths and blocks that would be read beyond the tensors are errors, not crashes."""
    case = make_case(Shape(), [(20, 4), (9, 2)])
    changed = {name: torch.tensor(values, dtype=torch.int32)}
    case.batch = attrs.evolve(case.batch, **changed)

    with pytest.raises(ValueError, match=r"sequence [01] of the batch does not fit"):
        run(Shape(), case)


@needs_native
def test_tensors_that_do_not_fit_are_refused():
    """Wrong types and shapes are named before anything is read."""
    case = make_case(Shape(), [(20, 4)])
    with pytest.raises(ValueError, match="multiple of its kv_heads"):
        run(Shape(), attrs.evolve(case, q=case.q[:, :5].contiguous()))
    with pytest.raises(ValueError, match=r"q .*float64.* must be float32"):
        run(Shape(), attrs.evolve(case, q=case.q.double()))
    with pytest.raises(ValueError, match="float32 or float16"):
        LayerCache(k=case.cache.k.bfloat16(), v=case.cache.v.bfloat16())
    with pytest.raises(ValueError, match="make it with keys_by_dim"):
        LayerCache(k=case.cache.k.contiguous(), v=case.cache.v)
    with pytest.raises(ValueError, match="must be contiguous"):
        keys_by_dim(case.cache.k)
    with pytest.raises(ValueError, match=r"seq_lens .*int64.* must be int32"):
        attrs.evolve(case.batch, seq_lens=case.batch.seq_lens.long())
    with pytest.raises(ValueError, match=r"query_start .* fit 1 sequences"):
        attrs.evolve(case.batch, query_start=torch.zeros(3, dtype=torch.int32))


@needs_native
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 40),
    kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([1, 3, 16, 24, 80]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_tokens_are_stored_as_torch_rounds_them(
    tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype
):
    """Each token lands in its slot, rounded to nearest even, and nothing else changes."""
    generator = torch.Generator().manual_seed(tokens)
    # From the smallest float16 to beyond the greatest.
    power = torch.randint(-30, 20, (tokens, 2 * kv_heads, head_dim), generator=generator)
    fused = torch.randn(power.shape, generator=generator) * 2.0**power
    k, v = fused.split(kv_heads, 1)
    slots = torch.randperm(6 * 8, generator=generator)[:tokens]
    mine, theirs = (empty_cache(6, 8, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    for store in (mine.k, mine.v, theirs.k, theirs.v):
        store.fill_(7.0)

    store_kv(k, v, slots=slots, cache=mine)

    store_kv_reference(k, v, slots=slots, cache=theirs)
    assert torch.equal(mine.k, theirs.k)
    assert torch.equal(mine.v, theirs.v)


def test_keys_by_dim_are_the_same_memory_and_shape():
    """The keys of a block stand side by side, one row for each head and dimension."""
    memory = torch.zeros(3, 4, 2, 5)
    keys = keys_by_dim(memory)

    keys[1, :, 1, 2] = torch.arange(1.0, 5.0)

    assert keys.shape == memory.shape
    assert memory.view(3, 2, 5, 4)[1, 1, 2].tolist() == [1, 2, 3, 4]
    assert memory.count_nonzero() == 4


@needs_native
@pytest.mark.parametrize("slot", [-1, 16])
def test_a_slot_outside_of_the_cache_is_refused(slot: int):
    """Nothing is written if a slot is wrong."""
    cache = empty_cache(2, 8, 1, 4)
    x = torch.ones(2, 1, 4)

    with pytest.raises(ValueError, match=f"slot {slot} is not in the cache: it has 16 slots"):
        store_kv(x, x, slots=torch.tensor([3, slot]), cache=cache)

    assert not cache.k.any()


@needs_native
def test_tokens_that_do_not_fit_their_slots_are_refused():
    """One slot per token, and tokens of the cache's shape."""
    cache = empty_cache(2, 8, 1, 4)
    x, slots = torch.ones(2, 1, 4), torch.tensor([3, 4])

    for k, places in ((torch.ones(2, 1, 5), slots), (x, torch.tensor([3]))):
        with pytest.raises(ValueError, match=r"must be \[\d, 1, 4\], for \d slots"):
            store_kv(k, x, slots=places, cache=cache)
    with pytest.raises(ValueError, match=r"slots .*int32.* must be int64"):
        store_kv(x, x, slots=slots.int(), cache=cache)
