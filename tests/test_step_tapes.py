"""Decode steps that are replayed: the same logits as without, and when there is no replay."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from typing import cast

import attrs
import pytest
import torch
from torch import Tensor, nn

from mistralrs_sdk.attention.backend import BatchLists
from mistralrs_sdk.attention.cpu import CpuBackend
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.engine import step_tapes
from mistralrs_sdk.engine.model_runner import ModelRunner
from mistralrs_sdk.engine.step_tapes import ATTEMPTS, MAX_ROWS, StepTapes
from mistralrs_sdk.kernels import native
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.linear import Linear
from mistralrs_sdk.models.decoder import CausalLM
from mistralrs_sdk.quant.packed import PackedMethod
from tests.batches import Row, make_batch
from tests.model_helpers import continue_ids, prompt, tiny_builder
from tests.test_model_parity import ours

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels here")
BLOCK = 4
CPU = torch.device("cpu")


def packed(name: str) -> CausalLM:
    """A tiny model whose products are kernels, as models are loaded by themselves."""
    model = ours(name)
    for module in model.modules():
        if isinstance(module, (Linear, Embedding)):
            method = PackedMethod.of([("F16", module.out_features)])
            method.from_dense(module, cast(Tensor, module.weight))
    return model


model_of = functools.cache(packed)


def backend_for(model: CausalLM, *, dtype: torch.dtype = torch.float16) -> CpuBackend:
    cache = PagedKVCache(model.specs, num_blocks=99, block_size=BLOCK, dtype=dtype, device="cpu")
    return CpuBackend(cache)


def rows_of(*lengths: int) -> list[Row]:
    """Sequences with their last token still to compute, each with ten blocks of its own."""
    blocks = [list(range(1 + 10 * i, 11 + 10 * i)) for i in range(len(lengths))]
    return [
        Row(prompt(length, seed=i), blocks[i], computed=length - 1)
        for i, length in enumerate(lengths)
    ]


def lists_of(parts: list[tuple[Row, int]]) -> BatchLists:
    """As `make_batch` takes them."""
    batch = make_batch(parts, BLOCK)
    return BatchLists(
        input_ids=batch.input_ids.tolist(),
        positions=batch.positions.tolist(),
        slot_mapping=batch.slot_mapping.tolist(),
        logits_indices=batch.logits_indices.tolist(),
        query_start=list(batch.query_start),
        seq_lens=list(batch.seq_lens),
        block_tables=list(batch.block_tables),
    )


def decode(rows: list[Row]) -> BatchLists:
    return lists_of([(row, 1) for row in rows])


def fill(model: CausalLM, backend: CpuBackend, rows: list[Row]) -> None:
    """Compute what comes before the last tokens."""
    starts = [Row(row.ids, row.blocks) for row in rows]
    batch = make_batch([(s, r.computed) for s, r in zip(starts, rows, strict=True)], BLOCK)
    backend.plan(batch)
    model(batch, backend)


def eager(model: CausalLM, backend: CpuBackend, lists: BatchLists) -> Tensor:
    batch = lists.batch(CPU)
    backend.plan(batch)
    return model(batch, backend)


@torch.inference_mode()
def continuations(name: str, rows: list[Row], steps: int, *, taped: bool) -> Tensor:
    """The logits of each step, [steps, rows, vocabulary]."""
    model = model_of(name)
    backend = backend_for(model)
    fill(model, backend, rows)
    tapes = StepTapes(model, backend)
    logits = []
    for _ in range(steps):
        batch = decode(rows)
        scores = tapes.run(batch) if taped else eager(model, backend, batch)
        assert scores is not None
        logits.append(scores.clone())
        for row, best in zip(rows, scores.argmax(-1).tolist(), strict=True):
            row.ids.append(best)
            row.computed += 1
    if taped:
        assert tapes._steps[len(rows)].tape is not None, "nothing was replayed"
    return torch.stack(logits)


@pytest.mark.parametrize("name", ["llama", "llama_bias", "mistral_swa", "qwen3"])
@pytest.mark.parametrize("lengths", [(7,), (3, 15, 2), (2, 3, 4, 5, 6, 7, 8, 9)])
def test_replayed_logits_are_those_of_the_step(name, lengths):
    """Bit for bit, while the sequences grow into new blocks."""
    taped = continuations(name, rows_of(*lengths), 9, taped=True)

    assert torch.equal(taped, continuations(name, rows_of(*lengths), 9, taped=False))


def test_sizes_take_turns():
    """Each size has its own tape, and they leave each other alone."""
    model = model_of("llama")
    backend = backend_for(model)
    rows = rows_of(3, 15, 2)
    fill(model, backend, rows)
    tapes = StepTapes(model, backend)

    for size in (1, 3, 2, 1, 2, 3, 3, 1):
        batch = decode(rows[:size])
        scores = tapes.run(batch)
        assert scores is not None
        assert torch.equal(scores.clone(), eager(model, backend, batch))


def test_a_short_table_may_follow_a_long_one():
    """What is left of it behind the short one's blocks is not read."""
    model = model_of("llama")
    backend = backend_for(model)
    short, long = rows_of(3, 38)
    fill(model, backend, [short, long])
    tapes = StepTapes(model, backend)

    for row in (short, long, short):
        scores = tapes.run(decode([row]))
        assert scores is not None
        assert torch.equal(scores.clone(), eager(model, backend, decode([row])))


def test_a_batch_of_another_size_does_not_fit_a_graph():
    """It is refused where it is written, before a kernel reads it."""
    backend = backend_for(model_of("llama"))
    batch = decode(rows_of(3, 5)).batch(CPU)

    with pytest.raises(ValueError, match="memoryview assignment"):
        backend.plan(batch, graph_size=3)


def test_only_small_decode_steps_are_replayed():
    """A prompt, a step without logits, or too many sequences: None, and the cache is untouched."""
    model = model_of("llama")
    backend = backend_for(model)
    tapes = StepTapes(model, backend)
    row = Row(prompt(4), [1, 2])

    assert tapes.run(lists_of([(row, 4)])) is None
    assert tapes.run(lists_of([(row, 3), *((r, 1) for r in rows_of(2, 3))])) is None
    assert tapes.run(decode(rows_of(*range(2, 3 + MAX_ROWS)))) is None
    assert not tapes._steps


def test_a_model_that_computes_in_torch_is_left_alone(caplog):
    """The reason is logged, and it is not tried again and again."""
    model = ours("llama")  # its weights are dense
    backend = backend_for(model)
    tapes = StepTapes(model, backend)
    caplog.set_level(logging.DEBUG, logger="mistralrs_sdk.engine")
    batch = decode(rows_of(1))
    expected = eager(model, backend, batch)

    results = [tapes.run(batch) for _ in range(ATTEMPTS + 2)]

    assert all(torch.equal(x, expected) for x in results[:ATTEMPTS] if x is not None)
    assert results[ATTEMPTS:] == [None, None]
    reasons = [record.getMessage() for record in caplog.records]
    assert len(reasons) == ATTEMPTS
    assert all("not replayed: aten.embedding" in reason for reason in reasons)


def test_another_number_of_threads_is_recorded_anew(monkeypatch):
    """The number is on the tape."""
    model = model_of("llama")
    backend = backend_for(model)
    tapes = StepTapes(model, backend)
    first = tapes.run(decode(rows_of(1)))
    assert first is not None
    old = tapes._steps[1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    second = tapes.run(decode(rows_of(1)))

    assert second is not None
    assert torch.equal(first, second)
    assert tapes._steps[1] is not old


@pytest.mark.parametrize("wrong", ["slot", "token", "table"])
def test_a_failing_step_raises_as_without_a_tape(wrong):
    """What a kernel refuses in a replay is refused by its wrapper, with the wrapper's words."""
    model = model_of("llama")
    backend = backend_for(model)
    row = rows_of(3)[0]
    tapes = StepTapes(model, backend)
    tapes.run(decode([row]))
    match wrong:
        case "slot":
            row.blocks, error, words = [99], ValueError, "slot 398 is not in the cache"
        case "token":
            row.ids[-1], error, words = 512, IndexError, "512 are not all rows"
        case _:
            row.computed, error, words = 50, ValueError, "sequence 0 of the batch does not fit"
            row.ids = row.ids * 20
            row.blocks = row.blocks * 2
    batch = decode([row])
    if wrong == "table":
        batch = attrs.evolve(batch, block_tables=[[99] * len(batch.block_tables[0])])

    assert tapes.run(batch) is None

    with pytest.raises(error, match=words):
        eager(model, backend, batch)


def test_cleared_tapes_are_recorded_anew():
    """After the weights changed, say."""
    model = packed("llama")
    backend = backend_for(model)
    tapes = StepTapes(model, backend)
    batch = decode(rows_of(1))
    before = tapes.run(batch)
    model.model.norm.weight = nn.Parameter(model.model.norm.weight * 2, requires_grad=False)

    tapes.clear()
    after = tapes.run(batch)

    assert before is not None
    assert after is not None
    assert torch.equal(after, eager(model, backend, batch))
    assert not torch.equal(after, before)


def test_a_runner_that_is_gone_leaves_nothing():
    """Neither model nor arena is kept alive by a recording."""
    model = packed("llama")
    runner = ModelRunner(model=model, backend=backend_for(model), device=CPU, block_size=BLOCK)
    assert runner.tapes is not None
    runner.tapes.run(decode(rows_of(1)))
    gone = [weakref.ref(model), weakref.ref(runner.tapes._arena.memory)]

    del model, runner
    gc.collect()

    assert [ref() for ref in gone] == [None, None]


async def test_a_model_says_the_same_with_and_without_tapes(monkeypatch, caplog):
    """Through the whole engine, as models are loaded by themselves."""
    texts = []
    caplog.set_level(logging.DEBUG, logger="mistralrs_sdk.engine")
    for most in (MAX_ROWS, 0):
        monkeypatch.setattr(step_tapes, "MAX_ROWS", most)
        async with await tiny_builder().with_dtype("auto").build() as model:
            texts.append(await continue_ids(model, prompt(21), 20))
    assert texts[0] == texts[1]
    taped = [r for r in caplog.records if r.getMessage().startswith("A step of 1 sequences is 4")]
    assert len(taped) == 1
