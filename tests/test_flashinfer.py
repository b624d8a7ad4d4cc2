"""The FlashInfer backend over a reference of FlashInfer's wrappers, beside torch's attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mistralrs_sdk.attention import flashinfer
from mistralrs_sdk.attention.backend import AttentionSpec, Batch
from mistralrs_sdk.attention.flashinfer import FlashInferBackend, workspace_bytes
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.sdpa import SdpaBackend
from mistralrs_sdk.layers.rotary import RotaryEmbedding
from tests.batches import Row, make_batch
from tests.flashinfer_reference import FlashInferReference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
BLOCK = 8


def spec_of(heads: int = 4, kv_heads: int = 2, head_dim: int = 64, **more) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, **more
    )


def cache_of(*specs: AttentionSpec, dtype: torch.dtype) -> PagedKVCache:
    """A small cache in which reading what nobody wrote is seen."""
    cache = PagedKVCache(specs, num_blocks=24, block_size=BLOCK, dtype=dtype, device="cpu")
    for store in (*cache.k, *cache.v):
        store.copy_(torch.full(store.shape, torch.nan))
    return cache


def backend_of(
    *specs: AttentionSpec,
    dtype: torch.dtype = torch.float16,
    kv_dtype: torch.dtype | None = None,
    reference: FlashInferReference | None = None,
    **more,
) -> FlashInferBackend:
    return FlashInferBackend(
        cache_of(*specs, dtype=kv_dtype or dtype),
        specs,
        dtype=dtype,
        max_num_seqs=8,
        max_model_len=100,
        ops=FlashInferReference() if reference is None else reference,
        **more,
    )


def scattered(*lengths: int) -> list[Row]:
    """Sequences whose blocks lie apart and out of order."""
    blocks = [11, 3, 20, 7, 15, 1, 22, 9, 18, 5, 13, 2, 21, 8]
    rows = []
    for length in lengths:
        need = -(-length // BLOCK)
        rows.append(Row(list(range(length)), blocks[:need]))
        del blocks[:need]
    return rows


def qkv(spec: AttentionSpec, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Slices of one product, as a layer gives them."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    made = torch.randn(tokens, heads + 2 * kv_heads, spec.head_dim, dtype=dtype)
    return list(made.split((heads, kv_heads, kv_heads), 1))


def decode_all(backend, spec: AttentionSpec, rows: list[Row], dtype: torch.dtype) -> list[Tensor]:
    """The outputs of a prompt, a chunk with a decode, and a decode of both; the same each time."""
    torch.manual_seed(0)
    outs = []
    for counts in ((17, 9), (1, 5), (5, 1), (1, 1)):
        batch = make_batch(list(zip(rows, counts, strict=True)), BLOCK)
        backend.plan(batch)
        rope = RotaryEmbedding(spec.head_dim, 1e4)(batch.positions, dtype)
        q, k, v = qkv(spec, sum(counts), dtype)
        outs.append(backend.run(spec, 0, q, k, v, rotation=rope))
        for row, count in zip(rows, counts, strict=True):
            row.computed += count
    return outs


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_flashinfer_equals_torch(softcap, window, kv_heads, dtype):
    """Prompts, chunks behind what is cached, mixed batches and decodes over scattered blocks."""
    spec = spec_of(6, kv_heads, window=window, softcap=softcap)
    reference = FlashInferReference(any_shape=dtype is torch.float32)
    ours = backend_of(spec, dtype=dtype, reference=reference)
    torchs = SdpaBackend(cache_of(spec, dtype=dtype))

    found = decode_all(ours, spec, scattered(40, 30), dtype)
    wanted = decode_all(torchs, spec, scattered(40, 30), dtype)

    for ours_out, torchs_out in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_out, torchs_out, atol=TOLERANCE[dtype], rtol=1e-2)
    assert reference.calls == [
        *(["plan prefill", "run prefill"] * 3),
        *("plan decode", "run decode"),
    ]


def test_all_layers_of_one_spec_share_a_plan():
    """A step plans once for each distinct spec, and the layers of one run with it."""
    full, local = spec_of(), spec_of(window=4)
    reference = FlashInferReference()
    backend = backend_of(local, full, local, full, reference=reference)
    rows = scattered(20)
    for count in (16, 1, 1):
        backend.plan(make_batch([(rows[0], count)], BLOCK))
        for layer, spec in enumerate((local, full, local, full)):
            backend.run(spec, layer, *qkv(spec, count, torch.float16))
        rows[0].computed += count

    plans = [call for call in reference.calls if call.startswith("plan")]
    assert plans == ["plan prefill"] * 2 + ["plan decode"] * 4
    assert len(reference.calls) == len(plans) + 3 * 4
    assert len(reference.wrappers) == 4
    windows = {wrapper.options["window_left"] for wrapper in reference.wrappers}
    assert windows == {-1, 3}


# A cache of eight bits


def rounded(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_float8_cache_rounds_keys_and_values_and_nothing_else(dtype):
    """The result is that of exact attention over keys and values that were rounded."""
    spec = spec_of()
    backend = backend_of(spec, dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    exact = SdpaBackend(cache_of(spec, dtype=torch.float32))
    rows = scattered(30, 20)
    for counts in ((19, 8), (1, 7), (1, 1)):
        batch = make_batch(list(zip(rows, counts, strict=True)), BLOCK)
        q, k, v = qkv(spec, sum(counts), dtype)
        backend.plan(batch)
        found = backend.run(spec, 0, q, k, v)
        exact.plan(batch)
        wanted = exact.run(spec, 0, q.float(), rounded(k), rounded(v))
        torch.testing.assert_close(found.float(), wanted, atol=TOLERANCE[dtype], rtol=1e-2)
        for row, count in zip(rows, counts, strict=True):
            row.computed += count


def test_what_is_too_large_for_float8_becomes_its_greatest_number():
    """Not NaN, which would spread over the whole answer."""
    spec = spec_of()
    cache = PagedKVCache(
        [spec], num_blocks=3, block_size=8, dtype=torch.float8_e4m3fn, device="cpu"
    )
    k = torch.full((1, 2, 64), 1e4)

    cache.store(0, torch.tensor([9]), k, -k)

    assert cache.k[0][1, 1].float().eq(448).all()
    assert cache.v[0][1, 1].float().eq(-448).all()
    assert cache.k[0][2].float().eq(0).all()


# Graphs


class Graph:
    """Steps of one size, whose tensors stay where they are, as a CUDA graph has them."""

    def __init__(self, backend: FlashInferBackend, spec: AttentionSpec, size: int) -> None:
        self.backend, self.size = backend, size
        self.slots = torch.zeros(size, dtype=torch.int64)
        self.q, self.k, self.v = (
            torch.zeros(size, heads, spec.head_dim, dtype=torch.float16)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        self.replay: Callable[[], Tensor] = lambda: backend.run(spec, 0, self.q, self.k, self.v)

    def step(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Pad the batch to the size of the graph, plan, replay: the rows of the batch."""
        count = len(batch.seq_lens)
        missing = self.size - count
        self.slots.zero_()
        for static, given in ((self.slots, batch.slot_mapping), (self.q, q), (self.k, k)):
            static[:count] = given
        self.v[:count] = v
        padded = Batch(
            input_ids=torch.zeros(self.size, dtype=torch.int64),
            positions=torch.zeros(self.size, dtype=torch.int64),
            slot_mapping=self.slots,
            logits_indices=torch.arange(self.size),
            query_start=range(self.size + 1),
            seq_lens=[*batch.seq_lens, *[1] * missing],
            block_tables=[*batch.block_tables, *[[0]] * missing],
        )
        self.backend.plan(padded, graph_size=self.size)
        return self.replay()[:count]


@pytest.mark.parametrize("window", [None, 5])
def test_a_graph_gives_what_a_step_by_itself_gives(window):
    """Over steps of which each has other lengths, tables and numbers of sequences: padding rows
    write to the null block and change nothing."""
    spec = spec_of(8, 2, window=window)
    reference = FlashInferReference()
    backend = backend_of(spec, reference=reference)
    alone = backend_of(spec)
    graphs = {size: Graph(backend, spec, size) for size in (2, 4)}
    rows = scattered(30, 20, 25)
    first = make_batch(list(zip(rows, (14, 6, 8), strict=True)), BLOCK)
    q, k, v = qkv(spec, 28, torch.float16)
    for each in (backend, alone):
        each.plan(first)
        each.run(spec, 0, q, k, v)
    for row, count in zip(rows, (14, 6, 8), strict=True):
        row.computed += count
    for running, size in ((3, 4), (2, 2), (3, 4), (1, 2), (3, 4), (2, 2)):
        batch = make_batch([(row, 1) for row in rows[:running]], BLOCK)
        q, k, v = qkv(spec, running, torch.float16)
        alone.plan(batch)
        wanted = alone.run(spec, 0, q, k, v)

        found = graphs[size].step(batch, q, k, v)

        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-2)
        for row in rows[:running]:
            row.computed += 1
    made = [w for w in reference.wrappers if w.graph]
    assert [len(wrapper.buffers["last"]) for wrapper in made] == [4, 2]
    assert [wrapper.plans for wrapper in made] == [3, 3]


def test_the_buffers_of_a_graph_hold_the_longest_sequences():
    """As many as its size, each as long as the model's context; prefixes may be shared, so that
    the pool is no bound for them all."""
    backend = FlashInferBackend(
        PagedKVCache([spec_of()], num_blocks=14, block_size=8, dtype=torch.float16, device="cpu"),
        [spec_of()],
        dtype=torch.float16,
        max_num_seqs=8,
        max_model_len=100,
        ops=FlashInferReference(),
    )
    graph = Graph(backend, spec_of(), 3)
    row = Row(list(range(100)), list(range(1, 14)), computed=99)

    found = graph.step(make_batch([(row, 1)] * 3, BLOCK), *qkv(spec_of(), 3, torch.float16))

    assert found.shape == (3, 4, 64)


def test_graphs_of_one_size_share_their_buffers_and_plan_apart():
    """Layers with and without a window have the same tables; each plan has memory of its own."""
    full, local = spec_of(), spec_of(window=4)
    reference = FlashInferReference()
    backend = backend_of(full, local, reference=reference)
    rows = scattered(8)

    backend.plan(make_batch([(rows[0], 1)], BLOCK), graph_size=1)

    first, second = reference.wrappers
    assert first.buffers["indices"] is second.buffers["indices"]
    assert first.workspace is second.workspace
    assert first.plan_workspace == second.plan_workspace == flashinfer.PLAN_BYTES


@pytest.mark.parametrize(("counts", "size"), [((1, 1), 3), ((2, 1), 2), ((2, 1), 3)])
def test_a_graph_takes_only_its_own_number_of_decodes(counts, size):
    """A batch that is not padded, or that has a prompt in it, is refused."""
    backend = backend_of(spec_of())
    batch = make_batch(list(zip(scattered(8, 8), counts, strict=True)), BLOCK)

    with pytest.raises(ValueError, match=rf"graph_size \({size}\) .* 2 with {sum(counts)} tokens"):
        backend.plan(batch, graph_size=size)


def test_a_graph_may_be_planned_in_and_out_of_inference_mode():
    """What is made in one is written to in the other."""
    backend = backend_of(spec_of())
    rows = scattered(16)
    with torch.inference_mode():
        backend.plan(make_batch([(rows[0], 1)], BLOCK), graph_size=1)

    backend.plan(make_batch([(rows[0], 1)], BLOCK), graph_size=1)


# What a step waits for, what it takes, what is tried


def test_a_step_is_planned_when_the_copies_of_the_last_are_over():
    """FlashInfer's plans overwrite pinned memory: all of a step's come between two waits."""
    reference = FlashInferReference()

    class Event:
        def record(self) -> None:
            reference.calls.append("record")

        def synchronize(self) -> None:
            reference.calls.append("wait")

    backend = backend_of(spec_of(), spec_of(window=4), reference=reference, make_event=Event)
    rows = scattered(16)
    backend.plan(make_batch([(rows[0], 3)], BLOCK))
    rows[0].computed = 3
    backend.plan(make_batch([(rows[0], 1)], BLOCK))
    backend.plan(make_batch([(rows[0], 1)], BLOCK), graph_size=1)

    decodes = ["plan decode", "plan decode", "record"]
    assert reference.calls == [
        *("plan prefill", "plan prefill", "record"),
        *("wait", *decodes),
        *("wait", *decodes),
    ]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kv_dtype", "expected"),
    [
        (4, 4, torch.float16, False),
        (6, 2, torch.float16, False),
        (8, 2, torch.float16, True),
        (10, 2, torch.float16, True),
        (4, 4, torch.float8_e4m3fn, True),
    ],
)
def test_tensor_cores_decode_where_four_heads_share_their_keys(heads, kv_heads, kv_dtype, expected):
    """So each group has a kernel; a float8 cache is always for them."""
    spec = spec_of(heads, kv_heads)
    reference = FlashInferReference()
    backend = backend_of(spec, kv_dtype=kv_dtype, reference=reference)

    backend.plan(make_batch([(scattered(8)[0], 1)], BLOCK))

    assert [wrapper.use_tensor_cores for wrapper in reference.wrappers] == [expected]


def test_the_workspace_is_what_the_greatest_step_needs():
    """128 MiB, or more where many heads of a large GPU keep partial sums of many sequences."""
    small = workspace_bytes([spec_of(8, 8, 64)], num_sms=132, max_num_seqs=32)
    large = workspace_bytes([spec_of(64, 8, 128)], num_sms=132, max_num_seqs=32)
    wide = workspace_bytes([spec_of(64, 8, 128)], num_sms=132, max_num_seqs=256)
    old = workspace_bytes([spec_of(64, 8, 128)], num_sms=40, max_num_seqs=256, turing=True)

    assert small == 128 * 2**20
    assert large >= 64 * 33 * 128 * 129 * 4  # two tiles of 128 rows for each processor
    assert wide >= 64 * 512 * 16 * 129 * 4  # two tiles of 16 rows for each sequence of a graph
    assert old >= 64 * 512 * 64 * 129 * 4  # where tiles have 64 rows
    assert wide % 256 == 0


def test_trying_out_runs_every_kernel_and_leaves_no_trace():
    """A decode, and prompts of both lengths for which FlashInfer has kernels, for each spec; only
    the null block is written to."""
    reference = FlashInferReference()
    backend = backend_of(spec_of(), spec_of(window=4), spec_of(), reference=reference)
    cache = backend._cache

    backend.try_out()

    assert reference.calls.count("run decode") == 2
    assert reference.calls.count("run prefill") == 4
    for store in (*cache.k, *cache.v):
        assert store[1:].isnan().all()


# The reference itself


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("together", [True, False])
def test_the_reference_reads_both_layouts(layout, together):
    """Token by token or head by head, keys and values in one tensor or in two."""
    spec = spec_of(window=7, softcap=2.0)
    reference = FlashInferReference(any_shape=True)
    cache = cache_of(spec, dtype=torch.float32)
    sdpa = SdpaBackend(cache)
    batch = make_batch(list(zip(scattered(20, 11), (20, 11), strict=True)), BLOCK)
    q, k, v = qkv(spec, 31, torch.float32)
    sdpa.plan(batch)
    wanted = sdpa.run(spec, 0, q, k, v)
    stores = (cache.k[0], cache.v[0])
    if layout == "HND":
        stores = tuple(store.transpose(1, 2).contiguous() for store in stores)
    wrapper = reference.BatchPrefillWithPagedKVCacheWrapper(
        torch.zeros(128 * 2**20, dtype=torch.uint8), kv_layout=layout
    )
    pages = flashinfer.PageTables(BLOCK, torch.device("cpu")).fill(batch)
    wrapper.plan(
        *(pages.query_start, pages.indptr, pages.indices, pages.last_page_len, 4, 2, 64, BLOCK),
        causal=True,
        sm_scale=spec.scale,
        window_left=6,
        logits_soft_cap=2.0,
        q_data_type=torch.float32,
        kv_data_type=torch.float32,
    )

    found = wrapper.run(q, torch.stack(stores, 1) if together else stores)

    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
