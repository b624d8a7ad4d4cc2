"""What `kernels.py` compares: ways to do one thing, and copies of what they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

Calls = Sequence[Callable[[], object]]

COLD_BYTES = 96 << 20
"""What one way reads before it reads the same again: several times what a cache holds."""
MOST_COPIES = 192


@attrs.frozen(kw_only=True)
class Method:
    """A way to do it: a call for each copy of what it reads."""

    name: str
    calls: Calls
    num_bytes: int = 0
    """That a call must read and write at least; 0 if the time is not in the memory."""
    operations: int = 0
    """A multiplication and an addition are two; 0 if nobody counted."""
    floats: bool = True
    """Whether it multiplies floats."""
    peer: bool = False
    """Whether it is what native kernels are compared with."""


@attrs.frozen(kw_only=True)
class Case:
    """One thing that a kernel does, by all who do it."""

    name: str
    methods: Sequence[Method]


def beside_torch(name: str, native: Calls, peer: Calls, *, num_bytes: int = 0) -> Case:
    """A kernel and the same in torch; both read and write as much."""
    return Case(
        name=name,
        methods=[
            Method(name="native", calls=native, num_bytes=num_bytes),
            Method(name="torch", calls=peer, num_bytes=num_bytes, peer=True),
        ],
    )


def num_copies(num_bytes: int) -> int:
    """How many copies of so many bytes no cache holds; of small things some."""
    return min(MOST_COPIES, 1 + COLD_BYTES // num_bytes)
