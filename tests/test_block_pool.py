"""The block pool: ownership, sharing, eviction."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mistralrs_sdk.engine.block_pool import BlockPool
from mistralrs_sdk.engine.prefix_cache import block_hash, root_hash


def test_the_null_block_is_never_handed_out():
    """Block 0 is reserved: a pool of N blocks owns N - 1."""
    pool = BlockPool(5, 8)
    blocks = pool.allocate(pool.num_free)
    assert sorted(blocks) == [1, 2, 3, 4]


def test_a_freed_block_is_found_again_until_it_is_reused():
    """Freeing keeps the content; handing the block out again evicts it."""
    pool = BlockPool(3, 4)
    (first,) = pool.allocate(1)
    key = block_hash(b"", [1, 2, 3, 4])
    pool.register(first, key)
    pool.release([first])
    assert pool.find_prefix([key]) == [first]
    pool.allocate(2)
    assert pool.find_prefix([key]) == []
    assert pool.num_evictions == 1


def test_the_longest_free_block_is_reused_first_and_the_tail_before_the_head():
    """Eviction is least recently freed first; of one sequence the last block goes first."""
    pool = BlockPool(4, 4)
    head, tail = pool.allocate(2)
    pool.release([head, tail])
    assert pool.allocate(3) == [3, tail, head]


def test_a_shared_block_is_free_when_its_last_owner_lets_go():
    """References are counted per owner."""
    pool = BlockPool(3, 4)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2
    pool.check([])


def test_hashes_depend_on_the_whole_prefix_and_the_identity():
    """The same tokens after another prefix, or under another identity, are another block."""
    tokens = [5, 6, 7, 8]
    a, b = block_hash(b"", [1, 2, 3, 4]), block_hash(b"", [1, 2, 3, 5])
    assert block_hash(a, tokens) != block_hash(b, tokens)
    assert root_hash(adapter="x") != root_hash(salt="x")
    assert root_hash(model=1, salt="a") == root_hash(salt="a", model=1)


def test_token_ids_are_hashed_at_full_width():
    """Ids that differ only above 32 bits, or that spell alike when joined, do not collide."""
    assert block_hash(b"", [1]) != block_hash(b"", [1 + 2**32])
    assert block_hash(b"", [1, 23]) != block_hash(b"", [12, 3])


def test_check_sees_a_leaked_block():
    """`check` compares the pool with what the owners say they own."""
    pool = BlockPool(4, 4)
    pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.check([[1]])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_invariants_hold_under_any_sequence_of_operations(operations):
    """Free, owned and null blocks always add up, whatever happens to them."""
    pool = BlockPool(9, 4)
    owners: list[list[int]] = []
    for kind, number in operations:
        if kind == 0 and pool.num_free >= number:
            owners.append(pool.allocate(number))
        elif kind == 1 and owners:
            pool.release(owners.pop(number % len(owners)))
        elif kind == 2 and owners:
            for i, block in enumerate(owners[number % len(owners)]):
                pool.register(block, block_hash(b"", [number, i]))
        elif kind == 3:
            hits = pool.find_prefix([block_hash(b"", [number, i]) for i in range(3)])
            pool.share(hits)
            owners.append(hits)
        pool.check(owners)
        assert pool.num_used + pool.num_free == pool.num_usable
    for owner in owners:
        pool.release(owner)
    pool.check([])
    assert pool.num_free == pool.num_usable
