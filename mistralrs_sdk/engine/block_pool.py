"""The pool of KV blocks: who owns them, which are free, and which still hold a known prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0
"""Never handed out: padded rows write to it."""


class BlockPool:
    """Blocks by number, with reference counts, prefix hashes and an LRU free list.

    A free block keeps its hash and content until it is handed out again, so a later request with
    the same prefix can take it back. Only full blocks are ever shared, so none is written twice.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs a null block and one more, not {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self._ref_counts = [0] * num_blocks
        self._ref_counts[NULL_BLOCK] = 1
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that can be owned: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks nobody owns, whether or not they hold a known prefix."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks, owned or free, that a later request could share."""
        return len(self._hash_of)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, the longest free first. The caller has checked `num_free`."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def find_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks that hold the longest known prefix of this chain of hashes."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_free(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` come off the free list when they are shared."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Become one more owner of each of `blocks`."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def register(self, block: int, block_hash: bytes) -> None:
        """Let later requests find the full block under its hash; the first holder stays."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one ownership of each block; the tail becomes reusable before the head."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None

    def clear_prefixes(self) -> None:
        """Forget every hash: nothing that was computed so far is found again."""
        self._hash_of.clear()
        self._block_of.clear()

    def check(self, owned: Iterable[Sequence[int]]) -> None:
        """Verify every invariant against the block lists of all owners; for tests.

        Raises:
            AssertionError: naming what does not add up.
        """
        counts = [0] * self.num_blocks
        counts[NULL_BLOCK] = 1
        for blocks in owned:
            assert len(set(blocks)) == len(blocks), f"an owner holds a block twice: {blocks}"
            for block in blocks:
                counts[block] += 1
        assert counts == self._ref_counts, "reference counts differ from the owners' lists"
        free = set(self._free)
        unowned = {block for block, count in enumerate(counts) if count == 0}
        assert free == unowned, f"free list and unowned blocks differ: {free ^ unowned}"
        assert NULL_BLOCK not in self._hash_of, "the null block has a hash"
        assert {h: b for b, h in self._hash_of.items()} == self._block_of, "hash tables disagree"

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            self.num_evictions += 1
