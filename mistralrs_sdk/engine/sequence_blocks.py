"""Which blocks each sequence of the paged scheduler holds, and which of them it shares."""

from __future__ import annotations

from mistralrs_sdk.engine.block_pool import BlockPool
from mistralrs_sdk.engine.prefix_cache import extend_block_hashes
from mistralrs_sdk.engine.sequence import Sequence


class SequenceBlocks:
    """Gives sequences their blocks and takes them back; full ones stay as prefixes of others."""

    def __init__(self, pool: BlockPool, *, prefix_caching: bool) -> None:
        self.pool = pool
        self.num_lookups = 0
        """Sequences that were looked up in the prefix cache so far, each once in its life."""
        self.num_hits = 0
        """How many of them found something there."""
        self._prefix_caching = prefix_caching
        self._computing: dict[bytes, int] = {}
        """The blocks that running prompts will leave in the prefix cache, and whose they are."""

    def take(self, sequence: Sequence, *, num_running: int) -> bool:
        """Give a sequence blocks for all its tokens, if it and all that run can then have one more.

        What the prefix cache holds is shared and counts as computed. False changes nothing.
        """
        hits = self._find_prefix(sequence)
        length = len(sequence)
        needed = self.pool.blocks_for(length + 1 if num_running else length) - len(hits)
        if needed + self.pool.count_free(hits) + num_running > self.pool.num_free:
            return False
        needed = self.pool.blocks_for(length) - len(hits)
        self.pool.share(hits)
        sequence.blocks = hits + self.pool.allocate(needed)
        sequence.num_computed_tokens = len(hits) * self.pool.block_size
        sequence.num_cached_blocks = len(hits)
        sequence.failed_admissions = 0
        if sequence.cached_tokens is None:  # counted once in a sequence's life
            sequence.cached_tokens = sequence.num_computed_tokens
            self.num_lookups += self._uses_prefixes(sequence)
            self.num_hits += bool(hits)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Own a block for every token of the sequence; False changes nothing: too few are free."""
        if len(sequence.tokens) <= len(sequence.blocks) * self.pool.block_size:
            return True
        missing = self.pool.blocks_for(len(sequence)) - len(sequence.blocks)
        if missing > self.pool.num_free:
            return False
        sequence.blocks += self.pool.allocate(missing)
        return True

    def release(self, sequence: Sequence) -> None:
        """Take back all blocks of a sequence; nobody waits for its prefix any more."""
        for block_hash in sequence.block_hashes[sequence.num_cached_blocks :]:
            if self._computing.get(block_hash) == sequence.id:
                del self._computing[block_hash]
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def announce(self, sequence: Sequence) -> None:
        """A prompt begins to run: others may wait for the prefix it will leave."""
        if self._uses_prefixes(sequence):
            for block_hash in self._prefix_hashes(sequence)[sequence.num_cached_blocks :]:
                self._computing.setdefault(block_hash, sequence.id)

    def is_being_computed(self, sequence: Sequence) -> bool:
        """Whether a running prompt computes the next block that the sequence could share."""
        if not self._computing or not self._uses_prefixes(sequence):
            return False
        hashes = self._prefix_hashes(sequence)
        known = len(self.pool.find_prefix(hashes))
        return known < len(hashes) and hashes[known] in self._computing

    def cache_full(self, sequence: Sequence) -> None:
        """Let others find the blocks that a step has filled."""
        full = sequence.num_computed_tokens // self.pool.block_size
        if full <= sequence.num_cached_blocks or not self._uses_prefixes(sequence):
            return
        hashes = extend_block_hashes(sequence, num_blocks=full, block_size=self.pool.block_size)
        for i in range(sequence.num_cached_blocks, full):
            self.pool.register(sequence.blocks[i], hashes[i])
            self._computing.pop(hashes[i], None)
        sequence.num_cached_blocks = full

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        if not self._uses_prefixes(sequence):
            return []
        hits = self.pool.find_prefix(self._prefix_hashes(sequence))
        for first, last in reversed(sequence.request.unsplittable):
            if first < len(hits) * self.pool.block_size < last:
                hits = hits[: first // self.pool.block_size]
        return hits

    def _prefix_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hash the blocks a prefix may cover: not the last token, whose logits are needed."""
        size = self.pool.block_size
        return extend_block_hashes(
            sequence, num_blocks=(len(sequence) - 1) // size, block_size=size
        )

    def _uses_prefixes(self, sequence: Sequence) -> bool:
        request = sequence.request
        return self._prefix_caching and request.use_prefix_cache and not request.raw_logits
