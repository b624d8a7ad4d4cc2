"""The prefix cache without paging: what is found, what replaces what, what goes first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mistralrs_sdk.engine.whole_prefix_cache import WholePrefixCache


def test_the_least_recently_used_prefix_goes_first():
    """True LRU: a hit makes an entry the newest."""
    cache = WholePrefixCache(2)
    cache.put(b"", [1, 2, 3], lambda: "a")
    cache.put(b"", [4, 5, 6], lambda: "b")
    assert cache.find(b"", [1, 2, 9]) == ("a", 2)
    cache.put(b"", [7, 8, 9], lambda: "c")
    assert cache.find(b"", [4, 5, 6]) is None
    assert cache.find(b"", [1, 2, 3, 4]) == ("a", 3)
    assert cache.num_evictions == 1


def test_kept_caches_hold_no_more_tokens_than_allowed():
    """Tokens are memory: old ones go until the new one fits, and what never fits is not kept."""
    cache = WholePrefixCache(8, max_tokens=6)
    cache.put(b"", [1, 2, 3], lambda: "a")
    cache.put(b"", [4, 5, 6], lambda: "b")
    cache.put(b"", [7, 8], lambda: "c")
    assert (len(cache), cache.num_evictions) == (2, 1)
    assert cache.find(b"", [1]) is None
    cache.put(b"", [9, 8, 7, 6, 5, 4, 3], lambda: pytest.fail("made for nothing"))
    assert (len(cache), cache.num_evictions) == (2, 1)


def test_the_longest_shared_prefix_wins_and_roots_do_not_mix():
    """Entries are compared token by token, within one root."""
    cache = WholePrefixCache(8)
    cache.put(b"x", [1, 2, 3, 4, 5], lambda: "five")
    cache.put(b"x", [1, 2, 9], lambda: "nine")
    cache.put(b"y", [1, 2, 3, 4, 6], lambda: "other")
    assert cache.find(b"x", [1, 2, 3, 4, 6]) == ("five", 4)
    assert cache.find(b"x", [1, 2, 9, 9]) == ("nine", 3)
    assert cache.find(b"y", [1, 2]) == ("other", 2)
    assert cache.find(b"z", [1, 2]) is None
    assert cache.find(b"x", [2, 1]) is None


def test_an_entry_that_another_covers_takes_no_place():
    """A longer one replaces what it begins with; a shorter or equal one is not stored again."""
    cache = WholePrefixCache(2)
    cache.put(b"", [1], lambda: "one")
    cache.put(b"", [1, 2], lambda: "two")
    cache.put(b"", [8], lambda: "eight")
    assert len(cache) == 2
    cache.put(b"", [1, 2], lambda: pytest.fail("it is there"))
    cache.put(b"", [1], lambda: pytest.fail("a longer one is there"))
    cache.put(b"", [9], lambda: "nine")
    assert cache.num_evictions == 1
    assert cache.find(b"", [1, 2, 3]) == ("two", 2)
    assert cache.find(b"", [8]) is None


def test_what_cannot_be_made_is_not_kept():
    """A cache there is no memory for leaves the others in place."""
    cache = WholePrefixCache(2)
    cache.put(b"", [1, 2], lambda: "a")
    cache.put(b"", [3, 4], lambda: None)
    assert cache.find(b"", [3, 4]) is None
    assert cache.find(b"", [1, 2]) == ("a", 2)


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


@settings(max_examples=200, deadline=None)
@given(entries=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=9))
def test_a_cache_large_enough_finds_the_longest_prefix_of_all(entries):
    """What dropping covered entries leaves serves as well as keeping them all."""
    cache = WholePrefixCache(100)
    for entry in entries:
        cache.put(b"", entry, lambda entry=entry: tuple(entry))
    for tokens in entries:
        query = [*tokens, 0, 1]
        value, shared = cache.find(b"", query)
        best = max(shared_length(entry, query) for entry in entries)
        assert shared == best
        assert list(value[:shared]) == query[:shared]
