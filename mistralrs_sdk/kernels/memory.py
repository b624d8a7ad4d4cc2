"""Memory for what is read over and over: in huge pages, where the system has them."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

PAGE = 2 << 20
"""Bytes of a huge page, or a multiple of them."""
CHUNK = 8 << 20
"""Bytes of a mapping that tensors share; one of half that size or more has its own."""

_ALIGNMENT = 64
"""Of each tensor, in bytes: torch's."""
_lock = threading.Lock()


def reserve(num_bytes: int) -> Tensor:
    """Memory for a weight: uint8 [num_bytes], aligned as torch's, its content undefined.

    A step of one sequence reads each weight once. From pages of 4 KiB a core reads at half its
    speed: it must translate the address of each, and does not look ahead beyond its end.

    Memory is given back to the system when all tensors of a mapping are gone.

    Raises: MemoryError.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes >= CHUNK // 2:
        mapping, start = _map(num_bytes)
        return _part(mapping, start, num_bytes)
    with _lock:
        mapping, start = _shared.mapping(), _shared.used
        if mapping is None or start + num_bytes > _shared.end:
            mapping, start = _map(CHUNK)
            _shared.mapping, _shared.end = weakref.ref(mapping), start + CHUNK
        _shared.used = start + (num_bytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        return _part(mapping, start, num_bytes)


@attrs.define(eq=False)
class _Shared:
    """The mapping that the next small tensor goes into, unless its tensors are gone."""

    mapping: Callable[[], mmap.mmap | None] = lambda: None
    used: int = 0
    end: int = 0


_shared = _Shared()


def _map(num_bytes: int) -> tuple[mmap.mmap, int]:
    """New memory, not touched so far, and how far into it the first whole huge page begins."""
    try:
        mapping = mmap.mmap(-1, num_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for a weight of {num_bytes} bytes") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages: it is memory all the same
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % PAGE


def _part(mapping: mmap.mmap, start: int, num_bytes: int) -> Tensor:
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)  # frombuffer refuses that
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=num_bytes)
