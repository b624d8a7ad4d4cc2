"""Dense caches: attention against the paged backend, what is copied when, what is freed."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mistralrs_sdk.attention import sdpa
from mistralrs_sdk.attention.backend import AttentionSpec, Batch
from mistralrs_sdk.attention.dense import DenseSdpaBackend
from mistralrs_sdk.attention.kv_cache import DenseKVCache, PagedKVCache
from mistralrs_sdk.attention.sdpa import SdpaBackend

SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=8, scale=0.3)
SPECS = {
    "plain": SPEC,
    "one kv head": attrs.evolve(SPEC, num_kv_heads=1),
    "no groups": attrs.evolve(SPEC, num_kv_heads=6),
    "window": attrs.evolve(SPEC, window=5),
    "softcap": attrs.evolve(SPEC, softcap=2.0),
    "both": attrs.evolve(SPEC, window=5, softcap=2.0),
}
BLOCK = 2048


def make_batch(parts: list[tuple[int, int, int]]) -> Batch:
    """A step of (sequence id, tokens before, new tokens), for either backend.

    The paged one keeps each sequence in the one block that its id names.
    """
    starts, slots = [0], []
    for sequence_id, before, new in parts:
        slots += range(sequence_id * BLOCK + before, sequence_id * BLOCK + before + new)
        starts.append(starts[-1] + new)
    return Batch(
        input_ids=torch.zeros(starts[-1], dtype=torch.int64),
        positions=torch.zeros(starts[-1], dtype=torch.int64),
        slot_mapping=torch.tensor(slots),
        logits_indices=torch.tensor(starts[1:]) - 1,
        query_start=starts,
        seq_lens=[before + new for _, before, new in parts],
        block_tables=[[sequence_id] for sequence_id, _, _ in parts],
    )


@attrs.define
class Pair:
    """A dense and a paged backend that are fed the same steps and must agree."""

    spec: AttentionSpec = SPEC
    num_layers: int = 2
    dtype: torch.dtype = torch.float32
    lengths: dict[int, int] = attrs.field(factory=dict)
    generator: torch.Generator = attrs.field(init=False)
    dense: DenseKVCache = attrs.field(init=False)
    backend: DenseSdpaBackend = attrs.field(init=False)
    paged: SdpaBackend = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        specs = [self.spec] * self.num_layers
        self.generator = torch.Generator().manual_seed(0)
        self.dense = DenseKVCache(specs, dtype=self.dtype, device="cpu")
        self.backend = DenseSdpaBackend(self.dense)
        cache = PagedKVCache(specs, num_blocks=40, block_size=BLOCK, dtype=self.dtype, device="cpu")
        self.paged = SdpaBackend(cache)

    @torch.inference_mode()
    def step(self, new: dict[int, int], *, atol: float = 1e-5) -> None:
        """Compute that many new tokens of each sequence with both."""
        batch = make_batch([(i, self.lengths.get(i, 0), count) for i, count in new.items()])
        for backend in (self.backend, self.paged):
            backend.plan(batch)
        for layer in range(self.num_layers):
            heads = (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads)
            q, k, v = (
                torch.randn(
                    batch.query_start[-1], n, self.spec.head_dim, generator=self.generator
                ).to(self.dtype)
                for n in heads
            )
            ours, theirs = (b.run(self.spec, layer, q, k, v) for b in (self.backend, self.paged))
            assert ours.shape == q.shape
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)
        for sequence_id, count in new.items():
            self.lengths[sequence_id] = self.lengths.get(sequence_id, 0) + count

    def free(self, *ids: int) -> None:
        self.dense.free(ids)
        for sequence_id in ids:
            del self.lengths[sequence_id]

    def tensors(self) -> set[int]:
        """The storages of all caches that live."""
        return {k.data_ptr() for batch, _ in self.dense._places.values() for k in batch.k}


@pytest.mark.parametrize("name", SPECS)
def test_attention_equals_the_paged_backend(name):
    """Prompts of one and of several lengths, decodes of equal and of other lengths, all mixed."""
    pair = Pair(SPECS[name])
    pair.step({1: 7, 2: 7, 3: 7})
    pair.step({3: 1, 1: 1, 2: 1})
    pair.step({4: 8, 1: 1, 5: 30, 2: 1, 6: 8})
    pair.step({1: 1, 2: 1, 4: 1, 6: 1, 5: 1, 3: 2})
    pair.step({6: 3, 5: 1, 4: 3})


@pytest.mark.parametrize("name", ["plain", "both"])
def test_long_prompts_run_in_tiles(name, monkeypatch):
    """Cutting the query rows of several prompts changes nothing."""
    monkeypatch.setattr(sdpa, "TILE_ROWS", 16)
    pair = Pair(SPECS[name])
    pair.step({1: 40, 2: 40})
    pair.step({1: 33, 2: 33})


def test_half_precision_stays_half():
    """A bfloat16 cache answers bfloat16 queries."""
    Pair(dtype=torch.bfloat16).step({1: 7, 2: 7}, atol=0.05)


@torch.inference_mode()
def test_equal_decodes_are_one_call_per_layer(monkeypatch):
    """Thirty-two decodes of one length: one kernel call a layer; so are prompts of one length."""
    pair = Pair()
    pair.step({i: 7 for i in range(1, 33)})
    calls = []
    monkeypatch.setattr(
        sdpa.functional, "scaled_dot_product_attention", lambda q, *_, **__: calls.append(1) or q
    )
    for batch in (
        make_batch([(i, 7, 1) for i in range(1, 33)]),
        make_batch([(i, 0, 9) for i in range(40, 50)]),
    ):
        calls.clear()
        pair.backend.plan(batch)
        for layer in range(2):
            rows = batch.query_start[-1]
            pair.backend.run(SPEC, layer, *(torch.zeros(rows, n, 8) for n in (6, 2, 2)))
        assert len(calls) == 2


def test_nothing_is_copied_while_the_same_sequences_run():
    """Also in another order, and when two such sets alternate."""
    pair = Pair()
    pair.step({1: 7, 2: 7, 3: 7, 4: 9, 5: 9})
    before = pair.tensors()
    for _ in range(5):
        pair.step({1: 1, 2: 1, 3: 1})
        pair.step({5: 1, 4: 1})
        pair.step({2: 1, 3: 1, 1: 1})
        assert pair.tensors() == before


def test_a_cache_grows_by_512_tokens():
    """A prompt of 510 takes 512; the third token after it takes as much again."""
    pair = Pair(num_layers=1)
    per_token = 2 * 2 * 8 * 4
    pair.step({1: 510, 2: 510})
    for _ in range(2):
        pair.step({1: 1, 2: 1})
        assert pair.dense.num_bytes == 2 * 512 * per_token
    pair.step({1: 1, 2: 1})
    assert pair.dense.num_bytes == 2 * 1024 * per_token
    pair.step({1: 1, 2: 1})


def test_memory_is_freed_when_sequences_end():
    """Half of a batch gone: half of its memory at least; all gone: nothing is left."""
    pair = Pair()
    pair.step({i: 7 for i in range(1, 9)})
    full = pair.dense.num_bytes
    pair.free(2, 5, 8, 1)
    assert pair.dense.num_bytes <= full // 2
    pair.step({3: 1, 4: 1, 6: 1, 7: 1})
    pair.free(3, 4, 6, 7)
    assert pair.dense.num_bytes == 0
    assert not pair.dense.owners
    pair.dense.free([3, 99])


@pytest.mark.parametrize("length", [9, 5, 1])
def test_a_kept_cache_is_cloned_and_trimmed(length):
    """Two sequences start from one kept cache and write what they like; it stays as it was."""
    pair = Pair()
    pair.step({1: 7, 2: 7})
    pair.step({1: 1, 2: 1})
    pair.step({1: 1, 2: 1})
    kept = pair.dense.keep(1, 9)
    assert [k.shape[:2] for k in kept.k] == [(1, 9), (1, 9)]
    copies = [x.clone() for x in (*kept.k, *kept.v)]
    pair.free(1)
    for sequence_id in (3, 4):
        pair.dense.start_from(sequence_id, kept)
        pair.lengths[sequence_id] = length
        for layer in range(2):  # the paged backend's copy of it
            for store in (pair.paged._cache.k[layer], pair.paged._cache.v[layer]):
                store[sequence_id, :length] = store[1, :length]
    pair.step({3: 4, 4: 4})
    pair.step({3: 1})
    pair.step({4: 1, 3: 1})
    pair.step({2: 1})
    for ours, copy in zip((*kept.k, *kept.v), copies, strict=True):
        assert torch.equal(ours, copy)


def test_without_memory_nothing_is_kept(monkeypatch):
    """Keeping a cache saves time later; that it fails must not stop the engine."""

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    pair = Pair()
    pair.step({1: 7})
    monkeypatch.setattr(torch, "empty", fail)
    assert pair.dense.keep(1, 7) is None


def test_a_graph_is_refused():
    """A cache that moves cannot be captured."""
    with pytest.raises(ValueError, match=r"DenseSdpaBackend.*graph_size 8"):
        Pair().backend.plan(make_batch([(1, 0, 3)]), graph_size=8)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_regrouping_keeps_every_sequence_intact(data):
    """Sets of sequences that come, meet, part and end in any order."""
    pair = Pair(num_layers=1)
    fresh = iter(range(1, 40))
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["prompts", "some", "some", "end"]))
        alive = sorted(pair.lengths)
        if kind == "prompts" or not alive:
            count = data.draw(st.integers(1, 3))
            pair.step({next(fresh): data.draw(st.integers(1, 4)) for _ in range(count)})
            continue
        some = data.draw(st.lists(st.sampled_from(alive), min_size=1, unique=True))
        if kind == "end":
            pair.free(*some)
        else:
            pair.step(dict.fromkeys(some, data.draw(st.integers(1, 2))))
        assert set(pair.dense.owners) == set(pair.lengths)
        for batch, row in pair.dense._places.values():
            assert batch.members[row] in pair.lengths
            assert len(batch.members) <= batch.num_rows
            assert 2 * len(batch.members) > batch.num_rows
