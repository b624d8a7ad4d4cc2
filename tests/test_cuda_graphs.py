"""Captured decode steps: buckets, padding, when they are replayed and what ends that."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs
import pytest
import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import Batch, BatchLists
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.sdpa import SdpaBackend
from mistralrs_sdk.engine.cuda_graphs import ADAPTED, FIRST, NOT_DECODE, GraphRunner, buckets
from tests.batches import Row
from tests.fake_device import FakeGraphs, FakeTransfers
from tests.model_helpers import prompt
from tests.test_model_parity import ours
from tests.test_step_tapes import decode, fill, lists_of, rows_of

CPU = torch.device("cpu")
BLOCK = 4
model_of = functools.cache(ours)


class GraphedSdpa(SdpaBackend):
    """SDPA as a backend with graphs: what is planned is read by the replay as well."""

    supports_graphs = True

    def __init__(self, cache: PagedKVCache) -> None:
        super().__init__(cache)
        self.planned: list[Batch] = []
        self.fail: Callable[[int | None], None] = lambda graph_size: None

    def plan(self, batch: Batch, *, graph_size: int | None = None) -> None:
        self.fail(graph_size)
        if graph_size is not None:
            assert len(batch.seq_lens) == len(batch.block_tables) == graph_size
            assert batch.input_ids.shape == batch.slot_mapping.shape == (graph_size,)
            self.planned.append(attrs.evolve(batch, block_tables=list(batch.block_tables)))
        super().plan(batch)


@attrs.define
class Rig:
    """A model, its graphs and what they are made by."""

    model: torch.nn.Module
    backend: GraphedSdpa
    graphs: FakeGraphs
    runner: GraphRunner

    @classmethod
    def of(cls, *, max_num_seqs: int = 64, name: str = "llama", **settings) -> Rig:
        model = model_of(name)
        cache = PagedKVCache(
            model.specs, num_blocks=999, block_size=BLOCK, dtype=torch.float32, device=CPU
        )
        for store in (*cache.k, *cache.v):
            store.fill_(float("nan"))
        backend, graphs = GraphedSdpa(cache), FakeGraphs()
        runner = GraphRunner(
            model,
            backend,
            device=CPU,
            max_num_seqs=max_num_seqs,
            graphs=graphs,
            transfers=FakeTransfers(),
            **settings,
        )
        return cls(model, backend, graphs, runner)

    @torch.inference_mode()
    def eager(self, lists: BatchLists) -> Tensor:
        batch = lists.batch(CPU)
        self.backend.plan(batch)
        return self.model(batch, self.backend)

    def rows(self, *lengths: int) -> list[Row]:
        """Sequences that have all but their last token computed."""
        rows = rows_of(*lengths)
        with torch.inference_mode():
            fill(self.model, self.backend, rows)
        return rows


def raise_out_of_memory() -> None:
    raise RuntimeError("CUDA out of memory")


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (5, (1, 2, 3, 4, 5)),
        (8, (1, 2, 3, 4, 5, 6, 7, 8)),
        (32, (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)),
        (100, (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 100)),
        (256, (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256)),
    ],
)
def test_small_numbers_have_a_bucket_each_and_then_they_double(most, sizes):
    """The last one holds as many sequences as may run."""
    assert buckets(most) == sizes


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("lengths", [(7,), (3, 15, 2), tuple(range(2, 13)), tuple(range(2, 22))])
def test_replayed_logits_are_those_of_the_eager_step(name, lengths):
    """While the sequences grow into new blocks, with and without padding."""
    rig = Rig.of(name=name)
    rows = rig.rows(*lengths)
    for step in range(6):
        lists = decode(rows)
        logits = rig.runner.run(lists)
        assert logits is not None
        assert logits.shape[0] == len(rows)
        torch.testing.assert_close(logits, rig.eager(lists), atol=1e-4, rtol=0)
        for row, best in zip(rows, logits.argmax(-1).tolist(), strict=True):
            row.ids.append(best)
            row.computed += 1
        assert rig.runner.stats.replayed == step
    assert rig.runner.stats.eager == {FIRST: 1}
    assert rig.graphs.made[0].replays == 5


def test_padding_stays_in_the_null_block():
    """Token 0 at position 0 in slot 0, of a sequence of one token: nothing of anybody's."""
    rig = Rig.of()
    rig.runner.run(decode(rig.rows(*range(2, 12))))

    [batch] = rig.backend.planned
    assert len(batch.seq_lens) == 16
    for numbers in (batch.input_ids, batch.positions, batch.slot_mapping):
        assert numbers[10:].tolist() == [0] * 6
    assert batch.seq_lens[10:] == [1] * 6
    assert batch.block_tables[10:] == [[0]] * 6
    assert batch.logits_indices.tolist() == list(range(16))


def test_a_smaller_step_leaves_nothing_of_a_larger_one():
    """Rows that were sequences become padding again."""
    rig = Rig.of()
    rows = rig.rows(*range(2, 17))
    for count in (15, 9, 12):
        lists = decode(rows[:count])
        logits = rig.runner.run(lists)
        assert logits is not None
        torch.testing.assert_close(logits, rig.eager(lists), atol=1e-4, rtol=0)
    assert rig.runner.stats.captured == (16,)


def test_tokens_may_come_from_the_device():
    """They are put where the graph reads them, before the padding."""
    rig = Rig.of()
    rows = rig.rows(*range(2, 12))
    lists = decode(rows)
    expected = rig.eager(lists)
    ids = torch.tensor(lists.input_ids)
    unknown = attrs.evolve(lists, input_ids=[0] * 10)

    for _ in range(2):
        logits = rig.runner.run(unknown, input_ids=ids)
        assert logits is not None
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_all_buckets_are_captured_ahead():
    """Then no step runs eagerly, and the cache is untouched but for the null block."""
    rig = Rig.of(max_num_seqs=20)

    rig.runner.capture_ahead()

    assert rig.runner.stats.captured == (1, 2, 3, 4, 5, 6, 7, 8, 16, 20)
    assert rig.runner.stats.num_bytes == 1000
    assert all(k[1:].isnan().all() for k in rig.backend._cache.k)
    assert rig.runner.run(decode(rig.rows(3, 4))) is not None
    assert not rig.runner.stats.eager


def test_capturing_ahead_takes_no_longer_than_it_may(monkeypatch):
    """What is left is captured by the first step of its size."""
    rig = Rig.of(max_num_seqs=20)
    clock = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))

    rig.runner.capture_ahead(seconds=3)

    assert rig.runner.stats.captured == (1, 2)
    assert rig.runner.run(decode(rig.rows(2, 3, 4))) is not None
    assert rig.runner.stats.captured == (1, 2, 3)


def test_no_graph_is_captured_past_the_memory_for_them():
    """Such sizes run eagerly, and say why."""
    rig = Rig.of(max_bytes=250)
    rig.runner.capture_ahead()

    assert rig.runner.stats.captured == (1, 2, 3)
    assert rig.runner.run(decode(rig.rows(2, 2, 2, 2))) is None
    [reason] = rig.runner.stats.eager
    assert "MemoryError: the graphs take 0 MiB" in reason


def test_no_graph_has_to_make_room_for_another():
    """At most 32 for any number that may run: one graph serves every length of sequences."""
    assert len(buckets(2**20)) == 25
    assert len(buckets(2**27)) == 32


def test_only_decodes_without_adapters_are_replayed():
    """Whatever else is in the pass, it runs eagerly, and the reason is counted."""
    rig = Rig.of()
    whole, last = Row(prompt(4), [1, 2]), rows_of(3)[0]

    assert rig.runner.run(lists_of([(whole, 4)])) is None
    assert rig.runner.run(lists_of([(whole, 3), (last, 1)])) is None
    assert rig.runner.run(attrs.evolve(decode([last]), logits_indices=[])) is None
    assert rig.runner.run(decode([last]), adapted=True) is None

    assert rig.runner.stats.eager == {NOT_DECODE: 3, ADAPTED: 1}
    assert not rig.graphs.made


def test_a_failing_capture_costs_the_bucket_and_not_the_step():
    """The step has been computed before; those after it are eager, other buckets are not."""
    rig = Rig.of()
    rows = rig.rows(3, 4)
    rig.graphs.fail_capture = raise_out_of_memory

    logits = rig.runner.run(decode(rows))

    assert logits is not None
    torch.testing.assert_close(logits, rig.eager(decode(rows)), atol=1e-4, rtol=0)
    rig.graphs.fail_capture = lambda: None
    assert rig.runner.run(decode(rows)) is None
    assert rig.runner.stats.disabled == {2: "RuntimeError: CUDA out of memory"}
    assert rig.runner.stats.eager == {FIRST: 1, "RuntimeError: CUDA out of memory": 1}
    assert rig.runner.run(decode(rows[:1])) is not None


@pytest.mark.parametrize("what", ["warm-up", "plan", "replay"])
def test_what_fails_before_anything_is_known_is_left_to_the_eager_step(what, caplog):
    """None is returned, the bucket is off, and a warning says so once."""
    rig = Rig.of()
    rows = rig.rows(3, 4)
    if what == "warm-up":
        rig.graphs.fail_warm_up = raise_out_of_memory
    elif what == "plan":

        def refuse(graph_size: int | None) -> None:
            if graph_size is not None:
                raise_out_of_memory()

        rig.backend.fail = refuse
    else:
        assert rig.runner.run(decode(rows)) is not None
        rig.graphs.fail_replay = raise_out_of_memory

    assert rig.runner.run(decode(rows)) is None
    assert rig.runner.run(decode(rows)) is None

    assert rig.runner.stats.disabled == {2: "RuntimeError: CUDA out of memory"}
    assert not rig.runner.stats.captured
    assert caplog.text.count("none any more for 2 sequences") == 1
    assert not rig.eager(decode(rows)).isnan().any()


def test_a_failure_while_capturing_ahead_leaves_the_other_buckets():
    """Loading goes on."""
    rig = Rig.of(max_num_seqs=4)
    left = iter([False, True, False, False])

    def fail_second() -> None:
        if next(left):
            raise_out_of_memory()

    rig.graphs.fail_capture = fail_second
    rig.runner.capture_ahead()

    assert rig.runner.stats.captured == (1, 3, 4)
    assert list(rig.runner.stats.disabled) == [2]


# Steps that other processes take part in


@pytest.mark.parametrize("what", ["warm-up", "capture", "replay"])
def test_a_failure_is_raised_where_others_take_part(what):
    """They cannot be left to wait in a graph while this process goes on without."""
    rig = Rig.of()
    rig.runner.together = True
    if what == "replay":
        rig.runner.capture(2)
        rig.graphs.fail_replay = raise_out_of_memory
        with pytest.raises(RuntimeError, match="out of memory"):
            rig.runner.run(decode(rig.rows(3, 4)))
        assert rig.runner.stats.replayed == 0
        return
    setattr(rig.graphs, f"fail_{what.replace('-', '_')}", raise_out_of_memory)

    with pytest.raises(RuntimeError, match="out of memory"):
        rig.runner.capture(2)


def test_what_was_not_captured_by_all_runs_eagerly_on_all():
    """Nothing is captured any more once that is finished, and the reason is counted."""
    rig = Rig.of(max_num_seqs=4)
    rows = rig.rows(3, 4, 5)
    rig.runner.capture(1)
    rig.runner.capture(2)

    rig.runner.finish("no room")

    assert rig.runner.run(decode(rows[:2])) is not None
    assert rig.runner.run(decode(rows)) is None
    assert rig.runner.stats.captured == (1, 2)
    assert rig.runner.stats.disabled == {3: "no room", 4: "no room"}
    assert rig.runner.stats.eager == {"no room": 1}


def test_cleared_graphs_are_captured_anew():
    """After the weights changed, say; what had failed is tried again."""
    rig = Rig.of()
    rows = rig.rows(3)
    rig.runner.run(decode(rows))
    rig.graphs.fail_replay = raise_out_of_memory
    rig.runner.run(decode(rows))

    rig.runner.clear()

    assert rig.runner.run(decode(rows)) is not None
    assert rig.runner.stats.captured == (1,)
    assert not rig.runner.stats.disabled


def test_the_stats_read_as_a_sentence():
    """For `describe()`."""
    rig = Rig.of()
    rows = rig.rows(3, 4)
    rig.runner.run(decode(rows))
    rig.runner.run(decode(rows))
    rig.graphs.fail_capture = raise_out_of_memory
    rig.runner.run(decode(rows[:1]))

    assert str(rig.runner.stats) == (
        f"1 steps replayed, captured for 2; 2 eager: {FIRST}; "
        "none for 1: RuntimeError: CUDA out of memory"
    )
