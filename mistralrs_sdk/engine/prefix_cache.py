"""The keys of the prefix cache: one hash per full block, chained from the start of the sequence."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from mistralrs_sdk.engine.request import Request
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence


def root_hash(**identity: str | int) -> bytes:
    """Hash everything that besides the tokens decides the keys and values, by field name.

    Two identities never share a block, whatever their values spell.
    """
    fields = sorted(identity.items())
    return hashlib.sha256(repr(fields).encode()).digest()


def identity_of(request: Request) -> dict[str, str]:
    """What a request adds to the identity of its model: its cache salt, its adapter's weights."""
    own: dict[str, str] = {}
    if request.cache_salt is not None:
        own["salt"] = request.cache_salt
    if request.adapter is not None:
        own["adapter"] = request.adapter.generation
    return own


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """SHA-256 of the parent block's hash and this block's token ids, at full width.

    Equal hashes mean equal prefixes: nobody can find two that collide, so a foreign prefix is
    never served, not even on purpose.
    """
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


def extend_block_hashes(
    sequence: EngineSequence, *, num_blocks: int, block_size: int
) -> list[bytes]:
    """Hash the sequence's blocks up to `num_blocks`, keeping what is known; return those hashes."""
    hashes = sequence.block_hashes
    for i in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else sequence.root
        hashes.append(block_hash(parent, sequence.tokens[i * block_size : (i + 1) * block_size]))
    return hashes[:num_blocks]
