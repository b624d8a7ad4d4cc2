"""The prefix cache without paging: whole caches of ended sequences, the most recently used ones."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import attrs

T = TypeVar("T")

_ID_BYTES = 8


@attrs.frozen(eq=False)
class _Entry(Generic[T]):
    root: bytes
    ids: bytes
    value: T


class WholePrefixCache(Generic[T]):
    """Keeps the `size` most recently used caches, whatever a cache is, by root and token ids.

    Together they hold at most `max_tokens` tokens, each with its keys and values; None: no limit.

    A root stands for everything besides the tokens that decides the keys and values. Finding an
    entry makes it the newest, like storing it. An entry that a longer one of the same root begins
    with is dropped: whatever it could serve, the longer one serves as well. So a conversation of
    ten turns takes one place.
    """

    def __init__(self, size: int, *, max_tokens: int | None = None) -> None:
        self.size = size
        self.max_tokens = max_tokens
        self.num_evictions = 0
        """Entries that had to go to make room."""
        self._entries: list[_Entry[T]] = []
        """The least recently used first."""

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, root: bytes, tokens: Sequence[int]) -> tuple[T, int] | None:
        """The cache that shares most leading tokens with `tokens`, and how many it shares.

        Among equals the most recently used; None if nothing is shared.
        """
        ids = _pack(tokens)
        best, shared = None, 0
        for entry in reversed(self._entries):
            if entry.root == root and (count := _shared_tokens(entry.ids, ids)) > shared:
                best, shared = entry, count
        if best is None:
            return None
        self._refresh(best)
        return best.value, shared

    def put(self, root: bytes, tokens: Sequence[int], make_value: Callable[[], T | None]) -> None:
        """Keep what `make_value` returns under `tokens`, and let the least recently used go.

        If an entry covers all of the tokens already, it only becomes the newest. None is not kept,
        nor is what alone is over the limit.
        """
        ids = _pack(tokens)
        same_root = [entry for entry in self._entries if entry.root == root]
        for entry in same_root:
            if entry.ids.startswith(ids):
                self._refresh(entry)
                return
        if self.max_tokens is not None and len(tokens) > self.max_tokens:
            return
        for entry in same_root:
            if ids.startswith(entry.ids):
                self._entries.remove(entry)
        while len(self._entries) >= self.size or self._is_over_with(len(tokens)):
            del self._entries[0]
            self.num_evictions += 1
        value = make_value()  # after the others went: it may need their memory
        if value is not None:
            self._entries.append(_Entry(root, ids, value))

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def _is_over_with(self, num_tokens: int) -> bool:
        """Whether that many tokens more would be too many."""
        kept = sum(len(entry.ids) for entry in self._entries) // _ID_BYTES
        return self.max_tokens is not None and kept + num_tokens > self.max_tokens

    def _refresh(self, entry: _Entry[T]) -> None:
        self._entries.remove(entry)
        self._entries.append(entry)


def _pack(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()


def _shared_tokens(a: bytes, b: bytes) -> int:
    """How many leading token ids are equal, by bisection."""
    low, high = 0, min(len(a), len(b)) // _ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        # What stands before `low` is equal already.
        span = slice(low * _ID_BYTES, middle * _ID_BYTES)
        if a[span] == b[span]:
            low = middle
        else:
            high = middle - 1
    return low
