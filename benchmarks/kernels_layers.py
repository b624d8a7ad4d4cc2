"""The cases of `kernels.py` that make up a layer, from products to adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from kernels_cases import Case, Method, beside_torch, num_copies
from torch import Tensor
from torch.nn import functional

from mistralrs_sdk.kernels import elementwise as steps
from mistralrs_sdk.kernels import matmul
from mistralrs_sdk.kernels.attention import (
    LayerCache,
    PagedBatch,
    keys_by_dim,
    paged_attention,
    store_kv,
    store_kv_reference,
)
from mistralrs_sdk.kernels.lora import LowRank, LowRankPart, LowRankTable, Spans, add_low_rank
from mistralrs_sdk.kernels.memory import reserve

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 32
ATTENTION = {
    "1 of 2048": [(2048, 1)],
    "8 of 512": [(512, 1)] * 8,
    "32 of 256": [(256, 1)] * 32,
    "prompt of 512": [(512, 512)],
    "prompt of 2048": [(2048, 2048)],
}
"""Sequences: their tokens, and how many of these are new."""
STEP_ROWS = (1, 512)
HIDDEN, GATED = 2048, 5632
RANK, LOW_RANK_SIZE = 16, 2048


def products(
    shapes: Sequence[tuple[int, ...]], *, rows: Sequence[int], types: Sequence[str]
) -> Iterator[Case]:
    """Each weight type, torch's float32 product, and fbgemm's float16 one where torch has it."""
    for k, n in shapes:
        weights = {name: _packed_copies(name, n, k) for name in types}
        dense = torch.randn(n, k) * 0.02
        dense_copies = [dense.clone() for _ in range(num_copies(dense.nbytes))]
        halves = _fbgemm_copies(dense)
        for count in rows:
            x = torch.randn(count, k)
            methods = [
                Method(
                    name=f"native {name}",
                    calls=[partial(matmul.linear, x, weight) for weight in copies],
                    num_bytes=copies[0].data.nbytes,
                    operations=2 * count * n * k,
                    floats=name == "F16",
                )
                for name, copies in weights.items()
            ]
            methods.append(
                Method(
                    name="torch f32",
                    calls=[partial(functional.linear, x, weight) for weight in dense_copies],
                    num_bytes=dense.nbytes,
                    operations=2 * count * n * k,
                    peer=True,
                )
            )
            if halves:
                product = torch.ops.quantized.linear_dynamic_fp16
                methods.append(
                    Method(
                        name="fbgemm f16",
                        calls=[partial(product, x, weight) for weight in halves],
                        num_bytes=dense.nbytes // 2,
                        operations=2 * count * n * k,
                        peer=True,
                    )
                )
            yield Case(name=f"linear {k}x{n}, {count} rows", methods=methods)


def _packed_copies(ggml_type: str, n: int, k: int) -> list[matmul.PackedWeight]:
    # bytes below 64 are no infinities, wherever a scale lies; the time does not depend on them
    size = matmul.packed_bytes(ggml_type, (n, k))
    count = num_copies(size)
    data = reserve(count * size).view(count, size)
    data.copy_(torch.randint(0, 64, data.shape, dtype=torch.uint8))
    return [matmul.PackedWeight(data=one, ggml_type=ggml_type, shape=(n, k)) for one in data]


def _fbgemm_copies(weight: Tensor) -> list:
    try:
        pack = torch.ops.quantized.linear_prepack_fp16
        return [pack(weight, None) for _ in range(num_copies(weight.nbytes // 2))]
    except (RuntimeError, AttributeError):
        return []  # built without fbgemm


def attention() -> Iterator[Case]:
    """Decode steps and prompts over float32 and float16 caches, beside torch's over dense ones."""
    for name, sequences in ATTENTION.items():
        rows = sum(new for _, new in sequences)
        # a new token sees those before it and itself
        seen = sum(n * new - new * (new - 1) // 2 for n, new in sequences)
        q = torch.randn(rows, HEADS, HEAD_DIM)
        methods = []
        for dtype in (torch.float16, torch.float32):
            batch, caches = _paged(sequences, dtype)
            call = partial(paged_attention, q, batch=batch, scale=HEAD_DIM**-0.5)
            methods.append(
                Method(
                    name=f"native, {str(dtype).partition('.')[2]}",
                    calls=[partial(call, cache) for cache in caches],
                    num_bytes=caches[0].k.nbytes + caches[0].v.nbytes,
                    operations=4 * HEADS * HEAD_DIM * seen,
                )
            )
        yield Case(name=f"attention, {name}", methods=[*methods, _dense(sequences, methods[-1])])


def _paged(
    sequences: Sequence[tuple[int, int]], dtype: torch.dtype
) -> tuple[PagedBatch, list[LayerCache]]:
    """Caches whose blocks lie in random order."""
    blocks = [-(-length // BLOCK_SIZE) for length, _ in sequences]
    shape = (sum(blocks), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    one = torch.empty(shape, dtype=dtype)
    caches = [
        LayerCache(k=keys_by_dim(torch.randn(shape).to(dtype)), v=torch.randn(shape).to(dtype))
        for _ in range(num_copies(2 * one.nbytes))
    ]
    tables = torch.zeros(len(sequences), max(blocks), dtype=torch.int32)
    for row, numbers in zip(tables, torch.randperm(sum(blocks)).split(blocks), strict=True):
        row[: len(numbers)] = numbers
    starts = torch.tensor([0, *(new for _, new in sequences)]).cumsum(0)
    lengths = torch.tensor([length for length, _ in sequences])
    batch = PagedBatch(block_tables=tables, query_start=starts.int(), seq_lens=lengths.int())
    return batch, caches


def _dense(sequences: Sequence[tuple[int, int]], like: Method) -> Method:
    """Torch's attention over dense float32 keys, which all sequences have as many of."""
    length, new = sequences[0]
    shape = (len(sequences), KV_HEADS, length, HEAD_DIM)
    q = torch.randn(len(sequences), HEADS, new, HEAD_DIM)
    stores = [(torch.randn(shape), torch.randn(shape)) for _ in like.calls]
    attend = partial(functional.scaled_dot_product_attention, enable_gqa=True, is_causal=new > 1)
    return Method(
        name="torch f32",
        calls=[partial(attend, q, k, v) for k, v in stores],
        num_bytes=like.num_bytes,
        operations=like.operations,
        peer=True,
    )


def elementwise() -> Iterator[Case]:
    """The steps between products; all they read and write counts."""
    weight = torch.ones(HIDDEN)
    for rows in STEP_ROWS:
        xs = [torch.randn(rows, HIDDEN) for _ in range(num_copies(4 * rows * HIDDEN))]
        others = [torch.randn(rows, HIDDEN) for _ in xs]
        wide = [torch.randn(rows, 2 * GATED) for _ in range(num_copies(8 * rows * GATED))]
        size = 4 * rows * HIDDEN
        yield beside_torch(
            f"rms_norm, {rows} rows of {HIDDEN}",
            [partial(steps.rms_norm, x, weight, eps=1e-6) for x in xs],
            [partial(steps.rms_norm_reference, x, weight, eps=1e-6) for x in xs],
            num_bytes=2 * size,
        )
        pairs = list(zip(xs, others, strict=True))
        yield beside_torch(
            f"rms_norm with residual, {rows} rows of {HIDDEN}",
            [partial(steps.rms_norm, x, weight, eps=1e-6, residual=y) for x, y in pairs],
            [partial(steps.rms_norm_reference, x, weight, eps=1e-6, residual=y) for x, y in pairs],
            num_bytes=4 * size,
        )
        for activation in ("silu", "gelu_pytorch_tanh"):
            yield beside_torch(
                f"gated {activation}, {rows} rows of {GATED}",
                [partial(steps.gated, x, activation) for x in wide],
                [partial(steps.gated_reference, x, activation) for x in wide],
                num_bytes=12 * rows * GATED,
            )
        for name, native, torch_one, factor in (
            ("softcap", steps.softcap, steps.softcap_reference, 30.0),
            ("scale", steps.scale, steps.scale_reference, -1.0),
        ):
            yield beside_torch(
                f"{name}, {rows} rows of {HIDDEN}",
                [partial(native, x, factor) for x in xs],
                [partial(torch_one, x, factor) for x in xs],
                num_bytes=2 * size,
            )
        yield from _rotations(rows)


def _rotations(rows: int) -> Iterator[Case]:
    """Queries and keys are read and written, values read; keys and values go into the cache."""
    shape = (-(-rows // BLOCK_SIZE), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    slots, frequencies = torch.arange(rows), torch.rand(HEAD_DIM // 2)
    cos, sin = steps.rope_table(slots, frequencies)
    stored = 6 * rows * KV_HEADS * HEAD_DIM  # read in float32, written in float16
    num_bytes = 2 * stored + 4 * rows * HEAD_DIM * (2 * HEADS + KV_HEADS)
    operands = []
    for _ in range(num_copies(num_bytes)):
        k, v = (torch.zeros(shape, dtype=torch.float16) for _ in range(2))
        q, new_k, new_v = (
            torch.randn(rows, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        operands.append((q, new_k, new_v, LayerCache(k=keys_by_dim(k), v=v)))
    yield beside_torch(
        f"rope_table, {rows} positions",
        [partial(steps.rope_table, slots, frequencies)],
        [partial(steps.rope_table_reference, slots, frequencies)],
        num_bytes=4 * rows * 2 * HEAD_DIM,
    )
    native, reference = (
        [
            partial(rotate, q, k, v=v, cos=cos, sin=sin, slots=slots, cache=cache)
            for q, k, v, cache in operands
        ]
        for rotate in (steps.rotate_and_store, steps.rotate_and_store_reference)
    )
    yield beside_torch(f"rotate_and_store, {rows} rows", native, reference, num_bytes=num_bytes)
    native, reference = (
        [partial(store, k, v, slots=slots, cache=cache) for _, k, v, cache in operands]
        for store in (store_kv, store_kv_reference)
    )
    yield beside_torch(f"store_kv, {rows} rows", native, reference, num_bytes=2 * stored)


def adapters() -> Iterator[Case]:
    """What adapters add to one layer, in one call; torch multiplies for one after the other."""
    size, rank = LOW_RANK_SIZE, RANK
    for rows, count in ((1, 1), (32, 1), (32, 4), (512, 4)):
        per = rows // count
        pairs_of_one = num_copies(4 * count * rank * size)
        x, y = torch.randn(rows, size), torch.zeros(rows, size)
        native, dense = [], []
        for _ in range(pairs_of_one):
            pairs = [(torch.randn(rank, size), torch.randn(size, rank)) for _ in range(count)]
            spans = Spans()
            spans.set([(i * per, (i + 1) * per, _table(*pair)) for i, pair in enumerate(pairs)])
            native.append(partial(add_low_rank, x, y, spans, 0))
            dense.append(partial(_add_in_torch, x, y, pairs, per))
        operations = 4 * rows * rank * size
        num_bytes = 4 * count * rank * size
        yield Case(
            name=f"adapters, {rows} rows, {count} of rank {rank}, {size}x{size}",
            methods=[
                Method(name="native", calls=native, num_bytes=num_bytes, operations=operations),
                Method(
                    name="torch f32",
                    calls=dense,
                    num_bytes=2 * num_bytes,
                    operations=operations,
                    peer=True,
                ),
            ],
        )


def _table(a: Tensor, b: Tensor) -> LowRankTable:
    packed_a, packed_b = (matmul.pack(x.half(), "F16", (len(x), x.shape[1])) for x in (a, b))
    part = LowRankPart(slice(0, len(a)), slice(0, len(b)), packed_b)
    return LowRankTable([LowRank(packed_a, (part,))])


def _add_in_torch(x: Tensor, y: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], per: int) -> None:
    for i, (a, b) in enumerate(pairs):
        rows = slice(i * per, (i + 1) * per)
        y[rows] += x[rows] @ a.T @ b.T
